"""Checks in the user's own run: against one device, and between the copies on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import STRATEGIES, assert_same, linear, refused, regression, train_step

import nnx_dp


def drifted(value, by=0.5, device=3):
    """An array that JAX takes for replicated, with another value on one device."""
    return from_copies(value + jnp.asarray(by if i == device else 0, value.dtype) for i in range(4))


def from_copies(copies):
    """An array that JAX takes for replicated, from its values on four devices."""
    devices = jax.devices()[:4]
    placed = [jax.device_put(*pair) for pair in zip(copies, devices, strict=True)]
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    return jax.make_array_from_single_device_arrays(placed[0].shape, sharding, placed)


def test_assert_replicated_accepts_a_replicated_tree():
    model, optimizer = linear()
    nnx_dp.data_parallel(train_step, devices=4)(model, optimizer, *regression())
    nnx_dp.assert_replicated((model, optimizer, {"a": jnp.ones(3), "key": jax.random.key(0)}))


def test_assert_replicated_names_path_and_difference():
    model, _ = linear()
    model.kernel.set_raw_value(drifted(jnp.ones((3, 1))))
    with pytest.raises(AssertionError, match=r"\['m'\]\.kernel differs .* difference is 0\.5"):
        nnx_dp.assert_replicated({"m": model})
    with pytest.raises(AssertionError, match="not replicated"):
        nnx_dp.assert_replicated({"x": nnx_dp.shard_batch(jnp.ones((8, 2)))})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint32, jnp.complex64])
def test_check_every_finds_a_copy_that_drifted(dtype):
    model, _ = linear()
    model.extra = nnx.Variable(jnp.ones((2, 3), dtype))
    step = nnx_dp.data_parallel(
        lambda model, x: model(x), strategy="shard_map", devices=4, check_every=2
    )
    x, _ = regression()
    step(model, x)
    step(model, x)
    model.extra.set_raw_value(drifted(jnp.ones((2, 3), dtype), by=1))
    step(model, x)
    with pytest.raises(AssertionError, match=r"model\.extra differs"):
        step(model, x)


@pytest.mark.parametrize(
    "make", [lambda of: jnp.array([of, True, False]), jax.random.key], ids=["flags", "key"]
)
def test_check_every_looks_at_flags_and_keys(make):
    (model, _), (x, _) = linear(), regression()
    step = nnx_dp.data_parallel(
        lambda model, x: model(x), strategy="shard_map", devices=4, check_every=1
    )
    model.extra = nnx.Variable(from_copies(make(False) for _ in range(4)))
    step(model, x)
    model.extra.set_raw_value(from_copies(make(index == 3) for index in range(4)))
    with pytest.raises(AssertionError, match=r"model\.extra differs"):
        step(model, x)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("donate", [False, True])
def test_verify_passes_and_changes_nothing(donate, strategy):
    state, plain = linear(), linear()
    step = nnx_dp.data_parallel(
        train_step, strategy=strategy, devices=4, verify=True, donate=donate
    )
    for seed in range(3):
        expected = train_step(*plain, *regression(seed=seed))
        assert_same(step(*state, *regression(seed=seed)), expected)
        assert_same(state, plain)


def test_verify_catches_a_wrong_word_and_restores_the_state():
    state = linear()
    step = nnx_dp.data_parallel(
        train_step, strategy="shard_map", devices=4, verify=True, loss_reduce="sum"
    )
    with refused(AssertionError, r"model\.kernel: 3 of 3 values differ", *state):
        step(*state, *regression())


def test_verify_lets_random_draws_differ():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    step = nnx_dp.data_parallel(
        lambda model, x: model(x), strategy="shard_map", devices=4, verify=True
    )
    step(model, *regression()[:1])


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_check_every_has_to_be_positive(value):
    with pytest.raises(ValueError, match="check_every is"):
        nnx_dp.data_parallel(train_step, check_every=value)
