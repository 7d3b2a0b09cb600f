"""Kinds through primitives that move elements about: reshape, transpose, slice, pad, join, split.

All of them are linear in the values that they move, and keep a kind as it is; the question is
where the rows go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from nnx_dp._kinds import algebra
from nnx_dp._kinds.algebra import Kind, rows
from nnx_dp._kinds.pair import Pair, Rule, mixed

RowsRule = Callable[[Pair, int], int | None]
"""Says where an operation takes the batch axis, None if its examples do not stay apart."""


def moves(rows_rule: RowsRule) -> Rule:
    """A rule for a rearrangement of the first operand; any other operands say where to."""

    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        kind, *places = kinds
        if any(not place.same for place in places):
            return mixed(pair, kinds)
        if kind.tag == "rows":
            axis = rows_rule(pair, kind.rows_axis)  # type: ignore[arg-type]
            return mixed(pair, kinds) if axis is None else [rows(axis, kind.power)]
        if kind.tag in ("number", "place", "false"):
            return mixed(pair, kinds)
        return [kind]

    return rule


def _transpose(pair: Pair, axis: int) -> int | None:
    return list(pair.params["permutation"]).index(axis)


def _reshape(pair: Pair, axis: int) -> int | None:
    # Rows stay contiguous, and in order, if as many elements stand before the batch axis as after.
    out_axis = pair.out_axis()
    if out_axis is None or out_axis < 0 or pair.params.get("dimensions") is not None:
        return None
    before = math.prod(pair.shape(0)[:axis])
    return out_axis if before == math.prod(pair.local.outvars[0].aval.shape[:out_axis]) else None


def _squeeze(pair: Pair, axis: int) -> int | None:
    removed = [d % len(pair.shape(0)) for d in pair.params["dimensions"]]
    return None if axis in removed else axis - sum(d < axis for d in removed)


def _slice(pair: Pair, axis: int) -> int | None:
    params, size = pair.params, pair.shape(0)[axis]
    full = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == size
    full &= pair.whole.params["limit_indices"][axis] == size * pair.devices
    return axis if full and (params["strides"] is None or params["strides"][axis] == 1) else None


def _reverse(pair: Pair, axis: int) -> int | None:
    return None if axis in pair.params["dimensions"] else axis


def _pad(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, value = kinds
    config = pair.params["padding_config"]
    if all(entry == (0, 0, 0) for entry in map(tuple, config)):
        return [operand]
    if operand.tag == "rows":
        # The value stands in every row.
        own = tuple(config[operand.rows_axis]) == (0, 0, 0)
        fits = value.tag == "zero" or (value.tag == "same" and value.power == operand.power)
        return [operand] if own and fits else mixed(pair, kinds)
    if operand.tag == "zero" and value.tag == "same" and pair.out_axis() is not None:
        axis = pair.out_axis()
        own = axis >= 0 and tuple(config[axis]) == (0, 0, 0)  # type: ignore[operator, index]
        return [rows(axis, value.power)] if own else mixed(pair, kinds)  # type: ignore[arg-type]
    return [algebra.join(operand, value, pair.why("padding with a value of unlike kind"))]


def _broadcast(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    kind, *rest = kinds
    dimensions, out_axis = pair.params["broadcast_dimensions"], pair.out_axis()
    if rest:
        return mixed(pair, kinds)
    if kind.rows_axis is not None:
        return [dataclasses.replace(kind, rows_axis=dimensions[kind.rows_axis])]
    if kind.tag == "same" and out_axis is not None and out_axis >= 0:
        spread = out_axis not in dimensions or pair.shape(0)[dimensions.index(out_axis)] == 1
        return [rows(out_axis, kind.power)] if spread else mixed(pair, kinds)
    return [kind]


def _tile(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    out_axis = pair.out_axis()
    if kind.tag == "same" and out_axis is not None and out_axis >= 0:
        # Every device lays down its share of the copies.
        return [rows(out_axis, kind.power)]
    keeps = moves(lambda pair, axis: axis if pair.params["reps"][axis] == 1 else None)
    return keeps(pair, kinds)


def _concatenate(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    along = pair.params["dimension"]
    if any(kind.tag == "number" for kind in kinds):
        return _index_vectors(pair, kinds)
    result = _joined(pair, kinds)
    if result.tag == "rows" and result.rows_axis == along:
        return mixed(pair, kinds)
    return [result]


def _index_vectors(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """How `x[jnp.arange(b), columns]` makes its indices: a row's number beside its own columns."""
    numbers = [i for i, kind in enumerate(kinds) if kind.tag == "number"]
    own, last = numbers[0], len(pair.shape(0)) - 1
    rest = [kind for i, kind in enumerate(kinds) if i != own]
    alone = len(numbers) == 1 and pair.shape(own)[-1] == 1 and pair.params["dimension"] == last
    if alone and all(kind.same or kind.axis == kinds[own].rows_axis for kind in rest):
        component = sum(pair.shape(i)[-1] for i in range(own))
        return [Kind("place", component, kinds[own].rows_axis)]
    return mixed(pair, kinds)


def _stack(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    result = _joined(pair, kinds)
    if result.tag == "rows":
        axis = result.rows_axis
        result = rows(axis + (pair.params["axis"] <= axis), result.power)  # type: ignore[operator]
    return [result]


def _joined(pair: Pair, kinds: list[Kind]) -> Kind:
    if any(kind.tag in ("number", "place", "false") for kind in kinds):
        return mixed(pair, kinds)[0]
    result = kinds[0]
    for kind in kinds[1:]:
        result = algebra.join(result, kind, pair.why(f"a {pair.name} of unlike kinds"))
    return result


def _split(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    along = pair.params["axis"]
    if kind.tag in ("number", "place", "false") or kind.rows_axis == along:
        return mixed(pair, kinds)
    if kind.tag == "rows" and pair.name == "unstack":
        axis = kind.rows_axis
        kind = rows(axis - (along < axis), kind.power)  # type: ignore[operator]
    return [kind] * len(pair.local.outvars)


RULES: dict[str, Rule] = {
    "transpose": moves(_transpose),
    "reshape": moves(_reshape),
    "expand_dims": moves(_reshape),
    "squeeze": moves(_squeeze),
    "slice": moves(_slice),
    "rev": moves(_reverse),
    "pad": _pad,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _split,
}
