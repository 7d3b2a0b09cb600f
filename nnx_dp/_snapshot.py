"""Is this still the graph that was compiled for?  Asked at every call, so asked cheaply.

Taking NNX objects apart costs far more than running a small step.  A `Snapshot` remembers which
object stood in every place of a graph, and what every static value was.  As long as the very same
objects stand in the very same places, the structure is the one that was taken apart then, and the
arrays can be read straight from the Variables.

Compared is identity, not equality: an equal Variable in the place of another is another Variable.
What cannot be watched like this (plain arrays as attributes, mutable arrays, kinds of nodes that
keep their children elsewhere) has no snapshot, and is taken apart at every call.

All places are compared in one pass over flat sequences, in loops that run in C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import graphlib

_SIMPLE = frozenset({bool, int, float, complex, str, bytes})
"""Types of which equal values are as good as the same."""

_FIXED = (
    *_SIMPLE,
    type(None),
    type(...),
    type,
    type(lambda: None),
    type(len),
    np.dtype,
    graphlib.HashableMapping,  # pyright: ignore[reportPrivateImportUsage]
)
"""Types whose values cannot change in place (or, functions, count by identity)."""

# Variables keep their value and metadata in slots; reading those saves a call for each.
_SLOTTED = all(
    inspect.ismemberdescriptor(nnx.Variable.__dict__.get(name))
    for name in ("_raw_value", "_var_metadata")
)
_value: Callable[[Any], Any]
_metadata: Callable[[Any], Any]
if _SLOTTED:
    _value, _metadata = attrgetter("_raw_value"), attrgetter("_var_metadata")
else:
    _value, _metadata = methodcaller("get_raw_value"), methodcaller("get_metadata")
_flatten_one_level = jax.tree_util.default_registry.flatten_one_level


class Unwatchable(Exception):
    """Something in a graph could change without a snapshot noticing."""


class Snapshot:
    """What stood where in the graph of some NNX objects.

    The objects themselves are not kept alive, only what they hold; see `released_with`.

    Attributes:
      variables: the Variables of the graph, each once, in the order in which NNX flattens them.
    """

    variables: list[nnx.Variable[Any]]

    def __init__(self, nodes: Sequence[Any]):
        """Takes a snapshot.

        Raises:
          Unwatchable: if something in the graph could change without being noticed.
        """
        self.variables = []
        self._positions: list[int] = []  # of the roots that are Modules
        self._modules: list[Any] = []  # below the roots
        self._mappings: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._pytrees: list[Any] = []
        self._hashed: list[Any] = []
        seen: set[int] = set()
        roots = {id(node): position for position, node in enumerate(nodes)}
        for node in nodes:
            self._visit(node, seen, roots)

        modules = [nodes[position] for position in self._positions] + self._modules
        places: list[Any] = [*map(vars, modules), *self._mappings]
        self._types = [*map(type, modules), *map(type, self.variables)]
        self._sizes = [*map(len, places), *map(len, self._lists)]
        self._keys = [*chain.from_iterable(places)]
        self._held = [*chain.from_iterable(map(dict.values, places)), *chain(*self._lists)]
        self._flat = [*map(_one_level, self._pytrees)]
        self._metadata = [variable.get_metadata() for variable in self.variables]
        for value in chain.from_iterable(map(dict.values, self._metadata)):
            self._watch_value(value)
        self._hashes = [*map(hash, self._hashed)]

    def unchanged(self, nodes: Sequence[Any]) -> bool:
        """Whether the graph of the same nodes has the structure that it had."""
        modules = [*[nodes[position] for position in self._positions], *self._modules]
        places: list[Any] = [*map(vars, modules), *self._mappings]
        try:
            return (
                [*map(len, places), *map(len, self._lists)] == self._sizes
                and [*chain.from_iterable(places)] == self._keys
                and _same(
                    chain(chain.from_iterable(map(dict.values, places)), *self._lists), self._held
                )
                and [*map(type, modules), *map(type, self.variables)] == self._types
                and [*map(_metadata, self.variables)] == self._metadata
                and [*map(hash, self._hashed)] == self._hashes
                and all(map(_same_level, self._pytrees, self._flat))
            )
        except Exception:
            return False  # Something there no longer compares or hashes: look at it afresh.

    def released_with(self, nodes: Sequence[Any]) -> list[Any]:
        """Returns the nodes that this does not keep alive: when one goes, all of this may go."""
        held = {*map(id, self._held), *(id(child) for flat, _ in self._flat for child in flat)}
        roots = (nodes[position] for position in self._positions)
        return [root for root in roots if id(root) not in held]

    def read(self) -> list[Any]:
        """Returns the array of each Variable."""
        return [*map(_value, self.variables)]

    def write(self, values: Sequence[Any]) -> None:
        """Puts an array into each Variable."""
        pairs = zip(self.variables, values, strict=True)
        if _SLOTTED:
            # Flax checks at each write that no other trace owns the Variable.  All of these were
            # written to in one trace before, so one of them stands for all.
            for variable, value in islice(pairs, 1):
                variable.set_raw_value(value)
            set_raw_value: Any = nnx.Variable.__dict__["_raw_value"].__set__
            for variable, value in pairs:
                set_raw_value(variable, value)
        else:
            for variable, value in pairs:
                variable.set_raw_value(value)

    def _visit(self, node: Any, seen: set[int], roots: dict[int, int]) -> None:
        if isinstance(node, nnx.Variable):
            if id(node) not in seen:
                seen.add(id(node))
                self._visit_variable(node)
            return
        impl = graphlib.get_node_impl(node)
        if impl is None:
            if isinstance(node, jax.Array | np.ndarray) or graphlib.is_graph_node(node):
                raise Unwatchable(f"a {type(node).__name__} outside any Variable")
            self._watch_value(node)
            return
        if not isinstance(node, tuple | type(None)):
            if id(node) in seen:
                return
            seen.add(id(node))
        children = [child for _, child in impl.flatten(node)[0]]
        values = [*map(_unwrapped, children)]
        if isinstance(node, nnx.Pytree):
            if {*map(id, vars(node).values())} != {*map(id, values)}:
                raise Unwatchable(f"a {type(node).__name__} that is not made of its attributes")
            if id(node) in roots:
                self._positions.append(roots[id(node)])
            else:
                self._modules.append(node)
        elif isinstance(node, dict | nnx.State):
            mapping: Any = node if isinstance(node, dict) else node.raw_mapping
            if type(mapping) is not dict:
                raise Unwatchable(f"a {type(mapping).__name__}")
            self._mappings.append(mapping)
        elif isinstance(node, list):
            self._lists.append(node)
        elif isinstance(node, tuple | type(None)):
            pass  # Cannot change.
        elif isinstance(impl, graphlib.PytreeNodeImpl):
            self._pytrees.append(node)
        else:
            raise Unwatchable(f"a {type(node).__name__}, a graph node of a type of its own")
        for child, value in zip(children, values, strict=True):
            if isinstance(child, graphlib.StaticElem):
                self._watch_value(value)
            else:
                self._visit(value, seen, roots)

    def _visit_variable(self, variable: nnx.Variable[Any]) -> None:
        value = variable.get_raw_value()
        if not isinstance(value, jax.Array) or graphlib.is_graph_node(value):
            raise Unwatchable(f"a {type(variable).__name__} that holds no array")
        if type(variable).set_raw_value is not nnx.Variable.set_raw_value:
            raise Unwatchable(f"a {type(variable).__name__} that is written in its own way")
        self.variables.append(variable)

    def _watch_value(self, value: Any) -> None:
        """Watches a static value; one that counts by its contents may change in place."""
        if isinstance(value, _FIXED) or type(value).__hash__ is object.__hash__:
            return
        try:
            hash(value)
        except TypeError as error:
            raise Unwatchable(f"a {type(value).__name__}, which cannot be hashed") from error
        self._hashed.append(value)


def _unwrapped(child: Any) -> Any:
    """Returns what stands in an attribute; Flax wraps it to say whether it is data."""
    is_wrapped = isinstance(child, graphlib.DataElem | graphlib.StaticElem)
    return child.value if is_wrapped else child


def _same(now: Any, before: Sequence[Any]) -> bool:
    """Whether values are the same objects or equal simple ones; there are as many of both."""
    now = [*now]
    return all(map(is_, now, before)) or all(
        a is b or (type(a) is type(b) and type(a) in _SIMPLE and a == b)
        for a, b in zip(now, before, strict=True)
    )


def _one_level(pytree: Any) -> tuple[tuple[Any, ...], Any]:
    flat = _flatten_one_level(pytree)
    if flat is None:
        raise Unwatchable(f"a {type(pytree).__name__}")
    children, aux = flat
    return tuple(children), aux


def _same_level(pytree: Any, before: tuple[tuple[Any, ...], Any]) -> bool:
    children, aux = _one_level(pytree)
    return (
        len(children) == len(before[0]) and all(map(is_, children, before[0])) and aux == before[1]
    )
