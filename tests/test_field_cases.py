"""Cases that people have reported from the field; each names the report that it was read in.

The oracle is the undecorated step on one device with the whole batch. Every step is called at least
twice, on shards whose values differ, and with SGD wherever the scale of a gradient matters.
"""

import functools
import pathlib
import tomllib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    PER_DEVICE,
    STRATEGIES,
    assert_same,
    check_against_one_device,
    linear,
    refused,
    regression,
    snapshot,
    to_numpy,
    train_step,
)

import nnx_dp

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
per_device_strategies = pytest.mark.parametrize("strategy", PER_DEVICE)

BATCHES = [regression(seed=1), regression(seed=2)]


class Weight(nnx.Module):
    """w times x, whose gradient under a mean loss is the mean of x."""

    def __init__(self, value):
        self.w = nnx.Param(jnp.asarray(value))


def weight(value=1.0, learning_rate=1.0, transform=None):
    model = Weight(value)
    tx = optax.sgd(learning_rate) if transform is None else transform
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


# -------------------------------------------------------------------------------------------------
# Silent wrong numbers


@every_strategy
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_gradient_does_not_depend_on_the_number_of_devices(strategy, devices):
    """https://github.com/jax-ml/jax/issues/36886: 14.0 on four devices, 3.5 on one."""

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model.w * x))(model)
        optimizer.update(model, grads)
        return grads

    x = np.arange(8, dtype=np.float32)
    _, (model, _), grads = check_against_one_device(
        step, weight, [(x,), (x,)], strategy=strategy, devices=devices
    )
    assert grads.w[...] == 3.5
    assert model.w[...] == 1 - 2 * 3.5


@every_strategy
@pytest.mark.parametrize("devices", [4, 8])
def test_linear_regression(strategy, devices):
    check_against_one_device(train_step, linear, BATCHES, strategy=strategy, devices=devices)


@every_strategy
def test_loss_averaged_inside_the_differentiated_function(strategy):
    """https://github.com/jax-ml/jax/issues/3970: each device keeps its own gradient."""

    def step(model, optimizer, x, y):
        def loss_fn(model):
            return nnx_dp.pmean(jnp.mean((model(x) - y) ** 2))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss, grads

    check_against_one_device(step, linear, BATCHES, strategy=strategy)


@per_device_strategies
def test_loss_averaged_by_a_raw_collective(strategy):
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return jax.lax.pmean(jnp.mean((model(x) - y) ** 2), "data")

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    check_against_one_device(step, linear, BATCHES, strategy=strategy, plain=train_step)


def test_raw_collective_without_a_device_axis_is_refused():
    def step(model, optimizer, x, y):
        loss_fn = lambda model: jax.lax.pmean(jnp.mean((model(x) - y) ** 2), "data")  # noqa: E731
        optimizer.update(model, nnx.grad(loss_fn)(model))

    state = linear()
    with refused(Exception, "data", *state):
        nnx_dp.data_parallel(step, strategy="jit", devices=4)(*state, *BATCHES[0])


def masked_batch(valid, seed=0):
    x, y = regression(seed=seed)
    return x, y, np.arange(8) < valid


@every_strategy
@pytest.mark.parametrize("valid", [5, 2], ids=["uneven shards", "shards with no valid item"])
def test_masked_mean(strategy, valid):
    """https://github.com/huggingface/transformers/pull/19494: a mean of means weights unequally."""

    def step(model, optimizer, x, y, mask):
        def loss_fn(model):
            return nnx_dp.mean(((model(x) - y) ** 2)[:, 0], where=mask)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss, grads

    batches = [masked_batch(valid, seed=1), masked_batch(valid, seed=2)]
    check_against_one_device(step, linear, batches, strategy=strategy)


@every_strategy
def test_masked_mean_of_known_numbers(strategy):
    """https://github.com/huggingface/transformers/pull/18297: 1.75 is wrong, 2.0 is right."""

    def step(model, x, mask):
        loss_fn = lambda model: nnx_dp.mean(model.w * x, where=mask)  # noqa: E731
        return nnx.value_and_grad(loss_fn)(model)

    x, mask = np.arange(8, dtype=np.float32), np.arange(8) < 5
    make = lambda: (Weight(1.0),)  # noqa: E731
    _, _, (loss, grads) = check_against_one_device(
        step, make, [(x, mask), (x, mask)], strategy=strategy
    )
    assert loss == 2.0
    assert grads.w[...] == 2.0


