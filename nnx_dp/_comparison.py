"""The step at one device's shapes against the step at the global shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from nnx_dp._batch_norm import BY_ITSELF
from nnx_dp._grad_sync import differentiated_shapes
from nnx_dp._graph import OutStructure, StateLeaves
from nnx_dp._kinds import Kind, find_kinds
from nnx_dp._leaves import resized
from nnx_dp._options import StepOptions
from nnx_dp._per_device import Traced, trace
from nnx_dp._roles import BoundCall
from nnx_dp._same_program import same_numbers, same_program


@dataclasses.dataclass
class Comparison:
    """What the traces at one device's shapes and at the global shapes say together.

    Attributes:
      shapes: (local, global) of each array that the step leaves behind.
      kinds: how the devices' values of each make up the global one; None without a global trace.
      losses: the same for the loss of each gradient.
      batch_leaves: the (gradient, leaf) pairs whose shape depends on the batch size.
      why: why there is no global trace, where there is none.
    """

    shapes: list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]]
    kinds: list[Kind] | None = None
    losses: dict[int, Kind] = dataclasses.field(default_factory=dict)
    batch_leaves: frozenset[tuple[int, int]] = frozenset()
    why: str = ""


def compare(
    bound: BoundCall,
    state: StateLeaves,
    options: StepOptions,
    devices: int,
    local: Traced,
    through_collectives: bool = True,
) -> Comparison:
    """Traces the step at the global shapes and compares."""
    smallest = min(size // devices for _, size in bound.batch_sizes())
    # Axes of size one broadcast: the step would do other operations than on a larger batch.  What
    # its outputs are does not depend on the size, so two rows show it.
    scale, one = (2 if smallest <= local.ledger.microbatches else 1), local
    try:
        if scale > 1:
            local = trace(bound, state, options, shards=devices, axis_size=devices, scale=scale)
        few = whole = trace(bound, state, options, shards=1, axis_size=1)
        if scale > 1:
            whole = trace(bound, state, options, shards=1, axis_size=1, scale=scale)
    except Exception as error:
        why = f"the step does not trace at the global shapes ({_first_line(error)})"
        return Comparison([(shape, None) for shape in one.out_shapes], why=why)
    _check_same_structure(local.structure, whole.structure)
    if scale > 1 and not _alike_on_two_rows((one, local, few, whole)):
        why = "it does other operations on one example than on two, so give each device two"
        return Comparison([(shape, None) for shape in one.out_shapes], why=why)
    kinds, losses = find_kinds(
        local.jaxpr,
        whole.jaxpr,
        local.shard_axes,
        devices=devices,
        axis_name=options.axis_name,
        constants=list(zip(local.constants, whole.constants, strict=False)),
        through_collectives=through_collectives,
        shared_draws=options.rngs != "split",
        declared=local.ledger.declared_losses(options.loss_reduce),
        trusted=BY_ITSELF in local.fired,
    )
    shapes = zip(local.out_shapes, whole.out_shapes, strict=True)
    differentiated = differentiated_shapes(whole.jaxpr)
    batch_leaves = frozenset(
        key
        for key, local_shapes in differentiated_shapes(local.jaxpr).items()
        if local_shapes != differentiated.get(key)
    )
    why = "it does other operations on a device's batch"
    return Comparison([*shapes], kinds, losses, batch_leaves, why)


def _alike_on_two_rows(traces: Sequence[Traced]) -> bool:
    ranks = [[len(shape.shape) for shape in traced.out_shapes] for traced in traces[:2]]
    jaxprs = [traced.jaxpr for traced in traces]
    return ranks[0] == ranks[1] and same_program(jaxprs, [traced.constants for traced in traces])


def padded_output_axes(
    bound: BoundCall, state: StateLeaves, options: StepOptions, devices: int
) -> tuple[int | None, ...]:
    """Finds the batch axis of every array that a step on a padded batch leaves behind.

    Raises:
      ValueError: if padding would change anything: an output that is not one row for each example,
        or state that depends on the batch.
    """
    local = trace(bound, state, options, shards=devices, axis_size=devices)
    found = compare(bound, state, options, devices, local, through_collectives=False)
    unseen = Kind("unknown", why=found.why)
    kinds = found.kinds or [unseen] * len(local.structure.leaves)
    for leaf, kind in zip(local.structure.leaves, kinds, strict=True):
        if not kind.same and (leaf.is_state or kind.axis is None):
            raise ValueError(
                f'uneven="pad" cannot be used with this step: padding would change {leaf.path}, '
                f"which is not one row for each example ({kind.reason}). Pad the batch yourself "
                "and mask it with nnx_dp.mean(losses, where=mask), or use "
                'uneven="replicate", "drop" or strategy="jit".'
            )
    if not _is_blind_to_padding(bound, state, options):
        raise ValueError(
            'uneven="pad" cannot be used with this step: it computes with the number of examples, '
            f"which is {bound.unpadded_size} before padding. Use "
            'uneven="replicate", "drop" or strategy="jit".'
        )
    return tuple(kind.axis for kind in kinds)


def _is_blind_to_padding(bound: BoundCall, state: StateLeaves, options: StepOptions) -> bool:
    """Whether a step does the same, with the same numbers, on a batch as long as it really is."""
    size = bound.unpadded_size
    assert size is not None
    arrays = [
        array if argument.axis is None else resized(array, argument.axis, size)
        for argument, array in bound.located_arrays()
    ]
    real = dataclasses.replace(bound, arrays=arrays)
    padded, unpadded = (
        trace(call, state, options, shards=1, axis_size=1) for call in (bound, real)
    )
    return same_numbers(padded.jaxpr, unpadded.jaxpr)


def _check_same_structure(local: OutStructure, whole: OutStructure) -> None:
    if local.graphdef != whole.graphdef or len(local.leaves) != len(whole.leaves):
        raise ValueError(
            "the step leaves another structure behind when it sees one device's batch than when it "
            "sees the whole one: a static attribute or an output depends on the batch size. "
            'Keep it in an array (nnx.Variable(jnp.array(...))), or use strategy="jit".'
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
