"""Where arrays live: the mesh, one copy of the state on each device, the batch split over them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_dp._leaves import is_array, is_state
from nnx_dp._processes import is_global, make_global, spans_processes

Devices = int | Sequence[Any] | None
"""All devices (None), how many, or which: `jax.Device` objects, which JAX does not type."""


def make_mesh(mesh: Mesh | None, devices: Devices, axis_name: str) -> Mesh:
    """Returns the mesh to run on, with Auto axes.

    Args:
      mesh: the caller's mesh, or None for the one that `jax.set_mesh` has set, if it has the axis,
        else for a mesh with one axis.
      devices: None for all devices, a number of them, or the devices themselves.
      axis_name: the axis that the batch is split over.

    Raises:
      ValueError: if there are fewer devices than asked for, the mesh lacks the axis, or both a
        mesh and devices are given.
    """
    if mesh is None and devices is None:
        surrounding = context_mesh()
        if surrounding is not None and axis_name in surrounding.axis_names:
            mesh = surrounding
    if mesh is not None:
        if devices is not None:
            raise ValueError("mesh= and devices= are both given; a mesh has its devices. Drop one.")
        if axis_name not in mesh.axis_names:
            raise ValueError(
                f"axis_name is {axis_name!r}, but the mesh has the axes {mesh.axis_names}. Name "
                "one of them."
            )
        # An Explicit axis refuses unsharded inputs and uneven constraints; what the step
        # computes is the same under Auto axes.
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    if devices is None:
        chosen = jax.devices()
    elif isinstance(devices, int):
        available = jax.devices()
        if not 1 <= devices <= len(available):
            raise ValueError(
                f"devices={devices}, but JAX has {len(available)} "
                f"{available[0].platform} device(s). Ask for 1 to {len(available)}; on a CPU, call "
                'jax.config.update("jax_num_cpu_devices", n) before JAX is first used.'
            )
        chosen = available[:devices]
    else:
        chosen = list(devices)
        if not chosen:
            raise ValueError("devices is empty; give at least one device, or None for all.")
        if not all(isinstance(device, jax.Device) for device in chosen):
            raise ValueError(
                f"devices is {devices!r}; write how many, a list of devices (jax.devices()), or "
                "None for all."
            )
    return Mesh(np.array(chosen), (axis_name,), axis_types=(AxisType.Auto,))


def context_mesh() -> Mesh | None:
    """Returns the mesh that `jax.set_mesh` has set, None if there is none."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()


def onto_surrounding(leaves: Sequence[Any]) -> Sequence[Any]:
    """Puts arrays onto the mesh that `jax.set_mesh` has set, if its axes are not Auto.

    A step runs over Auto axes, and where a mesh with Explicit axes is set JAX computes with arrays
    on that mesh only.  Nothing is copied.
    """
    mesh = context_mesh()
    if mesh is None or all(kind is AxisType.Auto for kind in mesh.axis_types):
        return leaves
    out = []
    for leaf in leaves:
        placed = leaf.sharding
        same_devices = placed.device_set == set(mesh.devices.flat)
        if same_devices and placed.is_fully_replicated:
            leaf = jax.device_put(leaf, NamedSharding(mesh, P()))
        elif isinstance(placed, NamedSharding) and placed.mesh.shape == mesh.shape:
            leaf = jax.device_put(leaf, NamedSharding(mesh, placed.spec))
        out.append(leaf)
    return out


