"""The oracle of these tests: what the undecorated step leaves behind, on one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_dp

STRATEGIES = ("jit", "shard_map", "pmap")
PER_DEVICE = ("shard_map", "pmap")


def in_turns(cases):
    """Pairs every case with "jit" and, in turns, with one of the strategies that share a body."""
    return [(case, s) for i, case in enumerate(cases) for s in ("jit", PER_DEVICE[i % 2])]


def regression(rows=8, seed=0, features=3):
    """A batch whose rows, and so whose shards, differ in scale: no device's mean is another's."""
    random = np.random.default_rng(seed)
    scale = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    x = random.standard_normal((rows, features)).astype(np.float32) * scale / 4
    y = random.standard_normal((rows, 1)).astype(np.float32)
    return x, y


def linear(learning_rate=0.1, seed=0):
    """A linear model and SGD, which a gradient N times too large would show at once."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.sgd(learning_rate), wrt=nnx.Param)


def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def snapshot(tree):
    """Copies every array in a pytree of NNX objects and arrays to NumPy, by path."""
    is_node = lambda v: isinstance(v, nnx.Variable) or nnx.graphlib.is_graph_node(v)  # noqa: E731
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
        name = jax.tree_util.keystr(path)
        if not is_node(leaf):
            arrays[name] = to_numpy(leaf)
            continue
        for inner, value in nnx.iter_graph(leaf, graph=True):
            inner_path = name + "".join(f".{key}" for key in inner)
            if isinstance(value, nnx.Variable):
                for at, array in jax.tree_util.tree_leaves_with_path(value.get_raw_value()):
                    arrays[inner_path + jax.tree_util.keystr(at)] = to_numpy(array)
            elif isinstance(value, (jax.Array, np.ndarray)):
                arrays[inner_path] = to_numpy(value)
    return arrays


def to_numpy(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def assert_same(actual, expected, *, rtol=2e-5, atol=1e-6):
    """Checks two pytrees of NNX objects and arrays: same paths, shapes, dtypes and values."""
    actual, expected = snapshot(actual), snapshot(expected)
    assert actual.keys() == expected.keys()
    for path, value in actual.items():
        assert value.shape == expected[path].shape, path
        assert value.dtype == expected[path].dtype, path
        np.testing.assert_allclose(
            value.astype(np.float64) if value.dtype.kind == "f" else value,
            expected[path],
            rtol=rtol,
            atol=atol,
            err_msg=path,
        )


def check_against_one_device(
    step, make_state, batches, *, strategy, devices=4, plain=None, rtol=2e-5, atol=1e-6, **options
):
    """Runs a step decorated and undecorated, call by call, and compares all that they leave.

    Args:
      step: called as `step(*state, *batch)`, or `step(*state, **batch)` for a dict.
      make_state: makes the state arguments, twice, alike.
      batches: the other arguments of each call; at least two calls.
      plain: the step on one device, if it has to be written otherwise there.

    Returns:
      The decorated step, its state and its last output.
    """
    assert len(batches) >= 2, "a step that is right once may be wrong the second time"
    plain = step if plain is None else plain
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=devices, **options)
    state, plain_state = make_state(), make_state()
    for batch in batches:
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        expected = plain(*plain_state, *args, **kwargs)
        actual = dp_step(*state, *args, **kwargs)
        assert_same(actual, expected, rtol=rtol, atol=atol)
        assert_same(state, plain_state, rtol=rtol, atol=atol)
    return dp_step, state, actual


@contextlib.contextmanager
def refused(error, match, *state):
    """Expects an error, and everything exactly as it was before."""
    before = snapshot(state)
    structure = nnx.graphdef(nnx.List(state)) if state else None
    with pytest.raises(error, match=match) as caught:
        yield caught
    after = snapshot(state)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    if state:
        assert nnx.graphdef(nnx.List(state)) == structure
