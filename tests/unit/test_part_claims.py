"""Claims of parts, and which workers take part in an exchange that does not wait for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from thread_training import store  # noqa: F401
from thread_world import run

from paceline.comm.assignment import part_claims
from paceline.comm.assignment.part_claims import claims_for, is_over
from paceline.errors import WorkerSilent


def one_is_enough(ranks: Sequence[int]) -> bool:
    return bool(ranks)


@pytest.mark.parametrize("hosts", [None, [(0, 1, 2)]], ids=["network", "memory"])
def test_workers_that_were_late_do_not_go_on_by_themselves(hosts: Any) -> None:
    """They would train on from weights that the others have left."""
    alone, behind = threading.Event(), threading.Barrier(3)

    def work(world: Any) -> list[list[int]]:
        claims = claims_for(world)
        claims.meet()
        if world.rank:
            assert alone.wait(20)
        found = [claims.arrive(1, one_is_enough, 0.0)]
        alone.set()
        behind.wait(20)
        if not world.rank:
            time.sleep(0.05)
        return [*found, claims.arrive(3, one_is_enough, 0.0)]

    (first, then), *late = run(3, work, hosts=hosts)
    assert first == [0] and 0 in then
    assert all(at_first == [] and (0 in now or not now) for at_first, now in late)


@pytest.mark.parametrize("hosts", [None, [(0, 1, 2)]], ids=["network", "memory"])
def test_workers_that_were_late_do_not_decide_for_those_that_know_more(hosts: Any) -> None:
    """Rank 0 alone knows that all are needed: the others missed the exchange in which that was found."""
    alone, met = threading.Event(), threading.Event()

    def work(world: Any) -> list[int]:
        claims = claims_for(world)
        claims.meet()
        if world.rank:
            assert alone.wait(20)
        claims.arrive(1, one_is_enough, 0.0)
        alone.set()
        if world.rank == 2:
            assert met.wait(20)
            time.sleep(0.05)
        met.set() if world.rank == 0 else None
        return claims.arrive(3, one_is_enough if world.rank else lambda _: False, 0.0)

    assert run(3, work, hosts=hosts) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("hosts", [None, [(0, 1)]], ids=["network", "memory"])
def test_a_wait_without_a_quorum_has_a_timeout(hosts: Any) -> None:
    over = threading.Event()

    def work(world: Any) -> None:
        claims = claims_for(world)
        claims.meet()
        if world.rank:
            assert over.wait(20)
            return
        world.timeout = 0.1
        with pytest.raises(WorkerSilent, match=r"waited 0 s for rank 1 .*rank 1: it is stopped"):
            claims.arrive(1, lambda _: False, 0.0)
        over.set()

    run(2, work, hosts=hosts)


@pytest.mark.parametrize("hosts", [None, [(0, 1, 2)]], ids=["network", "memory"])
def test_all_that_come_within_the_grace_take_part(hosts: Any) -> None:
    """And nobody waits for the rest of it when all are there."""

    def work(world: Any) -> list[int]:
        claims = claims_for(world)
        claims.meet()
        return claims.arrive(1, one_is_enough, 600.0)

    assert run(3, work, hosts=hosts) == [[0, 1, 2]] * 3


def test_the_grace_begins_with_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    now, quorum = [100.0], list[float]()
    monkeypatch.setattr(part_claims.time, "monotonic", lambda: now[0])
    assert not is_over(False, False, 5.0, quorum)
    now[0] = 110.0
    assert not is_over(False, True, 5.0, quorum)
    now[0] = 114.9
    assert not is_over(False, True, 5.0, quorum) and is_over(True, True, 5.0, quorum)
    now[0] = 115.0
    assert is_over(False, True, 5.0, quorum)
