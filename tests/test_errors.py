"""What a user is told, and that nothing has changed by then.

A step that cannot be what it is on one device is refused before it runs: the error names the
argument, the Variable or the output, and the model, the optimizer and the random streams are
exactly as they were.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import (
    PER_DEVICE,
    STRATEGIES,
    assert_same,
    linear,
    refused,
    regression,
    train_step,
)

import nnx_dp
from nnx_dp._hooks import wrap_method

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
per_device_strategies = pytest.mark.parametrize("strategy", PER_DEVICE)

X, Y = regression(seed=1)


def state():
    """A model, its optimizer and the random streams: all that a call could spoil."""
    return *linear(), nnx.Rngs(0)


def step(model, optimizer, rngs, x, y):
    x = x + 0.1 * rngs.normal(x.shape)
    return train_step(model, optimizer, x, y)


def refuse(function, error, match, *batch, strategy, make=state, devices=4, **options):
    """Calls a decorated step twice, and expects the same error both times and no change."""
    arguments = make()
    dp_step = nnx_dp.data_parallel(function, strategy=strategy, devices=devices, **options)
    for _ in range(2):
        with refused(error, match, *arguments) as caught:
            dp_step(*arguments, *batch)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------
# The batch


@per_device_strategies
@pytest.mark.parametrize("uneven", ["auto", "error"])
def test_batch_that_the_devices_do_not_divide(strategy, uneven):
    told = refuse(
        step,
        ValueError,
        r"data_parallel\(step\): x has 6 examples on axis 0, which 4 devices do not divide",
        *regression(6),
        strategy=strategy,
        uneven=uneven,
    )
    assert "4 or 8 examples" in told
    for option in ('strategy="jit"', '"replicate"', '"pad"', '"drop"'):
        assert option in told


def test_uneven_batch_that_may_not_be_uneven_under_jit():
    match = "x has 6 examples on axis 0, which 4 devices do not divide"
    refuse(step, ValueError, match, *regression(6), strategy="jit", uneven="error")


@every_strategy
def test_batch_too_small_to_drop_from(strategy):
    match = "x has 3 examples on axis 0, which 4 devices do not divide"
    refuse(step, ValueError, match, *regression(3), strategy=strategy, uneven="drop")


@every_strategy
def test_padding_that_would_change_the_result(strategy):
    match = 'uneven="pad" cannot be used with this step: .*model'
    refuse(step, ValueError, match, *regression(6), strategy=strategy, uneven="pad")


@every_strategy
def test_batch_arrays_of_different_lengths(strategy):
    match = r"different lengths: x has 8 on axis 0, y has 4 on axis 0.*in_axes"
    told = refuse(step, ValueError, match, X, Y[:4], strategy=strategy)
    assert "in_axes={'y': None}" in told
    assert "np.stack" not in told


@every_strategy
def test_batch_that_is_a_list_of_examples(strategy):
    told = refuse(step, ValueError, "different lengths", [*X], [*Y], strategy=strategy)
    assert "np.stack" in told
    assert "and 3 more" in told
    told = refuse(step, ValueError, "no batch", X.tolist(), Y.tolist(), strategy=strategy)
    assert "np.asarray" in told
    assert len(told) < 300


@every_strategy
def test_batch_arrays_of_different_lengths_inside_a_dict(strategy):
    def step(model, batch):
        return model(batch["x"])

    match = r"batch\['mask'\] has 3 on axis 0, batch\['x'\] has 8 on axis 0"
    batch = {"x": X, "mask": np.ones(3)}
    refuse(step, ValueError, match, batch, strategy=strategy, make=lambda: linear()[:1])


@every_strategy
def test_no_batch(strategy):
    def step(model, optimizer, rngs, scale):
        return scale

    match = r"found no batch among its arguments.*model.*scale"
    refuse(step, ValueError, match, 0.5, strategy=strategy)


@every_strategy
def test_empty_batch(strategy):
    match = r"was given an empty batch: x has 0 on axis 0"
    refuse(step, ValueError, match, X[:0], Y[:0], strategy=strategy)


@every_strategy
def test_key_of_the_old_kind(strategy):
    def step(model, x, key):
        return model(x) * jax.random.normal(key)

    told = refuse(
        step,
        ValueError,
        r"key has shape \(2,\) and dtype uint32",
        X,
        jax.random.PRNGKey(0),
        strategy=strategy,
        make=lambda: linear()[:1],
    )
    assert "jax.random.key" in told
    assert "in_axes" in told


@every_strategy
def test_array_of_a_dtype_that_jax_cannot_hold(strategy):
    def step(model, x, names):
        return model(x)

    match = r"names is a NumPy array of dtype <U\d+, which JAX cannot hold"
    names = np.array([f"row {i}" for i in range(8)])
    refuse(step, TypeError, match, X, names, strategy=strategy, make=lambda: linear()[:1])


# -------------------------------------------------------------------------------------------------
# Roles


@every_strategy
@pytest.mark.parametrize(
    ("in_axes", "match"),
    [
        ((None, None), "in_axes has 2 entries, but step was called with 5 arguments"),
        ((None, None, None, 0, 0, 0), "in_axes has 6 entries"),
        ({"z": 0}, r"in_axes names \['z'\], but step was called with"),
        ({"x": 2}, r"in_axes gives axis 2 for x, which has shape \(8, 3\).*-2 to 1"),
        ({"x": -3}, "in_axes gives axis -3 for x"),
        ({"x": "0"}, "in_axes for x is '0'; write an int, None or"),
        ({"x": (0, 0)}, "in_axes for x is .*not a prefix"),
        ({"x": True}, "in_axes for x is True"),
        ({"model": 0}, "in_axes gives axis 0 for model, which is NNX state"),
        (0, "in_axes gives axis 0 for model, which is NNX state"),
        (
            (None, nnx.StateAxes({nnx.Param: 0, ...: None}), None, 0, 0),
            "in_axes gives axis 0 for optimizer, which is NNX state",
        ),
    ],
    ids=str,
)
def test_in_axes_that_do_not_fit(strategy, in_axes, match):
    refuse(step, ValueError, match, X, Y, strategy=strategy, in_axes=in_axes)


@every_strategy
def test_in_axes_for_a_scalar(strategy):
    def step(model, x, scale):
        return model(x) * scale

    match = "in_axes gives axis 0 for scale, which is a float and has no axes"
    make = lambda: linear()[:1]  # noqa: E731
    refuse(step, ValueError, match, X, 2.0, strategy=strategy, make=make, in_axes=(None, 0, 0))


class Unhashable:
    __hash__ = None


class Trainer:
    """A plain class around a model, as many code bases have one."""

    def __init__(self):
        self.model, self.optimizer = linear()


@dataclasses.dataclass
class Frozen:
    parts: dict


@every_strategy
def test_object_that_is_neither_array_nor_hashable(strategy):
    def step(model, x, config):
        return model(x)

    match = "config is a Unhashable: neither an array nor hashable"
    make = lambda: linear()[:1]  # noqa: E731
    refuse(step, TypeError, match, X, Unhashable(), strategy=strategy, make=make)
    match = r"config\['a'\] is a set: neither an array nor hashable"
    refuse(step, TypeError, match, X, {"a": {1, 2}}, strategy=strategy, make=make)


@every_strategy
def test_tensor_of_another_package(strategy):
    class Tensor:
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return self.values

    match = r"x is a Tensor, which is neither a NumPy nor a JAX array\. Pass np\.asarray\(x\)"
    refuse(step, TypeError, match, Tensor(X), Y, strategy=strategy)


@every_strategy
@pytest.mark.parametrize("hold", [lambda t: t, lambda t: [t]], ids=["itself", "in a list"])
def test_plain_object_that_holds_a_model(strategy, hold):
    def step(trainer, x, y):
        trainer = trainer[0] if isinstance(trainer, list) else trainer
        return train_step(trainer.model, trainer.optimizer, x, y)

    trainer = Trainer()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with refused(
        TypeError, r"trainer.*is a Trainer.*\.model is state", trainer.model, trainer.optimizer
    ):
        dp_step(hold(trainer), X, Y)


@every_strategy
def test_method_of_a_plain_object_that_holds_a_model(strategy):
    class Loop(Trainer):
        @functools.partial(nnx_dp.data_parallel, strategy=strategy, devices=4)
        def step(self, x, y):
            return train_step(self.model, self.optimizer, x, y)

    loop = Loop()
    with refused(TypeError, r"self is a Loop.*self\.model is state", loop.model, loop.optimizer):
        loop.step(X, Y)


@every_strategy
def test_plain_object_that_holds_a_model_deeper_down(strategy):
    def step(held, x, y):
        return train_step(held.parts["model"], held.parts["optimizer"], x, y)

    model, optimizer = linear()
    held = Frozen({"model": model, "optimizer": optimizer})
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with refused(TypeError, "held.*Frozen", model, optimizer):
        dp_step(held, X, Y)


@every_strategy
@pytest.mark.parametrize("held_by", ["closure", "partial of a plain function", "lambda"])
def test_model_that_a_function_holds(strategy, held_by):
    """Traced state in a closure would leak a tracer or be baked in; it is an error in plain NNX."""
    model, optimizer = linear()

    def closure(x, y):
        return train_step(model, optimizer, x, y)

    def takes_function(function, x, y):
        return function(x, y)

    if held_by == "closure":
        args, function = (), closure
    elif held_by == "lambda":
        args, function = (lambda x, y: train_step(model, optimizer, x, y),), takes_function
    else:
        args, function = (functools.partial(train_step, model, optimizer),), takes_function
    dp_step = nnx_dp.data_parallel(function, strategy=strategy, devices=4)
    for _ in range(2):
        with refused(Exception, "trace level|argument", model, optimizer):
            dp_step(*args, X, Y)
    # Nothing leaked: the model still trains.
    assert np.isfinite(train_step(model, optimizer, X, Y))


@every_strategy
def test_static_arguments_that_do_not_exist(strategy):
    match = r"static_argnames names \['mode'\], but step has the parameters"
    refuse(step, ValueError, match, X, Y, strategy=strategy, static_argnames="mode")
    match = r"static_argnums names argument 7, but step was called with 5 positional"
    refuse(step, ValueError, match, X, Y, strategy=strategy, static_argnums=7)


@every_strategy
def test_static_argument_that_is_an_array(strategy):
    match = r"x is a ndarray: neither an array nor hashable|x.*static"
    refuse(step, (TypeError, ValueError), match, X, Y, strategy=strategy, static_argnames=("x",))


@every_strategy
def test_call_that_does_not_fit_the_signature(strategy):
    match = r"step was called with .* parameters \['model', 'optimizer', 'rngs', 'x', 'y'\]"
    refuse(step, TypeError, match, X, strategy=strategy)
    refuse(step, TypeError, "missing a required argument: 'y'", X, strategy=strategy)
    refuse(step, TypeError, "too many positional arguments", X, Y, Y, strategy=strategy)


# -------------------------------------------------------------------------------------------------
# The decorator's arguments


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"strategy": "ddp"}, ValueError, 'strategy is \'ddp\'; write one of "auto", "jit"'),
        ({"uneven": "split"}, ValueError, 'uneven is \'split\'; write one of "auto", "replicate"'),
        ({"loss_reduce": "max"}, ValueError, "loss_reduce is 'max'; write one of \"infer\""),
        ({"out_reduce": "avg"}, ValueError, r"out_reduce is 'avg'; write one of \['mean'"),
        ({"out_reduce": {"loss": "avg"}}, ValueError, "out_reduce.*'avg'"),
        ({"state_reduce": "mean"}, TypeError, "state_reduce is a str; write a mapping"),
        ({"state_reduce": {nnx.Param: "avg"}}, ValueError, "state_reduce.*Param.* is 'avg'"),
    ],
    ids=str,
)
def test_bad_value_is_refused_at_decoration(options, error, match):
    with pytest.raises(error, match=match):
        nnx_dp.data_parallel(step, **options)
    with pytest.raises(error, match=match):
        nnx_dp.data_parallel(**options)


@pytest.mark.parametrize("transform", [nnx_dp.grad, nnx_dp.value_and_grad])
def test_bad_loss_reduce_of_one_gradient(transform):
    with pytest.raises(ValueError, match="loss_reduce is 'max'"):
        transform(lambda model: model, loss_reduce="max")


def test_things_that_are_no_step():
    with pytest.raises(TypeError, match="data_parallel takes a function, not a int"):
        nnx_dp.data_parallel(3)
    with pytest.raises(TypeError, match="data-parallel already"):
        nnx_dp.data_parallel(nnx_dp.data_parallel(step))


@every_strategy
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"devices": 9}, r"devices=9, but JAX has 8 cpu device\(s\)\. Ask for 1 to 8"),
        ({"devices": 0}, "devices=0, but JAX has 8"),
        ({"devices": []}, "devices is empty"),
        ({"devices": "cpu"}, "devices is 'cpu'; write how many"),
    ],
    ids=str,
)
def test_devices_that_are_not_there(strategy, options, match):
    refuse(step, ValueError, match, X, Y, strategy=strategy, **options)


@every_strategy
def test_mesh_that_lacks_the_axis(strategy):
    mesh = jax.make_mesh((4,), ("batch",), devices=jax.devices()[:4])
    match = r"axis_name is 'data', but the mesh has the axes \('batch',\)"
    refuse(step, ValueError, match, X, Y, strategy=strategy, devices=None, mesh=mesh)
    match = "mesh= and devices= are both given"
    refuse(step, ValueError, match, X, Y, strategy=strategy, devices=4, mesh=mesh)


@per_device_strategies
def test_out_axes_and_out_reduce_that_do_not_fit(strategy):
    match = r"out_axes gives axis 0 for output, which has shape \(\)"
    refuse(step, ValueError, match, X, Y, strategy=strategy, out_axes=0)
    match = "out_axes gives None for output, but it differs between the 4 devices"
    refuse(step, ValueError, match, X, Y, strategy=strategy, out_axes=None)
    match = "out_axes is .*not a prefix of the output"
    refuse(step, ValueError, match, X, Y, strategy=strategy, out_axes=(0, 0))
    match = "out_reduce is .*not a prefix of the output"
    refuse(step, ValueError, match, X, Y, strategy=strategy, out_reduce=("mean", "sum"))

    def return_the_model(model, optimizer, rngs, x, y):
        return model, step(model, optimizer, rngs, x, y)

    match = "out_reduce is .*but the output holds objects that were passed in"
    options = {"out_reduce": (None, "mean")}
    refuse(return_the_model, ValueError, match, X, Y, strategy=strategy, **options)


@per_device_strategies
def test_rule_that_leaves_each_device_another_value(strategy):
    class Last(nnx.Variable):
        pass

    def make():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        model.last = Last(jnp.zeros(()))
        return (model,)

    def keep_the_mean(model, x):
        model.last[...] = x.mean()

    match = r"the state_reduce rule for model\.last would leave different values on the 4 devices"
    rules = {Last: lambda old, new: old + new}
    refuse(keep_the_mean, ValueError, match, X, strategy=strategy, make=make, state_reduce=rules)


def test_replicate_takes_objects():
    with pytest.raises(TypeError, match="replicate was given a ndarray as argument 1"):
        nnx_dp.replicate(linear()[0], X)


def test_pmap_cannot_be_lowered():
    arguments = state()
    dp_step = nnx_dp.data_parallel(step, strategy="pmap", devices=4)
    with refused(NotImplementedError, 'Lower the step with strategy="shard_map"', *arguments):
        dp_step.lower(*arguments, X, Y)


def test_uneven_batch_that_traces_nowhere_gets_the_steps_own_error():
    def only_two_rows(model, x):
        return model(x.reshape(2, 3))

    match = "cannot reshape"
    make = lambda: linear()[:1]  # noqa: E731
    refuse(only_two_rows, TypeError, match, X[:7], strategy="auto", make=make)


def test_flax_without_a_method_that_is_extended():
    with pytest.raises(
        ImportError, match=r"nnx_dp extends flax\.nnx\.Linear\.transpose, which flax"
    ):
        wrap_method(nnx, "Linear", "transpose", lambda original: original)


# -------------------------------------------------------------------------------------------------
# What the step computes


@every_strategy
def test_step_inside_a_step(strategy):
    inner = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)

    def outer(model, optimizer, rngs, x, y):
        return inner(model, optimizer, x, y)

    told = refuse(outer, RuntimeError, "called inside another", X, Y, strategy=strategy)
    assert "train_step.__wrapped__" in told


@every_strategy
def test_loss_that_is_not_a_scalar(strategy):
    def step(model, optimizer, rngs, x, y):
        grads = nnx.grad(lambda model: (model(x) - y) ** 2)(model)
        optimizer.update(model, grads)

    refuse(step, TypeError, r"scalar.*\([28], 1\)", X, Y, strategy=strategy)


@per_device_strategies
def test_loss_that_is_neither_a_mean_nor_a_sum(strategy):
    mask = np.arange(8) < 5

    def masked(model, optimizer, rngs, x, y, mask):
        def loss_fn(model):
            return jnp.sum(((model(x) - y) ** 2)[:, 0] * mask) / mask.sum()

        optimizer.update(model, nnx.grad(loss_fn)(model))

    told = refuse(masked, ValueError, "loss of gradient 1", X, Y, mask, strategy=strategy)
    assert "nnx_dp.mean(losses, where=mask)" in told
    assert "test_errors.py" in told

    def root(model, optimizer, rngs, x, y):
        loss_fn = lambda model: jnp.sqrt(jnp.mean((model(x) - y) ** 2))  # noqa: E731
        optimizer.update(model, nnx.grad(loss_fn)(model))

    refuse(root, ValueError, "loss of gradient 1", X, Y, strategy=strategy)

    def worst(model, optimizer, rngs, x, y):
        loss_fn = lambda model: jnp.max((model(x) - y) ** 2)  # noqa: E731
        optimizer.update(model, nnx.grad(loss_fn)(model))

    refuse(worst, ValueError, "loss of gradient 1", X, Y, strategy=strategy)


@per_device_strategies
def test_gradient_that_nobody_synchronised(strategy):
    def step(model, optimizer, rngs, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params):
            return jnp.mean((nnx.merge(graphdef, params, rest)(x) - y) ** 2)

        optimizer.update(model, jax.grad(loss_fn)(params))

    match = r"model\.(bias|kernel) would differ between the 4 devices: it depends on the batch"
    told = refuse(step, ValueError, match, X, Y, strategy=strategy)
    assert "nnx_dp.grad" in told
    assert "nnx_dp.pmean" in told


@per_device_strategies
def test_parameter_overwritten_with_a_batch_statistic(strategy):
    def step(model, optimizer, rngs, x, y):
        model.bias[...] = x.mean(keepdims=True)[0]

    match = r"model\.bias would differ between the 4 devices.*x.*test_errors\.py"
    told = refuse(step, ValueError, match, X, Y, strategy=strategy)
    assert 'state_reduce={nnx.Param: "mean"}' in told


@per_device_strategies
def test_counter_of_examples(strategy):
    """Equal on every device, and yet not what one device would count."""

    def step(count, x):
        count[...] += x.shape[0]

    told = refuse(
        step,
        ValueError,
        r"count would be equal on all 4 devices, but not be what one device computes",
        X,
        strategy=strategy,
        make=lambda: (nnx.Variable(jnp.array(0)),),
    )
    assert '"accumulate"' in told


@per_device_strategies
def test_state_that_keeps_the_batch(strategy):
    def step(last, x):
        last.set_value(x)

    match = r"last would hold part of the batch: shape \(2, 3\) on each of 4 devices"
    make = lambda: (nnx.Variable(jnp.zeros((8, 3))),)  # noqa: E731
    refuse(step, ValueError, match, X, strategy=strategy, make=make)


@per_device_strategies
def test_step_that_hard_codes_the_size_of_the_whole_batch(strategy):
    """JAX's own message speaks of shapes that the user never wrote: say where they are from."""

    def step(last, x):
        last[...] = x

    make = lambda: (nnx.Variable(jnp.zeros((8, 3))),)  # noqa: E731
    refuse(step, ValueError, r"2 of the 8|per.device|one device", X, strategy=strategy, make=make)


