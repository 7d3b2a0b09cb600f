"""The gradient hook: every gradient that NNX takes in a per-device step is synchronised once.

`nnx.grad`, `nnx.value_and_grad` and `nnx.vjp` all call the differentiated function through one of
three small classes of Flax.  On entry, `hook` passes the differentiated leaves through an identity
whose backward pass binds `grad_sync_p`; on return, the loss passes through `loss_p`.  Both are
ordinary JAX primitives, so they can be found in a jaxpr: that is how `_replication.py` learns
which gradients belong to replicated state and `_kinds` what each loss is.

Why a mean is right for replicated state: on each device the backward pass computes the derivative
of the *sum over devices* of the per-device losses with respect to that device's copy, because the
transpose of a psum is a psum.  For a loss that is a mean over examples the global loss is the mean
of the per-device ones, so the mean over devices of these derivatives is its gradient.  For a sum
over examples it is their sum.  A loss that is equal on all devices already is one with a mean.

This is the only file that touches the autodiff of Flax and of JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.extend as jex
from flax.nnx.transforms import autodiff as flax_autodiff
from jax import lax
from jax._src.interpreters import batching
from jax.interpreters import ad, mlir

from nnx_dp._context import StepContext, per_device
from nnx_dp._hooks import wrap_method
from nnx_dp._jaxpr import open_jaxpr, sub_jaxprs

Reduce = Literal["plan", "pmean", "psum", "scale", "keep"]
LossReduce = Literal["mean", "sum"]

DECLARED = "__nnx_dp_loss_reduce__"
"""Attribute of a differentiated function that says how its loss is reduced."""


@dataclasses.dataclass(eq=False)
class GradientLedger:
    """Numbers the gradients of one trace in order, and says how to reduce each.

    A step is traced twice with the same Python code: first to plan, where every decision is still
    open (`losses` is None), then for real with the decisions of the plan.

    Attributes:
      losses: reduction of each gradient's loss ("mean" or "sum"), in trace order.
      batch_leaves: (gradient, leaf) pairs differentiated with respect to a per-device array.
      drew: whether the step drew random numbers that differ between devices.
      microbatches: the most that `accumulate` cuts the batch into.
      declared: what the caller said in `loss_reduce=` of `nnx_dp.grad`, per gradient.
    """

    losses: tuple[LossReduce, ...] | None = None
    batch_leaves: frozenset[tuple[int, int]] = frozenset()
    declared: dict[int, LossReduce] = dataclasses.field(default_factory=dict)
    opened: int = 0
    drew: bool = False
    microbatches: int = 1

    @property
    def decided(self) -> bool:
        return self.losses is not None

    def open(self, declared: LossReduce | None) -> int:
        if declared is not None:
            self.declared[self.opened] = declared
        if self.losses is not None and self.opened >= len(self.losses):
            raise RuntimeError(
                "nnx_dp: the step took more gradients in its second trace than in its first. It "
                "must do the same each time it is traced: look for Python state that it changes."
            )
        self.opened += 1
        return self.opened - 1

    def declared_losses(self, otherwise: str) -> dict[int, LossReduce]:
        """What the caller said each loss is, here or in the decorator's `loss_reduce=`."""
        said = {} if otherwise == "infer" else dict.fromkeys(range(self.opened), otherwise)
        return cast(dict[int, LossReduce], {**said, **self.declared})

    def reduction(self, site: int, leaf: int) -> Reduce:
        if self.losses is None:
            return "plan"
        if (site, leaf) in self.batch_leaves:
            return "scale" if self.losses[site] == "mean" else "keep"
        return "pmean" if self.losses[site] == "mean" else "psum"


# ---------------------------------------------------------------------------------------------
# The primitives


grad_sync_p = jex.core.Primitive("grad_sync")
"""(cotangent, primal) -> cotangent, reduced over the data axis as its parameters say."""


