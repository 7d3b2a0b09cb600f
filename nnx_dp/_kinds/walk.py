"""The walk over a pair of jaxprs: the step at one device's shapes and at the global shapes.

Both come from the same Python code, so their equations match one to one and differ in shapes, in
the parameters that hold shapes, and in constants that were computed from shapes.  Where they do
not match, everything that follows is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nnx_dp._grad_sync import grad_sync_p, loss_p, rows_p
from nnx_dp._jaxpr import Literal, call_body, mapped_axes, open_jaxpr, scan_counts, user_line
from nnx_dp._kinds.algebra import INDEX, SAME, ZERO, Kind, join, linear, rows, same, unknown
from nnx_dp._kinds.losses import loss_from_gradient
from nnx_dp._kinds.pair import Pair, batch_axis
from nnx_dp._kinds.rules import apply_rule

_CALLBACKS = ("callback", "infeed", "outfeed")
_OTHER_VALUES = "the step takes other values on one device's batch than on the whole one"


def find_kinds(
    local: Any,
    whole: Any,
    shard_axes: Sequence[int | None],
    *,
    devices: int,
    axis_name: str,
    constants: Sequence[tuple[Any, Any]] = (),
    through_collectives: bool = True,
    shared_draws: bool = True,
    declared: Mapping[int, str] | None = None,
    trusted: bool = False,
) -> tuple[list[Kind], dict[int, Kind]]:
    """Finds the reduction kind of every output and of every loss.

    Args:
      local: jaxpr of the body at one device's shapes.
      whole: jaxpr of the same body at the global shapes, with a data axis of size one.
      shard_axes: for each input, the axis that is split over devices, or None.
      devices: the number of devices, at least 2.
      axis_name: the data axis.
      constants: for each of the first inputs, its value in the two traces, where these inputs are
        arrays that the body closes over: their values may depend on the batch size.
      through_collectives: whether a value may be put together from several devices' examples;
        False leaves only what is computed from each example alone.
      shared_draws: whether examples on different devices may get the same random numbers, from a
        key that all devices hold alike.
      declared: for gradients of which the caller said what their loss is, "mean" or "sum".
      trusted: whether a gradient is taken to be right that cannot be shown to be, since the caller
        asked for other statistics than those of one device.

    Returns:
      The kind of each output, and the kind of each gradient's loss by the gradient's number.
    """
    walk = _Walk(devices, axis_name, through_collectives, shared_draws, declared or {}, trusted)
    inputs = [SAME if axis is None else rows(axis) for axis in shard_axes]
    inputs[: len(constants)] = [walk.constant(*values) for values in constants]
    outputs = walk.jaxpr(local, whole, inputs)
    for site, cotangents in walk.cotangents.items():
        walk.losses[site] = loss_from_gradient(walk.losses.get(site, SAME), cotangents, trusted)
    inner, outer = open_jaxpr(local)[0], open_jaxpr(whole)[0]
    for index, kind in enumerate(outputs):
        if kind.tag == "zero":
            outputs[index] = _zeros(inner.outvars[index], outer.outvars[index], devices)
    return outputs, walk.losses


def _zeros(local: Any, whole: Any, devices: int) -> Kind:
    """The kind of zeros that are an output: they may be one row for each example."""
    axis = batch_axis(local.aval.shape, whole.aval.shape, devices)
    if axis is None:
        return ZERO
    return rows(axis) if axis >= 0 else unknown("a shape that depends on the batch size")


@dataclasses.dataclass
class _Walk:
    devices: int
    axis_name: str
    through_collectives: bool
    shared_draws: bool
    declared: Mapping[int, str]
    trusted: bool
    losses: dict[int, Kind] = dataclasses.field(default_factory=dict)
    cotangents: dict[int, list[Kind]] = dataclasses.field(default_factory=dict)
    line: str = ""

    def jaxpr(self, local: Any, whole: Any, inputs: list[Kind]) -> list[Kind]:
        inner, constants = open_jaxpr(local)
        outer, whole_constants = open_jaxpr(whole)
        if not _match(inner, outer):
            why = "the step does other operations on one device's batch than on the whole one"
            return [unknown(why)] * len(inner.outvars)
        env: dict[Any, tuple[Any, Kind]] = {}
        for var, partner, kind in zip(inner.invars, outer.invars, inputs, strict=True):
            fits = kind.tag in ("zero", "unknown") or kind.rows_axis == batch_axis(
                getattr(var.aval, "shape", ()), getattr(partner.aval, "shape", ()), self.devices
            )
            env[var] = partner, kind if fits else unknown("a value that depends on the batch size")
        if len(constants) == len(inner.constvars) and len(constants) == len(whole_constants):
            for var, partner, *values in zip(
                inner.constvars, outer.constvars, constants, whole_constants, strict=True
            ):
                env[var] = partner, self.constant(*values)
        for eqn, partner in zip(inner.eqns, outer.eqns, strict=True):
            kinds = [
                self._read(env, *pair) for pair in zip(eqn.invars, partner.invars, strict=True)
            ]
            # A function that JAX compiled before has no lines of its own: that of its call stands.
            line, self.line = self.line, user_line(eqn) or self.line
            pair = Pair(eqn, partner, self.devices, self.line, self.shared_draws)
            results = self._equation(pair, kinds)
            self.line = line
            env.update(zip(eqn.outvars, zip(partner.outvars, results, strict=True), strict=True))
        return [self._read(env, *pair) for pair in zip(inner.outvars, outer.outvars, strict=True)]

    def _read(self, env: dict[Any, tuple[Any, Kind]], atom: Any, partner: Any) -> Kind:
        if isinstance(atom, Literal) and isinstance(partner, Literal):
            return self.constant(atom.val, partner.val)
        if isinstance(atom, Literal) or isinstance(partner, Literal):
            return unknown(_OTHER_VALUES)
        # The same operations may take their operands from elsewhere: `a if len(x) > 8 else b`.
        expected, kind = env.get(atom, (None, None))
        return kind if kind is not None and expected is partner else unknown(_OTHER_VALUES)

    def constant(self, local: Any, whole: Any) -> Kind:
        """The kind of a constant, from its values in the two traces."""
        try:
            a, b = np.asarray(local), np.asarray(whole)
        except TypeError:  # a typed random key
            if np.shape(local) != np.shape(whole):
                return unknown("a constant key")
            data = jax.random.key_data(local), jax.random.key_data(whole)
            return SAME if np.array_equal(*data) else unknown("a constant key")
        axis = batch_axis(a.shape, b.shape, self.devices)
        if axis is not None and axis >= 0:
            return _constant_rows(a, b, axis, self.devices)
        if a.shape != b.shape:
            return unknown("a constant whose shape depends on the batch size")
        if _equal_values(a, b):
            return SAME if a.size == 0 or np.any(a) else ZERO
        if np.issubdtype(a.dtype, np.number) and np.all(b != 0):
            ratios = np.unique(np.asarray(a / b, np.float64))
            for power in (-1, 1, -2, 2):
                if np.allclose(ratios, float(self.devices) ** power, rtol=1e-6, atol=0):
                    return same(power)
        return unknown("a constant that depends on the batch size", curved=True)

    def _equation(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        eqn, name = pair.local, pair.name
        outputs = len(eqn.outvars)
        if eqn.primitive is loss_p:
            site = eqn.params["site"]
            old = self.losses.get(site, kinds[0])
            self.losses[site] = join(old, kinds[0], pair.why("loss"))
            return kinds
        if eqn.primitive is grad_sync_p:
            return [self._gradient(pair, *kinds)]
        if eqn.primitive is rows_p:
            axis = pair.out_axis()
            return kinds if axis is None or axis < 0 else [rows(axis)]
        if name == "scan":
            return self._scan(pair, kinds)
        if name == "while":
            return self._while(pair, kinds)
        if name == "cond":
            return self._cond(pair, kinds)
        body, partner = call_body(eqn), call_body(pair.whole)
        if body is not None and partner is not None:
            return self.jaxpr(body, partner, kinds)
        if any(word in name for word in _CALLBACKS):
            return [unknown(f"it comes from {name}, outside the program, at {pair.line}")] * outputs
        if any("Ref" in type(var.aval).__name__ for var in (*eqn.invars, *eqn.outvars)):
            return [unknown(f"it comes from a mutable array, at {pair.line}")] * outputs
        if self.axis_name in mapped_axes(eqn) and name != "pvary":
            return [self._collective(name, pair, kinds)] * outputs
        return apply_rule(pair, kinds, self.axis_name)

    def _gradient(self, pair: Pair, cotangent: Kind, primal: Kind) -> Kind:
        """What comes out of a gradient's reduction, which the plan decides from the same kinds."""
        params, site = pair.local.params, pair.local.params["site"]
        if params["reduce"] == "keep":
            return cotangent
        over_batch = primal.tag == "rows" or pair.out_axis() is not None
        if not params["derived"]:
            kind = linear(cotangent.power) if cotangent.tag == "rows" else cotangent
            self.cotangents.setdefault(site, []).append(kind)
        if not self.through_collectives:
            # Of a padded batch only a sum leaves the gradient of an example alone.
            apart = over_batch and cotangent.axis is not None and not self._is_mean(site)
            return cotangent if apart else unknown(pair.why("a gradient over the batch"))
        reduced = self._over_batch if over_batch else self._over_state
        return reduced(pair, cotangent, primal, self._is_mean(site))

    def _over_batch(self, pair: Pair, cotangent: Kind, primal: Kind, is_mean: bool) -> Kind:
        if cotangent.tag == "rows":
            declared = pair.local.params["site"] in self.declared
            return rows(cotangent.rows_axis, 0 if declared else cotangent.power - is_mean)  # type: ignore[arg-type]
        if cotangent.tag == "zero":
            return cotangent
        trusted = primal.tag == "rows" and not self._doubtful(pair, cotangent)
        return rows(primal.rows_axis) if trusted else unknown(pair.why("a gradient"))  # type: ignore[arg-type]

    def _over_state(self, pair: Pair, cotangent: Kind, primal: Kind, is_mean: bool) -> Kind:
        if pair.local.params["derived"]:
            if cotangent.tag == "linear":
                return same(cotangent.power - is_mean)
            if cotangent.tag == "same":
                return same(cotangent.power + (not is_mean))
            return cotangent if cotangent.tag == "zero" else unknown(pair.why("pmean"))
        # How the loss is reduced is decided, or refused, by the kind of the loss; either way the
        # gradient that comes out is that of one device.
        if not primal.same:
            return unknown(pair.why("a gradient of a value that varies"))
        return cotangent if self._doubtful(pair, cotangent) else SAME

    def _doubtful(self, pair: Pair, cotangent: Kind) -> bool:
        """Whether a gradient is surely not that of one device, and nobody said that it is."""
        declared = pair.local.params["site"] in self.declared
        return cotangent.curved and not declared and not self.trusted

    def _is_mean(self, site: int) -> bool:
        """Whether the plan will average a gradient over the devices, or add it up."""
        if site in self.declared:
            return self.declared[site] == "mean"
        loss = self.losses.get(site, SAME)
        if loss.tag == "rows" and loss.axis is not None:
            return any(kind.reduction == "mean" for kind in self.cotangents.get(site, []))
        return loss.reduction != "sum"

    def _collective(self, name: str, pair: Pair, kinds: list[Kind]) -> Kind:
        if name == "axis_index":
            return INDEX
        if pair.params.get("axis_index_groups") is not None:
            return unknown(pair.why("a collective over groups of devices"))
        if len(kinds) != 1:
            return unknown(pair.why(name))
        (kind,) = kinds
        if not self.through_collectives and not kind.same:
            return unknown(pair.why(f"{name} over the batch"))
        if kind.tag == "unknown":
            return kind
        if name in ("psum", "psum_invariant"):
            if kind.tag == "zero":
                return kind
            if kind.tag == "linear":
                return same(kind.power)
            if kind.tag == "same":
                return same(kind.power + 1)
        elif name in ("all_gather", "all_gather_invariant"):
            gathered = pair.params["all_gather_dimension"]
            if kind.tag == "rows" and pair.params["tiled"] and kind.rows_axis == gathered:
                return same(kind.power)
        elif name in ("pmax", "pmin") and (kind.same or kind.tag == name[1:]):
            return SAME
        return unknown(pair.why(name))

    def _scan(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        eqn, whole = pair.local, pair.whole.params
        consts, carried = scan_counts(eqn)
        if any(eqn.params[name] != whole[name] for name in ("length", "reverse")):
            return [unknown(pair.why("a scan over the batch"))] * len(eqn.outvars)
        end = consts + carried
        inputs = kinds[:end] + [_shifted(kind, -1) for kind in kinds[end:]]
        bodies = eqn.params["jaxpr"], whole["jaxpr"]
        while True:
            results = self.jaxpr(*bodies, inputs)
            carry = self._joined(pair, inputs[consts:end], results[:carried])
            if carry == inputs[consts:end]:
                return carry + [_shifted(kind, 1) for kind in results[carried:]]
            inputs[consts:end] = carry

    def _while(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        params, whole = pair.local.params, pair.whole.params
        cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
        if (cond_consts, body_consts) != (whole["cond_nconsts"], whole["body_nconsts"]):
            return [unknown(pair.why("a loop that differs"))] * len(pair.local.outvars)
        start = cond_consts + body_consts
        carry = kinds[start:]
        while True:
            (stop,) = self.jaxpr(
                params["cond_jaxpr"], whole["cond_jaxpr"], kinds[:cond_consts] + carry
            )
            if not stop.same:
                why = pair.why("a while loop whose length depends on one device's examples")
                return [unknown(why)] * len(carry)
            results = self.jaxpr(
                params["body_jaxpr"], whole["body_jaxpr"], kinds[cond_consts:start] + carry
            )
            new = self._joined(pair, carry, results)
            if new == carry:
                return carry
            carry = new

    def _joined(self, pair: Pair, first: list[Kind], second: list[Kind]) -> list[Kind]:
        why = pair.why("a loop that carries different kinds")
        return [join(a, b, why) for a, b in zip(first, second, strict=True)]

    def _cond(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        predicate, *operands = kinds
        branches, partners = pair.local.params["branches"], pair.whole.params["branches"]
        if len(branches) != len(partners):
            return [unknown(pair.why("a choice of branches"))] * len(pair.local.outvars)
        results = [self.jaxpr(a, b, operands) for a, b in zip(branches, partners, strict=True)]
        if not predicate.same:
            why = pair.why("a branch that depends on one device's examples")
            return [unknown(why)] * len(pair.local.outvars)
        outputs = results[0]
        for other in results[1:]:
            outputs = [
                join(a, b, pair.why("branches of different kinds"))
                for a, b in zip(outputs, other, strict=True)
            ]
        return outputs


def _match(local: Any, whole: Any) -> bool:
    """Whether two jaxprs do the same operations, as far as their names say."""
    names, partners = ([eqn.primitive.name for eqn in j.eqns] for j in (local, whole))
    return (
        names == partners
        and all(
            len(getattr(local, part)) == len(getattr(whole, part))
            for part in ("invars", "constvars", "outvars")
        )
        and all(
            len(a.invars) == len(b.invars) and len(a.outvars) == len(b.outvars)
            for a, b in zip(local.eqns, whole.eqns, strict=True)
        )
    )


def _shifted(kind: Kind, by: int) -> Kind:
    """The kind of what a scan takes in one iteration (by -1), or stacks (by 1)."""
    if kind.rows_axis is None:
        return kind
    return dataclasses.replace(kind, rows_axis=kind.rows_axis + by)


def _constant_rows(local: np.ndarray, whole: np.ndarray, axis: int, devices: int) -> Kind:
    """The kind of a constant with one row for each example."""
    if whole.dtype == bool and not np.any(whole):
        return Kind("false", rows_axis=axis)
    if _equal_values(np.concatenate([local] * devices, axis), whole):
        return rows(axis)
    if np.issubdtype(whole.dtype, np.integer) and whole.dtype.itemsize >= 4:
        along = np.expand_dims(
            np.arange(whole.shape[axis]), tuple(i for i in range(whole.ndim) if i != axis)
        )
        if np.all(whole == along) and np.all(local == along.take(range(local.shape[axis]), axis)):
            return Kind("number", rows_axis=axis)
    return unknown("a constant of batch size")


def _equal_values(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()