@per_device_strategies
def test_static_attribute_that_depends_on_the_batch_size(strategy):
    def step(model, optimizer, rngs, x, y):
        model.seen = x.shape[0]

    match = "another structure.*static attribute or an output depends on the batch size"
    refuse(step, ValueError, match, X, Y, strategy=strategy)


@per_device_strategies
@pytest.mark.parametrize(
    "output",
    [
        jnp.median,
        jnp.std,
        lambda x: jnp.sort(x, axis=0),
        lambda x: x[::-1],
        lambda x: x - x.mean(),
        lambda x: jnp.argmax(x[:, 0]),
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x[0],
        lambda x: x.T @ x / (x.shape[0] - 1),
        lambda x: jnp.linalg.norm(x),
    ],
    ids="median std sort reversed centred argmax cumsum first covariance norm".split(),
)
def test_output_that_cannot_be_put_together(strategy, output):
    def step(model, optimizer, rngs, x, y):
        return {"fine": x, "bad": output(x)}

    told = refuse(step, ValueError, r"output(\.bad|\['bad'\])", X, Y, strategy=strategy)
    assert "4 devices" in told or "nnx_dp.all_gather" in told
    assert 'strategy="jit"' in told


@per_device_strategies
def test_output_is_named_as_the_caller_would_write_it(strategy):
    def step(x):
        return {"loss": x.sum(), "stats": (x, {"median": jnp.median(x)})}

    match = re.escape("output['stats'][1]['median']")
    refuse(step, ValueError, match, X, strategy=strategy, make=tuple)