def where_mean(losses, mask):
    return jnp.mean(losses, where=mask)


def quotient(losses, mask):
    return jnp.sum(losses * mask) / jnp.sum(mask)


def safe_quotient(losses, mask):
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


@pytest.mark.parametrize("masked_mean", [where_mean, quotient, safe_quotient])
def test_masked_mean_written_by_hand_is_right_under_jit(masked_mean):
    def step(model, optimizer, x, y, mask):
        loss_fn = lambda model: masked_mean(((model(x) - y) ** 2)[:, 0], mask)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    batches = [masked_batch(5, seed=1), masked_batch(2, seed=2)]
    check_against_one_device(step, linear, batches, strategy="jit")


@per_device_strategies
@pytest.mark.parametrize("masked_mean", [where_mean, quotient, safe_quotient])
@pytest.mark.parametrize("where", ["loss", "output"])
def test_masked_mean_written_by_hand_is_refused_per_device(strategy, masked_mean, where):
    def step(model, optimizer, x, y, mask):
        losses = lambda model: ((model(x) - y) ** 2)[:, 0]  # noqa: E731
        if where == "output":
            return masked_mean(losses(model), mask)
        grads = nnx.grad(lambda model: masked_mean(losses(model), mask))(model)
        optimizer.update(model, grads)

    state = linear()
    with refused(ValueError, r"nnx_dp\.mean\(.*where=mask", *state):
        nnx_dp.data_parallel(step, strategy=strategy, devices=4)(*state, *masked_batch(5))


class Noisy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(x))


def test_dropout_under_jit_is_that_of_one_device():
    def make():
        model = Noisy()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    check_against_one_device(train_step, make, BATCHES, strategy="jit")


@per_device_strategies
@pytest.mark.parametrize("devices", [4, 8])
def test_dropout_masks_differ_between_devices_and_calls(strategy, devices):
    """https://github.com/google/flax/issues/4195: one mask on all devices."""
    step = nnx_dp.data_parallel(lambda m, x: m.dropout(x), strategy=strategy, devices=devices)
    model, plain = Noisy(), Noisy()
    x = jnp.ones((devices, 64))
    masks = []
    for _ in range(2):
        masks += list(np.asarray(step(model, x)) > 0)
        plain.dropout(x)
        # Keys are as before, counts have advanced as on one device, shapes are scalar.
        assert_same(model, plain)
    assert len({mask.tobytes() for mask in masks}) == 2 * devices
    assert all(0.2 < mask.mean() < 0.8 for mask in masks)


class Normalised(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs, **options)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


def normalised(**options):
    model = Normalised(**options)
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@every_strategy
@pytest.mark.parametrize(("devices", "fast_variance"), [(4, True), (4, False), (8, True)])
def test_batch_norm_of_an_ordered_batch(strategy, fast_variance, devices):
    """https://github.com/google/flax/issues/877, /319, /2417: the statistics of one device."""

    def batch(seed):
        x, y = regression(rows=16, seed=seed)
        return np.sort(x, axis=0) + 5, y

    make = functools.partial(normalised, use_fast_variance=fast_variance)
    check_against_one_device(
        train_step,
        make,
        [batch(1), batch(2), batch(3)],
        strategy=strategy,
        devices=devices,
        rtol=1e-4,
        atol=1e-4,
    )


def metrics():
    return (
        nnx.MultiMetric(
            loss=nnx.metrics.Average("losses"),
            mean_loss=nnx.metrics.Average("mean_loss"),
            accuracy=nnx.metrics.Accuracy(),
            spread=nnx.metrics.Welford("losses"),
        ),
    )


def metric_batch(seed):
    random = np.random.default_rng(seed)
    losses = random.standard_normal(8).astype(np.float32) + np.arange(8)
    logits = random.standard_normal((8, 3)).astype(np.float32)
    return {"losses": losses, "logits": logits, "labels": random.integers(0, 3, 8)}


