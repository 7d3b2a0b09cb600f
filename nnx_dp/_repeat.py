"""The short way for a call that was made before.

A training loop makes the same call over and over: the same objects, batches of one shape.  The
first time, the call is bound, its objects are taken apart and its signature is looked up or
compiled.  What came out of that is kept in a `Repeat`.  When the same call comes again, what is
left to do is to see that it is the same, to read the arrays, to run, and to write the new ones.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer

from nnx_dp._binding import arrange, unwrap
from nnx_dp._graph import Source, StateLeaves
from nnx_dp._interrupt import to_its_end
from nnx_dp._leaves import is_array, is_state
from nnx_dp._placement import onto_surrounding
from nnx_dp._roles import BoundCall, Role, Static
from nnx_dp._snapshot import Snapshot, Unwatchable
from nnx_dp._strategies._interface import Launch

_KEPT = 16
_aval, _sharding = attrgetter("aval"), attrgetter("sharding")


class Call:
    """A call as it comes, flat.

    Attributes:
      function: the step itself, with no partial or method around it.
      held: how many of the arguments a partial or a method holds.
      leaves: the leaves of the arguments, NNX objects whole.
      treedef: how they make up the arguments.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, held_args, held_kwargs = unwrap(function)
        self.held = len(held_args)
        arguments = ((*held_args, *args), {**held_kwargs, **kwargs})
        self.leaves, self.treedef = jax.tree.flatten(arguments, is_leaf=is_state)
        self.defaults = getattr(self.function, "__defaults__", None)
        self.modes = trace_modes()


def trace_modes() -> tuple[Any, ...]:
    """Returns the settings of Flax and JAX that change what a trace of a step is."""
    return (
        nnx.set_graph_mode.current_value(),
        nnx.set_graph_updates.current_value(),
        jax.config.read("jax_enable_x64"),
    )


class Found(NamedTuple):
    """The state of a call that repeats an earlier one.

    Attributes:
      state: its arrays.
      as_left: whether they are of the types, and where, the last run of the step left its own.
    """

    state: list[Any]
    as_left: bool


class Repeats:
    """The calls that one decorated step can repeat, the latest first."""

    def __init__(self, static_argnums: Sequence[int], static_argnames: Sequence[str]):
        self._static = static_argnums, static_argnames
        self._repeats: tuple[Repeat, ...] = ()
        self._unused = 0
        self._last_nodes: tuple[int, ...] = ()

    def find(self, call: Call) -> tuple[Repeat, Found] | None:
        """Returns the earlier call that this one repeats and its state; None if there is none."""
        for index, repeat in enumerate(self._repeats):
            found = repeat.matched(call)
            if found is not None:
                self._unused = 0
                if index:
                    rest = (known for known in self._repeats if known is not repeat)
                    self._repeats = (repeat, *rest)
                return repeat, found
        return None

    def open(
        self, call: Call, bound: BoundCall, state: StateLeaves, launch: Launch
    ) -> Repeat | None:
        """Looks at a call that is about to be made; None if it is not of a kind to be repeated."""
        nodes = tuple(map(id, bound.nodes))
        # Where every call has new objects, looking at them closely would be for nothing.
        again, self._last_nodes = nodes == self._last_nodes, nodes
        if self._unused >= _KEPT and not again:
            return None
        try:
            return Repeat(call, bound, state, launch, *self._static)
        except Unwatchable:
            return None

    def close(self, repeat: Repeat) -> None:
        """Keeps a call that has just been made, if it can be made again the same way."""
        if repeat.settle(self._forget):
            self._unused += 1
            self._repeats = (repeat, *self._repeats[: _KEPT - 1])

    def _forget(self, repeat: Repeat) -> None:
        self._repeats = tuple(known for known in self._repeats if known is not repeat)


