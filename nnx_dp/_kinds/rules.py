"""How each JAX primitive passes reduction kinds on.

A rule must be certain: a value whose examples may have been mixed, reordered or treated by
position is unknown.  `apply_rule` makes sure that both equations do the same operation, and that
rows lie along the axis that shrank; a rule has only to say what becomes of the values.
"""

from __future__ import annotations

from nnx_dp._jaxpr import sub_jaxprs
from nnx_dp._kinds import elementwise, indexing, moves, opaque, reductions
from nnx_dp._kinds.algebra import SAME, Kind, blend, unknown
from nnx_dp._kinds.opaque import KERNELS
from nnx_dp._kinds.pair import Pair, Rule, names_axis

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **moves.RULES,
    **indexing.RULES,
    **reductions.RULES,
    **opaque.RULES,
}


def apply_rule(pair: Pair, kinds: list[Kind], axis_name: str) -> list[Kind]:
    """Returns the kind of each output of a pair of equations that hold no other step's code."""
    if pair.name not in KERNELS and not pair.same_parameters(sizes=True):
        why = pair.why(f"{pair.name}, which does another thing on a batch of another size,")
        return [unknown(why)] * len(pair.local.outvars)
    rule = RULES.get(pair.name)
    results = rule(pair, kinds) if rule is not None else _without_rule(pair, kinds, axis_name)
    why = pair.why(pair.name)
    return [kind if pair.holds(i, kind) else unknown(why) for i, kind in enumerate(results)]


def _without_rule(pair: Pair, kinds: list[Kind], axis_name: str) -> list[Kind]:
    """A primitive that is not known: the same operation on the same values gives the same."""
    collective = any(names_axis(sub, axis_name) for sub in sub_jaxprs(pair.local))
    if all(kind.same for kind in kinds) and pair.same_parameters() and not collective:
        return [SAME] * len(pair.local.outvars)
    why = pair.why(f"{pair.name}, which is not known to keep examples apart,")
    return [blend(kinds, why)] * len(pair.local.outvars)