@every_strategy
@pytest.mark.parametrize("reset", ["never", "first", "last"])
def test_metrics_count_the_whole_batch_once(strategy, reset):
    """https://github.com/google/flax/issues/5483: the average of 0..7 came out as 0.5."""

    def step(metrics, losses, logits, labels):
        if reset == "first":
            metrics.reset()
        metrics.update(losses=losses, mean_loss=losses.mean(), logits=logits, labels=labels)
        values = metrics.compute()
        if reset == "last":
            metrics.reset()
        return values

    batches = [metric_batch(seed) for seed in range(3)]
    check_against_one_device(step, metrics, batches, strategy=strategy)


@every_strategy
def test_metric_reset_between_calls(strategy):
    def step(metric, values):
        metric.update(values=values)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    metric = nnx.metrics.Average()
    x = np.arange(8, dtype=np.float32)
    dp_step(metric, x)
    dp_step(metric, x + 1)
    assert metric.compute() == 4.0
    metric.reset()
    dp_step(metric, x)
    assert metric.compute() == 3.5
    assert metric.count[...] == 8


CLIP_ROWS = np.array([[10, 0], [0, 1], [0, 1], [0, 1]], np.float32)


@every_strategy
@pytest.mark.parametrize("where", ["optax", "step"])
def test_clipping_sees_the_gradient_of_the_full_batch(strategy, where):
    """https://github.com/google/praxis/pull/6: clip-then-mean gave [.25, .75]."""

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(x @ model.w[...]))(model)
        norm = optax.tree.norm(grads)
        if where == "step":
            grads = jax.tree.map(lambda g: g / jnp.maximum(1, norm), grads)
        optimizer.update(model, grads)
        return norm

    def make():
        clip = [optax.clip_by_global_norm(1.0)] if where == "optax" else []
        return weight(jnp.zeros(2), transform=optax.chain(*clip, optax.sgd(1.0)))

    _, (model, _), norm = check_against_one_device(
        step, make, [(CLIP_ROWS,), (CLIP_ROWS,)], strategy=strategy
    )
    np.testing.assert_allclose(norm, np.hypot(2.5, 0.75), rtol=1e-6)
    np.testing.assert_allclose(model.w[...], [-2 * 0.9578, -2 * 0.2873], rtol=1e-3)


@every_strategy
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(0.01)], ids=["sgd", "adamw"])
def test_accumulation_updates_at_the_call_that_completes_it(strategy, tx):
    """https://github.com/huggingface/transformers/pull/12675: a boundary that is off by one, and
    https://github.com/jax-ml/jax/issues/23693: `lax.cond` refused in shard_map."""
    every = 2

    def make():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.MultiSteps(tx, every), wrt=nnx.Param)

    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = make(), make()
    for call in range(1, 2 * every + 1):
        before = snapshot(state[0])
        train_step(*plain, *regression(seed=call))
        dp_step(*state, *regression(seed=call))
        assert_same(state, plain, rtol=1e-4)
        moved = not np.array_equal(before[".kernel"], to_numpy(state[0].kernel[...]))
        assert moved == (call % every == 0)
    for leaf in jax.tree.leaves(nnx.state(state)):
        assert leaf.sharding.is_fully_replicated


# -------------------------------------------------------------------------------------------------
# Crashes under shard_map


class Recurrent(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))
        self.linear = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.rnn(x)[:, -1])


class Scanned(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        def body(carry, column):
            return carry * 0.5 + column, None

        carry, _ = jax.lax.scan(body, jnp.zeros(x.shape[::2]), x.swapaxes(0, 1))
        return self.linear(carry)


@every_strategy
@pytest.mark.parametrize("module", [Recurrent, Scanned])
def test_scan_with_a_carry_of_zeros(strategy, module):
    """https://github.com/jax-ml/jax/issues/21855, google/flax/issues/4217: carry types differ."""

    def make():
        model = module()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def batch(seed):
        x, y = regression(seed=seed, features=15)
        return x.reshape(8, 5, 3), y

    check_against_one_device(train_step, make, [batch(1), batch(2)], strategy=strategy, rtol=1e-4)


def _double_kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


@jax.custom_vjp
def double(x):
    return pl.pallas_call(
        _double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


@jax.custom_vjp
def matmul(w, x):
    return x @ w


matmul.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))


