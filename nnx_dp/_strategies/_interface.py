"""What a strategy is: a function that compiles one signature of a step into a launcher."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from nnx_dp._graph import StateLeaves
from nnx_dp._per_device import StepOptions
from nnx_dp._roles import Argument, BoundCall


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature of a step, ready to be compiled.

    Attributes:
      bound: the structure of a call; its arrays are the global shapes.
      state: the structure of the same call's state; its leaves are shapes.
      mesh: the devices; has `options.axis_name` among its axes.
      options: what the decorator was told.
      donate: whether the buffers of the state may be reused.
      padded_output_axes: for a padded batch, the batch axis of each array that the step leaves
        behind, None for those that have none.
    """

    bound: BoundCall
    state: StateLeaves
    mesh: Mesh
    options: StepOptions
    donate: bool = False
    padded_output_axes: tuple[int | None, ...] | None = None

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.options.axis_name]

    @property
    def arguments(self) -> list[Argument]:
        return self.bound.array_arguments()


class Launch(Protocol):
    """One compiled signature.

    Attributes:
      drew: whether the step draws random numbers that differ between devices.
    """

    drew: bool

    def __call__(self, bound: BoundCall, state: StateLeaves) -> Any:
        """Runs the step: updates the caller's state in place and returns the step's output."""
        ...

    def lower(self, bound: BoundCall, state: StateLeaves) -> jax.stages.Lowered:
        """Lowers the compiled function without running it."""
        ...
