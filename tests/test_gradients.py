"""Gradients are synchronised once, wherever and however a step takes them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import (
    PER_DEVICE,
    STRATEGIES,
    assert_same,
    check_against_one_device,
    in_turns,
    linear,
    refused,
    regression,
    train_step,
)

import nnx_dp


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def batch():
    random = np.random.default_rng(0)
    scale = np.arange(1, 25, dtype=np.float32)[:, None] / 12
    x = random.standard_normal((24, 3)).astype(np.float32) * scale
    return x, random.standard_normal((24, 2)).astype(np.float32)


def mse(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def sgd(model, grads, filter=nnx.Param):
    # A plain gradient step: Adam would hide a gradient that is N times too large.
    params = nnx.state(model, filter)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


STEPS = {}


def step(function):
    STEPS[function.__name__] = function
    return function


built_at_import = nnx.value_and_grad(mse)


@step
def built_at_module_level(model, x, y):
    loss, grads = built_at_import(model, x, y)
    sgd(model, grads)
    return loss


@step
def tree_mode(model, x, y):
    loss, grads = nnx.value_and_grad(mse, graph=False)(model, x, y)
    sgd(model, nnx.state(grads, nnx.Param))
    return loss


@step
def graph_without_updates(model, x, y):
    loss, grads = nnx.value_and_grad(mse, graph_updates=False)(model, x, y)
    sgd(model, nnx.state(grads, nnx.Param))
    return loss


@step
def has_aux(model, x, y):
    def loss_fn(model):
        out = model(x)
        return jnp.mean((out - y) ** 2), {"out": out, "largest": out.max()}

    grads, aux = nnx.grad(loss_fn, has_aux=True)(model)
    sgd(model, grads)
    return aux


@step
def sum_loss(model, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.sum((model(x) - y) ** 2))(model)
    sgd(model, jax.tree.map(lambda g: g / 50, grads))
    return loss


@step
def several_argnums_mean(model, x, y):
    grads, x_grads = nnx.grad(mse, argnums=(0, 1))(model, x, y)
    sgd(model, grads)
    return x_grads


@step
def input_gradient_of_a_sum(model, x, y):
    return nnx.grad(lambda x: jnp.sum((model(x) - y) ** 2))(x)


@step
def adversarial_example(model, x, y):
    x_grads = nnx.grad(lambda x: mse(model, x, y))(x)
    loss, grads = built_at_import(model, x + 0.1 * jnp.sign(x_grads), y)
    sgd(model, grads)
    return loss


@step
def gradient_norm_penalty(model, x, y):
    def loss_fn(model):
        inner = nnx.grad(mse)(model, x, y)
        return mse(model, x, y) + 0.1 * optax.tree.norm(inner) ** 2

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def input_gradient_penalty(model, x, y):
    def loss_fn(model):
        x_grads = nnx.grad(lambda x: model(x).sum())(x)
        return mse(model, x, y) + 0.1 * jnp.mean(jnp.sum(x_grads**2, -1))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def maml(model, x, y):
    def loss_fn(model):
        inner = nnx.grad(mse)(model, x, y)
        graphdef, params = nnx.split(model)
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
        return mse(nnx.merge(graphdef, adapted), x, y)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


def squared_error(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


@step
def fisher_diagonal(model, x, y):
    per_example = nnx.vmap(nnx.grad(squared_error), in_axes=(None, 0, 0))(model, x, y)
    fisher = jax.tree.map(lambda g: nnx_dp.pmean(jnp.mean(g**2, 0)), per_example)
    sgd(model, fisher)
    return mse(model, x, y)


@step
def per_example_gradients(model, x, y):
    return nnx.vmap(nnx.grad(squared_error), in_axes=(None, 0, 0))(model, x, y)


@step
def under_remat(model, x, y):
    def loss_fn(model):
        out = nnx.remat(lambda model, x: model(x))(model, x)
        return jnp.mean((out - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def inside_cond(model, x, y):
    def train(model):
        sgd(model, nnx.grad(mse)(model, x, y))

    nnx.cond(jnp.array(True), train, lambda model: None, model)
    return mse(model, x, y)


@step
def inside_scan(model, x, y):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def inner_loop(model, _):
        loss, grads = built_at_import(model, x, y)
        sgd(model, grads)
        return model, loss

    _, losses = inner_loop(model, jnp.arange(3))
    return losses


@step
def inside_fori_loop(model, x, y):
    def body(_, model):
        sgd(model, nnx.grad(mse)(model, x, y))
        return model

    nnx.fori_loop(0, 3, body, model)
    return mse(model, x, y)


@nnx.jit
def jitted_update(model, x, y):
    loss, grads = built_at_import(model, x, y)
    sgd(model, grads)
    return loss


@step
def inside_jit(model, x, y):
    return jitted_update(model, x, y) + jitted_update(model, x, y)


@step
def vjp_of_a_loss(model, x, y):
    loss, pullback = nnx.vjp(lambda model, x: mse(model, x, y), model, x, graph=False)
    grads, x_grads = pullback(jnp.ones(()))
    sgd(model, nnx.state(grads, nnx.Param))
    return loss, x_grads


@step
def vjp_with_a_cotangent_for_each_example(model, x, y):
    out, pullback = nnx.vjp(lambda model: model(x), model, graph=False)
    (grads,) = pullback(2 * (out - y) / y.size)
    sgd(model, nnx.state(grads, nnx.Param))
    return out


@step
def explicit_over_split_state(model, x, y):
    graphdef, params = nnx.split(model)
    loss, grads = nnx_dp.value_and_grad(lambda p: mse(nnx.merge(graphdef, p), x, y))(params)
    sgd(model, grads)
    return loss


@step
def explicit_over_a_plain_pytree(model, x, y):
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def loss_fn(params, x):
        hidden = jnp.tanh(x @ params["first"]["kernel"])
        return jnp.mean((hidden @ params["second"]["kernel"] - y) ** 2), hidden

    (loss, hidden), grads = nnx_dp.value_and_grad(loss_fn, has_aux=True)(params, x)
    return loss, hidden, grads, nnx_dp.grad(lambda p: loss_fn(p, x)[0])(params)


@step
def clipped_before_the_update(model, x, y):
    loss, grads = built_at_import(model, x, y)
    norm = optax.tree.norm(grads)
    sgd(model, jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads))
    return loss, norm


@step
def hessian_vector_product(model, x, y):
    graphdef, params = nnx.split(model)
    gradient = nnx_dp.grad(lambda p: mse(nnx.merge(graphdef, p), x, y))
    _, product = jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),))
    sgd(model, product)
    return mse(model, x, y)


@step
def loss_averaged_already(model, x, y):
    loss, grads = nnx.value_and_grad(lambda model: nnx_dp.pmean(mse(model, x, y)))(model)
    sgd(model, grads)
    return loss


@step
def loss_summed_already(model, x, y):
    def loss_fn(model):
        return nnx_dp.psum(jnp.sum((model(x) - y) ** 2)) / 50

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def masked_mean(model, x, y):
    def loss_fn(model):
        # The first devices have no valid example at all.
        valid = jnp.abs(x[:, 0]) > 1.0
        return nnx_dp.mean(jnp.mean((model(x) - y) ** 2, -1), where=valid)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def worst_example(model, x, y):
    def loss_fn(model):
        return nnx_dp.pmax(jnp.max((model(x) - y) ** 2))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def gathered_contrastive(model, x, y):
    def loss_fn(model):
        rows, keys = model(x), nnx_dp.all_gather(model(x))
        return nnx_dp.pmean(jnp.mean(jax.nn.logsumexp(rows @ keys.T, axis=1)))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def negative_log_likelihood(model, x, y):
    labels = (y[:, 0] > 0).astype(jnp.int32)

    def loss_fn(model):
        return -jax.nn.log_softmax(model(x))[jnp.arange(x.shape[0]), labels].mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


@step
def diff_state(model, x, y):
    first = nnx.PathContains("first")
    grads = nnx.grad(mse, argnums=nnx.DiffState(0, first))(model, x, y)
    sgd(model, grads, first)
    return mse(model, x, y)


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@step
def through_a_custom_vjp(model, x, y):
    def loss_fn(model):
        hidden = matmul(x, model.first.kernel[...])
        return jnp.mean((model.second(hidden) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    sgd(model, grads)
    return loss


def check(step, strategy, *, devices=3, make=lambda: Net(nnx.Rngs(0))):
    check_against_one_device(
        step,
        lambda: (make(),),
        [batch(), batch()],
        strategy=strategy,
        devices=devices,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("name", "strategy"), in_turns(STEPS))
def test_gradient_is_that_of_one_device(name, strategy):
    check(STEPS[name], strategy)


@pytest.mark.parametrize(("devices", "strategy"), in_turns([2, 8]))
def test_number_of_devices_does_not_scale_the_gradient(devices, strategy):
    for name in ("sum_loss", "several_argnums_mean", "gradient_norm_penalty"):
        check(STEPS[name], strategy, devices=devices)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ensemble_gradient_is_synchronised(strategy):
    """State that a vmap of the step batches is no gradient per example."""

    @nnx.vmap
    def make(key):
        return Net(nnx.Rngs(key))

    def ensemble_step(models, x, y):
        losses, grads = nnx.vmap(built_at_import, in_axes=(0, None, None))(models, x, y)
        sgd(models, grads)
        return losses

    check(ensemble_step, strategy, make=lambda: make(jax.random.split(jax.random.key(0), 4)))


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("where", ["decorator", "function"])
def test_loss_reduce_says_what_cannot_be_seen(strategy, where):
    """The square of a root mean square: a mean that no rule sees through."""

    def loss_fn(model, x, y):
        return jnp.exp(jnp.log(mse(model, x, y)))

    def train_step(model, x, y):
        take = functools.partial(nnx_dp.value_and_grad, loss_reduce=reduce_here)
        _, grads = take(loss_fn)(model, x, y)
        sgd(model, grads)
        return mse(model, x, y)

    reduce_here = "mean" if where == "function" else "infer"
    options = {"loss_reduce": "mean"} if where == "decorator" else {}
    model, one = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    undeclared = nnx_dp.data_parallel(
        lambda model, x, y: nnx.grad(loss_fn)(model, x, y), strategy=strategy, devices=3
    )
    with pytest.raises(ValueError, match="neither a plain mean nor a plain sum"):
        undeclared(model, *batch())
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=3, **options)
    x, y = batch()
    dp_step(model, x, y)
    sums = [nnx.grad(mse)(one, x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    sgd(one, jax.tree.map(lambda *g: sum(g) / 3, *sums))
    for got, want in zip(jax.tree.leaves(model), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_hook_is_off_again_after_an_error_in_a_trace():
    def broken(model, x, y):
        nnx.grad(mse)(model, x, y)
        raise KeyError("user's own")

    model = Net(nnx.Rngs(0))
    with pytest.raises(KeyError, match="user's own"):
        nnx_dp.data_parallel(broken, strategy="shard_map", devices=2)(model, *batch())
    graphdef, params = nnx.split(model)
    gradient = lambda p, x, y: nnx.grad(mse)(nnx.merge(graphdef, p), x, y)  # noqa: E731
    jaxpr = str(jax.make_jaxpr(gradient)(params, *batch()))
    assert "grad_sync" not in jaxpr
    assert "psum" not in jaxpr


def test_unknown_loss_reduce_is_refused():
    with pytest.raises(ValueError, match="loss_reduce is 'average'; write \"infer\""):
        nnx_dp.grad(mse, loss_reduce="average")


@pytest.mark.parametrize("strategy", ["shard_map", "pmap", "auto"])
def test_gradients_that_cross_in_a_narrower_dtype(strategy):
    narrow = nnx_dp.data_parallel(
        train_step, strategy=strategy, devices=4, grad_dtype=jnp.bfloat16, verify=True
    )
    ours, plain = linear(), linear()
    for seed in range(3):
        batch = regression(seed=seed)
        # The loss is computed, and reduced, in its own dtype.
        assert_same(narrow(*ours, *batch), train_step(*plain, *batch), rtol=1e-2)
        assert_same(ours, plain, rtol=1e-2, atol=1e-3)
        assert ours[0].kernel[...].dtype == jnp.float32
    exact = nnx_dp.data_parallel(train_step, strategy="shard_map", devices=4)
    other = linear()
    exact(*other, *regression())
    narrow(*(again := linear()), *regression())
    assert np.any(np.asarray(again[0].kernel) != np.asarray(other[0].kernel))
    assert narrow.strategy == ("shard_map" if strategy == "auto" else strategy)


def test_narrow_gradients_halve_the_bytes_that_cross():
    def crossing(**options):
        dp_step = nnx_dp.data_parallel(train_step, strategy="shard_map", devices=4, **options)
        text = dp_step.lower(*linear(), *regression()).as_text()
        blocks = re.findall(r'"stablehlo.all_reduce".*?\) : \((.*?)\) ->', text, re.DOTALL)
        shapes = [re.findall(r"tensor<(?:(\d+)x)*(\w+)>", block)[0] for block in blocks]
        return sorted(dtype for *_, dtype in shapes)

    assert crossing() == ["f32"] * 3  # the loss, the kernel and the bias
    assert crossing(grad_dtype=jnp.bfloat16) == ["bf16", "bf16", "f32"]


def test_narrow_gradients_leave_narrow_and_complex_ones_alone():
    def step(half, whole, x):
        loss_fn = lambda h, w: jnp.mean((x @ (h[...].astype(jnp.float32) + w[...].real)) ** 2)  # noqa: E731
        grads = nnx.grad(loss_fn, argnums=(0, 1))(half, whole)
        return jax.tree.map(lambda leaf: leaf + 0, jax.tree.leaves(grads))

    state = (nnx.Param(jnp.ones((3, 1), jnp.float16)), nnx.Param(jnp.ones((3, 1), jnp.complex64)))
    dp_step = nnx_dp.data_parallel(step, strategy="shard_map", devices=4, grad_dtype=jnp.float16)
    for _ in range(2):
        assert_same(dp_step(*state, regression()[0]), step(*state, regression()[0]), rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"grad_dtype": jnp.int8}, "grad_dtype is .*int8.*; write a floating-point dtype"),
        ({"grad_dtype": jnp.bfloat16, "strategy": "jit"}, 'cannot be used with strategy="jit"'),
    ],
)
def test_grad_dtype_that_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        nnx_dp.data_parallel(train_step, **options)


def zeros_like_rows(loss):
    def step(x):
        gradient = nnx.grad(lambda delta: loss((x + delta) ** 2))(jnp.zeros_like(x))
        return gradient, gradient.max(), jnp.mean((x + 0.1 * jnp.sign(gradient)) ** 2)

    return step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", [jnp.mean, jnp.sum])
def test_gradient_with_respect_to_a_row_for_each_example_made_in_the_step(loss, strategy):
    step, (x, _) = zeros_like_rows(loss), regression()
    expected = step(x)
    actual = nnx_dp.data_parallel(step, strategy=strategy, devices=4)(x)
    assert_same(actual, expected)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_one_example_of_a_gradient_over_the_batch_is_refused(strategy):
    def step(x):
        return nnx.grad(lambda delta: jnp.mean((x + delta) ** 2))(jnp.zeros_like(x))[0]

    with pytest.raises(ValueError, match="depends on the batch"):
        nnx_dp.data_parallel(step, strategy=strategy, devices=2)(regression()[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_are_trained_in_a_loop_in_the_step(strategy):
    def step(x):
        def descend(delta, _):
            gradient = nnx_dp.grad(lambda delta: jnp.sum((x + delta) ** 2))(delta)
            return delta - 0.1 * gradient, None

        return jax.lax.scan(descend, jnp.zeros_like(x), None, length=3)[0]

    x, _ = regression()
    assert_same(nnx_dp.data_parallel(step, strategy=strategy, devices=4)(x), step(x))


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_rows_made_in_a_step_without_a_global_trace_are_refused(strategy):
    def step(x):
        assert x.shape[0] == 2, "one device's batch"
        return nnx.grad(lambda delta: jnp.mean((x + delta) ** 2))(jnp.zeros_like(x))

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, out_axes=0)
    with pytest.raises(ValueError, match=r"an array of shape \(2, 3\) on each of 4 devices"):
        dp_step(regression()[0])


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_gradient_for_each_example_without_a_global_trace(strategy):
    def for_each(kernel, x):
        of_one = nnx_dp.grad(lambda kernel, row: jnp.sum(row @ kernel) ** 2, loss_reduce="sum")
        return jax.vmap(of_one, in_axes=(None, 0))(kernel, x)

    def step(model, x):
        assert x.shape[0] == 2, "one device's batch"
        return for_each(model.kernel[...], x)

    model, (x, _) = linear()[0], regression()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, out_axes=0)
    assert_same(dp_step(model, x), for_each(model.kernel[...], x))


# --- Steps that an adversary made right on one device and wrong on many ---------------------------


@jax.custom_vjp
def clipped(x):
    """The identity, whose backward pass clips: it is not linear in the gradient."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@jax.custom_vjp