class Kernels(nnx.Module):
    """Kernels and ordinary layers side by side: their gradients are reduced alike."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.w = nnx.Param(rngs.normal((3, 3)) / 2)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(double(matmul(double(self.w[...]), x)))


@every_strategy
@pytest.mark.parametrize("devices", [4, 8])
def test_pallas_and_custom_vjp_mixed_with_ordinary_layers(strategy, devices):
    """https://github.com/jax-ml/jax/issues/21855: no replication rule for pallas_call, and
    https://github.com/jax-ml/jax/pull/19174: a custom_vjp with a replicated weight."""

    def make():
        model = Kernels()
        return model, nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

    check_against_one_device(
        train_step, make, BATCHES, strategy=strategy, devices=devices, rtol=1e-4
    )


@jax.custom_vjp
def scale_averaged(w, x):
    return w * x


scale_averaged.defvjp(
    lambda w, x: (w * x, (w, x)),
    lambda saved, g: (nnx_dp.pmean(jnp.sum(saved[1] * g)), saved[0] * g),
)


@jax.custom_vjp
def scale_summed(w, x):
    return w * x


scale_summed.defvjp(
    lambda w, x: (w * x, (w, x)),
    lambda saved, g: (nnx_dp.psum(jnp.sum(saved[1] * g)), saved[0] * g),
)


def scaled_step(scale):
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(scale(model.w[...], x)))(model)
        optimizer.update(model, grads)

    return step


@every_strategy
def test_custom_vjp_that_averages_its_gradient_itself(strategy):
    x = np.arange(8, dtype=np.float32)
    step = scaled_step(scale_averaged)
    check_against_one_device(step, weight, [(x,), (x + 1,)], strategy=strategy)


@per_device_strategies
def test_custom_vjp_that_sums_the_gradient_of_a_mean_is_refused(strategy):
    """A sum over devices of the gradients of their means is N times that of the global mean."""
    state = weight()
    with refused(ValueError, r"on 4 devices, is not that of its loss over the batch", *state):
        dp_step = nnx_dp.data_parallel(scaled_step(scale_summed), strategy=strategy, devices=4)
        dp_step(*state, np.arange(8, dtype=np.float32))


@every_strategy
def test_accuracy_by_argmax(strategy):
    """https://github.com/jax-ml/jax/issues/28334: argmax failed under check_vma."""

    def step(model, optimizer, x, labels):
        def loss_fn(model):
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        right = logits.argmax(-1) == labels
        return loss, {"accuracy": jnp.mean(right), "right": right.sum(), "each": right}

    def make():
        model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    batches = [(regression(seed=s)[0], np.arange(8) % 4) for s in (1, 2)]
    check_against_one_device(step, make, batches, strategy=strategy)


@every_strategy
@pytest.mark.parametrize("given", ["argument", "jax.set_mesh"])
def test_mesh_with_explicit_axes(strategy, given):
    """https://github.com/sgl-project/sglang-jax/pull/1407: bare `jax.make_mesh` makes Explicit
    axes, which refuse an unsharded batch."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    if given == "argument":
        check_against_one_device(
            train_step, linear, BATCHES, strategy=strategy, devices=None, mesh=mesh
        )
        return
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for batch in BATCHES:
        expected = train_step(*plain, *batch)
        with jax.set_mesh(mesh):
            loss = dp_step(*state, *batch)
        assert_same(loss, expected)
        assert_same(state, plain)


@pytest.mark.parametrize("bare", [True, False], ids=["explicit mesh", "auto mesh"])
def test_sharding_constraint_in_the_step(bare):
    types = None if bare else (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=types, devices=jax.devices()[:4])

    def step(model, optimizer, x, y):
        auto = dp_step.mesh
        x = jax.lax.with_sharding_constraint(x, NamedSharding(auto, P("data")))
        return train_step(model, optimizer, x, y)

    dp_step = nnx_dp.data_parallel(step, strategy="jit", mesh=mesh)
    state, plain = linear(), linear()
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch))
        assert_same(state, plain)


@per_device_strategies
@pytest.mark.parametrize("raw", [True, False], ids=["lax.psum", "nnx_dp.psum"])
@pytest.mark.parametrize("kept", ["output", "state"])
def test_sum_of_a_value_that_is_reduced_already_is_refused(strategy, raw, kept):
    """https://github.com/jax-ml/jax/issues/19175: never N times too large in silence."""

    def step(model, total, x):
        mean = nnx_dp.pmean(jnp.mean(x * model.w))
        again = jax.lax.psum(mean, "data") if raw else nnx_dp.psum(mean)
        if kept == "output":
            return again
        total[...] = again

    state = Weight(1.0), nnx.Variable(jnp.array(0.0))
    path = "output" if kept == "output" else "total"
    with refused(ValueError, f"{path}.*devices", *state):
        dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
        dp_step(*state, np.arange(8, dtype=np.float32))


