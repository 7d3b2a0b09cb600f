"""What each argument of a step is: state, batch, replicated or static.

However the arguments come in (positional, keyword, default, held by a partial or a method, inside a
container), the decorated step does what the undecorated one does on one device.
"""

import dataclasses
import enum
import functools
from typing import NamedTuple

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
    train_step,
)

import nnx_dp

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
per_device_strategies = pytest.mark.parametrize("strategy", PER_DEVICE)

BATCHES = [regression(seed=1), regression(seed=2)]


def model_only():
    return linear()[:1]


# -------------------------------------------------------------------------------------------------
# in_axes


def feature_major_step(model, optimizer, x, y):
    return train_step(model, optimizer, x.T, y)


@every_strategy
@pytest.mark.parametrize(
    "in_axes",
    [
        (None, None, 1, 0),
        [None, None, 1, 0],
        (None, None, -1, -2),
        (..., ..., 1, ...),
        {"x": 1},
        {"x": 1, "model": None, "y": ...},
        (nnx.StateAxes({...: None}), nnx.StateAxes({...: None}), 1, 0),
        (nnx.StateAxes({nnx.Param: None, ...: None}), None, 1, 0),
    ],
    ids=str,
)
def test_batch_on_another_axis(strategy, in_axes):
    batches = [(x.T, y) for x, y in BATCHES]
    check_against_one_device(
        feature_major_step, linear, batches, strategy=strategy, in_axes=in_axes
    )


@every_strategy
def test_every_argument_on_the_same_other_axis(strategy):
    def step(x, y):
        return (x * y).sum(1, keepdims=True), (x - y).mean()

    batches = [(x.T, 2 * x.T) for x, _ in BATCHES]
    check_against_one_device(
        lambda x, y: step(x.T, y.T), tuple, batches, strategy=strategy, in_axes=1
    )


@every_strategy
@pytest.mark.parametrize(
    "in_axes",
    [
        {"scale": None},
        (None, 0, None),
        (..., ..., None),
        (None, 0, (None, None)),
        (None, 0, (None, {"shift": None})),
    ],
    ids=str,
)
def test_array_that_is_the_same_for_all_examples(strategy, in_axes):
    """An array of the batch's own length, which would be split if nobody said otherwise."""

    def step(model, x, scale):
        factor, named = scale
        return model(x) * factor.sum() + named["shift"].mean()

    scale = (np.arange(8, dtype=np.float32), {"shift": np.arange(3, dtype=np.float32)})
    batches = [(x, scale) for x, _ in BATCHES]
    check_against_one_device(step, model_only, batches, strategy=strategy, in_axes=in_axes)


@every_strategy
@pytest.mark.parametrize(
    "in_axes",
    [
        (None, {"x": 1, "y": 0, "weight": None}),
        (None, {"x": 1, "y": ..., "weight": None}),
        {"batch": {"x": 1, "y": 0, "weight": None}},
    ],
    ids=str,
)
def test_axes_as_a_prefix_of_a_nested_batch(strategy, in_axes):
    def step(model, batch):
        first, second = batch["x"]
        return (model(first.T) - batch["y"]["target"]) * batch["weight"][1], second.sum()

    batches = [
        ({"x": (x.T, 2 * x.T), "y": {"target": y}, "weight": np.array([1.0, 2.0], np.float32)},)
        for x, y in BATCHES
    ]
    check_against_one_device(step, model_only, batches, strategy=strategy, in_axes=in_axes)


@every_strategy
def test_axes_by_name_for_keywords_defaults_and_variadics(strategy):
    table = np.arange(3, dtype=np.float32)

    def step(model, x, shift=table, *, factors, **more):
        return model(x) + shift.sum() + factors.sum() + more["extra"].sum()

    in_axes = {"shift": None, "factors": None, "extra": None}
    batches = [{"x": x, "factors": np.ones(5, np.float32), "extra": table} for x, _ in BATCHES]
    check_against_one_device(step, model_only, batches, strategy=strategy, in_axes=in_axes)


