"""Several processes: what each gives, and what it gets back.

The distributed engine is JAX's own.  A mesh that spans processes takes arrays that are global
already, or each process's own part of the batch; state is made alike in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_dp._leaves import is_key, shape_of


def local(tree: Any) -> Any:
    """Returns this process's part of a pytree of arrays.

    A decorated step that runs in several processes returns a value with a row for each example as a
    global array, of which a process can read only its own rows.

    Args:
      tree: pytree of arrays; of a global array of shape ``[B, ...]``, this process holds the rows
        of its devices.

    Returns:
      A pytree of arrays on this process alone: of shape ``[b, ...]``, with the rows that this
      process gave, in their order; whole where every device has all of it.

    Example::

      >>> import jax.numpy as jnp, nnx_dp
      >>> nnx_dp.local({"loss": jnp.ones(())})["loss"].shape
      ()
    """
    return jax.tree.map(_local_leaf, tree)


def _local_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if is_key(leaf):
        return _on_key_data(_local_leaf, leaf)
    # One shard of each part: a device of another mesh axis may hold the same rows.
    parts = {_starts(shard.index): shard for shard in leaf.addressable_shards}
    ordered = [np.asarray(parts[start].data) for start in sorted(parts)]
    if len(ordered) == 1:
        return jnp.asarray(ordered[0])
    first, second = sorted(parts)[:2]
    axis = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return jnp.asarray(np.concatenate(ordered, axis))


def _starts(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def spans_processes(mesh: Mesh | AbstractMesh) -> bool:
    return jax.process_count() > 1 and bool(mesh.is_multi_process)


def is_global(leaf: Any) -> bool:
    """Whether an array is spread over several processes already."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def make_global(leaf: Any, sharding: NamedSharding, *, whole: bool) -> jax.Array:
    """Makes a global array of what each process has: its own part, or the whole of it."""
    if is_key(leaf):
        return _on_key_data(lambda data: make_global(data, sharding, whole=whole), leaf)
    value = np.asarray(leaf)
    if whole:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return jax.make_array_from_process_local_data(sharding, value)


def regroup(leaf: jax.Array, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Takes the shards that this process has of an array as shards of another, without a copy."""
    if is_key(leaf):
        key = leaf.ndim
        return _on_key_data(lambda d: regroup(d, sharding, (*shape, *d.shape[key:])), leaf)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _on_key_data(act: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    """Does to typed keys what can be done to their data only."""
    return jax.random.wrap_key_data(act(jax.random.key_data(keys)), impl=jax.random.key_impl(keys))


def whole_shape(leaf: Any, axis: int | None, processes: int) -> jax.ShapeDtypeStruct:
    """Returns the global shape of an array of which this process may have a part."""
    shape = shape_of(leaf)
    if axis is None or is_global(leaf):
        return shape
    sizes = [size * (processes if i == axis else 1) for i, size in enumerate(shape.shape)]
    return shape_of(leaf, shape=tuple(sizes))


def processes_along(mesh: Mesh, axis_name: str) -> int:
    """Returns into how many parts the processes cut a mesh axis."""
    own = mesh.local_mesh.shape[axis_name]
    return mesh.shape[axis_name] // own
