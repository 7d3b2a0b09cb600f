"""How each array leaves a per-device step: concatenated, reduced, or as it is.

Decided once per compilation, for every array of the new state and of the output, from what two
abstract traces say: the step at one device's shapes and at the global shapes.  An axis that shrank
by the number of devices is a batch axis.  A value of unchanged shape either is the same on every
device, or is reduced by what it provably is (a mean, a sum, a maximum over the batch), or is
refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nnx_dp._graph import OutLeaf, OutStructure
from nnx_dp._kinds import Kind
from nnx_dp._replication import Taint
from nnx_dp._roles import INFER, spread_prefix
from nnx_dp._state_reduce import REDUCTIONS, Rule, find_rule


@dataclasses.dataclass(frozen=True)
class Exit:
    """How one array leaves the devices.

    Attributes:
      how: "as_is" (equal on all devices), "concatenate", "reduce" (an output) or "rule" (state).
      axis: of the concatenation.
      rule: of a reduction or a rule: its name, or a function.
    """

    how: Literal["as_is", "concatenate", "reduce", "rule"]
    axis: int | None = None
    rule: Rule = "mean"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of one array that the step leaves behind.

    Attributes:
      local: its shape and dtype on one device.
      whole: the same in the global trace, None if there is none.
      taint: None if it is proved equal on all devices, else why it varies.
      kind: how the devices' values make up the global one, None if unknown.
      untouched: whether it is an input that the step passed through.
    """

    local: jax.ShapeDtypeStruct
    whole: jax.ShapeDtypeStruct | None
    taint: Taint
    kind: Kind | None
    untouched: bool = False


AS_IS = Exit("as_is")

NO_GLOBAL_TRACE = (
    "1. Put the function that needs one device's shapes in nnx_dp.per_device, and use "
    'strategy="jit", where the rest of the step sees the whole batch.\n'
    "2. Write in_axes={'name': None} for an argument that is as long as the batch and is not "
    "part of it, such as a mask that is the same for all examples."
)


def state_exit(
    leaf: OutLeaf,
    evidence: Evidence,
    *,
    rules: tuple[tuple[Any, Rule], ...],
    sync_batch_norm: bool,
    check: bool,
    devices: int,
) -> Exit:
    """Decides how a state array leaves.

    Raises:
      ValueError: if it would differ between devices, or from what one device would compute.
    """
    if evidence.untouched:
        return AS_IS
    kind, taint = evidence.kind, evidence.taint
    if taint is None and kind is not None and kind.same:
        return AS_IS
    rule = find_rule(rules, leaf.position, leaf.variable, sync_batch_norm=sync_batch_norm)
    if rule is not None and not (isinstance(rule, str) and _is_key(evidence.local)):
        return Exit("rule", rule=rule)
    if not check:
        return AS_IS
    if evidence.whole is not None and evidence.whole.shape != evidence.local.shape:
        raise ValueError(
            f"{leaf.path} would hold part of the batch: shape {evidence.local.shape} on each of "
            f"{devices} devices, {evidence.whole.shape} on one. State is the same on every device: "
            'return the batch as an output, use nnx_dp.all_gather, or use strategy="jit".'
        )
    if taint is not None and _is_key(evidence.local):
        raise ValueError(
            f"{leaf.path} is a random key and would differ between the {devices} devices: it "
            f"depends on {taint}. Keys have no mean or sum. Options:\n"
            '1. rngs="broadcast", if all devices are to draw the same.\n'
            "2. Set the key outside the step (nnx.reseed).\n"
            f"3. A function as its rule: state_reduce={{{_type_name(leaf)}: lambda old, new: old}}."
            '\n4. strategy="jit", where the step draws as on one device.'
        )
    if taint is not None:
        hint = kind.reduction if kind is not None and kind.reduction else "mean"
        raise ValueError(
            f"{leaf.path} would differ between the {devices} devices: it depends on {taint}. "
            "Options:\n"
            "1. If it is updated by a gradient, take the gradient with nnx.grad, "
            "nnx.value_and_grad, nnx_dp.grad or nnx_dp.value_and_grad, which average it over "
            "devices; or call nnx_dp.pmean on it.\n"
            f"2. Reduce the value where the step computes it, with nnx_dp.pmean, nnx_dp.psum or "
            "nnx_dp.mean.\n"
            f'3. Give its rule: state_reduce={{{_type_name(leaf)}: "{hint}"}}.\n'
            '4. Use strategy="jit", where the step sees the whole batch.'
        )
    if kind is not None and not kind.same:
        raise ValueError(
            f"{leaf.path} would be equal on all {devices} devices, but not be what one device "
            f"computes: {kind.reason}. Options:\n"
            "1. Use collectives that fit, where the step computes it: nnx_dp.psum for a sum or a "
            "count over the batch, nnx_dp.pmean for a mean, nnx_dp.mean for a mean under a mask.\n"
            f'2. Give its rule: state_reduce={{{_type_name(leaf)}: "accumulate"}} for a running '
            "sum or count.\n"
            '3. Use strategy="jit", where the step sees the whole batch; or check=False if you '
            "know better."
        )
    return AS_IS


