"""Handwritten digits on eight devices, from a train step that was written for one.

Trains a small CNN, with BatchNorm and Dropout, from the same start on one device, with the plain
step, and on eight under each strategy of `nnx_dp.data_parallel`.  Prints the accuracies and how far
each loss curve is from the single device's, and plots the curves.

    python docs/examples/digits.py [--epochs 4] [--out digits_loss.png]

The eight devices are made out of the CPU, so the example shows equal results, not speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnx_dp

BATCH = 64


class CNN(nnx.Module):
    """Two convolutions with BatchNorm, then Dropout and a linear layer: logits of 10 classes."""

    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.linear = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 8, 8, 1] -> [B, 10]"""
        x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.linear(self.dropout(x.reshape(len(x), -1)))


def train_step(model, optimizer, accuracy, images, labels):
    """One step of Adam, written for one device."""

    def loss_fn(model):
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    accuracy.update(logits=logits, labels=labels)
    return loss


def predict(model, images):
    return model(images).argmax(axis=-1)


# ---------------------------------------------------------------------------------------------
# The four ways to run the step


@dataclasses.dataclass(frozen=True)
class Way:
    """The step and the prediction, ready to be called."""

    name: str
    train_step: Callable[..., Any]
    predict: Callable[..., Any]


def ways() -> list[Way]:
    found = [Way("one device", nnx.jit(train_step), nnx.jit(predict))]
    for strategy in ("jit", "shard_map", "pmap"):
        # The last batch of an epoch has 29 images, which 8 devices do not divide.  "jit" splits it
        # unevenly; the others leave 5 of them out.
        uneven = "auto" if strategy == "jit" else "drop"
        found.append(
            Way(
                strategy,
                nnx_dp.data_parallel(train_step, strategy=strategy, uneven=uneven),
                nnx_dp.data_parallel(predict, strategy=strategy),
            )
        )
    return found


# ---------------------------------------------------------------------------------------------
# Training


@dataclasses.dataclass
class Digits:
    """[N, 8, 8, 1] images from 0 to 1 and their [N] labels, for training and for the test."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls) -> Digits:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
        labels = labels.astype(np.int32)
        return cls(
            *train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
        )

    def steps(self, *, full: bool) -> int:
        """The number of batches in an epoch, with or without the last one, which is smaller."""
        count = len(self.train_labels)
        return count // BATCH if full else -(-count // BATCH)

    def batches(self, epoch: int, *, full: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng(epoch).permutation(len(self.train_labels))
        for step in range(self.steps(full=full)):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            yield self.train_images[chosen], self.train_labels[chosen]


@dataclasses.dataclass
class Run:
    """What one training came to."""

    name: str
    losses: np.ndarray
    train_accuracy: float
    test_accuracy: float
    seconds: float

    def difference(self, other: Run) -> np.ndarray:
        return np.abs(self.losses - other.losses)


def train(
    way: Way, digits: Digits, epochs: int, *, dropout: float, full: bool, advance: Callable[[], Any]
) -> Run:
    start = time.perf_counter()
    model = CNN(dropout, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    accuracy = nnx.metrics.Accuracy()
    losses = []
    for epoch in range(epochs):
        accuracy.reset()
        for images, labels in digits.batches(epoch, full=full):
            loss = way.train_step(model, optimizer, accuracy, images, labels)
            losses.append(float(loss))
            advance()
    model.eval()
    predicted = np.asarray(way.predict(model, digits.test_images))
    return Run(
        name=way.name,
        losses=np.array(losses),
        train_accuracy=float(accuracy.compute()),
        test_accuracy=float((predicted == digits.test_labels).mean()),
        seconds=time.perf_counter() - start,
    )


# ---------------------------------------------------------------------------------------------
# What a person reads

CAPTION = (
    'Without Dropout, on batches of 64, every strategy differs from one device by rounding. "jit" '
    "does so with Dropout and with the last batch of 29 as well: its masks are those of one "
    "device, and it splits any batch. Under the others each device draws masks of its own, and 5 "
    "of those 29 images are left out: they differ from one device as another seed would."
)
COLORS = {"jit": "#0072b2", "shard_map": "#d55e00", "pmap": "#009e73"}


def table(runs: list[Run], plain_runs: list[Run]) -> Table:
    out = Table(title="One train step, on one device and on eight", caption=CAPTION)
    out.add_column("strategy")
    out.add_column("train\naccuracy", justify="right")
    out.add_column("test\naccuracy", justify="right")
    out.add_column("largest difference\nof the loss", justify="right")
    out.add_column("the same,\nwithout Dropout", justify="right")
    out.add_column("seconds", justify="right")
    for run, plain in zip(runs, plain_runs, strict=True):
        alone = run is runs[0]
        out.add_row(
            run.name,
            f"{run.train_accuracy:.1%}",
            f"{run.test_accuracy:.1%}",
            "" if alone else f"{run.difference(runs[0]).max():.1e}",
            "" if alone else f"{plain.difference(plain_runs[0]).max():.1e}",
            f"{run.seconds:.1f}",
        )
    return out


def plot(runs: list[Run], plain_runs: list[Run], epochs: int, path: Path) -> None:
    """Draws each strategy's loss over the single device's, and the differences below."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="row", height_ratios=(3, 2))
    reference, plain_reference = runs[0], plain_runs[0]

    def epoch_of(run: Run) -> np.ndarray:
        return (np.arange(len(run.losses)) + 1) * epochs / len(run.losses)

    for (above, below), run, plain in zip(axes.T, runs[1:], plain_runs[1:], strict=True):
        color = COLORS[run.name]
        above.set_title(f'strategy="{run.name}"', family="monospace", fontsize=11)
        above.plot(epoch_of(run), reference.losses, color="0.75", linewidth=4, label="one device")
        above.plot(epoch_of(run), run.losses, color=color, linewidth=1.3, label="eight devices")
        for each, base, style in ((run, reference, "-"), (plain, plain_reference, ":")):
            below.plot(
                epoch_of(each),
                np.maximum(each.difference(base), 1e-9),
                color=color,
                linestyle=style,
                linewidth=1.3,
                label="with Dropout" if style == "-" else "without",
            )
        below.set_ylim(1e-9, 1e2)
        below.set_xlabel("epoch")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (above, below):
            axis.set_yscale("log")
            axis.grid(axis="y", color="0.92")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        above.legend(frameon=False, loc="lower left")
        below.legend(frameon=False, loc="upper left", ncols=2)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("difference from\none device")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on digits under each strategy.")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the 1437 images")
    parser.add_argument("--out", type=Path, default=Path("digits_loss.png"), help="the plot")
    arguments = parser.parse_args()
    epochs = arguments.epochs

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.filterwarnings("ignore", message='.*uneven="drop"')  # the caption says it

    console = Console()
    digits = Digits.load()
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    runs, plain_runs = [], []
    with Progress(*columns, console=console) as progress:
        for way in ways():
            steps = epochs * (digits.steps(full=False) + digits.steps(full=True))
            task = progress.add_task(way.name, total=steps)
            advance = lambda task=task: progress.advance(task)  # noqa: E731
            runs.append(train(way, digits, epochs, dropout=0.2, full=False, advance=advance))
            plain_runs.append(train(way, digits, epochs, dropout=0.0, full=True, advance=advance))
    console.print(table(runs, plain_runs))
    plot(runs, plain_runs, epochs, arguments.out)
    console.print(f"The plot is in [bold]{arguments.out}[/bold].", highlight=False)


if __name__ == "__main__":
    main()
