"""Kernels that need per-device shapes: `per_device`, and what "auto" does about the others."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from oracle import PER_DEVICE, STRATEGIES, check_against_one_device, in_turns

import nnx_dp

ROWS, LENGTH, FEATURES = 8, 4, 8


def sequences(seed=0):
    x = np.random.default_rng(seed).standard_normal((ROWS, LENGTH, FEATURES)).astype(np.float32)
    return x * np.arange(1, ROWS + 1, dtype=np.float32)[:, None, None] / 4


def attention(query, key, value, bias=None, mask=None, **options):
    """An attention that insists on the shapes of a device's batch, when told to."""
    expected = options.pop("rows", None)
    assert expected is None or query.shape[0] == expected
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", nnx.softmax(scores), value)


def double_kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


@jax.custom_vjp
def double(x):
    return pl.pallas_call(
        double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


def train(apply):
    def step(layer, x):
        def loss_fn(layer):
            return jnp.mean(apply(layer, x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(layer)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return loss

    return step


def attention_layer(fn):
    def make():
        return (
            nnx.MultiHeadAttention(
                num_heads=2, in_features=FEATURES, decode=False, attention_fn=fn, rngs=nnx.Rngs(0)
            ),
        )

    return make


def masked(layer, x):
    return layer(x, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))


def masked_for_all(layer, x):
    return layer(x, mask=jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH), bool)))


def under_remat(layer, x):
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


def under_scan(layer, x):
    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
    def twice(layer, x, _):
        return layer(x)

    return twice(layer, x, jnp.arange(2))


@pytest.mark.parametrize(
    ("apply", "strategy"),
    [
        *in_turns([lambda layer, x: layer(x), masked, masked_for_all, under_remat, under_scan]),
        (masked, "auto"),
    ],
)
def test_attention_fn_is_exact(apply, strategy):
    check_against_one_device(
        train(apply),
        attention_layer(nnx_dp.per_device(attention)),
        [(sequences(0),), (sequences(1),)],
        strategy=strategy,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bias_with_and_without_the_batch_axis(strategy):
    def step(q, bias, per_row, scale):
        def fn(q, bias, per_row=None, none=None, scale=1.0):
            assert q.shape[0] == rows
            return (q + bias) * scale if per_row is None else (q + bias) * scale + per_row[:, None]

        kernel = nnx_dp.per_device(fn, in_axes={"bias": None, "per_row": 0})
        return kernel(q, bias, per_row=per_row, none=None, scale=scale), kernel(q, bias, scale=2.0)

    rows = 2
    q, bias = np.ones((8, 3), np.float32), np.arange(3, dtype=np.float32)
    per_row = np.arange(8, dtype=np.float32)
    dp_step = nnx_dp.data_parallel(
        step, strategy=strategy, devices=4, in_axes={"bias": None}, out_axes=0
    )
    with_rows, without = dp_step(q, bias, per_row, 3.0)
    np.testing.assert_allclose(with_rows, (q + bias) * 3 + per_row[:, None])
    np.testing.assert_allclose(without, (q + bias) * 2)


def test_sees_the_batch_of_one_device_under_jit():
    seen = []

    @nnx_dp.per_device
    def kernel(x):
        seen.append(x.shape)
        return x

    nnx_dp.data_parallel(lambda x: kernel(x), strategy="jit", devices=4)(np.ones((8, 3)))
    assert set(seen) == {(2, 3)}
    kernel(jnp.ones((8, 3)))
    assert seen[-1] == (8, 3)


def test_no_gather_in_the_compiled_program(optimised):
    (layer,) = attention_layer(nnx_dp.per_device(attention))()
    step = nnx_dp.data_parallel(train(lambda layer, x: layer(x)), strategy="jit", devices=4)
    hlo = step.lower(layer, sequences()).compile().as_text()
    assert "all-gather" not in hlo
    assert "all-to-all" not in hlo
    assert hlo.count(" all-reduce(") == 1


def test_uneven_batch_runs_the_kernel_on_all_of_it():
    step = train(lambda layer, x: layer(x))
    check_against_one_device(
        step,
        attention_layer(nnx_dp.per_device(attention)),
        [(sequences()[:7],), (sequences()[:7],)],
        strategy="jit",
        rtol=1e-4,
        atol=1e-5,
    )


def test_random_key_differs_between_devices_under_jit():
    @nnx_dp.per_device
    def noise(x, key):
        return x + jax.random.normal(key, x.shape)

    step = nnx_dp.data_parallel(lambda x, key: noise(x, key), strategy="jit", devices=4)
    shards = np.array(step(np.zeros((8, 3), np.float32), jax.random.key(0))).reshape(4, 6)
    assert len({shard.tobytes() for shard in shards}) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k, x: k(x, x[:, 0]), ValueError, "cannot tell whether its array 1"),
        (lambda k, x: k(nnx.Param(x)), TypeError, "was given an NNX object"),
        (lambda k, x: nnx_dp.per_device(lambda x: x.sum())(k(x)), ValueError, "has no axis 0"),
    ],
)
def test_unclear_calls_are_refused(call, error, message):
    kernel = nnx_dp.per_device(lambda *arrays: arrays[0])
    step = nnx_dp.data_parallel(lambda x: call(kernel, x), strategy="jit", devices=4)
    with pytest.raises(error, match=message):
        step(np.ones((8, 3), np.float32))


