"""`data_parallel`: the story of one call.

    bind -> assign roles -> plan -> compile (cached) -> run -> write back

`DataParallel.__call__` binds the call and gives every argument a role (`_roles.py`).  For a new
signature the strategy plans and compiles (`_strategies/`); the launcher that it returns is kept.
The launcher places the arrays, runs, and writes the new state back into the caller's objects.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nnx_dp._context import current
from nnx_dp._explain import Explanation, explain
from nnx_dp._explain_error import explain_error
from nnx_dp._graph import StateLeaves, write_back
from nnx_dp._outputs import check_out_reduce
from nnx_dp._per_device import StepOptions, padded_output_axes
from nnx_dp._placement import Devices, make_mesh, replicate, shard_batch
from nnx_dp._prefetch import Prefetch
from nnx_dp._processes import spans_processes
from nnx_dp._repeat import Call, Repeats, trace_modes
from nnx_dp._roles import INFER, BoundCall, bind_call, is_state, is_traced, shape_of
from nnx_dp._state_placement import check_whole, state_placements
from nnx_dp._state_reduce import parse_rules
from nnx_dp._strategies._interface import Launch, Signature
from nnx_dp._strategies.auto import choose
from nnx_dp._strategies.jit import compile_jit
from nnx_dp._strategies.pmap import compile_pmap
from nnx_dp._strategies.shard_map import compile_replicated, compile_shard_map
from nnx_dp._together import Together
from nnx_dp._uneven import UNEVEN, batch_size, drop_remainder, pad, refuse, unpad
from nnx_dp._verify import Oracle, ShardCheck

_log = logging.getLogger("nnx_dp")

P = ParamSpec("P")
R = TypeVar("R")

Strategy = Literal["auto", "jit", "shard_map", "pmap"]
_COMPILERS: dict[str, Callable[[Signature], Launch]] = {
    "jit": compile_jit,
    "shard_map": compile_shard_map,
    "pmap": compile_pmap,
    "replicate": compile_replicated,
}
_STRATEGIES = ("auto", "jit", "shard_map", "pmap")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The decorator's arguments that say how a step is called, placed and launched."""

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
class _Prepared:
    """A call that is ready to run.

    Attributes:
      bound: the call, its batch made one that can be split.
      whole: the same with the batch of all processes.
      given: the sizes of the batch arrays as they were given.
      state: the arrays of its NNX objects.
      launch: its signature, compiled.
    """

    bound: BoundCall
    whole: BoundCall
    given: tuple[int, ...]
    state: StateLeaves
    launch: Launch


