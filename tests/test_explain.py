"""`step.explain` and `nnx_dp.visualize`: what they say is what happens."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import STRATEGIES, linear, regression, snapshot, train_step
from rich.console import Console

import nnx_dp


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x))).mean(-1, keepdims=True)


def full_step(model, optimizer, metric, batch, rate, table, mode="mean"):
    def loss_fn(model):
        losses = (model(batch["x"]) - batch["y"]) ** 2 * rate + table.sum()
        return losses.mean(), losses

    (loss, losses), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    metric.update(values=losses)
    return {"loss": loss, "losses": losses, "largest": losses.max()}


def full_call(rows=16):
    model = Net(nnx.Rngs(0))
    x, y = regression(rows)
    return (
        model,
        nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
        nnx.metrics.Average(),
        {"x": x, "y": y},
        0.5,
        jnp.zeros(7),
    )


OPTIONS = {"in_axes": {"table": None}, "devices": 4}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_and_output_is_there(strategy):
    step = nnx_dp.data_parallel(full_step, strategy=strategy, **OPTIONS)
    call = full_call()
    before = snapshot(call[:3])
    explanation = step.explain(*call)
    for path, value in snapshot(call[:3]).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    rows = {row.path: row for row in explanation.arguments}
    assert set(rows) >= {"model.linear.kernel", "batch['x']", "rate", "table", "mode"}
    kernel, x = rows["model.linear.kernel"], rows["batch['x']"]
    assert (kernel.role, kernel.why, kernel.shape) == ("state", "nnx.Param", (3, 4))
    assert (kernel.per_device_shape, kernel.nbytes) == ((3, 4), 48)
    assert (x.role, x.shape, x.per_device_shape, x.nbytes) == ("batch", (16, 3), (4, 3), 48)
    assert (rows["rate"].role, rows["rate"].why) == ("replicated", "a float")
    assert (rows["table"].role, rows["table"].why) == ("replicated", "in_axes gives None")
    assert (rows["mode"].role, rows["mode"].why) == ("static", "a str: 'mean'")
    assert rows["model.dropout.rngs.key"].nbytes == 8
    outputs = {row.path: row for row in explanation.outputs}
    assert set(outputs) == {"output['loss']", "output['losses']", "output['largest']"}
    assert outputs["output['losses']"].shape == (16, 1)
    assert outputs["output['losses']"].per_device_shape == (4, 1)
    if strategy == "jit":
        assert not explanation.rules
    else:
        assert outputs["output['loss']"].role == "mean"
        assert outputs["output['losses']"].role == "rows"
        assert outputs["output['largest']"].role == "max"
        assert explanation.rules == (
            "the gradient: mean over the devices, as its loss is a mean",
            "nnx.BatchNorm: statistics over all devices",
            "random stream 'default': different draws on each device",
            "nnx.metrics.Average: counts the batch of all devices",
        )
    # What it says of the arrays is what the call then does with them.
    out = step(*call)
    for path, name in (("output['losses']", "losses"), ("output['loss']", "loss")):
        assert outputs[path].shape == out[name].shape
        assert outputs[path].per_device_shape == out[name].addressable_shards[0].data.shape


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_and_bytes_are_those_of_the_compiled_program(strategy):
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    explanation = step.explain(*linear(), *regression())
    (row,) = explanation.collectives
    # Three weights, a bias and the loss, in float32.
    assert (row.kind, row.nbytes, row.in_loop) == ("all-reduce", 4 * 5, False)
    assert explanation.flops > 0
    assert explanation.temporary_bytes >= 0


def test_it_compiles_nothing_twice_and_counts_signatures():
    step = nnx_dp.data_parallel(train_step, devices=4)
    state = linear()
    assert step.explain(*state, *regression()).signatures == 1
    assert step.explain(*state, *regression()).signatures == 1
    step(*state, *regression())
    assert step.explain(*state, *regression(16)).signatures == 2


def test_abstract_arguments_will_do():
    step = nnx_dp.data_parallel(lambda model, x: model(x).sum(), devices=4)
    model = nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    explanation = step.explain(model, jax.ShapeDtypeStruct((8, 3), jnp.bfloat16))
    x = next(row for row in explanation.arguments if row.path == "x")
    assert (x.dtype, x.per_device_shape, x.nbytes) == (jnp.bfloat16, (2, 3), 12)
    assert explanation.why == "XLA can partition all of it"


def test_it_says_what_becomes_of_an_uneven_batch():
    def say(x, **options):
        step = nnx_dp.data_parallel(lambda model, x: model(x), devices=4, **options)
        return step.explain(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), x)

    x = jnp.ones((11, 3))
    assert say(x).arguments[-1].why.endswith("split on axis 0 inside, unevenly")
    padded = say(x, strategy="shard_map", uneven="pad")
    assert padded.rules == ("uneven=: a batch of 11 is made one of 12",)
    with pytest.warns(UserWarning, match="leaves the last 3 out"):
        dropped = say(x, strategy="shard_map", uneven="drop")
    assert dropped.rules == ("uneven=: a batch of 11 is made one of 8",)
    with pytest.warns(UserWarning, match="every device compute all"):
        copied = say(x, strategy="pmap", uneven="replicate")
    assert copied.rules == ('uneven="replicate": every device computes the whole batch',)


def test_rules_and_kernels_and_sharded_optimizers_are_named():
    class Peak(nnx.Variable):
        pass

    class Peaky(nnx.Module):
        def __init__(self):
            self.peak = Peak(jnp.zeros(()))

    def step(model, x, key):
        model.peak[...] = kernel(x).max() + jax.random.uniform(key)
        return nnx_dp.pmax(x.max())

    kernel = nnx_dp.per_device(lambda x: x * 2)
    decorated = nnx_dp.data_parallel(
        step, strategy="shard_map", state_reduce={Peak: "max"}, devices=4
    )
    rules = decorated.explain(Peaky(), jnp.ones((8, 2)), jax.random.key(0)).rules
    assert rules == (
        "key key: another on each device",
        "nnx_dp.per_device: <lambda> sees one device's shapes",
        "model.peak: max over the devices",
    )
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    divided = nnx_dp.data_parallel(train_step, shard_optimizer=True, devices=4)
    explanation = divided.explain(model, optimizer, jnp.ones((8, 64)), jnp.ones((8, 64)))
    assert explanation.rules == (
        "sharded optimizer state: 2 arrays, optimizer.opt_state[0].mu['kernel'] the first",
    )
    rows = {row.path: row for row in explanation.arguments}
    assert rows["optimizer.opt_state[0].mu['kernel']"].nbytes == 64 * 64 * 4 // 4


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_printed_table_fits(width):
    explanation = nnx_dp.data_parallel(full_step, strategy="shard_map", **OPTIONS).explain(
        *full_call()
    )
    out = io.StringIO()
    Console(file=out, width=width).print(explanation)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = out.getvalue()
    for word in ("Arguments", "Outputs", "Rules", "Between the devices", "nnx.BatchNorm"):
        assert word in text
    assert ("sharding" in text) == (width >= 100)


def test_markdown_has_every_array_and_html_is_escaped():
    explanation = nnx_dp.data_parallel(lambda model, x: model(x), devices=4).explain(
        Deep(9), jnp.ones((8, 3))
    )
    markdown = explanation.to_markdown()
    assert markdown.count(".kernel |") == 9
    assert "| x | batch | f32[8,3] | [2,3] | P('data'" in markdown
    assert "... 11 more" in str(explanation)
    html = explanation._repr_html_()
    assert html.startswith("<pre")
    assert "&lt;lambda&gt;" in html


class Deep(nnx.Module):
    def __init__(self, layers):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_it_refuses_what_a_call_refuses():
    step = nnx_dp.data_parallel(lambda x: jnp.median(x), strategy="shard_map", devices=4)
    with pytest.raises(ValueError, match="neither a plain mean, sum, maximum nor minimum"):
        step.explain(jnp.ones(8))


def test_the_picture_shows_each_part_on_its_device():
    pytest.importorskip("matplotlib")
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    step = nnx_dp.data_parallel(train_step, shard_optimizer=True, devices=4)
    figure = nnx_dp.visualize(step, model, optimizer, np.ones((8, 64)), np.ones((8, 64)))
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["model", "optimizer", "optimizer", "x", "y", "output"]
    texts = [text.get_text() for text in axes.texts]
    assert texts[:4] == ["whole"] * 4
    assert texts[8:12] == ["1/4", "2/4", "3/4", "4/4"]
    assert texts[12:16] == ["0:2", "2:4", "4:6", "6:8"]
    colors = [patch.get_facecolor() for patch in axes.patches]
    assert len(set(colors[:4])) == 1
    assert len(set(colors[12:16])) == 4
    figure.canvas.draw()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    step = nnx_dp.data_parallel(lambda x: x, devices=4)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        nnx_dp.visualize(step, jnp.ones(8))


def test_it_says_how_each_gradient_is_reduced():
    def of_the_batch(x, reduce):
        return nnx_dp.grad(lambda x: reduce(x**2))(x)

    def of_both(model, x):
        model_grads, x_grads = nnx_dp.grad(lambda model, x: model(x).mean(), argnums=(0, 1))(
            model, x
        )
        return jax.tree.leaves(model_grads), x_grads

    def rules(step, *args):
        return nnx_dp.data_parallel(step, strategy="shard_map", devices=4).explain(*args).rules

    x = jnp.ones((8, 3))
    of_a_mean = "not reduced but divided by the number of devices, as its loss is a mean"
    assert rules(of_the_batch, x, jnp.mean) == (
        f"the gradient with respect to the batch: {of_a_mean}",
    )
    assert rules(of_the_batch, x, jnp.sum) == (
        "the gradient with respect to the batch: not reduced, as its loss is a sum",
    )
    assert rules(of_both, linear()[0], x) == (
        "the gradient: mean over the devices, as its loss is a mean",
        f"the gradient with respect to the batch: {of_a_mean}",
    )
