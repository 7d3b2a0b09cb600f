"""How each JAX primitive passes reduction kinds on.

A rule takes a pair of matching equations and the kinds of their operands.  It must be certain: a
value whose examples may have been mixed, reordered or treated by position is unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from nnx_dp._jaxpr import is_jaxpr, user_line
from nnx_dp._kinds import algebra
from nnx_dp._kinds.algebra import KEY, SAME, ZERO, Kind, linear, rows, unknown

Rule = Callable[["Pair", list[Kind]], list[Kind]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """An equation at one device's shapes and its partner at the global shapes."""

    local: Any
    whole: Any
    devices: int

    @property
    def params(self) -> dict[str, Any]:
        return self.local.params

    @property
    def line(self) -> str:
        return user_line(self.local) or "an unknown line"

    def why(self, what: str) -> str:
        return f"{what} at {self.line} makes it no plain mean or sum over examples"

    def shape(self, operand: int) -> tuple[int, ...]:
        return self.local.invars[operand].aval.shape

    def out_axis(self, output: int = 0) -> int | None:
        """The axis on which an output shrank: None if none did, -1 if it is no single axis."""
        return batch_axis(
            self.local.outvars[output].aval.shape,
            self.whole.outvars[output].aval.shape,
            self.devices,
        )

    def same_shapes(self) -> bool:
        return all(self.out_axis(i) is None for i in range(len(self.local.outvars)))

    def same_parameters(self) -> bool:
        local, whole = self.local.params, self.whole.params
        # A sharding names the mesh, whose size differs, and changes no value.
        return local.keys() == whole.keys() and all(
            _equal(local[name], whole[name]) for name in local if not name.endswith("sharding")
        )


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if is_jaxpr(first) or callable(first):
        return str(first) == str(second) if is_jaxpr(first) else type(first) is type(second)
    if isinstance(first, (tuple, list)) and any(is_jaxpr(item) for item in first):
        return all(_equal(a, b) for a, b in zip(first, second, strict=True))
    try:
        return bool(first == second)
    except ValueError:
        return False


