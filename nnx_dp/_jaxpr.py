"""Reading jaxprs across the JAX releases that are supported.

JAX merged `ClosedJaxpr` into `Jaxpr`, and replaced the counts in the parameters of `scan` by
trees; both shapes are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import flax
import jax
import jax.extend as jex

Literal = jex.core.Literal

_CALLS = frozenset(
    """
    call checkpoint closed_call composite core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr eval_jaxpr jit pjit remat remat2 xla_metadata_call
    """.split()
)
"""Primitives that run the jaxpr they hold once, on their operands, and return what it returns."""

_HIDDEN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (jax.__file__, flax.__file__, __file__)
)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns the jaxpr without its closed-over constants, and those constants."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields each jaxpr among the parameters of an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield item


def call_body(eqn: Any) -> Any | None:
    """Returns the jaxpr that a call runs on its operands, None for an equation that is no call."""
    if eqn.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if body is not None and is_jaxpr(body):
            inner, _ = open_jaxpr(body)
            return body if len(inner.invars) == len(eqn.invars) else None
    return None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns how many constants and how many carried values a scan equation has."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def mapped_axes(eqn: Any) -> tuple[Any, ...]:
    """Returns the mesh axes that a collective runs over, as a flat tuple."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def user_line(eqn: Any) -> str:
    """Returns `file:line` of the innermost user frame that made an equation, "" if unknown."""
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None:
        return ""
    for frame in traceback.frames:
        if not os.path.abspath(frame.file_name).startswith(_HIDDEN):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
