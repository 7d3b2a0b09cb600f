"""Random streams that differ between devices, and stay the same in the model.

Every key that an `nnx.RngStream` hands out in a per-device step is folded with the device's index.
The stream's own key is left alone and its count advances as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from nnx_dp._context import StepContext, per_device
from nnx_dp._hooks import wrap_method

PARAMS_STREAM = "params"
"""Initialises parameters, which must agree: its keys are never split."""


def split_key(key: jax.Array, context: StepContext) -> jax.Array:
    """Folds the device's index into a key, or into each key of an array of keys."""
    if context.ledger is not None:
        context.ledger.drew = True
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, lax.axis_index(context.axis_name))


def is_split(rngs: str | Sequence[str], tag: str) -> bool:
    """Whether a stream's draws differ between devices, under the step's `rngs=`."""
    if rngs == "broadcast" or tag == PARAMS_STREAM:
        return False
    kept = () if rngs == "split" else (rngs,) if isinstance(rngs, str) else tuple(rngs)
    return tag not in kept


def _drawn_per_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any):
        key = original(self)
        context = per_device()
        if context is None or not is_split(context.rngs, self.tag):
            return key
        context.fired[f"random stream {self.tag!r}: different draws on each device"] += 1
        return split_key(key, context)

    return __call__


wrap_method(nnx, "RngStream", "__call__", _drawn_per_device)
