"""For the tests of steps: a step against the same step on one device, and devices to run it on.

from nnx_dp import testing

def test_my_step():
    testing.assert_matches_single_device(train_step, model, optimizer, x, y)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_dp._compare import Tolerance, as_numpy, difference, nudge, wide
from nnx_dp._data_parallel import DataParallel, data_parallel
from nnx_dp._graph import StateLeaves
from nnx_dp._leaves import is_array, is_state

STRATEGIES = ("jit", "shard_map", "pmap")


def assert_matches_single_device(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 3,
    devices: Sequence[int] = (1, 2, 8),
    strategies: Sequence[str] = STRATEGIES,
    rtol: float | None = None,
    atol: float = 1e-9,
    **kwargs: Any,
) -> None:
    """Proves a step: decorated, it returns and leaves what it does undecorated on one device.

    The plain step runs a few times in a row on one device, and so does the decorated one under each
    strategy on each number of devices, all from copies of the arguments.  After every call the
    outputs and all of the state are compared: parameters, optimizer state, statistics, metrics and
    the counts of random streams.

    Args:
      step: a plain step, or one that `data_parallel` has decorated: its options are kept, but for
        the strategy and the devices.
      *args: the arguments of every call.  They stay as they are.
      steps: how many calls in a row.
      devices: the numbers of devices.
      strategies: "jit", "shard_map" and "pmap", or some of them.
      rtol: tolerance, relative to the largest value of each array; by default 1e-3 for float32,
        2e-2 for 16 bits, 1e-6 for 64 bits, none for integers.
      atol: absolute tolerance.
      **kwargs: the other arguments of every call.

    Two programs differ by rounding, which a step may blow up: Adam makes a whole step of a gradient
    that is nothing but rounding, such as that of a bias before a BatchNorm.  So the plain step is
    run once more with parameters that are off by one unit in the last place, and what that changes
    is allowed for.  Where the step draws random numbers that differ between devices by design, what
    depends on them cannot be compared: then only structure, shapes, dtypes and the random streams
    are.

    Raises:
      AssertionError: naming each Variable or output that differs, by how much, and a likely cause.
      RuntimeError: if there are fewer devices than asked for.
      Exception: whatever a call of the step raises.

    Example::

      >>> import jax.numpy as jnp, nnx_dp.testing
      >>> from flax import nnx
      >>> def loss(model, x, y):
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> nnx_dp.testing.assert_matches_single_device(
      ...     loss, model, jnp.ones((8, 3)), jnp.ones((8, 1)), devices=(1,)
      ... )
    """
    if steps < 1:
        raise ValueError(f"assert_matches_single_device was given steps={steps}; write 1 or more.")
    plain = step.__wrapped__ if isinstance(step, DataParallel) else step
    fake_devices(max(devices))
    first = jax.devices()[0]
    with jax.default_device(first):
        expected = _run(plain, *_copied(args, kwargs, first), steps)
        nudged = _run(plain, *_nudged(*_copied(args, kwargs, first)), steps)
    for strategy in strategies:
        for count in devices:
            decorated = _decorated(step, strategy, count)
            actual = _run(decorated, *_copied(args, kwargs, None), steps)
            drew = any(launch.drew for launch in decorated._launches)
            narrow = decorated._options.grad_dtype if strategy != "jit" and count > 1 else None
            _compare(
                actual,
                expected,
                nudged,
                Tolerance(rtol, atol, narrow),
                where=f'strategy="{strategy}" on {count} device{"s" if count > 1 else ""}',
                devices=count,
                drew=drew,
            )


def fake_devices(count: int = 8) -> list[Any]:
    """Returns so many devices; makes them out of the CPU if JAX has not started yet.

    Raises:
      RuntimeError: if JAX has started with fewer, saying where to ask for them instead.

    Example::

      >>> import nnx_dp.testing
      >>> len(nnx_dp.testing.fake_devices(1))
      1
    """
    set_elsewhere = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    # If JAX has started, it may have enough of them all the same.
    with contextlib.suppress(RuntimeError):
        if not set_elsewhere and getattr(jax.config, "jax_num_cpu_devices", -1) < count:
            jax.config.update("jax_num_cpu_devices", count)
    available = jax.devices()
    if len(available) < count:
        raise RuntimeError(
            f"{count} devices are wanted, and JAX has started with {len(available)} "
            f"({available[0].platform}) already. Ask for them before anything uses JAX: write "
            f'jax.config.update("jax_num_cpu_devices", {count}) at the top of conftest.py, or '
            'pytest_plugins = ["nnx_dp.pytest_plugin"] in it, and run on the CPU with '
            f"JAX_PLATFORMS=cpu; or ask for {len(available)}."
        )
    return list(available[:count])


# ---------------------------------------------------------------------------------------------
# Running


@dataclasses.dataclass(frozen=True)
class _Left:
    """One array that a call left behind, or that there was before the first, and its Variable."""

    value: np.ndarray
    variable: type | None


def _run(step: Callable[..., Any], args: Any, kwargs: Any, steps: int) -> list[dict[str, _Left]]:
    """Returns what is in the arguments before the first call, and left behind by each."""
    left = [_arrays(args, kwargs, None)]
    for _ in range(steps):
        output = step(*args, **kwargs)
        left.append(_arrays(args, kwargs, output))
    return left


def _decorated(step: Callable[..., Any], strategy: str, count: int) -> DataParallel[..., Any]:
    if not isinstance(step, DataParallel):
        return data_parallel(step, strategy=strategy, devices=count)  # type: ignore[arg-type]
    settings = dataclasses.replace(
        step._settings,
        strategy=strategy,
        mesh=None,
        devices=count,
        donate=False,
        verify=False,
        shard_optimizer=step._settings.shard_optimizer and strategy == "jit",
    )
    return DataParallel(step.__wrapped__, settings, step._options)


def _copied(args: Any, kwargs: Any, device: Any) -> tuple[Any, Any]:
    """Copies a call's objects and arrays together, so that what is shared stays shared."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if is_state(leaf):
            return copy.deepcopy(leaf, memo)
        return jax.device_put(leaf, device) if isinstance(leaf, jax.Array) and device else leaf

    args, kwargs = jax.tree.map(copied, (args, kwargs), is_leaf=is_state)
    if device is not None:
        for node in filter(is_state, jax.tree.leaves((args, kwargs), is_leaf=is_state)):
            for _, variable in nnx.iter_graph(node, graph=True):
                if isinstance(variable, nnx.Variable):
                    placed = jax.device_put(variable.get_raw_value(), device)
                    variable.set_raw_value(placed)
    return args, kwargs


