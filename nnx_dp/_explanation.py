"""What `step.explain` found out, and how it is shown: by `rich`, as Markdown, in a notebook."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding, Sharding
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nnx_dp._roles import Role

SHOWN = 8
"""Arrays of one object that a printed table lists; `Explanation.arguments` has all."""


WIDE = 100
"""Columns from which on a printed table has room for the shardings."""


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array that goes into a step or comes out of it, or one static value.

    Attributes:
      path: as the caller would write it: ``model.blocks[0].kernel``, ``batch['x']``, ``output``.
      role: "state", "batch", "replicated" or "static"; for an output, how it leaves the devices.
      why: what the role was decided by.
      shape: of the whole array; None for a static value.
      per_device_shape: of the part on each device.
      dtype: of the array.
      sharding: where it is placed.
      nbytes: bytes on each device.
      belongs_to: the argument or output that holds it.
    """

    path: str
    role: str
    why: str
    shape: tuple[int, ...] | None = None
    per_device_shape: tuple[int, ...] | None = None
    dtype: Any = None
    sharding: Sharding | None = None
    nbytes: int = 0
    belongs_to: str = ""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one kind in the compiled program.

    Attributes:
      kind: the name in HLO, such as ``all-reduce``.
      count: how many there are.
      nbytes: what they leave on each device, all together.
      in_loop: whether they stand in a loop.
    """

    kind: str
    count: int
    nbytes: int
    in_loop: bool


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `DataParallel.explain` found out; print it with `rich`, or show it in a notebook.

    Attributes:
      step: the name of the step.
      strategy: the strategy of this signature.
      why: why it is that one.
      devices: how many devices there are, of which kind.
      mesh: the mesh's axes and their sizes.
      arguments: every array and static value of the call.
      outputs: every array of the output.
      rules: what was done so that the devices compute what one device would.
      collectives: what crosses between devices in the compiled program.
      flops: floating-point operations of one device in a step, None where XLA does not say.
      temporary_bytes: memory that a step needs on each device besides its arrays, likewise.
      signatures: how many signatures the step has compiled so far, this one included.
    """

    step: str
    strategy: str
    why: str
    devices: str
    mesh: dict[str, int]
    arguments: tuple[ArrayRow, ...]
    outputs: tuple[ArrayRow, ...]
    rules: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    flops: float | None
    temporary_bytes: int | None
    signatures: int

    def to_markdown(self) -> str:
        """Returns the tables in Markdown, with every array in them."""
        parts = [f"# data_parallel({self.step})", "", *(f"- {line}" for line in self._facts())]
        for title, header, rows in self._sections(shown=None, wide=True):
            parts += ["", f"## {title}", ""]
            parts += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
            cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
            parts += ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join(parts) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"data_parallel({self.step})", style="bold")
        yield from (Text(line) for line in self._facts())
        wide = options.max_width >= WIDE
        for title, header, rows in self._sections(shown=SHOWN, wide=wide):
            yield Text("\n" + title, style="bold")
            table = Table(
                box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
            )
            for name in header:
                number = name in ("bytes", "count")
                table.add_column(
                    name,
                    justify="right" if number else "left",
                    no_wrap=number or name == "role",
                    overflow="fold",
                )
            for row in rows:
                table.add_row(*map(escape, row))
            yield table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _repr_html_(self) -> str:
        console = Console(width=110, record=True, file=io.StringIO())
        console.print(self)
        html = console.export_html(inline_styles=True, code_format="{code}")
        return f'<pre style="line-height: normal; overflow-x: auto">{html}</pre>'

    def _facts(self) -> list[str]:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = [
            f'strategy "{self.strategy}": {self.why}',
            f"{self.devices}, mesh ({axes})",
        ]
        total = sum(row.nbytes for row in self.arguments)
        memory = f"each device: {_size(total)} of arguments"
        if self.temporary_bytes is not None:
            memory += f", {_size(self.temporary_bytes)} of temporaries"
        if self.flops is not None:
            memory += f", {self.flops:,.0f} FLOPs a step"
        lines.append(memory)
        lines.append(f"signatures compiled so far: {self.signatures}")
        return lines

    def _sections(
        self, shown: int | None, wide: bool
    ) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        def written(name: str, role: str, rows: Sequence[ArrayRow]) -> tuple[str, Any, Any]:
            header = (name, role, "shape", "per device", "sharding", "bytes", "why")
            cells = [header, *_array_cells(rows, shown)]
            if not wide:  # the shape on each device says as much
                cells = [(*row[:4], *row[5:]) for row in cells]
            return f"{name.capitalize()}s", cells[0], cells[1:]

        yield written("argument", "role", self.arguments)
        if self.outputs:
            yield written("output", "leaves as", self.outputs)
        if self.rules:
            yield "Rules that applied", ("rule",), [(rule,) for rule in self.rules]
        if self.collectives:
            rows = [
                (
                    row.kind,
                    str(row.count),
                    _size(row.nbytes),
                    "in a loop" if row.in_loop else "once a step",
                )
                for row in self.collectives
            ]
            header = ("collective", "count", "bytes", "when")
            yield "Between the devices, in the compiled program", header, rows


def _array_cells(rows: Sequence[ArrayRow], shown: int | None) -> Iterator[Sequence[str]]:
    """Writes a row for each array, those of one object together below a row for the object."""
    for owner, group in itertools.groupby(rows, key=lambda row: row.belongs_to):
        held = list(group)
        if len(held) == 1 or held[0].role != Role.STATE.value:
            yield from (_cells(row, row.path) for row in held)
            continue
        nbytes = _size(sum(row.nbytes for row in held))
        yield owner, "state", f"{len(held)} arrays", "", "", nbytes, "NNX object"
        listed = held if shown is None or len(held) <= shown else held[: shown - 1]
        for row in listed:
            yield _cells(row, "  " + row.path.removeprefix(owner), role="")
        if len(listed) < len(held):
            yield f"  ... {len(held) - len(listed)} more", *[""] * 6


def _cells(row: ArrayRow, path: str, role: str | None = None) -> Sequence[str]:
    role = row.role if role is None else role
    if row.shape is None:
        return path, role, "", "", "", "", row.why
    shape = _short_dtype(row.dtype) + _brackets(row.shape)
    local = row.per_device_shape or ()
    part = "same" if local == row.shape else _brackets(local)
    return path, role, shape, part, _spec(row.sharding), _size(row.nbytes), row.why


def _spec(sharding: Sharding | None) -> str:
    if isinstance(sharding, NamedSharding):
        names = ", ".join(repr(name) for name in sharding.spec)
        return f"P({names})"
    return "P()" if sharding is not None and sharding.is_fully_replicated else "by XLA"


def _brackets(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _short_dtype(dtype: Any) -> str:
    """Writes a dtype as JAX does in a jaxpr: ``f32``, ``bf16``, ``i32``."""
    kinds = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}
    name = str(dtype)
    kind = name.rstrip("0123456789")
    return kinds.get(kind, kind) + name[len(kind) :]


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
