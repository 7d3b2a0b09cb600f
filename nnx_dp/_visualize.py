"""A picture of a call: which part of what is on which device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nnx_dp._explanation import ArrayRow, Explanation
from nnx_dp._roles import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nnx_dp._data_parallel import DataParallel

_WHOLE, _ABSENT = "#dfe3e8", "#ffffff"


def visualize(step: DataParallel[..., Any], *args: Any, **kwargs: Any) -> Figure:
    """Draws the arguments and outputs of a call against the devices.

    Each column is a device.  What is the same on every device has one colour in all of them; what
    is split has another on each, and says which part it is.

    Args:
      step: a decorated step.
      *args: the arguments of a call; abstract ones will do.  Nothing runs.
      **kwargs: likewise.

    Returns:
      A `matplotlib.figure.Figure`, which a notebook shows, and `savefig` saves.

    Raises:
      ImportError: without matplotlib, which is not a dependency.

    Example::

      >>> import jax.numpy as jnp, nnx_dp
      >>> from flax import nnx
      >>> predict = nnx_dp.data_parallel(lambda model, x: model(x))
      >>> figure = nnx_dp.visualize(predict, nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 3)))
      >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
      ['model', 'x', 'output']
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            "visualize draws with matplotlib, which is not installed. Install it with "
            "pip install matplotlib."
        ) from error

    explanation = step.explain(*args, **kwargs)
    devices = list(step.mesh.devices.flat)
    rows = list(_rows(explanation))
    width = max(4.0, 0.9 * len(devices)) + 3.2
    figure = Figure(figsize=(width, 1.3 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    colors = colormaps["viridis"]
    for line, (_, _, row) in enumerate(rows):
        parts = _parts(row)
        kinds = list(dict.fromkeys(parts[device] for device in devices if device in parts))
        for column, device in enumerate(devices):
            part = parts.get(device)
            split = len(kinds) > 1 and part is not None
            number = kinds.index(part) if part is not None and split else 0
            share = number / max(len(kinds) - 1, 1)
            plain = _ABSENT if part is None else _WHOLE
            face = colors(0.15 + 0.75 * share) if split else plain
            if split and row.role == Role.STATE.value:  # stands for arrays that are cut elsewhere
                part = f"{number + 1}/{len(kinds)}"
            axes.add_patch(Rectangle((column, line), 0.96, 0.86, facecolor=face, linewidth=0))
            axes.text(
                column + 0.48,
                line + 0.43,
                "" if part is None else part or "whole",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if split and share < 0.6 else "#222222",
            )
    axes.set_xlim(0, len(devices))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([i + 0.48 for i in range(len(devices))], [str(d.id) for d in devices])
    axes.xaxis.tick_top()
    axes.set_xlabel("device")
    axes.xaxis.set_label_position("top")
    axes.set_yticks([i + 0.43 for i in range(len(rows))], [name for name, _, _ in rows])
    right = axes.secondary_yaxis("right")
    right.set_yticks([i + 0.43 for i in range(len(rows))], [about for _, about, _ in rows])
    for side in (axes, right):
        side.tick_params(length=0, labelsize=8.5)
        side.spines[:].set_visible(False)
    axes.set_title(f'{explanation.step}, strategy "{explanation.strategy}"', fontsize=10, pad=12)
    return figure


def _rows(explanation: Explanation) -> Iterator[tuple[str, str, ArrayRow]]:
    """Yields a name, what is written beside it, and an array that stands for it."""
    arrays = [row for row in explanation.arguments + explanation.outputs if row.shape is not None]
    for owner, group in itertools.groupby(arrays, key=lambda row: (row.belongs_to, row.role)):
        held = list(group)
        if owner[1] != "state":
            for row in held:
                what = "output" if row.belongs_to == "output" else row.role
                yield row.path, f"{what} {list(row.shape or ())}", row
            continue
        # Of an object, what is whole on every device, and what is sharded.
        for sharded in (False, True):
            same = [row for row in held if (row.per_device_shape != row.shape) == sharded]
            if same:
                about = f"state, {len(same)} array{'s' if len(same) > 1 else ''}"
                yield owner[0], about + (" sharded" if sharded else ""), same[0]


def _parts(row: ArrayRow) -> dict[Any, str]:
    """Returns which part of an array each device holds; "" for all of it."""
    assert row.sharding is not None
    assert row.shape is not None
    shape = row.shape
    parts = {}
    for device, indices in row.sharding.devices_indices_map(shape).items():
        slices = [index.indices(size) for index, size in zip(indices or (), shape, strict=True)]
        cut = [
            (f"{start}:{stop}" if stop - start < size else ":")
            for (start, stop, _), size in zip(slices, shape, strict=True)
        ]
        while cut and cut[-1] == ":":
            cut.pop()
        parts[device] = ", ".join(cut)
    return parts
