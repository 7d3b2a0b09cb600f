"""The decorator's arguments: checked, and sorted by who needs them.

`Settings` say how a step is called, placed and launched, `StepOptions` what it computes in a
per-device strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from nnx_dp._outputs import check_out_reduce
from nnx_dp._placement import Devices
from nnx_dp._roles import INFER
from nnx_dp._state_reduce import Rule, parse_rules

Strategy = Literal["auto", "jit", "shard_map", "pmap"]
Uneven = Literal["auto", "replicate", "pad", "drop", "error"]
LossIs = Literal["infer", "mean", "sum"]


class Options(TypedDict, total=False):
    """The keyword arguments of `data_parallel`, which says what they mean."""

    strategy: Strategy
    mesh: Mesh | None
    devices: Devices
    axis_name: str
    in_axes: Any
    out_axes: Any
    out_reduce: Any
    static_argnums: int | Sequence[int]
    static_argnames: str | Iterable[str]
    donate: bool
    shard_optimizer: bool
    uneven: Uneven
    rngs: str | Sequence[str]
    sync_batch_norm: bool
    state_reduce: Any
    check: bool
    check_every: int | None
    verify: bool
    loss_reduce: LossIs
    grad_dtype: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a step is called, placed and launched."""

    strategy: str
    mesh: Mesh | None
    devices: Devices
    in_axes: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate: bool
    shard_optimizer: bool
    uneven: str
    verify: bool
    check_every: int | None


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What a step computes; read by the per-device strategies."""

    axis_name: str = "data"
    out_axes: Any = INFER
    out_reduce: Any = None
    rngs: str | tuple[str, ...] = "split"
    sync_batch_norm: bool = True
    state_reduce: tuple[tuple[Any, Rule], ...] = ()
    check: bool = True
    loss_reduce: LossIs = "infer"
    grad_dtype: Any = None


def read_options(
    *,
    strategy: Any,
    axis_name: Any,
    out_axes: Any,
    out_reduce: Any,
    static_argnums: Any,
    static_argnames: Any,
    shard_optimizer: Any,
    uneven: Any,
    rngs: Any,
    sync_batch_norm: Any,
    state_reduce: Any,
    check: Any,
    check_every: Any,
    loss_reduce: Any,
    grad_dtype: Any,
    **others: Any,
) -> tuple[Settings, StepOptions]:
    """Checks the arguments of `data_parallel`.

    Raises:
      TypeError: if `axis_name` is not a string.
      ValueError: for another argument that is none of what it may be, or does not go with another.
    """
    _one_of("strategy", strategy, get_args(Strategy))
    _one_of("uneven", uneven, get_args(Uneven))
    _one_of("loss_reduce", loss_reduce, get_args(LossIs))
    check_out_reduce(out_reduce)
    if not isinstance(axis_name, str):
        raise TypeError(
            f"axis_name is {axis_name!r}; write the name of the one axis that the batch is split "
            "over. A mesh may have other axes besides."
        )
    if check_every is not None and (not isinstance(check_every, int) or check_every < 1):
        raise ValueError(f"check_every is {check_every!r}; write a positive int, or None.")
    grad_dtype = _checked_grad_dtype(grad_dtype, strategy)
    if shard_optimizer and (strategy not in ("jit", "auto") or grad_dtype is not None):
        raise ValueError(
            f"shard_optimizer=True needs XLA to partition the step, and strategy={strategy!r} "
            '(or grad_dtype=) gives every device all of the state. Use strategy="jit" or "auto".'
        )
    settings = Settings(
        strategy="shard_map" if strategy == "auto" and grad_dtype is not None else strategy,
        static_argnums=(static_argnums,)
        if isinstance(static_argnums, int)
        else tuple(static_argnums),
        static_argnames=(static_argnames,)
        if isinstance(static_argnames, str)
        else tuple(static_argnames),
        shard_optimizer=shard_optimizer,
        uneven=uneven,
        check_every=check_every,
        **others,
    )
    options = StepOptions(
        axis_name=axis_name,
        out_axes=out_axes,
        out_reduce=out_reduce,
        rngs=rngs if isinstance(rngs, str) else tuple(rngs),
        sync_batch_norm=sync_batch_norm,
        state_reduce=parse_rules(state_reduce),
        check=check,
        loss_reduce=loss_reduce,
        grad_dtype=grad_dtype,
    )
    return settings, options


def _checked_grad_dtype(grad_dtype: Any, strategy: str) -> Any:
    if grad_dtype is None:
        return None
    if not jnp.issubdtype(grad_dtype, jnp.floating):
        raise ValueError(
            f"grad_dtype is {grad_dtype!r}; write a floating-point dtype such as jnp.bfloat16, or "
            "None."
        )
    if strategy == "jit":
        raise ValueError(
            'grad_dtype cannot be used with strategy="jit", where XLA decides what crosses between '
            'devices. Use "shard_map", "pmap" or "auto", which is then "shard_map".'
        )
    return jnp.dtype(grad_dtype)


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        listed = ", ".join(f'"{choice}"' for choice in allowed)
        raise ValueError(f"{name} is {value!r}; write one of {listed}.")
