"""The table of steps: what is free, taken, done; and that a change is whole or not there at all."""

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import pytest

import paceline.comm.assignment.step_claims
from paceline.comm.assignment.step_claims import FREE, ClaimTable, StepClaims
from paceline.comm.shm.lock import CheckPeers, Lock
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Membership
from paceline.errors import WorkerLost


class Memory:
    """The memory of some processes, as much of it as the table needs."""

    def __init__(self, name: str, waiting: Waiting, gone: Collection[int]) -> None:
        self.name = name
        self.waiting = waiting
        self.is_gone = gone

    def share(self, size: int) -> list[mmap.mmap]:
        with open(self.name, "r+b") as file:
            return [mmap.mmap(file.fileno(), 1 << 14)]

    def reserve(self, slots: int) -> int:
        return 0

    def lock(self, check_peers: CheckPeers) -> Lock:
        holder = memoryview(self.share(8)[0]).cast("q")[-1:]
        return Lock(os.open(self.name, os.O_RDWR), 1 << 20, holder, self.waiting, check_peers)

    def check_alive(self, ranks: list[int], waited: float) -> None:
        if waited > 20:
            raise WorkerLost("the lock was not given back")

    def gone(self, rank: int) -> bool:
        return rank in self.is_gone


@pytest.fixture
def name(tmp_path: Any) -> Iterator[str]:
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 14))
    yield str(path)


