"""Which transforms and layers of NNX work in a decorated step: the runs behind the tables.

Each case is a model and a step.  The oracle is the undecorated step on one device with the whole
batch, on an equal fresh copy.  After each of two steps everything that the decorated step leaves
behind is compared with it.  What comes out is in docs/compatibility.md, and a row of that page that
says something else fails.  To write its tables again, from runs under all three strategies:

    python tests/test_compatibility.py --write
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    import conftest  # noqa: F401  It makes the devices, before JAX starts.

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import checkify as jax_checkify
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import PER_DEVICE, STRATEGIES, assert_same, refused, snapshot

import nnx_dp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
ROWS, FEATURES = 8, 4
SGD = optax.sgd(0.1, momentum=0.9)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Differs(NamedTuple):
    """The random numbers are other ones, and so is what is computed from them."""

    footnote: str


class Refused(NamedTuple):
    """The step is an error, of this type and with these words in its message or its notes."""

    footnote: str
    error: type[Exception]
    match: str


class Case(NamedTuple):
    """A row of the tables.

    Attributes:
      name: the row's title.
      make: makes the model.
      covers: the public names of `flax.nnx` that the row is about.
      forward: what is trained, `(model, x) -> rows`; by default the model is called.
      step: `(model, optimizer, x, y) -> output`, where training `forward` is not the point.
      batch: makes x from a seed.
      per_device: what holds under "shard_map" and "pmap", None for "equal".
      devices: the numbers of devices to run on.
      since: the footnote of a row that the oldest Flax has not got.
    """

    name: str
    make: Callable[[], nnx.Module]
    covers: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    batch: Callable[[int], np.ndarray] | None = None
    per_device: Differs | Refused | None = None
    devices: tuple[int, ...] = (2,)
    since: str | None = None


# -------------------------------------------------------------------------------------------------
# Batches: rows, and so shards, differ in scale


def scaled(seed: int, *shape: int) -> np.ndarray:
    ramp = np.linspace(0.3, 1.5, ROWS, dtype=np.float32)
    values = np.random.default_rng(seed).standard_normal((ROWS, *shape)).astype(np.float32)
    return values * ramp.reshape(ROWS, *(1 for _ in shape))


def vectors(seed: int) -> np.ndarray:
    return scaled(seed, FEATURES)


def sequences(seed: int) -> np.ndarray:
    return scaled(seed, 3, FEATURES)


def images(seed: int) -> np.ndarray:
    return scaled(seed, 4, 4, FEATURES)


def tokens(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, 3, (ROWS, 3))
    return ((drawn + np.arange(ROWS)[:, None] // 3) % 5).astype(np.int32)


# -------------------------------------------------------------------------------------------------
# Models and steps


def linear() -> nnx.Linear:
    return nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0))


class MLP(nnx.Module):
    def __init__(self, dropout: float = 0.0):
        rngs = nnx.Rngs(0, dropout=1)
        self.hidden = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jnp.tanh(self.hidden(x))))


class Counted(nnx.Module):
    """Also counts its calls, so that a transform that loses an update is seen."""

    def __init__(self):
        self.linear = linear()
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.linear(x))


class Normalised(nnx.Module):
    def __init__(self):
        self.linear = linear()
        self.norm = nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


class Stack(nnx.Module):
    """Three layers whose parameters are stacked."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(FEATURES, FEATURES, rngs=rngs))
        self.layers = make(nnx.Rngs(0).split(3))


class Behind(nnx.Module):
    """A layer behind a linear one, so that the gradient has to pass through the layer."""

    def __init__(self, layer: nnx.Module, call: Callable[..., Any] | None = None):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(7))
        self.layer = layer
        self.call = call

    def __call__(self, x):
        x = self.linear(x)
        return self.layer(x) if self.call is None else self.call(self.layer, x)


def streams() -> nnx.Rngs:
    return nnx.Rngs(0, dropout=1)


def loss_of(out: jax.Array, y: Any) -> jax.Array:
    return jnp.mean((out.reshape(len(out), -1) - y) ** 2)


