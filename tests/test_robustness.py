"""What a step goes through in the field: threads, copies, interrupts, odd dtypes, odd sizes."""

import copy
import functools
import pickle
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    STRATEGIES,
    assert_same,
    check_against_one_device,
    linear,
    refused,
    regression,
    train_step,
)

import nnx_dp
from nnx_dp._context import current
from nnx_dp._interrupt import to_its_end
from nnx_dp._snapshot import Snapshot


@nnx_dp.data_parallel(strategy="shard_map", devices=2)
def module_level_step(model, optimizer, x, y):
    return train_step(model, optimizer, x, y)


class Trainer:
    @nnx_dp.data_parallel(devices=2)
    def step(self, model, optimizer, x, y):
        return train_step(model, optimizer, x, y)


# --- Copies ---------------------------------------------------------------------------------------


def test_step_pickles_by_its_name():
    assert pickle.loads(pickle.dumps(module_level_step)) is module_level_step
    assert pickle.loads(pickle.dumps(Trainer.step)) is Trainer.step


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_a_step_is_a_step(copied):
    assert copied(module_level_step) is module_level_step
    state, plain = linear(), linear()
    step = nnx_dp.data_parallel(train_step, strategy="shard_map", devices=2, donate=True)
    expected = train_step(*plain, *regression())
    assert_same(copied(step)(*state, *regression()), expected)
    assert_same(state, plain)


def test_step_made_by_a_call_pickles_with_what_it_was_told():
    step = nnx_dp.data_parallel(train_step, strategy="shard_map", devices=2, rngs=("dropout",))
    again = pickle.loads(pickle.dumps(step))
    assert again is not step
    assert repr(again) == repr(step)
    state, plain = linear(), linear()
    again(*state, *regression())
    train_step(*plain, *regression())
    assert_same(state, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deepcopy_of_a_model_goes_its_own_way(strategy):
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=2)
    state, plain = linear(), linear()
    step(*state, *regression())
    train_step(*plain, *regression())
    twin, plain_twin = copy.deepcopy(state), copy.deepcopy(plain)
    for seed in (1, 2):
        step(*twin, *regression(seed=seed))
        train_step(*plain_twin, *regression(seed=seed))
    assert_same(twin, plain_twin)
    assert_same(state, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pickled_model_trains_on(strategy):
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=2)
    model, optimizer = linear()
    plain = linear()
    step(model, optimizer, *regression())
    train_step(*plain, *regression())
    model = pickle.loads(pickle.dumps(model))
    fresh = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    fresh_plain = nnx.Optimizer(plain[0], optax.sgd(0.1), wrt=nnx.Param)
    step(model, fresh, *regression(seed=1))
    train_step(plain[0], fresh_plain, *regression(seed=1))
    assert_same(model, plain[0])


