"""A run that stops on eight devices and goes on, on two, as if nothing had happened.

Trains a small network with Dropout on handwritten digits, and half way saves the model, the
optimizer, the random streams and the number of the step with Orbax.  A fresh model takes them up
on two devices.  Under "jit" the random numbers are those of one device, however many there are, so
the two halves together are the curve of a run that was never broken.

    python docs/examples/resume.py [--steps 200] [--out resume.png]
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits

import nnx_dp

BATCH = 64


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


class Training(nnx.Module):
    """All that a checkpoint holds: the optimizer counts the steps, the model keeps its streams."""

    def __init__(self, seed: int):
        self.model = Net(nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(3e-3), wrt=nnx.Param)


def train(training: Training, until: int, devices: int, description: str) -> list[float]:
    """Trains on from the step where it is."""
    step = nnx_dp.data_parallel(train_step, devices=devices)
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    losses = []
    for number in track(range(int(training.optimizer.step[...]), until), description):
        # The batch depends on the number of the step only, so a later run draws the same.
        rows = np.random.default_rng(number).choice(len(labels), BATCH, replace=False)
        losses.append(float(step(training.model, training.optimizer, images[rows], labels[rows])))
    return losses


def plot(whole: list[float], halves: list[list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    steps = np.arange(len(whole)) + 1
    first, second = halves
    axis.plot(steps, whole, color="0.8", linewidth=5, label="never stopped, eight devices")
    axis.plot(steps[: len(first)], first, color="#0072b2", label="until it stopped, eight devices")
    axis.plot(steps[len(first) :], second, color="#d55e00", label="restored, two devices")
    axis.set(title="One run in two parts", xlabel="step", ylabel="training loss", ylim=(0, None))
    axis.grid(axis="y", color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stops, and goes on on other devices.")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("resume.png"), help="the plot")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    steps, half = arguments.steps, arguments.steps // 2

    unbroken = Training(seed=0)
    whole = train(unbroken, steps, devices=8, description="never stopped")

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        stopped = Training(seed=0)
        first = train(stopped, half, devices=8, description="first half")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(checkpoint, nnx.state(stopped))

        # Another seed, so that nothing of the first half can come from anywhere but the file.
        restored = Training(seed=1)
        with ocp.StandardCheckpointer() as checkpointer:
            nnx.update(restored, checkpointer.restore(checkpoint, nnx.state(restored)))
    assert restored.optimizer.step[...] == half
    second = train(restored, steps, devices=2, description="second half")

    np.testing.assert_allclose(first + second, whole, rtol=1e-3)
    plot(whole, [first, second], arguments.out)
    worst = np.abs(np.array(first + second) / np.array(whole) - 1).max()
    print(f"The two halves are the unbroken run to {worst:.1e} of the loss; see {arguments.out}.")


if __name__ == "__main__":
    main()
