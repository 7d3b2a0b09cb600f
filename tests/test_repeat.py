"""The short way for repeated calls: taken when it may be, never when it may not."""

import functools
import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import STRATEGIES, assert_same, linear, refused, regression, train_step

import nnx_dp
from nnx_dp._strategies._interface import Launch

X, Y = regression()


class Net(nnx.Module):
    """Has an attribute of every kind that a Module can have, and shows each in what it returns."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict({"a": nnx.Linear(4, 1, rngs=rngs)})
        self.parts = nnx.data({"scale": nnx.Param(jnp.ones(4)), "more": [nnx.Param(jnp.zeros(4))]})
        self.shift = nnx.Param(jnp.ones(4), tag="plain")
        self.factor = 1.0
        self.name = "net"
        self.activation = jnp.tanh
        self.config = Config(1.0)

    def __call__(self, x):
        x = self.dropout(self.bn(self.first(x)))
        for layer in self.layers:
            x = self.activation(layer(x)) * self.factor * self.config.value
        x = x * self.parts["scale"][...] + sum(part[...] for part in self.parts["more"])
        x = x + self.shift[...] * (2.0 if self.shift.get_metadata().get("tag") == "double" else 1.0)
        x = x * (3.0 if self.name == "other" else 1.0)
        return sum(head(x) for head in self.heads.values())


class Config:
    """A static value that counts by its contents, and can be changed in place all the same."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Config) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def linear_like(layer, seed):
    return nnx.Linear(layer.in_features, layer.out_features, rngs=nnx.Rngs(seed))


def replace_dict(net):
    net.heads = nnx.Dict({"a": linear_like(net.heads["a"], 5)})


def share(net):
    net.layers[1] = net.layers[0]


def unshare(net):
    net.layers[1] = nnx.Linear(4, 4, rngs=nnx.Rngs(7))


def share_a_variable(net):
    net.layers[1].kernel = net.layers[0].kernel


def equal_variable(net):
    net.shift = nnx.Param(net.shift[...], tag="plain")


def equal_scalar_module(net):
    net.first = nnx.clone(net.first)


def swap(net):
    net.layers[0], net.layers[1] = net.layers[1], net.layers[0]


def replace_and_free(net):
    del net.first
    net.first = nnx.Linear(3, 4, rngs=nnx.Rngs(9))


def change_class(net):
    net.layers[0].__class__ = Doubled


def set_tag(net):
    net.shift.set_metadata("tag", "double")


def set_bias(net):
    net.first.bias, net.first.use_bias = None, False


def append(net):
    net.parts["more"].append(nnx.Param(jnp.ones(4)))


def pop(net):
    if net.parts["more"]:
        net.parts["more"].pop()


def new_key(net):
    net.parts["scale"] = nnx.Param(2 * jnp.ones(4))


def other_dtype(net):
    net.shift[...] = net.shift[...] + 1
    net.shift.set_raw_value(net.shift[...].astype(jnp.bfloat16))


def by_numpy(net):
    net.shift.set_raw_value(np.full(4, 0.5, np.float32))


def on_one_device(net):
    net.shift.set_raw_value(jax.device_put(jnp.full(4, 0.25), jax.devices()[3]))


MUTATIONS = {
    "eval": lambda net: net.eval(),
    "train": lambda net: net.train(),
    "static float": lambda net: setattr(net, "factor", net.factor * 0.5),
    "static string": lambda net: setattr(net, "name", "other"),
    "static function": lambda net: setattr(net, "activation", jnp.sin),
    "static value in place": lambda net: setattr(net.config, "value", net.config.value + 1),
    "static value replaced": lambda net: setattr(net, "config", Config(3.0)),
    "nested static": lambda net: setattr(net.dropout, "rate", 0.25),
    "submodule": lambda net: setattr(net, "first", linear_like(net.first, 3)),
    "submodule, freed first": replace_and_free,
    "submodule, equal": equal_scalar_module,
    "submodule in a list": lambda net: net.layers.__setitem__(0, linear_like(net.layers[0], 4)),
    "longer list": lambda net: net.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(6))),
    "submodule in a dict": lambda net: net.heads.__setitem__("b", linear_like(net.heads["a"], 6)),
    "dict replaced": replace_dict,
    "swapped": swap,
    "class": change_class,
    "sharing": share,
    "sharing of a Variable": share_a_variable,
    "no sharing": unshare,
    "new Variable, equal": equal_variable,
    "Variable set to None": set_bias,
    "metadata": set_tag,
    "plain dict": new_key,
    "plain list longer": append,
    "plain list shorter": pop,
    "dtype": other_dtype,
    "NumPy value": by_numpy,
    "value on one device": on_one_device,
}


