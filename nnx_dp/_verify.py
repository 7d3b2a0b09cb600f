"""Checks at run time: the copies on the devices against each other, the step against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.graphlib import IndexMap, RefMap
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_dp._compare import Tolerance, difference, nudge
from nnx_dp._graph import OutStructure, StateLeaves, flatten_output, numbers_as_arrays
from nnx_dp._leaves import is_key, is_state
from nnx_dp._roles import BoundCall
from nnx_dp._uneven import unpad


def assert_replicated(tree: Any) -> None:
    """Checks that every array of a tree holds the same values on all of its devices, to the bit.

    Looks at the actual shards: JAX takes an array for replicated because its type says so.

    Args:
      tree: pytree of arrays and NNX objects.

    Raises:
      AssertionError: naming the first path that differs, the devices and the largest difference.

    Example::

      >>> import nnx_dp
      >>> from flax import nnx
      >>> nnx_dp.assert_replicated(nnx_dp.replicate(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    """
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state):
        name = jax.tree_util.keystr(path)
        if not is_state(node):
            _assert_leaf(name or "the array", node)
            continue
        state = StateLeaves([node], [name or type(node).__name__])
        for leaf_path, leaf in zip(state.paths, state.leaves, strict=True):
            _assert_leaf(leaf_path, leaf)


def _assert_leaf(path: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        return
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not leaf.sharding.is_fully_replicated:
        raise AssertionError(
            f"{path} is not replicated: its sharding is {leaf.sharding}. Place it with "
            "nnx_dp.replicate."
        )
    first, *others = leaf.addressable_shards
    expected = np.asarray(first.data)
    for shard in others:
        value = np.asarray(shard.data)
        if value.tobytes() != expected.tobytes():
            with np.errstate(invalid="ignore"):
                wide = np.float64 if value.dtype.kind in "fiub" else value.dtype
                difference = np.abs(value.astype(wide) - expected.astype(wide))
            raise AssertionError(
                f"{path} differs between {first.device} and {shard.device}: the largest difference "
                f"is {np.nanmax(difference):.3g}. A per-device step wrote a value that varies; "
                "nnx_dp.data_parallel with check=True names it before it runs."
            )


class ShardCheck:
    """Compares the copies of the state on the devices: a hash on each, one scalar on the wire."""

    def __init__(self, mesh: Mesh):
        axes = tuple(mesh.axis_names)

        def agree(leaves: Sequence[Any]):
            total = jnp.zeros((), jnp.uint32)
            for index, leaf in enumerate(leaves):
                total = total * jnp.uint32(31) + _hash(leaf) + jnp.uint32(index)
            # One reduction: the smallest is the complement of the largest complement.
            largest, complement = lax.pmax(jnp.stack([total, ~total]), axes)
            return largest == ~complement

        mapped = jax.shard_map(agree, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        self._agree = jax.jit(mapped)

    def agree(self, leaves: Sequence[Any]) -> bool:
        """Whether every array holds the same values on all of its devices."""
        # What is sharded over the devices has no copies to compare.
        return bool(self._agree([leaf for leaf in leaves if _is_everywhere(leaf)]))

    def __call__(self, state: StateLeaves) -> None:
        """Raises AssertionError if an array of the state differs between devices."""
        if not self.agree(state.leaves):
            for path, leaf in zip(state.paths, state.leaves, strict=True):
                if _is_everywhere(leaf):
                    _assert_leaf(path, leaf)


def _is_everywhere(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.is_fully_replicated


def _hash(leaf: jax.Array) -> jax.Array:
    """A sum of the array's bits in which every position has its own odd weight, modulo 2**32."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        return _hash(leaf.real) * jnp.uint32(3) + _hash(leaf.imag)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}"))
    flat = bits.reshape(-1).astype(jnp.uint32)
    weights = jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.sum(flat * weights, dtype=jnp.uint32)


class Oracle:
    """The undecorated step on one device, on copies of everything."""

    def __init__(self, bound: BoundCall, state: StateLeaves, device: Any):
        self.before = [
            jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in state.leaves
        ]
        copies = [_on(leaf, device) for leaf in state.leaves]
        nudged = [
            nudge(leaf, variable) for leaf, variable in zip(copies, state.variables, strict=True)
        ]
        self._nudged, _ = _plainly(bound, state, nudged, device)
        self._leaves, self._structure = _plainly(bound, state, copies, device)

    def compare(self, bound: BoundCall, output: Any, *, drew: bool, grad_dtype: Any = None) -> None:
        """Raises AssertionError if a decorated call left anything else behind.

        Args:
          drew: whether random numbers differ by design; then only shapes and counts are compared.
          grad_dtype: the narrower dtype that gradients were reduced in, if any: no closer than its
            precision is looked for.
        """
        leaves, structure = flatten_output(bound, bound.nodes, output, RefMap())
        theirs = [leaf.path for leaf in self._structure.leaves]
        if [leaf.path for leaf in structure.leaves] != theirs:
            raise AssertionError(
                f"the decorated step leaves {[leaf.path for leaf in structure.leaves]} behind, the "
                f"plain step {theirs}."
            )
        problems = []
        tolerance = Tolerance(grad_dtype=grad_dtype)
        for leaf, got, want, nudged in zip(
            structure.leaves, leaves, self._leaves, self._nudged, strict=True
        ):
            values = isinstance(leaf.variable, nnx.RngState) or not drew
            problem = difference(got, want, nudged, tolerance, values=values)
            if problem:
                problems.append(f"{leaf.path}: {problem}")
        if problems:
            raise AssertionError(
                "the decorated step differs from the plain step on one device:\n  "
                + "\n  ".join(problems)
                + "\nLikely causes: a loss or an output that is not what loss_reduce=, out_reduce= "
                "or state_reduce= says, statistics that are not synchronised, or arithmetic in low "
                "precision. The state is as it was before the call."
            )


def _plainly(
    bound: BoundCall, state: StateLeaves, leaves: Sequence[Any], device: Any
) -> tuple[list[Any], OutStructure]:
    """Runs the plain step on other arrays in the place of its state."""
    raw = jax.tree.unflatten(state.treedef, leaves)
    nodes = nnx.unflatten(state.graphdef, raw, index_ref=IndexMap())
    axes = [argument.axis for argument in bound.array_arguments()]
    arrays = unpad(bound.arrays, axes, bound.unpadded_size)
    with jax.default_device(device):
        output = bound.call(nodes, [_on(array, device) for array in arrays])
        return flatten_output(bound, nodes, numbers_as_arrays(output), RefMap())


def _on(leaf: Any, device: Any) -> Any:
    if isinstance(leaf, jax.Array) and not is_key(leaf):
        return jax.device_put(np.asarray(leaf), device)
    return jax.device_put(leaf, device)
