"""What a leaf of a call, or of a state, can be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer


def is_state(value: Any) -> bool:
    if type(value) in _PLAIN:  # asked of every argument at every call, so answered fast
        return False
    return isinstance(value, nnx.Variable) or nnx.graphlib.is_graph_node(value)


_PLAIN = frozenset({tuple, list, dict, np.ndarray, bool, int, float, str, type(None)})


def is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def is_key(value: Any) -> bool:
    return is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


def shape_of(leaf: Any, *, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of an argument, as JAX would trace it."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape if shape is None else shape,
        aval.dtype,
        weak_type=getattr(aval, "weak_type", False),
    )


def resized(leaf: Any, axis: int, size: int) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of an argument with another length on one axis."""
    shape = list(leaf.shape)
    shape[axis] = size
    return shape_of(leaf, shape=tuple(shape))