# --- Threads and interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_call_two_steps_at_once(strategy):
    def other_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.sum((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    plain_steps = (train_step, other_step)
    steps = [nnx_dp.data_parallel(s, strategy=strategy, devices=2) for s in plain_steps]
    states = [linear(0.01, seed) for seed in range(4)]
    plain = [linear(0.01, seed) for seed in range(4)]
    start, failed = threading.Barrier(4), []

    def work(thread):
        try:
            start.wait(60)
            for seed in range(5):
                steps[thread % 2](*states[thread], *regression(seed=seed))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failed
    for thread in range(4):
        for seed in range(5):
            plain_steps[thread % 2](*plain[thread], *regression(seed=seed))
        assert_same(states[thread], plain[thread])


def test_another_thread_differentiates_plainly_while_a_step_is_traced():
    tracing, done, seen = threading.Event(), threading.Event(), []

    def step(model, x):
        def loss_fn(model):
            tracing.set()
            assert done.wait(60)
            return jnp.mean(model(x) ** 2)

        return nnx.grad(loss_fn)(model)

    def outside():
        assert tracing.wait(60)
        model, _ = linear()
        seen.append(current())
        seen.append(nnx.grad(lambda model: jnp.mean(model(jnp.ones((2, 3))) ** 2))(model))
        done.set()

    other = threading.Thread(target=outside)
    other.start()
    model, _ = linear()
    nnx_dp.data_parallel(step, strategy="shard_map", devices=2)(model, regression()[0])
    other.join(60)
    context, grads = seen
    assert context is None
    expected = nnx.grad(lambda model: jnp.mean(model(jnp.ones((2, 3))) ** 2))(linear()[0])
    assert_same(list(jax.tree.leaves(grads)), list(jax.tree.leaves(expected)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", ["in a gradient", "after the update"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError, ValueError])
def test_nothing_is_half_done_after_an_interrupt_in_a_trace(strategy, when, error):
    interrupted = [True]

    def step(model, optimizer, x, y):
        def loss_fn(model):
            loss = jnp.mean((model(x) - y) ** 2)
            if when == "in a gradient" and interrupted[0]:
                raise error("stop")
            return loss

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        if interrupted[0]:
            raise error("stop")
        return loss

    state, plain = linear(), linear()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=2)
    with refused(error, "stop", *state):
        dp_step(*state, *regression())
    assert current() is None
    interrupted[0] = False
    for seed in range(2):
        assert_same(
            dp_step(*state, *regression(seed=seed)), train_step(*plain, *regression(seed=seed))
        )
    assert_same(state, plain)


class Counts(nnx.Module):
    def __init__(self, kind=nnx.Variable):
        self.counts = nnx.List([kind(jnp.zeros(())) for _ in range(50)])


def count(model, x):
    for index, held in enumerate(model.counts):
        held[...] += index + 1
    return x.shape


def assert_counted(model, calls):
    counted = [float(held[...]) for held in model.counts]
    assert counted == [calls * (index + 1) for index in range(50)]


def test_interrupt_while_a_step_runs_leaves_whole_state():
    step = nnx_dp.data_parallel(count, strategy="shard_map", devices=2)
    model, (x, _), calls = Counts(), regression(), 0

    def run():
        nonlocal calls
        while True:
            step(model, x)
            calls += 1

    step(model, x)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(10):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                run()
            # The last call may have been over, but for the return, when the signal came.
            done = int(model.counts[0][...])
            assert done - 1 in (calls, calls + 1)
            calls = done - 1
            assert_counted(model, done)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    step(model, x)
    assert_counted(model, calls + 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_interrupt_in_the_middle_of_writing_back(strategy):
    armed = [False]

    class Interrupted(nnx.Variable):
        def set_raw_value(self, value, **kwargs):
            if armed[0] and float(self[...]) == 0 and value is not self.get_raw_value():
                armed[0] = isinstance(value, jax.core.Tracer)
                if not armed[0]:
                    raise KeyboardInterrupt
            super().set_raw_value(value, **kwargs)

    model, (x, _) = Counts(), regression()
    model.counts[25] = Interrupted(jnp.zeros(()))
    step = nnx_dp.data_parallel(count, strategy=strategy, devices=2)
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        step(model, x)
    assert_counted(model, 1)


class Interrupting(list):
    """Values of which one is interrupted, once, while it is read."""

    interrupted = False

    def __iter__(self):
        for index, value in enumerate(super().__iter__()):
            if index == 20 and not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            yield value


def test_interrupt_in_the_middle_of_writing_a_repeated_call_back():
    model = Counts()
    snapshot = Snapshot([model])
    values = Interrupting([jnp.float32(index + 1) for index in range(50)])
    with pytest.raises(KeyboardInterrupt):
        to_its_end(lambda: snapshot.write(values))
    assert_counted(model, 1)


# --- Sizes ----------------------------------------------------------------------------------------


class Chain(nnx.Module):
    """A module in a module in a module."""

    def __init__(self, depth):
        self.scale = nnx.Param(jnp.ones(()))
        self.inner = Chain(depth - 1) if depth else None

    def __call__(self, x):
        x = x * self.scale[...]
        return x if self.inner is None else self.inner(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deeply_nested_modules(strategy):
    def make():
        model = Chain(60)
        return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    batches = [regression(seed=seed) for seed in range(2)]
    check_against_one_device(step, make, batches, strategy=strategy, devices=2, rtol=1e-4)


def test_nesting_too_deep_for_flax_is_an_error_that_changes_nothing():
    model = Chain(1)
    for _ in range(5000):
        outer = Chain(0)
        outer.inner = nnx.data(model)
        model = outer
    step = nnx_dp.data_parallel(lambda model, x: model(x), devices=2)
    with pytest.raises(RecursionError):
        step(model, jnp.ones((4, 3)))
    assert current() is None
    assert model.scale[...] == 1


# XLA takes minutes to partition a program of 10,000 arrays, whoever wrote it.
@pytest.mark.parametrize(
    ("strategy", "devices", "variables"), [("jit", 1, 10_000), ("shard_map", 2, 1_000)]
)
def test_very_many_variables(strategy, devices, variables):
    class Many(nnx.Module):
        def __init__(self):
            self.weights = nnx.List([nnx.Param(jnp.float32(i)) for i in range(variables)])

    def step(model, x):
        for weight in model.weights[-3:]:
            weight[...] = weight[...] + nnx_dp.pmean(jnp.mean(x))
        return jnp.mean(x)

    model, plain = Many(), Many()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=devices)
    for seed in range(3):
        x, _ = regression(seed=seed)
        dp_step(model, x)
        step(plain, x)
    ours, theirs = ([float(w[...]) for w in m.weights] for m in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_without_parameters(strategy):
    class Nothing(nnx.Module):
        def __call__(self, x):
            return x * 2

    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = Nothing()
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    batches = [regression(seed=seed) for seed in range(2)]
    check_against_one_device(step, make, batches, strategy=strategy)


# --- Dtypes and values ----------------------------------------------------------------------------


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_to_its_own_precision(strategy):
    def make():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    batches = [tuple(a.astype(np.float64) for a in regression(seed=seed)) for seed in range(3)]
    _, (model, _), loss = check_against_one_device(
        train_step, make, batches, strategy=strategy, rtol=1e-12, atol=1e-13
    )
    assert loss.dtype == model.kernel[...].dtype == jnp.float64


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_complex_parameters(strategy):
    class Complex(nnx.Module):
        def __init__(self):
            key = jax.random.key(0)
            self.kernel = nnx.Param(jax.random.normal(key, (3, 1), jnp.complex64))

        def __call__(self, x):
            return x @ self.kernel[...]

    def step(model, x, y):
        loss_fn = lambda model: jnp.mean(jnp.abs(model(x) - y) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        update = lambda p, g: p - 0.1 * jnp.conj(g)  # noqa: E731
        nnx.update(model, jax.tree.map(update, nnx.state(model, nnx.Param), grads))
        return loss

    batches = [regression(seed=seed) for seed in range(3)]
    check_against_one_device(step, lambda: (Complex(),), batches, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_int8_parameters_beside_trained_ones(strategy):
    class Quantised(nnx.Module):
        def __init__(self):
            self.weight = nnx.Variable(jnp.arange(-3, 3, dtype=jnp.int8).reshape(3, 2))
            self.scale = nnx.Param(jnp.full((1, 1), 0.1))

        def __call__(self, x):
            return x @ self.weight[...].astype(jnp.float32) * self.scale[...]

    def make():
        model = Quantised()
        return model, nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

    batches = [regression(seed=seed) for seed in range(3)]
    _, (model, _), _ = check_against_one_device(train_step, make, batches, strategy=strategy)
    assert model.weight[...].dtype == jnp.int8


def message_of(call):
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["int8 parameter", "integer loss"])
def test_what_cannot_be_differentiated_says_what_jax_says(strategy, kind):
    class Weight(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((3, 1), jnp.int8 if kind == "int8 parameter" else None))

    def step(model, x):
        def loss_fn(model):
            loss = jnp.mean(x @ model.w[...].astype(jnp.float32))
            return loss.astype(jnp.int32) if kind == "integer loss" else loss

        return nnx.grad(loss_fn)(model)

    x, _ = regression()
    plain = message_of(lambda: step(Weight(), x))
    model = Weight()
    with refused(TypeError, "grad requires", model):
        nnx_dp.data_parallel(step, strategy=strategy, devices=2)(model, x)
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=2)
    assert message_of(lambda: dp_step(model, x)).splitlines()[0] == plain.splitlines()[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_is_what_it_is_on_one_device(strategy):
    x, y = regression()
    bad = x.copy()
    bad[-1, 0] = np.nan  # on the last device alone
    batches = [(x, y), (bad, y), (x, y)]
    _, (model, _), loss = check_against_one_device(train_step, linear, batches, strategy=strategy)
    assert np.isnan(loss)
    assert np.isnan(model.kernel[...]).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_is_skipped_where_a_gradient_is_not_finite(strategy):
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        finite = jnp.isfinite(optax.tree.norm(grads))
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        optimizer.update(model, safe)
        return loss, finite

    x, y = regression()
    bad = x.copy()
    bad[0, 0] = np.inf
    batches = [(x, y), (bad, y), (x, y)]
    check_against_one_device(step, linear, batches, strategy=strategy)


# --- Random steps ---------------------------------------------------------------------------------

ACTIVATIONS = {"relu": nnx.relu, "tanh": jnp.tanh, "gelu": nnx.gelu}


class Net(nnx.Module):
    def __init__(self, layers, shared):
        rngs, width, self.layers, self.shared = nnx.Rngs(0), 3, nnx.List(), shared
        for kind in layers:
            if kind == "norm":
                self.layers.append(nnx.LayerNorm(width, rngs=rngs))
            elif kind == "batch norm":
                self.layers.append(nnx.BatchNorm(width, rngs=rngs))
            elif kind in ACTIVATIONS:
                self.layers.append(ACTIVATIONS[kind])
            else:
                self.layers.append(nnx.Linear(width, width, rngs=rngs))
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        for layer in list(self.layers) * (2 if self.shared else 1):
            x = layer(x)
        return self.head(x)


LOSSES = {
    "mean": lambda e: jnp.mean(e**2),
    "sum": lambda e: jnp.sum(e**2),
    "mean of sums": lambda e: jnp.mean(jnp.sum(e**2, axis=-1)),
    "scaled": lambda e: 3.0 * jnp.mean(jnp.abs(e)) / 7.0,
    "by size": lambda e: jnp.sum(e**2) / e.shape[0],
    "masked": lambda e: nnx_dp.mean(e[:, 0] ** 2, where=e[:, 0] > -10.0),
}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    layers=st.lists(
        st.sampled_from(["linear", "norm", "batch norm", *ACTIVATIONS]), min_size=0, max_size=4
    ),
    shared=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    penalty=st.sampled_from([0.0, 1e-2]),
    clip=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
    devices=st.sampled_from([2, 4]),
)
def test_random_steps(layers, shared, loss, penalty, clip, strategy, devices):
    def make():
        model = Net(layers, shared)
        chain = [optax.clip_by_global_norm(0.5)] if clip else []
        # Not Adam: where a gradient is zero but for rounding, it divides the rounding by itself.
        tx = optax.chain(*chain, optax.sgd(0.01, momentum=0.9))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss_fn(model):
            output = model(x)
            value = LOSSES[loss](output - y)
            if penalty and loss != "sum":
                value += penalty * sum(
                    jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param))
                )
            return value, output

        (value, output), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return value, output, optax.tree.norm(grads)

    batches = [regression(seed=seed) for seed in range(2)]
    check = functools.partial(check_against_one_device, step, make, batches)
    check(strategy=strategy, devices=devices, rtol=1e-3, atol=1e-4)
