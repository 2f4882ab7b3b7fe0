"""Workers that open each other's memory, one later than the other."""

import mmap
import os
import threading
import time
from types import SimpleNamespace

import pytest

from paceline.comm.shm import arena
from paceline.comm.shm.arena import Arena, SharedMemory, attach_members
from paceline.comm.shm.backoff import POLL_SECONDS
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Member, Membership
from paceline.errors import WorkerSilent

_SLOT = 7
"""Flag that nothing else uses."""


class Scene:
    """Two workers in one process."""

    def __init__(self) -> None:
        self.arenas = [Arena(), Arena()]

    def attach(self, rank: int, generation: int, timeout: float = 20.0) -> SharedMemory | None:
        members = [Member(rank, "a", os.getpid(), "", one.handle) for rank, one in enumerate(self.arenas)]
        return attach_members(Waiting(Membership(rank, 2), timeout), self.arenas[rank], members, generation)

    def attach_both(self, generation: int, later: float = 0.0) -> list[SharedMemory]:
        """The second one comes so many seconds later."""
        found: list[SharedMemory | None] = []

        def come() -> None:
            time.sleep(later)
            found.append(self.attach(1, generation))

        second = threading.Thread(target=come)
        second.start()
        try:
            first = self.attach(0, generation)
        finally:
            second.join()
        assert first is not None and found[0] is not None
        return [first, found[0]]


def test_who_gave_up_before_is_waited_for_in_the_next_generation() -> None:
    """Each leaves with a mark in its own memory, and takes it away when it comes into the next generation."""
    scene = Scene()
    for one in scene.attach_both(0):
        one.give_up()
    first, second = scene.attach_both(1, later=10 * POLL_SECONDS)
    assert not first.gone(1) and not second.gone(0)
    second.give_up()
    assert first.gone(1)


def test_a_file_that_all_open_holds_no_block() -> None:
    scene, files = Scene(), dict[int, int]()
    both = scene.attach_both(0)
    threads = [threading.Thread(target=lambda one=one: files.update({one.place: one.new_file(100)})) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        os.pwrite(files[0], b"weights", 0)
        both[1].share(100)[0][:3] = b"sum"
        assert os.pread(files[1], 7, 0) == b"weights" and os.fstat(files[1]).st_size == 100
    finally:
        for file in files.values():
            os.close(file)


def test_flags_are_freed_only_when_all_workers_are_done_with_them() -> None:
    first, second = Scene().attach_both(0)
    mark, flag = first.mark(), first.reserve(1)
    second.reserve(1)
    first.announce(flag, 1)
    early = threading.Thread(target=first.rewind, args=[mark])
    early.start()
    second.wait(arena._MESSAGE, 1, [0])  # now the first worker waits for the second one
    try:
        assert second.announced(flag, 1, [0])
    finally:
        second.rewind(mark)
        early.join(20)
    assert not second.announced(flag, 1, [0]) and not early.is_alive()


def test_who_waits_in_vain_says_that_it_gave_up() -> None:
    """Another one may have come meanwhile, and wait for it."""
    scene = Scene()
    with pytest.raises(WorkerSilent):
        scene.attach(0, 0, timeout=0.2)
    assert os.pread(scene.arenas[0].file, 8, mmap.PAGESIZE + 8 * arena._GAVE_UP)[0] == 1


def test_a_condition_that_does_not_come_is_given_up() -> None:
    scene = Scene()
    first, _ = scene.attach_both(0)
    first._waiting.timeout = 0.05
    asked: list[tuple[int, ...]] = []
    answers = iter([False] * arena._SPINS)

    def awaited() -> list[int]:
        asked.append(first._waiting.awaited.ranks)
        return [1]

    first.wait_until(lambda: next(answers, True), awaited)
    assert asked == [()] and first._waiting.awaited.ranks == ()
    with pytest.raises(WorkerSilent, match="for rank 1"):
        first.wait_until(lambda: False, awaited)
    assert asked[-1] == (1,)


@pytest.mark.parametrize(("spins", "counted"), [(arena._SPINS, 0.008), (2, 0.002), (1, 0.0)])
def test_a_wait_counts_from_its_begin(monkeypatch: pytest.MonkeyPatch, spins: int, counted: float) -> None:
    """Also if it ends in the first sleep, or while the worker yields a busy processor."""
    scene = Scene()
    first, second = scene.attach_both(0)
    now, left = [time.monotonic()], [spins]

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        left[0] -= 1
        if not left[0]:
            second.announce(_SLOT, 1)

    first._waiting.take_waits()
    first._waiting.clock = lambda: now[0]
    yielded = 0.001 if spins < arena._SPINS else 0.0
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_SPIN_SECONDS", 0.0015)
        patch.setattr(arena, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(arena, "os", SimpleNamespace(sched_yield=lambda: pass_time(yielded)))
        patch.setattr(type(first._futexes[1]), "wait", lambda *_: pass_time(0.008))
        first.wait(_SLOT, 1, [1])
    assert first._waiting.take_waits().seconds == pytest.approx(counted)
    assert first._waiting.awaited.ranks == ()
