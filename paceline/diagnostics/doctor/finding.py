"""Findings of checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    check: str
    status: Status  # "failure" if a run cannot start or continue, "warning" if it may be slow or compute different bits
    values: str  # observed values
    why: str = ""  # why the problem matters. Empty if nothing is wrong.
    cure: str = ""  # what to do about the problem. Empty if nothing is wrong.
    place: str = ""  # machine, or the two ends of a link. Empty if the finding is about all machines.

    def at(self, place: str) -> Finding:
        return replace(self, place=place)

    def line(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.check}: {self.values}. {self.cure}".rstrip(" .") + "."


def ok(check: str, values: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, "ok", values)


def skipped(check: str, reason: str) -> Finding:
    """Return a finding that a check was impossible or unnecessary."""
    return Finding(check, "skipped", reason)


def to_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Convert findings to the form in which connections and ``--json`` carry them."""
    return [asdict(one) for one in findings]


def from_json(found: Iterable[Mapping[str, str]]) -> list[Finding]:
    """Convert findings received from another machine.

    Raises:
        TypeError: the other machine has a different version of Paceline.
    """
    return [Finding(**{name: str(value) for name, value in one.items()}) for one in found]  # type: ignore[arg-type]


def size(count: float) -> str:
    """Format a number of bytes, such as ``1.5 GB``."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"
