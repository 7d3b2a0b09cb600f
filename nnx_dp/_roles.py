"""What each argument is: state, batch, replicated or static.

`bind_call` matches a call against the step's signature, unwraps partials and bound methods, and
gives every leaf of every argument one role:

    state       NNX graph nodes and Variables: the same on every device, updated in place
    batch       arrays with at least one axis: split over the devices
    replicated  scalars, 0-d arrays, typed PRNG keys: the same on every device
    static      everything else that can be hashed: part of the compilation
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_dp._binding import Whole, arrange, is_leaf, name_of, unwrap
from nnx_dp._leaves import is_array, is_key, is_state, shape_of

INFER = ...
"""In `in_axes`: work the role out."""


class Role(enum.Enum):
    STATE = "state"
    BATCH = "batch"
    REPLICATED = "replicated"
    STATIC = "static"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One leaf of the call.

    Attributes:
      path: as the caller would write it.
      role: what it is.
      axis: its batch axis, None if it has none.
      why: why it has this role.
    """

    path: str
    role: Role
    axis: int | None = None
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Static:
    """A static value that compares by type as well, so that True is not 1."""

    value: Hashable

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and bool(self.value == other.value)
        )

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclasses.dataclass
class BoundCall:
    """One call, taken apart.

    Attributes:
      function: the step itself, with no partial or method around it.
      nodes: the NNX objects among the arguments, in order.
      arrays: the batch and replicated leaves, in order.
      arguments: one entry for each leaf, state, arrays and static values interleaved.
      key: hashable; equal for calls whose structure, roles and static values are equal.
      unpadded_size: the number of examples before padding, None for a batch that is not padded.
    """

    function: Callable[..., Any]
    nodes: list[Any]
    arrays: list[Any]
    arguments: tuple[Argument, ...]
    statics: tuple[Static, ...]
    treedef: Any
    unpadded_size: int | None = None

    @property
    def key(self) -> Hashable:
        return self.treedef, self.arguments, self.statics

    def node_paths(self) -> list[str]:
        return [a.path for a in self.arguments if a.role is Role.STATE]

    def array_arguments(self) -> list[Argument]:
        return [a for a in self.arguments if a.role in (Role.BATCH, Role.REPLICATED)]

    def located_arrays(self) -> list[tuple[Argument, Any]]:
        """Returns the arrays, each with what it is."""
        return list(zip(self.array_arguments(), self.arrays, strict=True))

    def batch_sizes(self) -> list[tuple[Argument, int]]:
        """Returns what is split over the devices, each with its number of examples."""
        return [
            (argument, array.shape[argument.axis])
            for argument, array in self.located_arrays()
            if argument.axis is not None
        ]

    def abstract(self) -> BoundCall:
        """Returns the call's structure alone: it keeps none of the caller's objects alive."""
        shapes = [shape_of(array) for array in self.arrays]
        return dataclasses.replace(self, nodes=[], arrays=shapes)

    def call(self, nodes: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Calls the step with these objects and arrays in the places of the caller's."""
        sources: dict[Role, Iterator[Any]] = {
            Role.STATE: iter(nodes),
            Role.BATCH: (arrays_iter := iter(arrays)),
            Role.REPLICATED: arrays_iter,
            Role.STATIC: (static.value for static in self.statics),
        }
        leaves = [next(sources[argument.role]) for argument in self.arguments]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return self.function(*args, **kwargs)


def bind_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any = INFER,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> BoundCall:
    """Matches a call against a signature and gives each leaf its role.

    Raises:
      TypeError: if the call does not fit the signature, or a leaf is neither an array nor hashable.
      ValueError: if `in_axes` does not fit the arguments.
    """
    function, held_args, held_kwargs = unwrap(function)
    args, kwargs, held = (*held_args, *args), {**held_kwargs, **kwargs}, len(held_args)
    arranged = arrange(function, args, kwargs, held, static_argnums, static_argnames)
    axes = _axes_by_parameter(in_axes, arranged.positional, held, arranged.bound, function)
    arguments: list[Argument] = []
    nodes: list[Any] = []
    arrays: list[Any] = []
    statics: list[Static] = []
    leaves, treedef = arranged.flatten()
    labels = [*zip(arranged.positional, arranged.args, strict=True)]
    labels += [(name, arranged.kwargs[name]) for name in sorted(arranged.kwargs)]
    described = []
    for name, value in labels:
        described += _describe(name, value, axes.get(name, INFER))
    for leaf, argument in zip(leaves, described, strict=True):
        arguments.append(argument)
        if argument.role is Role.STATE:
            nodes.append(leaf)
        elif argument.role is Role.STATIC:
            statics.append(_static(leaf, argument.path))
        else:
            arrays.append(leaf)
    # Static leaves are kept apart: the tree holds only their places.
    return BoundCall(function, nodes, arrays, tuple(arguments), tuple(statics), treedef)


def _describe(name: str, value: Any, axes: Any) -> list[Argument]:
    paths, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    per_leaf = broadcast_axes(name, axes, value)
    return [
        _describe_leaf(name + jax.tree_util.keystr(path), leaf, axis)
        for (path, leaf), axis in zip(paths, per_leaf, strict=True)
    ]


def broadcast_axes(name: str, axes: Any, value: Any) -> list[Any]:
    """Spreads a prefix tree of axes over the leaves of one argument."""
    try:
        return spread_prefix(axes, value, is_leaf=is_leaf)
    except ValueError as error:
        shape = jax.tree.structure(value, is_leaf=is_leaf)
        raise ValueError(
            f"in_axes for {name} is {axes!r}, which is not a prefix of that argument's structure "
            f"{shape}. Write one axis for the whole argument, or a tree of the same form."
        ) from error


def spread_prefix(
    prefix: Any, tree: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Repeats each entry of a prefix tree for the leaves of a tree that it stands for.

    Raises:
      ValueError: if it is not a prefix of the tree.
    """
    out: list[Any] = []

    def spread(entry: Any, subtree: Any) -> None:
        out.extend([entry] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    entries = lambda a: a is None or a is INFER or isinstance(a, nnx.StateAxes)  # noqa: E731
    jax.tree.map(spread, prefix, tree, is_leaf=entries)
    return out


def _describe_leaf(path: str, leaf: Any, axis: Any) -> Argument:
    if isinstance(leaf, Whole):
        return Argument(path, Role.STATIC, why="static_argnums or static_argnames")
    if is_state(leaf):
        _check_state_axis(path, axis)
        return Argument(path, Role.STATE, why="NNX object")
    if axis is not INFER and axis is not None:
        why = f"in_axes gives axis {axis}"
        return Argument(path, Role.BATCH, _checked_axis(path, leaf, axis), why)
    if not is_array(leaf):
        scalar = isinstance(leaf, (int, float, complex, np.generic)) and not isinstance(leaf, bool)
        role = Role.REPLICATED if scalar else Role.STATIC
        return Argument(path, role, why=f"a {type(leaf).__name__}")
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUVMm" and not _is_extended(leaf):
        raise TypeError(
            f"{path} is a NumPy array of dtype {leaf.dtype}, which JAX cannot hold. Encode it as "
            "numbers first."
        )
    if axis is None or leaf.ndim == 0:
        why = "in_axes gives None" if axis is None else "no axes"
        return Argument(path, Role.REPLICATED, why="typed key" if is_key(leaf) else why)
    if leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,)):
        raise ValueError(
            f"{path} has shape {leaf.shape} and dtype uint32: it is a batch of {leaf.shape[0]} "
            "integers, or a PRNG key of the old kind. For a key, pass a typed one "
            "(jax.random.key(0), or jax.random.wrap_key_data(key)). For a batch, say so with "
            "in_axes=0 for this argument."
        )
    return Argument(path, Role.BATCH, 0, "array with an axis")


def _is_extended(leaf: np.ndarray) -> bool:
    return leaf.dtype.kind == "V" and leaf.dtype.names is None  # bfloat16, float8


def _checked_axis(path: str, leaf: Any, axis: Any) -> int:
    if not is_array(leaf):
        raise ValueError(
            f"in_axes gives axis {axis!r} for {path}, which is a {type(leaf).__name__} and has no "
            "axes. Write None for it."
        )
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise ValueError(f"in_axes for {path} is {axis!r}; write an int, None or ... for it.")
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"in_axes gives axis {axis} for {path}, which has shape {leaf.shape}. Write an axis "
            f"from {-leaf.ndim} to {leaf.ndim - 1}, or None to replicate it."
        )
    return axis % leaf.ndim


def _check_state_axis(path: str, axis: Any) -> None:
    split = axis if isinstance(axis, int) else None
    if isinstance(axis, nnx.StateAxes):
        split = next((a for _, a in axis.items() if a is not None), None)
    if split is not None:
        raise ValueError(
            f"in_axes gives axis {split!r} for {path}, which is NNX state. Data parallelism keeps "
            "one copy of the state on every device: write None, nnx.StateAxes({...: None}) or ... "
            "for it."
        )


def _static(leaf: Any, path: str) -> Static:
    value = leaf.value if isinstance(leaf, Whole) else leaf
    held = next(
        (f"{path}.{name}" for name, item in _attributes(value) if is_state(item) or is_array(item)),
        None,
    )
    # Most hash by identity: static, every batch would be a compilation of its own.
    looks_like_one = hasattr(value, "__array__") and not isinstance(value, type)
    if looks_like_one and not isinstance(leaf, Whole):
        raise TypeError(
            f"{path} is a {type(value).__name__}, which is neither a NumPy nor a JAX array. Pass "
            f"np.asarray({path})."
        )
    if held is not None:
        raise TypeError(
            f"{path} is a {type(value).__name__}, a plain Python object, and {held} is state or an "
            f"array, which a compiled step cannot see change. Pass {held} as an argument of its "
            f"own, or make {type(value).__name__} an nnx.Module or a registered pytree."
        )
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{path} is a {type(value).__name__}: neither an array nor hashable. Pass arrays "
            f"(np.asarray({path}), if it holds numbers), NNX objects, pytrees of them, or hashable "
            "values (a frozen dataclass, a tuple) that are part of the compilation."
        ) from error
    return Static(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, type) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).items())


def _axes_by_parameter(
    in_axes: Any,
    positional: list[str],
    held: int,
    bound: inspect.BoundArguments,
    function: Callable[..., Any],
) -> dict[str, Any]:
    """Returns the `in_axes` entry of each parameter; those that it leaves out are inferred."""
    if in_axes is INFER:
        return {}
    if isinstance(in_axes, Mapping) and not isinstance(in_axes, nnx.StateAxes):
        unknown = set(in_axes) - set(positional) - set(bound.kwargs)
        if unknown:
            raise ValueError(
                f"in_axes names {sorted(map(str, unknown))}, but {name_of(function)} was called "
                f"with {positional + list(bound.kwargs)}."
            )
        return dict(in_axes)
    given = positional[held:]
    if isinstance(in_axes, (tuple, list)):
        required = [
            name
            for name in given
            if bound.signature.parameters.get(name, _NO_DEFAULT).default is inspect.Parameter.empty
        ]
        if not len(required) <= len(in_axes) <= len(given):
            raise ValueError(
                f"in_axes has {len(in_axes)} entries, but {name_of(function)} was called with "
                f"{len(given)} arguments: {given}. Write one entry for each."
            )
        return dict(zip(given, in_axes, strict=False))
    return dict.fromkeys([*given, *bound.kwargs], in_axes)


_NO_DEFAULT = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
