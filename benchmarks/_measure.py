"""What the benchmarks share: devices, measuring in turns, reports, tables and plots.

A `Part` measures into a plain dictionary, and reads its tables, goals and plot off that.  So the
JSON file holds all that is needed to draw the plot again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

PACKAGES = ("jax", "jaxlib", "flax", "optax", "equinox", "numpy", "nnx_dp")
COLORS = {
    'data_parallel("jit")': "#0072b2",
    'data_parallel("shard_map")': "#d55e00",
    'data_parallel("pmap")': "#009e73",
}
OTHER_COLOR = "0.72"


# ---------------------------------------------------------------------------------------------
# Devices


def make_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))


def shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the sharding of what every device has whole, and that of the batch."""
    return NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))


# ---------------------------------------------------------------------------------------------
# Measuring


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median, and an interval that holds the true one with a probability of about 0.95."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        ordered = sorted(values)
        count = len(ordered)
        # Of an even number of values the interval has as many above as below: order statistics
        # around the middle, binomial with p = 1/2.
        reach = 0.98 * math.sqrt(count)
        low = max(0, math.floor(count / 2 - reach))
        high = min(count - 1, math.ceil(count / 2 + reach) - 1)
        return cls(statistics.median(ordered), ordered[low], ordered[max(low, high)])

    def as_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Timings:
    """The seconds of every contender in every round."""

    seconds: Mapping[str, Sequence[float]]

    def of(self, name: str) -> Estimate:
        return Estimate.of(self.seconds[name])

    def ratio(self, name: str, base: str) -> Estimate:
        """Compares within each round, so that what slows a whole round down falls out."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return Estimate.of([mine / other for mine, other in pairs])

    def against(self, bases: Mapping[str, str]) -> dict[str, Any]:
        """Returns every contender's seconds, and its ratio to each base, by the base's label."""
        return {
            name: {
                "seconds": self.of(name).as_json(),
                **{label: self.ratio(name, base).as_json() for label, base in bases.items()},
            }
            for name in self.seconds
        }


def take_turns(
    contenders: Mapping[str, Callable[[int], Any]], *, rounds: int, calls: int, title: str
) -> Timings:
    """Times the contenders in turns: in each round, the median of a few calls of each one.

    Args:
      contenders: by name, what to call; it is given the number of the call in the round.
      rounds: how many rounds.
      calls: how many calls of each contender in a round.
      title: says on the progress bar what is measured.
    """
    # What the contenders hold for good is not looked through at each collection.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in progress(range(rounds), title):
        # Forth and back, so that a steady drift of the machine falls on all alike.
        order = [*contenders][:: -1 if index % 2 else 1]
        for name in order:
            taken = []
            for call in range(calls):
                start = time.perf_counter()
                jax.block_until_ready(contenders[name](call))
                taken.append(time.perf_counter() - start)
            seconds[name].append(statistics.median(taken))
    gc.unfreeze()
    return Timings(seconds)


def progress(items: Sequence[Any], title: str) -> Any:
    return track(items, description=f"{title:>24}", console=Console(stderr=True))


# ---------------------------------------------------------------------------------------------
# Parts


@dataclasses.dataclass(frozen=True)
class Goal:
    """One claim, and whether what was measured bears it out."""

    claim: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "holds": self.holds}


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
      name: names its files, `name.json` and `name.png`.
      description: one line for `--help`.
      devices: how many devices are made out of the CPU.
      measure: measures, quickly or well; returns what goes into JSON.
      tables: reads the tables off it.
      goals: reads the goals off it.
      plot: draws it.
    """

    name: str
    description: str
    devices: int
    measure: Callable[[bool], dict[str, Any]]
    tables: Callable[[dict[str, Any]], Sequence[Table]]
    goals: Callable[[dict[str, Any]], Sequence[Goal]]
    plot: Callable[[dict[str, Any]], Figure]

    def main(self) -> None:
        """Runs the part by the arguments of the command line."""
        arguments = parser(self.description).parse_args()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", self.devices)
        path = arguments.out / f"{self.name}.json"
        if arguments.redraw:
            results = json.loads(path.read_text())["results"]
        else:
            # Through JSON, so that a redrawn plot cannot differ.
            results = json.loads(json.dumps(self.measure(arguments.quick)))
            report = {
                "part": self.name,
                "quick": arguments.quick,
                "environment": environment(),
                "goals": [goal.as_json() for goal in self.goals(results)],
                "results": results,
            }
            arguments.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_rounded(report), indent=1) + "\n")
        console = make_console()
        for each in self.tables(results):
            console.print(each)
        console.print(goals_table(self.goals(results)))
        self.plot(results).savefig(path.with_suffix(".png"), dpi=130)
        console.print(f"{path} and {path.with_suffix('.png')} are written.\n", highlight=False)


