"""The package's collectives: inert where one body sees all examples, right where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import PER_DEVICE, STRATEGIES, assert_same

import nnx_dp

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)

INERT = {
    "psum": lambda x: nnx_dp.psum(x.sum(0)),
    "pmean": lambda x: nnx_dp.pmean(x.mean(0)),
    "pmax": lambda x: nnx_dp.pmax(x.max(0)),
    "pmin": lambda x: nnx_dp.pmin(x.min(0)),
    "all_gather": lambda x: nnx_dp.all_gather(x),
    "all_gather on axis 1": lambda x: nnx_dp.all_gather(x.T, axis=1),
    "mean": lambda x: nnx_dp.mean(x),
    "masked mean": lambda x: nnx_dp.mean(x, where=x > 0.5),
    "mean of integers": lambda x: nnx_dp.mean((x > 0).astype(jnp.int32)),
    "mean of one column": lambda x: nnx_dp.mean(x, where=jnp.array([True, False, False])),
    "a pytree": lambda x: nnx_dp.psum({"n": x.shape[0], "total": (x.sum(), x.sum(0))}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", INERT)
def test_value_is_that_of_the_undecorated_step(name, strategy):
    dp_step = nnx_dp.data_parallel(INERT[name], strategy=strategy, devices=4)
    expected = jax.tree.map(jnp.asarray, INERT[name](jnp.asarray(X)))
    assert_same(dp_step(X), expected, rtol=1e-5)


DIFFERENTIABLE = {
    "psum": lambda w, x: nnx_dp.psum(jnp.sum(jnp.sin(x @ w))),
    "pmean": lambda w, x: nnx_dp.pmean(jnp.mean(jnp.sin(x @ w))),
    "pmax": lambda w, x: nnx_dp.pmax(jnp.max(x @ w)),
    "pmin": lambda w, x: nnx_dp.pmin(jnp.min(x @ w)) ** 2,
    "pmax of a tie": lambda w, x: nnx_dp.pmax(jnp.max(jnp.sum(w) + 0 * x[:1])),
    "all_gather": lambda w, x: jnp.sum(jnp.sort(nnx_dp.all_gather(jnp.sin(x @ w)))[:3]),
    "mean": lambda w, x: nnx_dp.mean(jnp.sin(x @ w), where=x[:, 0] > 0.5),
    "a squared mean": lambda w, x: nnx_dp.mean(x @ w) ** 2,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_is_exact(name, strategy):
    loss = DIFFERENTIABLE[name]

    def step(w, x):
        first = nnx_dp.grad(loss)(w, x)
        curvature = nnx_dp.grad(lambda w: jnp.sum(nnx_dp.grad(loss)(w, x) ** 2))(w)
        return first, curvature

    # Which of the two ties the largest element is does not matter to their sum.
    w = np.array([0.3, -0.2, 0.5], np.float32)
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, in_axes={"w": None})
    assert_same(dp_step(w, X), step(jnp.asarray(w), jnp.asarray(X)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_axis_index_and_size_on_each_device(strategy):
    def step(x):
        return x * 0 + nnx_dp.axis_index() + 10 * nnx_dp.axis_size()

    out = nnx_dp.data_parallel(step, strategy=strategy, devices=4, out_axes=0)(X)
    np.testing.assert_array_equal(out[:, 0], np.repeat(np.arange(4), 2) + 40)


def test_axis_index_and_size_where_one_body_sees_all():
    def step(x):
        return x * 0 + nnx_dp.axis_index() + 10 * nnx_dp.axis_size()

    np.testing.assert_array_equal(step(X), 10)
    np.testing.assert_array_equal(nnx_dp.data_parallel(step, strategy="jit", devices=4)(X), 10)


def test_mean_of_nothing_is_nan_as_jax_has_it():
    x = jnp.ones((4, 2))
    nothing = jnp.zeros((4, 2), bool)
    assert np.isnan(nnx_dp.mean(x, where=nothing))
    assert np.isnan(jnp.mean(x, where=nothing))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_mean_has_the_dtype_of_jax(dtype):
    x = jnp.asarray(np.abs(X) * 3).astype(dtype)
    assert nnx_dp.mean(x).dtype == jnp.mean(x).dtype
    np.testing.assert_allclose(
        np.float32(nnx_dp.mean(x)), np.float32(jnp.mean(x)), rtol=1e-2 if x.itemsize < 4 else 1e-5
    )
