"""The ways to run one train step on several devices, which the benchmarks compare.

Each takes a step, `(*state, *batch) -> loss`, and its state, a tuple of NNX objects, and returns a
function of the batch alone, in NumPy arrays, that makes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import make_mesh, shardings
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import nnx_dp

DEVICES = 2

DATA_PARALLEL = {name: f'data_parallel("{name}")' for name in ("jit", "shard_map", "pmap")}
RECIPE = "nnx.jit + NamedSharding"
CACHED = "nnx.cached_partial"
FLOOR = "jax.jit, flat leaves"

State = Sequence[Any]
Step = Callable[..., Any]


# ---------------------------------------------------------------------------------------------
# A step with next to nothing to compute


class Stack(nnx.Module):
    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, width] -> [B, width]"""
        for layer in self.layers:
            x = layer(x)
        return x


def stack_state(layers: int, width: int) -> tuple[Stack, nnx.Optimizer]:
    model = Stack(layers, width, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train_step(model, optimizer, x, y):
    """One step, written for one device."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def local_train_step(model, optimizer, x, y):
    """The same step as each of several devices takes it, with the mean over them by hand."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    loss, grads = lax.pmean((loss, grads), "data")
    optimizer.update(model, grads)
    return loss


# ---------------------------------------------------------------------------------------------
# The ways


def decorated(step: Step, state: State, strategy: Any) -> Step:
    on_all = nnx_dp.data_parallel(step, strategy=strategy, devices=DEVICES)
    on_all.replicate(*state)
    return lambda *batch: on_all(*state, *batch)


def nnx_jit(step: Step, state: State) -> Step:
    """The recipe of the Flax documentation: replicated state, a sharded batch, `nnx.jit`."""
    split = _place(state)
    jitted = nnx.jit(step)
    return lambda *batch: jitted(*state, *jax.device_put(batch, split))


def nnx_cached_partial(step: Step, state: State) -> Step:
    """The recipe, with the state bound once, so that its graph need not be walked at each call."""
    split = _place(state)
    bound = nnx.cached_partial(nnx.jit(step, graph=True, graph_updates=True), *state)
    return lambda *batch: bound(*jax.device_put(batch, split))


def nnx_shard_map(local_step: Step, state: State) -> Step:
    """`nnx.shard_map` in `nnx.jit`; without that it would run operation by operation."""
    split = _place(state)
    mapped = nnx.shard_map(
        local_step,
        mesh=make_mesh(DEVICES),
        in_specs=(*[P()] * len(state), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    jitted = nnx.jit(mapped)
    return lambda *batch: jitted(*state, *jax.device_put(batch, split))


def nnx_pmap(local_step: Step, state: State) -> Step:
    """`nnx.pmap` with the device axis and the broadcast state written by hand."""
    whole = nnx.StateAxes({...: None})
    mapped = nnx.pmap(
        local_step,
        axis_name="data",
        in_axes=(*[whole] * len(state), 0, 0),
        out_axes=None,
        devices=jax.devices()[:DEVICES],
        graph=True,
        graph_updates=True,
    )

    def run(*batch):
        shapes = [(DEVICES, len(array) // DEVICES, *array.shape[1:]) for array in batch]
        split = [array.reshape(shape) for array, shape in zip(batch, shapes, strict=True)]
        return mapped(*state, *split)

    return run


def flat_jit(step: Step, state: State) -> Step:
    """`jax.jit` over flat lists of arrays: what is left if nobody looks at an NNX object."""
    whole, split = shardings(make_mesh(DEVICES))
    graphdef, pure = nnx.split(tuple(state))
    leaves, treedef = jax.tree.flatten(pure)
    leaves = jax.device_put(leaves, whole)

    @jax.jit
    def flat_step(leaves, *batch):
        nodes = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        loss = step(*nodes, *batch)
        new = jax.tree.leaves(nnx.state(nodes))
        return loss, [lax.with_sharding_constraint(leaf, whole) for leaf in new]

    def run(*batch):
        nonlocal leaves
        loss, leaves = flat_step(leaves, *jax.device_put(batch, split))
        return loss

    return run


def _place(state: State) -> Any:
    """Copies the state to every device, in place; returns the sharding of the batch."""
    whole, split = shardings(make_mesh(DEVICES))
    for node in state:
        nnx.update(node, jax.device_put(nnx.state(node), whole))
    return split