@every_strategy
def test_old_key_declared_a_batch_of_integers(strategy):
    def step(model, x, ids):
        return model(x) * ids[:, None]

    ids = np.array([3, 4], np.uint32)
    batches = [(x[:2], ids) for x, _ in BATCHES]
    check_against_one_device(
        step, model_only, batches, strategy=strategy, devices=2, in_axes={"ids": 0}
    )


# -------------------------------------------------------------------------------------------------
# How arguments arrive


def keyword_step(model, optimizer, x, y, scale=1.0):
    return train_step(model, optimizer, scale * x, y)


@every_strategy
@pytest.mark.parametrize("named", [0, 2, 4], ids=["positional", "mixed", "keyword"])
def test_positional_and_keyword_arguments(strategy, named):
    dp_step = nnx_dp.data_parallel(keyword_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for batch in BATCHES:
        for scale in ({}, {"scale": 2.0}):
            names = ("model", "optimizer", "x", "y")
            values = (*state, *batch)
            rest = dict(zip(names[4 - named :], values[4 - named :], strict=True))
            # In another order than the signature's.
            rest = dict(reversed(rest.items()))
            loss = dp_step(*values[: 4 - named], **rest, **scale)
            assert_same(loss, keyword_step(*plain, *batch, **scale))
            assert_same(state, plain)


@every_strategy
def test_positional_only_arguments_and_args(strategy):
    def step(model, optimizer, /, *batch, **options):
        x, y = batch
        return train_step(model, optimizer, x * options.get("scale", 1.0), y)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for options in ({}, {"scale": 3.0}, {"scale": np.float32(2)}):
        assert_same(dp_step(*state, *BATCHES[0], **options), step(*plain, *BATCHES[0], **options))
        assert_same(state, plain)


@every_strategy
def test_state_and_batch_among_args_and_kwargs(strategy):
    def step(*args, **kwargs):
        return train_step(args[0], kwargs["optimizer"], args[1], kwargs["y"])

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for x, y in BATCHES:
        loss = dp_step(state[0], x, optimizer=state[1], y=y)
        assert_same(loss, step(plain[0], x, optimizer=plain[1], y=y))
        assert_same(state, plain)


@every_strategy
def test_partial_that_holds_the_model(strategy):
    state, plain = linear(), linear()
    held = functools.partial(functools.partial(keyword_step, scale=0.5), *state)
    dp_step = nnx_dp.data_parallel(held, strategy=strategy, devices=4)
    for batch in BATCHES:
        assert_same(dp_step(*batch), keyword_step(*plain, *batch, scale=0.5))
        assert_same(state, plain)


@every_strategy
def test_partial_with_axes_for_the_remaining_arguments(strategy):
    state, plain = linear(), linear()
    dp_step = nnx_dp.data_parallel(
        functools.partial(feature_major_step, *state),
        strategy=strategy,
        devices=4,
        in_axes=(1, 0),
    )
    for x, y in BATCHES:
        assert_same(dp_step(x.T, y), feature_major_step(*plain, x.T, y))
        assert_same(state, plain)


class Network(nnx.Module):
    """A module that trains itself: its steps are methods, decorated in the class body."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        return self.linear(x)

    def train(self, optimizer, x, y, *, scale=1.0):
        self.calls[...] += 1
        return train_step(self.linear, optimizer, scale * x, y)

    train_jit = nnx_dp.data_parallel(train, strategy="jit", devices=4)
    train_shard_map = nnx_dp.data_parallel(train, strategy="shard_map", devices=4)

    @nnx_dp.data_parallel(strategy="pmap", devices=4)
    def train_pmap(self, optimizer, x, y, *, scale=1.0):
        return self.train(optimizer, x, y, scale=scale)


def network():
    net = Network()
    return net, nnx.Optimizer(net.linear, optax.sgd(0.1), wrt=nnx.Param)


@every_strategy
@pytest.mark.parametrize("how", ["in the class body", "bound", "unbound"])
def test_methods_of_a_module(strategy, how):
    (net, optimizer), (plain, plain_optimizer) = network(), network()
    if how == "in the class body":
        dp_train = getattr(net, f"train_{strategy}")
    elif how == "bound":
        dp_train = nnx_dp.data_parallel(net.train, strategy=strategy, devices=4)
    else:
        dp_step = nnx_dp.data_parallel(Network.train, strategy=strategy, devices=4)
        dp_train = functools.partial(dp_step, net)
    for batch in BATCHES:
        for options in ({}, {"scale": 2.0}):
            loss = dp_train(optimizer, *batch, **options)
            assert_same(loss, plain.train(plain_optimizer, *batch, **options))
            assert_same((net, optimizer), (plain, plain_optimizer))
    assert net.calls[...] == 4


@every_strategy
def test_methods_of_two_modules_do_not_mix(strategy):
    first, second = network(), network()
    train = f"train_{strategy}"
    getattr(first[0], train)(first[1], *BATCHES[0])
    untouched, _ = network()
    assert_same(second[0], untouched)
    getattr(second[0], train)(second[1], *BATCHES[0])
    assert_same(first, second)


@every_strategy
def test_module_as_the_step(strategy):
    net, plain = Network(), Network()
    dp_net = nnx_dp.data_parallel(net, strategy=strategy, devices=4)
    for x, _ in BATCHES:
        assert_same(dp_net(x), plain(x))
    net.linear.bias[...] += 1
    assert_same(dp_net(x), plain(x) + 1)


def test_decorated_step_introduces_itself():
    @nnx_dp.data_parallel(strategy="jit")
    def my_step(model, x):
        """What it does."""

    assert my_step.__name__ == "my_step"
    assert my_step.__doc__ == "What it does."
    assert "my_step" in repr(my_step)


# -------------------------------------------------------------------------------------------------
# Static arguments


class Mode(enum.Enum):
    MSE = "mse"
    MAE = "mae"


@dataclasses.dataclass(frozen=True)
class Config:
    power: int = 2
    name: str = "default"


@every_strategy
@pytest.mark.parametrize("flag", ["positional", "keyword"])
def test_flags_are_traced_once_per_value(strategy, flag):
    traces = []

    def step(model, x, train=True):
        traces.append(train)
        return model(x) if train else 2 * model(x)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    model, (x, _) = model_only()[0], BATCHES[0]
    # The first call may find the state on one device and later ones on all.
    call = lambda v: dp_step(model, x, v) if flag == "positional" else dp_step(model, x, train=v)  # noqa: E731
    for value in (True, False):
        call(value)
    seen = len(traces)
    for value in (True, False, True, False, False):
        assert_same(call(value), model(x) if value else 2 * model(x))
    assert len(traces) == seen


@every_strategy
def test_values_that_are_equal_but_not_the_same_type(strategy):
    """True == 1 == 1.0, and yet a step may tell them apart."""

    def step(model, x, value):
        return model(x) * (2 if isinstance(value, bool) else value)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    model, (x, _) = model_only()[0], BATCHES[0]
    for value in (1, True, 1.0, True, 3, False):
        assert_same(dp_step(model, x, value), step(model, x, value))


@every_strategy
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mse", "mae"),
        (None, "mae"),
        (Mode.MSE, Mode.MAE),
        (Config(), Config(power=3)),
        (jnp.square, jnp.abs),
        (("a", 2), ("b", 2)),
        (jnp.float32, jnp.bfloat16),
        (np.dtype("float32"), np.dtype("int32")),
        ({"mode": "mse"}, {"mode": "mae"}),
        (range(3), range(4)),
    ],
    ids="string None enum dataclass function tuple type dtype dict range".split(),
)
def test_static_values(strategy, first, second):
    def step(model, x, value):
        # Repr sees the value itself, never a tracer.
        return model(x) * (1 + sum(map(ord, repr(value))) % 97)

    # The number in the tuple would be an array in the step, as any number is.
    options = {"static_argnums": 2} if isinstance(first, tuple) else {}
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, **options)
    model, (x, _) = model_only()[0], BATCHES[0]
    for value in (first, second, first):
        assert_same(dp_step(model, x, value), step(model, x, value))


@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 2},
        {"static_argnums": (2,)},
        {"static_argnums": -1},
        {"static_argnames": "sizes"},
        {"static_argnames": ["sizes"]},
    ],
    ids=str,
)
def test_declared_static_argument(strategy, options):
    """A tuple of numbers would be arrays; a shape must be static."""

    def step(model, x, sizes=(1, 1)):
        return model(x).reshape(x.shape[0], *sizes)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, **options)
    model, (x, _) = model_only()[0], BATCHES[0]
    for sizes in ((1, 1), (1,), (1, 1, 1), (1,)):
        assert_same(dp_step(model, x, sizes), step(model, x, sizes))
    if "static_argnames" in options:
        assert_same(dp_step(model, x, sizes=(1,)), step(model, x, (1,)))
        assert_same(dp_step(model, x), step(model, x))


# -------------------------------------------------------------------------------------------------
# Replicated arguments


@every_strategy
def test_python_numbers_are_traced_not_compiled_in(strategy):
    traces = []

    def step(model, optimizer, x, y, lr):
        traces.append(lr)

        def loss_fn(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - lr * g, params, grads))
        return loss * lr

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    dp_step(*state, *BATCHES[0], 0.5)
    dp_step(*state, *BATCHES[0], 0.5)
    step(*plain, *BATCHES[0], 0.5)
    step(*plain, *BATCHES[0], 0.5)
    for lr in (0.25, 0.125, 0.0, -0.5):
        before = len(traces)
        loss = dp_step(*state, *BATCHES[1], lr)
        assert len(traces) == before
        assert_same(loss, step(*plain, *BATCHES[1], lr))
        assert_same(state, plain)


@every_strategy
@pytest.mark.parametrize("scalar", [2, 2.5, np.float32(2.5), np.array(2), jnp.array(2.5)], ids=repr)
def test_scalars(strategy, scalar):
    def step(model, x, scalar):
        return model(x) * scalar, scalar * jnp.ones(())

    batches = [(x, scalar) for x, _ in BATCHES]
    check_against_one_device(step, model_only, batches, strategy=strategy)


# -------------------------------------------------------------------------------------------------
# Batches


class Pair(NamedTuple):
    x: jax.Array
    y: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Examples:
    x: jax.Array
    y: jax.Array
    name: str = dataclasses.field(default="train", metadata={"static": True})


@every_strategy
@pytest.mark.parametrize(
    ("make", "x_of", "y_of"),
    [
        (lambda x, y: (x, y), lambda b: b[0], lambda b: b[1]),
        (lambda x, y: [x, (y,)], lambda b: b[0], lambda b: b[1][0]),
        (lambda x, y: {"x": x, "y": {"z": y}}, lambda b: b["x"], lambda b: b["y"]["z"]),
        (lambda x, y: {"y": y, "x": x, "none": None}, lambda b: b["x"], lambda b: b["y"]),
        (Pair, lambda b: b.x, lambda b: b.y),
        (Examples, lambda b: b.x, lambda b: b.y),
    ],
    ids=["tuple", "list", "dict", "unsorted dict", "NamedTuple", "dataclass"],
)
def test_containers_of_a_batch(strategy, make, x_of, y_of):
    def step(model, optimizer, batch):
        assert type(batch) is type(make(0, 0))
        loss = train_step(model, optimizer, x_of(batch), y_of(batch))
        return loss, jax.tree.map(lambda leaf: 2 * leaf, batch)

    batches = [(make(x, y),) for x, y in BATCHES]
    check_against_one_device(step, linear, batches, strategy=strategy)


@every_strategy
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8", "int32", "bool"])
def test_dtypes_of_a_batch(strategy, xp, dtype):
    def step(model, x):
        return model(x.astype(jnp.float32)), x, x[:, ::-1]

    batches = [(xp.asarray(np.abs(x * 10)).astype(jnp.dtype(dtype)),) for x, _ in BATCHES]
    check_against_one_device(step, model_only, batches, strategy=strategy)


@every_strategy
def test_float64_of_numpy_is_what_it_is_on_one_device(strategy):
    def step(model, optimizer, x, y):
        x = jnp.asarray(x)
        return train_step(model, optimizer, x, jnp.asarray(y)), x

    batches = [(x.astype(np.float64), y.astype(np.float64)) for x, y in BATCHES]
    check_against_one_device(step, linear, batches, strategy=strategy)


@every_strategy
def test_typed_keys_as_a_batch(strategy):
    def step(model, keys):
        x = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        return model(x), jax.vmap(jax.random.key_data)(keys)

    batches = [(jax.random.split(jax.random.key(seed), 8),) for seed in (0, 1)]
    check_against_one_device(step, model_only, batches, strategy=strategy)


def pointers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("strategy", ["jit", "shard_map"])
def test_batch_that_is_split_already_is_not_copied(strategy):
    dp_step = nnx_dp.data_parallel(lambda m, x: x, strategy=strategy, devices=4)
    model, (x, _) = model_only()[0], BATCHES[0]
    placed = dp_step.shard(x)
    assert dp_step.shard(placed) is placed
    before = pointers(placed)
    assert len(before) == 4
    call = dp_step._prepare((model, placed), {})
    (given,) = call.launch.place_arrays(call.bound.arrays)
    assert given is placed
    assert pointers(given) == before
    for _ in range(2):
        assert_same(dp_step(model, placed), x)
    assert pointers(placed) == before


@every_strategy
@pytest.mark.parametrize(
    "place",
    [
        lambda x, step: step.shard(x),
        lambda x, step: jax.device_put(x, jax.devices()[0]),
        lambda x, step: jax.device_put(x, jax.devices()[3]),
        lambda x, step: jax.device_put(x, jax.devices()[7]),
        lambda x, step: nnx_dp.shard_batch(x, devices=8),
        lambda x, step: nnx_dp.shard_batch(x, devices=2),
        lambda x, step: jax.device_put(
            x, jax.sharding.NamedSharding(step.mesh, jax.sharding.PartitionSpec())
        ),
    ],
    ids=["split", "device 0", "device 3", "device outside", "on 8", "on 2", "replicated"],
)
def test_batches_that_are_placed_already(strategy, place):
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for x, y in BATCHES:
        loss = dp_step(*state, place(x, dp_step), place(y, dp_step))
        assert_same(loss, train_step(*plain, x, y))
        assert_same(state, plain)


@every_strategy
def test_state_that_is_committed_to_another_device(strategy):
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for node in state:
        nnx.update(node, jax.device_put(nnx.state(node), jax.devices()[6]))
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch))
        assert_same(state, plain)


@every_strategy
def test_one_state_on_different_numbers_of_devices_in_turn(strategy):
    state, plain = linear(), linear()
    steps = [nnx_dp.data_parallel(train_step, strategy=strategy, devices=n) for n in (4, 8, 1, 2)]
    for dp_step in [*steps, *steps]:
        batch = regression(rows=16, seed=3)
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch))
        assert_same(state, plain)
    # And back to plain NNX on one device.
    state = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), nnx.state(state[0]))
    assert_same(nnx.state(plain[0]), state)


# -------------------------------------------------------------------------------------------------
# State


@every_strategy
@pytest.mark.parametrize("wrap", [dict, list], ids=["dict", "list"])
def test_model_inside_a_container(strategy, wrap):
    def make():
        model, optimizer = linear()
        if wrap is dict:
            return ({"net": {"model": model}, "optimizer": optimizer},)
        return ([[model], optimizer],)

    def step(held, x, y):
        if wrap is dict:
            return train_step(held["net"]["model"], held["optimizer"], x, y)
        return train_step(held[0][0], held[1], x, y)

    check_against_one_device(step, make, BATCHES, strategy=strategy)


@every_strategy
def test_model_and_batch_in_one_container(strategy):
    def step(everything):
        model, optimizer = everything["state"]
        return train_step(model, optimizer, *everything["batch"])

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for batch in BATCHES:
        loss = dp_step({"state": state, "batch": batch})
        assert_same(loss, step({"state": plain, "batch": batch}))
        assert_same(state, plain)


@every_strategy
def test_model_and_optimizer(strategy):
    def step(optimizer, x, y):
        loss_fn = lambda model: jnp.mean((model(x) - y) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    make = lambda: (  # noqa: E731
        nnx.ModelAndOptimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1)),
    )
    check_against_one_device(step, make, BATCHES, strategy=strategy)


@every_strategy
@pytest.mark.parametrize("donate", [False, True])
def test_model_and_its_moving_average(strategy, donate):
    """The average starts as a clone, whose buffers are the model's own."""

    def step(model, average, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        params = nnx.state(model, nnx.Param)
        blend = lambda a, p: 0.9 * a + 0.1 * p  # noqa: E731
        nnx.update(average, jax.tree.map(blend, nnx.state(average, nnx.Param), params))
        return loss

    def make():
        model, optimizer = linear()
        return model, nnx.clone(model), optimizer

    check_against_one_device(step, make, BATCHES, strategy=strategy, donate=donate)


class TiedHeads(nnx.Module):
    """Two layers that share a Variable, and one that shares a whole layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = nnx.Linear(3, 3, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.again = self.first
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.again(self.second(self.first(x))))


@every_strategy
@pytest.mark.parametrize("donate", [False, True])
def test_tied_weights(strategy, donate):
    def make():
        model = TiedHeads()
        return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    _, (model, _), _ = check_against_one_device(
        train_step, make, BATCHES, strategy=strategy, donate=donate, rtol=1e-4
    )
    assert model.second.kernel is model.first.kernel
    assert model.again is model.first


@every_strategy
def test_variable_as_an_argument(strategy):
    def step(total, x):
        total[...] += nnx_dp.psum(x.sum(0))

    batches = [(x,) for x, _ in BATCHES]
    make = lambda: (nnx.Variable(jnp.zeros(3)),)  # noqa: E731
    check_against_one_device(step, make, batches, strategy=strategy)


@every_strategy
def test_variable_shared_by_two_arguments(strategy):
    def step(model, bias, x):
        assert model.bias is bias
        bias[...] += nnx_dp.pmean(model(x).mean(0))

    def make():
        model, _ = linear()
        return model, model.bias

    batches = [(x,) for x, _ in BATCHES]
    check_against_one_device(step, make, batches, strategy=strategy)


def test_rngs_on_their_own_under_jit():
    def step(rngs, x):
        return x + rngs.normal(x.shape), rngs.params()

    batches = [(x,) for x, _ in BATCHES]
    check_against_one_device(step, lambda: (nnx.Rngs(0, params=1),), batches, strategy="jit")


@per_device_strategies
def test_rngs_on_their_own(strategy):
    def step(rngs, x):
        return x + rngs.normal(x.shape), rngs.params()

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    rngs, plain = nnx.Rngs(0, params=1), nnx.Rngs(0, params=1)
    x, drawn = np.zeros((8, 16), np.float32), []
    for _ in range(2):
        noise, key = dp_step(rngs, x)
        _, plain_key = step(plain, x)
        drawn.append(np.asarray(noise))
        # Streams stand where they would stand on one device, and "params" draws the same there.
        assert_same(rngs, plain)
        assert_same(key, plain_key)
    assert len(np.unique(np.stack(drawn))) == 2 * x.size


@per_device_strategies
def test_rngs_that_are_broadcast(strategy):
    """What each device draws is then the same, as the caller asked."""

    def step(rngs, x):
        return x + rngs.noise.normal((x.shape[1],)) + 0 * rngs.normal(x.shape)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, rngs="noise")
    rngs, plain = nnx.Rngs(0, noise=1), nnx.Rngs(0, noise=1)
    for x, _ in BATCHES:
        assert_same(dp_step(rngs, x), step(plain, x))
        assert_same(rngs, plain)


@every_strategy
def test_train_and_eval_mode_in_turn(strategy):
    def make():
        rngs = nnx.Rngs(0)
        return (nnx.Sequential(nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)),)

    dp_step = nnx_dp.data_parallel(lambda m, x: m(x), strategy=strategy, devices=4)
    (model,), (plain,) = make(), make()
    for training in (True, False, True, False):
        for net in (model, plain):
            net.train() if training else net.eval()
        for x, _ in BATCHES:
            assert_same(dp_step(model, x), plain(x), rtol=1e-4, atol=1e-5)
            assert_same(model, plain, rtol=1e-4, atol=1e-5)


@every_strategy
def test_step_that_returns_its_state(strategy):
    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        return loss, model

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for batch in BATCHES:
        loss, model = dp_step(*state, *batch)
        assert model is state[0]
        assert_same(loss, step(*plain, *batch)[0])
        assert_same(state, plain)


@every_strategy
def test_step_that_adds_to_the_state(strategy):
    def step(model, x):
        if not hasattr(model, "seen"):
            model.seen = nnx.Variable(jnp.zeros(3))
        model.seen[...] += nnx_dp.pmean(x.mean(0))
        return model(x)

    batches = [(x,) for x, _ in [*BATCHES, *BATCHES]]
    check_against_one_device(step, model_only, batches, strategy=strategy)


@every_strategy
def test_step_that_makes_a_new_object(strategy):
    def step(model, x):
        copy = nnx.clone(model)
        copy.bias[...] += 1
        return copy, copy(x)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    (model,), (plain,) = model_only(), model_only()
    for x, _ in BATCHES:
        copy, out = dp_step(model, x)
        expected, expected_out = step(plain, x)
        assert copy is not model
        assert_same((copy, out, model), (expected, expected_out, plain))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_decorated_module_keeps_its_attributes_to_itself(strategy):
    model, _ = linear()
    x, _ = regression()
    step = nnx_dp.data_parallel(model, strategy=strategy, devices=4)
    assert_same(step(x), model(x))
    assert not hasattr(step, "kernel")
    assert step.__wrapped__ is model


class Tensor:
    """Hashable by its identity, as arrays of other packages are."""

    def __init__(self, array):
        self._hidden = (array,)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._hidden[0], dtype)


def test_array_of_another_package_is_not_a_static_value():
    step = nnx_dp.data_parallel(lambda model, x, y: jnp.mean(model(jnp.asarray(x)) - y), devices=2)
    x, y = regression()
    model, _ = linear()
    with refused(TypeError, r"x is a Tensor, which is neither .* Pass np.asarray\(x\)", model):
        step(model, Tensor(x), y)


def test_dtype_is_a_static_value():
    step = nnx_dp.data_parallel(lambda x, dtype: jnp.mean(x.astype(dtype)), devices=2)
    for dtype in (np.float16, jnp.bfloat16, np.dtype("float32"), "float32"):
        assert step(np.ones((4, 2), np.float32), dtype).dtype == jnp.dtype(dtype)
