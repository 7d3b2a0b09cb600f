"""Checkpoints with Orbax: saved under one number of devices, restored under another or none."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from oracle import assert_same, regression

import nnx_dp


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(3, 8, rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.tanh(self.bn(self.linear(x)))))


def make_state(seed=0):
    model = Net(seed)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def data():
    """Batches in a shuffled order that can be taken up again where it was left."""
    x, y = regression(48)
    rows = grain.MapDataset.source(np.arange(48)).shuffle(seed=3).repeat().batch(8)
    return iter(rows.map(lambda i: (x[i], y[i])).to_iter_dataset())


def save(path, state, batches):
    pure = nnx.to_pure_dict(nnx.state(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", as_saved(pure))
    (path / "data").write_text(repr(batches.get_state()))


def restore(path, state, batches):
    abstract = nnx.state(state)
    pure = nnx.to_pure_dict(abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(path / "state", as_saved(pure))
    nnx.replace_by_pure_dict(abstract, as_state(saved, pure))
    nnx.update(state, abstract)
    batches.set_state(eval((path / "data").read_text()))


def as_saved(pure):
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, pure)


def as_state(saved, like):
    return jax.tree.map(
        lambda x, old: jax.random.wrap_key_data(x) if is_key(old) else x, saved, like
    )


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def run(train_step, state, batches, steps):
    return [float(train_step(*state, *next(batches))) for _ in range(steps)]


def decorated(devices, strategy="jit"):
    if devices == "none":
        return nnx.jit(step)
    return nnx_dp.data_parallel(step, strategy=strategy, devices=devices)


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, "none"), ("none", 8)])
def test_restored_to_another_number_of_devices(before, after, tmp_path):
    unbroken, batches = make_state(), data()
    expected = run(nnx.jit(step), unbroken, batches, 6)

    first, batches = make_state(), data()
    losses = run(decorated(before), first, batches, 3)
    save(tmp_path, first, batches)

    second, batches = make_state(seed=9), data()
    restore(tmp_path, second, batches)
    assert_same(second, first)
    losses += run(decorated(after), second, batches, 3)
    # Under "jit" random draws are those of one device, so dropout goes on as it would have.
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same(second, unbroken, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("strategy", ["shard_map"])
def test_per_device_streams_go_on_where_they_were(strategy, tmp_path):
    train_step = decorated(4, strategy)
    unbroken, batches = make_state(), data()
    expected = run(train_step, unbroken, batches, 4)

    first, batches = make_state(), data()
    losses = run(decorated(4, strategy), first, batches, 2)
    save(tmp_path, first, batches)
    second, batches = make_state(seed=9), data()
    restore(tmp_path, second, batches)
    losses += run(decorated(4, strategy), second, batches, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same(second, unbroken)


def test_state_after_a_step_is_usable_anywhere(tmp_path):
    state, batches = make_state(), data()
    run(decorated(8), state, batches, 2)
    model, x = state[0], regression()[0]
    model.eval()
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.sharding.is_fully_replicated
    expected = model(x)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), expected, rtol=1e-5)
    alone = jax.device_put(nnx.state(model), jax.devices()[0])
    nnx.update(model, alone)
    np.testing.assert_allclose(model(x), expected, rtol=1e-5)
