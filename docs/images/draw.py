"""Draws the pictures of the documentation that no benchmark or example draws.

python docs/images/draw.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).resolve().parent
CALL, PLAN, REPEAT = "#dbe9f6", "#fde3c8", "#dff0d8"


def draw_visualize() -> None:
    """The figure that the page about it makes: the first four blocks of its code."""
    page = (HERE.parent / "explain.md").read_text()
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:4]:
        exec(block, namespace)
    namespace["figure"].savefig(HERE / "visualize.png", dpi=110)


def draw_how_it_works() -> None:
    """One call's way through the files."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.axis("off")
    axes.set(xlim=(0, 11.1), ylim=(0.1, 4.8))

    box(axes, 0.1, 3.95, 3.6, "the same objects as before?", "_repeat.py, _snapshot.py", REPEAT)
    box(axes, 0.1, 2.8, 1.5, "call", "_data_parallel.py", CALL)
    box(axes, 2.1, 2.8, 1.6, "bind, roles", "_roles.py, _uneven.py", CALL)
    box(axes, 4.2, 2.8, 1.5, "flatten", "_graph.py", CALL)
    box(axes, 6.2, 2.8, 1.9, "compile, once", "_launches.py, _strategies/", CALL)
    box(axes, 8.55, 2.8, 1.0, "run", "Launch", CALL)
    box(axes, 10.0, 2.8, 1.0, "write back", "_graph.py", CALL)
    for start, end in ((1.6, 2.1), (3.7, 4.2), (5.7, 6.2), (8.1, 8.55), (9.55, 10.0)):
        arrow(axes, (start, 3.16), (end, 3.16))
    arrow(axes, (0.85, 3.52), (0.85, 3.95))
    arrow(axes, (3.7, 4.31), (9.0, 3.52))
    note(axes, 6.9, 4.1, "yes: read the Variables, and run")

    box(axes, 4.0, 1.5, 2.6, "plan of a per-device step", "_plan.py, _per_device.py", PLAN)
    arrow(axes, (7.1, 2.8), (5.6, 2.22))
    note(axes, 7.4, 2.4, '"shard_map", "pmap"')
    parts = (
        (0.1, 2.5, "the same on every device?", "_replication.py"),
        (2.85, 2.7, "what one device computes?", "_kinds/"),
        (5.8, 2.3, "how outputs, state leave", "_outputs.py, _state_reduce.py"),
        (8.35, 2.65, "gradients, norms, keys, metrics", "_grad_sync.py, _batch_norm.py, ..."),
    )
    for x, width, title, files in parts:
        box(axes, x, 0.2, width, title, files, PLAN)
        arrow(axes, (5.3, 1.5), (x + width / 2, 0.92))
    figure.savefig(HERE / "how_it_works.png", dpi=120)


def box(axes: Axes, x: float, y: float, width: float, title: str, files: str, color: str) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    patch = FancyBboxPatch(
        (x, y), width, 0.72, boxstyle=style, facecolor=color, edgecolor="#444444", linewidth=0.8
    )
    axes.add_patch(patch)
    center = x + width / 2
    axes.text(center, y + 0.46, title, ha="center", va="center", fontsize=10)
    axes.text(center, y + 0.18, files, ha="center", va="center", fontsize=7, family="monospace")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#444444"})


def note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", fontsize=8, style="italic", color="#555555")


if __name__ == "__main__":
    draw_visualize()
    draw_how_it_works()
