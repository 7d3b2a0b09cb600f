"""The plan that a per-device step runs by.

Made once per compilation.  The step is traced abstractly at one device's shapes, with every
gradient's reduction still open, and at the global shapes with a data axis of size one.  The
replication proof and the reduction kinds are read off these two jaxprs; what they cannot settle is
an error before anything has run.  Then the step is traced once more, for real, by the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from nnx_dp._comparison import Comparison, compare
from nnx_dp._context import StepContext, entered
from nnx_dp._grad_sync import GradientLedger, LossReduce, differentiated_shapes
from nnx_dp._graph import OutStructure, StateLeaves
from nnx_dp._jaxpr import open_jaxpr
from nnx_dp._options import StepOptions
from nnx_dp._outputs import (
    AS_IS,
    NO_GLOBAL_TRACE,
    Evidence,
    Exit,
    output_exit,
    spread_over_output,
    state_exit,
)
from nnx_dp._per_device import (
    Traced,
    per_device_context,
    shard_shape,
    trace,
    trace_on_devices,
)
from nnx_dp._replication import Taint, Variation, find_variation
from nnx_dp._roles import BoundCall
from nnx_dp._state_reduce import apply_rule, reduce


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that was decided for one compilation of a per-device step.

    Attributes:
      losses: how each gradient's loss is reduced, in trace order.
      batch_leaves: the (gradient, leaf) pairs that are with respect to a per-device array.
      structure: what the step leaves behind.
      exits: how each of its arrays leaves the devices.
      drew: whether the step draws random numbers that differ between devices.
      fired: how often each rule was applied in the trace; see `StepContext`.
      state_leaves: the (gradient, leaf) pairs that are with respect to state.
    """

    losses: tuple[LossReduce, ...]
    batch_leaves: frozenset[tuple[int, int]]
    structure: OutStructure
    exits: tuple[Exit, ...]
    drew: bool = False
    fired: Mapping[str, int] = dataclasses.field(default_factory=dict)
    state_leaves: frozenset[tuple[int, int]] = frozenset()

    def ledger(self) -> GradientLedger:
        return GradientLedger(losses=self.losses, batch_leaves=self.batch_leaves)

    def leave(
        self, leaves: Sequence[Any], inputs: dict[str, Any], context: StepContext
    ) -> list[Any]:
        """Reduces what has to be reduced; runs inside the body, on every device."""
        out = []
        with entered(context):
            for leaf, way, value in zip(self.structure.leaves, self.exits, leaves, strict=True):
                if way.how == "rule":
                    old = inputs.get(leaf.path, value)
                    value = apply_rule(way.rule, old, value, context.axis_name)
                elif way.how == "reduce":
                    value = reduce(str(way.rule), value, context.axis_name)
                out.append(value)
        return out


def make_plan(bound: BoundCall, state: StateLeaves, options: StepOptions, devices: int) -> Plan:
    """Traces the step abstractly and decides everything that its compilation needs.

    Raises:
      ValueError: where the result could differ from what one device would compute.
    """
    try:
        local = trace(bound, state, options, shards=devices, axis_size=devices)
    except Exception as error:
        if devices > 1:
            error.add_note(_shapes_note(bound, devices))
        raise
    if devices == 1:
        exits = tuple(AS_IS for _ in local.structure.leaves)
        means: list[LossReduce] = ["mean"] * local.ledger.opened
        return Plan(
            tuple(means), frozenset(), local.structure, exits, local.ledger.drew, local.fired
        )

    comparison = compare(bound, state, options, devices, local)
    found = find_variation(
        local.jaxpr,
        local.taints,
        axis_name=options.axis_name,
        batch_leaves=comparison.batch_leaves,
    )
    batch_leaves = found.gradients
    if comparison.kinds is None and options.check:
        _check_differentiated(local, batch_leaves, bound, state, devices)
    decided: tuple[LossReduce, ...] = tuple(
        _loss_reduction(site, found.losses, comparison, local.ledger, options, devices)
        for site in range(local.ledger.opened)
    )
    exits = _exits(local, comparison, found.outputs, options, devices)
    return Plan(
        decided,
        frozenset(batch_leaves),
        local.structure,
        exits,
        local.ledger.drew,
        local.fired,
        frozenset(found.others),
    )


_NOTE = "nnx_dp: in a per-device strategy the step sees the batch of one of"


def failed_to_trace(error: Exception) -> bool:
    """Whether an error is the step's own, at one device's shapes."""
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def _shapes_note(bound: BoundCall, devices: int) -> str:
    argument, array = next(
        (argument, array) for argument, array in bound.located_arrays() if argument.axis is not None
    )
    whole, local = array.shape, shard_shape(array, argument.axis, devices, 1).shape
    return (
        f"{_NOTE} {devices} devices: {argument.path} has shape {local} in it, not {whole}. "
        'A step that needs the whole batch runs under strategy="jit".'
    )


