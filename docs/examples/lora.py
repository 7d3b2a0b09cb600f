"""LoRA on eight devices: new digits for a network that keeps its old weights to the bit.

Pretrains a small network on the handwritten digits 0 to 4, and then fine-tunes it on 5 to 9, where
only the low-rank parameters of its layers are trained.  One train step does both: the optimizer
says which Variables it updates, and the gradient is taken with respect to the same ones.

    python docs/examples/lora.py [--steps 300] [--out lora.png]
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits

import nnx_dp

BATCH, RANK = 64, 4


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.LoRALinear(64, 128, lora_rank=RANK, rngs=rngs)
        self.out = nnx.LoRALinear(128, 10, lora_rank=RANK, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


@nnx_dp.data_parallel
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # Argument 0 of the loss, and of it what the optimizer updates.
    trained = nnx.DiffState(0, optimizer.wrt)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=trained)(model)
    optimizer.update(model, grads)
    return loss


@nnx_dp.data_parallel
def correct(model, images, labels):
    return (model(images).argmax(axis=-1) == labels).mean()


# LoRAParam is a kind of Param, so the weights of the network itself are what is left.
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


def train(model: Net, images: np.ndarray, labels: np.ndarray, wrt, steps: int, description: str):
    """Trains the Variables that `wrt` lets through; returns the losses."""
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=wrt)
    draws = np.random.default_rng(0)
    losses = []
    for _ in track(range(steps), description):
        rows = draws.choice(len(labels), BATCH, replace=False)
        losses.append(float(train_step(model, optimizer, images[rows], labels[rows])))
    return losses


def plot(pretraining: list[float], tuning: list[float], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    steps = np.arange(len(pretraining)) + 1
    axis.plot(steps, pretraining, color="0.6", label="digits 0 to 4, own weights")
    axis.plot(steps + len(steps), tuning, color="#0072b2", label="digits 5 to 9, LoRA only")
    axis.set(title="Fine-tuning with LoRA", xlabel="step", ylabel="training loss", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrains on some digits, LoRA on the others.")
    parser.add_argument("--steps", type=int, default=300, help="steps of either training")
    parser.add_argument("--out", type=Path, default=Path("lora.png"), help="the plot")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    old, new = labels < 5, labels >= 5
    model = Net(nnx.Rngs(0))

    pretraining = train(model, images[old], labels[old], BASE, arguments.steps, "pretraining")
    before = jax.device_get(nnx.state(model, BASE))
    unknown = float(correct(model, images[new], labels[new]))

    tuning = train(model, images[new], labels[new], nnx.LoRAParam, arguments.steps, "fine-tuning")
    after = jax.device_get(nnx.state(model, BASE))
    known = float(correct(model, images[new], labels[new]))

    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert tuning[-1] < tuning[0]
    plot(pretraining, tuning, arguments.out)
    print(f"Of the digits 5 to 9 the network knew {unknown:.1%} before, and {known:.1%} after.")
    print(f"None of its own weights has changed by a bit. See {arguments.out}.")


if __name__ == "__main__":
    main()