@every_strategy
def test_mean_of_a_value_that_is_reduced_already(strategy):
    def step(model, x):
        return nnx_dp.pmean(nnx_dp.pmean(jnp.mean(x * model.w)))

    x = np.arange(8, dtype=np.float32)
    check_against_one_device(step, lambda: (Weight(1.0),), [(x,), (x + 1,)], strategy=strategy)


def test_flax_and_jax_are_versions_that_fit_together():
    """https://github.com/google/flax/issues/5058: flax 0.12.0 passed jax 0.8 an argument that was
    gone."""
    project = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    floors = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert {"jax>=0.10.0", "flax>=0.12.8"} <= set(floors)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    auto = jax.sharding.Mesh(mesh.devices, ("data",))
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    call = nnx.shard_map(
        lambda m, x: m(x), mesh=auto, in_specs=(P(), P("data")), out_specs=P("data")
    )
    x, _ = BATCHES[0]
    np.testing.assert_allclose(call(model, x), model(x), rtol=1e-5)


# -------------------------------------------------------------------------------------------------
# Argument handling


@every_strategy
@pytest.mark.parametrize(
    "lr",
    [0.25, np.float32(0.25), np.array(0.25, np.float32), jnp.array(0.25)],
    ids=["python", "numpy scalar", "numpy", "jax"],
)
def test_scalar_leaves_of_a_batch_are_replicated(strategy, lr):
    """https://github.com/jax-ml/jax/issues/1991, mlcommons/algorithmic-efficiency/issues/813."""

    def step(model, batch):
        def loss_fn(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - batch["lr"] * g, params, grads))
        return loss, jnp.asarray(batch["step"]) + 1

    batches = [({"x": x, "y": y, "lr": lr, "step": 7},) for x, y in BATCHES]
    check_against_one_device(step, lambda: linear()[:1], batches, strategy=strategy)


@per_device_strategies
def test_batch_that_does_not_divide_is_refused_by_name(strategy):
    """https://github.com/google/objax/pull/52, https://github.com/jax-ml/jax/issues/3638."""
    state = linear()
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    dp_step(*state, *regression(8))
    for rows in (5, 3, 1):
        with refused(ValueError, f"x has {rows} examples on axis 0, which 4 devices", *state):
            dp_step(*state, *regression(rows))
    with refused(ValueError, "empty batch: x has 0", *state):
        dp_step(*state, *regression(0))


@pytest.mark.parametrize("devices", [4, 8])
def test_short_last_batch_under_jit(devices):
    batches = [regression(8, seed=1), regression(5, seed=2), regression(3, seed=3), regression(8)]
    check_against_one_device(train_step, linear, batches, strategy="jit", devices=devices)


@every_strategy
def test_uneven_batch_computed_by_every_device(strategy):
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, uneven="replicate")
    state, plain = linear(), linear()
    assert_same(dp_step(*state, *regression(8, seed=1)), train_step(*plain, *regression(8, seed=1)))
    with pytest.warns(UserWarning, match="5 examples, which 4 devices do not divide"):
        loss = dp_step(*state, *regression(5, seed=2))
    assert_same(loss, train_step(*plain, *regression(5, seed=2)))
    # Said once only: the next short batch is silent.
    assert_same(dp_step(*state, *regression(5, seed=3)), train_step(*plain, *regression(5, seed=3)))
    assert_same(state, plain)


@every_strategy
def test_uneven_batch_padded_and_cut(strategy):
    def step(model, x):
        return model(x), {"doubled": 2 * x}

    batches = [(regression(rows, seed=rows)[0],) for rows in (8, 5, 3, 1)]
    make = lambda: linear()[:1]  # noqa: E731
    check_against_one_device(step, make, batches, strategy=strategy, uneven="pad")


