"""Outputs leave a step as one device with the whole batch would return them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import PER_DEVICE, STRATEGIES, assert_same, check_against_one_device, refused

import nnx_dp


def classify(rows=8, classes=4, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, 3)).astype(np.float32)
    x *= np.arange(1, rows + 1, dtype=np.float32)[:, None]
    return x, random.integers(0, classes, rows).astype(np.int32)


def model(classes=4):
    return (nnx.Linear(3, classes, rngs=nnx.Rngs(0)),)


def check(step, strategy, *, batch=None, devices=4, classes=4, **options):
    batch = classify(classes=classes) if batch is None else batch
    return check_against_one_device(
        step, lambda: model(classes), [batch, batch], strategy=strategy, devices=devices, **options
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_python_values_in_the_output(strategy):
    """Numbers come back as arrays, as from `jax.jit`, and count the whole batch; strings stay."""
    step = nnx_dp.data_parallel(
        lambda m, x, y: {"n": x.shape[0], "name": "linear", "pi": 3.14, "flag": True},
        strategy=strategy,
        devices=4,
    )
    out = step(*model(), *classify())
    assert out["name"] == "linear"
    assert (int(out["n"]), bool(out["flag"])) == (8, True)
    np.testing.assert_allclose(out["pi"], 3.14, rtol=1e-6)


class Report(NamedTuple):
    loss: jax.Array
    extra: dict


OUTPUTS = {
    "one row an example": lambda m, x, y: m(x),
    "batch on axis 1": lambda m, x, y: m(x).T,
    "rank 4": lambda m, x, y: jnp.broadcast_to(m(x)[:, None, :, None], (x.shape[0], 5, 4, 2)),
    "mean": lambda m, x, y: m(x).mean(),
    "sum": lambda m, x, y: m(x).sum(),
    "largest and smallest": lambda m, x, y: (m(x).max(), m(x).min(0)),
    "per-class mean": lambda m, x, y: m(x).mean(0),
    "accuracy": lambda m, x, y: (m(x).argmax(-1) == y).mean(),
    "number correct": lambda m, x, y: (m(x).argmax(-1) == y).sum(),
    "number of examples": lambda m, x, y: (jnp.asarray(x.shape[0]), x.sum() / x.shape[0]),
    "histogram": lambda m, x, y: jnp.bincount(y, length=4),
    "nested": lambda m, x, y: Report(m(x).mean(), {"rows": [m(x)], "none": None, "flag": True}),
    "the state": lambda m, x, y: nnx.state(m),
    "the model": lambda m, x, y: m,
    "a copy of the model": lambda m, x, y: nnx.clone(m),
    "a gradient": lambda m, x, y: nnx.grad(lambda m: m(x).mean())(m),
    "nothing": lambda m, x, y: None,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_output_is_that_of_one_device(name, strategy):
    check(OUTPUTS[name], strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_examples_and_ten_classes(strategy):
    """A batch axis is told from its size in two traces, not from a size that happens to agree."""
    batch = classify(rows=10, classes=10)

    def step(m, x, y):
        logits = m(x)
        return logits, logits.mean(0), jnp.eye(10)[:, :5] + 0 * m.bias[...].sum()

    check(step, strategy, batch=batch, devices=5, classes=10)
    check(step, strategy, batch=batch, devices=2, classes=10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_confusion_matrix_of_the_size_of_a_devices_batch(devices, strategy):
    def confusion(m, x, y):
        return jnp.zeros((4, 4), jnp.int32).at[y, m(x).argmax(-1)].add(1)

    def product(m, x, y):
        return jax.nn.one_hot(y, 4).T @ jax.nn.one_hot(m(x).argmax(-1), 4)

    check(confusion, strategy, devices=devices)
    check(product, strategy, devices=devices)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_returned_model_is_the_callers_object(strategy):
    (given_model,) = model()
    step = nnx_dp.data_parallel(
        lambda m, x, y: {"model": m, "kernel": m.kernel}, strategy=strategy, devices=4
    )
    out = step(given_model, *classify())
    assert out["model"] is given_model
    assert out["kernel"] is given_model.kernel


REFUSED = {
    "median": lambda m, x, y: jnp.median(m(x)),
    "standard deviation": lambda m, x, y: m(x).std(),
    "sorted rows": lambda m, x, y: jnp.sort(m(x), axis=0),
    "reversed rows": lambda m, x, y: m(x)[::-1],
    "rows of every pair": lambda m, x, y: m(x) @ m(x).T,
    "first example": lambda m, x, y: m(x)[0],
    "masked mean": lambda m, x, y: jnp.mean(m(x).sum(-1), where=y > 1),
    "mean squared twice": lambda m, x, y: m(x).mean() ** 2,
    "softmax over the batch": lambda m, x, y: nnx.softmax(m(x), axis=0),
}


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("name", REFUSED)
def test_unclear_output_is_refused_by_name(name, strategy):
    given_model = model()
    step = nnx_dp.data_parallel(REFUSED[name], strategy=strategy, devices=4)
    with refused(ValueError, "output", *given_model):
        step(*given_model, *classify())


@pytest.mark.parametrize("name", REFUSED)
def test_unclear_output_is_exact_under_jit(name):
    check(REFUSED[name], "jit")


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_out_reduce_and_out_axes_say_it(strategy):
    x, y = classify()

    def step(m, x, y):
        return {"median": jnp.median(x), "rows": x[::-1], "spread": x.max() - x.min(), "n": 1.0}

    dp_step = nnx_dp.data_parallel(
        step,
        strategy=strategy,
        devices=4,
        out_axes={"median": ..., "rows": 0, "spread": ..., "n": None},
        out_reduce={"median": "mean", "rows": None, "spread": "max", "n": None},
    )
    out = dp_step(*model(), x, y)
    shards = x.reshape(4, 2, 3)
    np.testing.assert_allclose(out["median"], np.mean([np.median(s) for s in shards]), rtol=1e-6)
    np.testing.assert_allclose(out["rows"], shards[:, ::-1].reshape(8, 3))
    np.testing.assert_allclose(out["spread"], max(s.max() - s.min() for s in shards))
    assert out["n"] == 1.0


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_axes": {"a": 0}}, "not a prefix of the output's structure"),
        ({"out_axes": 3}, "axis 3 for output"),
        ({"out_axes": None}, "out_axes gives None for output"),
        ({"out_reduce": {"a": "mean"}}, "not a prefix of the output's structure"),
    ],
)
def test_out_axes_that_do_not_fit(options, message, strategy):
    step = nnx_dp.data_parallel(lambda m, x, y: m(x), strategy=strategy, devices=4, **options)
    given_model = model()
    with refused(ValueError, message, *given_model):
        step(*given_model, *classify())


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_shapes_that_trace_on_a_device_only_need_a_word(strategy):
    def step(m, x, y):
        assert x.shape == (2, 3), "a kernel that knows the size of a device's batch"
        return m(x.reshape(2, 3)), m(x).mean()

    given_model = model()
    undeclared = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with refused(ValueError, r"output\[0\].*does not trace at the global shapes", *given_model):
        undeclared(*given_model, *classify())
    gradient = nnx_dp.data_parallel(
        lambda m, x, y: nnx.grad(lambda m: step(m, x, y)[1])(m), strategy=strategy, devices=4
    )
    with refused(ValueError, r"(?s)gradient 1 of the step.*nnx_dp\.per_device", *given_model):
        gradient(*given_model, *classify())
    declared = nnx_dp.data_parallel(
        step, strategy=strategy, devices=4, out_axes=(0, ...), out_reduce=(None, "mean")
    )
    x, y = classify()
    rows, average = declared(*given_model, x, y)
    assert_same((rows, average), (given_model[0](x), given_model[0](x).mean()))


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_output_structure_that_depends_on_the_batch_size(strategy):
    step = nnx_dp.data_parallel(lambda m, x, y: [m(row) for row in x], strategy=strategy, devices=4)
    given_model = model()
    with refused(ValueError, "leaves another structure behind", *given_model):
        step(*given_model, *classify())


@settings(max_examples=12, deadline=None)
@given(
    axis=st.integers(0, 2),
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    strategy=st.sampled_from(STRATEGIES),
    negative=st.booleans(),
)
def test_any_axis_of_any_pytree(axis, shape, strategy, negative):
    """Batches on any axis, in containers, come back as they went in."""
    shape = (*shape[:axis], 4, *shape[axis:])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    given_axis = axis - len(shape) if negative else axis
    step = nnx_dp.data_parallel(
        lambda batch: {"twice": [batch["x"] * 2], "sum": batch["x"].sum()},
        strategy=strategy,
        devices=2,
        in_axes={"batch": given_axis},
    )
    out = step({"x": x})
    np.testing.assert_allclose(out["twice"][0], x * 2)
    np.testing.assert_allclose(out["sum"], x.sum())


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_array_made_from_the_batch_size_is_no_constant(strategy):
    """Closed-over NumPy values may differ between a device's trace and the global one."""
    step = nnx_dp.data_parallel(
        lambda x: jnp.sin(np.ones(3, np.float32) / x.shape[0]), strategy=strategy, devices=2
    )
    with pytest.raises(ValueError, match="output"):
        step(np.ones((8, 3), np.float32))
    rows = nnx_dp.data_parallel(
        lambda x, y: x[np.arange(x.shape[0]), y], strategy=strategy, devices=2
    )
    x, y = classify()
    np.testing.assert_allclose(rows(x, y % 3), x[np.arange(8), y % 3])


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_draws_from_a_constant_key_are_refused(strategy):
    """Every device would get the same numbers for its own examples."""

    def step(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    x, _ = classify()
    with pytest.raises(ValueError, match=r"the key of a random draw at .*test_outputs"):
        nnx_dp.data_parallel(step, strategy=strategy, devices=4)(x)
    alike = nnx_dp.data_parallel(step, strategy=strategy, devices=4, rngs="broadcast")
    noise = (np.array(alike(x)) - x).reshape(4, -1)
    np.testing.assert_allclose(noise, np.broadcast_to(noise[:1], noise.shape), atol=1e-5)


def keys_of_rows(x, flag):
    keys = jax.random.split(jax.random.key(0), len(x))
    return jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    "step",
    [
        keys_of_rows,
        lambda x, flag: jax.random.gamma(jax.random.key(0), jnp.ones(len(x))),
        lambda x, flag: -x.astype(jnp.uint32).min(),
        lambda x, flag: 0 - x.astype(jnp.uint32).min(),
        lambda x, flag: jnp.imag((x[:, 0] - 1j * x[:, 1]).max()),
        lambda x, flag: x[0 - jnp.arange(len(x))],
        lambda x, flag: x[jnp.where(flag > 0, jnp.arange(len(x)), 0)],
        lambda x, flag: x[
            jax.lax.cond(flag > 0, lambda: jnp.arange(len(x)), lambda: jnp.zeros(len(x), int))
        ],
    ],
    ids="keys gamma negated subtracted imaginary backwards chosen branch".split(),
)
def test_rows_that_are_not_a_devices_own_are_refused(step, strategy):
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with pytest.raises(ValueError, match="output"):
        dp_step(np.arange(24.0, dtype=np.float32).reshape(8, 3), -1.0)