@per_device_strategies
def test_line_is_named_where_the_user_wrote_it(strategy):
    """The line of a function that JAX has traced before, elsewhere, is easily lost."""
    for output in (jnp.linalg.norm, jnp.std, jnp.median):
        output(X)
        refuse(
            lambda x, output=output: output(x),
            ValueError,
            r"test_errors\.py:\d+",
            X,
            strategy=strategy,
            make=tuple,
        )


@per_device_strategies
def test_number_of_examples_is_an_output_that_can_be_put_together(strategy):
    def step(x):
        return x.shape[0], jnp.ones(3) * len(x), jnp.ones(x.shape[0]).sum()

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    for x in (X, X[:4]):
        count, threes, ones = dp_step(x)
        assert (count, ones, *threes) == (len(x), len(x), *[len(x)] * 3)


@per_device_strategies
def test_maximum_is_an_output_that_can_be_put_together(strategy):
    def step(x):
        return x.max(), x.min(0), jnp.abs(x).max()

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    for x in (X, -X):
        assert_same(dp_step(x), step(x))


class Largest(nnx.Metric):
    """A metric class that the package has never seen."""

    def __init__(self):
        self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))

    def reset(self):
        self.largest[...] = -jnp.inf

    def update(self, *, values, **_):
        self.largest[...] = jnp.maximum(self.largest[...], values.max())

    def compute(self):
        return self.largest[...]