@every_strategy
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_static_arguments_flipped_between_calls(strategy, by):
    """https://github.com/jax-ml/jax/issues/3007, /6302, /9904: static arguments by keyword."""
    traces = []

    def step(model, optimizer, x, y, mode="mse", flag=True, extra=None):
        traces.append((mode, flag, extra))
        assert isinstance(flag, bool)

        def loss_fn(model):
            error = model(x) - y
            return jnp.mean(error**2 if mode == "mse" else jnp.abs(error))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        if flag:
            optimizer.update(model, grads)
        return loss if extra is None else loss * 2

    names = ("mode", "flag", "extra")
    choices = [("mse", True, None), ("mae", True, None), ("mse", False, None), ("mse", True, "x")]
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    counts = []
    for _ in range(2):
        for choice in choices:
            args = choice if by == "position" else ()
            kwargs = dict(zip(names, choice, strict=True)) if by == "keyword" else {}
            before = len(traces)
            actual = dp_step(*state, *BATCHES[0], *args, **kwargs)
            counts.append(len(traces) - before)
            assert_same(actual, step(*plain, *BATCHES[0], *args, **kwargs))
            assert_same(state, plain)
    # Each value is traced at its first call, and never again.
    assert all(counts[:4])
    assert not any(counts[4:])


@every_strategy
@pytest.mark.parametrize("static", ["static_argnums", "static_argnames"])
def test_declared_static_arguments(strategy, static):
    """https://github.com/google/flax/issues/4989: static_argnums beside shardings."""

    def step(model, x, power, *, scale):
        assert type(power) is int
        assert type(scale) is float or static == "static_argnums"
        return model(x) ** power * scale

    options = (
        {"static_argnums": 2} if static == "static_argnums" else {"static_argnames": ("power",)}
    )
    if static == "static_argnames":
        options["static_argnames"] += ("scale",)
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, **options)
    model = linear()[0]
    x, _ = BATCHES[0]
    for power, scale in [(2, 0.5), (3, 0.5), (3, 2.0), (2, 0.5)]:
        actual = dp_step(model, x, power, scale=scale)
        assert_same(actual, step(model, x, power, scale=scale))