def output_exit(
    leaf: OutLeaf, evidence: Evidence, *, axis: Any, reduction: Any, devices: int, why: str
) -> Exit:
    """Decides how an output array leaves.

    Args:
      axis: what `out_axes=` says of it: an axis, None (equal on all devices), or INFER.
      reduction: what `out_reduce=` says of it, or None.
      why: why there is no global trace, where there is none.

    Raises:
      ValueError: if that is not said and cannot be inferred.
    """
    shape, kind, taint = evidence.local.shape, evidence.kind, evidence.taint
    if reduction is not None:
        if _is_key(evidence.local):
            raise ValueError(
                f'out_reduce gives "{reduction}" for {leaf.path}, which is a random key and has '
                "none. Return jax.random.key_data of it, or out_axes=0 for one key of each device."
            )
        return Exit("reduce", rule=reduction)
    if axis is not INFER and axis is not None:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"out_axes gives axis {axis} for {leaf.path}, which has shape {shape} on each "
                f"device. Write an axis from {-len(shape)} to {len(shape) - 1}, or None."
            )
        return Exit("concatenate", axis=axis % len(shape))
    if axis is None and taint is not None:
        raise ValueError(
            f"out_axes gives None for {leaf.path}, but it differs between the {devices} devices: "
            f'it depends on {taint}. Reduce it in the step, or write out_reduce="mean" (or "sum", '
            '"max", "min") for it.'
        )
    if evidence.whole is not None and evidence.whole.shape != shape:
        return _batch_axis(leaf, evidence, devices)
    if taint is None and (kind is None or kind.same):
        return AS_IS
    if kind is not None and kind.reduction is not None and not _is_key(evidence.local):
        return Exit("reduce", rule=kind.reduction)
    if kind is None:
        raise ValueError(
            f"{leaf.path}, of shape {shape} on each of {devices} devices, cannot be told to be "
            f"rows, a mean or a sum of the batch: {why}. Options:\n{NO_GLOBAL_TRACE}\n"
            '3. Say how it is put together: out_axes=0 for rows, out_reduce="mean" (or "sum", '
            '"max", "min") for a value that is reduced.'
        )
    raise ValueError(
        f"{leaf.path}, of shape {shape} on each of {devices} devices, "
        + (f"depends on {taint}, and " if taint is not None else "")
        + f"is neither a plain mean, sum, maximum nor minimum over the batch: {kind.reason}. "
        "Options:\n"
        '1. Say how it is reduced: out_reduce="mean" (or "sum", "max", "min"), or out_axes=0 if '
        "the devices' values are to be concatenated.\n"
        "2. Reduce it in the step: nnx_dp.mean(x, where=mask) for a mean over a varying number of "
        "items, nnx_dp.psum, nnx_dp.pmean, nnx_dp.all_gather.\n"
        '3. Use strategy="jit", where the step sees the whole batch.'
    )


def _batch_axis(leaf: OutLeaf, evidence: Evidence, devices: int) -> Exit:
    local, whole = evidence.local.shape, evidence.whole.shape  # type: ignore[union-attr]
    changed = (
        [i for i, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
        if len(local) == len(whole)
        else []
    )
    shrank = len(changed) == 1 and local[changed[0]] * devices == whole[changed[0]]
    kind = evidence.kind
    if shrank and (kind is None or kind.axis == changed[0]):
        return Exit("concatenate", axis=changed[0])
    reason = (
        kind.reason
        if shrank and kind is not None
        else f"its shape is {local} on each of {devices} devices and {whole} on one"
    )
    raise ValueError(
        f"{leaf.path} cannot be put together from the devices' parts: {reason}. Return one row for "
        "each example in the batch's order, gather the batch first with nnx_dp.all_gather, say "
        f'out_axes= for it if its parts are to be concatenated, or use strategy="jit".'
    )


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _type_name(leaf: OutLeaf) -> str:
    if leaf.variable is None:
        return "..."
    kind = type(leaf.variable)
    return f"nnx.{kind.__name__}" if kind.__module__.startswith("flax") else kind.__name__


def spread_over_output(prefix: Any, structure: OutStructure, name: str) -> list[Any]:
    """Spreads `out_axes=` or `out_reduce=` over the leaves of the output.

    Raises:
      ValueError: if it is not a prefix of the output's structure, or names no reduction.
    """
    try:
        spread = spread_prefix(prefix, structure.form)
    except ValueError as error:
        raise ValueError(
            f"{name} is {prefix!r}, which is not a prefix of the output's structure "
            f"{jax.tree.structure(structure.form)}. Write one entry for the whole output, or a "
            "tree of the same form."
        ) from error
    count = sum(not leaf.is_state for leaf in structure.leaves)
    if len(spread) != count:
        if len(set(map(repr, spread))) > 1:
            raise ValueError(
                f"{name} is {prefix!r}, but the output holds objects that were passed in. Write "
                "one entry for the whole output."
            )
        spread = [spread[0] if spread else prefix] * count
    return spread


def check_out_reduce(out_reduce: Any) -> None:
    """Raises ValueError if `out_reduce=` holds anything but reductions and None."""
    for value in jax.tree.leaves(out_reduce):
        if value not in REDUCTIONS:
            raise ValueError(f"out_reduce is {value!r}; write one of {list(REDUCTIONS)} or None.")