@per_device_strategies
def test_metric_class_that_is_not_known(strategy):
    def step(metric, x):
        metric.update(values=x)

    match = r"metric\.largest would differ between the 4 devices"
    told = refuse(step, ValueError, match, X, strategy=strategy, make=lambda: (Largest(),))
    assert "state_reduce={nnx.metrics.MetricState:" in told or "MetricState:" in told

    rule = {nnx.metrics.MetricState: "max"}
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, state_reduce=rule)
    metric, plain = Largest(), Largest()
    for x in (X, 2 * X):
        dp_step(metric, x)
        step(plain, x)
        assert_same(metric, plain)


@every_strategy
def test_exception_in_the_step_leaves_everything_as_it_was(strategy):
    def step(model, optimizer, rngs, x, y):
        rngs.normal((2,))
        train_step(model, optimizer, x, y)
        model.extra = nnx.Param(jnp.zeros(2))
        raise KeyError("no such thing")

    refuse(step, KeyError, "no such thing", X, Y, strategy=strategy)
    arguments = state()
    with refused(KeyError, "no such thing", *arguments):
        nnx_dp.data_parallel(step, strategy=strategy, devices=4)(*arguments, X, Y)
    model, optimizer, _ = arguments
    assert np.isfinite(train_step(model, optimizer, X, Y))


