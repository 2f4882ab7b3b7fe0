"""Whoever waits for the lock says for whom, and checks now and then whether that one still lives."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.comm.shm.backoff import POLL_SECONDS
from paceline.comm.shm.lock import Lock
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Membership


class Scene:
    """Two locks on the same byte; the first one is given back after some checks of the second."""

    def __init__(self, path: Path, checks: int) -> None:
        path.write_bytes(b"")
        self.holder = memoryview(bytearray(8)).cast("q")
        self.waits: list[list[int]] = []
        self.checks: list[tuple[list[int], float]] = []
        self._wanted = checks
        self.first, self.second = self._lock(path, 2), self._lock(path, 0)

    def _lock(self, path: Path, rank: int) -> Lock:
        waiting = Waiting(Membership(rank, 3), 10.0)
        waiting.waits_for = lambda ranks: self.waits.append([*ranks])  # type: ignore[method-assign]
        return Lock(os.open(path, os.O_RDWR), 8, self.holder, waiting, self._check_peers)

    def _check_peers(self, ranks: list[int], waited: float) -> None:
        self.checks.append((ranks, waited))
        if len(self.checks) == self._wanted:
            self.first.__exit__(None, None, None)


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", checks=2)
    with scene.first:
        scene.second.__enter__()
    assert scene.waits == [[2], []]
    assert [ranks for ranks, _ in scene.checks] == [[2], [2]]
    assert scene.holder[0] == 0
    with scene.second:
        pass
    assert scene.waits == [[2], []]  # nobody had it


def test_who_waits_looks_now_and_then(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", checks=4)
    with scene.first, scene.second:
        pass
    waited = [0.0, *(seconds for _, seconds in scene.checks)]
    assert all(after - before >= POLL_SECONDS for before, after in pairwise(waited))


def test_a_holder_that_has_not_said_so_yet_may_be_anyone(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", checks=1)
    with scene.first:
        scene.holder[0] = 0  # left there by the one that waits now
        with scene.second:
            pass
    assert scene.waits == [[1, 2], []]


def test_a_look_may_end_the_wait(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", checks=0)

    def give_up(ranks: list[int], waited: float) -> None:
        raise TimeoutError

    scene.second._check_peers = give_up
    with scene.first, pytest.raises(TimeoutError), scene.second:
        pass
