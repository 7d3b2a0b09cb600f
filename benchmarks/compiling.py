"""What the first call of a step costs: seconds to trace, prove and compile.

The step is Adam on a stack of `nnx.Linear(8, 8)`, on two devices made out of the CPU.  The state is
placed before; every cache is cleared before each first call.

    python benchmarks/compiling.py [--quick] [--out DIR]

A per-device strategy plans a step before it compiles it: it traces the step twice more and proves
that the devices end with the same state.  The last table has what that is of the whole.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from _measure import Goal, Part, Timings, bar_figure, progress, ratio_table
from _recipes import (
    DATA_PARALLEL,
    DEVICES,
    FLOOR,
    RECIPE,
    Step,
    decorated,
    flat_jit,
    nnx_jit,
    stack_state,
    train_step,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

import nnx_dp._strategies.pmap
import nnx_dp._strategies.shard_map

LAYERS, BATCH, WIDTH = (4, 16), 8, 8
PLANNED = {
    "shard_map": nnx_dp._strategies.shard_map,
    "pmap": nnx_dp._strategies.pmap,
}

WAYS: dict[str, Callable[..., Step]] = {
    **{name: partial(decorated, strategy=strategy) for strategy, name in DATA_PARALLEL.items()},
    RECIPE: nnx_jit,
    FLOOR: flat_jit,
}


def measure(quick: bool) -> dict[str, Any]:
    rounds = 2 if quick else 11
    return {
        "rounds": rounds,
        "layers": {layers: measure_layers(layers, rounds) for layers in LAYERS},
    }


def measure_layers(layers: int, rounds: int) -> dict[str, Any]:
    states = {name: stack_state(layers, WIDTH) for name in WAYS}
    batch = np.ones((BATCH, WIDTH), np.float32), np.zeros((BATCH, WIDTH), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    plans: dict[str, list[float]] = {DATA_PARALLEL[strategy]: [] for strategy in PLANNED}
    # The round before the first warms up what no cache of JAX holds.
    for index in progress(range(-1, rounds), f"compiling, {layers} layers"):
        for name in [*WAYS][:: -1 if index % 2 else 1]:
            step = WAYS[name](train_step, states[name])
            jax.clear_caches()
            with timed_plans() as planning:
                start = time.perf_counter()
                jax.block_until_ready(step(*batch))
                taken = time.perf_counter() - start
            if index < 0:
                continue
            seconds[name].append(taken)
            if name in plans:
                plans[name].append(sum(planning) / taken)
    out = Timings(seconds).against({"to the recipe": RECIPE, "to the floor": FLOOR})
    for name, shares in plans.items():
        out[name]["plan's share"] = statistics.median(shares)
    return out


@contextlib.contextmanager
def timed_plans() -> Iterator[list[float]]:
    """Yields a list that is told the seconds of each plan that is made meanwhile."""
    seconds: list[float] = []
    with contextlib.ExitStack() as stack:
        for module in PLANNED.values():
            stack.enter_context(mock.patch.object(module, "make_plan", _timed(module, seconds)))
        yield seconds


def _timed(module: Any, seconds: list[float]) -> Callable[..., Any]:
    make_plan = module.make_plan

    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return make_plan(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return timed


# ---------------------------------------------------------------------------------------------
# What a person reads


def tables(results: dict[str, Any]) -> list[Table]:
    title = "First call: median seconds, and times the recipe (95% interval)"
    groups = by_layers(results)
    out = ratio_table(title, groups, to="to the recipe", base=RECIPE, scale=1, digits=(2, 2))
    plan = Table(title="The plan of a per-device strategy: seconds, and of the first call")
    plan.add_column("", no_wrap=True)
    for heading in groups:
        plan.add_column(heading, justify="right")
        plan.add_column("", justify="right")
    for name in WAYS:
        entries = [timings[name] for timings in groups.values()]
        if "plan's share" not in entries[0]:
            continue
        cells = []
        for entry in entries:
            share = entry["plan's share"]
            cells += [f"{share * entry['seconds']['median']:.2f}", f"{share:.0%}"]
        plan.add_row(name, *cells)
    return [out, plan]


def goals(results: dict[str, Any]) -> list[Goal]:
    name = DATA_PARALLEL["jit"]
    return [
        Goal(
            f"{name}, {layers} layers, times the recipe",
            entry[name]["to the recipe"]["median"],
            1.15,
        )
        for layers, entry in results["layers"].items()
    ]


def plot(results: dict[str, Any]) -> Figure:
    return bar_figure(
        by_layers(results),
        size=(9, 2.9),
        label="seconds of the first call (hatched: planning)",
        scale=1,
        digits=2,
        mark=hatch_plans,
    )


def hatch_plans(axes: Axes, timings: Mapping[str, Any]) -> None:
    shares = {name: entry.get("plan's share", 0) for name, entry in timings.items()}
    planned = [share * timings[name]["seconds"]["median"] for name, share in shares.items()]
    axes.barh(
        [*shares],
        planned,
        height=0.68,
        color="none",
        edgecolor="white",
        hatch="////",
        linewidth=0,
    )


def by_layers(results: dict[str, Any]) -> dict[str, Any]:
    return {f"{layers} layers": timings for layers, timings in results["layers"].items()}


PART = Part(
    name="compiling",
    description="Measures what the first call of a step costs.",
    devices=DEVICES,
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
