"""Two matching equations: one at one device's shapes, one at the global shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nnx_dp._jaxpr import is_jaxpr, mapped_axes, open_jaxpr, sub_jaxprs
from nnx_dp._kinds.algebra import Kind, blend

Rule = Callable[["Pair", list[Kind]], list[Kind]]
"""How one primitive passes kinds on: from a pair and its operands' kinds to its outputs' kinds."""

# Parameters that hold the sizes of the output: where they differ, its shape does.
_SIZES = {"shape", "new_sizes", "slice_sizes", "limit_indices", "reps"}
# Parameters that say where values live: they name the mesh, whose size differs.
_PLACES = {"sharding", "out_sharding", "mesh", "context_mesh", "devices", "srcs"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """An equation at one device's shapes, its partner at the global shapes, and their line."""

    local: Any
    whole: Any
    devices: int
    known_line: str = ""
    shared_draws: bool = True

    @property
    def name(self) -> str:
        return self.local.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.local.params

    @property
    def line(self) -> str:
        return self.known_line or "an unknown line"

    def why(self, what: str) -> str:
        return f"{what} at {self.line} makes it no plain mean or sum over examples"

    def shape(self, operand: int) -> tuple[int, ...]:
        return self.local.invars[operand].aval.shape

    def axis(self, operand: int) -> int | None:
        """The axis on which an operand shrank; see `batch_axis`."""
        local, whole = self.local.invars[operand].aval, self.whole.invars[operand].aval
        return batch_axis(local.shape, whole.shape, self.devices)

    def out_axis(self, output: int = 0) -> int | None:
        """The axis on which an output shrank; see `batch_axis`."""
        local, whole = self.local.outvars[output].aval, self.whole.outvars[output].aval
        return batch_axis(getattr(local, "shape", ()), getattr(whole, "shape", ()), self.devices)

    def same_shapes(self) -> bool:
        return all(self.out_axis(i) is None for i in range(len(self.local.outvars)))

    def same_parameters(self, *, sizes: bool = False) -> bool:
        """Whether both do the same operation; with `sizes`, to outputs of other sizes."""
        local, whole = self.local.params, self.whole.params
        ignored = _PLACES | (_SIZES if sizes else set())
        return local.keys() == whole.keys() and all(
            equal_parameters(local[name], whole[name]) for name in local if name not in ignored
        )

    def holds(self, output: int, kind: Kind) -> bool:
        """Whether a kind fits the shapes: rows lie along the one axis that shrank."""
        if kind.tag in ("zero", "unknown"):
            return True
        return self.out_axis(output) == kind.rows_axis


def batch_axis(local: tuple[int, ...], whole: tuple[int, ...], devices: int) -> int | None:
    """The axis that shrank by the number of devices: None if equal, -1 if it is not one axis."""
    if local == whole:
        return None
    if len(local) != len(whole):
        return -1
    changed = [i for i, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
    if len(changed) != 1 or local[changed[0]] * devices != whole[changed[0]]:
        return -1
    return changed[0]


def names_axis(jaxpr: Any, axis_name: str) -> bool:
    """Whether a collective over an axis stands anywhere in a jaxpr."""
    inner, _ = open_jaxpr(jaxpr)
    return any(
        axis_name in mapped_axes(eqn) or any(names_axis(sub, axis_name) for sub in sub_jaxprs(eqn))
        for eqn in inner.eqns
    )


def mixed(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """The answer of a rule that cannot tell."""
    return [blend(kinds, pair.why(pair.name))] * len(pair.local.outvars)


def equal_parameters(first: Any, second: Any) -> bool:
    """Whether two parameters of equations are surely the same."""
    if first is second:
        return True
    if is_jaxpr(first):
        return is_jaxpr(second) and _equal_jaxprs(first, second)
    if isinstance(first, (tuple, list)):
        return type(first) is type(second) and (
            len(first) == len(second) and all(map(equal_parameters, first, second))
        )
    if isinstance(first, float) and math.isnan(first):
        return isinstance(second, float) and math.isnan(second)
    if isinstance(first, (np.ndarray, np.generic)) or hasattr(first, "__array__"):
        return _equal_arrays(first, second)
    if callable(first) and not isinstance(first, type):
        return callable(second) and _equal_functions(first, second)
    try:
        return bool(first == second)
    except (TypeError, ValueError):
        return False


def _equal_jaxprs(first: Any, second: Any) -> bool:
    (a, constants), (b, others) = open_jaxpr(first), open_jaxpr(second)
    if str(a) != str(b) or len(constants) != len(others):
        return False
    # The text of a jaxpr leaves out the values of its constants.
    inner = zip(a.eqns, b.eqns, strict=True)
    return all(map(_equal_arrays, constants, others)) and all(
        _equal_jaxprs(p, q)
        for eqn, other in inner
        for p, q in zip(sub_jaxprs(eqn), sub_jaxprs(other), strict=True)
    )


def _equal_arrays(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        a, b = np.asarray(first), np.asarray(second)
    except TypeError:  # a typed random key
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _equal_functions(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    """Whether two functions are surely the same: one code, and equal values closed over."""
    code, other = getattr(first, "__code__", None), getattr(second, "__code__", None)
    if code is None or code is not other:
        return first == second
    cells = (getattr(f, "__closure__", None) or () for f in (first, second))
    contents = [[cell.cell_contents for cell in closure] for closure in cells]
    defaults = first.__defaults__, second.__defaults__  # type: ignore[attr-defined]
    return equal_parameters(contents[0], contents[1]) and equal_parameters(*defaults)
