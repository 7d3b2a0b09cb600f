"""`grad` and `value_and_grad`: gradients that are synchronised, said out loud.

A decorated step synchronises what `nnx.grad` and `nnx.value_and_grad` return as well; these take
plain pytrees too, as `jax.grad` does, and let the reduction of the loss be named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from nnx_dp._grad_sync import DECLARED, PlainGradFn
from nnx_dp._leaves import is_state

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]
LossReduceArgument = Literal["infer", "mean", "sum"]


def grad(
    f: Callable[..., Any] | None = None,
    /,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    loss_reduce: LossReduceArgument = "infer",
    **options: Any,
) -> Callable[..., Any]:
    """Like `nnx.grad`, and like `jax.grad` for plain pytrees, synchronised over the devices.

    Outside a decorated step, and under ``strategy="jit"``, it is `nnx.grad` or `jax.grad`.

    Args:
      f: function that returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
      argnums: which positional arguments to differentiate; an int, a `nnx.DiffState`, or several.
      has_aux: whether `f` returns a pair.
      loss_reduce: what the loss is over one device's examples: "mean", "sum", or "infer" to read
        it off the traced step.
      **options: as in `nnx.grad` (`holomorphic`, `allow_int`, `graph`, `graph_updates`).

    Returns:
      A function with the arguments of `f` that returns the gradient of the global loss.

    Raises:
      ValueError: if `loss_reduce` is none of these.

    Example::

      >>> import nnx_dp, jax.numpy as jnp
      >>> gradient = nnx_dp.grad(lambda params, x: jnp.mean(params["w"] * x))
      >>> gradient({"w": jnp.array(2.0)}, jnp.array([1.0, 3.0]))
      {'w': Array(2., dtype=float32, weak_type=True)}
    """
    return _build(f, nnx.grad, jax.grad, argnums, has_aux, loss_reduce, options)


def value_and_grad(
    f: Callable[..., Any] | None = None,
    /,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    loss_reduce: LossReduceArgument = "infer",
    **options: Any,
) -> Callable[..., Any]:
    """Like `grad`, and returns the loss as well: ``(loss, gradient)``.

    The loss is the one that `f` returned, over one device's examples; a decorated step that returns
    it returns the global loss.

    Args:
      f: function that returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
      argnums: which positional arguments to differentiate; an int, a `nnx.DiffState`, or several.
      has_aux: whether `f` returns a pair.
      loss_reduce: what the loss is over one device's examples: "mean", "sum" or "infer".
      **options: as in `nnx.value_and_grad`.

    Returns:
      A function with the arguments of `f` that returns ``(loss, gradient)``, or
      ``((loss, aux), gradient)``.

    Raises:
      ValueError: if `loss_reduce` is none of these.

    Example::

      >>> import nnx_dp, jax.numpy as jnp
      >>> f = nnx_dp.value_and_grad(lambda w, x: jnp.mean(w * x))
      >>> loss, gradient = f(jnp.array(2.0), jnp.array([1.0, 3.0]))
      >>> print(loss, gradient)
      4.0 2.0
    """
    return _build(f, nnx.value_and_grad, jax.value_and_grad, argnums, has_aux, loss_reduce, options)


def _build(
    f: Callable[..., Any] | None,
    nnx_transform: Any,
    jax_transform: Any,
    argnums: Any,
    has_aux: bool,
    loss_reduce: str,
    options: dict[str, Any],
):
    if loss_reduce not in ("infer", "mean", "sum"):
        raise ValueError(f'loss_reduce is {loss_reduce!r}; write "infer", "mean" or "sum".')
    if f is None:
        return functools.partial(
            _build,
            nnx_transform=nnx_transform,
            jax_transform=jax_transform,
            argnums=argnums,
            has_aux=has_aux,
            loss_reduce=loss_reduce,
            options=options,
        )

    @functools.wraps(f)
    def loss(*args: Any, **kwargs: Any):
        return f(*args, **kwargs)

    if loss_reduce != "infer":
        setattr(loss, DECLARED, loss_reduce)
    lifted = nnx_transform(loss, argnums=argnums, has_aux=has_aux, **options)
    plain_options = {k: v for k, v in options.items() if not k.startswith("graph")}

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any):
        if any(map(is_state, jax.tree.leaves((args, kwargs), is_leaf=is_state))):
            return lifted(*args, **kwargs)
        # Differentiated with an aux always, so that the hook sees (loss, aux).
        plain = jax_transform(
            PlainGradFn(loss, has_aux), argnums=argnums, has_aux=True, **plain_options
        )
        first, second = plain(*args, **kwargs)
        if has_aux:
            return first, second
        return (first[0], second) if jax_transform is jax.value_and_grad else first

    return differentiated
