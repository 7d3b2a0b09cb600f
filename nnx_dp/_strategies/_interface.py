"""What a strategy is: a function that compiles one signature of a step into a launcher."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jax.sharding import Mesh

from nnx_dp._graph import StateLeaves
from nnx_dp._per_device import StepOptions
from nnx_dp._roles import Argument, BoundCall


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature of a step, ready to be compiled.

    Attributes:
      bound: a call with this signature; arrays have their global shapes.
      state: the same call's state, flat.
      mesh: the devices; has `options.axis_name` among its axes.
      options: what the decorator was told.
      donate: whether the buffers of the state may be reused.
    """

    bound: BoundCall
    state: StateLeaves
    mesh: Mesh
    options: StepOptions
    donate: bool = False

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.options.axis_name]

    @property
    def arguments(self) -> list[Argument]:
        return self.bound.array_arguments()


class Launch(Protocol):
    """Runs one compiled signature: updates the state in place and returns the step's output."""

    def __call__(self, bound: BoundCall, state: StateLeaves) -> Any: ...