def forked(act: Callable[[], object]) -> int:
    """A process that does this, and ends with 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return child


def claims_of(name: str, rank: int = 0, size: int = 4, gone: Collection[int] = ()) -> StepClaims:
    world: Any = Waiting(Membership(rank, size), 10.0)
    memory: Any = Memory(name, world, gone)
    return StepClaims(world, memory)


def test_steps_are_taken_from_the_lowest_free_one() -> None:
    table = ClaimTable()
    for step in range(3):
        table.offer(step)
    assert [table.take(1), table.take(0), table.take(1), table.take(0)] == [0, 1, 2, None]
    assert (table.done_before, table.done) == (0, 0)
    del table.open[1]
    assert (table.done_before, table.done, table.owners(3)) == (0, 1, [1])
    table.give_back(0)
    assert table.owners(1) == []
    assert table.take(0) == 0


def test_a_step_that_was_offered_is_not_offered_again() -> None:
    table = ClaimTable()
    table.offer(5)
    table.take(0)
    del table.open[5]
    table.offer(5)
    table.offer(3)
    assert (table.open, table.done_before) == ({}, 6)


def test_the_table_comes_back_as_it_was(name: str) -> None:
    claims = claims_of(name)
    table = ClaimTable(9, {7: 2, 8: FREE}, 6, 11, 2, 5, 0.1, 0.7, 1e-3, False)
    claims.begin(table)
    assert claims_of(name).read() == table
    with claims.change() as changed:
        changed.version = 7
    assert claims.read().version == 7


def test_a_change_that_fails_is_no_change(name: str) -> None:
    claims = claims_of(name)
    claims.begin(ClaimTable())
    with pytest.raises(ZeroDivisionError), claims.change() as table:
        table.version = 1 // 0
    assert claims.read().version == 0
    with claims.change() as table:
        table.version = 1
    assert claims.read().version == 1


def test_nothing_changes_after_the_end(name: str) -> None:
    claims, late = claims_of(name), claims_of(name, 1)
    claims.begin(ClaimTable())
    with pytest.raises(WorkerLost, match="already re-forming"), late.change() as table:
        table.version = 1
        claims._words[0] = 1  # as close() does when it cannot get the lock
    assert claims.close().version == 0


def _stop_in_a_change(name: str) -> None:
    with claims_of(name, 1).change() as table:
        table.version = 1
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_that_is_stopped_in_a_change_holds_nobody_up_for_long(name: str) -> None:
    claims = claims_of(name)
    claims.begin(ClaimTable())
    child = forked(lambda: _stop_in_a_change(name))
    os.waitpid(child, os.WUNTRACED)
    assert claims.close().version == 0
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1  # what it was about to change is refused
    assert claims.read().version == 0


def _update(name: str, before: Callable[[], object], after: Callable[[], object] = lambda: None) -> None:
    """What rank 1 does: step 5 is its own, which it makes in place, and writes into the table."""
    claims = claims_of(name, 1)
    with claims.updating():
        before()
        claims.made(5)
        after()
        with claims.change() as table:
            del table.open[5]
            table.version += 1


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def begun(name: str, gone: Collection[int] = ()) -> StepClaims:
    claims = claims_of(name, gone=gone)
    claims.begin(ClaimTable(6, {5: 1}, 5))
    return claims


def test_who_parts_waits_for_an_update_that_is_being_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.comm.assignment.step_claims, "_UPDATE_SECONDS", 30.0)
    claims = begun(name)
    child = forked(lambda: _update(name, _stop))
    os.waitpid(child, os.WUNTRACED)
    resumer = threading.Timer(0.3, os.kill, (child, signal.SIGCONT))
    resumer.start()
    assert claims.close() == ClaimTable(6, {}, 6)
    resumer.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(WorkerLost, match="already re-forming"), claims_of(name, 2).updating():
        raise AssertionError("it may not begin one any more")


@pytest.mark.parametrize("gone", [[1], []], ids=["dropped", "silent"])
def test_a_process_that_is_stopped_in_an_update_holds_nobody_up_for_long(
    name: str, gone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.comm.assignment.step_claims, "_UPDATE_SECONDS", 30.0 if gone else 0.1)
    claims = begun(name, gone)
    child = forked(lambda: _update(name, _stop))
    os.waitpid(child, os.WUNTRACED)
    before = time.monotonic()
    assert claims.close() == ClaimTable(6, {5: 1}, 5)
    assert time.monotonic() - before < 10
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_update_of_a_process_that_is_killed_counts_if_it_was_made(name: str) -> None:
    claims = begun(name, [1])
    os.waitpid(forked(lambda: _update(name, _die)), 0)
    assert claims.close() == ClaimTable(6, {5: 1}, 5)
    claims = begun(name, [1])
    os.waitpid(forked(lambda: _update(name, lambda: None, _die)), 0)
    assert claims.close() == ClaimTable(6, {}, 6)
    assert claims.read() == ClaimTable(6, {5: 1}, 5)


def _hold(name: str) -> None:
    with claims_of(name, 1).change():
        _stop()
        time.sleep(0.2)


def test_who_has_made_an_update_waits_for_the_lock_though_another_one_was_lost(name: str) -> None:
    claims = begun(name)
    claims._world.check = lambda: pytest.fail("it would part, and its step be computed again")
    with claims.updating():
        child = forked(lambda: _hold(name))
        os.waitpid(child, os.WUNTRACED)
        claims.made(5)
        os.kill(child, signal.SIGCONT)
        with claims.change() as table:
            del table.open[5]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert claims.read().open == {}


def test_an_update_that_fails_was_not_made(name: str) -> None:
    claims = begun(name)
    with pytest.raises(ZeroDivisionError), claims.updating() as table:
        table.version = 1 // 0
    assert claims_of(name, 1).close() == ClaimTable(6, {5: 1}, 5)


def _count_without_end(name: str) -> None:
    claims = claims_of(name, 1)
    while True:
        with claims.change() as table:
            table.version += 1
            table.top = table.stop = table.version
            table.open = dict.fromkeys(range(table.version, table.version + 4), table.version)


def test_a_process_that_is_killed_in_a_change_leaves_a_whole_table(name: str) -> None:
    claims = claims_of(name)
    claims.begin(ClaimTable())
    seen = 0
    for attempt in range(12):
        child = forked(lambda: _count_without_end(name))
        while claims.read().version < seen + 50:
            time.sleep(0.0005 * (attempt % 3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with claims.change() as table:
            open_ = dict.fromkeys(range(table.version, table.version + 4), table.version)
            assert table == ClaimTable(table.version, open_, table.version, table.version)
            assert table.version > seen
            seen = table.version


def _count(name: str, rank: int) -> None:
    claims = claims_of(name, rank)
    for _ in range(300):
        with claims.change() as table:
            table.version += 1
            table.open[rank] = table.open.get(rank, 0) + 1


def test_no_change_of_several_processes_is_lost(name: str) -> None:
    claims_of(name).begin(ClaimTable())
    children = [forked(partial(_count, name, rank)) for rank in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    table = claims_of(name).read()
    assert (table.version, table.open) == (900, dict.fromkeys(range(3), 300))
