"""Ctrl-C leaves no state half written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def to_its_end(write: Callable[[], T]) -> T:
    """Runs `write`, which may be run twice, and once more if Ctrl-C stops it half-way."""
    try:
        return write()
    except KeyboardInterrupt:
        write()
        raise
