"""Gradient accumulation: against the gradient of the whole batch, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import (
    PER_DEVICE,
    assert_same,
    check_against_one_device,
    refused,
    regression,
)

import nnx_dp

EVERYWHERE = [("jit", 1), ("auto", 8), ("shard_map", 3), ("pmap", 2)]
every_strategy = pytest.mark.parametrize(("strategy", "devices"), EVERYWHERE)


def mlp(seed=0):
    rngs = nnx.Rngs(seed)
    model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 1, rngs=rngs))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def mean_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def sum_loss(model, x, y):
    return jnp.sum((model(x) - y) ** 2)


def masked_loss(model, x, y, mask):
    losses = jnp.mean((model(x) - y) ** 2, axis=-1)
    return nnx_dp.mean(losses, where=mask) + 0.01 * jnp.sum(model.layers[0].kernel[...] ** 2)


def accumulating(loss_fn, microbatches, **options):
    def step(model, optimizer, *batch):
        value_and_grad = nnx_dp.accumulate(loss_fn, microbatches, **options)
        loss, grads = value_and_grad(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


def whole(loss_fn):
    def step(model, optimizer, *batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


BATCHES = [regression(48, seed) for seed in range(3)]


@every_strategy
@pytest.mark.parametrize("microbatches", [2])
def test_mean_loss(strategy, devices, microbatches):
    check_against_one_device(
        accumulating(mean_loss, microbatches),
        mlp,
        BATCHES,
        plain=whole(mean_loss),
        strategy=strategy,
        devices=devices,
    )


@every_strategy
def test_sum_loss(strategy, devices):
    check_against_one_device(
        accumulating(sum_loss, 2, loss_reduce="sum"),
        lambda: (mlp()[0], nnx.Optimizer(mlp()[0], optax.sgd(1e-4), wrt=nnx.Param)),
        BATCHES,
        plain=whole(sum_loss),
        strategy=strategy,
        devices=devices,
        rtol=1e-4,
    )


@every_strategy
def test_microbatches_with_different_numbers_of_valid_items(strategy, devices):
    batches = []
    for seed, (x, y) in enumerate(BATCHES):
        mask = np.random.default_rng(seed).random(48) < 0.4
        mask[: 48 // devices] = False  # one device has nothing that counts
        batches.append((x, y, mask))
    check_against_one_device(
        accumulating(masked_loss, 2),
        mlp,
        batches,
        plain=whole(masked_loss),
        strategy=strategy,
        devices=devices,
    )


def test_outside_a_decorated_step():
    for microbatches in (1, 3, 48):
        (model, _), (plain, _) = mlp(), mlp()
        actual = nnx_dp.accumulate(mean_loss, microbatches)(model, *BATCHES[0])
        expected = nnx.value_and_grad(mean_loss)(plain, *BATCHES[0])
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert_same(actual, expected)


@every_strategy
def test_aux(strategy, devices):
    ways = {"rows": "concatenate", "mean": "mean", "sum": "sum", "max": "max", "min": "min"}

    def loss_fn(model, x, y):
        out = model(x)
        aux = {
            "rows": out,
            "mean": out.mean(),
            "sum": out.sum(0),
            "max": out.max(),
            "min": x.min(0),
        }
        return jnp.mean((out - y) ** 2), aux

    def step(model, optimizer, *batch):
        differentiate = nnx_dp.accumulate(loss_fn, 2, has_aux=True, aux_reduce=ways)
        (loss, aux), grads = differentiate(model, *batch)
        optimizer.update(model, grads)
        return loss, aux

    def plain(model, optimizer, *batch):
        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, *batch)
        optimizer.update(model, grads)
        return loss, aux

    check_against_one_device(
        step, mlp, BATCHES, plain=plain, strategy=strategy, devices=devices, rtol=1e-4
    )


@pytest.mark.parametrize("strategy", ["jit", "pmap"])
def test_aux_is_stacked_where_nothing_is_said(strategy):
    def step(model, x, y):
        (_, aux), _ = nnx_dp.accumulate(
            lambda m, x, y: (mean_loss(m, x, y), (x, jnp.mean(y))), 4, has_aux=True
        )(model, x, y)
        return aux

    _, _, (x, mean) = check_against_one_device(
        step, lambda: mlp()[:1], BATCHES, strategy=strategy, devices=2
    )
    assert x.shape == (4, 12, 3)
    assert mean.shape == (4,)
    np.testing.assert_array_equal(x[1], BATCHES[-1][0][1::4])


class Noisy(nnx.Module):
    """Everything that a microbatch leaves behind: statistics, counts of random streams, metrics."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.noise = nnx.Rngs(noise=1)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.metric = nnx.metrics.Average()

    def __call__(self, x):
        return self.out(self.dropout(self.bn(self.linear(x))))