@contextlib.contextmanager
def only_mesh(mesh: Mesh | None) -> Generator[None, None, None]:
    """Replaces the mesh that `jax.set_mesh` has set, if any, by another, or by none.

    JAX refuses to trace over one mesh where another is set, even over the same devices.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ()) if mesh is None else mesh):
        yield


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def sharded(mesh: Mesh, axis_name: str, axis: int) -> NamedSharding:
    return NamedSharding(mesh, spec(axis_name, axis))


def spec(axis_name: str, axis: int) -> P:
    return P(*[None] * axis, axis_name)


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """Places an array; one that is in place already is passed through."""
    return put_all([leaf], [sharding], whole=True)[0]


def _in_place(leaf: Any, sharding: NamedSharding) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    placed = leaf.sharding
    if placed is sharding or placed == sharding:
        return True
    same_mesh = isinstance(placed, NamedSharding) and placed.mesh == sharding.mesh
    return same_mesh and placed.is_equivalent_to(sharding, leaf.ndim)


def put_all(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], *, whole: bool = False
) -> list[Any]:
    """Places arrays, those that are elsewhere in one go.

    Args:
      whole: in several processes, whether each has all of an array, or its own part.
    """
    out = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=leaf.weak_type)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf
        for leaf, where in zip(leaves, shardings, strict=True)
    ]
    elsewhere = [
        index
        for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
        if not _in_place(leaf, sharding) and not isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if elsewhere and spans_processes(shardings[0].mesh):
        for index in elsewhere:
            # A Python number stays weakly typed as it is, and goes to every device.
            if is_array(out[index]) and not is_global(out[index]):
                out[index] = make_global(out[index], shardings[index], whole=whole)
    elif elsewhere:
        placed = jax.device_put([out[i] for i in elsewhere], [shardings[i] for i in elsewhere])
        for index, leaf in zip(elsewhere, placed, strict=True):
            out[index] = leaf
    return out


def replicate(*state: Any, mesh: Mesh | None = None, devices: Devices = None) -> Any:
    """Places a copy of the state on every device, in place.

    A decorated step does this at its first call.  Doing it before shows how much memory the state
    takes, and lets other code use the replicated arrays.

    Args:
      *state: NNX objects; their Variables are updated in place.
      mesh: the mesh to place them on; by default one with all devices.
      devices: instead of a mesh, a number of devices or the devices themselves.

    Returns:
      The object given, or a tuple of them.

    Raises:
      TypeError: if an argument is not an NNX object.

    Example::

      >>> import nnx_dp
      >>> from flax import nnx
      >>> model = nnx_dp.replicate(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> model.kernel[...].sharding.is_fully_replicated
      True
    """
    axis_name = "data" if mesh is None else mesh.axis_names[0]
    sharding = replicated(make_mesh(mesh, devices, axis_name))
    for index, node in enumerate(state):
        if not is_state(node):
            raise TypeError(
                f"replicate was given a {type(node).__name__} as argument {index}; it takes NNX "
                "objects. For a batch, use shard_batch."
            )
        for _, value in nnx.iter_graph(node, graph=True):
            if isinstance(value, nnx.Variable):
                placed = jax.tree.map(lambda x: put(x, sharding), value.get_raw_value())
                value.set_raw_value(placed)
    return state[0] if len(state) == 1 else state


def shard_batch(
    batch: Any,
    *,
    mesh: Mesh | None = None,
    devices: Devices = None,
    axis_name: str = "data",
    axis: int = 0,
) -> Any:
    """Splits the arrays of a batch over the devices.

    Args:
      batch: pytree of arrays of shape ``[B, ...]`` (B examples); scalars are replicated.
      mesh: the mesh to place it on; by default one with all devices.
      devices: instead of a mesh, a number of devices or the devices themselves.
      axis_name: the mesh axis to split over.
      axis: the axis of each array that holds the examples.

    Returns:
      The batch as JAX arrays, with B / devices examples on each device.  Where the number of
      devices does not divide B, the array is placed whole on every device.  In several processes
      each gives its own part of the batch, and B counts the examples of all.

    Example::

      >>> import nnx_dp, numpy as np
      >>> x = nnx_dp.shard_batch(np.zeros((8, 3)), devices=1)
      >>> x.shape
      (8, 3)
    """
    mesh = make_mesh(mesh, devices, axis_name)
    count = mesh.local_mesh.shape[axis_name]

    def place(leaf: Any) -> Any:
        if not is_array(leaf):
            is_number = isinstance(leaf, (int, float, complex, np.generic))
            return put(leaf, replicated(mesh)) if is_number else leaf
        if leaf.ndim <= axis or leaf.shape[axis] % count:
            return put(leaf, replicated(mesh))
        return put_all([leaf], [sharded(mesh, axis_name, axis)])[0]

    return jax.tree.map(place, batch)


class Owned:
    """The arrays that a compiled step returned last: those that it may donate as they are.

    Any other array may be held by the caller as well; and `nnx.clone` and ``merge(*split(model))``
    share arrays between Variables, while a buffer can be donated only once.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def donatable(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns arrays, copied where they are not the step's own or occur before."""
        out = []
        seen: set[int] = set()
        for leaf in leaves:
            reference = self._references.get(id(leaf))
            own = reference is not None and reference() is leaf and id(leaf) not in seen
            seen.add(id(leaf))
            out.append(leaf if own else jnp.copy(leaf))
        return out

    def take(self, leaves: Sequence[Any]) -> None:
        self._references = {id(leaf): weakref.ref(leaf) for leaf in leaves}


def check_kept(leaves: Sequence[Any], error: Exception) -> None:
    """Raises RuntimeError if a donated step failed after it had taken its state's buffers."""
    if any(leaf.is_deleted() for leaf in leaves):
        raise RuntimeError(
            "a step with donate=True failed while it ran, and the state that was donated to it is "
            "lost. Restore it from a checkpoint; without donate=True a failure leaves it as it was."
        ) from error
