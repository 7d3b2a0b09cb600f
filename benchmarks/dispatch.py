"""What a step costs before it computes anything: microseconds of dispatch.

The step is Adam on a stack of `nnx.Linear(8, 8)`, on two devices made out of the CPU: there is next
to nothing to compute, so what is measured is the way there and back.  Every contender is given a
new NumPy batch at each step, as a training loop does, and is waited for.

    python benchmarks/dispatch.py [--quick] [--out DIR]

The floor is `jax.jit` over flat lists of arrays.  Equinox has no graph to walk, so it shows what a
library of plain pytrees costs.  The last table has the cost of seeing, at each call, that the graph
is the one that was compiled for.  Fake devices measure overhead, never scaling.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Goal, Part, bar_figure, make_mesh, shardings, take_turns, version
from _recipes import (
    CACHED,
    DATA_PARALLEL,
    DEVICES,
    FLOOR,
    RECIPE,
    Step,
    decorated,
    flat_jit,
    local_train_step,
    nnx_cached_partial,
    nnx_jit,
    nnx_pmap,
    nnx_shard_map,
    stack_state,
    train_step,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from nnx_dp._snapshot import Snapshot

LAYERS, BATCH, WIDTH = (4, 32, 128), 8, 8
SHARD_MAP, PMAP = "nnx.jit(nnx.shard_map)", "nnx.pmap"
EQUINOX = "eqx.filter_jit + filter_shard"


def equinox(layers: int) -> Step:
    """The same step on an Equinox model that starts from the same weights."""
    import equinox as eqx

    class EquinoxStack(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            """[width] -> [width]"""
            for layer in self.layers:
                x = layer(x)
            return x

    def linear(like) -> eqx.nn.Linear:
        out = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))
        values = (like.kernel[...].T, like.bias[...])
        return eqx.tree_at(lambda linear: (linear.weight, linear.bias), out, values)

    whole, split = shardings(make_mesh(DEVICES))
    model: Any = EquinoxStack([linear(like) for like in stack_state(layers, WIDTH)[0].layers])
    transform = optax.adam(1e-3)
    optimizer = transform.init(eqx.filter(model, eqx.is_array))
    model, optimizer = eqx.filter_shard((model, optimizer), whole)

    @eqx.filter_jit
    def step(model, optimizer, x, y):
        model, optimizer = eqx.filter_shard((model, optimizer), whole)
        x, y = eqx.filter_shard((x, y), split)
        loss, grads = eqx.filter_value_and_grad(
            lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
        )(model)
        updates, optimizer = transform.update(grads, optimizer)
        model = eqx.apply_updates(model, updates)
        return loss, *eqx.filter_shard((model, optimizer), whole)

    def run(*batch):
        nonlocal model, optimizer
        loss, model, optimizer = step(model, optimizer, *jax.device_put(batch, split))
        return loss

    return run


def contenders(layers: int) -> dict[str, Step]:
    makers: dict[str, Callable[..., Step]] = {
        **{
            name: partial(decorated, train_step, strategy=strategy)
            for strategy, name in DATA_PARALLEL.items()
        },
        FLOOR: partial(flat_jit, train_step),
        RECIPE: partial(nnx_jit, train_step),
        CACHED: partial(nnx_cached_partial, train_step),
        SHARD_MAP: partial(nnx_shard_map, local_train_step),
        PMAP: partial(nnx_pmap, local_train_step),
    }
    out = {name: make(state=stack_state(layers, WIDTH)) for name, make in makers.items()}
    if version("equinox"):
        out[EQUINOX] = equinox(layers)
    return out


# ---------------------------------------------------------------------------------------------
# Measuring


def measure(quick: bool) -> dict[str, Any]:
    rounds, calls = (4, 5) if quick else (24, 5)
    return {
        "batch": BATCH,
        "width": WIDTH,
        "rounds": rounds,
        "calls": calls,
        "layers": {layers: measure_steps(layers, rounds, calls) for layers in LAYERS},
        "graph check": {layers: measure_check(layers, quick) for layers in LAYERS},
    }


def measure_steps(layers: int, rounds: int, calls: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(calls, 2, BATCH, WIDTH)).astype(np.float32)
    steps = contenders(layers)
    losses = {}
    for name, step in steps.items():
        for _ in range(3):  # compiles; nnx.pmap compiles again when its state is in place
            losses[name] = float(step(*batches[0]))
    np.testing.assert_allclose(list(losses.values()), losses[FLOOR], rtol=1e-5)
    timings = take_turns(
        {name: lambda call, step=step: step(*batches[call]) for name, step in steps.items()},
        rounds=rounds,
        calls=calls,
        title=f"dispatch, {layers} layers",
    )
    return timings.against({"to the floor": FLOOR, "to the recipe": RECIPE, "to nnx.pmap": PMAP})


def measure_check(layers: int, quick: bool) -> dict[str, float]:
    """Times the look at the graph that tells, at every call, that it is still the same."""
    nodes = stack_state(layers, WIDTH)
    snapshot = Snapshot(nodes)
    assert snapshot.unchanged(nodes)
    loops = 20 if quick else 200
    times = timeit.repeat(lambda: snapshot.unchanged(nodes), number=loops, repeat=15)
    return {"variables": len(snapshot.variables), "seconds": statistics.median(times) / loops}


# ---------------------------------------------------------------------------------------------
# What a person reads


def tables(results: dict[str, Any]) -> list[Table]:
    out = Table(title="Dispatch of one step: median microseconds, and times the floor")
    out.add_column("", no_wrap=True)
    for layers in results["layers"]:
        out.add_column(f"{layers} layers", justify="right")
        out.add_column("", justify="right")
    found = [*results["layers"].values()]
    for name in found[0]:
        cells = []
        for entry in (timings[name] for timings in found):
            median, ratio = entry["seconds"]["median"], entry["to the floor"]["median"]
            cells += [f"{median * 1e6:,.0f}", f"{ratio:.2f}x"]
        out.add_row(name, *cells)
    if EQUINOX not in found[0]:
        out.add_row(EQUINOX, "equinox is not installed")

    check = Table(title="The look at the graph at each call")
    for column in ("layers", "Variables", "microseconds", 'of a step under "jit"'):
        check.add_column(column, justify="right")
    for layers, entry in results["graph check"].items():
        step = results["layers"][layers][DATA_PARALLEL["jit"]]["seconds"]["median"]
        share = entry["seconds"] / step
        cells = (str(entry["variables"]), f"{entry['seconds'] * 1e6:,.0f}", f"{share:.1%}")
        check.add_row(layers, *cells)
    return [out, check]


def goals(results: dict[str, Any]) -> list[Goal]:
    def ratios(name: str, base: str) -> list[float]:
        return [timings[name][base]["median"] for timings in results["layers"].values()]

    out = []
    for strategy in ("jit", "shard_map"):
        name = DATA_PARALLEL[strategy]
        out += [
            Goal(f"{name}, times the floor", max(ratios(name, "to the floor")), 1.25),
            Goal(
                f"{name}, times faster than {RECIPE}",
                min(1 / ratio for ratio in ratios(name, "to the recipe")),
                4,
                at_least=True,
            ),
        ]
    name = DATA_PARALLEL["pmap"]
    return [*out, Goal(f"{name}, times {PMAP}", max(ratios(name, "to nnx.pmap")), 1)]


def plot(results: dict[str, Any]) -> Figure:
    groups = {f"{layers} layers": timings for layers, timings in results["layers"].items()}
    return bar_figure(groups, size=(11, 3.4), label="milliseconds a step", mark=mark_floor)


def mark_floor(axes: Axes, timings: Mapping[str, Any]) -> None:
    floor = timings[FLOOR]["seconds"]["median"] * 1e3
    axes.axvline(floor, color="0.4", linewidth=1, linestyle=":")


PART = Part(
    name="dispatch",
    description="Measures what a step costs before it computes anything.",
    devices=DEVICES,
    measure=measure,
    tables=tables,
    goals=goals,
    plot=plot,
)

if __name__ == "__main__":
    PART.main()
