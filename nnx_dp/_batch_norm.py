"""Batch statistics over all devices, as one device with the whole batch would take them.

In a per-device step `nnx.BatchNorm` behaves as if its `axis_name` were the data axis.  A layer
that already names the data axis also works where that axis is not bound: under ``"jit"``, where
the batch is global.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nnx_dp._context import current
from nnx_dp._grad_sync import rows_p
from nnx_dp._hooks import wrap_method

SYNCHRONISED = "nnx.BatchNorm: statistics over all devices"
BY_ITSELF = "nnx.BatchNorm: statistics of each device; running ones averaged"


def _synchronised_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, x: Any, use_running_average: Any = None, *, mask: Any = None):
        context = current()
        if context is None:
            return original(self, x, use_running_average, mask=mask)
        axis_name = self.axis_name
        if context.mode == "global":
            axis_name = None if axis_name == context.axis_name else axis_name
        elif context.sync_batch_norm and axis_name is None:
            axis_name = context.axis_name
        evaluating = (
            self.use_running_average if use_running_average is None else use_running_average
        )
        if context.mode == "per_device" and not evaluating:
            everywhere = axis_name == context.axis_name
            context.fired[SYNCHRONISED if everywhere else BY_ITSELF] += 1
        if mask is not None and axis_name == context.axis_name and not evaluating:
            return _masked(self, x, mask, axis_name, original)
        with _axis_name_set(self, axis_name):
            out = original(self, x, use_running_average, mask=mask)
        if context.mode == "per_device" and axis_name is None and not evaluating:
            # Asked for with sync_batch_norm=False: not what one device would compute, but as good
            # as one row for each example.
            return rows_p.bind(out)
        return out

    return __call__


@contextlib.contextmanager
def _axis_name_set(layer: nnx.BatchNorm, axis_name: Any) -> Generator[None, None, None]:
    before = layer.axis_name
    # Past the checks of `nnx.Module.__setattr__`: the attribute is back before anyone looks.
    object.__setattr__(layer, "axis_name", axis_name)
    try:
        yield
    finally:
        object.__setattr__(layer, "axis_name", before)


def _masked(layer: nnx.BatchNorm, x: Any, mask: Any, axis_name: Any, original: Callable[..., Any]):
    """Normalises by masked statistics: sums and counts are reduced, since means of unlike counts
    cannot be averaged.

    The formula is Flax's, Var = E[|x|^2] - |E[x]|^2 (`use_fast_variance`) or E[|x - E[x]|^2].
    """
    feature_axis = layer.axis % x.ndim
    axes = tuple(i for i in range(x.ndim) if i != feature_axis)
    values = jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
    mask = jnp.broadcast_to(mask, x.shape)
    count = lax.psum(jnp.sum(mask, axes).astype(values.dtype), axis_name)

    def average(v: jax.Array):
        return lax.psum(jnp.sum(v, axes, where=mask), axis_name) / count

    batch_mean = average(values)
    if layer.use_fast_variance:
        batch_var = jnp.maximum(0.0, average(jnp.square(values)) - jnp.square(batch_mean))
    else:
        shape = [1] * x.ndim
        shape[feature_axis] = x.shape[feature_axis]
        batch_var = average(jnp.square(values - batch_mean.reshape(shape)))

    running_mean, running_var = layer.mean[...], layer.var[...]
    layer.mean[...], layer.var[...] = batch_mean, batch_var
    with _axis_name_set(layer, None):
        out = original(layer, x, True)
    momentum, stop = layer.momentum, jax.lax.stop_gradient
    layer.mean[...] = stop(momentum * running_mean + (1 - momentum) * batch_mean)
    layer.var[...] = stop(momentum * running_var + (1 - momentum) * batch_var)
    return out


wrap_method(nnx, "BatchNorm", "__call__", _synchronised_call)