def scaled(x):
    """The identity, whose backward pass multiplies by the number of examples."""
    return x


scaled.defvjp(lambda x: (x, x.shape[0]), lambda count, g: (g * count,))


def hessian_of_sum(model, x, y):
    def gradient(w):
        return nnx_dp.grad(lambda w: jnp.sum(jnp.tanh(x @ w - y) ** 2))(w)

    w = model.kernel[...]
    return jax.jvp(gradient, (w,), (jnp.ones_like(w),))[1]


def pulled_back(function, cotangent):
    def step(model, x, y):
        out, backward = nnx.vjp(function(model, y), x, graph=False)
        return backward(cotangent(out, x))[0]

    return step


TRAPS = {
    "clip on activations": lambda m, x, y: nnx.grad(lambda m: jnp.mean((clipped(m(x)) - y) ** 2))(
        m
    ),
    "clip on parameters": lambda m, x, y: nnx_dp.grad(
        lambda w: jnp.mean((x @ clipped(w) - y) ** 2)
    )(m.kernel[...]),
    "equal losses of another scale": lambda m, x, y: nnx.grad(
        lambda m: nnx_dp.pmean(jnp.mean((m(x) - y) ** 2)) / np.sqrt(len(x))
    )(m),
    "penalty by the root of the size": lambda m, x, y: nnx.grad(
        lambda m: jnp.sqrt(x.shape[0] * jnp.sum(m.kernel[...] ** 2))
    )(m),
    "sum of means over the batch": lambda m, x, y: nnx.grad(
        lambda x: nnx_dp.psum(jnp.mean(m(x) ** 2))
    )(x),
    "backward pass that counts": lambda m, x, y: nnx.grad(lambda x: jnp.mean(scaled(m(x)) ** 2))(x),
    "Hessian of a sum": hessian_of_sum,
    "Hessian of a sum, by size": lambda m, x, y: hessian_of_sum(m, x, y) / len(x),
    "Hessian of a sum, in reverse": lambda m, x, y: nnx_dp.grad(
        lambda w: jnp.sum(nnx_dp.grad(lambda w: jnp.sum(jnp.tanh(x @ w - y) ** 2))(w)) / len(x)
    )(m.kernel[...]),
    "cotangents by size": pulled_back(lambda m, y: m, lambda out, x: out / x.shape[0]),
    "cotangents": pulled_back(lambda m, y: m, lambda out, x: out),
    "cotangent that counts": pulled_back(
        lambda m, y: lambda x: jnp.mean((m(x) - y) ** 2), lambda out, x: jnp.float32(len(x))
    ),
    "cotangent of one": pulled_back(
        lambda m, y: lambda x: jnp.mean((m(x) - y) ** 2), lambda out, x: jnp.ones_like(out)
    ),
    "cotangent of the loss": pulled_back(
        lambda m, y: lambda x: jnp.mean((m(x) - y) ** 2), lambda out, x: 1 / out
    ),
}


