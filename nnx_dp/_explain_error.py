"""JAX's and XLA's errors that mean one of this package's cases, said in the caller's terms.

The caller's sentence comes first; JAX's own error stays chained below it.
"""

from __future__ import annotations

import re

from flax.errors import TraceContextError

# What JAX says, what it means for a decorated step, and what to write instead.
_CASES: tuple[tuple[str, str], ...] = (
    (
        r"cannot be automatically partitioned",
        "the step holds a kernel that XLA cannot partition. Put it in nnx_dp.per_device(kernel), "
        'or use strategy="shard_map", where the whole step sees one device\'s batch.',
    ),
    (
        r"[Uu]nbound axis name: ?['\"]?{axis_name}",
        'the step itself uses a collective over the axis "{axis_name}". Under "jit" its body sees '
        "the whole batch, and no such axis is bound. Use nnx_dp.psum, nnx_dp.pmean and the like, "
        'which do the right thing in every strategy; or use strategy="shard_map".',
    ),
    (
        r"[Uu]nbound axis name: ?['\"]?(\w+)",
        'the step uses a collective over the axis "\\g<1>", but its batch is split over '
        '"{axis_name}". Give data_parallel axis_name="\\g<1>"; or use nnx_dp.psum, nnx_dp.pmean '
        "and the like, which need no name.",
    ),
    (
        r"incompatible devices",
        "an array that the step uses is committed to other devices than those of its mesh. Pass "
        "it as an argument, which is placed for you, instead of closing over it.",
    ),
    (
        r"(context mesh|[Mm]esh).*should match",
        "an array or a function in the step belongs to another mesh than the step's. Give "
        "data_parallel that mesh (mesh=...), or place the array with nnx_dp.replicate. A function "
        "that maps over the devices itself (nnx.pmap, nnx.shard_map) is called plainly in a "
        'decorated step, or with strategy="jit".',
    ),
    (
        r"not (evenly )?divisible|does not evenly divide|should evenly divide|IndivisibleError",
        "an array in the step is to be split unevenly where JAX does not allow it. Look for a "
        "sharding in the step itself; a batch argument may have any size under "
        'strategy="jit".',
    ),
    (
        r"axis names that are of type Auto or Manual|Going from `Manual` AxisType"
        r"|can only refer to Auto axes|can only refer to Explicit axes|explicit_axes",
        "the step names an Explicit axis of the mesh (jax.sharding.reshard, out_sharding=, "
        'explicit_axes). In a decorated step no axis is Explicit: under "jit" all are Auto, which '
        "lets XLA partition any batch. Leave the sharding out, or write "
        "jax.lax.with_sharding_constraint with a NamedSharding of step.mesh and "
        'strategy="jit".',
    ),
    (
        r"(graph node from|[Cc]annot mutate .* from)( a)? different trace level",
        "an NNX object is used or changed in a function that it was not passed to. Make it an "
        "argument of the step, instead of closing over it; and if the step holds another "
        "transform, an argument of the function that is given to that.",
    ),
    (
        r"cannot contain `StateAxes`",
        "the step uses nnx.StateAxes in tree mode, which has none. Pass graph=True and "
        "graph_updates=True to that transform.",
    ),
)


def explain_error(error: Exception, *, step: str, axis_name: str) -> Exception | None:
    """Returns an error that says what another one means for a step, None if that is not known."""
    text = f"{type(error).__name__}: {error}"
    for pattern, meaning in _CASES:
        found = re.search(pattern.replace("{axis_name}", re.escape(axis_name) + r"\b"), text)
        if found:
            meant = found.expand(meaning.replace("{axis_name}", axis_name))
            message = f"data_parallel({step}): {meant}"
            kept = (NameError, TypeError, ValueError, TraceContextError)
            return type(error)(message) if type(error) in kept else RuntimeError(message)
    return None
