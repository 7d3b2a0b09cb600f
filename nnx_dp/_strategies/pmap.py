"""Strategy "pmap": the per-device body, launched by `nnx.pmap`.

The batch gets a leading device axis here and loses it again on the way out; the state goes in with
`in_axes=None`.  The caller sees neither.  State is handed over as arrays: with NNX objects as its
arguments, `nnx.pmap` walks their graph at every call, which for a small step is most of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnx_dp._graph import OutStructure
from nnx_dp._placement import replicated, sharded
from nnx_dp._plan import make_plan
from nnx_dp._processes import is_global, regroup, spans_processes
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._strategies.shard_map import compile_shard_map, planned_function

_PMAP = jax.pmap


def compile_pmap(signature: Signature) -> Launch:
    """Plans a signature now and compiles it at its first launch; see `Launch`."""
    devices, axis_name = signature.devices, signature.options.axis_name
    plan = make_plan(signature.bound, signature.state, signature.options, devices)
    array_axes = [argument.axis for argument in signature.arguments]
    out_axes = [way.axis if way.how == "concatenate" else None for way in plan.exits]
    structures: list[OutStructure] = []
    processes = spans_processes(signature.mesh)
    run = planned_function(signature, plan, structures.append)
    mapped = nnx.pmap(
        lambda state_leaves, arrays: tuple(run(state_leaves, arrays)),
        axis_name=axis_name,
        in_axes=(None, tuple(array_axes)),
        out_axes=tuple(out_axes),
        devices=tuple(signature.mesh.devices.flat),
        donate_argnums=signature.donate_argnums,
        # In several processes JAX hashes the axes, and nnx.pmap has lists of them in tree mode.
        graph=processes,
        graph_updates=processes,
    )
    # `chex.fake_pmap` puts a vmap in the place of `jax.pmap`, which leaves the device axis in
    # front of everything.
    faked = jax.pmap is not _PMAP

    def among_processes(state_leaves: Sequence[Any], arrays: Any):
        """`jax.pmap` takes and returns what this process has; a `Launch`, global arrays."""
        mesh, own = signature.mesh, signature.mesh.local_mesh
        state_leaves = [regroup(leaf, replicated(own), leaf.shape) for leaf in state_leaves]
        here = [
            _regrouped(array, own, axis_name, axis, mesh) if is_global(array) else array
            for array, axis in zip(arrays, array_axes, strict=True)
        ]
        leaves = mapped(state_leaves, tuple(here))
        return [
            _regrouped(leaf, mesh, axis_name, axis, own)
            for leaf, axis in zip(leaves, out_axes, strict=True)
        ]

    def function(state_leaves: Sequence[Any], arrays: Any):
        if processes:
            leaves = among_processes(state_leaves, arrays)
        else:
            leaves = mapped(state_leaves, tuple(arrays))
        if faked:
            leaves = [
                leaf[0] if axis is None else jnp.moveaxis(leaf, 0, axis)
                for leaf, axis in zip(leaves, out_axes, strict=True)
            ]
        return [
            leaf if axis is None else _join_axis(leaf, axis)
            for leaf, axis in zip(leaves, out_axes, strict=True)
        ]

    return PmapLaunch(
        function,
        structures,
        signature.state_placements,
        signature.array_placements,
        mesh=None,
        donate=signature.donate,
        strategy="pmap",
        plan=plan,
        fired=plan.fired,
        padded_axes=signature.padded_output_axes,
        array_axes=array_axes,
        devices=devices,
        own_devices=signature.mesh.local_mesh.shape[axis_name],
        same_on_shard_map=functools.partial(compile_shard_map, signature, plan),
    )


def _regrouped(array: Any, to: Mesh, axis_name: str, axis: int | None, mesh: Mesh) -> jax.Array:
    """Takes an array with a device axis from one mesh to another that has the same shards."""
    if axis is None:
        return regroup(array, replicated(to), array.shape)
    devices = array.shape[axis] * to.shape[axis_name] // mesh.shape[axis_name]
    shape = (*array.shape[:axis], devices, *array.shape[axis + 1 :])
    return regroup(array, sharded(to, axis_name, axis), shape)


class PmapLaunch(Launch):
    """A `Launch` that gives the batch its device axis."""

    def __init__(
        self,
        *args: Any,
        array_axes: Sequence[int | None],
        devices: int,
        own_devices: int,
        same_on_shard_map: Callable[[], Launch],
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._array_axes, self._devices, self._own_devices = array_axes, devices, own_devices
        self._same_on_shard_map = same_on_shard_map

    def lower_like(self, state_leaves: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Lowered:
        return self._same_on_shard_map().lower(state_leaves, arrays)

    def place_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return super().place_arrays(
            [
                _add_axis(array, axis, self._devices if is_global(array) else self._own_devices)
                for array, axis in zip(arrays, self._array_axes, strict=True)
            ]
        )


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
