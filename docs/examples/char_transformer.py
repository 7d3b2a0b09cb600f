"""A character transformer on eight devices, whose attention is a Pallas kernel.

The kernel is the flash attention that JAX ships.  XLA cannot look into it, and so cannot split it
over devices; inside `nnx_dp.per_device` it is called with each device's own part of the batch.
The modules and the train step around it are written for one device, and the first losses are
checked against one device and ordinary attention.  At the end each device makes up a line of text.

    python docs/examples/char_transformer.py [--steps 400] [--out char_transformer.png]

On a CPU the kernel runs in Pallas's interpreter, so the example shows equal results, not speed.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.tpu  # or the interpreter does it late, and JAX compiles again
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track
from sklearn import datasets

import nnx_dp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.attention import mha

BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 32, 64, 96, 4, 1
COMPARED = 10  # steps that are taken on one device as well


@nnx_dp.per_device
def flash_attention(query, key, value, *, is_causal=False, **options):
    """[B, T, H, D] -> [B, T, H, D], where B counts the rows of one device."""
    scale = query.shape[-1] ** -0.5
    on_cpu = jax.default_backend() == "cpu"
    return mha(query, key, value, None, sm_scale=scale, causal=is_causal, interpret=on_cpu)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, attention_fn=flash_attention, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, characters: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(characters, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(BLOCKS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, T] -> logits [B, T, characters]"""
        x = self.embed(tokens) + self.position(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


@nnx_dp.data_parallel
def train_step(model, optimizer, windows):
    def loss_fn(model):
        logits = model(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx_dp.data_parallel
def predict(model, tokens):
    return model(tokens)


def load_text() -> str:
    """What scikit-learn tells of its data sets, without their tables."""
    names = ("iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud")
    told = "\n".join(getattr(datasets, f"load_{name}")().DESCR.lower() for name in names)
    lines = [line.strip() for line in told.splitlines()]
    return "\n".join(line for line in lines if sum(map(str.isalpha, line)) > 0.6 * len(line))


def train(
    step: Callable[..., Any], model: Transformer, tokens: np.ndarray, steps: int, description: str
) -> np.ndarray:
    """Trains on windows that are drawn from the text, always the same ones; returns the losses."""
    optimizer = nnx.Optimizer(model, optax.adam(4e-3), wrt=nnx.Param)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
    draws = np.random.default_rng(0)
    losses = []
    for _ in track(range(steps), description):
        batch = windows[draws.integers(len(windows), size=BATCH)]
        losses.append(float(step(model, optimizer, batch)))
    return np.array(losses)


def write(model: Transformer, first: int, rows: int) -> np.ndarray:
    """Draws one character after the other, for all rows at once; they begin with the first."""
    draws = np.random.default_rng(0)
    tokens = np.full((rows, LENGTH), first, np.int32)
    for position in track(range(1, LENGTH), "writing"):
        logits = np.asarray(predict(model, tokens))[:, position - 1]
        # The largest of logits with Gumbel noise is a draw; the factor makes it a careful one.
        tokens[:, position] = np.argmax(logits / 0.6 + draws.gumbel(size=logits.shape), axis=-1)
    return tokens


def plot(losses: np.ndarray, alone: np.ndarray, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for each, label, style in (
        (alone, "one device, ordinary attention", {"color": "0.75", "linewidth": 8}),
        (losses, "eight devices, Pallas kernel", {"color": "#0072b2", "linewidth": 1.5}),
    ):
        axis.plot(np.arange(len(each)) + 1, each, label=label, **style)
    axis.set(title="A character transformer", xlabel="step", ylabel="training loss")
    axis.set(xscale="log", ylim=(0, None))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a transformer with a Pallas kernel.")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("char_transformer.png"), help="the plot")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    text = load_text()
    alphabet = sorted(set(text))
    tokens = np.array([alphabet.index(character) for character in text], np.int32)

    model = Transformer(len(alphabet), nnx.Rngs(0))
    plain = nnx.clone(model)
    for block in plain.blocks:
        block.attention.attention_fn = nnx.dot_product_attention
    losses = train(train_step, model, tokens, arguments.steps, "eight devices")

    plain_step = nnx.jit(train_step.__wrapped__)
    alone = train(plain_step, plain, tokens, min(COMPARED, arguments.steps), "one device")
    np.testing.assert_allclose(losses[: len(alone)], alone, rtol=1e-3)
    assert losses[-1] < losses[0]

    for line in write(model, alphabet.index("\n"), rows=jax.device_count()):
        print("|", "".join(alphabet[token] for token in line).strip().replace("\n", " / "))
    plot(losses, alone, arguments.out)
    print(f"The loss fell from {losses[0]:.2f} to {losses[-1]:.2f}; see {arguments.out}.")


if __name__ == "__main__":
    main()
