"""Strategy "shard_map": the per-device body, one copy a device, joined by `jax.shard_map`.

`check_vma=False`: with it, JAX inserts a psum of its own into the gradients of replicated state,
which makes them N times too large, and refuses kernels and loops that it cannot type.  The package
proves replication itself (`_replication.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_dp._context import StepContext, entered
from nnx_dp._graph import OutStructure, flatten_call
from nnx_dp._per_device import per_device_body, per_device_context
from nnx_dp._placement import replicated, spec
from nnx_dp._plan import Plan, make_plan
from nnx_dp._strategies._interface import Launch, Signature


def compile_shard_map(signature: Signature, plan: Plan | None = None) -> Launch:
    """Plans a signature now and compiles it at its first launch; see `Launch`."""
    mesh = signature.mesh
    mapped, structures, plan = shard_mapped(signature, plan)
    return Launch(
        jax.jit(mapped, donate_argnums=signature.donate_argnums),
        structures,
        signature.state_placements,
        signature.array_placements,
        mesh,
        donate=signature.donate,
        strategy="shard_map",
        plan=plan,
        fired=plan.fired,
        padded_axes=signature.padded_output_axes,
    )


def shard_mapped(
    signature: Signature, plan: Plan | None = None
) -> tuple[Callable[..., list[Any]], list[OutStructure], Plan]:
    """Plans a signature, if that is not done, and maps it over the devices.

    Returns:
      The mapped function, `(state leaves, arrays) -> leaves`; a list that is told, at each trace,
      what the step leaves behind; and the plan.
    """
    mesh, axis_name = signature.mesh, signature.options.axis_name
    if plan is None:
        plan = make_plan(signature.bound, signature.state, signature.options, signature.devices)
    structures: list[OutStructure] = []
    function = planned_function(signature, plan, structures.append)
    array_specs = [placement.spec for placement in signature.array_placements]
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(P(), array_specs),
        out_specs=out_specs(plan, axis_name),
        axis_names={axis_name},
        check_vma=False,
    )
    return mapped, structures, plan


def planned_function(
    signature: Signature, plan: Plan, on_structure: Callable[[OutStructure], None]
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Returns the step as one device runs it, by a plan: `(state leaves, arrays) -> leaves`."""
    bound, state = signature.bound, signature.state

    def function(state_leaves: Sequence[Any], arrays: Any):
        context = per_device_context(signature.options, signature.devices, plan.ledger())
        body = per_device_body(bound, context)
        flat = flatten_call(bound, state.graphdef, state.treedef, body, on_structure)
        inputs = dict(zip(state.paths, state_leaves, strict=True))
        return plan.leave(flat(state_leaves, arrays), inputs, context)

    return function


def out_specs(plan: Plan, axis_name: str) -> list[P]:
    return [
        spec(axis_name, way.axis) if way.how == "concatenate" and way.axis is not None else P()
        for way in plan.exits
    ]


def compile_replicated(signature: Signature) -> Launch:
    """Compiles a step that every device runs alike on the whole batch: `uneven="replicate"`.

    The devices do not talk, so the data axis has another name and the body's view is global.
    """
    bound, state = signature.bound, signature.state
    axis_name = "replicas of " + signature.options.axis_name
    mesh = Mesh(signature.mesh.devices.reshape(-1), (axis_name,))
    context = StepContext(mode="global", axis_name=signature.options.axis_name, axis_size=1)
    structures: list[OutStructure] = []

    def body(nodes: list[Any], arrays: Any):
        with entered(context):
            return bound.call(nodes, arrays)

    flat = flatten_call(bound, state.graphdef, state.treedef, body, structures.append)
    mapped = jax.shard_map(flat, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=signature.donate_argnums)
    whole = replicated(mesh)
    placements = [whole for _ in signature.arguments]
    everywhere = [whole for _ in signature.state.leaves]
    return Launch(
        jitted,
        structures,
        everywhere,
        placements,
        mesh,
        donate=signature.donate,
        strategy="replicate",
    )