@every_strategy
def test_keyword_only_arguments_and_their_defaults(strategy):
    """https://github.com/google/flax/issues/4570: keyword-only defaults were not resolved."""

    def step(model, optimizer, *batch, scale=1.0, **options):
        x, y = batch

        def loss_fn(model):
            return jnp.mean(options["weights"] * (scale * model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    weights = np.arange(8, dtype=np.float32)[:, None]
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for kwargs in ({}, {"scale": 2.0}, {"scale": 3.0}):
        actual = dp_step(*state, *BATCHES[0], weights=weights, **kwargs)
        assert_same(actual, step(*plain, *BATCHES[0], weights=weights, **kwargs))
        assert_same(state, plain)


@every_strategy
def test_partial_and_bound_methods(strategy):
    def step(optimizer, power, model, x, y, *, scale):
        def loss_fn(model):
            return scale * jnp.mean((model(x) - y) ** power)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    state, plain = linear(), linear()
    held = functools.partial(step, state[1], 2, scale=0.5)
    dp_step = nnx_dp.data_parallel(held, strategy=strategy, devices=4)
    for batch in BATCHES:
        actual = dp_step(state[0], *batch)
        assert_same(actual, step(plain[1], 2, plain[0], *batch, scale=0.5))
        assert_same(state, plain)

    dp_call = nnx_dp.data_parallel(state[0].__call__, strategy=strategy, devices=4)
    for x, _ in BATCHES:
        assert_same(dp_call(x), plain[0](x))


def noise_step(model, x, key):
    return x + model.w[...] * jax.random.normal(key, x.shape)


def test_key_for_the_whole_batch_under_jit():
    """https://github.com/mlcommons/algorithmic-efficiency/issues/815: typed keys."""
    batches = [(BATCHES[0][0], jax.random.key(seed)) for seed in (1, 2)]
    check_against_one_device(noise_step, lambda: (Weight(1.0),), batches, strategy="jit")


@per_device_strategies
def test_key_for_the_whole_batch_is_folded_per_device(strategy):
    dp_step = nnx_dp.data_parallel(noise_step, strategy=strategy, devices=4)
    model, key, x = Weight(1.0), jax.random.key(0), np.zeros((8, 16), np.float32)
    noise = [np.asarray(dp_step(model, x, k)) for k in (key, key, jax.random.key(1))]
    np.testing.assert_array_equal(noise[0], noise[1])
    assert len(np.unique(np.stack([noise[0], noise[2]]))) == 2 * x.size


@every_strategy
def test_key_for_each_example(strategy):
    """https://github.com/jax-ml/jax/issues/27223: sharding constraints on key arrays."""

    def step(model, x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
        return x + model.w[...] * noise, keys

    batches = [(BATCHES[0][0], jax.random.split(jax.random.key(seed), 8)) for seed in (1, 2)]
    check_against_one_device(step, lambda: (Weight(1.0),), batches, strategy=strategy)


@every_strategy
def test_key_of_the_old_kind_is_not_a_batch_of_two(strategy):
    state = (Weight(1.0),)
    with refused(ValueError, r"key has shape \(2,\) and dtype uint32.*jax.random.key", *state):
        dp_step = nnx_dp.data_parallel(noise_step, strategy=strategy, devices=2)
        dp_step(*state, BATCHES[0][0], jax.random.PRNGKey(0))


class TrainState(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer
    metric: Any = None


@every_strategy
def test_state_inside_a_named_tuple(strategy):
    """https://github.com/google/flax/issues/5113: a module in a NamedTuple is broadcast."""

    def step(state, x, y):
        return train_step(state.model, state.optimizer, x, y)

    _, (state,), _ = check_against_one_device(
        step, lambda: (TrainState(*linear()),), BATCHES, strategy=strategy
    )
    assert isinstance(state, TrainState)
    assert state.model.kernel[...].sharding.is_fully_replicated


@every_strategy
@pytest.mark.parametrize("passed", ["both", "optimizer"])
def test_optimizer_that_holds_its_model(strategy, passed):
    """https://github.com/google/flax/pull/4842: one reference, updated once."""

    def make():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
        return (model, optimizer) if passed == "both" else (optimizer,)

    def step(*arguments):
        *_, optimizer, x, y = arguments
        loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = make(), make()
    model = state[-1].model
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), step(*plain, *batch))
        assert_same(state, plain)
    assert state[-1].model is model
    assert state[0] is model or passed == "optimizer"


class Tied(nnx.Module):
    """An embedding that is also the output layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.head = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
        self.output = self.embed

    def __call__(self, tokens):
        return self.output.attend(self.embed(tokens)) + self.head(self.embed(tokens))


@every_strategy
def test_tied_embeddings(strategy):
    def step(model, optimizer, tokens, targets):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = Tied()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    tokens = np.random.default_rng(0).integers(0, 5, (2, 8, 6))
    batches = [(t, np.roll(t, 1, axis=1)) for t in tokens]
    _, (model, _), _ = check_against_one_device(step, make, batches, strategy=strategy)
    assert model.output is model.embed


@every_strategy
def test_same_module_passed_twice(strategy):
    def step(first, second, optimizer, x, y):
        assert first is second
        return train_step(second, optimizer, x, y)

    def make():
        model, optimizer = linear()
        return model, model, optimizer

    check_against_one_device(step, make, BATCHES, strategy=strategy)


@every_strategy
@pytest.mark.parametrize("devices", [1, 4])
def test_batch_norm_that_names_the_axis_itself(strategy, devices):
    """https://github.com/google/flax/issues/2606, /1250: the axis is not bound outside pmap."""
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=devices)
    state, plain = normalised(axis_name="data"), normalised()
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch), rtol=1e-4)
        assert_same(state, plain, rtol=1e-4)
    assert state[0].norm.axis_name == "data"

    state[0].eval()
    plain[0].eval()
    dp_eval = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy, devices=devices)
    for x, _ in BATCHES:
        assert_same(dp_eval(state[0], x), plain[0](x), rtol=1e-4)
        # Nothing is bound here; a model in eval mode needs nothing.
        assert_same(state[0](x), plain[0](x), rtol=1e-4)


@every_strategy
def test_batch_norm_that_names_another_axis_is_refused(strategy):
    state = normalised(axis_name="batch")
    with refused(Exception, "batch", *state):
        nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)(*state, *BATCHES[0])
