"""Who gets which microbatch, on a table in ordinary memory and with a clock of the test's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.assignment import leases
from paceline.comm.assignment.leases import Lease, Leases
from paceline.errors import WorkerSilent
from paceline.schedule.placement import Pool, pools
from paceline.schedule.shares import even


class Scene:
    """Some workers in one process, whose seconds pass only when the test says so."""

    def __init__(self, workers: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.table = bytearray(1 << 16)
        memory: Any = SimpleNamespace(
            share=lambda size: [self.table],
            lock=lambda: contextlib.nullcontext(),
            all_gather=lambda message: None,
            check_alive=self._check_alive,
        )
        monkeypatch.setattr(leases.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(leases.time, "sleep", self._sleep)
        self.workers = [Leases(self._world(rank, workers), memory, microbatches) for rank in range(workers)]
        self.waits: Callable[[], None] = self._stay

    @staticmethod
    def _check_alive(ranks: list[int], waited: float) -> None:
        if waited > 10.0:
            raise WorkerSilent(f"rank {ranks[0]}")

    @staticmethod
    def _world(rank: int, workers: int) -> Any:
        return SimpleNamespace(rank=rank, size=workers, timeout=10.0, check=lambda: None)

    def _stay(self) -> None:
        raise Waits

    def _sleep(self, seconds: float) -> None:
        self.waits()

    def begin(self, step: int, total: int, seconds: list[float], given: Sequence[Pool] = ()) -> None:
        everyone = range(len(self.workers))
        shares = enumerate(even(total, len(everyone)))
        given = given or [Pool(rank, share, everyone) for rank, share in shares if share]
        for worker in self.workers:
            worker.begin(step, given, seconds)

    def ask(self, rank: int) -> Lease | str | None:
        try:
            return self.workers[rank].next()
        except Waits:
            return "waits"


class Waits(Exception):
    """A worker has nothing to do yet."""


def simulate(
    scene: Scene, total: int, factors: list[float], seconds: list[float], step: int = 0, given: Sequence[Pool] = ()
) -> tuple[float, list[int]]:
    """Let all workers compute; returns how long it took, and the microbatches in the order of their results."""
    scene.begin(step, total, seconds, given)
    begin, results = scene.now, []
    ends: dict[int, tuple[float, int]] = {}
    idle, over = set(range(len(factors))), set[int]()
    while len(over) < len(factors):
        for rank in sorted(idle):
            told = scene.ask(rank)
            if told is None:
                over.add(rank)
                idle.discard(rank)
            elif isinstance(told, Lease):
                assert not given or any(told.microbatch in one.microbatches and rank in one.holders for one in given)
                ends[rank] = scene.now + factors[rank], told.microbatch
                idle.discard(rank)
        if not ends:
            scene.now += 0.01
            continue
        rank = min(ends, key=lambda one: ends[one])
        soon = scene.now + 0.05
        if idle and ends[rank][0] > soon:
            scene.now = soon
            continue
        scene.now, microbatch = ends.pop(rank)
        if scene.workers[rank].finish(microbatch):
            results.append(microbatch)
        idle.add(rank)
    return scene.now - begin, results


@pytest.mark.parametrize(
    "factors",
    [[1.0] * 8, [2.0] + [1.0] * 7, [4.0, 4.0] + [1.0] * 6, [3.0] + [1.0] * 7, [1, 1, 1, 1, 1 / 1.5, 1 / 1.5, 0.4, 0.4]],
    ids=str,
)
def test_a_step_takes_what_the_sum_of_the_speeds_takes(factors: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(8, 128, monkeypatch)
    seconds, results = simulate(scene, 128, factors, [1.0] * 8)
    ideal = 128 / sum(1 / factor for factor in factors)
    assert sorted(results) == list(range(128))
    assert seconds <= 1.10 * ideal


def test_nothing_known_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(4, 64, monkeypatch)
    seconds, results = simulate(scene, 64, [1.0, 1.0, 1.0, 3.0], [0.0] * 4)
    assert sorted(results) == list(range(64))
    assert seconds <= 1.15 * 64 / (3 + 1 / 3)


def test_every_microbatch_counts_once_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    scene = Scene(5, 40, monkeypatch)
    for step in range(30):
        total = draw.choice([40, 40, 7, 3])
        factors = [draw.choice([0.5, 1.0, 1.0, 5.0]) for _ in range(5)]
        _, results = simulate(scene, total, factors, [draw.choice([0.0, 1.0, 2.0]) for _ in range(5)], step)
        assert sorted(results) == list(range(total))


def test_a_worker_takes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of unequal size on one or two workers: every microbatch counts once, computed by a holder."""
    draw = random.Random(4)
    scene = Scene(4, 40, monkeypatch)
    for step in range(60):
        total = draw.choice([40, 7, 3])
        shards = [tuple(sorted(draw.sample(range(4), draw.choice([1, 2, 2])))) for _ in range(5)]
        holders = tuple(sorted(draw.choices(shards, [1, 1, 2, 4, 4], k=total)))
        factors = [draw.choice([0.5, 1.0, 1.0, 5.0]) for _ in range(4)]
        seconds = [draw.choice([0.0, 1.0, 2.0]) for _ in range(4)]
        _, results = simulate(scene, total, factors, seconds, step, pools(holders, 4))
        assert sorted(results) == [*range(total)]


