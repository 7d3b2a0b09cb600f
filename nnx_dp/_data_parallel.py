"""`data_parallel`: the story of one call.

    bind -> assign roles -> plan -> compile (cached) -> run -> write back

`DataParallel.__call__` binds the call and gives every argument a role (`_roles.py`).  For a new
signature the strategy plans and compiles (`_strategies/`); the launcher that it returns is kept.
The launcher places the arrays, runs, and writes the new state back into the caller's objects.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_dp._context import current
from nnx_dp._graph import StateLeaves
from nnx_dp._outputs import check_out_reduce
from nnx_dp._per_device import StepOptions, shape_of
from nnx_dp._placement import make_mesh, replicate, shard_batch
from nnx_dp._roles import INFER, BoundCall, bind_call
from nnx_dp._state_reduce import parse_rules
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._strategies.jit import compile_jit
from nnx_dp._strategies.pmap import compile_pmap
from nnx_dp._strategies.shard_map import compile_replicated, compile_shard_map
from nnx_dp._uneven import UNEVEN, batch_size, drop_remainder, refuse

P = ParamSpec("P")
R = TypeVar("R")

STRATEGIES = {"jit": compile_jit, "shard_map": compile_shard_map, "pmap": compile_pmap}


class DataParallel(Generic[P, R]):
    """A step that runs on every device; made by `data_parallel`."""

    def __init__(self, function: Callable[P, R], settings: dict[str, Any]):
        functools.update_wrapper(self, function)
        self._function = function
        self._settings = settings
        self._strategy: str = settings["strategy"]
        self._options: StepOptions = settings["options"]
        self._launches: dict[Any, Launch] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = self._bind(args, kwargs)
        launch_kind = self._even_out(bound)
        state = StateLeaves(bound.nodes, bound.node_paths())
        with self._lock:
            launch = self._launch(bound, state, launch_kind)
        return launch(bound, state)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices, as a mesh with the data axis; made when first asked for."""
        return make_mesh(
            self._settings["mesh"], self._settings["devices"], self._options.axis_name
        )

    @property
    def devices(self) -> int:
        """Over how many devices the batch is split."""
        return self.mesh.shape[self._options.axis_name]

    def _bind(self, args: Any, kwargs: Any) -> BoundCall:
        if current() is not None:
            raise RuntimeError(
                f"data_parallel({self._name}) was called inside another decorated step. The outer "
                f"step is data-parallel already: call the plain function there "
                f"({self._name}.__wrapped__)."
            )
        return bind_call(
            self._function,
            args,
            kwargs,
            in_axes=self._settings["in_axes"],
            static_argnums=self._settings["static_argnums"],
            static_argnames=self._settings["static_argnames"],
        )

    def _even_out(self, bound: BoundCall) -> str:
        """Deals with a batch that the devices do not divide; returns what is to be compiled."""
        size = batch_size(bound, self._name)
        devices, uneven = self.devices, self._settings["uneven"]
        if size % devices == 0 or (self._strategy == "jit" and uneven == "auto"):
            return self._strategy
        if uneven == "drop" and size > devices:
            self._warn_once(
                f"the batch has {size} examples, which {devices} devices do not divide; "
                f'uneven="drop" leaves {size % devices} out'
            )
            drop_remainder(bound, size, devices)
            return self._strategy
        if uneven == "replicate":
            self._warn_once(
                f"the batch has {size} examples, which {devices} devices do not divide; "
                'uneven="replicate" makes every device compute all of them'
            )
            return "replicate"
        raise refuse(bound, size, devices, self._name, self._strategy)

    def _launch(self, bound: BoundCall, state: StateLeaves, kind: str) -> Launch:
        shapes = tuple(
            (aval.shape, aval.dtype, aval.weak_type)
            for aval in map(shape_of, [*state.leaves, *bound.arrays])
        )
        modes = (
            nnx.set_graph_mode.current_value(),
            nnx.set_graph_updates.current_value(),
            jax.config.jax_enable_x64,
        )
        key = (kind, bound.key, state.key, shapes, modes)
        if key not in self._launches:
            signature = Signature(
                bound, state, self.mesh, self._options, self._settings["donate"]
            )
            compiler = compile_replicated if kind == "replicate" else STRATEGIES[kind]
            self._launches[key] = compiler(signature)
        return self._launches[key]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"data_parallel({self._name}): {message}.", stacklevel=4)

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", type(self._function).__name__)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"data_parallel({self._name}, strategy={self._strategy!r})"

    def replicate(self, *state: Any) -> Any:
        """Places a copy of the state on every device of this step, in place; see `replicate`."""
        return replicate(*state, mesh=self.mesh)

    def shard(self, batch: Any) -> Any:
        """Splits a batch over the devices of this step; see `shard_batch`."""
        return shard_batch(batch, mesh=self.mesh, axis_name=self._options.axis_name)


def data_parallel(f=None, /, *, strategy="auto", mesh=None, devices=None, axis_name="data",
    in_axes=INFER, out_axes=INFER, out_reduce=None, static_argnums=(), static_argnames=(),
    donate=False, uneven="auto", rngs="split", sync_batch_norm=True, state_reduce=None,
    check=True, loss_reduce="infer"):
    """draft"""
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(strategy)
    options = StepOptions(axis_name=axis_name, out_axes=out_axes, out_reduce=out_reduce, rngs=rngs,
        sync_batch_norm=sync_batch_norm, state_reduce=parse_rules(state_reduce), check=check, loss_reduce=loss_reduce)
    settings = dict(strategy="jit" if strategy == "auto" else strategy, mesh=mesh, devices=devices, in_axes=in_axes,
        static_argnums=static_argnums, static_argnames=static_argnames, donate=donate, uneven=uneven, options=options)
    if f is None:
        return lambda f: DataParallel(f, settings)
    return DataParallel(f, settings)
