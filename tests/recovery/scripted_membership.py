"""A membership that a test drives by hand."""

from typing import Any

from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.types import Bounds


class ScriptedMembership:
    """A membership, what it told to whom, and what it noted."""

    fits: tuple[int, ...] = ()

    def __init__(
        self, least: int = 1, most: int = 3, wanted: int = 3, patience: float = 60.0, drops: bool = True
    ) -> None:
        self.told: dict[int, list[dict[str, Any]]] = {}
        self.notes: list[str] = []
        bounds = Bounds(least, most, wanted, patience=patience, drops=drops)
        self.of = MembershipProtocol(bounds, self._send, lambda event, **_: self.notes.append(event))
        self.now = 0.0

    def _send(self, number: int, message: dict[str, Any]) -> None:
        self.told.setdefault(number, []).append(message)

    def come(self, *numbers: int, **facts: Any) -> None:
        """New workers start and are ready."""
        for number in numbers:
            self.of.started(number)
        for number in numbers:
            self.of.register(number, {"pid": number}, facts, fits=self.fits)
            self.of.ready(number, None, self.now)

    def ready(self, *numbers: int, steps: int = 5, **how: bool) -> None:
        for number in numbers:
            self.of.ready(number, (steps, 0), self.now, **how)

    def lose(self, number: int) -> None:
        self.of.lose(number, f"rank {self.of.rank_of(number)} was killed", self.now)

    def last(self, number: int) -> dict[str, Any]:
        return self.told[number][-1]

    def kinds(self, number: int) -> list[str]:
        return [message["type"] for message in self.told.get(number, [])]
