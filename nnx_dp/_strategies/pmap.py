"""Strategy "pmap": the per-device body, launched by `nnx.pmap`.

The batch gets a leading device axis here and loses it again on the way out; the state is broadcast
with `nnx.StateAxes`.  The caller sees neither.  `nnx.pmap` itself carries the state's updates and
structure back to the caller's objects.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.graphlib import RefMap

from nnx_dp._graph import OutStructure, StateLeaves, flatten_output, write_back
from nnx_dp._per_device import make_plan, per_device_body, per_device_context
from nnx_dp._placement import donatable, only_mesh, put, replicated, sharded
from nnx_dp._roles import BoundCall
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._uneven import unpad

_PMAP = jax.pmap


def compile_pmap(signature: Signature) -> Launch:
    """Plans a signature now and compiles it at its first launch; see `Launch`."""
    bound, options, devices = signature.bound, signature.options, signature.devices
    plan = make_plan(bound, signature.state, options, devices)
    outputs = [i for i, leaf in enumerate(plan.structure.leaves) if not leaf.is_state]
    structures: list[OutStructure] = []

    def on_each_device(nodes, arrays):
        references = RefMap()
        nnx.flatten(nodes, ref_index=references, graph=True)
        inputs = StateLeaves(nodes, bound.node_paths())
        before = dict(zip(inputs.paths, inputs.leaves, strict=True))
        context = per_device_context(options, devices, plan.ledger())
        output = per_device_body(bound, context)(nodes, arrays)
        leaves, structure = flatten_output(bound, nodes, output, outer_index=references)
        structures.append(structure)
        leaves = plan.leave(leaves, before, context)
        write_back(structure, leaves, references)
        return [leaves[i] for i in outputs]

    broadcast = nnx.StateAxes({...: None})
    out_axes = [plan.exits[i].axis if plan.exits[i].how == "concatenate" else None for i in outputs]
    array_axes = [argument.axis for argument in signature.arguments]
    mapped = nnx.pmap(
        on_each_device,
        axis_name=options.axis_name,
        in_axes=([broadcast] * len(bound.node_paths()), array_axes),
        out_axes=out_axes,
        devices=list(signature.mesh.devices.flat),
        donate_argnums=(0,) if signature.donate else (),
        graph=True,
        graph_updates=True,
    )
    return _PmapLaunch(mapped, structures, array_axes, out_axes, signature, plan.drew)


class _PmapLaunch:
    def __init__(self, mapped, structures, array_axes, out_axes, signature, drew):
        self.drew = drew
        self.mapped = mapped
        self._structures = structures
        self._array_axes = array_axes
        self._out_axes = out_axes
        self._devices = signature.devices
        # `chex.fake_pmap` puts a vmap in the place of `jax.pmap`, which leaves the device axis in
        # front of everything.
        self._faked = jax.pmap is not _PMAP
        self._donate = signature.donate
        self._first = True
        self._placement = replicated(signature.mesh)
        axis_name = signature.options.axis_name
        self._placements = [
            self._placement if axis is None else sharded(signature.mesh, axis_name, axis)
            for axis in array_axes
        ]
        self._padded_axes = signature.padded_output_axes

    def lower(self, bound: BoundCall, state: StateLeaves) -> jax.stages.Lowered:
        raise NotImplementedError(
            'nnx.pmap cannot be lowered ahead of time. Lower the step with strategy="shard_map", '
            "which compiles the same per-device program."
        )

    def __call__(self, bound: BoundCall, state: StateLeaves) -> Any:
        state.check_alive()
        with only_mesh(None):
            arrays = [
                put(_add_axis(array, axis, self._devices), placement)
                for array, axis, placement in zip(
                    bound.arrays, self._array_axes, self._placements, strict=True
                )
            ]
            leaves = [put(leaf, self._placement) for leaf in state.leaves]
            if self._donate:
                leaves = donatable(leaves, callers=self._first)
                self._first = False
            if any(a is not b for a, b in zip(leaves, state.leaves, strict=True)):
                state.replace(leaves)
            out = self.mapped(bound.nodes, arrays)
            after = StateLeaves(bound.nodes, bound.node_paths())
            if self._faked:
                after.leaves = [leaf[0] for leaf in after.leaves]
                out = [
                    leaf[0] if axis is None else jnp.moveaxis(leaf, 0, axis)
                    for leaf, axis in zip(out, self._out_axes, strict=True)
                ]
            out = [
                leaf if axis is None else _join_axis(leaf, axis)
                for leaf, axis in zip(out, self._out_axes, strict=True)
            ]
        leaves = unpad(after.leaves + out, self._padded_axes, bound.unpadded_size)
        # The references of before the step: those that its structure was numbered by.
        return write_back(self._structures[-1], leaves, state.references)


def _add_axis(array: Any, axis: int | None, devices: int) -> Any:
    """[..., B, ...] -> [..., devices, B / devices, ...], the device axis at `axis`."""
    if axis is None:
        return array
    shape = array.shape
    xp = np if isinstance(array, np.ndarray) else jnp
    return xp.reshape(array, (*shape[:axis], devices, shape[axis] // devices, *shape[axis + 1 :]))


def _join_axis(array: Any, axis: int) -> Any:
    """[..., devices, b, ...] -> [..., devices * b, ...]."""
    shape = array.shape
    joined = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return jnp.reshape(array, joined)
