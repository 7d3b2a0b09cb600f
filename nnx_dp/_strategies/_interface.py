"""What a strategy is: a function that compiles one signature of a step into a `Launch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from nnx_dp._graph import OutStructure, StateLeaves
from nnx_dp._options import StepOptions
from nnx_dp._placement import (
    Owned,
    check_kept,
    only_mesh,
    onto_surrounding,
    put_all,
    replicated,
    sharded,
)
from nnx_dp._plan import Plan
from nnx_dp._roles import Argument, BoundCall


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature of a step, ready to be compiled.

    Attributes:
      bound: the structure of a call; its arrays are the global shapes.
      state: the structure of the same call's state; its leaves are shapes.
      mesh: the devices; has `options.axis_name` among its axes.
      state_placements: where each array of the state is wanted.
      options: what the decorator was told.
      donate: whether the buffers of the state may be reused.
      padded_output_axes: for a padded batch, the batch axis of each array that the step leaves
        behind, None for those that have none.
    """

    bound: BoundCall
    state: StateLeaves
    mesh: Mesh
    state_placements: tuple[NamedSharding, ...]
    options: StepOptions
    donate: bool = False
    padded_output_axes: tuple[int | None, ...] | None = None

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.options.axis_name]

    @property
    def arguments(self) -> list[Argument]:
        return self.bound.array_arguments()

    @property
    def array_placements(self) -> list[NamedSharding]:
        """Where each array of the call is wanted: split over the devices, or whole on each."""
        whole, axis_name = replicated(self.mesh), self.options.axis_name
        return [
            whole if argument.axis is None else sharded(self.mesh, axis_name, argument.axis)
            for argument in self.arguments
        ]

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """For a function `(state leaves, arrays)`."""
        return (0,) if self.donate else ()


@dataclasses.dataclass(eq=False)
class Launch:
    """One compiled signature: places arrays where the step wants them, and runs it.

    Attributes:
      function: `(state leaves, arrays) -> leaves`, compiled; arrays of what the step leaves behind.
      structures: how those are to be read; the last entry is that of the latest trace.
      state_placements: where each array of the state is wanted.
      array_placements: where the other arrays are wanted.
      mesh: the mesh that is set while it runs; None for none.
      donate: whether the buffers of the state may be reused.
      strategy: the name of the strategy that compiled it.
      plan: what was decided for it, None where the body sees the whole batch.
      why: why it is this strategy.
      fired: how often each rule of a trace was applied; see `StepContext`.
      padded_axes: see `Signature.padded_output_axes`.
    """

    function: Any
    structures: list[OutStructure]
    state_placements: Sequence[NamedSharding]
    array_placements: Sequence[NamedSharding]
    mesh: Mesh | None
    donate: bool = False
    strategy: str = "jit"
    plan: Plan | None = None
    why: str = "asked for"
    fired: Mapping[str, int] = dataclasses.field(default_factory=dict)
    padded_axes: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        self._owned = Owned()

    @property
    def structure(self) -> OutStructure:
        return self.structures[-1]

    @property
    def drew(self) -> bool:
        """Whether the step draws random numbers that differ between devices."""
        return self.plan is not None and self.plan.drew

    def place_state(self, leaves: Sequence[Any]) -> list[Any]:
        return put_all(leaves, self.state_placements, whole=True)

    def place_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return put_all(arrays, self.array_placements)

    def __call__(self, state_leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Runs the step.

        Args:
          state_leaves: the arrays of the state, placed.
          arrays: the other arrays, wherever they are.

        Returns:
          The arrays of the new state and of the output, in the order of `structure`.
        """
        with only_mesh(self.mesh):
            arrays = self.place_arrays(arrays)
            if not self.donate:
                return self.function(state_leaves, arrays)
            donated = self._owned.donatable(state_leaves)
            try:
                leaves = self.function(donated, arrays)
            except Exception as error:
                check_kept(state_leaves, error)
                raise
            pairs = zip(leaves, self.structure.leaves, strict=True)
            self._owned.take([leaf for leaf, known in pairs if known.is_state])
            return leaves

    def run(self, state_leaves: Sequence[Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """Runs the step; what it returns can be used under the mesh that is set outside."""
        return onto_surrounding(self(state_leaves, arrays))

    def lower(self, state_leaves: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Lowered:
        """Lowers the compiled function without running it."""
        with only_mesh(self.mesh):
            lower = getattr(self.function, "lower", None)
            if lower is None:
                raise NotImplementedError(
                    "nnx.pmap cannot be lowered ahead of time. Lower the step with strategy="
                    '"shard_map", which compiles the same per-device program.'
                )
            return lower(self.place_state(state_leaves), self.place_arrays(arrays))

    def lower_like(self, state_leaves: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Lowered:
        """Lowers what runs on each device, where `lower` cannot as well."""
        return self.lower(state_leaves, arrays)
