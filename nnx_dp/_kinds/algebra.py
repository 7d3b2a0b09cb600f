"""The algebra of reduction kinds.

N devices each hold a local value; one device with the whole batch would hold the global value.

    zero           both are zero
    same(k)        local = global * N**k, on every device
    rows(axis, k)  the local values, joined along the axis, are global * N**k
    linear(k)      the sum over devices of local is global * N**k
    extreme        the largest (smallest) local value is global
    number         rows numbered by their place in the batch, along the rows' axis
    place          index vectors, along the last axis, whose component k is such a number
    false          not one of them true, along the rows' axis
    conflict       a loss whose gradient is not its own
    key            a random key folded with the device's index
    index          the device's index
    unknown        none of these, as far as can be seen

So linear(0) is a sum over the batch, linear(1) a mean, and same(-1) a count of examples.  A mean
is a sum, linear(0), divided by a count, same(-1): exponents subtract, which gives linear(1).

Values are taken to be finite: a NaN is a NaN on one device and on many, but not always in the same
rows.  Integers of 32 bits or more are taken not to overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

Tag = Literal[
    "zero",
    "same",
    "rows",
    "linear",
    "max",
    "min",
    "number",
    "place",
    "false",
    "key",
    "index",
    "conflict",
    "unknown",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One reduction kind; see the module.

    `curved` says of an unknown value that it is a function of parts of sums that is not linear in
    them, so that no reduction over the devices can make the global value of it.
    """

    tag: Tag
    power: int = 0
    rows_axis: int | None = None
    curved: bool = dataclasses.field(default=False, compare=False)
    why: str = dataclasses.field(default="", compare=False)

    @property
    def same(self) -> bool:
        """Whether every device holds exactly the global value."""
        return self.tag == "zero" or (self.tag == "same" and self.power == 0)

    @property
    def axis(self) -> int | None:
        """The batch axis, if the value holds one row for each example."""
        return self.rows_axis if self.tag in ("rows", "false") and self.power == 0 else None

    @property
    def reduction(self) -> str | None:
        """The reduction over devices that gives the global value, None if there is none."""
        if self.tag in ("max", "min"):
            return self.tag
        if self.tag == "same":
            return {-1: "sum"}.get(self.power)
        if self.tag == "linear":
            return {0: "sum", 1: "mean"}.get(self.power)
        return None

    @property
    def reason(self) -> str:
        """Why the value is not the global one, in words."""
        if self.tag in ("unknown", "conflict"):
            return self.why
        if self.tag == "same" and self.power == -1:
            return "it is a count or a sum over one device's examples"
        if self.tag in ("same", "linear", "rows") and self.power not in (0, 1):
            return f"it is scaled by the number of devices to the power {self.power}"
        return {
            "same": "it is scaled by the number of devices",
            "linear": "it is a sum or a mean over one device's examples",
            "rows": "it holds one device's examples",
            "max": "it is a maximum over one device's examples",
            "min": "it is a minimum over one device's examples",
            "key": "it is a random key of one device",
            "index": "it is the index of a device",
            "number": "it numbers the examples of one device",
            "place": "it numbers the examples of one device",
            "false": "it holds one device's examples",
        }.get(self.tag, "it is zero")


_NUMBERS = frozenset({"number", "place", "index", "key", "false"})
"""Tags of values that are no longer such a thing where some of them are zero."""

ZERO = Kind("zero")
SAME = Kind("same")
KEY = Kind("key")
INDEX = Kind("index")


def same(power: int) -> Kind:
    return Kind("same", power)


def rows(axis: int, power: int = 0) -> Kind:
    return Kind("rows", power, axis)


def linear(power: int) -> Kind:
    return Kind("linear", power)


def unknown(why: str, *, curved: bool = False) -> Kind:
    return Kind("unknown", why=why, curved=curved)


def blend(kinds: Sequence[Kind], why: str, *, curved: bool = False) -> Kind:
    """The unknown kind of what was computed from these."""
    seen = [kind for kind in kinds if kind.tag == "unknown"]
    if not seen:
        return unknown(why, curved=curved)
    return unknown(seen[0].why or why, curved=any(kind.curved for kind in seen))


def add(first: Kind, second: Kind, why: str) -> Kind:
    """The kind of a sum, or of a value that is one or the other."""
    if first == second and first.tag in ("zero", "same", "rows", "linear"):
        return first
    tags = {first.tag, second.tag}
    if "zero" in tags and tags & _NUMBERS:
        return unknown(why)
    if first.tag == "zero":
        return second
    if second.tag == "zero":
        return first
    if tags <= {"same", "linear"} and "linear" in tags:
        # A value that is the same on N devices sums to N times itself.
        first_power = first.power + (first.tag == "same")
        second_power = second.power + (second.tag == "same")
        equal = first_power == second_power
        return linear(first_power) if equal else unknown(why, curved=True)
    if tags == {"same", "rows"} and first.power == second.power:
        return first if first.tag == "rows" else second
    return blend((first, second), why)


def join(first: Kind, second: Kind, why: str) -> Kind:
    """The kind of a value that is, by a choice equal on all devices, one or the other."""
    if first == second and first.tag != "unknown":
        return first
    if {first.tag, second.tag} == {"same", "rows"}:
        return unknown(why)
    return add(first, second, why)


def multiply(first: Kind, second: Kind, why: str, sign: int = 1) -> Kind:
    """The kind of an elementwise product (sign 1) or quotient (sign -1)."""
    power = first.power + sign * second.power
    if sign == 1 and "zero" in (first.tag, second.tag):
        return ZERO
    if first.tag == "zero" and second.tag == "same":
        return ZERO
    if first.tag == "zero" and second.tag == "rows":
        # Zero or, where the divisor is zero, NaN.
        return rows(second.rows_axis)  # type: ignore[arg-type]
    tags = (first.tag, second.tag)
    if tags == ("same", "same"):
        return same(power)
    if tags == ("linear", "same") or (tags == ("same", "linear") and sign == 1):
        return linear(power)
    if set(tags) <= {"same", "rows"}:
        axes = {kind.rows_axis for kind in (first, second) if kind.tag == "rows"}
        if len(axes) == 1:
            return rows(axes.pop(), power)  # type: ignore[arg-type]
    return blend((first, second), why, curved=set(tags) <= {"same", "rows", "linear"})


def elementwise(kinds: list[Kind], why: str) -> Kind:
    """The kind of any function applied element by element."""
    if all(kind.same for kind in kinds):
        return SAME
    axes = {kind.axis for kind in kinds if not kind.same}
    if len(axes) == 1 and None not in axes:
        return rows(axes.pop())  # type: ignore[arg-type]
    parts = any(kind.power != 0 or kind.tag == "linear" for kind in kinds)
    return blend(kinds, why, curved=parts)
