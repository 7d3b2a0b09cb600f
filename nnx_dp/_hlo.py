"""What crosses between devices, read off the text of a compiled program."""

from __future__ import annotations

import dataclasses
import math
import re

# `%name = (f32[8,8]{1,0}, f32[]) all-reduce(...)`; of a pair of `-start` and `-done`, the end.
_COLLECTIVE = re.compile(
    r"= (?P<shapes>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|collective-broadcast)(?:-done)?\("
)
_SHAPE = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?(%?[\w.\-%, ]+)")
_LOOP_BODY = re.compile(r"body=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation of a compiled program that talks to other devices.

    Attributes:
      kind: its name in HLO, such as ``all-reduce``.
      nbytes: the bytes that it leaves on each device.
      in_loop: whether it stands in a loop, and so may run more than once a step.
    """

    kind: str
    nbytes: int
    in_loop: bool


def find_collectives(text: str) -> list[Collective]:
    """Returns every collective in the text of a compiled program, in order."""
    found: list[tuple[str, Collective]] = []
    calls: dict[str, set[str]] = {}
    computation = ""
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            computation = opened["name"]
        for names in _CALLED.findall(line):
            called = {name.strip(" %") for name in names.split(",")}
            calls.setdefault(computation, set()).update(called)
        match = _COLLECTIVE.search(line)
        if match:
            found.append((computation, Collective(match["kind"], _nbytes(match["shapes"]), False)))
    looped = _reachable(set(_LOOP_BODY.findall(text)), calls)
    return [
        dataclasses.replace(collective, in_loop=computation in looped)
        for computation, collective in found
    ]


def _reachable(computations: set[str], calls: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(computations)
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += calls.get(name, ())
    return seen


def _nbytes(shapes: str) -> int:
    """Returns the bytes of a shape in the text of a program, or of a tuple of them."""
    total = 0
    for match in _SHAPE.finditer(shapes):
        sizes = [int(size) for size in match["sizes"].split(",") if size]
        total += math.prod(sizes) * int(match["bits"] or 8) // 8
    return total
