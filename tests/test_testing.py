"""`nnx_dp.testing`: users prove their own step; a wrong one is named with a likely cause."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import linear, regression, snapshot, train_step

import nnx_dp
from nnx_dp.testing import assert_matches_single_device, fake_devices

pytest_plugins = ["pytester"]


def sum_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.sum((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_a_step_that_is_right_passes_and_the_arguments_stay():
    state, batch = linear(0.01), regression()
    before = snapshot(state)
    assert_matches_single_device(train_step, *state, *batch, devices=(1, 3, 8)[::2])
    after = snapshot(state)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=path)


@pytest.mark.parametrize(
    ("step", "options", "named", "cause"),
    [
        (train_step, {"loss_reduce": "sum"}, "args[0].kernel", "4 times too much"),
        (sum_step, {"loss_reduce": "mean"}, "args[0].kernel", "a 4-th of what"),
        (train_step, {"out_reduce": "sum"}, "output", "4 times too much"),
    ],
)
def test_a_wrong_reduction_is_named(step, options, named, cause):
    wrong = nnx_dp.data_parallel(step, **options)
    with pytest.raises(AssertionError) as caught:
        assert_matches_single_device(
            wrong, *linear(), *regression(), devices=(4,), strategies=("shard_map",)
        )
    message = str(caught.value)
    assert 'strategy="shard_map" on 4 devices: after call 1' in message
    assert f"{named}: " in message
    assert cause in message


class Normalised(nnx.Module):
    """Its bias has a gradient that is nothing but rounding, since the BatchNorm takes it away."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.linear(x))))


def normalised():
    model = Normalised(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_rounding_that_adam_blows_up_is_no_difference():
    batch = regression(16)
    assert_matches_single_device(train_step, *normalised(), *batch, devices=(4,))
    nnx_dp.data_parallel(train_step, verify=True, devices=4)(*normalised(), *batch)


def test_statistics_of_each_device_are_named():
    wrong = nnx_dp.data_parallel(train_step, sync_batch_norm=False)
    with pytest.raises(AssertionError, match="statistics that are not taken over all devices"):
        assert_matches_single_device(
            wrong, *normalised(), *regression(16), devices=(4,), strategies=("shard_map",)
        )


@pytest.mark.parametrize("strategy", ["shard_map", "pmap"])
def test_random_draws_that_differ_by_design_are_not_compared(strategy):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert_matches_single_device(
        lambda dropout, x: dropout(x).mean(),
        dropout,
        jnp.ones((8, 5)),
        devices=(1, 4),
        strategies=(strategy,),
    )


def test_verify_knows_that_one_device_draws_numbers_of_its_own():
    step = nnx_dp.data_parallel(
        lambda dropout, x: dropout(x), strategy="shard_map", devices=1, verify=True
    )
    step(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones((8, 5)))


def test_narrow_gradients_are_compared_as_closely_as_they_are():
    step = nnx_dp.data_parallel(train_step, grad_dtype=jnp.bfloat16)
    assert_matches_single_device(step, *linear(0.01), *regression(), devices=(4,))


def test_shared_objects_stay_shared_and_keyword_arguments_are_passed():
    def step(model, tied, *, x, flag):
        tied.bias[...] += 1.0
        return model(x) * (2 if flag == "twice" else 1)

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    assert_matches_single_device(
        step, model, model, x=jnp.ones((8, 3)), flag="twice", devices=(4,), strategies=("jit",)
    )


def test_it_asks_for_more_devices_by_name():
    with pytest.raises(RuntimeError, match=r"9 devices are wanted, and JAX has started with 8"):
        assert_matches_single_device(train_step, *linear(), *regression(9), devices=(9,))
    assert fake_devices(3) == jax.devices()[:3]
    with pytest.raises(ValueError, match="steps=0"):
        assert_matches_single_device(train_step, *linear(), *regression(), steps=0)


def test_the_plugin_makes_devices_before_jax_starts(pytester, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pytester.makeconftest('pytest_plugins = ["nnx_dp.pytest_plugin"]')
    pytester.makeini("[pytest]\nfake_devices = 5\n")
    pytester.makepyfile("""
        def test_devices(fake_devices):
            assert len(fake_devices) == 5
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_plugin_says_what_to_do_if_jax_has_started(pytester, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pytester.makeconftest("""
        import jax
        jax.devices()
        pytest_plugins = ["nnx_dp.pytest_plugin"]
    """)
    pytester.makepyfile("def test_devices(fake_devices): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*8 devices are wanted*at the top of conftest.py*"])
