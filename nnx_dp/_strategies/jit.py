"""Strategy "jit": one program over the global batch, which XLA partitions.

The state is placed on every device and the batch split over them; the step's body is the user's,
unchanged, and sees global shapes.  Random streams hand out the bits of one device.

A batch that the devices do not divide is passed in whole and constrained to the data axis inside,
where JAX allows an uneven split and XLA pads: exact, and still parallel.
"""

from __future__ import annotations

from typing import Any

import jax

from nnx_dp._context import StepContext, entered
from nnx_dp._graph import OutStructure, StateLeaves, flatten_call, write_back
from nnx_dp._placement import (
    check_kept,
    donatable,
    only_mesh,
    put,
    replicated,
    sharded,
)
from nnx_dp._roles import BoundCall
from nnx_dp._strategies._interface import Signature
from nnx_dp._uneven import unpad


def compile_jit(signature: Signature) -> FlatLaunch:
    """Compiles a signature at its first launch; see `Launch`."""
    mesh, axis_name = signature.mesh, signature.options.axis_name
    whole = replicated(mesh)
    split = [
        None if argument.axis is None else sharded(mesh, axis_name, argument.axis)
        for argument in signature.arguments
    ]
    uneven = [
        argument.axis is not None and array.shape[argument.axis] % signature.devices != 0
        for argument, array in zip(signature.arguments, signature.bound.arrays, strict=True)
    ]
    placements = [
        whole if sharding is None or odd else sharding
        for sharding, odd in zip(split, uneven, strict=True)
    ]
    context = StepContext(
        mode="global",
        axis_name=axis_name,
        axis_size=1,
        mesh=mesh if signature.devices > 1 else None,
    )
    structures: list[OutStructure] = []

    def body(nodes, arrays):
        arrays = [
            jax.lax.with_sharding_constraint(array, sharding) if odd else array
            for array, sharding, odd in zip(arrays, split, uneven, strict=True)
        ]
        with entered(context):
            return signature.bound.call(nodes, arrays)

    flat = flatten_call(
        signature.bound, signature.state.graphdef, signature.state.treedef, body, structures.append
    )

    def function(state_leaves, arrays):
        leaves = flat(state_leaves, arrays)
        return [
            jax.lax.with_sharding_constraint(value, whole) if leaf.is_state else value
            for leaf, value in zip(structures[-1].leaves, leaves, strict=True)
        ]

    jitted = jax.jit(function, donate_argnums=(0,) if signature.donate else ())
    return FlatLaunch(jitted, structures, whole, placements, signature)


class FlatLaunch:
    """Launches a compiled function of flat lists: places, runs, writes back.

    Attributes:
      jitted: `(state leaves, arrays) -> leaves`, the function that `jax.jit` returned.
    """

    def __init__(
        self, jitted, structures, state_placement, placements, signature: Signature, drew=False
    ):
        self.drew = drew
        self.jitted = jitted
        self._structures = structures
        self._mesh = state_placement.mesh
        self._state_placement = state_placement
        self._placements = placements
        self._donate = signature.donate
        self._padded_axes = signature.padded_output_axes
        self._first = True

    def place(self, bound: BoundCall, state: StateLeaves) -> tuple[list[Any], list[Any]]:
        """Returns the state and the other arrays, on the devices where the step wants them."""
        state.check_alive()
        leaves = [put(leaf, self._state_placement) for leaf in state.leaves]
        if self._donate:
            leaves = donatable(leaves, callers=self._first)
        arrays = [
            put(array, placement)
            for array, placement in zip(bound.arrays, self._placements, strict=True)
        ]
        return leaves, arrays

    def lower(self, bound: BoundCall, state: StateLeaves) -> jax.stages.Lowered:
        with only_mesh(self._mesh):
            return self.jitted.lower(*self.place(bound, state))

    def __call__(self, bound: BoundCall, state: StateLeaves) -> Any:
        with only_mesh(self._mesh):
            state_leaves, arrays = self.place(bound, state)
            try:
                leaves = self.jitted(state_leaves, arrays)
            except Exception as error:
                check_kept(state_leaves, error)
                raise
        self._first = False
        leaves = unpad(leaves, self._padded_axes, bound.unpadded_size)
        return write_back(self._structures[-1], leaves, state.references)