def evaluate(net, x):
    """Writes to every Variable, so that one that is left behind shows."""
    out = net(x)
    nnx.update(net, jax.tree.map(lambda p: p * 0.9, nnx.state(net, nnx.Param)))
    return out


def check_mutations(names, strategy="jit"):
    dp_step = nnx_dp.data_parallel(evaluate, strategy=strategy, devices=2)
    net, plain = Net(), Net()
    for name in names:
        for _ in range(2):
            assert_same(dp_step(net, X), evaluate(plain, X))
            assert_same(net, plain)
        MUTATIONS[name](net)
        MUTATIONS[name](plain)
    for _ in range(2):
        assert_same(dp_step(net, X), evaluate(plain, X))
        assert_same(net, plain)


@pytest.mark.parametrize("name", MUTATIONS)
def test_no_change_of_a_graph_goes_unnoticed(name):
    check_mutations([name])


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=2, max_size=5))
def test_changes_of_a_graph_one_after_the_other(names):
    check_mutations(names)


def count_bindings(monkeypatch):
    """Counts the calls that go the long way."""
    counted = []
    original = nnx_dp.DataParallel._prepare

    def prepare(self, args, kwargs):
        counted.append(1)
        return original(self, args, kwargs)

    monkeypatch.setattr(nnx_dp.DataParallel, "_prepare", prepare)
    return counted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_call_goes_the_short_way(strategy, monkeypatch):
    counted = count_bindings(monkeypatch)
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    for seed in range(4):
        x, y = regression(seed=seed)
        assert_same(dp_step(*state, x, y), train_step(*plain, x, y))
        assert_same(state, plain)
    assert len(counted) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_that_is_in_place_is_not_placed_again(strategy, monkeypatch):
    placed, original = [], Launch.place_state
    monkeypatch.setattr(
        Launch, "place_state", lambda self, leaves: placed.append(1) or original(self, leaves)
    )
    dp_step = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy, devices=2)
    model = nnx.Dropout(0.0, rngs=nnx.Rngs(0))  # holds a typed key and a count
    for _ in range(5):
        assert_same(dp_step(model, X), X)
    assert len(placed) == 2, "at the first call, and to see where the step leaves its state"


def test_train_and_eval_take_turns_without_being_taken_apart_again(monkeypatch):
    counted = count_bindings(monkeypatch)
    dp_step = nnx_dp.data_parallel(evaluate, strategy="jit", devices=2)
    net = Net()
    for _ in range(3):
        for mode in (net.train, net.eval):
            mode()
            dp_step(net, X)
    assert len(counted) == 2


def test_static_float_that_is_set_anew_at_each_call_is_the_same(monkeypatch):
    counted = count_bindings(monkeypatch)
    dp_step = nnx_dp.data_parallel(evaluate, strategy="jit", devices=2)
    net = Net()
    for _ in range(3):
        net.factor = float("0.75")
        dp_step(net, X)
    assert len(counted) == 1


CALLS = {
    "other object": lambda s, a, b: s(b[0], b[1], X, Y),
    "optimizer of another": lambda s, a, b: s(a[0], b[1], X, Y),
    "other batch size": lambda s, a, b: s(*a, X[:4], Y[:4]),
    "other dtype": lambda s, a, b: s(*a, X.astype(np.float16), Y),
    "by keyword": lambda s, a, b: s(*a, y=Y, x=X),
    "JAX for NumPy": lambda s, a, b: s(*a, jnp.asarray(X), jnp.asarray(Y)),
    "view of the same array": lambda s, a, b: s(*a, X, X[:, :1]),
    "weak type": lambda s, a, b: s(*a, X, jnp.broadcast_to(jnp.asarray(2.0), (8, 1))),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_call_in_between(name):
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=2)
    ours, plain = (linear(), linear(seed=1)), (linear(), linear(seed=1))
    for call in (CALLS["by keyword"], CALLS[name]) * 2:
        assert_same(call(dp_step, *ours), call(train_step, *plain))
        assert_same(ours, plain)