def parser(description: str) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=description)
    out.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs")
    out.add_argument("--redraw", action="store_true", help="do not measure: draw from the JSON")
    out.add_argument(
        "--out", type=Path, default=Path("benchmark_results"), help="for the JSON and the plots"
    )
    return out


def environment() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cpus": os.cpu_count(),
        "load average": os.getloadavg()[0],  # at the end; well above 2, others were at work
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
    }


def version(package: str) -> str | None:
    """Returns the installed version of a package, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_console() -> Console:
    console = Console()
    # Tables that are not read in a terminal need not fit into one.
    return console if console.is_terminal else Console(width=120)


def ratio_table(
    title: str,
    groups: Mapping[str, Mapping[str, Any]],
    *,
    to: str,
    base: str,
    scale: float = 1e3,
    digits: tuple[int, int] = (1, 3),
) -> Table:
    """Returns a table of the contenders' seconds and of their ratio to one, two columns a group.

    Args:
      groups: by heading, what `Timings.against` returned.
      to: the ratio's label there.
      base: the contender that it is to, which has no interval.
      scale: of the seconds.
      digits: how many of a value, and of a ratio, are written behind the point.
    """
    out = Table(title=title)
    out.add_column("", no_wrap=True)
    for heading in groups:
        out.add_column(heading, justify="right")
        out.add_column("", justify="right")
    shown, exact = digits
    for name in next(iter(groups.values())):
        cells = []
        for entry in (timings[name] for timings in groups.values()):
            ratio = entry[to]
            interval = f" ({ratio['low']:.{exact}f} to {ratio['high']:.{exact}f})"
            cells.append(f"{entry['seconds']['median'] * scale:.{shown}f}")
            cells.append(f"{ratio['median']:.{exact}f}" + (interval if name != base else ""))
        out.add_row(name, *cells)
    return out


def goals_table(goals: Sequence[Goal | Mapping[str, Any]]) -> Table:
    """Returns a table of goals, or of goals as they stand in JSON."""
    out = Table("goal", "wanted", "measured", "", title="Goals", title_justify="left")
    for goal in goals:
        entry = goal.as_json() if isinstance(goal, Goal) else goal
        sign = "at least" if entry["at_least"] else "at most"
        holds = "[green]holds[/green]" if entry["holds"] else "[red]missed[/red]"
        out.add_row(entry["claim"], f"{sign} {entry['limit']:g}", f"{entry['value']:.3g}", holds)
    return out


def _rounded(value: Any) -> Any:
    """Cuts digits that mean nothing."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


# ---------------------------------------------------------------------------------------------
# Plots


def bar_figure(
    groups: Mapping[str, Mapping[str, Any]],
    *,
    size: tuple[float, float],
    label: str,
    scale: float = 1e3,
    digits: int = 1,
    mark: Callable[[Axes, Mapping[str, Any]], Any] = lambda axes, timings: None,
) -> Figure:
    """Draws the contenders' seconds as bars, a panel for each group.

    Args:
      groups: by title, what `Timings.against` returned.
      size: inches.
      label: below each panel.
      scale: of the seconds; digits: how many of a value are written behind the point.
      mark: adds what one panel has besides.
    """
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(groups), sharey=True)
    for axes, (title, timings) in zip(all_axes, groups.items(), strict=True):
        seconds = {name: entry["seconds"] for name, entry in timings.items()}
        draw_bars(axes, seconds, scale=scale, written=lambda value: f"{value:.{digits}f}")
        mark(axes, timings)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
    return figure


def draw_bars(
    axes: Axes,
    values: Mapping[str, Mapping[str, float]],
    *,
    scale: float,
    written: Callable[[float], str],
) -> None:
    """Draws one horizontal bar for each contender, the first on top, with its value at the end."""
    names = [*values]
    medians = [values[name]["median"] * scale for name in names]
    axes.barh(names, medians, color=[COLORS.get(name, OTHER_COLOR) for name in names], height=0.68)
    for position, median in enumerate(medians):
        axes.annotate(
            written(median),
            (median, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(medians) * 1.22)
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")


def tidy(axes: Axes, grid: Any = "y") -> None:
    axes.grid(axis=grid, color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