def _nudged(args: Any, kwargs: Any) -> tuple[Any, Any]:
    for node in filter(is_state, jax.tree.leaves((args, kwargs), is_leaf=is_state)):
        for _, variable in nnx.iter_graph(node, graph=True):
            if isinstance(variable, nnx.Variable):
                move = functools.partial(nudge, variable=variable)
                variable.set_raw_value(jax.tree.map(move, variable.get_raw_value()))
    return args, kwargs


def _arrays(args: Any, kwargs: Any, output: Any) -> dict[str, _Left]:
    named = {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    found: dict[str, _Left] = {}
    for name, value in [*named.items(), ("output", output)]:
        leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_state)
        for path, leaf in leaves:
            at = name + jax.tree_util.keystr(path)
            if is_state(leaf):
                state = StateLeaves([leaf], [at])
                for inner, array, variable in zip(
                    state.paths, state.leaves, state.variables, strict=True
                ):
                    kind = None if variable is None else type(variable)
                    found[inner] = _Left(as_numpy(array), kind)
            elif name == "output" and (is_array(leaf) or isinstance(leaf, (int, float, complex))):
                found[at] = _Left(as_numpy(jnp.asarray(leaf)), None)
    return found


# ---------------------------------------------------------------------------------------------
# Comparing


def _compare(
    actual: list[dict[str, _Left]],
    expected: list[dict[str, _Left]],
    nudged: list[dict[str, _Left]],
    tolerance: Tolerance,
    *,
    where: str,
    devices: int,
    drew: bool,
) -> None:
    for call in range(1, len(expected)):
        got, want = actual[call], expected[call]
        problems = []
        if got.keys() != want.keys():
            extra, missing = sorted(got.keys() - want.keys()), sorted(want.keys() - got.keys())
            problems.append(f"it leaves {extra} behind that the plain step does not")
            problems.append(f"and not {missing}")
        causes: dict[str, None] = {}
        for path in (path for path in want if path in got):
            kind = want[path].variable
            values = not drew or (kind is not None and issubclass(kind, nnx.RngState))
            moved = nudged[call].get(path, want[path]).value
            problem = difference(got[path].value, want[path].value, moved, tolerance, values=values)
            if problem:
                problems.append(f"{path}: {problem}")
                before = expected[call - 1].get(path)
                causes[_likely_cause(got[path], want[path], before, devices)] = None
        if problems:
            raise AssertionError(
                f"{where}: after call {call} the step differs from the plain step on one device:"
                "\n  " + "\n  ".join(problems) + "\nLikely causes:\n  " + "\n  ".join(causes)
            )


def _likely_cause(got: _Left, want: _Left, before: _Left | None, devices: int) -> str:
    """Guesses from the Variable's type, and from how the change compares with the right one."""
    kind = want.variable
    if kind is not None and issubclass(kind, nnx.RngState):
        return "random streams that the step advances by another number than on one device"
    if kind is not None and issubclass(kind, nnx.BatchStat):
        return (
            "statistics that are not taken over all devices: sync_batch_norm=False, or a layer of "
            "your own that needs nnx_dp.pmean"
        )
    if kind is not None and issubclass(kind, nnx.metrics.MetricState):
        return "a metric that counts one device's batch only: its state_reduce= rule"
    if before is not None and before.value.shape == want.value.shape == got.value.shape:
        old, right, wrong = wide(before.value), wide(want.value), wide(got.value)
        factor = _factor(wrong - old, right - old)
    else:
        factor = _factor(wide(got.value), wide(want.value))
    if factor is not None and np.isclose(factor, devices, rtol=0.02):
        return (
            f"{devices} times too much: a loss that is a mean was reduced as a sum (loss_reduce=, "
            "out_reduce=, or an nnx_dp.psum too many)"
        )
    if factor is not None and np.isclose(factor * devices, 1, rtol=0.02):
        return (
            f"a {devices}-th of what it should be: a loss that is a sum was reduced as a mean "
            "(loss_reduce=, out_reduce=, or an nnx_dp.pmean too many)"
        )
    if factor is not None and np.isclose(factor, 1, rtol=0.05):
        return "arithmetic in low precision, in another order than on one device: give rtol="
    return (
        "a loss or an output that is not a plain mean or sum over examples (nnx_dp.mean takes a "
        "mask), check=False, or a kernel that mixes examples"
    )


def _factor(got: np.ndarray, want: np.ndarray) -> float | None:
    """Returns the number that best turns one array into the other, None if none comes close."""
    if got.shape != want.shape or not np.all(np.isfinite(got)) or not np.any(want):
        return None
    factor = float((np.vdot(want, got) / np.vdot(want, want)).real)
    rest = np.linalg.norm(got - factor * want) / max(float(np.linalg.norm(got)), 1e-30)
    return factor if rest < 0.1 else None
