"""The oracle matrix: every family of model, under every strategy, on one to eight devices.

The oracle is the undecorated step, called on one device with the whole batch. After each of three
steps, everything that the decorated step leaves behind has to be what the oracle left: outputs,
gradients, parameters, optimizer state, batch statistics, metrics, keys and counts of random
streams, and the structure of the objects that hold them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
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
    in_turns,
    linear,
    regression,
    snapshot,
)
from oracle import train_step as linear_step

import nnx_dp

ROWS = 24
STEPS = 3
DEVICES = (1, 2, 3, 8)
CLASSES = 3
VOCABULARY = 11
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
per_device_strategies = pytest.mark.parametrize("strategy", PER_DEVICE)


# -------------------------------------------------------------------------------------------------
# The batches: rows, and so shards, differ in scale, in the classes and in the tokens that they hold


def scaled_rows(seed, *shape):
    ramp = np.linspace(0.2, 2.0, ROWS, dtype=np.float32)
    values = np.random.default_rng(seed).standard_normal((ROWS, *shape)).astype(np.float32)
    return values * ramp.reshape(ROWS, *(1 for _ in shape))


def classes_by_row(seed):
    return (np.arange(ROWS) // 7 + np.random.default_rng(seed).integers(0, 2, ROWS)) % CLASSES


def classified(*shape):
    def batch(step):
        labels = classes_by_row(100 + step).astype(np.int32)
        return {"inputs": scaled_rows(step, *shape), "labels": labels}

    return batch


def next_tokens(step):
    drawn = np.random.default_rng(step).integers(0, 5, (ROWS, 6))
    text = ((drawn + np.arange(ROWS)[:, None] // 3) % VOCABULARY).astype(np.int32)
    return {"inputs": text[:, :-1], "labels": text[:, 1:]}


vectors = classified(5)
images = classified(6, 6, 2)
sequences = classified(5, 3)


# -------------------------------------------------------------------------------------------------
# The models: no parameter's true gradient is zero, since Adam would make a step out of its rounding


class MLP(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.hidden = nnx.Linear(5, 16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jnp.tanh(self.hidden(x))))


def identity(x):
    return x


class CNN(nnx.Module):
    def __init__(self, rngs, norm=None):
        self.first = nnx.Conv(2, 4, (3, 3), use_bias=norm is None, rngs=rngs)
        self.norm = norm or identity
        self.second = nnx.Conv(4, 6, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.silu(self.norm(self.first(x))), (2, 2), (1, 1))
        return self.head(jnp.mean(nnx.silu(self.second(x)), axis=(1, 2)))


class TiedLanguageModel(nnx.Module):
    """Embeds and unembeds with one Variable, which two modules hold."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.mix = nnx.Linear(8, 8, rngs=rngs)
        self.unembed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.unembed.embedding = self.embed.embedding

    def __call__(self, tokens):
        return self.unembed.attend(jnp.tanh(self.mix(self.embed(tokens))))


class LastOfLSTM(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.before_attention = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, use_bias=False, decode=False, rngs=rngs)
        self.before_mlp = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.head = nnx.Linear(8, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.before_attention(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.before_mlp(x))))
        return self.head(x)


class LowRankAdapted(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(5, 16, lora_rank=2, rngs=rngs)
        self.head = nnx.LoRA(
            16, 2, CLASSES, base_module=nnx.Linear(16, CLASSES, rngs=rngs), rngs=rngs
        )

    def __call__(self, x):
        return self.head(jnp.tanh(self.hidden(x)))


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


class ScannedStack(nnx.Module):
    """Three blocks whose parameters, keys and counts are stacked."""

    def __init__(self, rngs, dropout=0.0):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs):
            return Block(rngs, dropout)

        self.embed = nnx.Linear(5, 8, rngs=rngs)
        self.blocks = make_blocks(rngs)
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(block, x):
            return block(x)

        return self.head(through(self.blocks, self.embed(x)))


@nnx.remat
def rematerialised(layer, x):
    return layer(x)


