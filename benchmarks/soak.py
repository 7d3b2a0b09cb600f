"""Runs a decorated step for a long time and watches that nothing grows.

Random batch sizes, switches between training and evaluation, checkpoints, and batches that are
prefetched.  Prints the resident memory, the live arrays, the threads and the compilations as it
goes, and fails if they grow after the first fifth of the run.

    python benchmarks/soak.py [--steps 5000] [--out soak.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.table import Table

import nnx_dp

SIZES = (8, 16, 24, 27)
"""Batch sizes; the last is one that eight devices do not divide."""


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.linear(x)))))


@nnx_dp.data_parallel(check_every=100)
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@nnx_dp.data_parallel
def evaluate(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    for _ in range(steps):
        rows = random.choice(SIZES)
        x = random.standard_normal((rows, 16)).astype(np.float32)
        yield x, x[:, :1] * 0.5


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def soak(steps: int, folder: Path) -> list[dict[str, float]]:
    """Runs the steps; returns what was measured ten times on the way."""
    compiled = [0]

    def count(event: str, _: float, **__: str) -> None:
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    measured = []
    with (
        ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as saver,
        train_step.prefetch(batches(steps)) as ahead,
    ):
        for step, (x, y) in enumerate(ahead, start=1):
            model.train()
            loss = train_step(model, optimizer, x, y)
            if step % 20 == 0:
                model.eval()
                loss = evaluate(model, x, y)
            if step % max(1, steps // 5) == 0:
                state = nnx.state((model, optimizer), nnx.Not(nnx.RngKey))
                saver.save(step, args=ocp.args.StandardSave(state))
                saver.wait_until_finished()
                del state
            if step % max(1, steps // 10) == 0:
                gc.collect()
                measured.append(
                    {
                        "step": step,
                        "loss": float(loss),
                        "resident_mib": resident_bytes() / 2**20,
                        "live_arrays": len(jax.live_arrays()),
                        "threads": threading.active_count(),
                        "compilations": compiled[0],
                    }
                )
    return measured


def check(measured: list[dict[str, float]]) -> None:
    """Raises AssertionError if something has grown since the first fifth of the run."""
    # Orbax holds the last checkpoint's arrays for a while: compare like with like.
    early, late = measured[2:6], measured[-4:]
    for name, allowed in {
        "compilations": 0,
        "threads": 1,
        "live_arrays": 8,
        "resident_mib": 16 + 0.05 * early[0]["resident_mib"],
    }.items():
        before, after = (max(row[name] for row in rows) for rows in (early, late))
        assert after <= before + allowed, f"{name} has grown from {before:.0f} to {after:.0f}"
    assert np.isfinite(measured[-1]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a step for long and watches memory.")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as folder:
        measured = soak(arguments.steps, Path(folder))
    table = Table(title=f"{arguments.steps} steps")
    for name in measured[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in measured:
        table.add_row(*(f"{v:,.4g}" if name == "loss" else f"{v:,.0f}" for name, v in row.items()))
    Console().print(table)
    arguments.out.write_text(json.dumps(measured, indent=2) + "\n")
    check(measured)


if __name__ == "__main__":
    main()
