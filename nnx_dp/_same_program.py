"""Whether traces are of one program: of a step on one row and on two, and with padding and without.

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


def same_program(jaxprs: Sequence[Any], constants: Sequence[Sequence[Any]]) -> bool:
    """Compares a step at one row a device with the step at two.

    Args:
      jaxprs: the step on one device of N at one row, and at two; on one device alone at N rows, and
        at 2 N.
      constants: for each of them, the values of the arrays that it closes over.

    Returns:
      Whether the first two do the same operations, and each number in them that depends on the
      batch size grows from one row to two as it grows from N to 2 N.
    """
    first, second, third, fourth = ([*_operations(jaxpr)] for jaxpr in jaxprs)
    if [step[:2] for step in first] != [step[:2] for step in second]:
        return False
    closed_over = all(_in_step(values) for values in zip(*constants, strict=False))
    names = [step.name for step in second]
    if any([step.name for step in steps] != names for steps in (third, fourth)):
        return closed_over  # Devices and the whole are compared elsewhere.
    return closed_over and all(
        _in_step(values)
        for steps in zip(first, second, third, fourth, strict=True)
        for values in zip(*(step.numbers for step in steps), strict=False)
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


def _in_step(numbers: Sequence[Any]) -> bool:
    if any(number is None for number in numbers):
        return (numbers[0] is None) == (numbers[1] is None)
    try:
        values = [np.asarray(number) for number in numbers]
    except TypeError:  # a typed random key
        return True
    if len({value.shape for value in values}) > 1 or values[0].dtype.kind not in "iufb":
        return True  # Rows, or no numbers.
    one, two, few, many = (value.astype(np.float64) for value in values)
    return any(
        _close(one * math.pow(2, power), two) and _close(few * math.pow(2, power), many)
        for power in (0, 1, -1, 2, -2, 0.5, -0.5)
    )


def _close(first: Any, second: Any) -> bool:
    return np.allclose(first, second, rtol=1e-5, atol=0, equal_nan=True)


def _same_number(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return (first is None) == (second is None)
    return np.shape(first) != np.shape(second) or bool(np.all(np.equal(first, second)))