def test_two_arguments_that_were_the_same_array_once():
    def step(model, x, y):
        return model(x) - y

    dp_step = nnx_dp.data_parallel(step, strategy="jit", devices=2)
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    for x, y in [(X, X), (X, 2 * X), (3 * X, X)]:
        assert_same(dp_step(model, x, y), step(model, x, y))


def test_static_arguments_and_defaults():
    def step(model, x, scale=2.0, *, mode="plain", shift=X[:, :1], config=None):
        out = model(x) * scale + shift
        return -out if mode == "negative" else out * (config.value if config else 1.0)

    dp_step = nnx_dp.data_parallel(step, strategy="jit", devices=2)
    model, config = linear()[0], Config(2.0)
    calls = [
        {},
        {"scale": 3.0},
        {"scale": 3},
        {"mode": "negative"},
        {"shift": 2 * X[:, :1]},
        {"config": config},
        {"config": config, "mode": "negative"},
    ]
    for _ in range(2):
        for kwargs in calls:
            assert_same(dp_step(model, X, **kwargs), step(model, X, **kwargs))
        config.value += 1


def test_true_is_not_one():
    def step(model, x, flag):
        return {"out": model(x), "flag": "yes" if flag is True else "no"}

    dp_step = nnx_dp.data_parallel(step, strategy="jit", devices=2, static_argnames="flag")
    model, _ = linear()
    for flag in (True, 1, True, 1):
        assert dp_step(model, X, flag)["flag"] == step(model, X, flag)["flag"]


def test_partial_and_method():
    class Trainer:
        scale = 1.0

        @nnx_dp.data_parallel(strategy="jit", devices=2, static_argnums=0)
        def step(self, model, x):
            return model(x) * self.scale

    model, other = linear()[0], linear(seed=1)[0]
    first, second = Trainer(), Trainer()
    second.scale = 2.0
    for trainer in (first, second, first, second):
        assert_same(trainer.step(model, X), model(X) * trainer.scale)
    held = nnx_dp.data_parallel(functools.partial(lambda m, x: m(x), model), devices=2)
    for _ in range(2):
        assert_same(held(X), model(X))
        held.__wrapped__.args[0].kernel[...] = other.kernel[...]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_output_of_every_form(strategy):
    def step(model, x):
        out = model(x)
        return {"z": out, "a": (out, None, "text"), 3: [jnp.mean(out), 7, out.T], "m": [out.mean()]}

    def plain(model, x):
        return {str(k): v for k, v in step(model, x).items()}

    dp_step = nnx_dp.data_parallel(
        lambda model, x: {str(k): v for k, v in step(model, x).items()},
        strategy=strategy,
        devices=2,
    )
    model, _ = linear()
    for seed in range(3):
        x = regression(seed=seed)[0]
        actual, expected = dp_step(model, x), plain(model, x)
        assert actual["a"][1:] == expected["a"][1:]
        is_text = lambda leaf: None if isinstance(leaf, str) else jnp.asarray(leaf)  # noqa: E731
        assert_same(jax.tree.map(is_text, actual), jax.tree.map(is_text, expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "calls", model.calls + 1),
        lambda model: setattr(model, "kernel", nnx.Param(model.kernel[...] + 1)),
        lambda model: setattr(model, "extra", nnx.Param(jnp.ones(2))),
        lambda model: model.kernel.set_metadata("seen", True),
    ],
    ids=["static", "replaced Variable", "new Variable", "metadata"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_changes_the_structure(strategy, change):
    def step(model, x):
        change(model)
        return jnp.mean(model(x))

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=2)
    model, plain = linear()[0], linear()[0]
    model.calls = plain.calls = 0
    for _ in range(3):
        assert_same(dp_step(model, X), step(plain, X))
        assert_same(model, plain)
        assert model.calls == plain.calls
        assert model.kernel.get_metadata() == plain.kernel.get_metadata()


def test_step_that_returns_its_model():
    dp_step = nnx_dp.data_parallel(lambda model, x: (model, model(x)), devices=2)
    model, _ = linear()
    for _ in range(3):
        same, _ = dp_step(model, X)
        assert same is model


def test_objects_are_not_kept_alive():
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=2)
    model, optimizer = linear()
    for _ in range(3):
        dp_step(model, optimizer, X, Y)
    kernel = weakref.ref(model.kernel[...])
    momentum = weakref.ref(optimizer.step[...])
    del optimizer
    gc.collect()
    assert momentum() is None
    dp_step(*linear(), X, Y)
    del model
    gc.collect()
    assert kernel() is None


