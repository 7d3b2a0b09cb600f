"""Several processes: what each gives, what it gets back, and that they agree.

The distributed engine is JAX's own.  A mesh that spans processes takes arrays that are global
already, or each process's own part of the batch; state is made alike in every process.  Before
every call the processes tell each other, through the coordination service and not through the
devices, what they are about to do: a process that would do something else must be an error on all
of them, since a program that waits for the others cannot be stopped.
"""

from __future__ import annotations

import collections
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding

from nnx_dp._roles import is_key, shape_of

_TIMEOUT = 600_000
"""Milliseconds that a process waits for the others at a call; they may be saving, or compiling."""


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
        return jax.random.wrap_key_data(
            _local_leaf(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
        )
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


def spans_processes(mesh: Mesh) -> bool:
    return jax.process_count() > 1 and mesh.is_multi_process


def is_global(leaf: Any) -> bool:
    """Whether an array is spread over several processes already."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def make_global(leaf: Any, sharding: NamedSharding, *, whole: bool) -> jax.Array:
    """Makes a global array of what each process has: its own part, or the whole of it."""
    if is_key(leaf):
        data = make_global(jax.random.key_data(leaf), sharding, whole=whole)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    value = np.asarray(leaf)
    if whole:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return jax.make_array_from_process_local_data(sharding, value)


def regroup(leaf: jax.Array, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Takes the shards that this process has of an array as shards of another, without a copy."""
    if is_key(leaf):
        data = jax.random.key_data(leaf)
        data = regroup(data, sharding, (*shape, *data.shape[leaf.ndim :]))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


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


class Agreement:
    """Tells the other processes what this one is about to do, call by call."""

    def __init__(self, name: str):
        # The n-th step of a name is the same step in every process.
        _made[name] += 1
        self._name = f"nnx_dp/{name}/{_made[name]}"
        self._calls = 0

    def exchange(self, message: Any) -> list[Any]:
        """Returns the message of every process, in order of their indices."""
        client = distributed.global_state.client
        assert client is not None
        self._calls += 1
        place = f"{self._name}/{self._calls}"
        client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(message))
        client.wait_at_barrier(f"{place}/barrier", _TIMEOUT)
        told = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(place)}
        if jax.process_index() == 0 and self._calls > 1:
            client.key_value_delete(f"{self._name}/{self._calls - 1}/")
        return [json.loads(told[index]) for index in sorted(told)]


_made: collections.Counter[str] = collections.Counter()


def fingerprint(leaf: Any) -> int:
    """Returns a checksum of an array's bytes; 0 for one that the processes share already."""
    if is_global(leaf):
        return 0
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    value = np.ascontiguousarray(np.asarray(leaf))
    return zlib.crc32(value.tobytes(), zlib.crc32(str((value.shape, value.dtype)).encode()))


def check_arrays(messages: Sequence[Any], paths: Sequence[str], step: str) -> None:
    """Raises ValueError, on every process, if they are about to give arrays of other shapes."""
    first = messages[0]["arrays"]
    for other, message in enumerate(messages):
        for path, mine, theirs in zip(paths, first, message["arrays"], strict=False):
            if mine != theirs:
                raise ValueError(
                    f"data_parallel({step}): {path} has shape {tuple(mine)} in process 0 and "
                    f"{tuple(theirs)} in process {other}. Every process gives its own part of the "
                    "batch, and all parts have one shape: drop or pad the last, short batch on all "
                    "processes alike."
                )
        if len(first) != len(message["arrays"]):
            raise ValueError(
                f"data_parallel({step}): process 0 gives {len(first)} arrays and process {other} "
                f"gives {len(message['arrays'])}. Every process makes the same calls."
            )


def check_state(messages: Sequence[Any], step: str) -> None:
    """Raises ValueError, on every process, if the state of one is not that of the others."""
    first = messages[0]["state"]
    for other, message in enumerate(messages):
        if first is None or message["state"] is None:
            continue
        mine, theirs = dict(map(tuple, first)), dict(map(tuple, message["state"]))
        differing = [path for path in [*mine, *theirs] if mine.get(path) != theirs.get(path)]
        if differing:
            path = differing[0]
            raise ValueError(
                f"data_parallel({step}): {path} differs between process 0 and process {other} "
                "before the first step. State has to be made alike in every process: with the same "
                "seed, or from the same checkpoint."
            )