def _check_differentiated(
    local: Traced,
    batch_leaves: set[tuple[int, int]],
    bound: BoundCall,
    state: StateLeaves,
    devices: int,
) -> None:
    """Refuses what only a global trace could tell to be a row for each example, or not."""
    shared = {leaf.shape for leaf in state.leaves}
    shared |= {x.shape for argument, x in bound.located_arrays() if argument.axis is None}
    sizes = {size // devices for _, size in bound.batch_sizes()}
    for key, shapes in differentiated_shapes(local.jaxpr).items():
        for shape in shapes - shared:
            if key not in batch_leaves and sizes & set(shape):
                raise ValueError(
                    f"gradient {key[0] + 1} of the step is with respect to an array of shape "
                    f"{shape} on each of {devices} devices, which the step makes itself. The step "
                    "does not trace at the global shapes, so nothing says whether that array has "
                    "a row for each example. Pass it to the step as an argument or a Variable."
                )


def _loss_reduction(
    site: int,
    losses: dict[int, Taint],
    comparison: Comparison,
    ledger: GradientLedger,
    options: StepOptions,
    devices: int,
) -> LossReduce:
    declared = ledger.declared_losses(options.loss_reduce)
    if site in declared:
        return declared[site]
    taint, kind = losses.get(site), comparison.losses.get(site)
    conflict = kind is not None and kind.tag == "conflict"
    alike = kind is None or kind.same or (kind.tag == "unknown" and not kind.curved)
    if taint is None and alike:
        return "mean"
    if kind is not None and kind.reduction in ("mean", "sum"):
        return kind.reduction
    if kind is not None and kind.axis is not None:
        return "sum"
    reason = kind.reason if kind is not None else comparison.why
    if conflict:
        raise ValueError(
            f"gradient {site + 1} of the step, on {devices} devices, is not that of its loss over "
            f"the batch: {reason}. Options:\n"
            "1. Return from the backward pass what it is for one device's examples.\n"
            '2. Say what the loss is, if that is right: loss_reduce="mean" or "sum".\n'
            '3. Use strategy="jit", where the step sees the whole batch.'
        )
    if comparison.kinds is None:
        raise ValueError(
            f"gradient {site + 1} of the step cannot be put together from those of the {devices} "
            f"devices: {reason}, so nothing says whether its loss is a mean or a sum over the "
            f"batch. Options:\n{NO_GLOBAL_TRACE}\n"
            '3. Say what it is: loss_reduce="mean" or "sum", on the decorator or in '
            "nnx_dp.value_and_grad."
        )
    raise ValueError(
        f"the loss of gradient {site + 1} of the step is neither a plain mean nor a plain sum over "
        f"the batch ({reason}), so the gradients of the "
        f"{devices} devices cannot be combined into that of one device. "
        + (f"It depends on {taint}. " if taint is not None else "")
        + "Options:\n"
        "1. For a mean over a varying number of items, nnx_dp.mean(losses, where=mask).\n"
        "2. Reduce it over the devices in the step: nnx_dp.psum, nnx_dp.pmean.\n"
        '3. Say what it is: loss_reduce="mean" or "sum", on the decorator or in '
        "nnx_dp.value_and_grad.\n"
        '4. Use strategy="jit", where the step sees the whole batch.'
        + (_SHARED_DRAWS if ledger.drew else "")
    )


_SHARED_DRAWS = (
    "\n5. Where all examples share one random draw (broadcast_dropout=True of "
    "nnx.MultiHeadAttention, broadcast_dims of nnx.Dropout), draw it alike on all devices: rngs= "
    '"dropout".'
)


def _exits(
    local: Traced,
    comparison: Comparison,
    taints: Sequence[Taint],
    options: StepOptions,
    devices: int,
) -> tuple[Exit, ...]:
    structure = local.structure
    axes = spread_over_output(options.out_axes, structure, "out_axes")
    reductions = spread_over_output(options.out_reduce, structure, "out_reduce")
    inner, _ = open_jaxpr(local.jaxpr)
    inputs = set(map(id, inner.invars))
    exits = []
    for index, leaf in enumerate(structure.leaves):
        shape, whole = comparison.shapes[index]
        evidence = Evidence(
            local=shape,
            whole=whole,
            taint=taints[index],
            kind=None if comparison.kinds is None else comparison.kinds[index],
            untouched=id(inner.outvars[index]) in inputs and taints[index] is None,
        )
        if leaf.is_state:
            way = state_exit(
                leaf,
                evidence,
                rules=options.state_reduce,
                sync_batch_norm=options.sync_batch_norm,
                check=options.check,
                devices=devices,
            )
            if way.how == "rule" and callable(way.rule) and options.check:
                _check_rule(leaf, way.rule, shape, options, devices)
        else:
            way = output_exit(
                leaf,
                evidence,
                axis=axes[leaf.position],
                reduction=reductions[leaf.position],
                devices=devices,
                why=comparison.why,
            )
        exits.append(way)
    return tuple(exits)


def _check_rule(
    leaf: Any,
    rule: Callable[[Any, Any], Any],
    shape: jax.ShapeDtypeStruct,
    options: StepOptions,
    devices: int,
) -> None:
    """Proves that a rule given as a function leaves the same value on every device."""

    def apply(old: Any, new: Any):
        with entered(per_device_context(options, devices, GradientLedger())):
            return rule(old, new)

    body, constants, _ = trace_on_devices(apply, devices, options.axis_name, shape, shape)
    taints: list[Taint] = [None] * (len(constants) + 1) + [
        Variation("the new value on each device")
    ]
    (taint,) = find_variation(body, taints, axis_name=options.axis_name).outputs
    if taint is not None:
        raise ValueError(
            f"the state_reduce rule for {leaf.path} would leave different values on the {devices} "
            f"devices: it depends on {taint}. Reduce the new value in it, with nnx_dp.pmean, "
            "nnx_dp.psum, nnx_dp.pmax or nnx_dp.pmin."
        )
