"""What `check_every=` costs: the CNN of `docs/examples/digits.py`, with and without it.

The step, the batch of 64 and the wait for every loss are the example's, on two devices made out of
the CPU.  A check falls on few steps, so what is timed is a run of a hundred: each holds all the
checks that it should.

    python benchmarks/checks.py [--quick] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from _measure import Goal, Part, bar_figure, ratio_table, take_turns
from _recipes import DATA_PARALLEL, DEVICES
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table
from steps import CNN

import nnx_dp

BATCH, STEPS = 64, 100
EVERY = (1, 10, 100)
WITHOUT = "no check"


def train_step(model, optimizer, accuracy, images, labels):
    def loss_fn(model):
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    accuracy.update(logits=logits, labels=labels)
    return loss


def label(every: int | None) -> str:
    return WITHOUT if every is None else f"check_every={every}"


# ---------------------------------------------------------------------------------------------
# Measuring


def make_run(strategy: str, every: int | None) -> Callable[[int], Any]:
    """Returns what runs a hundred steps."""
    model = CNN(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.metrics.Accuracy()
    step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=DEVICES, check_every=every)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(STEPS, BATCH, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(10, size=(STEPS, BATCH)).astype(np.int32)

    def run(call: int) -> None:
        for index in range(STEPS):
            jax.block_until_ready(step(*state, images[index], labels[index]))

    return run


def measure(quick: bool) -> dict[str, Any]:
    rounds = 2 if quick else 24
    strategies = {}
    for strategy, name in DATA_PARALLEL.items():
        runs = {label(every): make_run(strategy, every) for every in (None, *EVERY)}
        for run in runs.values():
            run(0)  # compiles the step and the check
        timings = take_turns(runs, rounds=rounds, calls=1, title=name)
        strategies[name] = timings.against({"to no check": WITHOUT})
    return {"rounds": rounds, "steps": STEPS, "batch": BATCH, "strategies": strategies}


# ---------------------------------------------------------------------------------------------
# What a person reads


def one_check(timings: dict[str, Any], bound: str = "median") -> float:
    """How many steps' time one check takes: with one after every step, what there is on top."""
    return timings[label(1)]["to no check"][bound] - 1


def tables(results: dict[str, Any]) -> list[Table]:
    strategies = results["strategies"]
    out = ratio_table(
        "Checks: median milliseconds a step, and times no check (95% interval)",
        strategies,
        to="to no check",
        base=WITHOUT,
        scale=1e3 / results["steps"],
        digits=(2, 3),
    )
    out.add_section()
    cells = []
    for timings in strategies.values():
        low, high = one_check(timings, "low"), one_check(timings, "high")
        cells += ["", f"{one_check(timings):.3f} ({low:.3f} to {high:.3f})"]
    out.add_row("one check, in steps", *cells)
    return [out]


def goals(results: dict[str, Any]) -> list[Goal]:
    return [
        Goal(
            f"{name}, {label(every)}, times no check",
            timings[label(every)]["to no check"]["median"],
            1.02,
        )
        for name, timings in results["strategies"].items()
        for every in EVERY[1:]
    ]


def plot(results: dict[str, Any]) -> Figure:
    return bar_figure(
        results["strategies"],
        size=(9, 2.3),
        label="milliseconds a step",
        scale=1e3 / results["steps"],
        digits=2,
    )


PART = Part(
    name="checks",
    description="Measures what check_every= costs.",
    devices=DEVICES,
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