class Rematerialised(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(5, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = rematerialised(block, x)
        return self.head(rematerialised(self.norm, x))


class Normalised(nnx.Module):
    """A hidden layer inside `nnx.SpectralNorm` or `nnx.WeightNorm`."""

    def __init__(self, rngs, wrapper):
        self.hidden = wrapper(nnx.Linear(5, 16, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.hidden(x)))


class Family(NamedTuple):
    make_model: Callable[[nnx.Rngs], nnx.Module]
    batch: Callable[[int], Any] = vectors
    wrt: Any = nnx.Param


FAMILIES = {
    "mlp": Family(MLP),
    "cnn": Family(CNN, images),
    "batch_norm": Family(lambda rngs: CNN(rngs, nnx.BatchNorm(4, rngs=rngs)), images),
    "group_norm": Family(lambda rngs: CNN(rngs, nnx.GroupNorm(4, num_groups=2, rngs=rngs)), images),
    "dropout_rate_0": Family(lambda rngs: MLP(rngs, dropout=0.0)),
    "dropout_deterministic": Family(
        lambda rngs: nnx.view(MLP(rngs, dropout=0.5), deterministic=True)
    ),
    "tied_embeddings": Family(TiedLanguageModel, next_tokens),
    "lstm": Family(LastOfLSTM, sequences),
    "transformer": Family(Transformer, next_tokens),
    "lora": Family(LowRankAdapted, wrt=nnx.LoRAParam),
    "scanned_stack": Family(ScannedStack),
    "remat": Family(Rematerialised),
    "spectral_norm": Family(lambda rngs: Normalised(rngs, nnx.SpectralNorm)),
    "weight_norm": Family(lambda rngs: Normalised(rngs, nnx.WeightNorm)),
}

# One object each, so that the structures of two optimizers can be compared.
ADAM = optax.adam(1e-2)
SGD = optax.sgd(0.1, momentum=0.9)


def make_metrics():
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("losses"),
        spread=nnx.metrics.Welford("losses"),
        accuracy=nnx.metrics.Accuracy(),
    )


def make_state(family, tx=ADAM):
    model = family.make_model(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, tx, wrt=family.wrt), make_metrics()


# -------------------------------------------------------------------------------------------------
# The step and its oracle


def losses_of(model, batch):
    logits = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses, logits


def train_step(model, optimizer, metrics, batch):
    """Returns the gradients too: in the parameters, Adam hides their scale."""

    def loss_fn(model):
        losses, logits = losses_of(model, batch)
        return jnp.mean(losses), (losses, logits)

    wrt = nnx.DiffState(0, optimizer.wrt)
    gradient = nnx.value_and_grad(loss_fn, argnums=wrt, has_aux=True)
    (loss, (losses, logits)), grads = gradient(model)
    optimizer.update(model, grads)
    metrics.update(losses=losses, logits=logits, labels=batch["labels"])
    return {"loss": loss, "logits": logits, "grads": grads}


class Trace(NamedTuple):
    """What a run left behind: after each step the arrays, and at the end the structure."""

    steps: list[Any]
    structure: nnx.GraphDef


def run(step, state, batches):
    steps = []
    for batch in batches:
        out = step(*state, batch)
        steps.append(snapshot({"state": state, "out": out}))
    return Trace(steps, nnx.graphdef(state, graph=True))


def run_family(name, wrap, tx=ADAM):
    family = FAMILIES[name]
    batches = [family.batch(step) for step in range(STEPS)]
    return run(wrap(train_step), make_state(family, tx), batches)


@functools.cache
def oracle(name, tx=ADAM):
    return run_family(name, wrap=nnx.jit, tx=tx)


def assert_same_run(actual, expected):
    for done, (step, expected_step) in enumerate(zip(actual.steps, expected.steps, strict=True)):
        try:
            assert_same(step, expected_step, **TOLERANCE)
        except AssertionError as error:
            error.add_note(f"after step {done + 1} of {STEPS}")
            raise
    assert actual.structure == expected.structure


def on(strategy, devices):
    return functools.partial(nnx_dp.data_parallel, strategy=strategy, devices=devices)


# Every family under every strategy, each pair on one number of devices, in turns.
TRIPLES = [
    (name, strategy, devices)
    for i, name in enumerate(FAMILIES)
    for j, strategy in enumerate(STRATEGIES)
    for k, devices in enumerate(DEVICES)
    if (i + j + k) % len(DEVICES) == 0
]


@pytest.mark.parametrize(("name", "strategy", "devices"), TRIPLES)
def test_family(name, strategy, devices):
    assert_same_run(run_family(name, on(strategy, devices)), oracle(name))


@every_strategy
@pytest.mark.parametrize("name", ["mlp", "batch_norm", "tied_embeddings"])
def test_family_with_sgd(name, strategy):
    """Adam would forgive a gradient that is a constant factor too large; SGD does not."""
    assert_same_run(run_family(name, on(strategy, 3), tx=SGD), oracle(name, tx=SGD))


def test_oracle_moves_everything_that_is_compared():
    """A comparison of values that never change would prove nothing."""
    first, *_, last = oracle("batch_norm").steps
    still = [path for path in first if np.array_equal(first[path], last[path])]
    assert still == []


# -------------------------------------------------------------------------------------------------
# Random streams


NOISY = {
    "mlp": lambda rngs: MLP(rngs, dropout=0.5),
    "scanned_stack": lambda rngs: ScannedStack(rngs, dropout=0.5),
}


class Noisy(nnx.Module):
    """A model with dropout, and a second layer of dropout that shows the mask that it drew."""

    def __init__(self, rngs, name):
        self.model = NOISY[name](rngs)
        self.seen = nnx.Dropout(0.5, rngs=rngs)


def noisy_step(noisy, optimizer, metrics, batch):
    out = train_step(noisy.model, optimizer, metrics, batch)
    mask = noisy.seen(jnp.ones((len(batch["labels"]), 32))) != 0
    return {"mask": mask, **out}


def run_noisy(name, wrap):
    noisy = Noisy(nnx.Rngs(0, dropout=1), name)
    optimizer = nnx.Optimizer(noisy.model, ADAM, wrt=nnx.Param)
    batches = [vectors(step) for step in range(STEPS)]
    return run(wrap(noisy_step), (noisy, optimizer, make_metrics()), batches)


@functools.cache
def noisy_oracle(name):
    return run_noisy(name, nnx.jit)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("name", NOISY)
def test_dropout_under_jit_is_that_of_one_device(name, devices):
    actual, expected = run_noisy(name, on("jit", devices)), noisy_oracle(name)
    assert_same_run(actual, expected)
    for step, expected_step in zip(actual.steps, expected.steps, strict=True):
        np.testing.assert_array_equal(step["['out']['mask']"], expected_step["['out']['mask']"])


@pytest.mark.parametrize("devices", [2, 8])
@per_device_strategies
@pytest.mark.parametrize("name", NOISY)
def test_dropout_on_each_device_draws_its_own_and_leaves_the_streams_alike(name, strategy, devices):
    actual, expected = run_noisy(name, on(strategy, devices)), noisy_oracle(name)
    assert actual.structure == expected.structure
    masks = []
    for step, expected_step in zip(actual.steps, expected.steps, strict=True):
        assert {path: (v.shape, v.dtype) for path, v in step.items()} == {
            path: (v.shape, v.dtype) for path, v in expected_step.items()
        }
        assert np.isfinite(step["['out']['loss']"])
        streams = [path for path in step if path.endswith((".key", ".count"))]
        drawn = [path for path in streams if "rngs" in path]
        assert len(drawn) >= 4
        for path in drawn:
            np.testing.assert_array_equal(step[path], expected_step[path], err_msg=path)
        masks += [part.tobytes() for part in np.split(step["['out']['mask']"], devices)]
    assert len(set(masks)) == STEPS * devices, "two devices, or two steps, drew the same mask"


# -------------------------------------------------------------------------------------------------
# Ways to write the step: its gradient, its modes, its arguments


class BatchNormMLP(nnx.Module):
    """Holds floats only, so that tree mode can differentiate the whole of it."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(5, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.hidden(x))))


def mean_loss(model, batch):
    return jnp.mean(losses_of(model, batch)[0])


def by_value_and_grad(model, batch):
    return nnx.value_and_grad(mean_loss)(model, batch)


def by_grad(model, batch):
    grads = nnx.grad(mean_loss)(model, batch)
    return optax.tree.norm(grads), grads


def by_grad_with_aux(model, batch):
    def loss_fn(model):
        losses, logits = losses_of(model, batch)
        return jnp.mean(losses), {"losses": losses, "extremes": (logits.max(), logits.min())}

    grads, aux = nnx.grad(loss_fn, has_aux=True)(model)
    return aux, grads


def by_sum(model, batch):
    return nnx.value_and_grad(lambda model: jnp.sum(losses_of(model, batch)[0]))(model)


def by_tree_mode(model, batch):
    return nnx.value_and_grad(mean_loss, graph=False)(model, batch)


def by_graph_without_updates(model, batch):
    return nnx.value_and_grad(mean_loss, graph=True, graph_updates=False)(model, batch)


def by_tree_mode_with_aux(model, batch):
    def loss_fn(model):
        losses, logits = losses_of(model, batch)
        return jnp.mean(losses), logits

    return nnx.value_and_grad(loss_fn, has_aux=True, graph=False)(model)


def by_pure_function(model, batch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return mean_loss(merged, batch), nnx.state(merged, nnx.BatchStat)

    (loss, stats), grads = nnx_dp.value_and_grad(loss_fn, has_aux=True)(params)
    nnx.update(model, stats)
    return loss, grads


def by_compiled_function(model, batch):
    return nnx.jit(by_value_and_grad)(model, batch)


def by_vjp(model, batch):
    loss, pull = nnx.vjp(lambda model: mean_loss(model, batch), model, graph=False)
    return loss, pull(jnp.ones(()))[0]


GRADIENTS = [
    by_value_and_grad,
    by_grad,
    by_grad_with_aux,
    by_sum,
    by_tree_mode,
    by_tree_mode_with_aux,
    by_graph_without_updates,
    by_pure_function,
    by_compiled_function,
    by_vjp,
]


def assert_same_as_plain(step, make_state, wrap, batches, plain=nnx.jit):
    assert_same_run(run(wrap(step), make_state(), batches), run(plain(step), make_state(), batches))


def make_batch_norm_mlp():
    model = BatchNormMLP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


@pytest.mark.parametrize(("gradient", "strategy"), in_turns(GRADIENTS))
def test_gradient(gradient, strategy):
    def step(model, optimizer, batch):
        value, grads = gradient(model, batch)
        optimizer.update(model, grads)
        return value, nnx.state(grads, nnx.Param)

    batches = [vectors(step) for step in range(STEPS)]
    assert_same_as_plain(step, make_batch_norm_mlp, on(strategy, 3), batches)


@every_strategy
def test_program_in_tree_mode(strategy):
    def step(model, optimizer, metrics, batch):
        loss, grads = nnx.value_and_grad(mean_loss)(model, batch)
        optimizer.update(model, grads)
        metrics.update(losses=losses_of(model, batch)[0])
        return loss

    def make():
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("losses"))
        return *make_batch_norm_mlp(), metrics

    batches = [vectors(step) for step in range(STEPS)]
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        assert_same_as_plain(step, make, on(strategy, 3), batches)


def make_pair():
    """A plain encoder, a LoRA decoder, and an optimizer for each."""
    rngs = nnx.Rngs(0)
    encoder = nnx.Linear(5, 8, rngs=rngs)
    decoder = nnx.LoRALinear(8, CLASSES, lora_rank=2, rngs=rngs)
    return (
        encoder,
        decoder,
        nnx.Optimizer(encoder, SGD, wrt=nnx.Param),
        nnx.Optimizer(decoder, SGD, wrt=nnx.LoRAParam),
    )


ENCODER, DECODER = nnx.DiffState(0, nnx.Param), nnx.DiffState(1, nnx.LoRAParam)


@every_strategy
@pytest.mark.parametrize("argnums", [(0, DECODER), (DECODER, ENCODER), DECODER, 0], ids=str)
def test_argnums(argnums, strategy):
    def step(encoder, decoder, encoder_optimizer, decoder_optimizer, batch):
        def loss_fn(encoder, decoder, batch):
            logits = decoder(jnp.tanh(encoder(batch["inputs"])))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return jnp.mean(losses), losses

        gradient = nnx.value_and_grad(loss_fn, argnums=argnums, has_aux=True)
        out, grads = gradient(encoder, decoder, batch)
        wanted = argnums if isinstance(argnums, tuple) else (argnums,)
        grads = grads if isinstance(argnums, tuple) else (grads,)
        for argument, grad in zip(wanted, grads, strict=True):
            if argument in (0, ENCODER):
                encoder_optimizer.update(encoder, grad)
            else:
                decoder_optimizer.update(decoder, grad)
        return out, grads

    batches = [vectors(step) for step in range(STEPS)]
    assert_same_as_plain(step, make_pair, on(strategy, 3), batches)


# -------------------------------------------------------------------------------------------------
# Evaluation and prediction


class EvaluatedMLP(BatchNormMLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


def eval_step(model, metrics, batch):
    losses, logits = losses_of(model, batch)
    metrics.update(losses=losses, logits=logits, labels=batch["labels"])


@pytest.mark.parametrize("devices", [3, 8])
@every_strategy
def test_eval_step_leaves_only_metrics(strategy, devices):
    def make():
        model = EvaluatedMLP(nnx.Rngs(0))
        model.eval()
        return model, make_metrics()

    batches = [vectors(step) for step in range(STEPS)]
    assert_same_as_plain(eval_step, make, on(strategy, devices), batches)


@every_strategy
def test_training_and_evaluation_in_turns(strategy):
    """One model, whose mode is a static attribute, and one decorated function for both modes."""

    def step(model, optimizer, metrics, batch):
        if model.norm.use_running_average:
            return eval_step(model, metrics, batch)
        loss, grads = nnx.value_and_grad(mean_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    def run_in_turns(step):
        model, optimizer = make_batch_norm_mlp()
        state = model, optimizer, make_metrics()
        steps = []
        for turn in range(2):
            for mode in (model.train, model.eval):
                mode()
                out = step(*state, vectors(turn))
                steps.append(snapshot((state, out, state[-1].compute())))
            state[-1].reset()
        return steps

    actual, expected = run_in_turns(on(strategy, 3)(step)), run_in_turns(nnx.jit(step))
    for step_found, step_expected in zip(actual, expected, strict=True):
        assert_same(step_found, step_expected, **TOLERANCE)


class Prediction(NamedTuple):
    classes: Any
    top: tuple[Any, Any]
    extra: dict[str, Any]


def predict(model, batch):
    logits = model(batch["inputs"])
    return Prediction(
        classes=jnp.argmax(logits, axis=-1),
        top=tuple(jax.lax.top_k(logits, 2)),
        extra={
            "by class": logits.T,
            "pairs": [logits[:, None, :], logits.astype(jnp.bfloat16) > 0],
            "mean": jnp.mean(logits, axis=0),
            "largest": jnp.max(logits),
            "smallest": jnp.min(logits, axis=0),
            "sum of squares": jnp.sum(logits**2),
            "kernel": model.head.kernel[...],
            "temperature": batch["temperature"],
            "none": None,
        },
    )


@pytest.mark.parametrize("devices", DEVICES)
@every_strategy
def test_predict_returns_a_pytree(strategy, devices):
    model = MLP(nnx.Rngs(0))
    batch = {**vectors(0), "temperature": 0.5}
    expected = nnx.jit(predict)(model, batch)
    actual = on(strategy, devices)(predict)(model, batch)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same(actual, expected, **TOLERANCE)


# -------------------------------------------------------------------------------------------------
# Fake devices


@every_strategy
def test_step_under_fake_pmap_and_jit(strategy):
    batches = [regression(seed=step) for step in range(STEPS)]
    with chex.fake_pmap_and_jit():
        check_against_one_device(linear_step, linear, batches, strategy=strategy, devices=2)