@pytest.mark.parametrize("in_axes", [(0, None), {"table": None}, [0, None]], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_axes_of_a_kernel_are_said_by_position_or_by_name(strategy, in_axes):
    @nnx_dp.per_device(in_axes=in_axes)
    def look_up(rows, table):
        return rows @ table

    table = np.arange(9, dtype=np.float32).reshape(3, 3)  # as many rows as the batch, on 1 device
    step = nnx_dp.data_parallel(
        look_up, strategy=strategy, devices=3, in_axes={"table": None, "rows": 0}
    )
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.testing.assert_allclose(step(rows, table), rows @ table)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_raw_pallas_kernel_with_its_gradient(strategy):
    def make():
        return (nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0)),)

    check_against_one_device(
        train(lambda layer, x: double(layer(x))),
        make,
        [(sequences(0),), (sequences(1),)],
        strategy=strategy,
        rtol=1e-4,
        atol=1e-5,
    )


def test_auto_takes_jit_and_says_so(caplog):
    step = nnx_dp.data_parallel(lambda x: x * 2, devices=4)
    assert step.strategy == "auto"
    with caplog.at_level(logging.INFO, "nnx_dp"):
        for _ in range(3):
            step(np.ones((8, 3)))
    assert step.strategy == "jit"
    assert [r.getMessage() for r in caplog.records].count(
        'data_parallel(<lambda>): strategy "jit": XLA can partition all of it'
    ) == 1


def test_auto_takes_shard_map_for_a_kernel(caplog):
    step = nnx_dp.data_parallel(lambda x: double(x), devices=4)
    with caplog.at_level(logging.INFO, "nnx_dp"):
        np.testing.assert_allclose(step(np.ones((8, 3), np.float32)), 2)
    assert step.strategy == "shard_map"
    assert "it holds pallas_call at" in caplog.text
    assert "test_kernels.py" in caplog.text


def test_auto_takes_jit_for_a_kernel_in_per_device():
    step = nnx_dp.data_parallel(lambda x: nnx_dp.per_device(double)(x), devices=4)
    np.testing.assert_allclose(step(np.ones((8, 3), np.float32)), 2)
    assert step.strategy == "jit"


def test_auto_takes_shard_map_for_shapes_that_trace_on_a_device_only():
    def fixed(x):
        assert x.shape[0] == 2, "compiled for two rows"
        return x * 2

    step = nnx_dp.data_parallel(fixed, devices=4, out_axes=0)
    np.testing.assert_allclose(step(np.ones((8, 3), np.float32)), 2)
    assert step.strategy == "shard_map"


def test_auto_traces_the_step_once():
    traces = 0

    def step(x):
        nonlocal traces
        traces += 1
        return x * 2

    dp_step = nnx_dp.data_parallel(step, devices=4)
    dp_step(np.ones((8, 3)))
    dp_step(np.ones((8, 3)))
    assert traces == 1


def test_auto_passes_the_steps_own_error_on():
    def broken(x):
        raise KeyError("user's own")

    with pytest.raises(KeyError, match="user's own"):
        nnx_dp.data_parallel(broken, devices=4)(np.ones((8, 3)))


def test_auto_says_what_to_do_about_a_kernel_and_an_uneven_batch():
    with pytest.raises(ValueError, match=r"pallas_call .*Put the kernel in nnx_dp\.per_device"):
        nnx_dp.data_parallel(lambda x: double(x), devices=4)(np.ones((7, 3), np.float32))
