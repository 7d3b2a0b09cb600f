"""What is in the program of each device, for 1 to 64 devices: read off, without running it.

An MLP with SGD and a batch of 8192, on devices made out of the CPU.  For each number of devices the
step is compiled, and the program is looked into: collectives and their bytes, FLOPs, memory.

    python benchmarks/scaling.py [--quick] [--out DIR]

Perfect is: the bytes of the gradient and the loss, once, for any number of devices; and an N-th of
the single device's FLOPs and temporary memory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from _measure import COLORS, Goal, Part, progress, tidy
from _recipes import DATA_PARALLEL, train_step
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullLocator, ScalarFormatter
from rich.table import Table

import nnx_dp
from nnx_dp._hlo import find_collectives

DEVICES, BATCH, WIDTH, LAYERS = (1, 2, 4, 8, 16, 32, 64), 8192, 128, 4
STRATEGIES = ("jit", "shard_map")


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, width] -> [B, width]"""
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


# ---------------------------------------------------------------------------------------------
# Measuring


def measure(quick: bool) -> dict[str, Any]:
    devices = DEVICES[:4] if quick else DEVICES
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    batch = np.ones((BATCH, WIDTH), np.float32), np.zeros((BATCH, WIDTH), np.float32)
    gradient = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    programs: dict[str, dict[int, Any]] = {strategy: {} for strategy in STRATEGIES}
    pairs = [(strategy, count) for strategy in STRATEGIES for count in devices]
    for strategy, count in progress(pairs, "scaling"):
        step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=count)
        programs[strategy][count] = look_into(step.lower(model, optimizer, *batch).compile())
    return {
        "batch": BATCH,
        "width": WIDTH,
        "layers": LAYERS,
        "gradient and loss bytes": gradient + 4,
        "programs": programs,
    }


def look_into(compiled: jax.stages.Compiled) -> dict[str, Any]:
    found = find_collectives(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    return {
        "collectives": len(found),
        "kinds": sorted({collective.kind for collective in found}),
        "collective bytes": sum(collective.nbytes for collective in found),
        "flops": cost["flops"],
        "temp bytes": memory.temp_size_in_bytes,
        "argument bytes": memory.argument_size_in_bytes,
    }


# ---------------------------------------------------------------------------------------------
# What a person reads


def against_one(programs: dict[str, Any], what: str) -> dict[int, float]:
    """Returns a quantity of each device's program, times what an N-th of one device's is."""
    one = programs["1"][what]
    return {int(count): entry[what] * int(count) / one for count, entry in programs.items()}


def tables(results: dict[str, Any]) -> list[Table]:
    out = []
    for strategy, programs in results["programs"].items():
        table = Table(title=f'The program of each device under "{strategy}"')
        for column in (
            "devices",
            "collectives",
            "their bytes",
            "times the gradient",
            "MFLOP",
            "x N / one",
            "temporary KiB",
            "x N / one",
            "argument KiB",
        ):
            table.add_column(column, justify="right")
        flops, temp = (against_one(programs, what) for what in ("flops", "temp bytes"))
        for count, entry in programs.items():
            sent = entry["collective bytes"]
            table.add_row(
                count,
                f"{entry['collectives']} {' '.join(entry['kinds'])}".strip(),
                f"{sent:,}",
                f"{sent / results['gradient and loss bytes']:.3f}" if sent else "",
                f"{entry['flops'] / 1e6:,.1f}",
                f"{flops[int(count)]:.3f}",
                f"{entry['temp bytes'] / 1024:,.0f}",
                f"{temp[int(count)]:.2f}",
                f"{entry['argument bytes'] / 1024:,.0f}",
            )
        out.append(table)
    return out


def goals(results: dict[str, Any]) -> list[Goal]:
    out = []
    for strategy, programs in results["programs"].items():
        sent = [entry["collective bytes"] for count, entry in programs.items() if count != "1"]
        times_gradient = max(sent) / results["gradient and loss bytes"]
        flops = max(against_one(programs, "flops").values())
        out += [
            Goal(f'"{strategy}", bytes between devices, times the gradient', times_gradient, 1.001),
            Goal(f'"{strategy}", FLOPs of each of N, times an N-th of one', flops, 1.05),
        ]
    return out


def plot(results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    sent_axes, flops_axes, memory_axes = figure.subplots(1, 3)
    for strategy, programs in results["programs"].items():
        counts = [int(count) for count in programs]
        # The two lie on each other where both are perfect, so one is thin on the other.
        style: dict[str, Any] = {
            "color": COLORS[DATA_PARALLEL[strategy]],
            "label": f'"{strategy}"',
            "linewidth": 4 if strategy == "jit" else 1.5,
            "marker": "o",
            "markersize": 7 if strategy == "jit" else 3.5,
        }
        scale = results["gradient and loss bytes"]
        sent = [entry["collective bytes"] / scale for entry in programs.values()]
        sent_axes.plot(counts[1:], sent[1:], **style)  # one device sends nothing anywhere
        flops_axes.plot(counts, [*against_one(programs, "flops").values()], **style)
        temp = [entry["temp bytes"] / 2**20 for entry in programs.values()]
        memory_axes.plot(counts, temp, **style)
    one = results["programs"]["jit"]["1"]["temp bytes"] / 2**20
    memory_axes.plot(counts, [one / count for count in counts], ":", color="0.4", label="one / N")
    titles = {
        sent_axes: "bytes between devices,\ntimes gradient and loss",
        flops_axes: "FLOPs of each device,\ntimes an N-th of one's",
        memory_axes: "temporary memory\nof each device, MiB",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=11)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("devices")
        tidy(axes)
    for axes in (sent_axes, flops_axes):
        axes.set_ylim(0, 1.25 * max(1, *axes.dataLim.intervaly))
    memory_axes.set_yscale("log", base=2)
    memory_axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    memory_axes.legend(frameon=False)
    return figure


PART = Part(
    name="scaling",
    description="Looks into the programs of 1 to 64 devices.",
    devices=max(DEVICES),
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
