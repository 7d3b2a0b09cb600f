"""A call that is ready to run."""

from __future__ import annotations

import dataclasses
from typing import Any

from nnx_dp._graph import StateLeaves, write_back
from nnx_dp._interrupt import to_its_end
from nnx_dp._roles import BoundCall
from nnx_dp._strategies._interface import Launch
from nnx_dp._uneven import unpad


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call, its state, and the launch of its signature.

    Attributes:
      bound: the call, its batch made one that can be split.
      whole: the same with the batch of all processes.
      given: the sizes of the batch arrays as they were given.
      state: the arrays of its NNX objects.
      launch: its signature, compiled.
    """

    bound: BoundCall
    whole: BoundCall
    given: tuple[int, ...]
    state: StateLeaves
    launch: Launch

    def run(self) -> Any:
        """Runs the step, writes its state back into the caller's objects, returns its output."""
        launch = self.launch
        leaves = launch.run(launch.place_state(self.state.leaves), self.bound.arrays)
        leaves = unpad(list(leaves), launch.padded_axes, self.bound.unpadded_size)
        return to_its_end(lambda: write_back(launch.structure, leaves, self.state))
