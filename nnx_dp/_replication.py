"""The proof that replicas agree: which outputs of a per-device jaxpr vary between devices.

A value varies if it is computed from something that varies.  Variation starts at the per-device
batch, at folded random keys, at `axis_index`, and at anything that reaches outside the program.
It ends at a collective over the whole data axis, whose result every device holds alike.

The walk never calls a varying value replicated; it may call a replicated one varying, where it
meets something that it does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from nnx_dp._grad_sync import grad_sync_p, loss_p
from nnx_dp._jaxpr import (
    Literal,
    call_body,
    mapped_axes,
    open_jaxpr,
    scan_counts,
    sub_jaxprs,
    user_line,
)

# A collective of these over the data axis leaves the same value on every device; any other may
# differ between devices whatever it is given.
_AGREEING = {
    "all_gather",
    "all_gather_invariant",
    "pbroadcast",
    "pmax",
    "pmin",
    "psum",
    "psum_invariant",
}
_DISAGREEING = {"empty", "empty2", "infeed", "rng_uniform"}
_REF_WRITES = {"swap", "addupdate", "masked_swap"}


@dataclasses.dataclass(frozen=True)
class Variation:
    """Why a value varies: where it started, and the last line of user code that it went through.

    Attributes:
      origin: what made it vary, in words.
      line: `file:line` of the user code that computed it, or "".
    """

    origin: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.origin}, computed at {self.line}" if self.line else self.origin


Taint = Variation | None
"""None where a value is the same on every device."""


@dataclasses.dataclass(frozen=True)
class Variations:
    """What varies in a per-device jaxpr.

    Attributes:
      outputs: for each output, None if it is provably equal on all devices, or why it varies.
      gradients: the (gradient, leaf) pairs whose differentiated value varies.
      others: those whose differentiated value is equal on all devices.
      losses: for each gradient, why its loss varies, or None.
    """

    outputs: list[Taint]
    gradients: set[tuple[int, int]]
    others: set[tuple[int, int]]
    losses: dict[int, Taint]


def find_variation(
    jaxpr: Any,
    taints: Sequence[Taint],
    *,
    axis_name: str,
    batch_leaves: Iterable[tuple[int, int]] = (),
) -> Variations:
    """Walks a per-device jaxpr from its inputs to its outputs.

    Args:
      jaxpr: the step's body as one device runs it.
      taints: for each input, None or why it varies.
      axis_name: the data axis.
      batch_leaves: the (gradient, leaf) pairs that are known to be one row for each example;
        their differentiated values are taken to vary.
    """
    walk = _Walk(axis_name, set(batch_leaves))
    while True:
        known = set(walk.varying)
        outputs = walk.jaxpr(jaxpr, list(taints))
        if walk.varying == known:
            return Variations(outputs, walk.varying, walk.met - walk.varying, walk.losses)


@dataclasses.dataclass
class _Walk:
    """One walk.

    Attributes:
      varying: the (gradient, leaf) pairs whose differentiated value varies.  A gradient may stand
        in the jaxpr more than once, where JAX traced a function once that is called twice; it is
        synchronised everywhere or nowhere, so the walk is repeated until it has found them all.
      met: all such pairs.
      losses: for each gradient, why its loss varies, or None.
    """

    axis_name: str
    varying: set[tuple[int, int]]
    met: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    losses: dict[int, Taint] = dataclasses.field(default_factory=dict)

    def jaxpr(self, jaxpr: Any, taints: list[Taint]) -> list[Taint]:
        """Returns the taint of each output; writes to Refs are recorded in `taints`."""
        inner, _ = open_jaxpr(jaxpr)
        env: dict[Any, Taint] = dict(zip(inner.invars, taints, strict=True))
        for eqn in inner.eqns:
            operands = [self._read(env, atom) for atom in eqn.invars]
            results = self._equation(eqn, operands)
            for atom, taint in zip(eqn.invars, operands, strict=True):
                if not isinstance(atom, Literal) and taint is not None:
                    env[atom] = env.get(atom) or taint
            env.update(zip(eqn.outvars, results, strict=True))
        for index, var in enumerate(inner.invars):
            taints[index] = env[var]
        return [self._read(env, atom) for atom in inner.outvars]

    def _read(self, env: dict[Any, Taint], atom: Any) -> Taint:
        return None if isinstance(atom, Literal) else env.get(atom)

    def _equation(self, eqn: Any, operands: list[Taint]) -> list[Taint]:
        name = eqn.primitive.name
        if eqn.primitive is grad_sync_p:
            return [self._gradient(eqn, *operands)]
        if eqn.primitive is loss_p:
            site = eqn.params["site"]
            self.losses[site] = self.losses.get(site) or operands[0]
            return operands
        if name in _AGREEING and self._spans_data_axis(eqn):
            return [None] * len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        body = call_body(eqn)
        if body is not None:
            return self.jaxpr(body, operands)
        return self._opaque(eqn, operands)

    def _gradient(self, eqn: Any, cotangent: Taint, primal: Taint) -> Taint:
        params = eqn.params
        if params["reduce"] in ("keep", "scale"):
            return cotangent
        if params["reduce"] != "plan":
            return None
        key = params["site"], params["leaf"]
        self.met.add(key)
        if primal is not None:
            self.varying.add(key)
        return cotangent if key in self.varying else None

    def _spans_data_axis(self, eqn: Any) -> bool:
        return self.axis_name in mapped_axes(eqn) and eqn.params.get("axis_index_groups") is None

    def _reaches_outside(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if "callback" in name or "ffi" in name or "custom_call" in name:
            return True
        return any("Ordered" in type(e).__name__ or "IO" in type(e).__name__ for e in eqn.effects)

    def _opaque(self, eqn: Any, operands: list[Taint]) -> list[Taint]:
        """Any equation that only computes: its results vary if an operand does."""
        cause = next((taint for taint in operands if taint is not None), None)
        if self._disagrees(eqn):
            cause = Variation(eqn.primitive.name)
        elif cause is None and any(map(self._holds_disagreement, sub_jaxprs(eqn))):
            cause = Variation(f"a per-device value inside {eqn.primitive.name}")
        if cause is not None:
            cause = Variation(cause.origin, user_line(eqn) or cause.line)
            if eqn.primitive.name in _REF_WRITES:
                operands[0] = operands[0] or cause
            elif eqn.effects:
                operands[:] = [taint or cause for taint in operands]
        return [cause] * len(eqn.outvars)

    def _disagrees(self, eqn: Any) -> bool:
        """Whether an equation may give each device another result from the same operands."""
        collective = self.axis_name in mapped_axes(eqn) and eqn.primitive.name != "pvary"
        agreeing = eqn.primitive.name in _AGREEING and self._spans_data_axis(eqn)
        return (
            (collective and not agreeing)
            or eqn.primitive.name in _DISAGREEING
            or self._reaches_outside(eqn)
        )

    def _holds_disagreement(self, jaxpr: Any) -> bool:
        inner, _ = open_jaxpr(jaxpr)
        return any(
            self._disagrees(eqn) or any(map(self._holds_disagreement, sub_jaxprs(eqn)))
            for eqn in inner.eqns
        )

    def _scan(self, eqn: Any, operands: list[Taint]) -> list[Taint]:
        consts, carried = scan_counts(eqn)
        end = consts + carried
        while True:
            before, inputs = list(operands), list(operands)
            results = self.jaxpr(eqn.params["jaxpr"], inputs)
            # A Ref that the body writes to is a constant or an input of the scan.
            operands[:consts], operands[end:] = inputs[:consts], inputs[end:]
            operands[consts:end] = [
                old or new for old, new in zip(before[consts:end], results[:carried], strict=True)
            ]
            if _same(before, operands):
                return operands[consts:end] + results[carried:]

    def _while(self, eqn: Any, operands: list[Taint]) -> list[Taint]:
        cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        start = cond_consts + body_consts
        while True:
            before, inputs = list(operands), operands[cond_consts:]
            carry = operands[start:]
            (stop,) = self.jaxpr(eqn.params["cond_jaxpr"], operands[:cond_consts] + carry)
            results = self.jaxpr(eqn.params["body_jaxpr"], inputs)
            # Devices that stop at different times hold different carries, and different Refs.
            operands[cond_consts:start] = [
                taint or (stop if _is_ref(atom) else None)
                for taint, atom in zip(inputs, eqn.invars[cond_consts:start], strict=False)
            ]
            operands[start:] = [old or new or stop for old, new in zip(carry, results, strict=True)]
            _spread_to_aliases(eqn.invars, operands)
            if _same(before, operands):
                return operands[start:]

    def _cond(self, eqn: Any, operands: list[Taint]) -> list[Taint]:
        predicate, *rest = operands
        outputs: list[Taint] = [predicate] * len(eqn.outvars)
        for branch in eqn.params["branches"]:
            inputs = list(rest)
            results = self.jaxpr(branch, inputs)
            outputs = [old or new for old, new in zip(outputs, results, strict=True)]
            written = [
                old or new or (predicate if _is_ref(atom) else None)
                for old, new, atom in zip(operands[1:], inputs, eqn.invars[1:], strict=True)
            ]
            operands[1:] = written
        return outputs


def _is_ref(atom: Any) -> bool:
    return "Ref" in type(atom.aval).__name__


def _spread_to_aliases(atoms: Sequence[Any], taints: list[Taint]) -> None:
    """Gives a Ref that the condition and the body of a loop share one taint."""
    for index, atom in enumerate(atoms):
        if _is_ref(atom):
            same = (taint for other, taint in zip(atoms, taints, strict=True) if other is atom)
            taints[index] = next((taint for taint in same if taint is not None), None)


def _same(first: list[Taint], second: list[Taint]) -> bool:
    return [t is None for t in first] == [t is None for t in second]
