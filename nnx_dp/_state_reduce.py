"""What happens to state that comes out of a per-device step different on each device.

`state_reduce=` maps NNX filters to rules; the first filter that matches wins.  Behind the caller's
rules stands one more: with ``sync_batch_norm=False`` the running statistics are averaged.
Everything else that varies is an error that names its path.  (BatchNorm, metrics and random
streams do not get here: `_batch_norm.py`, `_metrics.py` and `_rngs.py` keep them alike.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax import lax

Rule = str | Callable[[Any, Any], Any]

REDUCTIONS = {"mean": lax.pmean, "sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
"""The reductions over devices that have a name, for outputs and for state."""

RULES: dict[str, str] = {
    "mean": "the mean over devices of the new value",
    "sum": "the sum over devices of the new value",
    "accumulate": "the old value plus the sum over devices of the change",
    "max": "the largest new value on any device",
    "min": "the smallest new value on any device",
}


def parse_rules(state_reduce: Any) -> tuple[tuple[Any, Rule], ...]:
    """Checks a `state_reduce=` argument and returns its (filter, rule) pairs.

    Raises:
      ValueError: for a rule that is neither a name nor a function.
      TypeError: if it is no mapping.
    """
    if state_reduce is None:
        return ()
    if not isinstance(state_reduce, Mapping):
        raise TypeError(
            f"state_reduce is a {type(state_reduce).__name__}; write a mapping from NNX filters to "
            f'rules, such as {{nnx.BatchStat: "mean"}}.'
        )
    for key, rule in state_reduce.items():
        if not callable(rule) and rule not in RULES:
            raise ValueError(
                f"state_reduce[{key!r}] is {rule!r}; write one of {sorted(RULES)}, or a function "
                "(old, new) -> value that runs on each device."
            )
    return tuple(state_reduce.items())


def find_rule(
    rules: tuple[tuple[Any, Rule], ...], path: Any, variable: Any, *, sync_batch_norm: bool
) -> Rule | None:
    """Returns the rule of the first filter that matches a Variable, None if there is none."""
    for key, rule in rules:
        if nnx.filterlib.to_predicate(key)(path, variable):
            return rule
    if not sync_batch_norm and isinstance(variable, nnx.BatchStat):
        return "mean"
    return None


def apply_rule(rule: Rule, old: Any, new: Any, axis_name: str) -> Any:
    """Makes one value of the devices' values; runs inside the per-device body."""
    if callable(rule):
        return rule(old, new)
    if rule == "accumulate":
        return old + lax.psum(new - old, axis_name)
    return reduce(rule, new, axis_name)


def reduce(kind: str, value: Any, axis_name: str) -> Any:
    """Applies a reduction by name: mean, sum, max or min over the devices."""
    return REDUCTIONS[kind](value, axis_name)
