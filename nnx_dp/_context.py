"""What the code that is being traced right now runs inside of.

One object, held in a JAX user context.  A user context is part of the key of every trace and
compilation cache in JAX, so a function that the user's step compiles on its own (an inner
``nnx.jit``, say) is never served from a trace made under other rules.  It is also local to its
thread, and back to None when an exception leaves the ``with`` block.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import Mesh

if TYPE_CHECKING:
    from nnx_dp._grad_sync import GradientLedger


@dataclasses.dataclass(frozen=True, eq=False)
class StepContext:
    """The rules for one trace of one decorated step; compared by identity.

    Attributes:
      mode: "global" when the body sees the global batch, "per_device" when it sees one device's.
      axis_name: name of the mesh axis that the batch is split over.
      axis_size: number of devices on that axis, as the body sees it (1 in a global view).
      sync_batch_norm: whether batch statistics are taken over all devices.
      rngs: "split", "broadcast", or the names of the streams that are the same on all devices.
      ledger: decides how each gradient is reduced; None where gradients are global already.
      mesh: the devices, where XLA partitions the global view over them, else None.
      grad_dtype: the dtype that gradients are reduced in; None for their own.
      synchronise: whether gradients are reduced where they are taken.
      counts: what `nnx_dp.mean` divides by in a microbatch; None outside `accumulate`.
      fired: how often each rule was applied that makes a per-device step what one device computes.
    """

    mode: Literal["global", "per_device"]
    axis_name: str
    axis_size: int
    sync_batch_norm: bool = True
    rngs: str | tuple[str, ...] = "split"
    ledger: GradientLedger | None = None
    mesh: Mesh | None = None
    grad_dtype: Any = None
    synchronise: bool = True
    counts: Counts | None = None
    fired: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Counts:
    """The numbers of valid items that the calls of `nnx_dp.mean` in a microbatch divide by.

    First they are only counted, a number for each call in order; then they are replaced by what
    makes of the microbatches' means the mean of the whole batch.
    """

    def __init__(self, divisors: Sequence[jax.Array] | None = None):
        self.counted: list[jax.Array] = []
        self._divisors = divisors

    def divisor(self, count: jax.Array) -> jax.Array:
        self.counted.append(count)
        return count if self._divisors is None else self._divisors[len(self.counted) - 1]


_context = jax.make_user_context(default_value=None)


def entered(context: StepContext):
    """Returns a context manager under which `current` returns `context`."""
    return _context(context)


def current() -> StepContext | None:
    """Returns the rules that this thread traces under, None outside a decorated step."""
    return _context.value


def per_device() -> StepContext | None:
    """Returns the rules that this thread traces under if the body sees one device's batch."""
    context = current()
    return context if context is not None and context.mode == "per_device" else None
