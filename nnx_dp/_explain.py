"""Reads off a signature what becomes of each argument and output, and what crosses.

`explain` compiles a signature and looks at the launch and at the compiled program; nothing runs on
a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnx_dp._explanation import ArrayRow, CollectiveRow, Explanation
from nnx_dp._graph import StateLeaves
from nnx_dp._hlo import find_collectives
from nnx_dp._leaves import shape_of
from nnx_dp._outputs import Exit
from nnx_dp._prepared import Prepared
from nnx_dp._roles import BoundCall, Role
from nnx_dp._strategies._interface import Launch


def explain(name: str, call: Prepared, mesh: Mesh, *, signatures: int) -> Explanation:
    """Compiles a signature and reads off what becomes of everything in it.

    Args:
      name: of the step.
      call: a call with this signature.
      mesh: the devices.
      signatures: how many signatures the step has.
    """
    bound, state, launch = call.whole, call.state, call.launch
    leaves = [shape_of(leaf) for leaf in state.leaves]
    arrays = [shape_of(array) for array in bound.arrays]
    lowered = launch.lower_like(leaves, arrays)
    program = lowered.compile()
    collectives = Counter(
        (found.kind, found.in_loop, found.nbytes)
        for found in find_collectives(program.as_text() or "")
    )
    grouped: dict[tuple[str, bool], CollectiveRow] = {}
    for (kind, in_loop, nbytes), count in collectives.items():
        before = grouped.get((kind, in_loop), CollectiveRow(kind, 0, 0, in_loop))
        grouped[kind, in_loop] = dataclasses.replace(
            before, count=before.count + count, nbytes=before.nbytes + count * nbytes
        )
    cost: Any = program.cost_analysis()
    memory: Any = program.memory_analysis()
    kinds = Counter(device.device_kind for device in mesh.devices.flat)
    return Explanation(
        step=name,
        strategy=launch.strategy,
        why=launch.why,
        devices=", ".join(f"{count} devices ({kind})" for kind, count in kinds.items()),
        mesh=dict(mesh.shape),
        arguments=tuple(_arguments(bound, state, launch)),
        outputs=tuple(_outputs(launch, lowered, program)),
        rules=tuple(_rules(bound, call.given, state, launch)),
        collectives=tuple(grouped.values()),
        flops=(cost or {}).get("flops"),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        signatures=signatures,
    )


def _arguments(bound: BoundCall, state: StateLeaves, launch: Launch) -> Iterator[ArrayRow]:
    by_node: dict[str, list[ArrayRow]] = {path: [] for path in bound.node_paths()}
    for path, leaf, variable, placement in zip(
        state.paths, state.leaves, state.variables, launch.state_placements, strict=True
    ):
        owner = max((node for node in by_node if path.startswith(node)), key=len)
        kind = type(variable) if variable is not None else None
        why = "array outside a Variable" if kind is None else _type_name(kind)
        by_node[owner].append(_array_row(path, "state", why, leaf, placement, owner))
    arrays = iter(zip(bound.arrays, launch.array_placements, strict=True))
    statics = iter(bound.statics)
    for argument in bound.arguments:
        if argument.role is Role.STATE:
            rows = by_node[argument.path]
            yield from rows or [ArrayRow(argument.path, "state", "shared with, or without arrays")]
        elif argument.role is Role.STATIC:
            value = next(statics).value
            value = getattr(value, "value", value) if argument.why.startswith("static_") else value
            shown = f"{argument.why}: {_short(value)}"
            yield ArrayRow(argument.path, "static", shown, belongs_to=argument.path)
        else:
            array, placement = next(arrays)
            why = argument.why
            if argument.axis is not None:
                even = not placement.is_fully_replicated
                why += f", split on axis {argument.axis}" + ("" if even else " inside, unevenly")
            yield _array_row(
                argument.path, argument.role.value, why, array, placement, argument.path
            )


def _outputs(launch: Launch, lowered: Any, program: Any) -> Iterator[ArrayRow]:
    shapes = jax.tree.leaves(lowered.out_info)
    placements = jax.tree.leaves(program.output_shardings)
    exits = launch.plan.exits if launch.plan is not None else [None] * len(shapes)
    structure = launch.plan.structure if launch.plan is not None else launch.structure
    for leaf, shape, placement, way in zip(
        structure.leaves, shapes, placements, exits, strict=True
    ):
        if not leaf.is_state:
            role, why = _leaves_as(way)
            yield _array_row(leaf.path, role, why, shape, placement, "output")


def _leaves_as(way: Exit | None) -> tuple[str, str]:
    if way is None:
        return "as it is", "the body sees the whole batch"
    if way.how == "concatenate":
        return "rows", f"joined on axis {way.axis}"
    if way.how == "reduce":
        return str(way.rule), f"{way.rule} over the devices"
    return "as it is", "the same on every device"


def _rules(
    bound: BoundCall, given: Sequence[int], state: StateLeaves, launch: Launch
) -> Iterator[str]:
    now = [size for _, size in bound.batch_sizes()]
    if list(given) != now:
        yield f"uneven=: a batch of {given[0]} is made one of {now[0]}"
    if launch.strategy == "replicate":
        yield 'uneven="replicate": every device computes the whole batch'
    plan = launch.plan
    if plan is not None:
        for site, reduction in enumerate(plan.losses):
            number = f"gradient {site + 1}" if len(plan.losses) > 1 else "the gradient"
            over_batch, over_state = (
                any(gradient == site for gradient, _ in leaves)
                for leaves in (plan.batch_leaves, plan.state_leaves)
            )
            if over_state or not over_batch:
                yield f"{number}: {reduction} over the devices, as its loss is a {reduction}"
            if over_batch:
                scaled = " but divided by the number of devices" if reduction == "mean" else ""
                yield (
                    f"{number} with respect to the batch: not reduced{scaled}, as its loss is a "
                    f"{reduction}"
                )
    for rule, count in launch.fired.items():
        yield rule + (f" ({count} times)" if count > 1 else "")
    if plan is not None:
        for leaf, way in zip(plan.structure.leaves, plan.exits, strict=True):
            if leaf.is_state and way.how == "rule":
                named = getattr(way.rule, "__name__", way.rule)
                yield f"{leaf.path}: {named} over the devices"
    divided = [
        path
        for path, place, variable in zip(
            state.paths, launch.state_placements, state.variables, strict=True
        )
        if isinstance(variable, nnx.OptState) and not place.is_fully_replicated
    ]
    if divided:
        yield f"sharded optimizer state: {len(divided)} arrays, {divided[0]} the first"


def _array_row(
    path: str, role: str, why: str, array: Any, placement: Any, belongs_to: str
) -> ArrayRow:
    aval = shape_of(array)
    local = placement.shard_shape(aval.shape)
    itemsize = _itemsize(aval)
    return ArrayRow(
        path=path,
        role=role,
        why=why,
        shape=aval.shape,
        per_device_shape=local,
        dtype=aval.dtype,
        sharding=placement,
        nbytes=math.prod(local) * itemsize,
        belongs_to=belongs_to,
    )


def _itemsize(aval: jax.ShapeDtypeStruct) -> int:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return np.dtype(aval.dtype).itemsize


def _type_name(kind: type) -> str:
    return f"nnx.{kind.__name__}" if kind.__module__.startswith("flax") else kind.__name__


def _short(value: Any) -> str:
    name = getattr(value, "__name__", None)
    text = name if callable(value) and isinstance(name, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
