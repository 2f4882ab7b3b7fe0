"""When strategy auto changes over, with strategies that only pretend to compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from paceline.strategies import auto
from paceline.strategies.auto import WINDOW, Auto


class Pretended:
    """Takes a step in a given time; a list of the objects made, by name."""

    takes: ClassVar[dict[str, float]] = {}
    made: ClassVar[list[str]] = []
    clock: ClassVar[list[float]] = [0.0]
    seconds: ClassVar[list[float]] = [1.0, 3.0]

    def __init__(self, context: Any) -> None:
        self.made.append(type(self).__name__)

    def groups(self, step: int) -> list[range]:
        return []

    def step(self, step: int, groups: list[Any]) -> str:
        self.clock[0] += self.takes[type(self).__name__]
        return "outcome"

    def close(self) -> None:
        self.made.append("closed")


class AllReduce(Pretended):
    pass


class WorkStealing(Pretended):
    pass


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*, allreduce: float, stealing: float, uneven: float) -> Auto:
        Pretended.takes = {"AllReduce": allreduce, "WorkStealing": stealing}
        Pretended.made, Pretended.clock = [], [0.0]
        Pretended.seconds = [1.0, 1.0, 1.0, uneven]
        monkeypatch.setattr(auto, "AllReduce", AllReduce)
        monkeypatch.setattr(auto, "WorkStealing", WorkStealing)
        monkeypatch.setattr(auto.time, "perf_counter", lambda: Pretended.clock[0])
        context: Any = SimpleNamespace(
            order=SimpleNamespace(microbatches=16),
            world=SimpleNamespace(size=4, rank=1, gather=lambda value, what: [value]),
            events=SimpleNamespace(mark=lambda *_, **__: None),
            warnings=[],
        )
        return Auto(context)

    return make


def after(strategy: Auto, windows: int) -> list[str]:
    for step in range(windows * (WINDOW + 1)):
        assert strategy.step(step, []) == "outcome"
    return Pretended.made


def test_even_workers_stay_with_all_reduce(strategy: Any) -> None:
    assert after(strategy(allreduce=1.0, stealing=0.5, uneven=1.1), 10) == ["AllReduce"]


def test_what_pays_stays(strategy: Any) -> None:
    assert after(strategy(allreduce=1.0, stealing=0.6, uneven=3.0), 20) == ["AllReduce", "closed", "WorkStealing"]


def test_what_does_not_pay_is_left_and_tried_again_later(strategy: Any) -> None:
    tried = ["AllReduce", "closed", "WorkStealing", "closed"]
    chosen = strategy(allreduce=1.0, stealing=0.99, uneven=3.0)
    assert after(chosen, 2) == [*tried, "AllReduce"]
    assert after(chosen, 3) == [*tried, "AllReduce"]
    assert after(chosen, 1) == [*tried, "AllReduce", "closed", "WorkStealing"]
    assert after(chosen, 1 + 15) == [*tried, *tried, "AllReduce"]
    said = chosen._context.warnings
    assert any("0.99 times as long as with all-reduce: back to all-reduce" in text for text in said)