# -------------------------------------------------------------------------------------------------
# Donation


@every_strategy
def test_donated_state_keeps_training(strategy):
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    donated, plain = linear(), linear()
    for seed in range(3):
        batch = regression(seed=seed)
        assert_same(dp_step(*donated, *batch), train_step(*plain, *batch))
        assert_same(donated, plain)


@every_strategy
def test_donation_does_not_take_what_the_caller_still_holds(strategy):
    """A clone, and an array kept from before, share buffers with the model."""
    model, optimizer = linear()
    clone, kernel = nnx.clone(model), model.kernel[...]
    before = np.array(kernel)
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    for _ in range(2):
        dp_step(model, optimizer, X, Y)
    np.testing.assert_array_equal(kernel, before)
    np.testing.assert_array_equal(clone.kernel[...], before)


@every_strategy
def test_state_whose_memory_was_donated(strategy):
    """A clone taken between two donating calls shares the buffers that the second one reuses."""
    model, optimizer = linear()
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    dp_step(model, optimizer, X, Y)
    stale = nnx.clone(model)
    dp_step(model, optimizer, X, Y)
    _, other = linear()
    for _ in range(2):
        with (
            refused(ValueError, r"model\.(bias|kernel) was donated to an earlier step", other),
        ):
            dp_step(stale, other, X, Y)
    dp_step(model, optimizer, X, Y)