class Repeat:
    """A call that can be made again the short way."""

    def __init__(
        self,
        call: Call,
        bound: BoundCall,
        state: StateLeaves,
        launch: Launch,
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
    ):
        """Looks at a call before it is made.

        Raises:
          Unwatchable: if it holds something that could change without being noticed.
        """
        self._launch = launch
        self._function, self._treedef = call.function, call.treedef
        self._defaults, self._modes = call.defaults, call.modes
        sources = _sources(call, static_argnums, static_argnames)
        roles = [argument.role for argument in bound.arguments]
        pairs = list(zip(sources, roles, strict=True))
        self._nodes = [source for source, role in pairs if role is Role.STATE]
        self._arrays = [s for s, role in pairs if role in (Role.BATCH, Role.REPLICATED)]
        if any(
            source.take(call.leaves) is not array
            for source, array in zip(self._arrays, bound.arrays, strict=True)
        ):
            raise Unwatchable("a batch that is padded or cut")
        if any(isinstance(leaf, Tracer) for leaf in [*call.leaves, *state.leaves]):
            raise Unwatchable("a call inside another trace")
        role_of = {source.index: role for source, role in pairs}
        self._recognise = [
            _recogniser(leaf, role_of.get(index, Role.STATIC))
            for index, leaf in enumerate(call.leaves)
        ]
        self._node_paths = bound.node_paths()
        self._snapshot = Snapshot(bound.nodes)
        if not _same_objects(self._snapshot.variables, state.variables):
            raise Unwatchable("state that is not its Variables, each with one array")
        self._first_nodes = list(bound.nodes)
        self._shapes = [_shape(leaf) for leaf in state.leaves]
        # The type and the sharding of each array as the step left it: mostly the same objects call
        # by call, so that one look shows that the array is in place and of the right shape.
        self._avals: list[Any] = [None] * len(state.leaves)
        self._shardings: list[Any] = [None] * len(state.leaves)

    def settle(self, forget: Callable[[Repeat], None]) -> bool:
        """Decides, after the call was made, whether it can be made again the short way.

        Args:
          forget: called when the objects of the call are gone.

        Returns:
          Whether all that the step does to its objects is to give their Variables new arrays.
        """
        direct = self._launch.structure.direct
        released_with = self._snapshot.released_with(self._first_nodes)
        self._first_nodes = []
        if direct is None or not released_with:
            return False
        self._output = direct
        self._releases = [weakref.ref(node, lambda _: forget(self)) for node in released_with]
        return True

    def matched(self, call: Call) -> Found | None:
        """Returns the state if a call is this one again, else None."""
        leaves = call.leaves
        if (
            call.function is not self._function
            or call.treedef != self._treedef
            or call.defaults is not self._defaults
            or call.modes != self._modes
            or not all(same(leaf) for same, leaf in zip(self._recognise, leaves, strict=True))
            or not self._snapshot.unchanged([source.take(leaves) for source in self._nodes])
        ):
            return None
        state = self._snapshot.read()
        as_left = self._as_left(state)
        same_shapes = as_left or [*map(_shape, state)] == self._shapes
        return Found(state, as_left) if same_shapes else None

    def run(self, call: Call, found: Found) -> Any:
        """Makes the call: updates its objects in place and returns the step's output."""
        state, as_left = found.state, found.as_left
        launch, count = self._launch, len(state)
        if launch.donate:
            self._check_alive(call, state)
        if not as_left:
            state = launch.place_state(state)
        try:
            made = launch(state, [source.take(call.leaves) for source in self._arrays])
        except Exception:
            if not launch.donate:
                self._check_alive(call, state)
            raise
        leaves = onto_surrounding(made)
        to_its_end(lambda: self._snapshot.write(leaves[:count]))
        # A step may leave another dtype or shape behind: that is another signature.
        if not as_left and leaves is made and [*map(_shape, leaves[:count])] == self._shapes:
            self._avals = [*map(_aval, leaves[:count])]
            self._shardings = [*map(_sharding, leaves[:count])]
        return self._output.read(leaves)

    def _as_left(self, state: Sequence[Any]) -> bool:
        """Whether the arrays are of the types, and where, the last run of the step left its own."""
        try:
            # Lists compare by identity first; a typed key makes these anew whenever it is asked.
            return [*map(_aval, state)] == self._avals and (
                [*map(_sharding, state)] == self._shardings
            )
        except AttributeError:
            return False

    def _check_alive(self, call: Call, values: Sequence[Any]) -> None:
        if any(isinstance(value, jax.Array) and value.is_deleted() for value in values):
            nodes = [source.take(call.leaves) for source in self._nodes]
            StateLeaves(nodes, self._node_paths).check_alive()


def _same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def leaf_paths(
    call: Call, bound: BoundCall, static_argnums: Sequence[int], static_argnames: Sequence[str]
) -> dict[int, str]:
    """Returns the path of each leaf of a call, by its index."""
    sources = _sources(call, static_argnums, static_argnames)
    pairs = zip(sources, bound.arguments, strict=True)
    return {source.index: argument.path for source, argument in pairs if source.index is not None}


def _sources(
    call: Call, static_argnums: Sequence[int], static_argnames: Sequence[str]
) -> list[Source]:
    """Finds where each leaf of the bound call stands in the call, or that it is a default."""
    slots = [_Slot(index) for index in range(len(call.leaves))]
    try:
        args, kwargs = jax.tree.unflatten(call.treedef, slots)
    except Exception as error:
        raise Unwatchable("a pytree that takes only its own leaves") from error
    arranged = arrange(call.function, args, kwargs, call.held, static_argnums, static_argnames)
    leaves, _ = arranged.flatten()
    return [
        Source(leaf.index) if isinstance(leaf, _Slot) else Source(None, leaf) for leaf in leaves
    ]


def _recogniser(leaf: Any, role: Role) -> Callable[[Any], bool]:
    """Returns a test for whether a leaf of another call is served by the same compilation."""
    if isinstance(leaf, nnx.Variable):
        return lambda other: other is leaf
    try:
        node = weakref.ref(leaf) if role is Role.STATE else None
        known, hashed = Static(leaf), hash(leaf) if role is Role.STATIC else 0
    except TypeError as error:
        raise Unwatchable(f"a {type(leaf).__name__}") from error
    if node is not None:
        return lambda other: node() is other
    if role is Role.STATIC:
        return lambda other: Static(other) == known and hash(other) == hashed
    kind, shape = type(leaf), _shape(leaf)
    return lambda other: type(other) is kind and _shape(other) == shape


def _shape(leaf: Any) -> tuple[Any, ...]:
    """Returns what a compilation depends on; nothing for a Python number, whose type says it."""
    if not is_array(leaf):
        return ()
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