def batch_axis(local: tuple, whole: tuple, devices: int) -> int | None:
    """The axis that shrank by the number of devices: None if equal, -1 if it is not one axis."""
    if local == whole:
        return None
    if len(local) != len(whole):
        return -1
    changed = [i for i, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
    if len(changed) != 1 or local[changed[0]] * devices != whole[changed[0]]:
        return -1
    return changed[0]


def _mixed(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    known = next((kind.why for kind in kinds if kind.tag == "unknown"), "")
    why = known or pair.why(pair.local.primitive.name)
    return [unknown(why)] * len(pair.local.outvars)


def _settled(pair: Pair, result: Kind) -> list[Kind]:
    """Accepts a result only if its batch axis is the axis that in fact shrank."""
    axis = pair.out_axis()
    if result.tag == "rows":
        return [result] if axis == result.rows_axis else _mixed(pair, [result])
    if axis is not None and result.tag not in ("zero", "unknown"):
        return _mixed(pair, [result])
    return [result]


# ---------------------------------------------------------------------------------------------
# Element by element


def _nonlinear(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _settled(pair, algebra.elementwise(kinds, pair.why(pair.local.primitive.name)))


def _less_than(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if kinds[0].tag == "number" and kinds[1].tag == "zero":
        # How `logits[jnp.arange(b), labels]` asks whether an index counts from the end.
        return [Kind("false", rows_axis=kinds[0].rows_axis)]
    return _nonlinear(pair, kinds)


def _add(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _settled(pair, algebra.add(*kinds, pair.why("a sum of unlike terms")))


def _mul(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _settled(pair, algebra.multiply(*kinds, pair.why("a product")))


def _div(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _settled(pair, algebra.multiply(*kinds, pair.why("a quotient"), sign=-1))


def _pass(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return list(kinds)


def _convert(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    target = pair.params["new_dtype"]
    source = pair.local.invars[0].aval.dtype
    linear_map = getattr(target, "kind", "V") not in "biu" or getattr(source, "kind", "V") in "iu"
    return [kind] if linear_map or kind.tag == "index" else _nonlinear(pair, kinds)


def _extreme(tag: str) -> Rule:
    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        if all(kind.same or kind.tag == tag for kind in kinds) and pair.same_shapes():
            return [Kind(tag) if any(kind.tag == tag for kind in kinds) else SAME]  # type: ignore
        return _nonlinear(pair, kinds)

    return rule


def _select(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    predicate, *cases = kinds
    why = pair.why("a choice")
    if predicate.tag == "false":
        return _settled(pair, cases[0])
    if predicate.same or predicate.axis is not None:
        result = cases[0]
        for case in cases[1:]:
            result = algebra.add(result, case, why)
        if predicate.same:
            return _settled(pair, result)
        if result.tag == "zero" or (result.same and pair.out_axis() is not None):
            return _settled(pair, rows(predicate.axis))  # type: ignore[arg-type]
        if result.tag == "rows" and result.rows_axis == predicate.axis:
            return _settled(pair, result)
    return _mixed(pair, kinds)


def _integer_pow(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    if kind.tag in ("same", "rows", "zero"):
        return [dataclasses.replace(kind, power=kind.power * pair.params["y"])]
    return _mixed(pair, kinds)


def _square(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    if kind.tag in ("same", "rows", "zero"):
        return [dataclasses.replace(kind, power=kind.power * 2)]
    return _mixed(pair, kinds)


# ---------------------------------------------------------------------------------------------
# Moving elements about


def _moves(rows_rule: Callable[[Pair, int], int | None]) -> Rule:
    """A rule for a linear rearrangement; `rows_rule` says where the batch axis goes."""

    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        kind, *others = kinds
        if any(not other.same for other in others):
            return _mixed(pair, kinds)
        if kind.tag == "rows":
            axis = rows_rule(pair, kind.rows_axis)  # type: ignore[arg-type]
            if axis is None or (kind.power != 0 and any(o.tag != "zero" for o in others)):
                return _mixed(pair, kinds)
            return _settled(pair, rows(axis, kind.power))
        if kind.tag == "key" and pair.out_axis() is not None:
            return _mixed(pair, kinds)
        if not pair.same_parameters() and kind.tag != "zero":
            return _mixed(pair, kinds)
        return _settled(pair, kind)

    return rule


def _transpose(pair: Pair, axis: int) -> int | None:
    return list(pair.params["permutation"]).index(axis)


def _reshape(pair: Pair, axis: int) -> int | None:
    # Rows stay contiguous, and in order, if as many elements stand before the batch axis as after.
    out_axis = pair.out_axis()
    if out_axis is None or out_axis < 0:
        return None
    before = math.prod(pair.shape(0)[:axis])
    return out_axis if before == math.prod(pair.local.outvars[0].aval.shape[:out_axis]) else None


def _full_slice(pair: Pair, axis: int) -> int | None:
    params, size = pair.params, pair.shape(0)[axis]
    strides = params["strides"]
    full = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == size
    whole_limit = pair.whole.params["limit_indices"][axis]
    full &= whole_limit == size * pair.devices
    return axis if full and (strides is None or strides[axis] == 1) else None


def _pad(pair: Pair, axis: int) -> int | None:
    return axis if tuple(pair.params["padding_config"][axis]) == (0, 0, 0) else None


def _reverse(pair: Pair, axis: int) -> int | None:
    return None if axis in pair.params["dimensions"] else axis


def _along(name: str) -> Callable[[Pair, int], int | None]:
    return lambda pair, axis: None if pair.params[name] == axis else axis


def _dynamic_slice(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    def rows_rule(pair: Pair, axis: int) -> int | None:
        return axis if pair.params["slice_sizes"][axis] == pair.shape(0)[axis] else None

    if kinds[0].tag == "rows":
        return _moves(rows_rule)(pair, kinds)
    return _moves(lambda pair, axis: None)(pair, kinds)


def _dynamic_update_slice(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, update, *starts = kinds
    if any(not start.same for start in starts):
        return _mixed(pair, kinds)
    result = algebra.add(operand, update, pair.why("an update of unlike kind"))
    if result.tag == "rows":
        axis = result.rows_axis
        if pair.shape(0)[axis] != pair.shape(1)[axis]:
            return _mixed(pair, kinds)
    return _settled(pair, result)


def _broadcast(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    kind, *rest = kinds
    dimensions, out_axis = pair.params["broadcast_dimensions"], pair.out_axis()
    if rest or out_axis == -1:
        return _mixed(pair, kinds)
    if kind.tag in ("rows", "number"):
        moved = dataclasses.replace(kind, rows_axis=dimensions[kind.rows_axis])
        return [moved] if out_axis == moved.rows_axis else _mixed(pair, kinds)
    if out_axis is None or kind.tag == "zero":
        return [kind]
    spread = out_axis not in dimensions or pair.shape(0)[dimensions.index(out_axis)] == 1
    return [rows(out_axis, kind.power)] if kind.tag == "same" and spread else _mixed(pair, kinds)


def _concatenate(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    numbers = [i for i, kind in enumerate(kinds) if kind.tag == "number"]
    if len(numbers) == 1 and pair.params["dimension"] == len(pair.shape(0)) - 1:
        # An index of one row each: its own number, beside numbers that belong to the row.
        own = numbers[0]
        rest = [kind for i, kind in enumerate(kinds) if i != own]
        if all(kind.same or kind.axis == kinds[own].rows_axis for kind in rest):
            component = sum(pair.shape(i)[-1] for i in range(own))
            return [dataclasses.replace(kinds[own], power=component)]
    result = kinds[0]
    for kind in kinds[1:]:
        result = algebra.join(result, kind, pair.why("a concatenation of unlike kinds"))
    if result.tag == "rows" and result.rows_axis == pair.params["dimension"]:
        return _mixed(pair, kinds)
    return _settled(pair, result)


def _iota(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    axis = pair.out_axis()
    if axis is None:
        return [SAME]
    if axis < 0:
        return _mixed(pair, kinds)
    return [Kind("number", rows_axis=axis) if pair.params["dimension"] == axis else rows(axis)]


def _stack(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    result = kinds[0]
    for kind in kinds[1:]:
        result = algebra.join(result, kind, pair.why("a stack of unlike kinds"))
    if result.tag == "rows":
        after = pair.params["axis"] <= result.rows_axis  # type: ignore[operator]
        result = rows(result.rows_axis + after, result.power)  # type: ignore[operator]
    return _settled(pair, result)


def _split(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    outputs = len(pair.local.outvars)
    along = pair.params["axis"]
    if kind.tag != "rows":
        return [kind] * outputs if pair.same_parameters() else _mixed(pair, kinds)
    if kind.rows_axis == along:
        return _mixed(pair, kinds)
    if pair.local.primitive.name == "unstack":
        before = along < kind.rows_axis  # type: ignore[operator]
        kind = rows(kind.rows_axis - before, kind.power)  # type: ignore[operator]
    return [kind] * outputs


def _tile(pair: Pair, axis: int) -> int | None:
    return axis if pair.params["reps"][axis] == 1 else None


def _matrix(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """Linear algebra on the last two axes: examples on any other stay apart."""
    result = algebra.elementwise(kinds, pair.why(pair.local.primitive.name))
    if result.tag == "rows" and result.rows_axis >= len(pair.shape(0)) - 2:  # type: ignore
        return _mixed(pair, kinds)
    if result.tag == "rows" and any(k.tag != "rows" for k in kinds):
        return _mixed(pair, kinds)
    return [result] * len(pair.local.outvars)


def _fft(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (kind,) = kinds
    transformed = len(pair.shape(0)) - len(pair.params["fft_lengths"])
    if kind.tag == "rows" and kind.rows_axis >= transformed:  # type: ignore[operator]
        return _mixed(pair, kinds)
    return [kind] if kind.tag in ("same", "linear", "rows", "zero") else _mixed(pair, kinds)


def _gather(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices = kinds[0], kinds[1]
    numbers, sizes = pair.params["dimension_numbers"], pair.params["slice_sizes"]
    out_axis = pair.out_axis()
    offsets = set(numbers.offset_dims)
    free = [i for i in range(len(pair.local.outvars[0].aval.shape)) if i not in offsets]
    if indices.axis is not None and operand.tag == "same":
        # A table look-up: one index, one row.
        if indices.axis < len(free) and free[indices.axis] == out_axis:
            return [rows(out_axis, operand.power)]
    elif operand.tag == "rows" and indices.tag == "number":
        # Every row looks into itself.
        looked_up = numbers.start_index_map[indices.power] == operand.rows_axis
        if looked_up and operand.rows_axis in numbers.collapsed_slice_dims:
            if free[indices.rows_axis] == out_axis:
                return [rows(out_axis, operand.power)]
    elif operand.tag == "rows" and indices.axis is not None:
        batching = tuple(numbers.operand_batching_dims)
        if operand.rows_axis in batching:
            paired = numbers.start_indices_batching_dims[batching.index(operand.rows_axis)]
            if paired == indices.axis and free[indices.axis] == out_axis:
                return [rows(out_axis, operand.power)]
    elif operand.tag == "rows" and indices.same:
        axis = operand.rows_axis
        kept = [
            d
            for d in range(len(sizes))
            if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
        ]
        whole_row = axis in kept and sizes[axis] == pair.shape(0)[axis]
        if whole_row and numbers.offset_dims[kept.index(axis)] == out_axis:
            return [rows(out_axis, operand.power)]
    elif indices.same and pair.same_shapes() and pair.same_parameters():
        return [operand]
    return _mixed(pair, kinds)


def _scatter_add(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    operand, indices, updates = kinds
    if not pair.same_shapes():
        return _mixed(pair, kinds)
    if indices.axis is not None and updates.tag == "rows":
        window = pair.params["dimension_numbers"].update_window_dims
        if updates.rows_axis not in window:
            return _add(pair, [operand, linear(updates.power)])
    if indices.same and updates.tag in ("same", "linear", "zero") and pair.same_parameters():
        return _add(pair, [operand, updates])
    return _mixed(pair, kinds)


# ---------------------------------------------------------------------------------------------
# Reductions and products


def _reduction(over_batch: Callable[[Kind], Kind | None], is_linear: bool = False) -> Rule:
    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        kind, axes = kinds[0], pair.params["axes"]
        if kind.tag == "rows":
            if kind.rows_axis in axes:
                return _or_mixed(pair, kinds, over_batch(kind))
            if kind.power == 0 or is_linear:
                axis = kind.rows_axis - sum(a < kind.rows_axis for a in axes)  # type: ignore
                return _settled(pair, rows(axis, kind.power))
        elif kind.same or (is_linear and kind.tag in ("same", "linear")):
            return [kind]
        elif kind.tag == pair.local.primitive.name.removeprefix("reduce_"):
            return [kind]
        return _mixed(pair, kinds)

    return rule


def _or_mixed(pair: Pair, kinds: list[Kind], result: Kind | None) -> list[Kind]:
    return _mixed(pair, kinds) if result is None else [result]


def _per_row(name: str, is_linear: bool = False) -> Rule:
    """A rule for an operation along one axis: sort, cumulative sums, top_k."""

    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        along = pair.params.get(name, pair.params.get("axis", len(pair.shape(0)) - 1))
        if is_linear and kinds[0].tag in ("same", "linear", "zero"):
            return list(kinds)
        result = algebra.elementwise(kinds, pair.why(pair.local.primitive.name))
        if result.tag == "rows" and result.rows_axis == along % len(pair.shape(0)):
            return _mixed(pair, kinds)
        return [result] * len(pair.local.outvars)

    return rule


def _dot_general(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (left_contract, right_contract), (left_batch, right_batch) = pair.params["dimension_numbers"]
    left, right = kinds
    if "rows" not in (left.tag, right.tag):
        return _settled(pair, algebra.multiply(left, right, pair.why("a matrix product")))
    power = left.power + right.power
    if left.tag == right.tag == "rows":
        a, b = left.rows_axis, right.rows_axis
        if a in left_batch and right_batch[left_batch.index(a)] == b:
            return _settled(pair, rows(left_batch.index(a), power))
        if a in left_contract and right_contract[left_contract.index(a)] == b:
            return _settled(pair, linear(power))
        return _mixed(pair, kinds)
    if "zero" in (left.tag, right.tag):
        return [ZERO]
    if "same" not in (left.tag, right.tag):
        return _mixed(pair, kinds)
    if left.tag == "rows":
        taken, axis, offset = {*left_contract, *left_batch}, left.rows_axis, len(left_batch)
    else:
        taken, axis = {*right_contract, *right_batch}, right.rows_axis
        offset = len(pair.shape(0)) - len(left_contract)
    if axis in taken:
        return _mixed(pair, kinds)
    return _settled(pair, rows(offset + sum(i not in taken for i in range(axis)), power))


def _convolution(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    left, right = kinds
    numbers = pair.params["dimension_numbers"]
    power = left.power + right.power
    if "rows" not in (left.tag, right.tag):
        return _settled(pair, algebra.multiply(left, right, pair.why("a convolution")))
    if pair.params["batch_group_count"] != 1:
        return _mixed(pair, kinds)
    if left.tag == "rows" and right.tag == "same" and left.rows_axis == numbers.lhs_spec[0]:
        return _settled(pair, rows(numbers.out_spec[0], power))
    contracted = left.rows_axis == numbers.lhs_spec[1] and right.rows_axis == numbers.rhs_spec[1]
    if left.tag == right.tag == "rows" and contracted and pair.params["feature_group_count"] == 1:
        return _settled(pair, linear(power))
    return _mixed(pair, kinds)


def _window(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """Pooling and its transposes: examples stay apart if the window is 1 on the batch axis."""
    batch = next((kind for kind in kinds if kind.tag == "rows"), None)
    if batch is None:
        if all(kind.same for kind in kinds) and pair.same_parameters():
            return [SAME] * len(pair.local.outvars)
        return _mixed(pair, kinds)
    axis, params = batch.rows_axis, pair.params
    apart = all(
        params[name] is None or params[name][axis] == trivial
        for name, trivial in (("window_dimensions", 1), ("window_strides", 1), ("padding", (0, 0)))
        if name in params
    )
    others = [kind for kind in kinds if kind.tag != "rows"]
    if not apart or any(not kind.same for kind in others):
        return _mixed(pair, kinds)
    if any(kind.tag == "rows" and kind != batch for kind in kinds):
        return _mixed(pair, kinds)
    sums = "sum" in pair.local.primitive.name or "add" in pair.local.primitive.name
    if batch.power != 0 and not sums:
        return _mixed(pair, kinds)
    return [batch] * len(pair.local.outvars)


# ---------------------------------------------------------------------------------------------
# Random numbers and kernels


def _random_key(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if any(kind.tag in ("key", "index") for kind in kinds):
        others = [kind for kind in kinds if kind.tag not in ("key", "index")]
        if all(kind.same for kind in others):
            return _drawn(pair, KEY)
    if all(kind.same for kind in kinds):
        return _drawn(pair, SAME)
    return _nonlinear(pair, kinds)


def _random_bits(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (key,) = kinds
    if key.tag == "key":
        why = f"a random draw at {pair.line} that differs between devices but not between examples"
        return _drawn(pair, unknown(why))
    if key.axis is not None:
        return _settled(pair, key)
    return _drawn(pair, SAME) if key.same else _mixed(pair, kinds)


def _drawn(pair: Pair, without_rows: Kind) -> list[Kind]:
    axis = pair.out_axis()
    if axis is None:
        return [without_rows]
    return [rows(axis)] if axis >= 0 else _mixed(pair, [])


def _kernel(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """A kernel's inside is not looked at: one that runs on a device's batch treats examples apart."""
    batched = [kind for kind in kinds if not kind.same]
    if not batched and pair.same_shapes():
        return [SAME] * len(pair.local.outvars)
    if all(kind.axis is not None for kind in batched):
        axes = [pair.out_axis(i) for i in range(len(pair.local.outvars))]
        if all(axis is not None and axis >= 0 for axis in axes):
            return [rows(axis) for axis in axes]  # type: ignore[arg-type]
    return _mixed(pair, kinds)


KERNELS = ("pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "triton_kernel_call")

_NONLINEAR = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    igamma_grad_a is_finite le le_to lgamma log log1p logistic lt lt_to ne nextafter not or
    polygamma population_count pow random_gamma_grad regularized_incomplete_beta rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt tan tanh xor zeta
    bitcast_convert_type
""".split()

RULES: dict[str, Rule] = {
    **dict.fromkeys(_NONLINEAR, _nonlinear),
    **dict.fromkeys(("add", "add_any", "sub"), _add),
    **dict.fromkeys(
        (
            "neg real imag conj copy copy_p optimization_barrier sharding_constraint "
            "reduce_precision device_put name mesh_cast stop_gradient"
        ).split(),
        _pass,
    ),
    "lt": _less_than,
    "mul": _mul,
    "div": _div,
    "square": _square,
    "integer_pow": _integer_pow,
    "convert_element_type": _convert,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "select_n": _select,
    "transpose": _moves(_transpose),
    "reshape": _moves(_reshape),
    "squeeze": _moves(_reshape),
    "expand_dims": _moves(_reshape),
    "slice": _moves(_full_slice),
    "pad": _moves(_pad),
    "rev": _moves(_reverse),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _split,
    "split": _split,
    "tile": _moves(_tile),
    "fft": _fft,
    **dict.fromkeys("cholesky lu qr eigh svd triangular_solve".split(), _matrix),
    "iota": _iota,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
    "reduce_sum": _reduction(lambda kind: linear(kind.power), is_linear=True),
    "reduce_max": _reduction(lambda kind: Kind("max") if kind.power == 0 else None),
    "reduce_min": _reduction(lambda kind: Kind("min") if kind.power == 0 else None),
    **dict.fromkeys(
        "reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split(),
        _reduction(lambda kind: None),
    ),
    "cumsum": _per_row("axis", is_linear=True),
    **dict.fromkeys("cumprod cummax cummin cumlogsumexp top_k".split(), _per_row("axis")),
    "sort": _per_row("dimension"),
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
            "select_and_scatter_add select_and_gather_add"
        ).split(),
        _window,
    ),
    **dict.fromkeys(
        "random_fold_in random_split random_wrap random_unwrap random_seed random_clone".split(),
        _random_key,
    ),
    "random_bits": _random_bits,
    **dict.fromkeys(KERNELS, _kernel),
}
