"""The compiled signatures of one step."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from nnx_dp._comparison import padded_output_axes
from nnx_dp._graph import StateLeaves
from nnx_dp._leaves import shape_of
from nnx_dp._options import Settings, StepOptions
from nnx_dp._repeat import trace_modes
from nnx_dp._roles import BoundCall
from nnx_dp._state_placement import check_whole, state_placements
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._strategies.auto import choose
from nnx_dp._strategies.jit import compile_jit
from nnx_dp._strategies.pmap import compile_pmap
from nnx_dp._strategies.shard_map import compile_replicated, compile_shard_map
from nnx_dp._uneven import batch_size

_log = logging.getLogger("nnx_dp")

_COMPILERS: dict[str, Callable[[Signature], Launch]] = {
    "jit": compile_jit,
    "shard_map": compile_shard_map,
    "pmap": compile_pmap,
    "replicate": compile_replicated,
}


class Launches:
    """Finds the launch of a call, and compiles it when its signature is new.

    Attributes:
      strategy: that of the last signature that was compiled; "auto" before the first.
    """

    def __init__(self, step: str, settings: Settings, options: StepOptions):
        self.strategy = settings.strategy
        self._step = step
        self._settings = settings
        self._options = options
        self._launches: dict[Any, Launch] = {}
        # Two threads with one new signature compile it once.
        self._compiling = threading.RLock()

    def __len__(self) -> int:
        return len(self._launches)

    def __iter__(self):
        return iter(self._launches.values())

    def find(
        self, bound: BoundCall, whole: BoundCall, state: StateLeaves, mesh: Mesh, how: str
    ) -> Launch:
        """Returns the launch of a call.

        Args:
          bound: the call, with this process's batch.
          whole: the same, with the batch of all processes.
          state: the arrays of its NNX objects.
          mesh: the devices.
          how: a strategy, "replicate", or "pad" for a batch that was padded.
        """
        shapes = tuple(
            (aval.shape, aval.dtype, aval.weak_type)
            for aval in map(shape_of, [*state.leaves, *whole.arrays])
        )
        placements = state_placements(
            state,
            mesh,
            self._options.axis_name,
            shard_optimizer=self._settings.shard_optimizer,
        )
        key = (how, bound.key, state.key, shapes, placements, trace_modes())
        with self._compiling:
            if key not in self._launches:
                signature = Signature(
                    whole.abstract(),
                    state.abstract(),
                    mesh,
                    placements,
                    self._options,
                    self._settings.donate,
                )
                if how == "pad":
                    axes = padded_output_axes(
                        signature.bound, signature.state, self._options, signature.devices
                    )
                    signature = dataclasses.replace(signature, padded_output_axes=axes)
                    how = self._settings.strategy
                self._launches[key] = self._compile(signature, how, bound, state)
            return self._launches[key]

    def _compile(
        self, signature: Signature, how: str, bound: BoundCall, state: StateLeaves
    ) -> Launch:
        if how not in ("jit", "auto"):
            check_whole(state, signature.state_placements, self._step, how)
        if how != "auto":
            return _COMPILERS[how](signature)
        size = batch_size(signature.bound, self._step)
        choice = choose(signature, bound, state, even=size % signature.devices == 0)
        _log.info('data_parallel(%s): strategy "%s": %s', self._step, choice.strategy, choice.why)
        if choice.strategy != "jit":
            check_whole(state, signature.state_placements, self._step, choice.strategy)
        self.strategy = choice.strategy
        choice.launch.why = choice.why
        return choice.launch
