"""Metrics that count the whole batch: `nnx.metrics.Average`, `Accuracy` and `Welford`.

In a per-device step their `update` adds what all devices saw, so that the metric is at every
moment what it would be on one device: it can be computed, updated again or reset inside the step.
Per-example values are summed over the devices.  A scalar is a mean that the step has taken
already: its mean over the devices counts once.

`nnx.MultiMetric` calls the `update` of its parts.  A metric class with an `update` of its own is
not known here; where its state varies between devices, `_state_reduce.py` asks for a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nnx_dp._context import per_device
from nnx_dp._hooks import wrap_method

COUNTED = "nnx.metrics.{}: counts the batch of all devices"


def _average_update(original: Callable[..., None]) -> Callable[..., None]:
    def update(self: Any, mask: Any = None, **kwargs: Any):
        context, values = per_device(), kwargs.get(self.argname)
        if context is None or not isinstance(values, jax.Array):
            return original(self, mask=mask, **kwargs)
        context.fired[COUNTED.format(type(self).__name__)] += 1
        if values.ndim == 0 and mask is None:
            mean = lax.pmean(values, context.axis_name)
            return original(self, **{**kwargs, self.argname: mean})
        if mask is None:
            total, count = values.sum(), values.size
        else:
            total = (values * mask.astype(values.dtype)).sum()
            count = mask.sum().astype(self.count.dtype)
        self.total[...] += lax.psum(total, context.axis_name)
        self.count[...] += lax.psum(count, context.axis_name)

    return update


def _welford_update(original: Callable[..., None]) -> Callable[..., None]:
    def update(self: Any, **kwargs: Any):
        context, values = per_device(), kwargs.get(self.argname)
        if context is None or not isinstance(values, jax.Array):
            return original(self, **kwargs)
        context.fired[COUNTED.format(type(self).__name__)] += 1
        axis_name = context.axis_name
        if values.ndim == 0:
            return original(self, **{**kwargs, self.argname: lax.pmean(values, axis_name)})
        # Chan, Golub and LeVeque's parallel formula, which Welford.update applies to its batch.
        count = lax.psum(values.size, axis_name)
        mean = lax.psum(values.sum(), axis_name) / count
        m2 = lax.psum(jnp.square(values - mean).sum(), axis_name)
        before, delta = self.count[...], mean - self.mean
        self.count[...] += count
        self.mean[...] += delta * count / self.count
        self.m2[...] += m2 + delta * delta * count * before / self.count

    return update


wrap_method(nnx.metrics, "Average", "update", _average_update)
wrap_method(nnx.metrics, "Welford", "update", _welford_update)
