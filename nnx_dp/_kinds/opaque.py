"""Kinds through what is not looked into: random numbers and kernels."""

from __future__ import annotations

from nnx_dp._kinds.algebra import KEY, SAME, Kind, rows, unknown
from nnx_dp._kinds.elementwise import nonlinear
from nnx_dp._kinds.pair import Pair, Rule, equal_parameters, mixed


def _random_key(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    if any(kind.tag in ("key", "index") for kind in kinds):
        others = [kind for kind in kinds if kind.tag not in ("key", "index")]
        if all(kind.same for kind in others):
            return _drawn(pair, KEY)
    if all(kind.same for kind in kinds):
        return [unknown(_alike(pair))] if _draws_alike(pair) else _drawn(pair, SAME)
    return nonlinear(pair, kinds)


def _draws_alike(pair: Pair) -> bool:
    """Whether rows drawn from a key that all devices hold would be those of other devices."""
    return not pair.shared_draws and pair.out_axis() is not None


def _alike(pair: Pair) -> str:
    return (
        f"the key of a random draw at {pair.line} is the same on every device, so that their "
        "examples would get the same numbers: take it from nnx.Rngs or from an argument"
    )


def _random_bits(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    (key,) = kinds
    if key.tag == "key":
        why = f"a random draw at {pair.line} that differs between devices but not between examples"
        return _drawn(pair, unknown(why))
    if key.axis is not None:
        return [key]
    if key.same and _draws_alike(pair):
        return [unknown(_alike(pair))]
    return _drawn(pair, SAME) if key.same else mixed(pair, kinds)


def _random_gamma(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    key, shape = kinds
    if (key.tag == "key" or key.same) and (shape.same or shape.axis is not None):
        return _random_bits(pair, [key])
    return nonlinear(pair, kinds)


def _drawn(pair: Pair, without_rows: Kind) -> list[Kind]:
    axis = pair.out_axis()
    if axis is None:
        return [without_rows]
    return [rows(axis)] if axis >= 0 else mixed(pair, [])


def _kernel(pair: Pair, kinds: list[Kind]) -> list[Kind]:
    """A kernel is not looked into: one that runs on a device's batch treats examples apart."""
    batched = [kind for kind in kinds if not kind.same]
    if not batched:
        known = pair.same_shapes() and _same_kernel(pair)
        return [SAME] * len(pair.local.outvars) if known else mixed(pair, kinds)
    if all(kind.axis is not None for kind in batched):
        axes = [pair.out_axis(i) for i in range(len(pair.local.outvars))]
        if all(axis is not None and axis >= 0 for axis in axes):
            return [rows(axis) for axis in axes]  # type: ignore[arg-type]
    return mixed(pair, kinds)


def _same_kernel(pair: Pair) -> bool:
    """Whether both run one kernel; its grid and its types name the mesh, whose size differs."""
    local, whole = pair.local.params, pair.whole.params
    return local.keys() == whole.keys() and all(
        equal_parameters(local[name], whole[name])
        or (" at 0x" not in str(local[name]) and str(local[name]) == str(whole[name]))
        for name in local
    )


KERNELS = ("pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "triton_kernel_call")
"""Calls whose inside neither XLA nor this package looks into."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "random_fold_in random_split random_wrap random_unwrap random_seed random_clone".split(),
        _random_key,
    ),
    "random_bits": _random_bits,
    "random_gamma": _random_gamma,
    **dict.fromkeys(KERNELS, _kernel),
}
