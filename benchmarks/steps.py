"""What a step costs that has something to compute: milliseconds, against the hand-written recipe.

A CNN with BatchNorm and Dropout, the one of `docs/examples/digits.py`, and a small transformer, on
two devices made out of the CPU, with batches that make a step tens of milliseconds long.

    python benchmarks/steps.py [--quick] [--out DIR]

The recipe walks the graph of the NNX objects at every call, so what it loses here is not all
arithmetic.  `nnx.cached_partial` runs the recipe's program without the walk, and `jax.jit` over
flat lists of arrays without any NNX object: beside these, the arithmetic is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Goal, Part, bar_figure, ratio_table, take_turns
from _recipes import (
    CACHED,
    DATA_PARALLEL,
    DEVICES,
    FLOOR,
    RECIPE,
    State,
    Step,
    decorated,
    flat_jit,
    nnx_cached_partial,
    nnx_jit,
)
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table

Batch = tuple[np.ndarray, np.ndarray]
IMAGES = 2048
SEQUENCES, LENGTH, VOCABULARY, WIDTH = 48, 64, 64, 64


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 8, 8, 1] -> [B, 10]"""
        x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.linear(self.dropout(x.reshape(len(x), -1)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.expand = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.contract = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """[B, length, width] -> [B, length, width]"""
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, length] -> [B, length, vocabulary]"""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def train_step(model, optimizer, inputs, labels):
    def loss_fn(model):
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def make_state(model: nnx.Module) -> State:
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def images(rng: np.random.Generator) -> Batch:
    shape = (IMAGES, 8, 8, 1)
    return rng.normal(size=shape).astype(np.float32), rng.integers(10, size=IMAGES)


def sequences(rng: np.random.Generator) -> Batch:
    tokens = rng.integers(VOCABULARY, size=(SEQUENCES, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], Callable[..., Batch]]] = {
    f"CNN, {IMAGES} images": (CNN, images),
    f"transformer, {SEQUENCES} x {LENGTH} tokens": (Transformer, sequences),
}


# ---------------------------------------------------------------------------------------------
# Measuring


def measure(quick: bool) -> dict[str, Any]:
    rounds, calls = (4, 2) if quick else (50, 3)
    models = {name: measure_model(name, rounds, calls) for name in MODELS}
    return {"rounds": rounds, "calls": calls, "models": models}


def measure_model(name: str, rounds: int, calls: int) -> dict[str, Any]:
    make_model, make_batch = MODELS[name]
    rng = np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(calls)]
    makers: dict[str, Callable[..., Step]] = {
        **{
            label: partial(decorated, strategy=strategy)
            for strategy, label in DATA_PARALLEL.items()
        },
        RECIPE: nnx_jit,
        CACHED: nnx_cached_partial,
        FLOOR: flat_jit,
    }
    steps = {
        label: make(train_step, make_state(make_model(nnx.Rngs(0))))
        for label, make in makers.items()
    }
    losses = {label: [float(step(*batches[0])) for _ in range(3)] for label, step in steps.items()}
    for label, values in losses.items():
        # Each device of a per-device strategy draws a Dropout mask of its own.
        per_device = label in (DATA_PARALLEL["shard_map"], DATA_PARALLEL["pmap"])
        rtol = 0.05 if per_device else 1e-4
        np.testing.assert_allclose(values, losses[RECIPE], rtol=rtol)
    timings = take_turns(
        {label: lambda call, step=step: step(*batches[call]) for label, step in steps.items()},
        rounds=rounds,
        calls=calls,
        title=name,
    )
    return timings.against({"to the recipe": RECIPE})


# ---------------------------------------------------------------------------------------------
# What a person reads


def tables(results: dict[str, Any]) -> list[Table]:
    title = "Steps that compute: median milliseconds, and times the recipe (95% interval)"
    return [ratio_table(title, results["models"], to="to the recipe", base=RECIPE)]


def goals(results: dict[str, Any]) -> list[Goal]:
    label = DATA_PARALLEL["jit"]
    return [
        Goal(f"{label}, {name}, times the recipe", timings[label]["to the recipe"]["median"], 1.02)
        for name, timings in results["models"].items()
    ]


def plot(results: dict[str, Any]) -> Figure:
    return bar_figure(results["models"], size=(9, 2.9), label="milliseconds a step")


PART = Part(
    name="steps",
    description="Measures steps that have something to compute.",
    devices=DEVICES,
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
