"""How close what two runs of a step leave behind must be.

Two programs that compute the same sum in another order differ by rounding, and a step may blow that
up: the gradient of a bias before a BatchNorm is nothing but rounding, and Adam makes of it a whole
step.  So the plain step is run twice, the second time with parameters that are off by one unit in
their last place.  What that alone changes cannot be held against another program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_dp._leaves import is_key

RELATIVE = {"float16": 2e-2, "bfloat16": 2e-2, "float32": 1e-3, "float64": 1e-6}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}

_NUDGES = 8
"""How many times what a nudge changes is still rounding."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far values may be apart, besides what a nudge changes; integers not at all.

    Attributes:
      rtol: relative to the largest value of an array; None for one that suits the dtype.
      atol: absolute.
      grad_dtype: the narrower dtype that gradients were reduced in, if any.
    """

    rtol: float | None = None
    atol: float = 1e-9
    grad_dtype: Any = None

    def of(self, dtype: Any) -> tuple[float, float]:
        name = str(dtype)
        usual = RELATIVE.get(_COMPLEX.get(name, name))
        if usual is None:
            return 0.0, 0.0
        least = 0.0 if self.grad_dtype is None else RELATIVE[str(self.grad_dtype)]
        return max(usual if self.rtol is None else self.rtol, least), self.atol


def nudge(leaf: Any, variable: nnx.Variable[Any] | None) -> Any:
    """Moves the values of a parameter by one unit in the last place, up or down."""
    inexact = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    if not inexact or not isinstance(variable, nnx.Param):
        return leaf
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=leaf.shape)
    return leaf * (1 + jnp.asarray(signs * float(jnp.finfo(leaf.dtype).eps), leaf.dtype))


def difference(
    got: Any, want: Any, nudged: Any, tolerance: Tolerance, *, values: bool = True
) -> str | None:
    """Says how an array differs from what is wanted; None if it does not.

    Args:
      got: the array.
      want: what the plain step left.
      nudged: what the plain step left when its parameters were nudged.
      tolerance: how far they may be apart.
      values: whether to look at values, or only at shape and dtype.
    """
    a, b, c = as_numpy(got), as_numpy(want), as_numpy(nudged)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if not values:
        return None
    relative, absolute = tolerance.of(b.dtype)
    a, b, c = map(wide, (a, b, c))
    finite = b[np.isfinite(b)]
    largest = float(np.max(np.abs(finite), initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
        rounding = np.abs(c - b) if c.shape == b.shape else np.zeros(())
        rounding = float(np.max(rounding[np.isfinite(rounding)], initial=0))
        allowed = relative * largest + absolute if relative else 0.0
        close = apart <= allowed + _NUDGES * rounding
    off = ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not off.any():
        return None
    furthest = np.max(apart[np.isfinite(apart)], initial=0)
    return (
        f"{int(off.sum())} of {off.size} values differ, by up to {furthest:.3g} where they go up "
        f"to {largest:.3g}"
    )


def as_numpy(array: Any) -> np.ndarray:
    return np.array(jax.random.key_data(array) if is_key(array) else array)


def wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.complex128)
