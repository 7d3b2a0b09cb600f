"""What a loss is, by itself and by what its backward pass brings."""

from __future__ import annotations

import functools

from nnx_dp._kinds.algebra import SAME, Kind, join, linear, same


def loss_from_gradient(loss: Kind, cotangents: list[Kind], trusted: bool) -> Kind:
    """Compares what a loss is with what its backward pass brings to the state on each device."""
    if loss.tag == "rows":
        # A function with an output for each example, differentiated by nnx.vjp: what its gradient
        # is depends on the cotangent that the step chose.
        return functools.reduce(lambda a, b: join(a, b, "gradients of unlike kinds"), cotangents)
    if loss.tag == "unknown":
        return loss
    expected = (linear(0), same(-1)) if loss.reduction == "sum" else (linear(1), SAME)
    for cotangent in cotangents:
        if cotangent.curved and not trusted:
            return Kind("conflict", why=_CURVED)
        if cotangent.tag in ("same", "linear") and cotangent not in expected:
            return Kind("conflict", why=_REDUCED_ALREADY)
    return loss


_CURVED = (
    "its backward pass is not linear in the gradient that it gets (a jax.custom_vjp that clips or "
    "normalises it, or a cotangent that the step computes from the batch), and would do so with "
    "that of one device's examples"
)


_REDUCED_ALREADY = (
    "its backward pass scales the gradient or sums it over the devices itself (a jax.custom_vjp "
    "that does, or a psum of a mean in the loss): leave that to the caller, or use nnx_dp.pmean "
    "there"
)
