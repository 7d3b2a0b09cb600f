"""The caller's NNX objects as a flat list of arrays, and back.

A compiled step takes and returns flat lists.  On the way in, the objects are taken apart with one
index of references, so that what is shared stays shared.  On the way out, the caller's own objects
are updated in place, structure included, and objects that the step made are built.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.graphlib import IndexMap, RefMap

from nnx_dp._leaves import is_state, shape_of
from nnx_dp._roles import BoundCall


class StateLeaves:
    """The arrays inside the NNX objects of one call.

    Attributes:
      graphdef: the structure of the objects.
      leaves: the arrays.
      treedef: how `leaves` fill the Variables, whose values may be pytrees.
    """

    def __init__(self, nodes: Sequence[Any], node_paths: Sequence[str]):
        self.references = RefMap()
        self.graphdef, flat = nnx.flatten(list(nodes), ref_index=self.references, graph=True)
        self._nodes, self._node_paths, self._flat = nodes, node_paths, flat
        self.leaves, self.treedef = jax.tree.flatten([_raw(leaf) for leaf in flat.leaves])

    @property
    def key(self) -> Any:
        """Hashable; equal for objects of equal structure.

        Raises:
          TypeError: for a static attribute that cannot be hashed.
        """
        try:
            hash(self.graphdef)
        except TypeError as error:
            raise TypeError(self._unhashable()) from error
        return self.graphdef, self.treedef

    def _unhashable(self) -> str:
        for root, node_path in zip(self._nodes, self._node_paths, strict=True):
            for path, node in nnx.iter_graph(root, graph=True):
                for name, value in getattr(node, "__dict__", {}).items():
                    unhashable = getattr(type(value), "__hash__", None) is None
                    own = any(str(key).startswith("_pytree__") for key in (*path, name))
                    if unhashable and not is_state(value) and not own:
                        return (
                            f"{node_path}{written(path, root)}.{name} is a {type(value).__name__}, "
                            "which cannot be hashed, and a compiled step depends on it. Make it a "
                            "tuple or a frozen dataclass."
                        )
        return "the state holds a static attribute that cannot be hashed. Make it a tuple."

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each array, as the caller would write it: ``model.blocks[3].scale``."""
        paths: list[str] = []
        for path, leaf in zip(self._flat.paths, self._flat.leaves, strict=True):
            position = cast(int, path[0])
            name = self._node_paths[position] + written(path[1:], self._nodes[position])
            paths += [name] * len(jax.tree.leaves(_raw(leaf)))
        return paths

    @property
    def variables(self) -> list[nnx.Variable[Any] | None]:
        """The Variable that holds each array; None for an array outside any."""
        variables: list[nnx.Variable[Any] | None] = []
        for leaf in self._flat.leaves:
            held = leaf if isinstance(leaf, nnx.Variable) else None
            variables += [held] * len(jax.tree.leaves(_raw(leaf)))
        return variables

    def check_alive(self) -> None:
        """Raises ValueError if an array was donated to an earlier step."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{self.paths[index]} was donated to an earlier step, which reused its memory, "
                    "so its value is gone. Use the objects that were passed to that step, which "
                    "hold the new values; or copy what you want to keep before the step "
                    "(jax.tree.map(jnp.copy, ...), since nnx.clone shares buffers); or decorate "
                    "with donate=False."
                )

    def abstract(self) -> StateLeaves:
        """Returns the structure and the shapes alone, with none of the caller's objects."""
        out = copy.copy(self)
        out.paths = self.paths
        out.leaves = [shape_of(leaf) for leaf in self.leaves]
        out.references, out._nodes, out._flat = RefMap(), (), None
        return out

    def replace(self, leaves: Sequence[Any]) -> None:
        """Puts other arrays of the same values into the Variables."""
        raw = jax.tree.unflatten(self.treedef, list(leaves))
        for holder, value in zip(self._flat.leaves, raw, strict=True):
            if isinstance(holder, nnx.Variable):
                holder.set_raw_value(value)


@dataclasses.dataclass(frozen=True)
class OutLeaf:
    """One array that the step leaves behind.

    Attributes:
      path: as the caller would write it, ``model.bn.mean`` or ``output[0]``.
      is_state: whether it belongs to an object that the caller passed in.
      variable: a Variable of the type that holds it (no value), None for a plain array.
      position: for state, its NNX path; for an output, its index among the output's leaves.
    """

    path: str
    is_state: bool
    variable: nnx.Variable[Any] | None
    position: Any


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf comes from: a position in a list, or always the same value."""

    index: int | None
    value: Any = None

    def take(self, leaves: Sequence[Any]) -> Any:
        return self.value if self.index is None else leaves[self.index]


@dataclasses.dataclass(frozen=True)
class DirectOutput:
    """How an output without NNX objects is made of the arrays that a step leaves behind."""

    treedef: Any
    sources: tuple[Source, ...]

    def read(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [source.take(leaves) for source in self.sources])


@dataclasses.dataclass
class OutStructure:
    """What a trace found out about what the step leaves behind.

    Attributes:
      graphdef: of the updated objects and the output together.
      treedef: how the arrays fill their Variables and the output.
      leaves: what is known of each array.
      metadata: that of each Variable, None for an array outside any.
      form: a pytree like the output, with nothing in it.
      direct: for a step that only gives Variables new arrays, its output; None for any other.
    """

    graphdef: Any
    treedef: Any
    leaves: tuple[OutLeaf, ...]
    metadata: tuple[dict[str, Any] | None, ...]
    form: Any
    direct: DirectOutput | None = None


def flatten_call(
    bound: BoundCall,
    graphdef: Any,
    treedef: Any,
    body: Callable[[list[Any], list[Any]], Any],
    on_structure: Callable[[OutStructure], None],
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Returns the step as a function of flat lists.

    Args:
      bound: the call; only its structure is used.
      graphdef: structure of the state.
      treedef: structure of the state's values.
      body: called with live NNX objects and the other arrays; returns the step's output.
      on_structure: told, at each trace, how the returned list is to be read.

    Returns:
      A function `(state leaves, arrays) -> leaves of the new state and of the output`.
    """

    def function(state_leaves: Sequence[Any], arrays: Any):
        inner = IndexMap()
        raw = jax.tree.unflatten(treedef, list(state_leaves))
        nodes = nnx.unflatten(graphdef, raw, index_ref=inner)
        output = numbers_as_arrays(body(nodes, list(arrays)))
        before = RefMap.from_indexmap(inner)
        leaves, structure = flatten_output(bound, nodes, output, outer_index=before)
        if _only_updates(nodes, graphdef, treedef, before):
            structure.direct = _direct_output(output, structure)
        on_structure(structure)
        return leaves

    return function


