"""Whether a step does on one row what it does on two, and with padding what without.

A plan is read off the step at two rows a device where there is only one, since axes of size one
broadcast, which hides what they are.  That is of use only if the step at one row is the same
program: it might squeeze the axis away, or divide by ``len(x) - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnx_dp._jaxpr import Literal, open_jaxpr, sub_jaxprs

_SHAPE_ONLY = frozenset(
    {"broadcast_in_dim", "copy", "expand_dims", "reduce_sum", "reshape", "squeeze"}
)
"""What differs between one row and two in any program, because the one is broadcast, and what was
broadcast is summed in the backward pass.  A sum over other axes shows in the ranks of what follows.
"""


class _Operation(NamedTuple):
    """What is compared of an equation: its name, the ranks of its values, and its numbers."""

    name: str
    ranks: tuple[int, ...]
    numbers: tuple[Any, ...]


def same_program(
    one: Any, two: Any, whole: Any, constants: Sequence[Sequence[Any]], devices: int
) -> bool:
    """Compares a step at one row a device with the step at two, and at two for each of N.

    Args:
      one, two, whole: the jaxprs.
      constants: for each of them, the values of the arrays that it closes over.
      devices: N.

    Returns:
      Whether the first two do the same operations, and each number in them that depends on the
      batch size does so by the same power from one row to two as from two to the whole.
    """
    first, second, third = [*_operations(one)], [*_operations(two)], [*_operations(whole)]
    if [step[:2] for step in first] != [step[:2] for step in second]:
        return False
    closed_over = all(_in_step(a, b, c, devices) for a, b, c in zip(*constants, strict=False))
    if [step.name for step in second] != [step.name for step in third]:
        return closed_over  # Two and the whole are compared elsewhere.
    return closed_over and all(
        _in_step(*values, devices=devices)
        for one_, two_, whole_ in zip(first, second, third, strict=True)
        for values in zip(one_.numbers, two_.numbers, whole_.numbers, strict=False)
    )


def same_numbers(first: Any, second: Any) -> bool:
    """Whether two programs do the same operations with the same numbers."""
    one, two = [*_operations(first)], [*_operations(second)]
    return [step.name for step in one] == [step.name for step in two] and all(
        _same_number(*pair)
        for steps in zip(one, two, strict=True)
        for pair in zip(*(step.numbers for step in steps), strict=False)
    )


def _operations(jaxpr: Any) -> Iterator[_Operation]:
    inner, _ = open_jaxpr(jaxpr)
    numbers: dict[Any, Any] = {}

    def number(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else numbers.get(atom)

    for eqn in inner.eqns:
        if eqn.primitive.name in _SHAPE_ONLY:
            numbers[eqn.outvars[0]] = number(eqn.invars[0])
            continue
        inside = [*sub_jaxprs(eqn)]
        for sub in inside:
            yield from _operations(sub)
        if not inside:
            ranks = (len(getattr(var.aval, "shape", ())) for var in (*eqn.invars, *eqn.outvars))
            yield _Operation(eqn.primitive.name, tuple(ranks), tuple(map(number, eqn.invars)))


def _in_step(one: Any, two: Any, whole: Any, devices: int) -> bool:
    if any(value is None for value in (one, two, whole)):
        return (one is None) == (two is None)
    try:
        values = [np.asarray(value) for value in (one, two, whole)]
    except TypeError:  # a typed random key
        return True
    if len({value.shape for value in values}) > 1 or values[0].dtype.kind not in "iuf":
        return True  # Rows, or no numbers.
    a, b, c = (value.astype(np.float64) for value in values)
    for power in (0, 1, -1, 2, -2, 0.5, -0.5):
        scales = math.pow(2, power), math.pow(devices, power)
        if np.allclose(a * scales[0], b, rtol=1e-5, atol=0, equal_nan=True) and np.allclose(
            b * scales[1], c, rtol=1e-5, atol=0, equal_nan=True
        ):
            return True
    return False


def _same_number(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return (first is None) == (second is None)
    return np.shape(first) != np.shape(second) or bool(np.all(np.equal(first, second)))