def _marker(name: str) -> jex.core.Primitive:
    """Makes an identity that can be found in a jaxpr, and is nothing to every transform."""
    marker = jex.core.Primitive(name)
    marker.def_abstract_eval(lambda value, **_: value)
    marker.def_impl(lambda value, **_: value)
    mlir.register_lowering(marker, mlir.lower_fun(lambda value, **_: value, multiple_results=False))
    ad.deflinear2(marker, lambda cotangent, value, **_: [cotangent])
    batching.primitive_batchers[marker] = lambda args, dims, **params: (
        marker.bind(*args, **params),
        dims[0],
    )
    return marker


loss_p = _marker("loss")
"""Marks the loss of a gradient."""

rows_p = _marker("rows")
"""Says that its operand is to be taken as one row for each example."""


def _reduce(
    cotangent: Any,
    primal: Any,
    *,
    axis_name: str,
    axis_size: int,
    reduce: str,
    grad_dtype: Any,
    **_: Any,
):
    del primal
    if reduce in ("plan", "pmean", "psum"):
        dtype, on_the_wire = cotangent.dtype, cotangent
        if grad_dtype is not None and _is_wider(dtype, grad_dtype):
            on_the_wire = cotangent.astype(grad_dtype)
        total = lax.psum(on_the_wire, axis_name).astype(dtype)
        return total if reduce == "psum" else total / axis_size
    if reduce == "scale":
        return cotangent / axis_size
    return cotangent


def _is_wider(dtype: Any, than: Any) -> bool:
    floating = jax.numpy.issubdtype(dtype, jax.numpy.floating)
    return floating and jax.numpy.finfo(dtype).bits > jax.numpy.finfo(than).bits


def _grad_sync_jvp(primals: Any, tangents: Any, **params: Any):
    cotangent, primal = primals
    out = grad_sync_p.bind(cotangent, primal, **params)
    tangent = tangents[0]
    if type(tangent) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    params["derived"] = True
    return out, grad_sync_p.bind(ad.instantiate_zeros(tangent), primal, **params)


def _grad_sync_transpose(outer_cotangent: Any, cotangent: Any, primal: Any, **params: Any):
    # Each reduction is its own transpose, as psum is where every device differentiates the sum
    # of all devices' losses.
    assert ad.is_undefined_primal(cotangent)
    if type(outer_cotangent) is ad.Zero:
        return [ad.Zero(cotangent.aval), None]
    params["derived"] = True
    return [grad_sync_p.bind(outer_cotangent, primal, **params), None]


def _grad_sync_batch(axis_data: Any, args: Any, dims: Any, **params: Any):
    cotangent, primal = args
    cotangent_dim, primal_dim = dims
    if axis_data.name == params["axis_name"]:
        # The data axis itself is a vmap: `chex.fake_pmap`.
        if params["reduce"] in ("scale", "keep"):
            return _reduce(cotangent, primal, **params), cotangent_dim
        total = params["reduce"] == "psum"
        if cotangent_dim is None:
            return cotangent * (params["axis_size"] if total else 1), None
        return (cotangent.sum if total else cotangent.mean)(cotangent_dim), None
    if cotangent_dim is None:
        if primal_dim is not None:
            primal = lax.index_in_dim(primal, 0, primal_dim, keepdims=False)
        return grad_sync_p.bind(cotangent, primal, **params), None
    cotangent = jax.numpy.moveaxis(cotangent, cotangent_dim, 0)
    if primal_dim is None:
        # Unbatched state with a batched cotangent is a gradient per example: example i of one
        # device has nothing to do with example i of another.
        params["reduce"] = "keep"
        primal = jax.numpy.broadcast_to(primal, cotangent.shape)
    else:
        primal = jax.numpy.moveaxis(primal, primal_dim, 0)
    return grad_sync_p.bind(cotangent, primal, **params), 0


grad_sync_p.def_abstract_eval(lambda cotangent, primal, **_: cotangent)
grad_sync_p.def_impl(_reduce)
mlir.register_lowering(grad_sync_p, mlir.lower_fun(_reduce, multiple_results=False))
ad.primitive_jvps[grad_sync_p] = _grad_sync_jvp
ad.primitive_transposes[grad_sync_p] = _grad_sync_transpose
batching.fancy_primitive_batchers[grad_sync_p] = _grad_sync_batch


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _synchronised(params: Any, leaf: Any):
    return leaf