def flatten_output(
    bound: BoundCall, nodes: list[Any], output: Any, outer_index: Any
) -> tuple[list[Any], OutStructure]:
    """Takes the updated objects and the output apart together."""
    graphdef, flat = nnx.flatten([nodes, output], ref_outer_index=outer_index, graph=True)
    raw = [_raw(leaf) for leaf in flat.leaves]
    leaves, treedef = jax.tree.flatten(raw)
    described: list[OutLeaf] = []
    node_paths = bound.node_paths()
    outputs = 0
    for path, leaf, value in zip(flat.paths, flat.leaves, raw, strict=True):
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        for _ in jax.tree.leaves(value):
            if path[0] == 0:
                position = cast(int, path[1])
                name = node_paths[position] + written(path[2:], nodes[position])
                described.append(OutLeaf(name, True, variable, path[2:]))
            else:
                name = "output" + written(path[1:], output)
                described.append(OutLeaf(name, False, variable, outputs))
                outputs += 1
    # Of the output only the form is kept: its arrays belong to this trace.
    form = jax.tree.map(lambda _: 0, output)
    metadata = tuple(
        leaf.get_metadata() if isinstance(leaf, nnx.Variable) else None for leaf in flat.leaves
    )
    return leaves, OutStructure(graphdef, treedef, tuple(described), metadata, form)


def _only_updates(nodes: list[Any], graphdef: Any, treedef: Any, before: Any) -> bool:
    """Whether the objects are the same, of the same structure, with arrays only in Variables."""
    after = RefMap()
    graphdef_after, flat = nnx.flatten(nodes, ref_index=after, graph=True)
    return (
        len(after) == len(before)
        and all(after.get(node) == index for node, index in before.items())
        and all(isinstance(leaf, nnx.Variable) for leaf in flat.leaves)
        and jax.tree.structure([_raw(leaf) for leaf in flat.leaves]) == treedef
        and graphdef_after == graphdef
    )


def _direct_output(output: Any, structure: OutStructure) -> DirectOutput | None:
    if any(map(is_state, jax.tree.leaves(output, is_leaf=is_state))):
        return None
    # NNX has an order of its own for leaves: build the output once of their positions.
    positions = [_Position(index) for index in range(len(structure.leaves))]
    _, numbered = nnx.unflatten(
        structure.graphdef, jax.tree.unflatten(structure.treedef, positions)
    )
    parts, treedef = jax.tree.flatten(numbered)
    sources = tuple(
        Source(part.index) if isinstance(part, _Position) else Source(None, part) for part in parts
    )
    return DirectOutput(treedef, sources)


@dataclasses.dataclass(frozen=True)
class _Position:
    index: int


def write_back(structure: OutStructure, leaves: Sequence[Any], state: StateLeaves) -> Any:
    """Updates the caller's objects in place and returns the step's output."""
    if structure.direct is not None:
        state.replace(leaves[: len(state.leaves)])
        return structure.direct.read(leaves)
    raw = jax.tree.unflatten(structure.treedef, list(leaves))
    nodes, output = nnx.unflatten(
        structure.graphdef, raw, outer_index_outer_ref=IndexMap.from_refmap(state.references)
    )
    # NNX gives a Variable that is there already its new value, but not its new metadata.
    _, flat = nnx.flatten([nodes, output], graph=True)
    for variable, metadata in zip(flat.leaves, structure.metadata, strict=True):
        if metadata is not None and variable.get_metadata() != metadata:
            variable.set_metadata(metadata)
    return output


def written(path: Sequence[Any], root: Any) -> str:
    """Writes an NNX path into an object as Python would: ``.blocks[3].scale``, ``['loss']``."""
    parts = []
    for key in path:
        indexed = isinstance(root, (Mapping, list)) or not isinstance(key, str)
        parts.append(f"[{key!r}]" if indexed else f".{key}")
        try:
            root = root[key] if indexed else getattr(root, key)  # type: ignore[index]
        except (KeyError, IndexError, TypeError, AttributeError):
            root = None
    return "".join(parts)


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def numbers_as_arrays(output: Any) -> Any:
    """Makes arrays of the numbers in an output, as a compiled step does under `jax.jit`."""

    def convert(leaf: Any) -> Any:
        is_number = isinstance(leaf, (bool, int, float, complex, np.generic))
        return jnp.asarray(leaf) if is_number else leaf

    return jax.tree.map(convert, output, is_leaf=is_state)
