"""The body that the shard_map and pmap strategies share, and its abstract traces.

The body is the step as one device runs it: it sees one device's batch, and a `StepContext` says by
which rules.  `trace` runs it on shapes alone, for `_plan.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from nnx_dp._context import StepContext, entered
from nnx_dp._grad_sync import GradientLedger
from nnx_dp._graph import OutStructure, StateLeaves, flatten_call
from nnx_dp._jaxpr import Literal, open_jaxpr
from nnx_dp._leaves import is_key, resized, shape_of
from nnx_dp._options import StepOptions
from nnx_dp._placement import only_mesh
from nnx_dp._replication import Taint, Variation
from nnx_dp._rngs import is_split, split_key
from nnx_dp._roles import BoundCall, Role


def per_device_context(options: StepOptions, devices: int, ledger: GradientLedger) -> StepContext:
    """Returns the rules that one trace of a per-device body runs by."""
    return StepContext(
        mode="per_device",
        axis_name=options.axis_name,
        axis_size=devices,
        sync_batch_norm=options.sync_batch_norm,
        rngs=options.rngs,
        grad_dtype=options.grad_dtype,
        ledger=ledger,
    )


def per_device_body(
    bound: BoundCall, context: StepContext
) -> Callable[[list[Any], list[Any]], Any]:
    """Returns the step as one device runs it: `(nodes, arrays) -> output`."""
    arguments = bound.array_arguments()

    def body(nodes: list[Any], arrays: Any):
        with entered(context):
            arrays = list(arrays)
            for index, (argument, array) in enumerate(zip(arguments, arrays, strict=True)):
                alike = argument.role is Role.REPLICATED and is_key(array)
                if alike and is_split(context.rngs, ""):
                    context.fired[f"key {argument.path}: another on each device"] += 1
                    arrays[index] = split_key(array, context)
            return bound.call(nodes, arrays)

    return body


@dataclasses.dataclass
class Traced:
    jaxpr: Any
    structure: OutStructure
    ledger: GradientLedger
    fired: Mapping[str, int]
    out_shapes: list[jax.ShapeDtypeStruct]
    taints: list[Taint]
    shard_axes: list[int | None]
    constants: list[Any]


def trace(
    bound: BoundCall,
    state: StateLeaves,
    options: StepOptions,
    *,
    shards: int,
    axis_size: int,
    scale: int = 1,
) -> Traced:
    """Traces the step abstractly with its batch cut into `shards` parts, each `scale` as long."""
    ledger = GradientLedger()
    context = per_device_context(options, axis_size, ledger)
    structures: list[OutStructure] = []
    function = flatten_call(
        bound,
        state.graphdef,
        state.treedef,
        per_device_body(bound, context),
        structures.append,
    )
    arguments = bound.array_arguments()
    arrays = [
        shard_shape(array, argument.axis, shards, scale)
        for argument, array in zip(arguments, bound.arrays, strict=True)
    ]
    state_shapes = [shape_of(leaf) for leaf in state.leaves]
    inner, constants, out_shapes = trace_on_devices(
        function, axis_size, options.axis_name, state_shapes, arrays
    )
    same = len(constants) + len(state_shapes)
    taints: list[Taint] = [None] * same
    taints += [
        Variation(f"the batch ({argument.path})") if argument.role is Role.BATCH else None
        for argument in arguments
    ]
    axes = [None] * same + [argument.axis for argument in arguments]
    fired = dict(context.fired)
    return Traced(inner, structures[-1], ledger, fired, list(out_shapes), taints, axes, constants)


def trace_on_devices(
    function: Callable[..., Any], devices: int, axis_name: str, *shapes: Any
) -> tuple[Any, list[Any], Any]:
    """Traces a function as each of several devices runs it, on abstract devices.

    Returns:
      The jaxpr of the body, the values of the arrays that it closes over, which JAX hands in as
      its first inputs, and the shapes of the results.
    """
    mesh = AbstractMesh((devices,), (axis_name,), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with only_mesh(None):
        jaxpr, out_shapes = jax.make_jaxpr(mapped, return_shape=True)(*shapes)
    outer, values = open_jaxpr(jaxpr)
    (equation,) = [e for e in outer.eqns if e.primitive.name == "shard_map"]
    body = equation.params["jaxpr"]
    known = dict(zip(outer.constvars, values, strict=False))
    inputs = len(jax.tree.leaves(shapes))
    closed_over = equation.invars[: len(equation.invars) - inputs]
    constants = [
        atom.val if isinstance(atom, Literal) else known.get(atom, object()) for atom in closed_over
    ]
    return body, constants, out_shapes


def shard_shape(array: Any, axis: int | None, shards: int, scale: int) -> jax.ShapeDtypeStruct:
    if axis is None:
        return shape_of(array)
    return resized(array, axis, array.shape[axis] // shards * scale)
