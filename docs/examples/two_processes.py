"""Two processes with two devices each train one model, each on its own half of every batch.

Starts itself twice, as two hosts would be started; the processes find each other on the loopback
and reduce over gloo.  The train step is the same as on one host.  The process that started them
trains by itself, on whole batches and one device, and at the end the curves are compared.

    python docs/examples/two_processes.py [--steps 100] [--out two_processes.png]
"""

import argparse
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits

import nnx_dp

PROCESSES, DEVICES, BATCH = 2, 2, 64


@nnx_dp.data_parallel
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(step: Callable[..., Any], steps: int, part: slice, *, show: bool) -> list[float]:
    """Trains on this part of every batch; the seeds are the same in every process."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    order = np.random.default_rng(0)
    losses = []
    for _ in track(range(steps), "training", disable=not show):
        rows = order.choice(len(labels), BATCH, replace=False)[part]
        losses.append(float(step(model, optimizer, images[rows], labels[rows])))
    return losses


def work(index: int, address: str, steps: int, results: Path) -> None:
    """What each of the processes does."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, index)
    half = BATCH // PROCESSES
    first = index == 0
    losses = train(train_step, steps, slice(index * half, (index + 1) * half), show=first)
    np.save(results / f"{index}.npy", losses)
    if first:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {losses[-1]:.4f}")


def start(steps: int, results: Path) -> list[subprocess.Popen]:
    """Starts this file once for each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--steps", str(steps)]
    command += ["--address", address, "--results", str(results), "--process"]
    return [subprocess.Popen([*command, str(index)]) for index in range(PROCESSES)]


def wait(started: list[subprocess.Popen]) -> None:
    """Waits for all of them; one that fails takes the others with it."""
    try:
        if any([process.wait(timeout=180) for process in started]):
            sys.exit("A process failed; its error is above.")
    finally:
        for process in started:
            process.kill()


def plot(together: np.ndarray, alone: np.ndarray, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    steps = np.arange(len(alone)) + 1
    axis.plot(steps, alone, color="0.8", linewidth=5, label="one process, one device")
    axis.plot(steps, together, color="#0072b2", label="two processes, four devices")
    axis.set(title="Digits in two processes", xlabel="step", ylabel="training loss", ylim=(0, None))
    axis.grid(axis="y", color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on digits in two processes.")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("two_processes.png"), help="the plot")
    for name, kind in (("--process", int), ("--address", str), ("--results", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.process is not None:
        work(arguments.process, arguments.address, arguments.steps, arguments.results)
        return

    with tempfile.TemporaryDirectory() as folder:
        started = start(arguments.steps, Path(folder))
        # Meanwhile this process does the same by itself, with the whole of every batch.
        alone = train(nnx.jit(train_step.__wrapped__), arguments.steps, slice(None), show=False)
        wait(started)
        in_first, in_second = (np.load(Path(folder, f"{i}.npy")) for i in range(PROCESSES))
    np.testing.assert_array_equal(in_first, in_second)
    np.testing.assert_allclose(in_first, alone, rtol=1e-3)
    plot(in_first, np.array(alone), arguments.out)
    worst = np.abs(in_first / alone - 1).max()
    print(f"One process with whole batches: {alone[-1]:.4f}. All losses agree to {worst:.1e}.")
    print(f"The plot is in {arguments.out}.")


if __name__ == "__main__":
    main()
