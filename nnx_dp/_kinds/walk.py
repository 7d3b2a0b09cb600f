"""The walk over a pair of jaxprs: the step at one device's shapes and at the global shapes.

Both come from the same Python code, so their equations match one to one and differ in shapes, in
the parameters that hold shapes, and in constants that were computed from shapes.  Where they do
not match, everything that follows is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnx_dp._grad_sync import grad_sync_p, loss_p, rows_p
from nnx_dp._jaxpr import Literal, call_body, mapped_axes, open_jaxpr, scan_counts
from nnx_dp._kinds.algebra import INDEX, SAME, ZERO, Kind, join, rows, same, unknown
from nnx_dp._kinds.rules import KERNELS, RULES, Pair, batch_axis

_CALLBACKS = ("callback", "infeed", "outfeed")


def find_kinds(
    local: Any,
    whole: Any,
    shard_axes: Sequence[int | None],
    *,
    devices: int,
    axis_name: str,
    through_collectives: bool = True,
) -> tuple[list[Kind], dict[int, Kind]]:
    """Finds the reduction kind of every output and of every loss.

    Args:
      local: jaxpr of the body at one device's shapes.
      whole: jaxpr of the same body at the global shapes, with a data axis of size one.
      shard_axes: for each input, the axis that is split over devices, or None.
      devices: the number of devices, at least 2.
      axis_name: the data axis.
      through_collectives: whether a value may be put together from several devices' examples;
        False leaves only what is computed from each example alone.

    Returns:
      The kind of each output, and the kind of each gradient's loss by the gradient's number.
    """
    inputs = [SAME if axis is None else rows(axis) for axis in shard_axes]
    walk = _Walk(devices, axis_name, through_collectives)
    outputs = walk.jaxpr(local, whole, inputs)
    for site, cotangents in walk.cotangents.items():
        # A function with an output for each example, differentiated by nnx.vjp: what its
        # gradient is depends on the cotangent that the step chose.
        if walk.losses.get(site, SAME).tag == "rows":
            walk.losses[site] = cotangents
    return outputs, walk.losses


@dataclasses.dataclass
class _Walk:
    devices: int
    axis_name: str
    through_collectives: bool
    losses: dict[int, Kind] = dataclasses.field(default_factory=dict)
    cotangents: dict[int, Kind] = dataclasses.field(default_factory=dict)

    def jaxpr(self, local: Any, whole: Any, inputs: list[Kind]) -> list[Kind]:
        inner, constants = open_jaxpr(local)
        outer, whole_constants = open_jaxpr(whole)
        env: dict[Any, Kind] = dict(zip(inner.invars, inputs, strict=True))
        if len(constants) == len(whole_constants):
            for var, a, b in zip(inner.constvars, constants, whole_constants, strict=True):
                env[var] = self._constant(a, b)
        names = [eqn.primitive.name for eqn in inner.eqns]
        matches = names == [eqn.primitive.name for eqn in outer.eqns]
        if not matches or len(inner.outvars) != len(outer.outvars):
            why = "the step does other operations on one device's batch than on the whole one"
            return [unknown(why)] * len(inner.outvars)
        for eqn, partner in zip(inner.eqns, outer.eqns, strict=True):
            kinds = [self._read(env, *pair) for pair in zip(eqn.invars, partner.invars)]
            results = self._equation(Pair(eqn, partner, self.devices), kinds)
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._read(env, *pair) for pair in zip(inner.outvars, outer.outvars, strict=True)]

    def _read(self, env: dict[Any, Kind], atom: Any, partner: Any) -> Kind:
        if isinstance(atom, Literal):
            if not isinstance(partner, Literal):
                return unknown("a value that depends on the batch size")
            return self._constant(atom.val, partner.val)
        if isinstance(partner, Literal):
            return unknown("a value that depends on the batch size")
        return env.get(atom, SAME)

    def _constant(self, local: Any, whole: Any) -> Kind:
        """The kind of a constant, from its values in the two traces."""
        if local is whole:
            return SAME
        try:
            a, b = np.asarray(local), np.asarray(whole)
        except TypeError:  # a typed random key
            return SAME if np.shape(local) == np.shape(whole) else unknown("a constant key")
        axis = batch_axis(a.shape, b.shape, self.devices)
        if axis is not None and axis >= 0:
            tiled = np.concatenate([a] * self.devices, axis)
            return rows(axis) if np.array_equal(tiled, b) else unknown("a constant of batch size")
        if a.shape != b.shape:
            return unknown("a constant whose shape depends on the batch size")
        if np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            return ZERO if not np.any(a) else SAME
        if np.issubdtype(a.dtype, np.number) and np.all(b != 0):
            ratios = np.unique(np.asarray(a / b, np.float64))
            for power in (-1, 1, -2, 2):
                if np.allclose(ratios, float(self.devices) ** power, rtol=1e-6, atol=0):
                    return same(power)
        return unknown("a constant that depends on the batch size")

    def _equation(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        eqn, name = pair.local, pair.local.primitive.name
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
        if name == "axis_index" and self.axis_name in mapped_axes(eqn):
            return [INDEX]
        if name in ("psum", "pmax", "pmin", "all_gather") and self.axis_name in mapped_axes(eqn):
            if eqn.params.get("axis_index_groups") is not None:
                return [unknown(pair.why("a collective over groups of devices"))] * outputs
            return [self._collective(name, pair, kind) for kind in kinds]
        if any(word in name for word in _CALLBACKS):
            return [unknown(f"it comes from {name}, outside the program, at {pair.line}")] * outputs
        if name == "scan":
            return self._scan(pair, kinds)
        if name == "while":
            return self._while(pair, kinds)
        if name == "cond":
            return self._cond(pair, kinds)
        body, partner = call_body(eqn), call_body(pair.whole)
        if body is not None and partner is not None and name not in KERNELS:
            return self.jaxpr(body, partner, kinds)
        if name in RULES:
            return RULES[name](pair, kinds)
        if all(kind.same for kind in kinds) and pair.same_shapes() and pair.same_parameters():
            return [SAME] * outputs
        known = next((kind.why for kind in kinds if kind.tag == "unknown"), "")
        why = pair.why(f"{name}, which is not known to keep examples apart,")
        return [unknown(known or why)] * outputs

    def _gradient(self, pair: Pair, cotangent: Kind, primal: Kind) -> Kind:
        params = pair.local.params
        if params["reduce"] == "keep":
            return cotangent
        if params["derived"]:
            return self._mean(pair, cotangent)
        if primal.tag == "rows":
            return rows(primal.rows_axis)  # type: ignore[arg-type]
        site = params["site"]
        old = self.cotangents.get(site, cotangent)
        self.cotangents[site] = join(old, cotangent, pair.why("a gradient"))
        if not self.through_collectives:
            return unknown(pair.why("a gradient over the batch"))
        # How the loss is reduced is decided, or refused, by the kind of the loss; either way the
        # gradient that comes out is that of one device.
        return SAME if primal.same else unknown(pair.why("a gradient of a value that varies"))

    def _mean(self, pair: Pair, kind: Kind) -> Kind:
        if kind.tag == "linear":
            return same(kind.power - 1)
        return kind if kind.tag in ("same", "zero") else unknown(pair.why("pmean"))

    def _collective(self, name: str, pair: Pair, kind: Kind) -> Kind:
        if kind.tag in ("unknown", "zero"):
            return kind
        if not self.through_collectives and not kind.same:
            return unknown(pair.why(f"{name} over the batch"))
        if name == "psum":
            if kind.tag == "linear":
                return same(kind.power)
            if kind.tag == "same":
                return same(kind.power + 1)
        elif name == "all_gather":
            gathered = pair.local.params["all_gather_dimension"]
            if kind.tag == "rows" and pair.local.params["tiled"] and kind.rows_axis == gathered:
                return same(kind.power)
        elif kind.same or kind.tag == name[1:]:
            return SAME
        return unknown(pair.why(name))

    def _scan(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        eqn = pair.local
        consts, carried = scan_counts(eqn)
        if eqn.params["length"] != pair.whole.params["length"]:
            return [unknown(pair.why("a scan over the batch"))] * len(eqn.outvars)
        end = consts + carried
        inputs = list(kinds)
        for index in range(end, len(inputs)):
            if inputs[index].tag == "rows":
                inputs[index] = dataclasses.replace(
                    inputs[index], rows_axis=inputs[index].rows_axis - 1
                )
        bodies = eqn.params["jaxpr"], pair.whole.params["jaxpr"]
        while True:
            results = self.jaxpr(*bodies, inputs)
            carry = [
                join(old, new, pair.why("a loop that carries different kinds"))
                for old, new in zip(inputs[consts:end], results[:carried], strict=True)
            ]
            if carry == inputs[consts:end]:
                break
            inputs[consts:end] = carry
        stacked = [
            dataclasses.replace(kind, rows_axis=kind.rows_axis + 1) if kind.tag == "rows" else kind
            for kind in results[carried:]
        ]
        return carry + stacked

    def _while(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        params, whole = pair.local.params, pair.whole.params
        cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
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
            new = [
                join(a, b, pair.why("a loop that carries different kinds"))
                for a, b in zip(carry, results, strict=True)
            ]
            if new == carry:
                return carry
            carry = new

    def _cond(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        predicate, *operands = kinds
        branches = zip(pair.local.params["branches"], pair.whole.params["branches"], strict=True)
        results = [self.jaxpr(a, b, operands) for a, b in branches]
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