def train(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the step that trains `forward`."""

    def step(model, optimizer, x, y):
        def loss_fn(model):
            out = forward(model, x)
            return loss_of(out, y), out

        (loss, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return {"loss": loss, "out": out, "grads": grads}

    return step


def apply(model, x):
    return model(x)


def predict(model, optimizer, x, y):
    del optimizer, y
    return {"out": model(x)}


# -------------------------------------------------------------------------------------------------
# Steps: a transform of NNX each


def by_grad(model, optimizer, x, y):
    grads = nnx.grad(lambda model: loss_of(model(x), y))(model)
    optimizer.update(model, grads)
    return {"out": model(x), "grads": grads}


def by_value_and_grad(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: loss_of(model(x), y))(model)
    optimizer.update(model, grads)
    return {"loss": loss, "out": model(x), "grads": grads}


def by_diff_state(model, optimizer, x, y):
    del optimizer
    head = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("head")))
    grads = nnx.grad(lambda model: loss_of(model(x), y), argnums=head)(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, head.filter), grads))
    return {"out": model(x), "grads": grads}


def by_vjp(model, optimizer, x, y):
    loss, pull = nnx.vjp(lambda model: loss_of(model(x), y), model, graph=False)
    (grads,) = pull(jnp.ones(()))
    grads = nnx.state(grads, nnx.Param)
    optimizer.update(model, grads)
    return {"loss": loss, "out": model(x), "grads": grads}


def by_vjp_of_rows(model, optimizer, x, y):
    out, pull = nnx.vjp(lambda model: model(x), model, graph=False)
    (grads,) = pull(2 * (out - y) / out.size)
    optimizer.update(model, nnx.state(grads, nnx.Param))
    return {"out": out}


def by_jvp(model, optimizer, x, y):
    del optimizer
    forward = lambda model, x: loss_of(model(x), y)  # noqa: E731
    tangent = jax.tree.map(jnp.ones_like, model)
    loss, slope = nnx.jvp(forward, (model, x), (tangent, jnp.zeros_like(x)), graph=False)
    return {"loss": loss, "slope": slope}


def jvp_in_gradient(model, x):
    out, along = nnx.jvp(lambda x: model(x), (x,), (jnp.ones_like(x),), graph=False)
    return out + along


def vmap_over_examples(model, x):
    return nnx.vmap(apply, in_axes=(None, 0))(model, x)


def vmap_over_models(model, x):
    out = nnx.vmap(apply, in_axes=(0, None))(model.layers, x)
    return jnp.mean(jnp.tanh(out), axis=0)


def per_example_gradients(average):
    def step(model, optimizer, x, y):
        gradient = nnx.grad(lambda model, x, y: loss_of(model(x[None]), y[None]))
        grads = nnx.vmap(gradient, in_axes=(None, 0, 0))(model, x, y)
        grads = jax.tree.map(lambda g: average(jnp.clip(g, -0.1, 0.1)), grads)
        optimizer.update(model, grads)
        return {"out": model(x), "grads": grads}

    return step


def scan_over_layers(model, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def through(layer, x):
        return jnp.tanh(layer(x))

    return through(model.layers, x)


def scan_over_time(model, x):
    axes = (nnx.StateAxes({...: nnx.Carry}), nnx.Carry, 1)

    @nnx.scan(in_axes=axes, out_axes=(nnx.Carry, 1))
    def through(model, carry, x):
        carry = jnp.tanh(model(x) + carry)
        return carry, carry

    return through(model, jnp.zeros_like(x[:, 0]), x)[1]


def scan_over_examples(model, x):
    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def through(model, total, x):
        total = total + model(x)
        return total, total

    return through(model, jnp.zeros(FEATURES), x)[1]


def remat(model, x):
    return nnx.remat(apply)(model, x)


def half(model, x):
    return 0.5 * model(x)


def cond(model, x):
    even = model.calls[...] % 2 == 0
    return nnx.cond(even, apply, half, model, x)


def cond_on_batch(model, x):
    return nnx.cond(jnp.mean(x) > 0.0, apply, half, model, x)


def switch(model, x):
    def double(model, x):
        return 2 * model(x)

    return nnx.switch(model.calls[...] % 3, [apply, half, double], model, x)


def fori_loop(model, x):
    def body(i, carry):
        model, x = carry
        return model, jnp.tanh(model(x)) + 0.1 * i

    return nnx.fori_loop(0, 3, body, (model, x))[1]


def loop_while(limit):
    def step(model, optimizer, x, y):
        def body(carry):
            model, x, n = carry
            return model, jnp.tanh(model(x)), n + 1

        start = (model, x, jnp.zeros((), jnp.int32))
        _, out, n = nnx.while_loop(limit, body, start)
        return {"out": out, "n": n}

    return step


def jit_of_forward(model, x):
    return nnx.jit(apply)(model, x)


def jit_with_shardings(model, x):
    everywhere = NamedSharding(inner_mesh(), PartitionSpec())
    shardings = (nnx.StateSharding({...: everywhere}), everywhere)
    return nnx.jit(apply, in_shardings=shardings)(model, x)


def jit_of_step(model, optimizer, x, y):
    return nnx.jit(by_value_and_grad)(model, optimizer, x, y)


def jit_partial(model, optimizer, x, y):
    return nnx.jit_partial(by_value_and_grad, model, optimizer, graph=False)(x, y)


def cached_partial(model, optimizer, x, y):
    return nnx.cached_partial(nnx.jit(by_value_and_grad), model, optimizer)(x, y)


@nnx.custom_vjp(graph_updates=True)
def clipped(model, x):
    return model(x)


def clipped_fwd(model, x):
    out, pull = jax.vjp(lambda kernel, bias, x: x @ kernel + bias, *linear_parts(model), x)
    return out, pull


def clipped_bwd(pull, cotangent):
    (model_grads, _), out_grad = cotangent
    kernel, bias, x = pull(out_grad)
    model_grads = jax.tree.map(lambda g: g, model_grads)
    model_grads["kernel"][...] = 3 * kernel
    model_grads["bias"][...] = bias
    return model_grads, x


def linear_parts(model):
    return model.kernel[...], model.bias[...]


clipped.defvjp(clipped_fwd, clipped_bwd)


def eval_shape(model, x):
    shape = nnx.eval_shape(apply, model, x)
    abstract = nnx.eval_shape(lambda: nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0)))
    return model(x) + jnp.full(shape.shape, abstract.kernel.shape[1], shape.dtype)


def make_jaxpr(model, x):
    jaxpr = nnx.make_jaxpr(apply, graph_updates=False)(model, x)
    return len(jaxpr.out_avals) * model(x)


def checkify(fine):
    def step(model, optimizer, x, y):
        del optimizer, y

        def checked(model, x):
            jax_checkify.check(fine(x), "too large")
            return model(x)

        error, out = nnx.checkify(checked)(model, x)
        # Its other leaves number the checks of this process.
        failed = [leaf for leaf in jax.tree.leaves(error) if leaf.dtype == bool]
        return {"error": failed, "out": out}

    return step


def transform_metadata(model, x):
    @nnx.vmap(in_axes=(0, None), out_axes=0)
    @nnx.transform_metadata(in_axes=(0, None), out_axes=0, partition="model")
    def through(layer, x):
        return layer(x)

    return jnp.mean(jnp.tanh(through(model.layers, x)), axis=0)


def pmap(model, x):
    parts = x.reshape(2, len(x) // 2, FEATURES)
    out = nnx.pmap(apply, in_axes=(None, 0), axis_name="inner")(model, parts)
    return out.reshape(x.shape)


def inner_mesh() -> Mesh:
    return Mesh(jax.devices()[:2], ("inner",))


def shard_map(model, x):
    spec = PartitionSpec("inner")
    mesh, in_specs = inner_mesh(), (PartitionSpec(), spec)
    return nnx.shard_map(apply, mesh=mesh, in_specs=in_specs, out_specs=spec)(model, x)


# -------------------------------------------------------------------------------------------------
# Steps: random streams


def split_rngs(model, x):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None))
    def through(model, x):
        return model(x)

    return jnp.mean(through(model, x), axis=0)


def fork_rngs(model, x):
    @nnx.fork_rngs()
    def through(model, x):
        return model(x)

    return through(model, x)


def with_rngs(model, x):
    return nnx.with_rngs(model, fork=..., graph_updates=False)(x)


def restore_rngs(model, x):
    backups = nnx.split_rngs(model, splits=2)
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    out = nnx.vmap(apply, in_axes=(axes, None))(model, x)
    nnx.restore_rngs(backups)
    return jnp.mean(out, axis=0)


def reseed(model, x):
    nnx.reseed(model, dropout=3)
    return model(x)


# -------------------------------------------------------------------------------------------------
# Steps: captured values


class Sower(nnx.Module):
    def __init__(self):
        self.linear = linear()

    def __call__(self, x):
        hidden = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", hidden)
        self.sow(nnx.Intermediate, "mean", jnp.mean(hidden))
        return hidden


class Perturbed(nnx.Module):
    def __init__(self):
        self.first, self.second = linear(), nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(self.perturb("hidden", jnp.tanh(self.first(x))))


def capture(model, optimizer, x, y):
    del optimizer, y
    out, intermediates = nnx.capture(model, nnx.Intermediate)(x)
    return {"out": out, "intermediates": intermediates}


def perturb(model, optimizer, x, y):
    _, zeros = nnx.capture(model, nnx.Perturbation)(x)

    def loss_fn(model, zeros):
        return loss_of(nnx.capture(model, init=zeros)(x), y)

    grads, hidden = nnx.grad(loss_fn, argnums=(0, 1))(model, zeros)
    optimizer.update(model, grads)
    return {"grads": grads, "hidden": hidden}


def split_and_merge(model, x):
    return nnx.merge(*nnx.split(model))(x)


class Keeper(nnx.Module):
    """Keeps the rows that it saw last."""

    def __init__(self):
        self.linear = linear()
        self.last = nnx.Cache(jnp.zeros((ROWS, FEATURES)))

    def __call__(self, x):
        self.last.set_value(self.linear(x))
        return self.last[...]


# -------------------------------------------------------------------------------------------------
# Layers that take more than one array, or more than one call


class Decoder(nnx.Module):
    def __init__(self):
        self.attention = nnx.MultiHeadAttention(2, FEATURES, decode=True, rngs=streams())
        self.attention.init_cache((ROWS, 3, FEATURES))

    def __call__(self, x):
        return self.attention(x[:, :1])


class Listed(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([linear(), linear()])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Named(nnx.Module):
    def __init__(self):
        self.layers = nnx.Dict(first=linear(), second=linear())

    def __call__(self, x):
        return self.layers["second"](jnp.tanh(self.layers["first"](x)))


def evaluated(model, x):
    return nnx.view(model, deterministic=True, use_running_average=True, raise_if_not_found=False)(
        x
    )


def update_stats(layer, x):
    return layer(x, update_stats=True)


def attend(layer, x):
    return layer.attend(x)


def through_time(cell, x):
    carry = cell.initialize_carry(x[:, 0].shape, rngs=nnx.Rngs(0))
    outs = []
    for t in range(2):
        carry, out = cell(carry, x[:, t])
        outs.append(out)
    return jnp.stack(outs, axis=1)


def of_lengths(rnn, x):
    lengths = 1 + (x[:, 0, 0] > 0) + (x[:, 1, 0] > 0)
    return rnn(x, seq_lengths=lengths, reverse=True, keep_order=True)


def recurrent() -> nnx.RNN:
    return nnx.RNN(nnx.SimpleCell(FEATURES, FEATURES, rngs=streams()), rngs=streams())


def attention(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=streams(), **options)


class Rotated(nnx.Module):
    def __init__(self):
        self.linear = linear()
        self.rope = nnx.RoPE(embedding_size=FEATURES, max_seq_len=3)

    def __call__(self, x):
        heads = self.linear(x)[:, None]
        return nnx.dot_product_attention_with_rope(heads, heads, heads, rope=self.rope)


def masked_attention(model, x):
    valid = x[..., 0] > -0.5
    mask = nnx.combine_masks(nnx.make_causal_mask(valid), nnx.make_attention_mask(valid, valid))
    heads = model(x)[:, :, None, :]
    return nnx.dot_product_attention(heads, heads, heads, mask=mask)


def pools(model, x):
    windows = {"window_shape": (2, 2), "strides": (1, 1)}
    x = model(x)
    x = nnx.avg_pool(x, **windows) + nnx.max_pool(x, **windows) + nnx.min_pool(x, **windows)
    return nnx.pool(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID")


def adapted() -> nnx.LoRA:
    return nnx.LoRA(FEATURES, 2, FEATURES, base_module=linear(), rngs=streams())


def from_linen() -> nnx.Module:
    return nnx.bridge.ToNNX(linen.Dense(FEATURES), rngs=streams()).lazy_init(vectors(0))


def behind(
    layer: Callable[..., nnx.Module], *args: Any, call: Any = None, **kwargs: Any
) -> Callable[[], nnx.Module]:
    """Says how to make a layer behind a linear one."""
    return lambda: Behind(layer(*args, **kwargs), call)


def seeded(
    layer: Callable[..., nnx.Module], *args: Any, call: Any = None, **kwargs: Any
) -> Callable[[], nnx.Module]:
    """The same for a layer that takes `rngs`."""
    return lambda: Behind(layer(*args, rngs=streams(), **kwargs), call)


# -------------------------------------------------------------------------------------------------
# The tables

DRAWS = Differs("draws")
noisy = functools.partial(MLP, dropout=0.5)

TABLES = {
    "Transforms": [
        Case("`nnx.grad`", MLP, ("grad",), step=by_grad),
        Case("`nnx.value_and_grad`", MLP, ("value_and_grad",), step=by_value_and_grad),
        Case("`nnx.grad` with `nnx.DiffState`", MLP, ("DiffState",), step=by_diff_state),
        Case("`nnx.vjp` of a loss", linear, ("vjp",), step=by_vjp),
        Case("`nnx.vjp` of rows", linear, ("vjp",), step=by_vjp_of_rows),
        Case("`nnx.jvp` of a loss", behind(nnx.PReLU), ("jvp",), step=by_jvp),
        Case("`nnx.jvp` inside a gradient", linear, ("jvp",), jvp_in_gradient),
        Case("`nnx.custom_vjp`", linear, ("custom_vjp",), clipped),
        Case("`nnx.vmap` over the examples", linear, ("vmap",), vmap_over_examples),
        Case("`nnx.vmap` over a stack of models", Stack, ("vmap",), vmap_over_models),
        Case(
            "`nnx.vmap` of `nnx.grad`, a gradient for each example",
            linear,
            ("vmap", "grad"),
            step=per_example_gradients(lambda grads: jnp.mean(grads, axis=0)),
            per_device=Refused(
                "per-example", ValueError, r"bias would differ between the \d devices"
            ),
        ),
        Case(
            "the same, averaged with `nnx_dp.pmean`",
            linear,
            ("vmap", "grad"),
            step=per_example_gradients(lambda grads: nnx_dp.pmean(jnp.mean(grads, axis=0))),
        ),
        Case("`nnx.scan` over layers", Stack, ("scan", "Carry"), scan_over_layers),
        Case(
            "`nnx.scan` over time",
            Counted,
            ("scan", "Carry", "StateAxes"),
            scan_over_time,
            batch=sequences,
        ),
        Case(
            "`nnx.scan` over the examples",
            linear,
            ("scan",),
            scan_over_examples,
            per_device=Refused("rows-mixed", ValueError, "a scan over the batch"),
        ),
        Case("`nnx.remat`", Normalised, ("remat",), remat),
        Case("`nnx.cond` on state", Counted, ("cond",), cond),
        Case(
            "`nnx.cond` on a value of the batch",
            linear,
            ("cond",),
            cond_on_batch,
            per_device=Refused("branch", ValueError, "a branch that depends on one device's"),
        ),
        Case("`nnx.switch`", Counted, ("switch",), switch),
        Case("`nnx.fori_loop`", Counted, ("fori_loop",), fori_loop),
        Case(
            "`nnx.while_loop`",
            Counted,
            ("while_loop",),
            step=loop_while(lambda carry: carry[2] < 3),
        ),
        Case(
            "`nnx.while_loop` on a value of the batch",
            Counted,
            ("while_loop",),
            step=loop_while(lambda carry: (carry[2] < 3) & (jnp.mean(carry[1]) < 0.5)),
            per_device=Refused("loop", ValueError, "model.calls would differ between"),
        ),
        Case("`nnx.jit` around the model", Normalised, ("jit",), jit_of_forward),
        Case("`nnx.jit` around the step", linear, ("jit",), step=jit_of_step),
        Case("`nnx.jit` with `nnx.StateSharding`", linear, ("StateSharding",), jit_with_shardings),
        Case("`nnx.jit_partial`", linear, ("jit_partial",), step=jit_partial),
        Case("`nnx.cached_partial`", linear, ("cached_partial",), step=cached_partial),
        Case("`nnx.eval_shape`", linear, ("eval_shape",), eval_shape),
        Case("`nnx.make_jaxpr`", linear, ("make_jaxpr",), make_jaxpr),
        Case(
            "`nnx.checkify` of a condition on the batch",
            linear,
            ("checkify",),
            step=checkify(lambda x: jnp.all(x < 1e3)),
            per_device=Refused("check", ValueError, r"output\['error'\].*is neither a plain mean"),
        ),
        Case(
            "the same, reduced with `nnx_dp.pmax`",
            linear,
            ("checkify",),
            step=checkify(lambda x: nnx_dp.pmax(jnp.max(x)) < 1e3),
        ),
        Case("`nnx.transform_metadata`", Stack, ("transform_metadata",), transform_metadata),
        Case(
            "`nnx.pmap`",
            linear,
            ("pmap",),
            pmap,
            per_device=Refused("devices", ValueError, "belongs to another mesh"),
        ),
        Case(
            "`nnx.shard_map`",
            linear,
            ("shard_map",),
            shard_map,
            per_device=Refused("devices", ValueError, "belongs to another mesh"),
        ),
    ],
    "Random streams and captured values": [
        Case("`nnx.split_rngs`", noisy, ("split_rngs",), split_rngs, per_device=DRAWS),
        Case("`nnx.restore_rngs`", noisy, ("restore_rngs",), restore_rngs, per_device=DRAWS),
        Case("`nnx.fork_rngs`", noisy, ("fork_rngs",), fork_rngs, per_device=DRAWS),
        Case("`nnx.with_rngs`", noisy, ("with_rngs",), with_rngs, per_device=DRAWS),
        Case(
            "`nnx.reseed`",
            noisy,
            ("reseed",),
            reseed,
            per_device=Refused("reseed", ValueError, "rngs.key is a random key"),
        ),
        Case("`nnx.capture` of `sow`", Sower, ("capture", "Intermediate"), step=capture),
        Case(
            "`nnx.capture` of `perturb`",
            Perturbed,
            ("capture", "Perturbation"),
            step=perturb,
        ),
        Case("`nnx.split` and `nnx.merge`", Counted, ("split", "merge"), split_and_merge),
        Case(
            "a Variable that keeps rows",
            Keeper,
            per_device=Refused("rows-kept", ValueError, "model.last would hold part of the batch"),
        ),
    ],
    "Layers": [
        Case("`nnx.Linear`", behind(linear), ("Linear",)),
        Case(
            "`nnx.LinearGeneral`",
            seeded(nnx.LinearGeneral, (3, FEATURES), (2, 2), axis=(-2, -1)),
            ("LinearGeneral",),
            batch=sequences,
        ),
        Case(
            "`nnx.Einsum`",
            seeded(nnx.Einsum, "ntf,tfg->ntg", (3, FEATURES, 2), (3, 2)),
            ("Einsum",),
            batch=sequences,
        ),
        Case(
            "`nnx.Conv`",
            seeded(nnx.Conv, FEATURES, FEATURES, (3, 3), strides=2, feature_group_count=2),
            ("Conv",),
            batch=images,
        ),
        Case(
            "`nnx.ConvTranspose`",
            seeded(nnx.ConvTranspose, FEATURES, 2, (2, 2), strides=(2, 2)),
            ("ConvTranspose",),
            batch=images,
        ),
        Case(
            "`nnx.Embed`",
            lambda: nnx.Embed(5, FEATURES, rngs=streams()),
            ("Embed",),
            batch=tokens,
        ),
        Case("`nnx.Embed`, `attend`", seeded(nnx.Embed, 5, FEATURES, call=attend), ("Embed",)),
        Case("`nnx.BatchNorm`", seeded(nnx.BatchNorm, FEATURES), ("BatchNorm",), devices=(2, 8)),
        Case(
            "`nnx.BatchNorm`, evaluated", seeded(nnx.BatchNorm, FEATURES), ("BatchNorm",), evaluated
        ),
        Case("`nnx.LayerNorm`", seeded(nnx.LayerNorm, FEATURES), ("LayerNorm",)),
        Case("`nnx.RMSNorm`", seeded(nnx.RMSNorm, FEATURES), ("RMSNorm",)),
        Case("`nnx.GroupNorm`", seeded(nnx.GroupNorm, FEATURES, 2), ("GroupNorm",), batch=images),
        Case(
            "`nnx.InstanceNorm`",
            seeded(nnx.InstanceNorm, FEATURES),
            ("InstanceNorm",),
            batch=images,
        ),
        Case(
            "`nnx.WeightNorm`",
            lambda: Behind(nnx.WeightNorm(linear(), rngs=streams())),
            ("WeightNorm",),
        ),
        Case(
            "`nnx.SpectralNorm`",
            lambda: Behind(nnx.SpectralNorm(linear(), rngs=streams()), update_stats),
            ("SpectralNorm",),
        ),
        Case("`nnx.Dropout`", seeded(nnx.Dropout, 0.5), ("Dropout",), per_device=DRAWS),
        Case("`nnx.Dropout`, evaluated", seeded(nnx.Dropout, 0.5), ("Dropout",), evaluated),
        Case(
            "`nnx.Dropout` with `broadcast_dims=(0,)`",
            seeded(nnx.Dropout, 0.5, broadcast_dims=(0,)),
            ("Dropout",),
            per_device=Refused("shared-mask", ValueError, "differs between devices but not"),
        ),
        Case(
            "`nnx.MultiHeadAttention`",
            behind(attention),
            ("MultiHeadAttention", "dot_product_attention"),
            batch=sequences,
        ),
        Case(
            "`nnx.MultiHeadAttention`, a cache for decoding",
            Decoder,
            ("MultiHeadAttention",),
            step=predict,
            batch=sequences,
            per_device=Refused(
                "cache", ValueError, r"cache shape error[^$]*nnx_dp: in a per-device"
            ),
        ),
        Case(
            "`nnx.MultiHeadAttention` with dropout",
            behind(attention, dropout_rate=0.5, deterministic=False),
            ("MultiHeadAttention",),
            batch=sequences,
            per_device=Refused("shared-mask", ValueError, "differs between devices but not"),
        ),
        Case(
            "the same with `broadcast_dropout=False`",
            behind(attention, dropout_rate=0.5, deterministic=False, broadcast_dropout=False),
            ("MultiHeadAttention",),
            batch=sequences,
            per_device=DRAWS,
        ),
        Case(
            "`nnx.RoPE`",
            lambda: Behind(nnx.RoPE(embedding_size=FEATURES, max_seq_len=3)),
            ("RoPE",),
            batch=sequences,
            since="rope",
        ),
        Case(
            "`nnx.dot_product_attention_with_rope`",
            Rotated,
            ("dot_product_attention_with_rope",),
            batch=sequences,
            since="rope",
        ),
        Case(
            "`nnx.dot_product_attention` with masks",
            linear,
            (
                "dot_product_attention",
                "make_causal_mask",
                "make_attention_mask",
                "combine_masks",
            ),
            masked_attention,
            batch=sequences,
        ),
        Case(
            "`nnx.avg_pool`, `max_pool`, `min_pool`, `pool`",
            linear,
            ("avg_pool", "max_pool", "min_pool", "pool"),
            pools,
            batch=images,
        ),
        *(
            Case(
                f"`nnx.{cell.__name__}`",
                seeded(cell, FEATURES, FEATURES, call=through_time),
                (cell.__name__,),
                batch=sequences,
            )
            for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)
        ),
        Case("`nnx.RNN`", behind(recurrent), ("RNN",), batch=sequences),
        Case(
            "`nnx.RNN` with `seq_lengths`",
            behind(recurrent, call=of_lengths),
            ("RNN",),
            batch=sequences,
        ),
        Case(
            "`nnx.Bidirectional`",
            lambda: Behind(nnx.Bidirectional(recurrent(), recurrent(), rngs=streams())),
            ("Bidirectional",),
            batch=sequences,
        ),
        Case("`nnx.LoRA`", behind(adapted), ("LoRA",)),
        Case(
            "`nnx.LoRALinear`",
            seeded(nnx.LoRALinear, FEATURES, FEATURES, lora_rank=2),
            ("LoRALinear",),
        ),
        Case("`nnx.PReLU`", behind(nnx.PReLU), ("PReLU",)),
        Case(
            "`nnx.Sequential`",
            lambda: nnx.Sequential(linear(), jnp.tanh, linear()),
            ("Sequential",),
        ),
        Case("`nnx.List`", Listed, ("List",)),
        Case("`nnx.Dict`", Named, ("Dict",)),
        Case("`nnx.bridge.ToNNX` of a Linen module", behind(from_linen)),
    ],
}

CASES = {case.name: case for cases in TABLES.values() for case in cases}

FOOTNOTES = {
    "per-example": "A gradient for each example is left alone, so its mean over one device's "
    "examples is no mean over the batch. Average it with `nnx_dp.pmean`, as the next row does.",
    "rows-mixed": "A loop from example to example mixes them, and a device sees only its own. "
    'Use `strategy="jit"`.',
    "branch": "Each device would take the branch of its own examples. Make the condition one of "
    'the whole batch, with `nnx_dp.pmean` or `nnx_dp.pmax`, or use `strategy="jit"`.',
    "loop": "Each device would run until its own examples say so, and count other rounds. Make the "
    "condition one of the whole batch, with `nnx_dp.pmean` or `nnx_dp.pmax`, or use "
    '`strategy="jit"`.',
    "check": "The error that `nnx.checkify` returns is another on each device. Make the condition "
    "one of the whole batch, as the next row does.",
    "devices": "The body runs on one device's examples already, and has no other devices to share "
    'them with. Call the function itself, or use `strategy="jit"`.',
    "draws": "Each device draws its own random numbers, so what is computed from them is not what "
    "one device computes. No two devices draw the same, and the streams that are left are those of "
    "one device. See [state](state.md).",
    "reseed": "`nnx.reseed` draws the new key, and each device draws its own. Reseed outside the "
    'step, or write `rngs="broadcast"`.',
    "rows-kept": "State is the same on every device, and rows are not. Return them as an output, "
    'gather them with `nnx_dp.all_gather`, or use `strategy="jit"`.',
    "shared-mask": "All examples share one mask, and each device would draw its own. Write "
    '`rngs="broadcast"` or `rngs="dropout"`, which draws one for all devices; or give each example '
    "its own mask (`broadcast_dropout=False`, no 0 in `broadcast_dims`).",
    "cache": "The cache has a row for each example of the batch, and is the same on every device, "
    'where the step sees one device\'s examples. Use `strategy="jit"`.',
    "rope": "Not in Flax 0.12.8; in 0.12.12.",
}


# -------------------------------------------------------------------------------------------------
# The runs


def make_state(case: Case) -> tuple[nnx.Module, nnx.Optimizer]:
    model = case.make()
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def step_of(case: Case) -> Callable[..., Any]:
    return case.step or train(case.forward or apply)


@functools.cache
def compiled(name: str) -> Callable[..., Any]:
    return nnx.jit(step_of(CASES[name]))


def batches_of(case: Case, twins: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Makes two batches; with `twins`, of so many equal parts."""
    for seed in (0, 1):
        x, y = (case.batch or vectors)(seed), scaled(100 + seed, 1)
        yield tuple(np.concatenate([rows[: ROWS // twins]] * twins) for rows in (x, y))


class Trace(NamedTuple):
    """What a run left: after each step the arrays, and at the end the structure and the state."""

    steps: list[dict[str, np.ndarray]]
    structure: nnx.GraphDef
    state: tuple[Any, ...]


def run(case: Case, step: Callable[..., Any], twins: int = 1) -> Trace:
    state = make_state(case)
    steps = []
    for batch in batches_of(case, twins):
        out = step(*state, *batch)
        steps.append(snapshot({"state": state, "out": out}))
    return Trace(steps, nnx.graphdef(state, graph=True), state)


@functools.cache
def oracle(name: str, twins: int = 1) -> Trace:
    return run(CASES[name], compiled(name), twins)


def decorated(case: Case, strategy: str, devices: int) -> nnx_dp.DataParallel:
    return nnx_dp.data_parallel(step_of(case), strategy=strategy, devices=devices)


def check_equal(case: Case, strategy: str, devices: int) -> None:
    actual, expected = run(case, decorated(case, strategy, devices)), oracle(case.name)
    for step, expected_step in zip(actual.steps, expected.steps, strict=True):
        assert_same(step, expected_step, **TOLERANCE)
    assert actual.structure == expected.structure


def check_differs(case: Case, strategy: str, devices: int) -> None:
    """Every device sees the same examples, so that nothing else differs."""
    actual = run(case, decorated(case, strategy, devices), twins=devices)
    expected = oracle(case.name, twins=devices)
    for step, expected_step in zip(actual.steps, expected.steps, strict=True):
        assert {path: (v.shape, v.dtype) for path, v in step.items()} == {
            path: (v.shape, v.dtype) for path, v in expected_step.items()
        }
        assert all(np.isfinite(value).all() for value in step.values())
        out = step["['out']['out']"]
        assert not np.allclose(out, expected_step["['out']['out']"], **TOLERANCE)
        parts = [part.tobytes() for part in np.split(out, devices)]
        assert len(set(parts)) == devices, "two devices drew the same"
    streams, expected_streams = (
        nnx.state(trace.state[0], nnx.RngState) for trace in (actual, expected)
    )
    assert jax.tree.leaves(streams)
    assert_same(streams, expected_streams, rtol=0, atol=0)
    assert actual.structure == expected.structure
    nnx_dp.assert_replicated(actual.state)


def check_refused(case: Case, strategy: str, devices: int, refusal: Refused) -> None:
    """The error is one of nnx_dp, or has its note, and leaves the state as it was."""
    oracle(case.name)
    state = make_state(case)
    batch = next(batches_of(case))
    with refused(refusal.error, refusal.match, *state) as caught:
        decorated(case, strategy, devices)(*state, *batch)
    raised_in = Path(caught.traceback[-1].path)
    notes = getattr(caught.value, "__notes__", [])
    package = Path(nnx_dp.__file__).parent
    assert package in raised_in.parents or any(note.startswith("nnx_dp:") for note in notes)


def result(case: Case, strategy: str) -> str:
    """Runs a case under a strategy, and says what its cell of the table holds.

    Raises:
      AssertionError: if the run is neither equal nor what the case says.
    """
    found = case.per_device if strategy in PER_DEVICE else None
    for devices in case.devices:
        if isinstance(found, Refused):
            check_refused(case, strategy, devices, found)
        elif isinstance(found, Differs):
            check_differs(case, strategy, devices)
        else:
            check_equal(case, strategy, devices)
    if found is None:
        return "equal"
    word = "error" if isinstance(found, Refused) else "differs by design"
    return f"{word}[^{found.footnote}]"


# -------------------------------------------------------------------------------------------------
# The page

Cells = dict[str, list[str]]


def missing(case: Case) -> list[str]:
    """What the installed Flax has not got."""
    return [name for name in case.covers if not hasattr(nnx, name)]


def title(case: Case) -> str:
    return case.name if case.since is None else f"{case.name}[^{case.since}]"


def table(cells: Cells | None = None) -> str:
    """Renders the tables, from the runs of every case or from the cells that are given.

    A row that the installed Flax cannot run stays as it is on the page.
    """
    if cells is None:
        cells = cells_of_page()
        for case in CASES.values():
            if not missing(case):
                cells[case.name] = [result(case, strategy) for strategy in STRATEGIES]
    lines = []
    for heading, cases in TABLES.items():
        lines += [f"## {heading}", "", "| |" + "".join(f' `"{s}"` |' for s in STRATEGIES)]
        lines += ["|---" * (1 + len(STRATEGIES)) + "|"]
        lines += [" | ".join(["| " + title(case), *cells[case.name]]) + " |" for case in cases]
        lines += [""]
    used = dict.fromkeys(re.findall(r"\[\^([\w-]+)\]", "\n".join(lines)))
    for label in used:
        lines += [f"[^{label}]: {FOOTNOTES[label]}", ""]
    return "\n".join(lines)


def part_of_page() -> str:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def cells_of_page() -> Cells:
    rows = [line.strip("| ").split(" | ") for line in part_of_page().splitlines()]
    return {re.sub(r"\[\^[\w-]+\]$", "", name): cells for name, *cells in rows if cells}


def write() -> None:
    before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{after}")


# Of Flax 0.12.12's own `nnx.RoPE`.
@pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_row(name):
    case = CASES[name]
    if missing(case):
        pytest.skip(f"flax {flax.__version__} has no {', '.join(missing(case))}")
    # shard_map and pmap share a body: here one runs for both, in turns; with --write, each does.
    one_of_them = PER_DEVICE[[*CASES].index(name) % 2]
    jit, per_device = result(case, "jit"), result(case, one_of_them)
    found = [jit, per_device, per_device]
    assert found == cells_of_page().get(name), f"{PAGE.name} says something else"


def test_the_page_has_these_rows_and_footnotes():
    assert part_of_page().strip() == table(cells_of_page()).strip()


def transforms_and_layers() -> Iterator[str]:
    """The public names of the installed Flax that should have a row."""
    functions = ("flax.nnx.rnglib", "flax.nnx.nn.attention", "flax.linen.pooling")
    abstract = (nnx.Module, nnx.RNNCellBase)
    for name, value in vars(nnx).items():
        module = getattr(value, "__module__", None) or ""
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value) and issubclass(value, nnx.Module):
            if value not in abstract:
                yield name
        elif module.startswith("flax.nnx.transforms"):
            yield name
        elif inspect.isfunction(value) and (module in functions or name == "cached_partial"):
            yield name


def test_every_transform_and_layer_has_a_row():
    covered = {name for case in CASES.values() for name in case.covers}
    new = sorted(set(transforms_and_layers()) - covered)
    assert not new, (
        f"flax {flax.__version__} has {new}: add a case for each to TABLES in "
        f"{Path(__file__).name}, and write docs/{PAGE.name} again with --write"
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
