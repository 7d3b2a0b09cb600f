"""Several processes make the same call, or get the same error.

Before every call the processes tell each other, through the coordination service and not through
the devices, what they are about to do.  One that would do something else must be an error on all of
them, since a program that waits for the others on its devices cannot be stopped.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh

from nnx_dp._graph import StateLeaves
from nnx_dp._processes import is_global, processes_along, whole_shape
from nnx_dp._repeat import Call
from nnx_dp._roles import BoundCall, is_array, is_key
from nnx_dp._uneven import batch_size

_TIMEOUT = 600_000
"""Milliseconds that a process waits for the others at a call; they may be saving, or compiling."""


class Together:
    """One decorated step in several processes."""

    def __init__(self, step: str, mesh: Mesh, axis_name: str):
        self._step, self._mesh, self._axis_name = step, mesh, axis_name
        self._agreement = Agreement(step)

    def whole_call(self, bound: BoundCall) -> BoundCall:
        """Returns a call with the shapes of all processes' parts of the batch together.

        Raises:
          ValueError: if the devices do not divide the batch.
        """
        parts = processes_along(self._mesh, self._axis_name)
        shapes = [
            whole_shape(array, argument.axis, parts) for argument, array in bound.located_arrays()
        ]
        whole = dataclasses.replace(bound, arrays=shapes)
        size, devices = batch_size(whole, self._step), self._mesh.shape[self._axis_name]
        if size % devices:
            where, _ = bound.batch_sizes()[0]
            raise ValueError(
                f"data_parallel({self._step}): {where.path} has {size} examples in "
                f"{jax.process_count()} processes together, which {devices} devices do not divide. "
                "In several processes every device needs the same number of examples: drop or pad "
                "the last, short batch in the data loader, on all processes alike."
            )
        return whole

    def agree(self, call: Call, bind: Callable[[], BoundCall], *, repeated: bool) -> None:
        """Waits for the other processes.

        Args:
          call: what this process is about to call.
          bind: binds it.
          repeated: whether it repeats an earlier call; if not, the state that the processes do not
            share yet is compared as well.

        Raises:
          ValueError: on every process, if one of them calls with other shapes or other state.
        """
        given = [leaf for leaf in call.leaves if is_array(leaf)]
        arrays = [list(leaf.shape) for leaf in given]
        state = None
        if not repeated:
            bound = bind()
            leaves = StateLeaves(bound.nodes, bound.node_paths())
            state = [*zip(leaves.paths, map(_fingerprint, leaves.leaves), strict=True)]
        messages = self._agreement.exchange({"arrays": arrays, "state": state})
        _check_state(messages, self._step)
        if any(message["arrays"] != arrays for message in messages):
            paths = {id(array): argument.path for argument, array in bind().located_arrays()}
            _check_arrays(messages, [paths.get(id(x), "an array") for x in given], self._step)


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


def _fingerprint(leaf: Any) -> int:
    """Returns a checksum of an array's bytes; 0 for one that the processes share already."""
    if is_global(leaf):
        return 0
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    value = np.ascontiguousarray(np.asarray(leaf))
    return zlib.crc32(value.tobytes(), zlib.crc32(str((value.shape, value.dtype)).encode()))


def _check_arrays(messages: Sequence[Any], paths: Sequence[str], step: str) -> None:
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


def _check_state(messages: Sequence[Any], step: str) -> None:
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