def test_model_inside_its_optimizer_is_not_kept_alive():
    def step(model, optimizer, x, y):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(grads)

    dp_step = nnx_dp.data_parallel(step, strategy="jit", devices=2)
    model = linear()[0]
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
    for _ in range(3):
        dp_step(model, optimizer, X, Y)
        assert optimizer.model is model
    kernel = weakref.ref(model.kernel[...])
    del model, optimizer
    gc.collect()
    assert kernel() is None


def test_values_given_from_outside_are_used():
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=2)
    ours, plain = linear(), linear()
    for seed in range(3):
        assert_same(dp_step(*ours, X, Y), train_step(*plain, X, Y))
        new = jnp.full((3, 1), 0.1 * seed)
        ours[0].kernel[...] = plain[0].kernel[...] = new
        saved = jax.tree.map(jnp.copy, nnx.state(plain[0]))
        nnx.update(ours[0], saved)
    assert_same(ours, plain)


def test_error_in_a_repeated_call_changes_nothing():
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=2)
    state = linear()
    for _ in range(2):
        dp_step(*state, X, Y)
    with refused(Exception, "features|shape|dot", *state):
        dp_step(*state, X[:, :2], Y)


def test_decorated_step_inside_another_is_refused_when_repeated():
    inner = nnx_dp.data_parallel(train_step, strategy="jit", devices=2)
    state = linear()
    inner(*state, X, Y)
    outer = nnx_dp.data_parallel(lambda x: inner(*state, X, Y), devices=2)
    with pytest.raises(RuntimeError, match="inside another decorated step"):
        outer(X)
    assert_same(inner(*linear(), X, Y), train_step(*linear(), X, Y))


def test_shape_of_state_that_changes():
    dp_step = nnx_dp.data_parallel(lambda m, x: x * jnp.mean(m[...]), devices=2)
    holder = nnx.List([nnx.Param(jnp.ones(3))])
    step = nnx_dp.data_parallel(lambda m, x: x * jnp.mean(m[0][...]), devices=2)
    for size in (3, 5, 3, 5):
        holder[0].set_raw_value(jnp.arange(size, dtype=jnp.float32))
        assert_same(step(holder, X), X * np.mean(np.arange(size, dtype=np.float32)))
    variable = nnx.Param(jnp.ones(3))
    for size in (3, 5):
        variable.set_raw_value(jnp.arange(size, dtype=jnp.float32))
        assert_same(dp_step(variable, X), X * np.mean(np.arange(size, dtype=np.float32)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_that_comes_out_with_another_dtype_and_shape(strategy):
    def step(memory, x):
        seen = memory.last[...]
        memory.last.set_raw_value(jnp.mean(x, axis=0).astype(jnp.bfloat16)[: max(1, 3 - seen.size)])
        return x * jnp.sum(seen.astype(jnp.float32))

    class Memory(nnx.Module):
        def __init__(self):
            self.last = nnx.Cache(jnp.ones(2))

    options = dict(strategy=strategy, devices=2, state_reduce={nnx.Cache: "mean"})
    dp_step, memory, plain = nnx_dp.data_parallel(step, **options), Memory(), Memory()
    for seed in range(6):
        x = regression(seed=seed)[0]
        assert_same(dp_step(memory, x), step(plain, x), rtol=2e-2)
        assert_same(memory, plain, rtol=2e-2)
    # No program was given the shapes of another.
    programs = [launch.function for launch in dp_step._launches]
    assert len(programs) == 3
    assert all(program._cache_size() == 1 for program in programs if strategy != "pmap")


def test_plain_arrays_as_attributes_are_carried():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.data(jnp.zeros(()))

    def step(counter, x):
        counter.count = counter.count + 1
        return x * counter.count

    dp_step = nnx_dp.data_parallel(step, devices=2)
    counter, plain = Counter(), Counter()
    for _ in range(3):
        assert_same(dp_step(counter, X), step(plain, X))
        assert_same(counter, plain)


@chex.assert_max_traces(n=1)
def _traced_once(model, x):
    return model(x)


def test_many_short_lived_models_are_not_all_remembered():
    dp_step = nnx_dp.data_parallel(_traced_once, strategy="jit", devices=2)
    for seed in range(40):
        model = linear(seed=seed)[0]
        assert_same(dp_step(model, X), model(X))
    assert len(dp_step._repeats._repeats) <= 16
