"""Gradient accumulation: a large batch in small pieces, with one reduction over the devices.

The microbatches are taken in strides: the i-th of k holds the examples i, i + k, i + 2k, ...  So
it holds the same examples however many devices there are, and each device cuts its own part of the
batch without asking the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from nnx_dp._binding import arrange
from nnx_dp._collectives import psum
from nnx_dp._context import Counts, StepContext, current, entered
from nnx_dp._grad_sync import synchronise
from nnx_dp._gradients import Argnums, value_and_grad
from nnx_dp._graph import OutStructure, StateLeaves, flatten_call, write_back
from nnx_dp._options import StepOptions
from nnx_dp._roles import BoundCall, bind_call, spread_prefix
from nnx_dp._strategies._interface import Signature
from nnx_dp._strategies.shard_map import shard_mapped

_AUX = ("stack", "concatenate", "mean", "sum", "max", "min")


def accumulate(
    loss_fn: Callable[..., Any],
    /,
    microbatches: int,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    loss_reduce: Literal["mean", "sum"] = "mean",
    aux_reduce: Any = "stack",
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, but computed on one microbatch after the other.

    The memory for activations is that of one microbatch.  In a decorated step the devices add up
    their gradients by themselves and talk once, at the end, whatever the number of microbatches.

    The result is that of the whole batch for a loss that is a mean over the examples, or, with
    `nnx_dp.mean` and ``where=``, over those items that count: their number is taken over the whole
    batch, so microbatches may hold different numbers of them.  What a layer computes from several
    examples at once it computes from those of one microbatch: `nnx.BatchNorm` normalises by the
    statistics of a microbatch (of all devices together) and updates its running ones k times.
    Random draws, metrics and other state advance from microbatch to microbatch.

    Args:
      loss_fn: function that returns a scalar loss, or ``(loss, aux)`` with `has_aux`.  Among its
        arguments, NNX objects are state; arrays of shape ``[B, ...]`` are cut into microbatches of
        shape ``[B / microbatches, ...]``; scalars and what is differentiated are passed whole.
      microbatches: how many; has to divide the number of examples on each device.
      argnums: which positional arguments to differentiate, as in `nnx.value_and_grad`.
      has_aux: whether `loss_fn` returns a pair.
      loss_reduce: whether the loss is a mean over the examples, or a sum.
      aux_reduce: what becomes of the aux of the microbatches, a prefix tree: "stack" puts them
        side by side on a new first axis, as `jax.lax.scan` does; "concatenate" joins arrays of one
        row for each example, in the order of the batch; or "mean", "sum", "max", "min".

    Returns:
      A function with the arguments of `loss_fn` that returns ``(loss, gradient)``, or
      ``((loss, aux), gradient)``.

    Raises:
      ValueError: if the batch is not divisible, an argument says what it may not, or `loss_fn`
        changes the structure of its NNX objects.

    Example::

      >>> import jax.numpy as jnp, nnx_dp
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x, y):
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> value_and_grad = nnx_dp.accumulate(loss_fn, microbatches=4)
      >>> loss, grads = value_and_grad(model, jnp.ones((8, 3)), jnp.zeros((8, 1)))
      >>> loss.shape, grads["kernel"].shape
      ((), (3, 1))
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches is {microbatches!r}; write a positive int.")
    if loss_reduce not in ("mean", "sum"):
        raise ValueError(f'loss_reduce is {loss_reduce!r}; write "mean" or "sum".')
    for way in jax.tree.leaves(aux_reduce):
        if way not in _AUX:
            raise ValueError(f"aux_reduce has {way!r}; write one of {', '.join(_AUX)}.")
    differentiate = value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)
    several = isinstance(argnums, Sequence)
    whole = [
        index if isinstance(index, int) else index.argnum
        for index in (argnums if several else (argnums,))
    ]

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        names = arrange(differentiate, args, kwargs, 0, (), ()).positional
        in_axes = {names[index]: None for index in whole}
        return bind_call(differentiate, args, kwargs, in_axes=in_axes)

    task = _Task(bind, microbatches, has_aux, loss_reduce, aux_reduce)

    @functools.wraps(loss_fn)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is not None:
            return _accumulated(task, context, args, kwargs)
        with entered(context := StepContext(mode="global", axis_name="data", axis_size=1)):
            return _accumulated(task, context, args, kwargs)

    return accumulated


@dataclasses.dataclass(frozen=True)
class _Task:
    """What `accumulate` was told; `bind` matches a call of the function that it returned."""

    bind: Callable[[tuple[Any, ...], dict[str, Any]], BoundCall]
    microbatches: int
    has_aux: bool
    loss_reduce: Literal["mean", "sum"]
    aux_reduce: Any


def _accumulated(task: _Task, context: StepContext, args: Any, kwargs: Any) -> Any:
    bound = task.bind(args, kwargs)
    _check_batch(bound, task)
    state = StateLeaves(bound.nodes, bound.node_paths())
    if context.mesh is not None:
        launched = _on_each_device(bound, state, task, context, context.mesh)
        if launched is not None:
            return launched
    return _scanned(bound, state, task, context)


def _on_each_device(
    bound: BoundCall, state: StateLeaves, task: _Task, context: StepContext, mesh: Mesh
) -> Any | None:
    """Accumulates in a per-device view inside a global one, so that the devices talk once.

    Returns:
      What `accumulate` returns; None if this would not be what the global view computes: it has
      random numbers of its own, or the loss cannot be put together from those of the devices.
    """

    def here(*args: Any, **kwargs: Any) -> Any:
        context = current()
        assert context is not None
        return _accumulated(task, context, args, kwargs)

    local = dataclasses.replace(bound, function=here)
    signature = Signature(
        local.abstract(), state.abstract(), mesh, (), StepOptions(axis_name=context.axis_name)
    )
    if any(size % (signature.devices * task.microbatches) for _, size in bound.batch_sizes()):
        return None
    try:
        mapped, structures, plan = shard_mapped(signature)
    except Exception:
        return None
    if plan.drew:
        return None
    leaves = mapped(state.leaves, bound.arrays)
    return write_back(structures[-1], leaves, state)


def _scanned(bound: BoundCall, state: StateLeaves, task: _Task, context: StepContext) -> Any:
    """Takes the gradient of one microbatch after the other and adds up."""
    if context.ledger is not None:
        context.ledger.microbatches = max(context.ledger.microbatches, task.microbatches)
    pieces = [
        _cut(array, task.microbatches) if argument.axis is not None else None
        for argument, array in bound.located_arrays()
    ]
    gradients_form: list[Any] = []
    structures: list[OutStructure] = []

    def differentiated(nodes: list[Any], arrays: Any):
        value, gradients = bound.call(nodes, arrays)
        loss, aux = value if task.has_aux else (value, None)
        leaves, form = jax.tree.flatten(gradients)
        gradients_form.append(form)
        return loss, aux, leaves

    def one(state_leaves: Sequence[Any], pieces: Any, counts: Counts):
        """Returns the new state, the loss, the aux and the gradients of one microbatch."""
        arrays = [
            array if piece is None else piece
            for array, piece in zip(bound.arrays, pieces, strict=True)
        ]
        flat = flatten_call(bound, state.graphdef, state.treedef, differentiated, structures.append)
        with entered(dataclasses.replace(context, synchronise=False, counts=counts)):
            leaves = flat(state_leaves, arrays)
        direct = structures[-1].direct
        if direct is None:
            raise ValueError(
                "the function that accumulate differentiates changes the structure of its NNX "
                "objects, or returns some of them. Every microbatch must leave the objects that it "
                "was given, with new values at most: make new Variables before, and return arrays."
            )
        return leaves[: len(state_leaves)], *direct.read(leaves)

    first = [None if piece is None else piece[0] for piece in pieces]
    counts = Counts()
    _, loss, aux, gradients = jax.eval_shape(lambda s, p: one(s, p, counts), state.leaves, first)
    divisors = _divisors(one, state.leaves, pieces, task, context) if counts.counted else None

    def body(carry: Any, pieces: Any):
        state_leaves, loss_sum, sums = carry
        state_leaves, loss, aux, gradients = one(state_leaves, pieces, Counts(divisors))
        sums = [total + leaf for total, leaf in zip(sums, gradients, strict=True)]
        return (state_leaves, loss_sum + loss, sums), aux

    zeros = [jnp.zeros(leaf.shape, _wide(leaf.dtype)) for leaf in gradients]
    carry = (state.leaves, jnp.zeros((), _wide(loss.dtype)), zeros)
    (new_state, loss_sum, sums), stacked = lax.scan(body, carry, pieces)
    if task.loss_reduce == "mean":
        loss_sum = loss_sum / task.microbatches
        sums = [total / task.microbatches for total in sums]
    loss_sum, sums = synchronise(
        loss_sum.astype(loss.dtype),
        [total.astype(leaf.dtype) for total, leaf in zip(sums, gradients, strict=True)],
    )
    state.replace(new_state)
    gradients = jax.tree.unflatten(gradients_form[-1], sums)
    if not task.has_aux:
        return loss_sum, gradients
    return (loss_sum, _reduced_aux(stacked, aux, task.aux_reduce)), gradients


def _divisors(
    one: Callable[..., Any], state_leaves: list[Any], pieces: Any, task: _Task, context: StepContext
) -> list[jax.Array]:
    """Counts what the whole batch's means divide by, and spreads it over devices and microbatches.

    Everything but the counts is computed for nothing here, and dropped by XLA.
    """

    def body(state_leaves: Sequence[Any], pieces: Any):
        counts = Counts()
        state_leaves, *_ = one(state_leaves, pieces, counts)
        return state_leaves, counts.counted

    _, counted = lax.scan(body, state_leaves, pieces)
    shares = task.microbatches * context.axis_size if task.loss_reduce == "mean" else 1
    return [psum(jnp.sum(count)) / shares for count in counted]


def _cut(array: Any, microbatches: int) -> jax.Array:
    """[B, ...] -> [k, B / k, ...], of which the i-th holds the rows i, i + k, i + 2k, ..."""
    array = jnp.asarray(array)
    strided = array.reshape(array.shape[0] // microbatches, microbatches, *array.shape[1:])
    return jnp.swapaxes(strided, 0, 1)


def _reduced_aux(stacked: Any, one: Any, ways: Any) -> Any:
    reduce = {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max, "min": jnp.min}

    def leave(way: str, leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if way == "stack":
            return leaf
        if way == "concatenate":
            if not shape.shape:
                raise ValueError(
                    'aux_reduce says "concatenate" for an aux that is a scalar in each microbatch. '
                    'Write "stack", "mean", "sum", "max" or "min" for it.'
                )
            return jnp.swapaxes(leaf, 0, 1).reshape(-1, *shape.shape[1:])
        return reduce[way](leaf, axis=0)

    leaves, treedef = jax.tree.flatten(stacked)
    shapes = jax.tree.leaves(one)
    each = spread_prefix(ways, stacked)
    return jax.tree.unflatten(treedef, [*map(leave, each, leaves, shapes)])


def _wide(dtype: Any) -> Any:
    """Half precision is added up in single."""
    return jnp.promote_types(dtype, jnp.float32)


def _check_batch(bound: BoundCall, task: _Task) -> None:
    sizes = bound.batch_sizes()
    told = ", ".join(f"{argument.path} has {size}" for argument, size in sizes)
    if not sizes:
        raise ValueError(
            f"accumulate(microbatches={task.microbatches}) found no batch among the arguments: no "
            "array with at least one axis besides what is differentiated. Pass the batch as an "
            "argument of the function."
        )
    if len({size for _, size in sizes}) > 1:
        raise ValueError(
            f"accumulate needs one number of examples on axis 0 of every array, but {told}. Put an "
            "array that is no batch inside an NNX object, or let the function close over it."
        )
    if sizes[0][1] % task.microbatches:
        raise ValueError(
            f"accumulate(microbatches={task.microbatches}) cannot cut the batch evenly: {told} "
            "(in a per-device strategy, on each device). Write a number of microbatches that "
            "divides it."
        )
