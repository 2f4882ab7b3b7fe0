"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        status: a failure is what a run cannot start or go on with; a warning what makes it slow, or other bits.
        values: what was found.
        why: it matters; empty if nothing is wrong.
        cure: what to do; empty if nothing is wrong.
        place: the machine, or the two ends of a link; empty: all machines.
    """

    check: str
    status: Status
    values: str
    why: str = ""
    cure: str = ""
    place: str = ""

    def at(self, place: str) -> Finding:
        """Return the same finding with its place."""
        return replace(self, place=place)

    def line(self) -> str:
        """Return the finding in one line."""
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.check}: {self.values}. {self.cure}".rstrip(" .") + "."


def ok(check: str, values: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", values)


def skipped(check: str, reason: str) -> Finding:
    """It could not be checked, or need not be."""
    return Finding(check, "skipped", reason)


def to_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Write findings as they go over a connection, or into ``--json``."""
    return [asdict(one) for one in findings]


def from_json(found: Iterable[Mapping[str, str]]) -> list[Finding]:
    """Read findings of another machine.

    Raises:
        TypeError: they are those of another version of Paceline.
    """
    return [Finding(**{name: str(value) for name, value in one.items()}) for one in found]  # type: ignore[arg-type]


def size(count: float) -> str:
    """``1.5 GB`` for a number of bytes."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"