class DataParallel(Generic[P, R]):
    """A step that runs on every device; made by `data_parallel`.

    Called as the plain step is called; `__wrapped__` is the plain step.
    """

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], settings: _Settings, options: StepOptions):
        # A Module that is decorated keeps its attributes to itself.
        updated = () if is_state(function) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, function, updated=updated)
        self._settings = settings
        self._options = options
        self._launches: dict[Any, Launch] = {}
        self._chosen = settings.strategy
        self._warned: set[str] = set()
        self._verified: set[Launch] = set()
        self._repeats = Repeats()
        self._calls = 0
        self._compiling = threading.RLock()

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
        return self._chosen

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
        return explain(
            self._name,
            call.whole,
            call.given,
            call.state,
            call.launch,
            self.mesh,
            len(self._launches),
        )

    def _first(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Makes a call that repeats none, and keeps what is needed to repeat it."""
        prepared = self._prepare(args, kwargs)
        bound, state, launch = prepared.bound, prepared.state, prepared.launch
        state.check_alive()
        if self._settings.verify and launch not in self._verified:
            return self._verify(bound, state, launch)
        repeat = self._repeats.open(
            call,
            bound,
            state,
            launch,
            static_argnums=self._settings.static_argnums,
            static_argnames=self._settings.static_argnames,
        )
        output = _run(bound, state, launch)
        if repeat is not None:
            self._repeats.close(repeat)
        return output

    def _prepare(self, args: Any, kwargs: Any) -> _Prepared:
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
            whole, how = bound, self._even_out(bound, batch_size(bound, self._name))
        state = StateLeaves(bound.nodes, bound.node_paths())
        self._check_outermost(bound, state)
        return _Prepared(bound, whole, given, state, self._launch(bound, whole, state, how))

    @functools.cached_property
    def _together(self) -> Together:
        return Together(
            self._name,
            self.mesh,
            self._options.axis_name,
            self._settings.static_argnums,
            self._settings.static_argnames,
        )

    def _bind(self, args: Any, kwargs: Any) -> BoundCall:
        if current() is not None:
            raise RuntimeError(
                f"data_parallel({self._name}) was called inside another decorated step, which is "
                f"data-parallel already. Call the plain function there: {self._name}.__wrapped__."
            )
        return bind_call(
            self.__wrapped__,
            args,
            kwargs,
            in_axes=self._settings.in_axes,
            static_argnums=self._settings.static_argnums,
            static_argnames=self._settings.static_argnames,
        )

    def _check_outermost(self, bound: BoundCall, state: StateLeaves) -> None:
        traced = [argument.path for argument, array in bound.located_arrays() if is_traced(array)]
        if not traced and any(map(is_traced, state.leaves)):
            traced = [
                path for path, x in zip(state.paths, state.leaves, strict=True) if is_traced(x)
            ]
        if traced:
            raise RuntimeError(
                f"data_parallel({self._name}) was called inside another transform (jit, grad, "
                f"vmap, ...), which traces {traced[0]}. A decorated step is the outermost one: put "
                f"the transform in the step, or around the plain function {self._name}.__wrapped__."
            )

    def _even_out(self, bound: BoundCall, size: int) -> str:
        """Makes the batch one that can be split; returns the strategy, "replicate" or "pad"."""
        strategy, uneven = self._settings.strategy, self._settings.uneven
        devices = self.mesh.shape[self._options.axis_name]
        if size % devices == 0 or (strategy in ("jit", "auto") and uneven == "auto"):
            return strategy
        told = f"{size} examples, which {devices} devices do not divide"
        if uneven == "drop" and size > devices:
            self._warn_once(f'{told}: uneven="drop" leaves the last {size % devices} out')
            drop_remainder(bound, size, devices)
            return strategy
        if uneven == "replicate":
            self._warn_once(f'{told}: uneven="replicate" makes every device compute all of them')
            return "replicate"
        if uneven == "pad":
            pad(bound, size, devices)
            return "pad"
        raise refuse(bound, size, devices, self._name, strategy)

    def _launch(self, bound: BoundCall, whole: BoundCall, state: StateLeaves, how: str) -> Launch:
        """Returns the launcher of a call's signature, compiled now if it is new."""
        shapes = tuple(
            (aval.shape, aval.dtype, aval.weak_type)
            for aval in map(shape_of, [*state.leaves, *whole.arrays])
        )
        placements = state_placements(
            state,
            self.mesh,
            self._options.axis_name,
            shard_optimizer=self._settings.shard_optimizer,
        )
        key = (how, bound.key, state.key, shapes, placements, trace_modes())
        with self._compiling:
            if key not in self._launches:
                signature = Signature(
                    whole.abstract(),
                    state.abstract(),
                    self.mesh,
                    placements,
                    self._options,
                    self._settings.donate,
                )
                if how == "pad":
                    devices = signature.devices
                    axes = padded_output_axes(
                        signature.bound, signature.state, self._options, devices
                    )
                    signature = dataclasses.replace(signature, padded_output_axes=axes)
                    how = self._settings.strategy
                self._launches[key] = self._compile(signature, how, bound, state)
            return self._launches[key]

    def _compile(
        self, signature: Signature, how: str, bound: BoundCall, state: StateLeaves
    ) -> Launch:
        if how not in ("jit", "auto"):
            check_whole(state, signature.state_placements, self._name, how)
        if how != "auto":
            return _COMPILERS[how](signature)
        size = batch_size(signature.bound, self._name)
        choice = choose(signature, bound, state, even=size % signature.devices == 0)
        _log.info('data_parallel(%s): strategy "%s": %s', self._name, choice.strategy, choice.why)
        if choice.strategy != "jit":
            check_whole(state, signature.state_placements, self._name, choice.strategy)
        self._chosen = choice.strategy
        choice.launch.why = choice.why
        return choice.launch

    def _verify(self, bound: BoundCall, state: StateLeaves, launch: Launch) -> Any:
        """Runs a call and the plain step on one device, on copies, and compares."""
        oracle = Oracle(bound, state, self.mesh.devices.flat[0])
        output = _run(bound, state, launch)
        try:
            grad_dtype = self._options.grad_dtype
            oracle.compare(bound, output, drew=launch.drew, grad_dtype=grad_dtype)
        except AssertionError:
            state.replace(oracle.before)
            raise
        self._verified.add(launch)
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
            warnings.warn(f"data_parallel({self._name}): {message}.", stacklevel=5)

    def _with(self, **settings: Any) -> DataParallel[P, R]:
        """Returns the same step with other settings."""
        settings_of = dataclasses.replace(self._settings, **settings)
        return DataParallel(self.__wrapped__, settings_of, self._options)

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", type(self.__wrapped__).__name__)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that a method can be decorated in its class."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"data_parallel({self._name}, strategy={self._settings.strategy!r})"


def _run(bound: BoundCall, state: StateLeaves, launch: Launch) -> Any:
    leaves = launch.run(launch.place_state(state.leaves), bound.arrays)
    leaves = unpad(list(leaves), launch.padded_axes, bound.unpadded_size)
    return write_back(launch.structure, leaves, state)


@overload
def data_parallel(
    f: Callable[P, R],
    /,
    *,
    strategy: Strategy = ...,
    mesh: Mesh | None = ...,
    devices: Devices = ...,
    axis_name: str = ...,
    in_axes: Any = ...,
    out_axes: Any = ...,
    out_reduce: Any = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    donate: bool = ...,
    shard_optimizer: bool = ...,
    uneven: Literal["auto", "replicate", "pad", "drop", "error"] = ...,
    rngs: str | Sequence[str] = ...,
    sync_batch_norm: bool = ...,
    state_reduce: Any = ...,
    check: bool = ...,
    check_every: int | None = ...,
    verify: bool = ...,
    loss_reduce: Literal["infer", "mean", "sum"] = ...,
    grad_dtype: Any = ...,
) -> DataParallel[P, R]: ...


@overload
def data_parallel(
    *,
    strategy: Strategy = ...,
    mesh: Mesh | None = ...,
    devices: Devices = ...,
    axis_name: str = ...,
    in_axes: Any = ...,
    out_axes: Any = ...,
    out_reduce: Any = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    donate: bool = ...,
    shard_optimizer: bool = ...,
    uneven: Literal["auto", "replicate", "pad", "drop", "error"] = ...,
    rngs: str | Sequence[str] = ...,
    sync_batch_norm: bool = ...,
    state_reduce: Any = ...,
    check: bool = ...,
    check_every: int | None = ...,
    verify: bool = ...,
    loss_reduce: Literal["infer", "mean", "sum"] = ...,
    grad_dtype: Any = ...,
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
    _one_of("strategy", strategy, _STRATEGIES)
    _one_of("uneven", uneven, UNEVEN)
    _one_of("loss_reduce", loss_reduce, ("infer", "mean", "sum"))
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
    settings = _Settings(
        strategy="shard_map" if strategy == "auto" and grad_dtype is not None else strategy,
        mesh=mesh,
        devices=devices,
        in_axes=in_axes,
        static_argnums=(static_argnums,)
        if isinstance(static_argnums, int)
        else tuple(static_argnums),
        static_argnames=(static_argnames,)
        if isinstance(static_argnames, str)
        else tuple(static_argnames),
        donate=donate,
        shard_optimizer=shard_optimizer,
        uneven=uneven,
        verify=verify,
        check_every=check_every,
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
    if f is None:
        return lambda f: _decorate(f, settings, options)
    return _decorate(f, settings, options)


def _decorate(f: Callable[P, R], settings: _Settings, options: StepOptions) -> DataParallel[P, R]:
    if not callable(f):
        raise TypeError(f"data_parallel takes a function, not a {type(f).__name__}: {f!r}.")
    if isinstance(f, DataParallel):
        raise TypeError(f"{f!r} is data-parallel already; decorate the plain function.")
    return DataParallel(f, settings, options)


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
