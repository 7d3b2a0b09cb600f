"""Strategy "jit": one program over the global batch, which XLA partitions.

The state is placed on every device and the batch split over them; the step's body is the user's,
unchanged, and sees global shapes.  Random streams hand out the bits of one device.

A batch that the devices do not divide is passed in whole and constrained to the data axis inside,
where JAX allows an uneven split and XLA pads: exact, and still parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from nnx_dp._context import StepContext, entered
from nnx_dp._graph import OutStructure, flatten_call
from nnx_dp._placement import replicated
from nnx_dp._strategies._interface import Launch, Signature


def compile_jit(signature: Signature) -> Launch:
    """Compiles a signature at its first launch; see `Launch`."""
    mesh, axis_name = signature.mesh, signature.options.axis_name
    whole = replicated(mesh)
    split = signature.array_placements
    uneven = [
        argument.axis is not None and array.shape[argument.axis] % signature.devices != 0
        for argument, array in signature.bound.located_arrays()
    ]
    placements = [whole if odd else sharding for sharding, odd in zip(split, uneven, strict=True)]
    context = StepContext(
        mode="global",
        axis_name=axis_name,
        axis_size=1,
        mesh=mesh if signature.devices > 1 else None,
    )
    structures: list[OutStructure] = []

    def body(nodes: list[Any], arrays: Any):
        context.fired.clear()
        arrays = [
            jax.lax.with_sharding_constraint(array, sharding) if odd else array
            for array, sharding, odd in zip(arrays, split, uneven, strict=True)
        ]
        with entered(context):
            return signature.bound.call(nodes, arrays)

    wanted = dict(zip(signature.state.paths, signature.state_placements, strict=True))
    flat = flatten_call(
        signature.bound, signature.state.graphdef, signature.state.treedef, body, structures.append
    )

    def function(state_leaves: Sequence[Any], arrays: Any):
        leaves = flat(state_leaves, arrays)
        return [
            jax.lax.with_sharding_constraint(value, wanted.get(leaf.path, whole))
            if leaf.is_state
            else value
            for leaf, value in zip(structures[-1].leaves, leaves, strict=True)
        ]

    jitted = jax.jit(function, donate_argnums=signature.donate_argnums)
    return Launch(
        jitted,
        structures,
        signature.state_placements,
        placements,
        mesh,
        donate=signature.donate,
        fired=context.fired,
        padded_axes=signature.padded_output_axes,
    )