@every_strategy
def test_error_before_a_donated_step_leaves_its_state(strategy):
    arguments = linear()
    dp_step = nnx_dp.data_parallel(
        train_step, strategy=strategy, devices=4, donate=True, uneven="error"
    )
    dp_step(*arguments, X, Y)
    with refused(ValueError, "6 examples", *arguments):
        dp_step(*arguments, *regression(6))
    with refused(ValueError, "different lengths", *arguments):
        dp_step(*arguments, X, Y[:4])
    assert np.isfinite(dp_step(*arguments, X, Y))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decorated_step_is_the_outermost_transform(strategy):
    state, (x, y) = linear(), regression()
    step = nnx_dp.data_parallel(train_step, strategy=strategy)
    calls = (
        (lambda: nnx.jit(lambda model, optimizer, x: step(model, optimizer, x, y))(*state, x), "x"),
        (lambda: jax.grad(lambda x: step(*state, x, y))(x), "x"),
        (lambda: nnx.grad(lambda model: step(model, state[1], x, y))(state[0]), "model.bias"),
        (lambda: jax.vmap(lambda x: step(*state, x, y))(x[None]), "x"),
    )
    for call, path in calls:
        with refused(RuntimeError, rf"inside another transform.*which traces {path}\.", *state):
            call()