def _synchronised_fwd(params: Any, leaf: Any):
    return leaf, leaf


def _synchronised_bwd(params: Any, leaf: Any, cotangent: Any):
    return (grad_sync_p.bind(cotangent, leaf, **dict(params)),)


_synchronised.defvjp(_synchronised_fwd, _synchronised_bwd)


# ---------------------------------------------------------------------------------------------
# The hook


def hook(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Wraps a function that JAX differentiates: `(self, *args) -> (loss, rest)`.

    Inert unless a per-device step is being traced.  Only leaves that the innermost autodiff trace
    differentiates are touched: a custom_vjp on any other would break valid forward-mode code.
    """

    def hooked(*args: Any, **kwargs: Any):
        context = per_device()
        if context is None or context.ledger is None or not context.synchronise:
            return function(*args, **kwargs)
        ledger = context.ledger
        site = ledger.open(getattr(args[0], DECLARED, None))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        trace = jex.core.get_opaque_trace_state()._trace_ref()
        for index, leaf in enumerate(leaves):
            if getattr(leaf, "_trace", None) is not trace:
                continue
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
                continue
            params = _params(context, ledger, site, index)
            leaves[index] = _synchronised(tuple(params.items()), leaf)
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        loss, rest = function(*args, **kwargs)
        if not ledger.decided:
            loss = jax.tree.map(lambda x: loss_p.bind(x, site=site), loss)
        return loss, rest

    return hooked


def differentiated_shapes(jaxpr: Any) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """Finds the shapes of what is differentiated in a jaxpr, by gradient and leaf."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    inner, _ = open_jaxpr(jaxpr)
    for eqn in inner.eqns:
        if eqn.primitive is grad_sync_p:
            if eqn.params["reduce"] == "plan":
                key = eqn.params["site"], eqn.params["leaf"]
                found.setdefault(key, set()).add(eqn.outvars[0].aval.shape)
            continue
        for sub in sub_jaxprs(eqn):
            for key, shapes in differentiated_shapes(sub).items():
                found.setdefault(key, set()).update(shapes)
    return found


def synchronise(loss: Any, gradients: list[Any]) -> tuple[Any, list[Any]]:
    """Reduces gradients that were taken without the hook, as it would have reduced them."""
    context = per_device()
    if context is None or context.ledger is None:
        return loss, gradients
    ledger = context.ledger
    site = ledger.open(None)
    if not ledger.decided:
        loss = loss_p.bind(loss, site=site)
    # Only whether the differentiated value varies, and is batched, is asked of it.
    likes = [jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in gradients]
    return loss, [
        grad_sync_p.bind(leaf, like, **_params(context, ledger, site, index))
        for index, (leaf, like) in enumerate(zip(gradients, likes, strict=True))
    ]


def _params(context: StepContext, ledger: GradientLedger, site: int, leaf: int) -> dict[str, Any]:
    return dict(
        axis_name=context.axis_name,
        axis_size=context.axis_size,
        reduce=ledger.reduction(site, leaf),
        site=site,
        leaf=leaf,
        grad_dtype=context.grad_dtype,
        derived=False,
    )


@dataclasses.dataclass(eq=False)
class PlainGradFn:
    """The counterpart of Flax's classes for plain pytrees, which `jax.grad` differentiates."""

    function: Callable[..., Any]
    has_aux: bool

    def __post_init__(self):
        functools.update_wrapper(self, self.function)

    @hook
    def __call__(self, *args: Any, **kwargs: Any):
        out = self.function(*args, **kwargs)
        return out if self.has_aux else (out, None)


def _install() -> None:
    for name in ("GradFn", "SimpleGradFn", "SimpleVjpFn"):
        wrap_method(flax_autodiff, name, "__call__", hook)
    if not hasattr(jex.core.get_opaque_trace_state(), "_trace_ref"):
        raise ImportError(
            "nnx_dp finds the differentiated arguments through JAX's trace state, which jax "
            f"{jax.__version__} keeps elsewhere. Install a jax release that this version of nnx_dp "
            "supports."
        )


_install()
