"""Several processes make the same call, or get the same error.

Before every call the processes tell each other, through the coordination service and not through
the devices, what they are about to do.  One that would do something else must be an error on all of
them, since a program that waits for the others on its devices cannot be stopped.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh

from nnx_dp._graph import StateLeaves
from nnx_dp._leaves import is_array, is_key, is_state
from nnx_dp._options import Settings
from nnx_dp._processes import is_global, processes_along, whole_shape
from nnx_dp._repeat import Call, leaf_paths
from nnx_dp._roles import BoundCall
from nnx_dp._uneven import batch_size

_TIMEOUT = 600_000
"""Milliseconds that a process waits for the others at a call; they may be saving, or compiling."""


class Together:
    """One decorated step in several processes."""

    def __init__(self, step: str, mesh: Mesh, axis_name: str, settings: Settings):
        self._step, self._mesh, self._axis_name = step, mesh, axis_name
        self._static = settings.static_argnums, settings.static_argnames
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
            share yet, and arrays that are not split, are compared as well.

        Raises:
          ValueError: on every process, if one of them calls with other shapes, other values that
            are not part of the batch, or other state.
        """
        leaves_told = [*map(_told, call.leaves)]
        state = None
        if not repeated:
            bound = bind()
            leaves = StateLeaves(bound.nodes, bound.node_paths())
            alike = [*zip(leaves.paths, leaves.leaves, strict=True)]
            alike += [
                (argument.path, array)
                for argument, array in bound.located_arrays()
                if argument.axis is None and is_array(array) and array.ndim
            ]
            state = [(path, _fingerprint(array)) for path, array in alike]
        messages = self._agreement.exchange({"leaves": leaves_told, "state": state})
        _check_state(messages, self._step)
        if any(message["leaves"] != leaves_told for message in messages):
            _check_leaves(messages, leaf_paths(call, bind(), *self._static), self._step)


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


def _told(leaf: Any) -> Any:
    """Says of a leaf what all processes have to share: a shape, or a value that is no batch."""
    if is_state(leaf):
        return None
    if is_array(leaf) and leaf.ndim and not is_key(leaf):
        return [str(leaf.dtype), *leaf.shape]
    if is_array(leaf):
        return f"{leaf.dtype} {_fingerprint(leaf):x}" if is_key(leaf) else str(np.asarray(leaf))
    plain = isinstance(leaf, (bool, int, float, complex, str, enum.Enum, np.generic))
    return repr(leaf) if plain else getattr(leaf, "__qualname__", type(leaf).__qualname__)


def _check_leaves(messages: Sequence[Any], paths: Mapping[int, str], step: str) -> None:
    """Raises ValueError, on every process, if they are about to call with other arguments."""
    first = messages[0]["leaves"]
    for other, message in enumerate(messages):
        if len(first) != len(message["leaves"]):
            raise ValueError(
                f"data_parallel({step}): process 0 gives {len(first)} arguments and process "
                f"{other} gives {len(message['leaves'])}. Every process makes the same calls."
            )
        for index, (mine, theirs) in enumerate(zip(first, message["leaves"], strict=True)):
            if mine == theirs:
                continue
            path = paths.get(index, "an argument")
            if isinstance(mine, list) and isinstance(theirs, list) and mine[0] == theirs[0]:
                raise ValueError(
                    f"data_parallel({step}): {path} has shape {tuple(mine[1:])} in process 0 and "
                    f"{tuple(theirs[1:])} in process {other}. Every process gives its own part of "
                    "the batch, and all parts have one shape: drop or pad the last, short batch on "
                    "all processes alike."
                )
            raise ValueError(
                f"data_parallel({step}): {path} is {_worded(mine)} in process 0 and "
                f"{_worded(theirs)} in process {other}. Only the values of the batch may differ: "
                "give every process the same numbers, keys, flags and dtypes."
            )


def _worded(told: Any) -> str:
    return f"{told[0]}{told[1:]}" if isinstance(told, list) else str(told)


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
                "before the first step. What is not part of the batch has to be made alike in "
                "every process: with the same seed, or from the same checkpoint."
            )
