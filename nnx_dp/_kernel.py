"""`per_device`: a function that must see one device's shapes, such as a flash-attention kernel.

XLA cannot partition a kernel that it cannot look into: under ``"jit"`` it would gather the whole
batch on every device, or refuse.  A marked function runs there in a `jax.shard_map` over the data
axis.  In a per-device strategy the shapes are right already; outside a step there is one device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import PartitionSpec

from nnx_dp._context import StepContext, current
from nnx_dp._grad_sync import rows_p
from nnx_dp._leaves import is_array, is_key, is_state
from nnx_dp._placement import spec
from nnx_dp._rngs import split_key
from nnx_dp._roles import INFER, broadcast_axes

P = ParamSpec("P")
R = TypeVar("R")


def per_device(
    fn: Callable[P, R] | None = None, /, *, in_axes: Any = INFER, out_axes: Any = INFER
) -> Callable[P, R]:
    """Marks a function that must see one device's batch.

    The function has to treat examples apart: its result for a part of the batch is that part of its
    result for the whole.

    Args:
      fn: called with arrays of shape ``[B, ...]``; sees ``[B / devices, ...]``.  Arguments that are
        no arrays are passed as they are; a scalar PRNG key is folded with the device's index.
      in_axes: the batch axis of each argument: an int, None for an array that is the same for all
        examples, or ... to work it out: an array is split on axis 0 if that is as long as axis 0 of
        the first array and both have as many axes.  One entry, a tuple with one for each positional
        argument, or a dict by name; each may be a prefix tree.
      out_axes: the same for the results; ... takes axis 0.

    Returns:
      A function with the arguments and results of `fn`.

    Raises:
      ValueError: when called, if it cannot be told whether an array has the batch axis.
      TypeError: when called with NNX objects, which belong outside.

    Example::

      >>> import jax, jax.numpy as jnp, nnx_dp
      >>> from flax import nnx
      >>> attention = nnx_dp.per_device(nnx.dot_product_attention)
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=2, in_features=4, decode=False, attention_fn=attention, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((8, 3, 4))).shape
      (8, 3, 4)
    """
    if fn is None:
        return functools.partial(per_device, in_axes=in_axes, out_axes=out_axes)  # type: ignore

    @functools.wraps(fn)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        context = current()
        if context is not None and (context.mesh is not None or context.mode == "per_device"):
            name = getattr(fn, "__name__", repr(fn))
            context.fired[f"nnx_dp.per_device: {name} sees one device's shapes"] += 1
        if context is not None and context.mesh is not None:
            return _over_devices(fn, context, args, kwargs, in_axes, out_axes)
        out = fn(*args, **kwargs)
        planning = context is not None and context.ledger is not None and not context.ledger.decided
        if planning and out_axes is not None:
            out = jax.tree.map(lambda leaf: rows_p.bind(leaf) if is_array(leaf) else leaf, out)
        return out

    return kernel


def _over_devices(
    fn: Callable[..., Any],
    context: StepContext,
    args: Any,
    kwargs: Any,
    in_axes: Any,
    out_axes: Any,
):
    name = getattr(fn, "__name__", repr(fn))
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_state)
    if any(map(is_state, leaves)):
        raise TypeError(
            f"per_device({name}) was given an NNX object. Pass it the arrays that it needs, and "
            "keep Modules and Variables outside."
        )
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    axes = [
        axis
        for leaf, axis in zip(leaves, _axes(fn, args, kwargs, in_axes), strict=True)
        if is_array(leaf)
    ]
    axes = _infer(name, arrays, axes)
    mesh = context.mesh
    assert mesh is not None
    devices = mesh.shape[context.axis_name]
    sizes = {
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    }
    if any(size % devices for size in sizes):
        # Every device runs the kernel on the whole: exact, and no partitioning is asked for.
        axes, out_axes = [None] * len(axes), None

    def call(*local: Any):
        values = iter(local)
        filled = [next(values) if is_array(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return fn(*args, **kwargs)

    def on_each_device(*local: Any):
        split = any(axis is not None for axis in axes)
        return call(
            *[
                split_key(value, context) if split and is_key(value) and value.ndim == 0 else value
                for value in local
            ]
        )

    def local_shape(array: Any, axis: int | None):
        shape = list(array.shape)
        if axis is not None:
            shape[axis] //= devices
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    shapes = jax.eval_shape(call, *map(local_shape, arrays, axes))
    shape_leaves, out_treedef = jax.tree.flatten(shapes)
    declared = broadcast_axes(f"the result of {name}", 0 if out_axes is INFER else out_axes, shapes)
    for shape, axis in zip(shape_leaves, declared, strict=True):
        if axis is not None and axis >= len(shape.shape):
            raise ValueError(
                f"per_device({name}) returns an array of shape {shape.shape} on each device, which "
                f"has no axis {axis}. Write out_axes: the batch axis of each result."
            )
    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=tuple(_spec(context.axis_name, axis) for axis in axes),
        out_specs=jax.tree.unflatten(out_treedef, [_spec(context.axis_name, a) for a in declared]),
        axis_names={context.axis_name},
        check_vma=False,
    )
    return mapped(*arrays)


def _spec(axis_name: str, axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else spec(axis_name, axis)


def _axes(fn: Callable[..., Any], args: Any, kwargs: Any, in_axes: Any) -> list[Any]:
    """Spreads `in_axes` over the leaves of a call, in the order in which they are flattened."""
    by_name = in_axes if isinstance(in_axes, dict) else {}
    everywhere = INFER if isinstance(in_axes, (dict, tuple, list)) else in_axes
    names = _parameter_names(fn, len(args))
    spread: list[Any] = []
    for index, (name, value) in enumerate(zip(names, args, strict=True)):
        axis = by_name.get(name, everywhere)
        if isinstance(in_axes, (tuple, list)) and index < len(in_axes):
            axis = in_axes[index]
        spread += broadcast_axes(name, axis, value)
    for name in sorted(kwargs):
        spread += broadcast_axes(name, by_name.get(name, everywhere), kwargs[name])
    return spread


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def _infer(name: str, arrays: list[Any], axes: list[Any]) -> list[int | None]:
    first = next((array for array in arrays if array.ndim > 0), None)
    out: list[int | None] = []
    for index, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is not INFER:
            out.append(axis if axis is None else axis % array.ndim)
        elif first is None or array.ndim == 0 or array.shape[0] != first.shape[0]:
            out.append(None)
        elif array.ndim == first.ndim:
            out.append(0)
        else:
            raise ValueError(
                f"per_device({name}) cannot tell whether its array {index}, of shape "
                f"{array.shape}, has the batch axis of the first, of shape {first.shape}. Say so "
                "with in_axes: 0 if it has, None if it is the same for all examples; by position "
                "or by name."
            )
    return out
