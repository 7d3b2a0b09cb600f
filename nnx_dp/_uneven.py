"""Batches that the devices do not divide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnx_dp._options import Settings
from nnx_dp._roles import Argument, BoundCall


def even_out(
    bound: BoundCall, devices: int, settings: Settings, step: str, *, warn: Callable[[str], None]
) -> str:
    """Makes a call's batch one that can be split.

    Returns:
      How to run it: the strategy, "replicate", or "pad" for a batch that was padded.

    Raises:
      ValueError: if it cannot be split, and `uneven=` does not say what else to do.
    """
    size, strategy, uneven = batch_size(bound, step), settings.strategy, settings.uneven
    if size % devices == 0 or (strategy in ("jit", "auto") and uneven == "auto"):
        return strategy
    told = f"{size} examples, which {devices} devices do not divide"
    if uneven == "drop" and size > devices:
        warn(f'{told}: uneven="drop" leaves the last {size % devices} out')
        _drop_remainder(bound, size, devices)
        return strategy
    if uneven == "replicate":
        warn(f'{told}: uneven="replicate" makes every device compute all of them')
        return "replicate"
    if uneven == "pad":
        _pad(bound, size, devices)
        return "pad"
    raise _refusal(bound, size, devices, step, strategy)


def batch_size(bound: BoundCall, step: str) -> int:
    """Returns the number of examples in a call.

    Raises:
      ValueError: if there is no batch, it is empty, or its arrays disagree on its size.
    """
    split = bound.batch_sizes()
    if not split:
        others = _listed([a.path for a in bound.arguments])
        raise ValueError(
            f"data_parallel({step}) found no batch among its arguments ({others}): a batch is an "
            "array with at least one axis. Pass one (np.asarray makes one of a list of numbers), "
            "or call the step undecorated."
        )
    sizes = [size for _, size in split]
    if len(set(sizes)) > 1:
        rarest = min(sizes, key=lambda size: (sizes.count(size), size))
        odd = next(argument.path for argument, size in split if size == rarest)
        name = odd if odd.isidentifier() else "name"
        listed = any(re.search(r"\[\d+\]$", argument.path) for argument, _ in split)
        stack = " np.stack makes one array of a list with one for each example." if listed else ""
        raise ValueError(
            f"data_parallel({step}) found batch arrays of different lengths: {_sizes(split)}. "
            "Every array with an axis is taken as part of the batch. Write None in in_axes for one "
            f"that is the same for all examples (in_axes={{'{name}': None}}), or the axis that "
            f"holds its examples.{stack}"
        )
    size = sizes[0]
    if size == 0:
        raise ValueError(f"data_parallel({step}) was given an empty batch: {_sizes(split)}.")
    return size


def _refusal(bound: BoundCall, size: int, devices: int, step: str, strategy: str) -> ValueError:
    """Returns the error for a batch that does not divide and may not be bent to."""
    where, _ = bound.batch_sizes()[0]
    fewer, more = size - size % devices, size + devices - size % devices
    nearest = f"{fewer} or {more}" if fewer else str(more)
    return ValueError(
        f"data_parallel({step}): {where.path} has {size} examples on axis {where.axis}, which "
        f"{devices} devices do not divide. Options:\n"
        f"1. A batch of {nearest} examples.\n"
        '2. strategy="jit" with uneven="auto", which splits any batch exactly'
        + ("" if strategy == "jit" else f' (this step runs under "{strategy}")')
        + ".\n"
        '3. uneven="replicate" (every device computes the whole batch), "pad" (outputs for each '
        'example only), or "drop" (the remainder is left out).'
    )


def _sizes(split: Sequence[tuple[Argument, int]]) -> str:
    """Says the size of each array, or of a few of each size where there are many."""
    by_size: dict[int, list[str]] = {}
    for argument, size in split:
        told = f"{argument.path} has {size} on axis {argument.axis}"
        by_size.setdefault(size, []).append(told)
    return ", ".join(map(_listed, by_size.values()))


def _listed(told: Sequence[str], most: int = 6) -> str:
    if len(told) <= most:
        return ", ".join(told)
    return f"{', '.join(told[: most - 1])} and {len(told) - most + 1} more"


def _drop_remainder(bound: BoundCall, size: int, devices: int) -> None:
    """Cuts a call's batch to the largest size that the devices divide."""
    _resize(bound, lambda array, axis: _slice(array, axis, size - size % devices))


def _pad(bound: BoundCall, size: int, devices: int) -> None:
    """Lengthens a call's batch, by repeating its last example, to a size that divides."""
    missing = -size % devices

    def lengthen(array: Any, axis: int) -> Any:
        xp = np if isinstance(array, np.ndarray) else jnp
        last = _slice(array, axis, size, start=size - 1)
        return xp.concatenate([array] + [last] * missing, axis)

    _resize(bound, lengthen)
    bound.unpadded_size = size


def unpad(leaves: list[Any], axes: Sequence[int | None] | None, size: int | None) -> list[Any]:
    """Cuts padding out of what a step leaves behind, given the batch axis of each array."""
    if axes is None or size is None:
        return leaves
    return [
        leaf if axis is None else _slice(leaf, axis, size)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


def _resize(bound: BoundCall, change: Any) -> None:
    bound.arrays = [
        array if argument.axis is None else change(array, argument.axis)
        for argument, array in bound.located_arrays()
    ]


def _slice(array: Any, axis: int, stop: int, start: int = 0) -> Any:
    return array[(slice(None),) * axis + (slice(start, stop),)]
