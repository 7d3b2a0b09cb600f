"""What a step costs before it computes anything: microseconds of dispatch, median over many steps.

The step is Adam on a stack of `nnx.Linear(8, 8)`, on two devices made out of the CPU: there is next
to nothing to compute, so what is measured is the way there and back.  Every contender is given a
new NumPy batch at each step, as a training loop does, and is waited for.  The contenders take turns
in short rounds, so that a busy moment of the machine falls on all of them.

    python benchmarks/dispatch.py [--layers 4 32] [--rounds 20] [--steps 10] [--out dispatch.json]

The floor is `jax.jit` over flat lists of arrays: what is left if nobody looks at an NNX object.
Fake devices measure overhead, never scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nnx_dp

DEVICES, BATCH, WIDTH = 2, 8, 8
FLOOR = "jax.jit, flat leaves"

Step = Callable[[np.ndarray, np.ndarray], Any]


class Stack(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def make_state(layers: int) -> tuple[Stack, nnx.Optimizer]:
    model = Stack(layers, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


# ---------------------------------------------------------------------------------------------
# The contenders: each returns a function of one NumPy batch that runs one step


def decorated(strategy: str) -> Callable[[int], Step]:
    def make(layers: int) -> Step:
        model, optimizer = make_state(layers)
        step = nnx_dp.data_parallel(train_step, strategy=strategy)
        return lambda x, y: step(model, optimizer, x, y)

    return make


def by_hand(layers: int) -> Step:
    """The recipe of the Flax documentation: replicated state, a sharded batch, `nnx.jit`."""
    mesh, whole, split = _shardings()
    model, optimizer = make_state(layers)
    for node in (model, optimizer):
        nnx.update(node, jax.device_put(nnx.state(node), whole))
    step = nnx.jit(train_step)

    def run(x, y):
        with jax.set_mesh(mesh):
            return step(model, optimizer, *jax.device_put((x, y), split))

    return run


def bare_pmap(layers: int) -> Step:
    """`nnx.pmap` with the device axis, the broadcast state and the pmean written by hand."""
    model, optimizer = make_state(layers)
    state = nnx.StateAxes({...: None})

    def local_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        loss, grads = lax.pmean((loss, grads), "data")
        optimizer.update(model, grads)
        return loss

    step = nnx.pmap(
        local_step,
        axis_name="data",
        in_axes=(state, state, 0, 0),
        out_axes=None,
        devices=jax.devices()[:DEVICES],
        graph=True,
        graph_updates=True,
    )
    shape = (DEVICES, BATCH // DEVICES, WIDTH)
    return lambda x, y: step(model, optimizer, x.reshape(shape), y.reshape(shape))


def flat_jit(layers: int) -> Step:
    """The floor: the state is a list of arrays throughout."""
    _, whole, split = _shardings()
    graphdef, state = nnx.split(make_state(layers))
    leaves, treedef = jax.tree.flatten(state)
    leaves = jax.device_put(leaves, whole)

    @jax.jit
    def step(leaves, x, y):
        model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        loss = train_step(model, optimizer, x, y)
        new = jax.tree.leaves(nnx.state((model, optimizer)))
        return loss, [lax.with_sharding_constraint(leaf, whole) for leaf in new]

    def run(x, y):
        nonlocal leaves
        loss, leaves = step(leaves, *jax.device_put((x, y), split))
        return loss

    return run


def _shardings() -> tuple[Mesh, NamedSharding, NamedSharding]:
    devices = np.array(jax.devices()[:DEVICES])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return mesh, NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))


CONTENDERS: dict[str, Callable[[int], Step]] = {
    'data_parallel("jit")': decorated("jit"),
    'data_parallel("shard_map")': decorated("shard_map"),
    'data_parallel("pmap")': decorated("pmap"),
    "nnx.jit + NamedSharding": by_hand,
    "nnx.pmap": bare_pmap,
    FLOOR: flat_jit,
}


# ---------------------------------------------------------------------------------------------
# Measuring


def measure(layers: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Returns the microseconds of every timed step of every contender."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(steps, 2, BATCH, WIDTH)).astype(np.float32)
    contenders = {name: make(layers) for name, make in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses = {}
    for name, step in contenders.items():
        for _ in range(3):  # compiles; nnx.pmap compiles again when its state is in place
            losses[name] = float(step(*batches[0]))
    np.testing.assert_allclose(list(losses.values()), losses[FLOOR], rtol=1e-5)
    for _ in track(range(rounds), description=f"{layers:>3} layers", console=Console(stderr=True)):
        for name, step in contenders.items():
            for x, y in batches:
                start = time.perf_counter()
                jax.block_until_ready(step(x, y))
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    floor = statistics.median(times[FLOOR])
    out = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        out[name] = {
            "median_us": median,
            "quartiles_us": [low, high],  # type: ignore[dict-item]
            "times_the_floor": median / floor,
        }
    return out


def table(results: dict[int, dict[str, dict[str, Any]]]) -> Table:
    out = Table(title="Dispatch, median microseconds a step (times the floor)")
    out.add_column("")
    for layers in results:
        out.add_column(f"{layers} layers", justify="right")
        out.add_column("", justify="right")
    for name in CONTENDERS:
        cells = []
        for summary in results.values():
            cells += [
                f"{summary[name]['median_us']:,.0f}",
                f"{summary[name]['times_the_floor']:.1f}x",
            ]
        out.add_row(name, *cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the dispatch of one step.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps of each contender in a round")
    parser.add_argument("--out", type=Path, default=Path("dispatch.json"))
    arguments = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results = {
        layers: summarise(measure(layers, arguments.rounds, arguments.steps))
        for layers in arguments.layers
    }
    report = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "nnx_dp": nnx_dp.__version__,
        "cpus": os.cpu_count(),
        "devices": DEVICES,
        "batch": BATCH,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "layers": {str(layers): summary for layers, summary in results.items()},
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    Console().print(table(results))


if __name__ == "__main__":
    main()