def test_static_attribute_that_cannot_be_hashed_is_named():
    model = nnx.List([nnx.BatchNorm(3, axis_index_groups=[[0, 1], [2, 3]], rngs=nnx.Rngs(0))])
    with pytest.raises(TypeError, match=r"model\[0\]\.axis_index_groups is a list"):
        nnx_dp.data_parallel(lambda model, x: model[0](x))(model, np.ones((8, 3)))


def test_axis_name_is_one_name():
    with pytest.raises(TypeError, match=r"axis_name is \('a', 'b'\)"):
        nnx_dp.data_parallel(train_step, axis_name=("a", "b"))


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_a_collective_over_another_axis_is_told_the_axis_name(strategy):
    step = nnx_dp.data_parallel(lambda x: jax.lax.pmean(x, "batch"), strategy=strategy)
    with pytest.raises(NameError, match='Give data_parallel axis_name="batch"'):
        step(jnp.ones(8))


def test_a_step_that_traces_nowhere_is_told_of_the_whole_batch():
    def step(x):
        raise RuntimeError(f"shape {x.shape}")

    with pytest.raises(RuntimeError, match=r"shape \(8, 3\)") as caught:
        nnx_dp.data_parallel(step, devices=4)(np.ones((8, 3)))
    assert "shape (2, 3)" in str(caught.value.__cause__)


def test_a_penalty_beside_a_sum_is_told_what_the_loss_is():
    def step(model, x, y):
        def loss_fn(model):
            return jnp.sum((model(x) - y) ** 2) + 0.1 * jnp.sum(model.kernel[...] ** 2)

        return nnx.grad(loss_fn)(model)

    with pytest.raises(ValueError, match=r"a sum of unlike terms .* makes it no plain mean or sum"):
        nnx_dp.data_parallel(step, strategy="shard_map")(linear()[0], *regression())
