"""What each process of test_processes.py does; also what one process does, to compare with."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from oracle import linear, regression, snapshot, train_step

import nnx_dp

STRATEGIES = ("jit", "shard_map", "pmap")
ROWS = 16


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.seen = nnx.metrics.Average()

    def __call__(self, x):
        return self.out(self.dropout(self.bn(self.linear(x))))


def make_state(seed=0):
    model = Net(seed)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def step(model, optimizer, x, y, *, scale=1.0):
    def loss_fn(model):
        out = model(x)
        losses = jnp.mean((out - y) ** 2, axis=-1) * scale
        model.seen.update(values=losses)
        return jnp.mean(losses), out

    (loss, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return {"loss": loss, "out": out, "worst": jnp.max(jnp.abs(out - y))}


def part(batch, index, processes):
    rows = ROWS // processes
    return [array[index * rows : (index + 1) * rows] for array in batch]


def train(index, processes, folder):
    """Three steps under every strategy, with each process's own part of the batch."""
    seen = {}
    for strategy in STRATEGIES:
        dp_step = nnx_dp.data_parallel(step, strategy=strategy, check_every=2)
        state, outputs = make_state(), []
        for seed in range(3):
            out = dp_step(*state, *part(regression(ROWS, seed), index, processes), scale=0.5)
            assert out["out"].shape == (ROWS, 1)
            outputs.append(jax.tree.map(np.asarray, nnx_dp.local(out)))
        nnx_dp.assert_replicated(state[0])
        seen[strategy] = outputs, snapshot(nnx_dp.local(nnx.state(state)))
    return seen


def one_process():
    state, outputs = make_state(), []
    for seed in range(3):
        outputs.append(jax.tree.map(np.asarray, step(*state, *regression(ROWS, seed), scale=0.5)))
    return outputs, snapshot(nnx.state(state))


def global_arrays(index, processes, folder):
    """A batch that is global already, and one that `step.shard` makes."""
    seen = {}
    for strategy in STRATEGIES:
        dp_step = nnx_dp.data_parallel(train_step, strategy=strategy)
        state = linear()
        for seed in range(2):
            batch = dp_step.shard(tuple(part(regression(ROWS, seed), index, processes)))
            assert batch[0].shape == (ROWS, 3)
            assert not batch[0].is_fully_addressable
            loss = float(dp_step(*state, *batch))
        seen[strategy] = loss, snapshot(nnx_dp.local(nnx.state(state)))
    return seen


def random_draws(index, processes, folder):
    """The dropout masks of every example, gathered from this process."""
    seen = {}
    for strategy in STRATEGIES:
        dp_step = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy)
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        x = np.ones((ROWS // processes, 64), np.float32)
        masks = [np.asarray(nnx_dp.local(dp_step(model, x))) for _ in range(2)]
        seen[strategy] = masks, int(model.rngs.count[...])
    return seen


def scaled_step(model, optimizer, x, y, rate=1.0, flag=True):
    return train_step(model, optimizer, x * rate, y) if flag else rate


def disagreements(index, processes, folder):
    """Errors that every process gets."""
    seen = {}
    x, y = part(regression(ROWS), index, processes)
    for strategy in STRATEGIES:
        dp_step = nnx_dp.data_parallel(train_step, strategy=strategy)
        state = linear()
        dp_step(*state, x, y)
        before = snapshot(nnx_dp.local(nnx.state(state)))
        odd = 2 + 2 * (index == 1)
        verified = nnx_dp.data_parallel(train_step, verify=True)
        tabled = nnx_dp.data_parallel(
            lambda model, optimizer, x, y, table: train_step(model, optimizer, x + table, y),
            strategy=strategy,
            in_axes={"table": None},
        )
        scaled = nnx_dp.data_parallel(scaled_step, strategy=strategy)
        calls = {
            "sizes": functools.partial(dp_step, *state, x[:odd], y[:odd]),
            "indivisible": functools.partial(dp_step, *state, x[:3], y[:3]),
            "state": functools.partial(dp_step, *linear(seed=index), x, y),
            "verify": functools.partial(verified, *linear(), x, y),
            "scalar": functools.partial(scaled, *linear(), x, y, rate=0.1 + index),
            "array scalar": functools.partial(scaled, *linear(), x, y, rate=jnp.float32(index)),
            "flag": functools.partial(scaled, *linear(), x, y, flag=index == 0),
            "table": functools.partial(tabled, *linear(), x, y, np.full(3, float(index))),
            "dtype": functools.partial(dp_step, *state, x.astype("float16") if index else x, y),
        }
        for name, call in calls.items():
            try:
                call()
                seen[strategy, name] = "no error"
            except ValueError as error:
                seen[strategy, name] = str(error)
        after = snapshot(nnx_dp.local(nnx.state(state)))
        seen[strategy, "unchanged"] = all((before[k] == after[k]).all() for k in before)
        seen[strategy, "goes on"] = float(dp_step(*state, x, y))
    return seen


def everything(index, processes, folder):
    """All that two processes can do without dying, in one start of both."""
    scenarios = (train, global_arrays, random_draws, disagreements)
    return {scenario.__name__: scenario(index, processes, folder) for scenario in scenarios}


def train_and_save(index, processes, folder):
    """Five steps, saved after each with Orbax; goes on from the last checkpoint, if there is one.

    While there is a file "deadly", the last process is killed in its fourth step.
    """
    dp_step = nnx_dp.data_parallel(step, strategy="shard_map")
    state = make_state()
    done = max((int(path.name) for path in (folder / "saved").glob("[0-9]")), default=0)
    with ocp.StandardCheckpointer() as checkpointer:
        if done:
            like = nnx_dp.replicate(nnx.List(make_state(seed=7)), mesh=dp_step.mesh)
            saved = checkpointer.restore(
                folder / "saved" / str(done), nnx.state(like, nnx.Not(nnx.RngKey))
            )
            nnx.update(nnx.List(state), saved)
        for seed in range(done, 5):
            if (folder / "deadly").exists() and seed == 3 and index == processes - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dp_step(*state, *part(regression(ROWS, seed), index, processes))
            kept = nnx.state(nnx.List(state), nnx.Not(nnx.RngKey))
            checkpointer.save(folder / "saved" / str(seed + 1), kept)
            checkpointer.wait_until_finished()
    return done, snapshot(nnx_dp.local(nnx.state(state)))
