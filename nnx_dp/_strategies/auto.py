"""Strategy "auto": "jit", unless the step holds a call that XLA cannot partition.

Decided at the first call of each signature, from the trace that "jit" makes anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nnx_dp._graph import StateLeaves
from nnx_dp._jaxpr import open_jaxpr, sub_jaxprs, user_line
from nnx_dp._kinds import KERNELS
from nnx_dp._placement import only_mesh
from nnx_dp._plan import failed_to_trace
from nnx_dp._roles import BoundCall
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._strategies.jit import compile_jit
from nnx_dp._strategies.shard_map import compile_shard_map


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy, why it was chosen, and the signature compiled under it."""

    strategy: str
    why: str
    launch: Launch


def choose(signature: Signature, bound: BoundCall, state: StateLeaves, *, even: bool) -> Choice:
    """Chooses a strategy for one signature and compiles it.

    Args:
      signature: what is to be compiled.
      bound: the call that is the first with this signature.
      state: its state.
      even: whether the devices divide the batch; if not, only "jit" can run it.

    Raises:
      Exception: what the step itself raises when traced, if no strategy can trace it.
      ValueError: if the step needs a per-device strategy, and the batch does not divide.
    """
    launch = compile_jit(signature)
    if signature.devices == 1:
        return Choice("jit", "there is one device", launch)
    try:
        with only_mesh(signature.mesh):
            places = launch.place_state(state.leaves), launch.place_arrays(bound.arrays)
            # With the arrays of the call itself, so that the launch finds this trace again.
            jaxpr = launch.function.trace(*places).jaxpr
    except Exception as error:
        if not even:
            raise
        why = f"it traces only at one device's shapes ({type(error).__name__} at the global ones)"
        try:
            return Choice("shard_map", why, compile_shard_map(signature))
        except Exception as second:
            if not failed_to_trace(second):
                raise second from error
            # A step that traces nowhere is told what is wrong with the whole batch.
            alike = type(second) is type(error) and str(second) == str(error)
            raise error from (None if alike else second)
    opaque = find_opaque(jaxpr)
    if opaque is None:
        return Choice("jit", "XLA can partition all of it", launch)
    if not even:
        raise ValueError(
            f"the step holds {opaque}, which XLA cannot partition, and the devices do not divide "
            "the batch. Put the kernel in nnx_dp.per_device, which lets the rest run under "
            '"jit" with any batch; or use uneven="drop", "pad" or "replicate".'
        )
    why = f"it holds {opaque}, which XLA cannot partition, outside nnx_dp.per_device"
    return Choice("shard_map", why, compile_shard_map(signature))


def find_opaque(jaxpr: Any) -> str | None:
    """Names a call in a jaxpr that XLA cannot partition, and where it was made; None if none."""
    inner, _ = open_jaxpr(jaxpr)
    for eqn in inner.eqns:
        name = eqn.primitive.name
        if name in KERNELS:
            return f"{name} at {user_line(eqn)}"
        if name == "shard_map":
            continue  # partitioned by hand: nnx_dp.per_device
        for sub in sub_jaxprs(eqn):
            found = find_opaque(sub)
            if found is not None:
                return found
    return None
