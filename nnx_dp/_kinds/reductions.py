"""Kinds through primitives that combine elements: reductions, products, windows, linear algebra.

Where the batch axis itself is summed over, rows become a linear kind, and an extreme over it
becomes the extreme; where any other axis is, rows stay rows.
"""

from __future__ import annotations

from collections.abc import Callable

from nnx_dp._kinds import algebra
from nnx_dp._kinds.algebra import SAME, ZERO, Kind, linear, rows
from nnx_dp._kinds.pair import Pair, Rule, mixed


def _reduction(over_batch: Callable[[Kind], Kind | None], is_linear: bool = False) -> Rule:
    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        (kind,), axes = kinds, pair.params["axes"]
        if kind.tag == "rows":
            if kind.rows_axis in axes:
                result = over_batch(kind)
                return mixed(pair, kinds) if result is None else [result]
            if kind.power == 0 or is_linear:
                axis = kind.rows_axis - sum(a < kind.rows_axis for a in axes)  # type: ignore
                return [rows(axis, kind.power)]
        elif is_linear and kind.tag in ("zero", "same", "linear"):
            return [kind]
        elif kind.same:
            return [SAME]
        elif kind.tag == pair.name.removeprefix("reduce_"):
            return [kind]
        return mixed(pair, kinds)

    return rule


def _along(parameter: str, is_linear: bool = False) -> Rule:
    """A rule for an operation along one axis: sort, cumulative sums, top_k."""

    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        rank = len(pair.shape(0))
        along = pair.params.get(parameter, rank - 1) % max(rank, 1)
        if is_linear and kinds[0].tag in ("same", "linear", "zero"):
            return list(kinds)
        result = algebra.elementwise(kinds, pair.why(pair.name))
        if result.rows_axis == along:
            return mixed(pair, kinds)
        return [result] * len(pair.local.outvars)

    return rule


def _dot_general(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (left_contract, right_contract), (left_batch, right_batch) = pair.params["dimension_numbers"]
    left, right = kinds
    if "rows" not in (left.tag, right.tag):
        return [algebra.multiply(left, right, pair.why("a matrix product"))]
    power = left.power + right.power
    if left.tag == right.tag == "rows":
        a, b = left.rows_axis, right.rows_axis
        if a in left_batch and right_batch[left_batch.index(a)] == b:
            return [rows(left_batch.index(a), power)]
        if a in left_contract and right_contract[left_contract.index(a)] == b:
            return [linear(power)]
        return mixed(pair, kinds)
    if "zero" in (left.tag, right.tag):
        return [ZERO]
    if "same" not in (left.tag, right.tag):
        return mixed(pair, kinds)
    if left.tag == "rows":
        taken, axis, offset = {*left_contract, *left_batch}, left.rows_axis, len(left_batch)
    else:
        taken, axis = {*right_contract, *right_batch}, right.rows_axis
        offset = len(pair.shape(0)) - len(left_contract)
    if axis in taken:
        return mixed(pair, kinds)
    return [rows(offset + sum(i not in taken for i in range(axis)), power)]  # type: ignore[arg-type]


def _convolution(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    left, right = kinds
    numbers = pair.params["dimension_numbers"]
    power = left.power + right.power
    if "rows" not in (left.tag, right.tag):
        return [algebra.multiply(left, right, pair.why("a convolution"))]
    if "zero" in (left.tag, right.tag):
        return [ZERO]
    if pair.params["batch_group_count"] != 1:
        return mixed(pair, kinds)
    if left.tag == "rows" and right.tag == "same" and left.rows_axis == numbers.lhs_spec[0]:
        return [rows(numbers.out_spec[0], power)]
    contracted = left.rows_axis == numbers.lhs_spec[1] and right.rows_axis == numbers.rhs_spec[1]
    if left.tag == right.tag == "rows" and contracted and pair.params["feature_group_count"] == 1:
        return [linear(power)]
    return mixed(pair, kinds)


def _window(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """Pooling and its transposes: examples stay apart if the window is 1 on the batch axis."""
    outputs = len(pair.local.outvars)
    batch = next((kind for kind in kinds if kind.tag == "rows"), None)
    if batch is None:
        return [SAME] * outputs if all(kind.same for kind in kinds) else mixed(pair, kinds)
    axis, params = batch.rows_axis, pair.params
    trivial = {
        "window_dimensions": 1,
        "window_strides": 1,
        "base_dilation": 1,
        "window_dilation": 1,
        "padding": (0, 0),
    }
    apart = all(params.get(name) is None or params[name][axis] == trivial[name] for name in trivial)
    if not apart or any(not kind.same for kind in kinds if kind != batch):
        return mixed(pair, kinds)
    sums = pair.name in ("reduce_window_sum", "select_and_scatter_add", "select_and_gather_add")
    return [batch] * outputs if batch.power == 0 or sums else mixed(pair, kinds)


def _matrix(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """Linear algebra on the last two axes: examples on any other stay apart."""
    result = algebra.elementwise(kinds, pair.why(pair.name))
    if result.tag == "rows" and result.rows_axis >= len(pair.shape(0)) - 2:  # type: ignore
        return mixed(pair, kinds)
    return [result] * len(pair.local.outvars)


def _fft(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    transformed = len(pair.shape(0)) - len(pair.params["fft_lengths"])
    if kind.tag == "rows" and kind.rows_axis >= transformed:  # type: ignore[operator]
        return mixed(pair, kinds)
    return [kind] if kind.tag in ("same", "linear", "rows", "zero") else mixed(pair, kinds)


RULES: dict[str, Rule] = {
    "reduce_sum": _reduction(lambda kind: linear(kind.power), is_linear=True),
    "reduce_max": _reduction(lambda kind: Kind("max") if kind.power == 0 else None),
    "reduce_min": _reduction(lambda kind: Kind("min") if kind.power == 0 else None),
    **dict.fromkeys(
        "reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split(),
        _reduction(lambda kind: None),
    ),
    "cumsum": _along("axis", is_linear=True),
    **dict.fromkeys("cumprod cummax cummin cumlogsumexp top_k".split(), _along("axis")),
    "sort": _along("dimension"),
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
            "select_and_scatter_add select_and_gather_add"
        ).split(),
        _window,
    ),
    **dict.fromkeys("cholesky eigh lu qr svd triangular_solve".split(), _matrix),
    "fft": _fft,
}
