"""What noise cannot touch: collectives, bytes, FLOPs and number of compiled steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import STRATEGIES, assert_same, linear, regression, train_step

import nnx_dp
from nnx_dp._hlo import find_collectives

pytestmark = pytest.mark.usefixtures("optimised")

LOWERED = ("jit", "shard_map")


def collectives(compiled):
    """Returns (operation, bytes, whether inside a loop) of each collective of a program."""
    return [(c.kind, c.nbytes, c.in_loop) for c in find_collectives(compiled.as_text())]


class Stack(nnx.Module):
    def __init__(self, width, layers=3):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class Scanned(nnx.Module):
    def __init__(self, width, layers=3):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(width, width, rngs=rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def layer(linear, x):
            return nnx.relu(linear(x))

        return layer(self.layers, x)


class Recurrent(nnx.Module):
    def __init__(self, width):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x[:, None] * jnp.ones((5, 1)))[:, -1]


def with_sgd(model):
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def gradient_bytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def accumulating_step(model, optimizer, x, y):
    loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
    loss, grads = nnx_dp.accumulate(loss_fn, 4)(model, x, y)
    optimizer.update(model, grads)
    return loss


def compiled(step, state, *batch, **options):
    return nnx_dp.data_parallel(step, **options).lower(*state, *batch).compile()


def batch(rows, width):
    x = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    return x, np.roll(x, 1)


@pytest.mark.parametrize("strategy", LOWERED)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_each_byte_of_the_gradient_crosses_once(strategy, devices):
    state = with_sgd(Stack(64))
    program = compiled(train_step, state, *batch(64, 64), strategy=strategy, devices=devices)
    found = collectives(program)
    assert {name for name, _, _ in found} == {"all-reduce"}
    assert len(found) == 1, "gradients are reduced in one go"
    assert sum(size for _, size, _ in found) <= 1.01 * gradient_bytes(state[0]) + 1024


@pytest.mark.parametrize(
    ("make", "step", "strategies"),
    [
        (Scanned, train_step, ("shard_map",)),
        # XLA for the CPU leaves the reduction of what a loop adds up inside the loop.
        (Recurrent, train_step, ("shard_map",)),
        (Stack, accumulating_step, LOWERED),
        (Scanned, accumulating_step, LOWERED),
    ],
    ids=["scan", "rnn", "accumulate", "accumulate a scan"],
)
def test_loops_talk_once_after_the_loop(make, step, strategies):
    for strategy in strategies:
        state = with_sgd(make(16))
        program = compiled(step, state, *batch(64, 16), strategy=strategy, devices=4)
        found = collectives(program)
        assert {name for name, _, _ in found} == {"all-reduce"}, strategy
        assert not any(in_loop for _, _, in_loop in found), strategy
        assert sum(size for _, size, _ in found) <= 1.01 * gradient_bytes(state[0]) + 1024


def test_scanned_layers_under_jit_cross_once_each():
    state = with_sgd(Scanned(16))
    found = collectives(compiled(train_step, state, *batch(64, 16), strategy="jit", devices=4))
    each = gradient_bytes(state[0]) / 3
    assert sum(size for _, size, in_loop in found if in_loop) <= 1.01 * each
    assert sum(size for _, size, in_loop in found if not in_loop) <= 1024


@pytest.mark.parametrize("strategy", LOWERED)
@pytest.mark.parametrize(
    ("devices", "step"), [(2, train_step), (8, train_step), (4, accumulating_step)]
)
def test_arithmetic_is_divided_by_the_devices(strategy, devices, step):
    def flops(devices):
        state = with_sgd(Stack(32))
        program = compiled(step, state, *batch(4096, 32), strategy=strategy, devices=devices)
        return program.cost_analysis()["flops"]

    assert flops(devices) <= 1.02 * flops(1) / devices


@pytest.mark.parametrize("strategy", LOWERED)
def test_valid_items_are_counted_for_free(strategy):
    def step(model, optimizer, x, y, mask):
        def loss_fn(model, x, y, mask):
            return nnx_dp.mean(jnp.mean((model(x) - y) ** 2, axis=-1), where=mask)

        loss, grads = nnx_dp.accumulate(loss_fn, 4)(model, x, y, mask)
        optimizer.update(model, grads)
        return loss

    def flops(step, *batch):
        state = with_sgd(Stack(32))
        program = compiled(step, state, *batch, strategy=strategy, devices=4)
        return program.cost_analysis()["flops"]

    x, y = batch(1024, 32)
    mask = np.arange(1024) % 3 == 0
    assert flops(step, x, y, mask) <= 1.02 * flops(accumulating_step, x, y)


def test_memory_of_accumulation_is_that_of_a_microbatch():
    def bytes_for(microbatches):
        def step(model, x, y):
            loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
            return nnx_dp.accumulate(loss_fn, microbatches)(model, x, y)

        model = Stack(32, layers=12)
        program = compiled(step, (model,), *batch(4096, 32), strategy="shard_map", devices=2)
        return program.memory_analysis().temp_size_in_bytes

    whole, quarter, sixteenth = bytes_for(1), bytes_for(4), bytes_for(16)
    assert quarter < 0.6 * whole
    assert sixteenth < 0.6 * quarter


@pytest.mark.parametrize("strategy", LOWERED)
def test_step_needs_no_more_memory_than_a_functional_one(strategy):
    model, optimizer = with_sgd(Stack(64, layers=6))
    x, y = batch(1024, 64)
    program = compiled(train_step, (model, optimizer), x, y, strategy=strategy, devices=2)

    graphdef, params = nnx.split(model)

    def loss_fn(params, x, y):
        return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

    @jax.jit
    def functional(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    alone = functional.lower(params, x[:512], y[:512]).compile()
    ours, theirs = (p.memory_analysis().temp_size_in_bytes for p in (program, alone))
    # The all-reduce needs a buffer for what it reduces; a step on one device has no such thing.
    assert ours <= 1.02 * theirs + gradient_bytes(model) + 1024


class Rematerialised(Scanned):
    """Layers that are computed again in the backward pass; see docs/performance.md for `graph=`."""

    def __init__(self, width, layers, **options):
        super().__init__(width, layers)
        self.options = tuple(options.items())

    def __call__(self, x):
        layer = nnx.remat(lambda linear, x: nnx.relu(linear(x)), **dict(self.options))
        return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.parametrize("strategy", LOWERED)
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_stack_needs_no_more_memory_than_a_functional_one(remat, strategy):
    layers = 16
    model = Rematerialised(64, layers, graph=False) if remat else Scanned(64, layers)
    state = with_sgd(model)
    x, y = batch(256, 64)
    program = compiled(train_step, state, x, y, strategy=strategy, devices=2)
    graphdef, params = nnx.split(model.layers)

    def layer(params, x):
        return nnx.relu(nnx.merge(graphdef, params)(x))

    @jax.jit
    def functional(params, x, y):
        def loss_fn(params, x, y):
            body = jax.checkpoint(layer) if remat else layer
            x, _ = jax.lax.scan(lambda x, params: (body(params, x), None), x, params)
            return jnp.mean((x - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    mesh = nnx_dp.data_parallel(train_step, devices=2).mesh
    params = jax.device_put(params, NamedSharding(mesh, P()))
    theirs = functional.lower(params, *nnx_dp.shard_batch((x, y), mesh=mesh)).compile()
    ours, theirs = (p.memory_analysis().temp_size_in_bytes for p in (program, theirs))
    assert ours <= 1.02 * theirs + 1024


@pytest.mark.parametrize("strategy", LOWERED)
def test_donated_state_is_reused(strategy):
    def peak(donate):
        state = with_sgd(Stack(256, layers=2))
        program = compiled(
            train_step, state, *batch(8, 256), strategy=strategy, devices=2, donate=donate
        )
        memory = program.memory_analysis()
        return memory.output_size_in_bytes - memory.alias_size_in_bytes

    saved = peak(False) - peak(True)
    size = gradient_bytes(Stack(256, layers=2))
    assert 0.98 * size <= saved <= 1.05 * size


class Compilations:
    """Counts what JAX compiles."""

    def __init__(self):
        self.names = []

    def __call__(self, event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(kwargs.get("fun_name", ""))


@pytest.fixture
def compilations():
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax._src.monitoring.unregister_event_duration_listener(counter)


def calls(state, dp_step, batches):
    for x, y in batches:
        jax.block_until_ready(dp_step(*state, x, y))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_signature_is_compiled_once(strategy, compilations):
    traces = []

    def step(model, optimizer, x, y):
        traces.append(1)
        return train_step(model, optimizer, x, y)

    x, y = regression()
    state = linear()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    dp_step(*state, x, y)  # state moves from one device to four here
    first = len(traces)
    ours = [name for name in compilations.names if "function" in name or "step" in name]
    placed = dp_step.shard((x, y))
    dp_step(*state, jnp.asarray(x), jnp.asarray(y))
    del compilations.names[:]
    for batch in ((x, y), (jnp.asarray(x), y), placed, regression(seed=3)):
        calls(state, dp_step, [batch] * 2)
    other = linear(seed=5)
    other[0].kernel[...] = jnp.ones((3, 1)) * 2  # from a computation, on one device
    assert len(traces) == first
    assert not [n for n in compilations.names if "function" in n or "step" in n], ours
    # A fresh optimizer has new functions in it, which is another program for nnx.jit as well; the
    # same one with other state is not.
    optimizer = nnx.Optimizer(other[0], state[1].tx, wrt=nnx.Param)
    dp_step(other[0], optimizer, x, y)
    assert len(traces) == first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weakly_typed_state_is_compiled_for_once(strategy):
    traces = []

    def step(scale, x):
        traces.append(1)
        return x * scale.factor[...]

    class Scale(nnx.Module):
        def __init__(self):
            self.factor = nnx.Param(jnp.asarray(2.0))  # weakly typed

    dp_step, scale = nnx_dp.data_parallel(step, strategy=strategy, devices=2), Scale()
    x = regression()[0]
    assert_same(dp_step(scale, x), 2 * x)
    first = len(traces)
    for _ in range(2):
        assert_same(dp_step(scale, x), 2 * x)
    assert len(traces) == first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_train_and_eval_are_two_programs(strategy):
    traces = []

    def step(model, x):
        traces.append(1)
        return model(x)

    model = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=2)
    seen = []
    for _ in range(3):
        for mode in (model.train, model.eval):
            mode()
            dp_step(model, regression()[0])
            seen.append(len(traces))
    assert seen[1:] == [seen[1]] * 5