def right_or_refused(call, expected, *, accepted):
    try:
        actual = call()
    except ValueError:
        if accepted:
            raise
    else:
        assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected))


ACCEPTED = {"Hessian of a sum", "cotangents", "cotangents by size", "cotangent of one"}


@pytest.mark.parametrize(
    ("name", "strategy"), [(name, PER_DEVICE[i % 2]) for i, name in enumerate(TRAPS)]
)
def test_step_is_right_or_refused(name, strategy):
    step, (model, _), (x, y) = TRAPS[name], linear(), regression()
    expected = step(model, x, y)
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    right_or_refused(lambda: dp_step(model, x, y), expected, accepted=name in ACCEPTED)


def squeezed(model, x, y):
    return jnp.mean(model(x).squeeze().sum(axis=0))


def squeezed_rows(model, x, y):
    return model(x).squeeze().mean(axis=0)


def squeezed_output(model, x, y):
    return model(x).squeeze()


def other_loss_for_one(model, x, y):
    def loss_fn(model):
        losses = (model(x) - y) ** 2
        return losses.mean() if len(x) > 1 else losses.sum() * 3

    return nnx.value_and_grad(loss_fn)(model)[0]


def half_of_the_batch(model, x, y):
    return nnx.value_and_grad(lambda m: jnp.sum((m(x) - y) ** 2) / max(1, len(x) // 2))(model)[0]


def plain_mean(model, x, y):
    return nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)


def normalised(model, x, y):
    return jnp.mean(nnx.softmax(model(x) + jnp.ones((1, 5))) * (x.mean(axis=-1, keepdims=True) - y))


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    ("step", "accepted"),
    [
        (squeezed, False),
        (squeezed_rows, False),
        (squeezed_output, False),
        (other_loss_for_one, False),
        (half_of_the_batch, False),
        (plain_mean, True),
        (normalised, True),
    ],
)
def test_one_example_on_each_device_is_right_or_refused(step, accepted, strategy):
    model, (x, y) = nnx.Linear(3, 5, rngs=nnx.Rngs(0)), regression(4)
    expected = step(model, x, y)
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    right_or_refused(lambda: dp_step(model, x, y), expected, accepted=accepted)


@pytest.mark.parametrize("loss", [jnp.mean, jnp.sum])
def test_gradient_over_a_padded_batch(loss):
    def step(model, x):
        return nnx.grad(lambda x: loss(model(x) ** 2))(x)

    (model, _), x = linear(), regression(7)[0]
    dp_step = nnx_dp.data_parallel(step, strategy="shard_map", devices=4, uneven="pad")
    if loss is jnp.mean:
        with pytest.raises(ValueError, match='uneven="pad" cannot be used'):
            dp_step(model, x)
    else:
        assert_same(dp_step(model, x), step(model, x))


def test_padding_that_a_step_could_count():
    step = nnx_dp.data_parallel(
        lambda x: x * (len(x) % 2), strategy="shard_map", devices=4, uneven="pad"
    )
    with pytest.raises(ValueError, match="computes with the number of examples, which is 7 before"):
        step(regression(7)[0])


def test_backward_pass_that_is_not_linear_is_named():
    (model, _), (x, y) = linear(), regression()
    dp_step = nnx_dp.data_parallel(TRAPS["clip on activations"], strategy="shard_map", devices=4)
    with refused(ValueError, "its backward pass is not linear in the gradient", model):
        dp_step(model, x, y)
