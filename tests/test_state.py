"""State is the same on every device, and what one device would have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    snapshot,
    train_step,
)

import nnx_dp

BATCHES = [regression(seed=0), regression(seed=1), regression(seed=2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_batch_norm_is_exact(masked, fast, strategy):
    def step(bn, x, y):
        return bn(x, mask=jnp.abs(x[:, :1]) > 0.5) if masked else bn(x)

    def make():
        return (nnx.BatchNorm(3, use_fast_variance=fast, rngs=nnx.Rngs(0)),)

    check_against_one_device(step, make, BATCHES, strategy=strategy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_through_masked_batch_norm(strategy):
    def step(bn, x, y):
        def loss_fn(bn):
            return jnp.mean(bn(x, mask=jnp.abs(x[:, :1]) > 0.5) ** 3)

        grads = nnx.grad(loss_fn)(bn)
        params = nnx.state(bn, nnx.Param)
        nnx.update(bn, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    def make():
        return (nnx.BatchNorm(3, rngs=nnx.Rngs(0)),)

    check_against_one_device(step, make, BATCHES, strategy=strategy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_sync_batch_norm_false_normalises_on_each_device(strategy):
    x, _ = regression()
    bn = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    step = nnx_dp.data_parallel(
        lambda bn, x: bn(x), strategy=strategy, devices=4, sync_batch_norm=False
    )
    out = step(bn, x)
    shards = x.reshape(4, 2, 3)
    means, variances = shards.mean(1), shards.var(1)
    np.testing.assert_allclose(bn.mean[...], 0.5 * means.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bn.var[...], 0.5 + 0.5 * variances.mean(0), rtol=1e-4, atol=1e-5)
    expected = (shards - means[:, None]) / np.sqrt(variances[:, None] + bn.epsilon)
    np.testing.assert_allclose(out, expected.reshape(8, 3), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_that_names_the_data_axis(strategy):
    """It also runs where that axis is not bound; the plain step has no axis to name."""

    def make(axis_name="data"):
        return (nnx.BatchNorm(3, axis_name=axis_name, rngs=nnx.Rngs(0)),)

    step = nnx_dp.data_parallel(lambda bn, x: bn(x), strategy=strategy, devices=4)
    (bn,), (plain,) = make(), make(None)
    for x, _ in BATCHES:
        assert_same(step(bn, x), plain(x), rtol=1e-4, atol=1e-5)
        assert_same(nnx.state(bn), nnx.state(plain), rtol=1e-4, atol=1e-5)
    assert bn.axis_name == "data"


METRICS = {
    "average": (lambda: nnx.metrics.Average(), lambda m, v, y: m.update(values=v)),
    "scalar": (lambda: nnx.metrics.Average(), lambda m, v, y: m.update(values=v.mean())),
    "number": (lambda: nnx.metrics.Average(), lambda m, v, y: m.update(values=2.0)),
    "masked": (lambda: nnx.metrics.Average(), lambda m, v, y: m.update(values=v, mask=v > 0)),
    "welford": (lambda: nnx.metrics.Welford(), lambda m, v, y: m.update(values=v)),
    "welford scalar": (lambda: nnx.metrics.Welford(), lambda m, v, y: m.update(values=v.mean())),
    "binary accuracy": (
        lambda: nnx.metrics.Accuracy(threshold=0.5),
        lambda m, v, y: m.update(logits=v, labels=(y[:, 0] > 0).astype(jnp.int32)),
    ),
    "several": (
        lambda: nnx.MultiMetric(a=nnx.metrics.Average("a"), b=nnx.metrics.Welford("b")),
        lambda m, v, y: m.update(a=v, b=v * 2),
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", METRICS)
def test_metric_is_exact(name, strategy):
    make_metric, update = METRICS[name]

    def step(model, metric, x, y):
        update(metric, model(x)[:, 0], y)
        return metric.compute()

    check_against_one_device(
        step, lambda: (linear()[0], make_metric()), BATCHES, strategy=strategy, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metric_may_be_reset_or_made_inside_the_step(strategy):
    def step(model, metric, x, y):
        metric.reset()
        metric.update(values=model(x))
        metric.update(values=model(x) ** 2)
        fresh = nnx.metrics.Average()
        fresh.update(values=model(x))
        return metric.compute(), fresh.compute()

    check_against_one_device(
        step, lambda: (linear()[0], nnx.metrics.Average()), BATCHES, strategy=strategy, rtol=1e-4
    )


class Counter(nnx.Variable):
    pass


class WithCounter(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.seen = Counter(jnp.zeros((), jnp.int32))
        self.loss = nnx.Variable(jnp.zeros(()))


def count(model, x, y):
    model.seen[...] += x.shape[0]


def store_mean(model, x, y):
    model.loss[...] = model.linear(x).mean()


def store_largest(model, x, y):
    model.loss[...] = model.linear(x).max()


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    ("step", "match"),
    [
        (count, r"model\.seen would be equal on all 4 devices, but not be what one device"),
        (store_mean, r"model\.loss would differ between the 4 devices"),
        (store_largest, r"model\.loss would differ between the 4 devices"),
    ],
)
def test_state_that_varies_is_refused_by_path(step, match, strategy):
    model = WithCounter(nnx.Rngs(0))
    with refused(ValueError, match, model):
        nnx_dp.data_parallel(step, strategy=strategy, devices=4)(model, *regression())


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    ("step", "rules"),
    [
        (count, {Counter: "accumulate"}),
        (store_mean, {nnx.PathContains("loss"): "mean", ...: "sum"}),
        (store_largest, {Counter: "sum", nnx.Variable: "max"}),
        (store_mean, {nnx.Variable: lambda old, new: nnx_dp.pmean(new) + 0 * old}),
    ],
)
def test_state_reduce_rules(step, rules, strategy):
    check_against_one_device(
        step,
        lambda: (WithCounter(nnx.Rngs(0)),),
        BATCHES,
        strategy=strategy,
        state_reduce=rules,
    )


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_rule_for_everything_leaves_alone_what_needs_none(strategy):
    def step(model, x, y):
        count(model, x, y)
        model.loss[...] = 0.5 * model.loss[...] + 1

    check_against_one_device(
        step,
        lambda: (WithCounter(nnx.Rngs(0)),),
        BATCHES,
        strategy=strategy,
        state_reduce={...: "accumulate"},
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counter_with_a_collective_is_exact(strategy):
    def step(model, x, y):
        model.seen[...] += nnx_dp.psum(x.shape[0])
        model.loss[...] = 0.9 * model.loss[...] + 0.1 * nnx_dp.pmean(model.linear(x).mean())

    check_against_one_device(step, lambda: (WithCounter(nnx.Rngs(0)),), BATCHES, strategy=strategy)


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.ones((x.shape[0], 64)))


def make_noisy():
    return (Noisy(nnx.Rngs(0, dropout=1)),)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_dropout_differs_between_devices_and_calls(strategy):
    (model,), (plain,) = make_noisy(), make_noisy()
    x, _ = regression()
    step = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy, devices=4)
    masks = []
    for _ in range(2):
        masks += list(np.array(step(model, x)).reshape(4, 2, 64))
        plain(x)
    assert len({mask.tobytes() for mask in masks}) == 8
    assert 0.4 < np.mean(np.array(masks) == 0) < 0.6
    assert_same(nnx.state(model, nnx.RngState), nnx.state(plain, nnx.RngState))


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("rngs", ["broadcast", "dropout", ("dropout", "other")])
def test_rngs_keep_a_stream_the_same_on_all_devices(rngs, strategy):
    (model,) = make_noisy()
    x, _ = regression()
    step = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy, devices=4, rngs=rngs)
    shards = np.array(step(model, x)).reshape(4, 2, 64)
    assert len({shard.tobytes() for shard in shards}) == 1


def test_dropout_under_jit_is_that_of_one_device_to_the_bit():
    (model,), (plain,) = make_noisy(), make_noisy()
    step = nnx_dp.data_parallel(lambda model, x: model(x), strategy="jit", devices=4)
    for x, _ in BATCHES:
        np.testing.assert_array_equal(step(model, x), plain(x))


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_key_argument_is_folded_on_each_device(strategy):
    def step(x, key):
        return x * 0 + jax.random.normal(key, (x.shape[0], 3))

    x, _ = regression()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    shards = np.array(dp_step(x, jax.random.key(0))).reshape(4, 2, 3)
    assert len({shard.tobytes() for shard in shards}) == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_new_variables_and_attributes_reach_the_callers_model(strategy):
    def step(model, x, y):
        if not hasattr(model, "calls"):
            model.calls = nnx.Variable(jnp.zeros(()))
            model.first_seen = True
        model.calls[...] += 1
        return model(x)

    check_against_one_device(step, lambda: linear()[:1], BATCHES, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.adam(1e-2),
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        lambda: optax.MultiSteps(optax.sgd(0.1), 2),
        lambda: optax.apply_if_finite(optax.sgd(optax.cosine_decay_schedule(0.1, 10)), 3),
    ],
    ids=["adam", "clipped", "multi_steps", "apply_if_finite"],
)
def test_optimizers(optimizer, donate, strategy):
    tx = optimizer()

    def make():
        model, _ = linear()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    check_against_one_device(train_step, make, BATCHES, strategy=strategy, donate=donate)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("donate", [False, True])
def test_model_optimizer_and_average_of_it(donate, strategy):
    def step(model, average, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        mixed = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, nnx.state(average), nnx.state(model))
        nnx.update(average, mixed)
        return loss

    def make():
        model, optimizer = linear()
        return model, nnx.clone(model), optimizer

    check_against_one_device(step, make, BATCHES, strategy=strategy, donate=donate)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_donated_copy_is_refused_by_path(strategy):
    model, optimizer = linear()
    stepped = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    stepped(model, optimizer, *regression())
    stale = nnx.clone(model)
    stepped(model, optimizer, *regression())
    with pytest.raises(ValueError, match=r"model\.\w+ was donated to an earlier step"):
        stepped(stale, optimizer, *regression())
    stepped(model, optimizer, *regression())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_donation_leaves_the_callers_arrays_alone(strategy):
    weights = jnp.ones((3, 1))
    model, optimizer = linear()
    model.kernel.set_raw_value(weights)
    x, y = map(jnp.asarray, regression())
    stepped = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    stepped(model, optimizer, x, y)
    stepped(model, optimizer, x, y)
    np.testing.assert_array_equal(weights, 1)
    assert not x.is_deleted()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("donate", "fails_at"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_step_that_fails_on_the_device(donate, fails_at, strategy):
    """On one device: where several wait for each other, XLA for the CPU ends the process."""
    calls = []

    def call_outside(loss):
        calls.append(loss)
        if len(calls) == fails_at:
            raise ValueError("a fault")
        return loss

    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        return jax.pure_callback(call_outside, jax.ShapeDtypeStruct((), loss.dtype), loss)

    model, optimizer = linear()
    stepped = nnx_dp.data_parallel(step, strategy=strategy, devices=1, donate=donate)
    for _ in range(fails_at - 1):
        jax.block_until_ready(stepped(model, optimizer, *regression()))
    before = snapshot((model, optimizer))
    lost = donate and fails_at > 1  # At the first call what is donated is a copy.
    message = "the state that was donated to it is lost" if lost else "a fault"
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(stepped(model, optimizer, *regression()))
    if lost:
        with pytest.raises(ValueError, match=r"model\.\w+ was donated to an earlier step"):
            stepped(model, optimizer, *regression())
    else:
        after = snapshot((model, optimizer))
        assert {path: value.tobytes() for path, value in after.items()} == {
            path: value.tobytes() for path, value in before.items()
        }
        stepped(model, optimizer, *regression())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functional_style(strategy):
    """The graph definition is static, the split state is state."""

    def step(graphdef, state, x, y):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    def make():
        return nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))

    check_against_one_device(step, make, BATCHES, strategy=strategy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_is_replicated_and_usable_elsewhere(strategy):
    model, optimizer = linear()
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    x, y = regression()
    step(model, optimizer, x, y)
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.sharding.is_fully_replicated
        copies = {bytes(np.array(shard.data)) for shard in leaf.addressable_shards}
        assert len(copies) == 1
    assert nnx.jit(lambda model, x: model(x))(model, x).shape == (8, 1)
    assert snapshot(model).keys() == snapshot(linear()[0]).keys()
    train_step(model, optimizer, x, y)


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("rule", [None, "mean"])
def test_key_that_is_drawn_anew_has_no_mean(strategy, rule):
    def step(model, x):
        nnx.reseed(model, default=3)
        return model(x)

    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    rules = None if rule is None else {nnx.RngKey: rule}
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=2, state_reduce=rules)
    with refused(ValueError, r"model.rngs.key is a random key .* Keys have no mean", model):
        dp_step(model, regression()[0])


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_key_that_is_drawn_anew_follows_a_function(strategy):
    def step(model, x):
        nnx.reseed(model, default=3)
        return jnp.mean(x)

    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    before = jax.random.key_data(model.rngs.key[...])
    rules = {nnx.RngKey: lambda old, new: old}
    nnx_dp.data_parallel(step, strategy=strategy, devices=2, state_reduce=rules)(
        model, regression()[0]
    )
    np.testing.assert_array_equal(jax.random.key_data(model.rngs.key[...]), before)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_key_among_the_outputs_has_no_mean(strategy):
    step = nnx_dp.data_parallel(
        lambda x: jax.random.key(0), strategy=strategy, devices=2, out_reduce="mean"
    )
    with pytest.raises(ValueError, match="output, which is a random key"):
        step(regression()[0])


class Grown(nnx.Module):
    """Makes its layer at the first call."""

    def __init__(self):
        self.rngs = nnx.Rngs(params=0, dropout=1)
        self.layer = nnx.data(None)

    def __call__(self, x):
        if self.layer is None:
            self.layer = nnx.Linear(3, 2, rngs=self.rngs)
        return self.layer(x)


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize("rngs", ["split", "dropout"])
def test_parameters_made_in_a_step_are_those_of_one_device(strategy, rngs):
    def step(model, x):
        return jnp.mean(model(x) ** 2)

    model, plain = Grown(), Grown()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, rngs=rngs)
    for seed in range(2):
        x, _ = regression(seed=seed)
        assert_same(dp_step(model, x), step(plain, x))
    assert_same(model, plain)
