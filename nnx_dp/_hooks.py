"""Wrapping a method of a Flax class, once, in a way that is inert outside a decorated step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax

Method = Callable[..., Any]


def wrap_method(owner: Any, class_name: str, name: str, wrapper: Callable[[Method], Method]):
    """Replaces `owner.class_name.name` by `wrapper(original)`; a second call changes nothing.

    Raises:
      ImportError: if the installed Flax has no such method.
    """
    wrapped_class = getattr(owner, class_name, None)
    original = vars(wrapped_class).get(name) if isinstance(wrapped_class, type) else None
    if original is None:
        raise ImportError(
            f"nnx_dp extends {owner.__name__}.{class_name}.{name}, which flax {flax.__version__} "
            "does not have. Install a flax release that this version of nnx_dp supports."
        )
    if not hasattr(original, "__nnx_dp__"):
        replacement = functools.wraps(original)(wrapper(original))
        replacement.__nnx_dp__ = True  # type: ignore[attr-defined]
        setattr(wrapped_class, name, replacement)
