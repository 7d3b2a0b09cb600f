"""Where each array of the state lives: on every device, but for what has a sharding of its own.

Under ``"jit"`` a mesh may have axes besides the data axis, over which parameters are sharded: that
is left as it is.  With ``shard_optimizer=True`` the optimizer's arrays are divided over the data
axis as well (ZeRO-1, https://arxiv.org/abs/1910.02054): each device keeps and updates one part.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_dp._graph import StateLeaves
from nnx_dp._leaves import is_key
from nnx_dp._placement import replicated

SMALLEST = 1024
"""Elements below which an array of the optimizer is not worth dividing."""


def state_placements(
    state: StateLeaves, mesh: Mesh, axis_name: str, *, shard_optimizer: bool
) -> tuple[NamedSharding, ...]:
    """Returns where each array of the state is wanted."""
    whole = replicated(mesh)
    if len(mesh.axis_names) == 1 and not shard_optimizer:
        return (whole,) * len(state.leaves)
    out = []
    for leaf, variable in zip(state.leaves, state.variables, strict=True):
        spec = _own_spec(leaf, variable, mesh)
        if shard_optimizer and isinstance(variable, nnx.OptState):
            spec = _divided(leaf, spec, mesh, axis_name)
        out.append(whole if not any(spec) else NamedSharding(mesh, spec))
    return tuple(out)


def check_whole(
    state: StateLeaves, placements: tuple[NamedSharding, ...], step: str, strategy: str
) -> None:
    """Raises ValueError if an array has a sharding that a per-device strategy would undo."""
    for index, placement in enumerate(placements):
        if any(placement.spec):
            raise ValueError(
                f"data_parallel({step}): {state.paths[index]} is sharded as {placement.spec}, and "
                f'strategy="{strategy}" keeps all of the state on every device. Use '
                'strategy="jit", with nnx_dp.per_device around a kernel that XLA cannot partition.'
            )


def _own_spec(leaf: Any, variable: nnx.Variable[Any] | None, mesh: Mesh) -> P:
    """Returns how an array is sharded over a mesh, or is to be by its Variable's metadata."""
    sharding = getattr(leaf, "sharding", None)
    if (
        isinstance(sharding, NamedSharding)
        and any(sharding.spec)
        and set(sharding.mesh.axis_names) <= set(mesh.axis_names)
    ):
        return sharding.spec
    names = None if variable is None else variable.get_metadata().get("out_sharding")
    if not names or len(names) > len(leaf.shape):
        return P()
    return P(*(_known(name, mesh) for name in names))


def _known(name: Any, mesh: Mesh) -> Any:
    """Leaves out the names of other meshes' axes, as `nnx.with_partitioning` does."""
    if isinstance(name, (tuple, list)):
        kept = tuple(part for part in name if part in mesh.axis_names)
        return kept or None
    return name if name in mesh.axis_names else None


def _divided(leaf: Any, spec: P, mesh: Mesh, axis_name: str) -> P:
    """Adds the data axis to a sharding, on the longest axis of the array that can be divided."""
    if leaf.size < SMALLEST or is_key(leaf):
        return spec
    names = [*spec, *[None] * (leaf.ndim - len(spec))]
    if any(axis_name in (name if isinstance(name, tuple) else (name,)) for name in names):
        return spec
    devices = mesh.shape[axis_name]
    free = [
        axis for axis, name in enumerate(names) if name is None and leaf.shape[axis] % devices == 0
    ]
    if not free:
        return spec
    names[max(free, key=lambda axis: leaf.shape[axis])] = axis_name
    return P(*names)
