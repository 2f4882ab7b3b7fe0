"""A membership that a test drives by hand."""

from collections.abc import Sequence
from typing import Any

from paceline.coordinator.member_list import read
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.types import Bounds, Member
from paceline.coordinator.wire.messages import decode, encode


class ScriptedMembership:
    """A membership, what it told to whom, which members each worker knows of by that, and what it noted."""

    fits: tuple[int, ...] = ()

    def about(self, number: int) -> dict[str, Any]:
        """What a worker says of itself, besides its process."""
        return {}

    def __init__(
        self, least: int = 1, most: int = 3, wanted: int = 3, patience: float = 60.0, drops: bool = True
    ) -> None:
        self.told: dict[int, list[dict[str, Any]]] = {}
        self.known: dict[int, tuple[Member, ...]] = {}
        self.bytes: dict[int, int] = {}
        self.notes: list[str] = []
        bounds = Bounds(least, most, wanted, patience=patience, drops=drops)
        self.of = MembershipProtocol(bounds, self._send, lambda event, **_: self.notes.append(event))
        self.now = 0.0

    def _send(self, numbers: Sequence[int], message: dict[str, Any]) -> None:
        line = encode(message)
        for number in numbers:
            self.told.setdefault(number, []).append(message)
            self.bytes[number] = self.bytes.get(number, 0) + len(line)
            if message["type"] == "membership":
                self.known[number] = read(self.known.get(number, ()), decode(line)["members"])

    def come(self, *numbers: int, **facts: Any) -> None:
        """New workers start and are ready."""
        for number in numbers:
            self.of.started(number)
        for number in numbers:
            self.known.pop(number, None)
            self.of.register(number, {"pid": number, **self.about(number)}, facts, fits=self.fits)
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
