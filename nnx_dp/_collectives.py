"""Collectives that a step may call wherever it runs.

In a per-device strategy they run over the data axis.  Under ``"jit"`` and outside any decorated
step there is one program that sees the whole batch, so they have nothing to do.  One step, with
these in it, therefore also runs undecorated.

Gradients follow the rule of the whole package (see `_grad_sync.py`): a psum is its own transpose.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx_dp._context import current, per_device


def psum(x: Any) -> Any:
    """Sums a pytree over the devices.

    Args:
      x: pytree of arrays; on each device, its own part of a sum over the batch.

    Returns:
      A pytree of the same shapes and dtypes: the sum over devices, or `x` where the body sees the
      whole batch.

    Example::

      >>> import nnx_dp, jax.numpy as jnp
      >>> nnx_dp.psum(jnp.array(3.0))
      Array(3., dtype=float32, weak_type=True)
    """
    context = per_device()
    if context is None:
        return x
    # A Python number would be folded into the program, out of sight of the proof.
    return lax.psum(jax.tree.map(jnp.asarray, x), context.axis_name)


def pmean(x: Any) -> Any:
    """Averages a pytree over the devices; each holds as many examples as the others.

    Args:
      x: pytree of arrays; on each device, a mean over its own examples.

    Returns:
      A pytree of the same shapes: the mean over devices, or `x` where the body sees the whole
      batch.
    """
    context = per_device()
    return x if context is None else lax.pmean(x, context.axis_name)


def pmax(x: Any) -> Any:
    """Takes the largest value over the devices, elementwise.

    Differentiable: the derivative of a maximum goes to the devices that attain it, in equal parts,
    as that of `jnp.max` goes to the elements that attain it.

    Args:
      x: pytree of real arrays.

    Returns:
      A pytree of the same shapes and dtypes, or `x` where the body sees the whole batch.
    """
    context = per_device()
    if context is None:
        return x
    return jax.tree.map(lambda leaf: _pmax(context.axis_name, leaf), x)


def pmin(x: Any) -> Any:
    """Takes the smallest value over the devices, elementwise; differentiable as `pmax` is.

    Args:
      x: pytree of real arrays.

    Returns:
      A pytree of the same shapes and dtypes, or `x` where the body sees the whole batch.
    """
    context = per_device()
    if context is None:
        return x
    return jax.tree.map(lambda leaf: -_pmax(context.axis_name, -leaf), x)


def all_gather(x: Any, axis: int = 0) -> Any:
    """Joins the devices' parts of a pytree along an axis, in order.

    Args:
      x: pytree of arrays of shape ``[..., b, ...]``, with b rows on each device at `axis`.
      axis: the axis to join on.

    Returns:
      Arrays of shape ``[..., devices * b, ...]``, the rows of the global batch, or `x` where the
      body sees the whole batch.
    """
    context = per_device()
    if context is None:
        return x
    return jax.tree.map(
        lambda leaf: lax.all_gather(leaf, context.axis_name, axis=axis, tiled=True), x
    )


def axis_index() -> jax.Array:
    """Returns which device this is, an int32 scalar from 0; 0 where one body sees all examples."""
    context = per_device()
    if context is None:
        return jnp.zeros((), jnp.int32)
    return lax.axis_index(context.axis_name)


def axis_size() -> int:
    """Returns over how many devices the body's batch is split; 1 where it sees all examples."""
    context = per_device()
    return 1 if context is None else context.axis_size


def mean(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Averages over all elements on all devices, counting only those that `where` selects.

    This is the loss for batches where the number of valid items differs from device to device
    (padding tokens, masks): a mean of the devices' means would weight the items unequally.

    Args:
      x: array of shape ``[b, ...]``, floating point or integer.
      where: boolean array that broadcasts to the shape of `x`; all elements where None.

    Returns:
      A scalar: the sum of the selected elements divided by their number, both over all devices;
      NaN if none is selected, as `jnp.mean` has it.

    Example::

      >>> import nnx_dp, jax.numpy as jnp
      >>> losses = jnp.array([1.0, 2.0, 3.0, 100.0])
      >>> nnx_dp.mean(losses, where=jnp.array([True, True, True, False]))
      Array(2., dtype=float32)
    """
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
    # Half precision is summed in single, as `jnp.mean` does it.
    wide = jnp.promote_types(dtype, jnp.float32)
    if where is None:
        total, count = jnp.sum(x, dtype=wide), jnp.asarray(x.size)
    else:
        where = jnp.broadcast_to(where, x.shape)
        total, count = jnp.sum(x, dtype=wide, where=where), jnp.sum(where)
    count = count.astype(jnp.float32)
    context = current()
    if context is not None and context.counts is not None:
        count = count if where is None else context.counts.divisor(count)
    else:
        total, count = psum((total, count))
    return (total / count).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pmax(axis_name: str, x: Any):
    return lax.pmax(x, axis_name)


@_pmax.defjvp
def _pmax_jvp(axis_name: str, primals: Any, tangents: Any):
    (x,), (tangent,) = primals, tangents
    largest = _pmax(axis_name, x)  # not lax.pmax: this rule is differentiated again
    share = (x == largest).astype(tangent.dtype)
    return largest, lax.psum(share * tangent, axis_name) / lax.psum(share, axis_name)