@pytest.mark.parametrize(("slow", "speeds", "most"), [(1.0, (), 1.1), (2.0, (), 1.2), (2.0, (1, 2, 2, 2), 1.05)])
def test_copies_balance_shards_of_unequal_size(
    slow: float, speeds: tuple[int, ...], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 1, 4, 1 and 4 parts, each on two workers. Without stealing, a slow worker makes a step 1.75 as long."""
    scene, factors = Scene(4, 120, monkeypatch), [slow, 1.0, 1.0, 1.0]
    copies, parts = ((0, 1), (1, 2), (2, 3), (0, 3)), (1, 4, 1, 4)
    holders = tuple(ranks for ranks, count in zip(copies, parts, strict=True) for _ in range(12 * count))
    seconds, results = simulate(scene, 120, factors, factors, given=pools(holders, 4, speeds))
    assert sorted(results) == [*range(120)]
    assert seconds <= most * 120 / sum(1 / factor for factor in factors)


def test_an_owner_takes_from_the_head_and_others_from_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(2, 32, monkeypatch)
    scene.begin(0, 32, [1.0, 1.0])
    first, second = scene.workers
    assert second.next() == Lease(16, 1)
    for own in range(16):
        assert first.next() == Lease(own, 0)
        first.finish(own)
    assert first.next() == Lease(31, 1)
    assert second.finish(16) and second.next() == Lease(17, 1)


def test_a_slow_worker_does_not_begin_what_would_hold_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(2, 4, monkeypatch)
    scene.begin(0, 4, [1.0, 5.0])
    assert scene.ask(0) == Lease(0, 0)
    assert scene.ask(1) == "waits"  # the other one does four of them before this one does one


def test_who_waits_takes_over_from_one_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(2, 4, monkeypatch)
    scene.begin(0, 4, [1.0, 5.0])
    assert scene.ask(0) == Lease(0, 0)
    scene.now += 4.0
    assert scene.ask(1) == Lease(2, 1)


def test_the_first_result_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(2, 2, monkeypatch)
    scene.begin(0, 2, [1.0, 1.0])
    assert (scene.ask(0), scene.ask(1)) == (Lease(0, 0), Lease(1, 1))
    scene.now += 1.0
    assert scene.workers[0].finish(0)
    assert scene.ask(0) == "waits"
    scene.now += 1.0
    assert scene.ask(0) == Lease(1, 1, again=True)
    assert not scene.workers[1].overtaken(1)
    assert scene.workers[0].finish(1)
    assert scene.workers[1].overtaken(1)
    assert not scene.workers[1].finish(1)
    assert scene.ask(0) is scene.ask(1) is None


def test_who_waits_looks_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(2, 4, monkeypatch)
    scene.begin(0, 4, [1.0, 1000.0])
    assert scene.ask(0) == Lease(0, 0)

    def later() -> None:
        scene.now += 1.0
        scene.workers[0]._since[0] = scene.now  # the other one seems to be at work all the time

    scene.waits = later
    with pytest.raises(WorkerSilent, match="rank 0"):
        scene.ask(1)