def noisy_state():
    model = Noisy()
    return model, nnx.Optimizer(model, optax.sgd(1e-1), wrt=nnx.Param)


def noisy_loss(model, x, y):
    losses = (model(x) - y) ** 2
    model.noise.noise()
    model.metric.update(values=losses)
    return jnp.mean(losses)


@pytest.mark.parametrize(("strategy", "devices"), EVERYWHERE[1:])
def test_state_goes_from_microbatch_to_microbatch(strategy, devices):
    def one_after_the_other(model, optimizer, x, y):
        total = None
        for i in range(2):
            out = nnx.value_and_grad(noisy_loss)(model, x[i::2], y[i::2])
            total = out if total is None else jax.tree.map(jnp.add, total, out)
        loss, grads = jax.tree.map(lambda leaf: leaf / 2, total)
        optimizer.update(model, grads)
        return loss

    check_against_one_device(
        accumulating(noisy_loss, 2),
        noisy_state,
        BATCHES,
        plain=one_after_the_other,
        strategy=strategy,
        devices=devices,
        rtol=1e-4,
        atol=1e-5,
    )


def test_random_numbers_under_jit_are_those_of_one_device():
    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def make_state():
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Dropout(0.5, rngs=rngs), nnx.Linear(3, 1, rngs=rngs))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    step = accumulating(loss_fn, 2)
    check_against_one_device(step, make_state, BATCHES, strategy="jit", devices=4)


@every_strategy
def test_arrays_as_parameters(strategy, devices):
    def step(holder, x, y):
        loss_fn = lambda w, x, y: jnp.mean((x @ w - y) ** 2)  # noqa: E731
        loss, grad = nnx_dp.accumulate(loss_fn, 2)(holder[0][...], x, y)
        holder[0][...] -= 0.1 * grad
        return loss

    make_state = lambda: (nnx.List([nnx.Param(jnp.ones((3, 1)))]),)  # noqa: E731
    check_against_one_device(step, make_state, BATCHES, strategy=strategy, devices=devices)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_loss_that_is_no_mean_is_refused(strategy):
    def loss_fn(model, x, y):
        return jnp.sqrt(jnp.mean((model(x) - y) ** 2))

    step = nnx_dp.data_parallel(accumulating(loss_fn, 2), strategy=strategy, devices=4)
    state = mlp()
    with refused(ValueError, "neither a plain mean nor a plain sum", *state):
        step(*state, *BATCHES[0])


def test_loss_that_is_no_mean_is_the_same_under_jit():
    def loss_fn(model, x, y):
        return jnp.sqrt(jnp.mean((model(x) - y) ** 2))

    check_against_one_device(accumulating(loss_fn, 2), mlp, BATCHES, strategy="jit", devices=4)


def test_arguments_that_are_refused():
    model, x, y = mlp()[0], *BATCHES[0]
    with pytest.raises(ValueError, match="microbatches is 0; write a positive int"):
        nnx_dp.accumulate(mean_loss, 0)
    with pytest.raises(ValueError, match="loss_reduce is 'max'"):
        nnx_dp.accumulate(mean_loss, 2, loss_reduce="max")
    with pytest.raises(ValueError, match="aux_reduce has 'median'"):
        nnx_dp.accumulate(mean_loss, 2, has_aux=True, aux_reduce=("mean", "median"))
    with refused(ValueError, "cannot cut the batch evenly: x has 48, y has 48", model):
        nnx_dp.accumulate(mean_loss, 5)(model, x, y)
    with refused(ValueError, "x has 48, y has 24", model):
        nnx_dp.accumulate(mean_loss, 2)(model, x, y[:24])
    with refused(ValueError, "found no batch among the arguments", model):
        nnx_dp.accumulate(lambda m: jnp.mean(m(x)), 2)(model)
    with refused(ValueError, "is a scalar in each microbatch", model):
        nnx_dp.accumulate(
            lambda m, x: (jnp.mean(m(x)), 1.0), 2, has_aux=True, aux_reduce="concatenate"
        )(model, x)

    def grows(model, x):
        model.extra = nnx.Param(jnp.ones(2))
        return jnp.mean(model(x))

    with refused(ValueError, "changes the structure of its NNX objects", model):
        nnx_dp.accumulate(grows, 2)(model, x)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_microbatches_of_one_example_on_each_device(strategy):
    check_against_one_device(
        accumulating(mean_loss, 2),
        mlp,
        [regression(8, seed) for seed in range(2)],
        strategy=strategy,
        devices=4,
        plain=whole(mean_loss),
    )
