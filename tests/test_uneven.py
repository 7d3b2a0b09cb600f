"""Batches that the devices do not divide."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import (
    PER_DEVICE,
    STRATEGIES,
    assert_same,
    check_against_one_device,
    linear,
    refused,
    regression,
    train_step,
)

import nnx_dp


@pytest.mark.parametrize("rows", [1, 3, 7, 9, 11])
@pytest.mark.parametrize("devices", [2, 8])
def test_jit_is_exact_for_any_size(devices, rows):
    def step(model, optimizer, x, y):
        return train_step(model, optimizer, x, y), model(x)

    batches = [regression(rows, seed=0), regression(rows, seed=1)]
    check_against_one_device(step, linear, batches, strategy="jit", devices=devices)


def test_jit_stays_parallel(optimised):
    """Each device does about its share of the work, and the gradient crosses once."""
    x = np.ones((11, 64), np.float32)
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def step(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    flops = {
        devices: nnx_dp.data_parallel(step, strategy="jit", devices=devices)
        .lower(model, x)
        .compile()
        .cost_analysis()["flops"]
        for devices in (1, 8)
    }
    assert flops[8] < 0.3 * flops[1]


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("uneven", ["auto", "error"])
def test_per_device_strategies_refuse(uneven, strategy):
    state = linear()
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, uneven=uneven)
    with refused(ValueError, r"x has 7 examples on axis 0, which 4 devices do not", *state):
        step(*state, *regression(7))


def test_jit_refuses_where_asked_to():
    state = linear()
    step = nnx_dp.data_parallel(train_step, strategy="jit", devices=4, uneven="error")
    with refused(ValueError, "A batch of 4 or 8 examples", *state):
        step(*state, *regression(7))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicate_computes_all_of_it_everywhere(strategy):
    state, plain = linear(), linear()
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, uneven="replicate")
    with pytest.warns(UserWarning, match="7 examples, which 4 devices do not divide") as told:
        loss = step(*state, *regression(7))
    assert told[0].filename == __file__
    assert_same(loss, train_step(*plain, *regression(7)))
    loss = step(*state, *regression(7))
    assert_same(loss, train_step(*plain, *regression(7)))
    assert_same(state, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drop_leaves_the_remainder_out(strategy):
    state, plain = linear(), linear()
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, uneven="drop")
    x, y = regression(7)
    with pytest.warns(UserWarning, match="leaves the last 3 out"):
        loss = step(*state, x, y)
    assert_same(loss, train_step(*plain, x[:4], y[:4]))
    with refused(ValueError, "x has 3 examples", *state):
        step(*state, x[:3], y[:3])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_pad_is_cut_out_again(rows, strategy):
    model, _ = linear()
    x, _ = regression(rows)
    step = nnx_dp.data_parallel(
        lambda model, x: {"rows": model(x), "columns": model(x).T, "flag": model.bias[...]},
        strategy=strategy,
        devices=4,
        uneven="pad",
    )
    expected = {"rows": model(x), "columns": model(x).T, "flag": model.bias[...]}
    assert_same(step(model, x), expected)
    assert_same(step(model, jnp.asarray(x)), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "step",
    [
        lambda bn, x: bn(x).mean(),
        lambda bn, x: bn(x),
        lambda bn, x: nnx_dp.mean(x),
        lambda bn, x: nnx_dp.psum(x.shape[0]),
    ],
    ids=["mean", "batch statistics", "nnx_dp.mean", "count"],
)
def test_pad_refuses_what_padding_would_change(step, strategy):
    bn = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x, _ = regression(7)
    padded = nnx_dp.data_parallel(step, strategy=strategy, devices=4, uneven="pad")
    with refused(ValueError, "padding would change", bn):
        padded(bn, x)
