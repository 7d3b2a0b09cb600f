"""A decorated step is the outermost transform."""

from __future__ import annotations

from nnx_dp._context import current
from nnx_dp._graph import StateLeaves
from nnx_dp._leaves import is_traced
from nnx_dp._roles import BoundCall


def check_not_inside_step(step: str) -> None:
    """Raises RuntimeError inside the body of another decorated step."""
    if current() is not None:
        raise RuntimeError(
            f"data_parallel({step}) was called inside another decorated step, which is "
            f"data-parallel already. Call the plain function there: {step}.__wrapped__."
        )


def check_outermost(step: str, bound: BoundCall, state: StateLeaves) -> None:
    """Raises RuntimeError if a transform around the call traces its arrays or its state."""
    traced = [argument.path for argument, array in bound.located_arrays() if is_traced(array)]
    if not traced and any(map(is_traced, state.leaves)):
        traced = [path for path, x in zip(state.paths, state.leaves, strict=True) if is_traced(x)]
    if traced:
        raise RuntimeError(
            f"data_parallel({step}) was called inside another transform (jit, grad, vmap, ...), "
            f"which traces {traced[0]}. A decorated step is the outermost one: put the transform "
            f"in the step, or around the plain function {step}.__wrapped__."
        )
