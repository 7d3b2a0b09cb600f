"""A call matched against the step's signature, with partials and bound methods unwrapped."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx_dp._leaves import is_state


def unwrap(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the function under partials and bound methods, and the arguments that they hold."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(function, functools.partial):
            args, kwargs = function.args + args, {**function.keywords, **kwargs}
            function = function.func
        elif inspect.ismethod(function):
            args, function = (function.__self__, *args), function.__func__
        elif is_state(function):
            args, function = (function, *args), type(function).__call__
        else:
            return function, args, kwargs


@dataclasses.dataclass(frozen=True)
class Arranged:
    """A call matched against its signature.

    Attributes:
      bound: the match.
      positional: names of the positional arguments.
      args: the positional arguments; static ones are wrapped, to stay in one piece.
      kwargs: the others, likewise.
    """

    bound: inspect.BoundArguments
    positional: list[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def flatten(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten((self.args, self.kwargs), is_leaf=is_leaf)


def arrange(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> Arranged:
    """Matches a call, of which a partial or a method holds the first few arguments."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name_of(function)} was called with arguments that do not fit its parameters "
            f"{list(signature.parameters)}: {error}."
        ) from None
    bound.apply_defaults()
    names = list(signature.parameters)
    static_names = set(static_argnames)
    positional = _positional_names(bound)
    for index in static_argnums:
        static_names.add(_parameter_at(index, positional[held:], function))
    unknown = static_names - set(names) - set(bound.kwargs)
    if unknown:
        raise ValueError(
            f"static_argnames names {sorted(unknown)}, but {name_of(function)} has the parameters "
            f"{names}."
        )
    wrapped = (
        Whole(value) if name.split("[")[0] in static_names else value
        for value, name in zip(bound.args, positional, strict=True)
    )
    named = {
        name: Whole(value) if name in static_names else value
        for name, value in bound.kwargs.items()
    }
    return Arranged(bound, positional, tuple(wrapped), named)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Keeps an argument named in static_argnums or static_argnames in one piece."""

    value: Any


def is_leaf(value: Any) -> bool:
    return is_state(value) or isinstance(value, Whole)


def _positional_names(bound: inspect.BoundArguments) -> list[str]:
    """Names the positional arguments of a call; those of *args are `args[0]`, `args[1]`."""
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound.arguments.get(name, ())))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    return names[: len(bound.args)]


def _parameter_at(index: int, names: Sequence[str], function: Callable[..., Any]) -> str:
    if not -len(names) <= index < len(names):
        raise ValueError(
            f"static_argnums names argument {index}, but {name_of(function)} was called with "
            f"{len(names)} positional arguments: {list(names)}."
        )
    return names[index].split("[")[0]


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
