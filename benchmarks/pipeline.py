"""What `step.prefetch` hides: a loader that waits for its data, as for a disk or a network.

The step is the CNN of `docs/examples/digits.py`, on two devices made out of the CPU.  Loading a
batch takes half as long as the step, as long, or twice as long.  In turn, a step and a load take
the sum of both; prefetched, they should take no longer than the longer one.

    python benchmarks/pipeline.py [--quick] [--out DIR]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from _measure import Goal, Part, bar_figure, ratio_table, take_turns
from _recipes import DEVICES
from checks import train_step
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table
from steps import CNN

import nnx_dp

BATCH, STEPS = 512, 40
LOADS = {"loading: half a step": 0.5, "as long as a step": 1.0, "twice a step": 2.0}
ALONE, LOADER, IN_TURN, PREFETCHED = "step alone", "loading alone", "in turn", "step.prefetch"

Batch = tuple[np.ndarray, np.ndarray]

# ---------------------------------------------------------------------------------------------
# Measuring


def make_batches() -> list[Batch]:
    random = np.random.default_rng(0)
    return [
        (
            random.normal(size=(BATCH, 8, 8, 1)).astype(np.float32),
            random.integers(10, size=BATCH).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


def make_contenders(load: float, step_seconds: float) -> dict[str, Callable[[int], Any]]:
    batches = make_batches()

    def loader() -> Iterator[Batch]:
        for batch in batches:
            time.sleep(load * step_seconds)
            yield batch

    def trainer() -> tuple[Any, Callable[[Iterable[Batch]], None]]:
        model = CNN(nnx.Rngs(0))
        state = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.metrics.Accuracy()
        step = nnx_dp.data_parallel(train_step, devices=DEVICES)

        def train(source: Iterable[Batch]) -> None:
            for images, labels in source:
                jax.block_until_ready(step(*state, images, labels))

        return step, train

    _, alone = trainer()
    _, in_turn = trainer()
    step, prefetched = trainer()
    return {
        ALONE: lambda call: alone(batches),
        LOADER: lambda call: [None for _ in loader()],
        IN_TURN: lambda call: in_turn(loader()),
        PREFETCHED: lambda call: prefetched(step.prefetch(loader())),
    }


def measure(quick: bool) -> dict[str, Any]:
    warm = make_contenders(0.0, 0.0)[ALONE]
    warm(0)
    started = time.perf_counter()
    warm(1)
    step_seconds = (time.perf_counter() - started) / STEPS
    groups = {}
    for title, load in LOADS.items():
        contenders = make_contenders(load, step_seconds)
        for run in contenders.values():
            run(0)
        timings = take_turns(contenders, rounds=2 if quick else 12, calls=1, title=title)
        groups[title] = timings.against({"to the step": ALONE, "to loading": LOADER})
    return {"steps": STEPS, "batch": BATCH, "step seconds": step_seconds, "groups": groups}


# ---------------------------------------------------------------------------------------------
# What a person reads


def tables(results: dict[str, Any]) -> list[Table]:
    return [
        ratio_table(
            "Pipeline: median milliseconds a step, and times the step alone (95% interval)",
            results["groups"],
            to="to the step",
            base=ALONE,
            scale=1e3 / results["steps"],
            digits=(2, 2),
        )
    ]


def goals(results: dict[str, Any]) -> list[Goal]:
    return [
        Goal(
            f"{title}: prefetched, times the longer of the two",
            min(entry[PREFETCHED][to]["median"] for to in ("to the step", "to loading")),
            1.1,
        )
        for title, entry in results["groups"].items()
    ]


def plot(results: dict[str, Any]) -> Figure:
    return bar_figure(
        results["groups"],
        size=(9, 2.3),
        label="milliseconds a step",
        scale=1e3 / results["steps"],
        digits=1,
    )


PART = Part(
    name="pipeline",
    description="Measures what step.prefetch hides.",
    devices=DEVICES,
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
