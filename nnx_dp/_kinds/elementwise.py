"""Kinds through primitives that work element by element.

An element of the output comes from the elements in the same place, so rows stay apart.  What a
sum or a mean over the batch may go through is narrower: only what is linear.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from nnx_dp._kinds import algebra
from nnx_dp._kinds.algebra import SAME, ZERO, Kind, rows
from nnx_dp._kinds.pair import Pair, Rule, mixed

_SIGNED = ("zero", "same", "rows", "linear", "max", "min")
"""Kinds of values, rather than of what they stand for, such as a row's number."""

_NARROW_BYTES = 4
"""Integers narrower than this are assumed to overflow, wider ones not to."""


def nonlinear(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return [algebra.elementwise(kinds, pair.why(pair.name))]


def add(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    first, second = kinds
    return [algebra.add(first, second, pair.why("a sum of unlike terms"))]


def _sub(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if kinds[1].tag not in (*_SIGNED, "unknown"):
        return mixed(pair, kinds)
    return add(pair, [kinds[0], *_neg(pair, kinds[1:])])


def _mul(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    first, second = kinds
    return [algebra.multiply(first, second, pair.why("a product"))]


def _div(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if jnp.issubdtype(pair.local.outvars[0].aval.dtype, jnp.integer):
        # The remainders that the devices drop do not add up to the one that a single device drops.
        return nonlinear(pair, kinds)
    first, second = kinds
    return [algebra.multiply(first, second, pair.why("a quotient"), sign=-1)]


def _pass(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return list(kinds)


def _part(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """The parts of a complex number: its largest value need not have the largest of a part."""
    return mixed(pair, kinds) if kinds[0].tag in ("max", "min") else list(kinds)


def _neg(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    kind = _negated(kinds[0])
    signed = not jnp.issubdtype(pair.local.outvars[0].aval.dtype, jnp.unsignedinteger)
    if kind.tag in ("max", "min") and not signed:
        return mixed(pair, kinds)
    return [kind] if kind.tag in _SIGNED else mixed(pair, kinds)


def _negated(kind: Kind) -> Kind:
    if kind.tag in ("max", "min"):
        return dataclasses.replace(kind, tag="min" if kind.tag == "max" else "max")
    return kind


def _less_than(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if kinds[0].tag == "number" and kinds[1].tag == "zero":
        # How `logits[jnp.arange(b), labels]` asks whether an index counts from the end.
        return [Kind("false", rows_axis=kinds[0].rows_axis)]
    return nonlinear(pair, kinds)


def _convert(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """A change of dtype is linear where it neither rounds to integers nor asks for truth."""
    (kind,) = kinds
    source, target = pair.local.invars[0].aval.dtype, pair.params["new_dtype"]
    if source == target:
        return [kind]
    wide = _is_wide(source) and _is_wide(target)
    if kind.tag in ("number", "index"):
        return [kind] if wide and jnp.issubdtype(target, jnp.integer) else mixed(pair, kinds)
    if jnp.issubdtype(target, jnp.inexact):
        linear_map = jnp.issubdtype(source, jnp.inexact) or _is_wide(source)
    else:
        linear_map = wide and all(jnp.issubdtype(d, jnp.integer) for d in (source, target))
    if linear_map and kind.tag in _SIGNED:
        return [kind]
    return [kind] if kind.tag == "zero" else nonlinear(pair, kinds)


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) and dtype.itemsize >= _NARROW_BYTES


def _extreme(tag: str) -> Rule:
    def rule(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        if all(kind.same or kind.tag == tag for kind in kinds) and pair.same_shapes():
            return [Kind(tag) if any(kind.tag == tag for kind in kinds) else SAME]  # type: ignore
        return nonlinear(pair, kinds)

    return rule


def _select(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    predicate, *cases = kinds
    if predicate.tag == "false":
        return [cases[0]]
    if not predicate.same and predicate.axis is None:
        return mixed(pair, kinds)
    result = cases[0]
    for case in cases[1:]:
        result = algebra.join(result, case, pair.why("a choice"))
    if predicate.same or (result.tag == "rows" and result.rows_axis == predicate.axis):
        return [result]
    # Cases of one value each, which the examples choose between.
    return [rows(predicate.axis)] if result.same else mixed(pair, kinds)  # type: ignore[arg-type]


def _integer_pow(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _power(pair, kinds, pair.params["y"])


def _square(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    return _power(pair, kinds, 2)


def _power(pair: Pair, kinds: list[Kind], exponent: int) -> list[Kind]:
    (kind,) = kinds
    if kind.tag == "zero":
        return [ZERO if exponent > 0 else SAME]
    if kind.tag in ("same", "rows"):
        return [dataclasses.replace(kind, power=kind.power * exponent)]
    return mixed(pair, kinds)


def _of_zeros(rule: Rule) -> Rule:
    """Lets zeros, which may be one row for each example, meet values without the batch axis.

    Every row is then the same.
    """

    def spread(pair: Pair, kinds: list[Kind]) -> list[Kind]:
        results = rule(pair, kinds)
        axis = pair.out_axis()
        if axis is None or axis < 0:
            return results
        shapes = [pair.shape(i) for i, kind in enumerate(kinds) if kind.tag == "same"]
        if any(shape and shape[axis] != 1 for shape in shapes):
            return results
        return [rows(axis, kind.power) if kind.tag == "same" else kind for kind in results]

    return spread


_NONLINEAR = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt
    ceil clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac is_finite le le_to lgamma log log1p log2 logistic lt_to mulhi ne
    nextafter not one_minus_square or polygamma polynomial population_count pow reciprocal
    regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt tan tanh xor zeta
""".split()

_IDENTITIES = """
    copy copy_p device_put mesh_cast name optimization_barrier pvary
    reduce_precision sharding_constraint stop_gradient
""".split()

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_NONLINEAR, nonlinear),
    **dict.fromkeys(_IDENTITIES, _pass),
    **dict.fromkeys(("conj", "imag", "real"), _part),
    **dict.fromkeys(("add", "add_any", "complex"), add),
    "sub": _sub,
    "neg": _neg,
    "lt": _less_than,
    "mul": _mul,
    "div": _div,
    "square": _square,
    "integer_pow": _integer_pow,
    "convert_element_type": _convert,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "select_n": _select,
}
RULES: dict[str, Rule] = {name: _of_zeros(rule) for name, rule in _RULES.items()}
