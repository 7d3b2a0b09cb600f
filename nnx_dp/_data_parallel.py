"""`data_parallel`: the story of one call.

    repeat?  ->  bind  ->  make even  ->  find or compile  ->  run  ->  write back

A call that repeats an earlier one takes the short way (`_repeat.py`).  Any other is bound, which
gives every argument a role: state, batch, replicated or static (`_roles.py`).  Its batch is made
one that can be split (`_uneven.py`), its NNX objects become a flat list of arrays (`_graph.py`),
and `_launches.py` finds the launch of its signature.  For a new signature a strategy compiles one
(`_strategies/`); a per-device strategy does so by a plan (`_plan.py`), which says how each
gradient, output and Variable leaves the devices.  The launch places the arrays and runs, and the
new state is written back into the caller's objects.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

import jax
from jax.sharding import Mesh

from nnx_dp._context import current
from nnx_dp._explain import explain
from nnx_dp._explain_error import explain_error
from nnx_dp._explanation import Explanation
from nnx_dp._graph import StateLeaves
from nnx_dp._launches import Launches
from nnx_dp._leaves import is_state
from nnx_dp._options import Options, Settings, StepOptions, read_options
from nnx_dp._outermost import check_not_inside_step, check_outermost
from nnx_dp._placement import make_mesh, replicate, shard_batch
from nnx_dp._prefetch import Prefetch
from nnx_dp._prepared import Prepared
from nnx_dp._processes import spans_processes
from nnx_dp._repeat import Call, Repeats
from nnx_dp._roles import INFER, BoundCall, bind_call
from nnx_dp._strategies._interface import Launch
from nnx_dp._together import Together
from nnx_dp._uneven import even_out
from nnx_dp._verify import Oracle, ShardCheck

P = ParamSpec("P")
R = TypeVar("R")


class DataParallel(Generic[P, R]):
    """A step that runs on every device; made by `data_parallel`.

    Called as the plain step is called; `__wrapped__` is the plain step.
    """

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], settings: Settings, options: StepOptions):
        # A Module that is decorated keeps its attributes to itself.
        updated = () if is_state(function) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, function, updated=updated)
        self._settings = settings
        self._options = options
        self._launches = Launches(self._name, settings, options)
        self._warned: set[str] = set()
        self._verified: set[Launch] = set()
        self._repeats = Repeats(settings.static_argnums, settings.static_argnames)
        self._calls = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            call = Call(self.__wrapped__, args, kwargs)
            found = self._repeats.find(call) if current() is None else None
            if self._options.check and spans_processes(self.mesh):
                bind = functools.partial(self._bind, args, kwargs)
                self._together.agree(call, bind, repeated=found is not None)
            if found is None:
                output = self._first(call, args, kwargs)
            else:
                repeat, state = found
                output = repeat.run(call, state)
        except Exception as error:
            axis_name = self._options.axis_name
            explained = explain_error(error, step=self._name, axis_name=axis_name)
            if explained is None:
                raise
            raise explained from error
        if self._settings.check_every is not None:
            self._check_shards(args, kwargs)
        return output

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices, as a mesh with the data axis; made when it is first needed."""
        return make_mesh(self._settings.mesh, self._settings.devices, self._options.axis_name)

    @property
    def strategy(self) -> str:
        """The strategy of the last signature that was compiled; "auto" before the first."""
        return self._launches.strategy

    def replicate(self, *state: Any) -> Any:
        """Places a copy of the state on every device of this step, in place; see `replicate`."""
        return replicate(*state, mesh=self.mesh)

    def shard(self, batch: Any) -> Any:
        """Splits a batch over the devices of this step; see `shard_batch`."""
        return shard_batch(batch, mesh=self.mesh, axis_name=self._options.axis_name)

    def prefetch(self, iterable: Iterable[Any], size: int = 2) -> Prefetch[Any]:
        """Reads batches in the background and splits them over the devices; see `prefetch`."""
        return Prefetch(iterable, self.shard, size)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Traces and lowers the step for these arguments, without running it.

        Returns:
          What `jax.jit(...).lower` returns: `.compile()` gives the compiled program, with its HLO
          (`as_text`), cost and memory analysis.

        Raises:
          NotImplementedError: under ``"pmap"``, since `nnx.pmap` cannot be lowered ahead of time.
        """
        call = self._prepare(args, kwargs)
        return call.launch.lower(call.state.leaves, call.bound.arrays)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Says what becomes of a call: its arguments, its outputs, and what crosses.

        The step is traced and compiled for these arguments, which may be abstract
        (`jax.ShapeDtypeStruct`, `nnx.eval_shape`); nothing runs.

        Returns:
          An `Explanation`: print it, or show it in a notebook; `to_markdown` for a file.

        Raises:
          Exception: what a call with these arguments would raise before it runs.
        """
        call = self._prepare(args, kwargs)
        return explain(self._name, call, self.mesh, signatures=len(self._launches))

    def _first(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Makes a call that repeats none, and keeps what is needed to repeat it."""
        prepared = self._prepare(args, kwargs)
        bound, state, launch = prepared.bound, prepared.state, prepared.launch
        state.check_alive()
        if self._settings.verify and launch not in self._verified:
            return self._verify(prepared)
        repeat = self._repeats.open(call, bound, state, launch)
        output = prepared.run()
        if repeat is not None:
            self._repeats.close(repeat)
        return output

    def _prepare(self, args: Any, kwargs: Any) -> Prepared:
        bound = self._bind(args, kwargs)
        given = tuple(size for _, size in bound.batch_sizes())
        if spans_processes(self.mesh):
            if self._settings.verify:
                raise ValueError(
                    f"data_parallel({self._name}): verify=True runs the whole batch on one device, "
                    f"and here {jax.process_count()} processes have a part each. Verify in one "
                    "process."
                )
            whole, how = self._together.whole_call(bound), self._settings.strategy
        else:
            devices = self.mesh.shape[self._options.axis_name]
            how = even_out(bound, devices, self._settings, self._name, warn=self._warn_once)
            whole = bound
        state = StateLeaves(bound.nodes, bound.node_paths())
        check_outermost(self._name, bound, state)
        launch = self._launches.find(bound, whole, state, self.mesh, how)
        return Prepared(bound, whole, given, state, launch)

    @functools.cached_property
    def _together(self) -> Together:
        return Together(self._name, self.mesh, self._options.axis_name, self._settings)

    def _bind(self, args: Any, kwargs: Any) -> BoundCall:
        check_not_inside_step(self._name)
        return bind_call(
            self.__wrapped__,
            args,
            kwargs,
            in_axes=self._settings.in_axes,
            static_argnums=self._settings.static_argnums,
            static_argnames=self._settings.static_argnames,
        )

    def _verify(self, call: Prepared) -> Any:
        """Runs a call and the plain step on one device, on copies, and compares."""
        oracle = Oracle(call.bound, call.state, self.mesh.devices.flat[0])
        output = call.run()
        try:
            grad_dtype = self._options.grad_dtype
            oracle.compare(call.bound, output, drew=call.launch.drew, grad_dtype=grad_dtype)
        except AssertionError:
            call.state.replace(oracle.before)
            raise
        self._verified.add(call.launch)
        return output

    def _check_shards(self, args: Any, kwargs: Any) -> None:
        self._calls += 1
        if self._calls % (self._settings.check_every or 1) != 0:
            return
        found = self._repeats.find(Call(self.__wrapped__, args, kwargs))
        if found is None or not self._shard_check.agree(found[1].state):
            bound = self._bind(args, kwargs)
            self._shard_check(StateLeaves(bound.nodes, bound.node_paths()))

    @functools.cached_property
    def _shard_check(self) -> ShardCheck:
        return ShardCheck(self.mesh)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"data_parallel({self._name}): {message}.", stacklevel=6)

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", type(self.__wrapped__).__name__)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that a method can be decorated in its class."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        """Pickles and copies like a function: by its name, where that is how it can be found."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return DataParallel, (self.__wrapped__, self._settings, self._options)

    def __repr__(self) -> str:
        return f"data_parallel({self._name}, strategy={self._settings.strategy!r})"


@overload
def data_parallel(f: Callable[P, R], /, **options: Unpack[Options]) -> DataParallel[P, R]: ...


@overload
def data_parallel(
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DataParallel[P, R]]: ...


def data_parallel(
    f: Any = None,
    /,
    *,
    strategy: Any = "auto",
    mesh: Any = None,
    devices: Any = None,
    axis_name: Any = "data",
    in_axes: Any = INFER,
    out_axes: Any = INFER,
    out_reduce: Any = None,
    static_argnums: Any = (),
    static_argnames: Any = (),
    donate: Any = False,
    shard_optimizer: Any = False,
    uneven: Any = "auto",
    rngs: Any = "split",
    sync_batch_norm: Any = True,
    state_reduce: Any = None,
    check: Any = True,
    check_every: Any = None,
    verify: Any = False,
    loss_reduce: Any = "infer",
    grad_dtype: Any = None,
) -> Any:
    """Turns a step that was written for one device into one that runs on all of them.

    The decorated step is called with the same arguments, returns what the plain step would have
    returned for the whole batch, and leaves the same state behind, to floating-point tolerance.
    What cannot be kept so is an error, raised before anything has changed.

    NNX objects among the arguments (Modules, optimizers, metrics, Rngs, Variables) are state: one
    copy on each device, updated in place.  Arrays with at least one axis are the batch, split over
    the devices on axis 0.  Scalars, 0-d arrays and typed PRNG keys are the same on every device.
    Strings, bools, None, functions and other hashable values are static: part of the compilation.

    Args:
      f: the step: a function, a method, a `functools.partial`, or a Module to be called.
      strategy: what the body sees and how it is launched.  "jit": the global batch, partitioned by
        XLA, with the random numbers of one device.  "shard_map" and "pmap": one device's batch,
        through `jax.shard_map` or `nnx.pmap`, for kernels that XLA cannot partition.  "auto" is
        "jit", unless the step holds a call that XLA cannot partition outside `per_device`, or
        traces only at one device's shapes: then "shard_map".
      mesh: the devices, as a mesh that has `axis_name`; by default one axis over all devices.
      devices: instead of a mesh, how many devices to use, or which.
      axis_name: the mesh axis that the batch is split over.
      in_axes: overrides the roles, as in `jax.vmap`: an axis to split on, None for an array that is
        the same on every device, ... to work it out; one entry, a tuple with one for each
        positional argument, or a dict by parameter name; each may be a prefix tree.
      out_axes: for outputs of a per-device strategy, the axis that the devices' parts are joined
        on, None where they are equal, ... to work it out; a prefix tree of the output.
      out_reduce: for outputs of a per-device strategy, how the devices' values are reduced:
        "mean", "sum", "max", "min", or None to work it out; a prefix tree of the output.
      static_argnums: positions of further static arguments, as in `jax.jit`.
      static_argnames: names of further static arguments, as in `jax.jit`.
      donate: whether the buffers of the state may be reused for the new state, as with
        `donate_argnums` in `jax.jit`.  A donated step that fails on the device has lost its state.
      shard_optimizer: whether each device keeps and updates only its part of the optimizer's arrays
        (ZeRO-1), under "jit".  Arrays with fewer than 1024 elements, or with no axis that the
        devices divide, stay whole.
      uneven: what to do with a batch that the devices do not divide.  "auto": split it unevenly
        under "jit" (exact), an error elsewhere.  "replicate": every device computes all of it.
        "pad": pad it and cut the padding out of the outputs, which must be one row for each
        example.  "drop": leave the remainder out.  "error": an error.
      rngs: in a per-device strategy, "split" draws different random numbers on each device,
        "broadcast" the same; a stream's name, or several, keeps these streams the same.  The
        "params" stream is always the same.
      sync_batch_norm: in a per-device strategy, whether `nnx.BatchNorm` takes its statistics over
        all devices (exact); False takes them on each device and averages the running ones.
      state_reduce: in a per-device strategy, rules for other state that differs between devices: a
        mapping from NNX filters to "mean", "sum", "accumulate" (the old value plus the sum of the
        changes), "max", "min", or a function `(old, new) -> value`.
      check: whether to prove, once a compilation, that all devices end with the state that one
        device would have.
      check_every: compare the copies of the state on the devices, after every so many calls.
      verify: whether the first call of each signature also runs the plain step on one device, on
        copies, and compares all that they leave behind (except random draws).
      loss_reduce: in a per-device strategy, what a loss is over one device's examples: "mean",
        "sum", or "infer" to read it off the traced step.
      grad_dtype: a narrower floating-point dtype in which gradients cross between devices, such as
        `jnp.bfloat16`, which halves the bytes; they come out in their own dtype, with the precision
        of the narrow one.  Needs a per-device strategy; "auto" is then "shard_map".

    Returns:
      A `DataParallel`, called like `f`; or, without `f`, a decorator.

    Raises:
      ValueError: at once for an argument that is none of the above; at a call for a batch that
        cannot be split, an output or state that cannot be what one device would have, or too few
        devices.
      TypeError: at a call, for an argument that is neither an array, NNX state nor hashable.
      RuntimeError: at a call inside another decorated step.
      AssertionError: at a call that `verify` or `check_every` finds wrong.

    Example::

      >>> import jax.numpy as jnp, nnx_dp, optax
      >>> from flax import nnx
      >>> @nnx_dp.data_parallel
      ... def train_step(model, optimizer, x, y):
      ...     def loss_fn(model):
      ...         return jnp.mean((model(x) - y) ** 2)
      ...     loss, grads = nnx.value_and_grad(loss_fn)(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> loss = train_step(model, optimizer, jnp.ones((8, 3)), jnp.zeros((8, 1)))
      >>> loss.shape
      ()
    """
    settings, step_options = read_options(
        strategy=strategy,
        mesh=mesh,
        devices=devices,
        axis_name=axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        out_reduce=out_reduce,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate=donate,
        shard_optimizer=shard_optimizer,
        uneven=uneven,
        rngs=rngs,
        sync_batch_norm=sync_batch_norm,
        state_reduce=state_reduce,
        check=check,
        check_every=check_every,
        verify=verify,
        loss_reduce=loss_reduce,
        grad_dtype=grad_dtype,
    )
    if f is None:
        return lambda f: _decorate(f, settings, step_options)
    return _decorate(f, settings, step_options)


def _decorate(f: Callable[P, R], settings: Settings, options: StepOptions) -> DataParallel[P, R]:
    if not callable(f):
        raise TypeError(f"data_parallel takes a function, not a {type(f).__name__}: {f!r}.")
    if isinstance(f, DataParallel):
        raise TypeError(f"{f!r} is data-parallel already; decorate the plain function.")
    return DataParallel(f, settings, options)
