"""Kinds through look-ups and updates at computed places: iota, gather, scatter, dynamic slices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from nnx_dp._kinds import algebra
from nnx_dp._kinds.algebra import SAME, Kind, linear, rows
from nnx_dp._kinds.moves import moves
from nnx_dp._kinds.pair import Pair, Rule, mixed


def _iota(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    axis = pair.out_axis()
    if kinds or axis == -1:
        return mixed(pair, kinds)
    if axis is None:
        return [SAME]
    if pair.params["dimension"] != axis:
        return [rows(axis)]
    dtype = pair.params["dtype"]
    wide = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return [Kind("number", rows_axis=axis)] if wide else mixed(pair, kinds)


def _dynamic_slice(pair: Pair, axis: int) -> int | None:
    return axis if pair.params["slice_sizes"][axis] == pair.shape(0)[axis] else None


def _dynamic_update_slice(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, update, *starts = kinds
    if any(not start.same for start in starts):
        return mixed(pair, kinds)
    axis = pair.axis(0)
    if axis is None:
        return [algebra.join(operand, update, pair.why("an update of unlike kind"))]
    # Rows are updated at the same place in each, which takes an update of all of them.
    if axis < 0 or pair.axis(1) != axis or pair.shape(0)[axis] != pair.shape(1)[axis]:
        return mixed(pair, kinds)
    return [algebra.join(operand, update, pair.why("an update of unlike kind"))]


def _gather(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices = kinds[0], kinds[1]
    fills = pair.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if operand.tag == "zero" and fills:
        operand = SAME
    if operand.tag not in ("zero", "same", "rows", "linear", "max", "min", "key"):
        return mixed(pair, kinds)
    if fills and not _fills_with_nan(pair) and (operand.tag == "linear" or operand.power != 0):
        return mixed(pair, kinds)
    if operand.tag == "rows":
        return _rows_of(pair, kinds)
    if indices.same or operand.tag == "zero":
        return [operand]
    if indices.axis is not None and operand.tag == "same" and _indexed(pair, indices.axis):
        # A table look-up: one index, one row.
        return [rows(pair.out_axis(), operand.power)]  # type: ignore[arg-type]
    return mixed(pair, kinds)


def _rows_of(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices = kinds[0], kinds[1]
    numbers, sizes = pair.params["dimension_numbers"], pair.params["slice_sizes"]
    axis: Any = operand.rows_axis
    result = [rows(pair.out_axis(), operand.power)]  # type: ignore[arg-type]
    if indices.tag in ("number", "place"):
        # Every row looks into itself, if its number is what looks it up.
        size = pair.shape(1)[indices.rows_axis]  # type: ignore[index]
        single = indices.tag == "place" or pair.shape(1)[-1] == 1
        looked_up = single and numbers.start_index_map[indices.power] == axis
        itself = looked_up and axis in numbers.collapsed_slice_dims and size == pair.shape(0)[axis]
        return result if itself and _indexed(pair, indices.rows_axis) else mixed(pair, kinds)
    batching = tuple(numbers.operand_batching_dims)
    if indices.axis is not None and axis in batching:
        paired = numbers.start_indices_batching_dims[batching.index(axis)]
        own = paired == indices.axis and _indexed(pair, indices.axis)
        return result if own else mixed(pair, kinds)
    if indices.same:
        removed = {*numbers.collapsed_slice_dims, *batching}
        kept = [d for d in range(len(sizes)) if d not in removed]
        entire = axis in kept and sizes[axis] == pair.shape(0)[axis]  # type: ignore[index]
        if entire and numbers.offset_dims[kept.index(axis)] == pair.out_axis():
            return result
    return mixed(pair, kinds)


def _indexed(pair: Pair, axis: int | None) -> bool:
    """Whether an axis of the indices is the batch axis of the output."""
    offsets = pair.params["dimension_numbers"].offset_dims
    free = [i for i in range(len(pair.local.outvars[0].aval.shape)) if i not in offsets]
    return axis is not None and axis < len(free) and free[axis] == pair.out_axis()


def _fills_with_nan(pair: Pair) -> bool:
    """Whether an index out of bounds gives NaN, which every reduction keeps, and no number."""
    is_float = jnp.issubdtype(pair.local.outvars[0].aval.dtype, jnp.inexact)
    return is_float and pair.params["fill_value"] is None


def _scatter_add(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices, updates = kinds
    numbers = pair.params["dimension_numbers"]
    why = pair.why("a sum of unlike terms")
    if pair.out_axis() is None:
        if indices.axis is not None and updates.tag == "rows":
            # Every example adds to the place that it names.
            if updates.rows_axis not in numbers.update_window_dims:
                return [algebra.add(operand, linear(updates.power), why)]
        if indices.same and updates.tag in ("same", "linear", "zero"):
            return [_added(operand, updates, why)]
        return mixed(pair, kinds)
    return [_added(operand, updates, why)] if _by_row(pair, indices) else mixed(pair, kinds)


def _scatter(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices, updates = kinds
    apart = indices.same if pair.out_axis() is None else _by_row(pair, indices)
    why = pair.why("an update of unlike kind")
    return [algebra.join(operand, updates, why)] if apart else mixed(pair, kinds)


def _by_row(pair: Pair, indices: Kind) -> bool:
    """Whether every row is updated by the row of updates that is in the same place."""
    numbers, out_axis, axis = pair.params["dimension_numbers"], pair.out_axis(), pair.axis(2)
    if axis is None or axis < 0:
        return False
    batching = tuple(numbers.operand_batching_dims)
    if axis not in numbers.update_window_dims:
        paired = dict(zip(batching, numbers.scatter_indices_batching_dims, strict=True))
        return indices.axis is not None and paired.get(out_axis) == indices.axis
    removed = {*numbers.inserted_window_dims, *batching}
    kept = [d for d in range(len(pair.shape(0))) if d not in removed]
    entire = pair.shape(2)[axis] == pair.shape(0)[out_axis]  # type: ignore[index]
    return indices.same and entire and kept[numbers.update_window_dims.index(axis)] == out_axis


def _added(operand: Kind, updates: Kind, why: str) -> Kind:
    """The kind of an array of which only some elements were added to."""
    return algebra.join(operand, algebra.add(operand, updates, why), why)


RULES: dict[str, Rule] = {
    "iota": _iota,
    "dynamic_slice": moves(_dynamic_slice),
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
}
