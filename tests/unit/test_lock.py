"""Whoever waits for the lock says for whom, and looks now and then whether that one still lives."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.comm.shm.backoff import LOOK_SECONDS
from paceline.comm.shm.lock import Lock
from paceline.comm.waiting import Waiting


class Scene:
    """Two locks on the same byte; the first one is given back after some looks of the second."""

    def __init__(self, path: Path, looks: int) -> None:
        path.write_bytes(b"")
        self.holder = memoryview(bytearray(8)).cast("q")
        self.waits: list[list[int]] = []
        self.looks: list[tuple[list[int], float]] = []
        self._wanted = looks
        self.first, self.second = self._lock(path, 2), self._lock(path, 0)

    def _lock(self, path: Path, rank: int) -> Lock:
        waiting = Waiting(rank, 3, 10.0)
        waiting.waits_for = lambda ranks: self.waits.append([*ranks])  # type: ignore[method-assign]
        return Lock(os.open(path, os.O_RDWR), 8, self.holder, waiting, self._look)

    def _look(self, ranks: list[int], waited: float) -> None:
        self.looks.append((ranks, waited))
        if len(self.looks) == self._wanted:
            self.first.__exit__(None, None, None)


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", looks=2)
    with scene.first:
        scene.second.__enter__()
    assert scene.waits == [[2], []]
    assert [ranks for ranks, _ in scene.looks] == [[2], [2]]
    assert scene.holder[0] == 0
    with scene.second:
        pass
    assert scene.waits == [[2], []]  # nobody had it


def test_who_waits_looks_now_and_then(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", looks=4)
    with scene.first, scene.second:
        pass
    waited = [0.0, *(seconds for _, seconds in scene.looks)]
    assert all(after - before >= LOOK_SECONDS for before, after in pairwise(waited))


def test_a_holder_that_has_not_said_so_yet_may_be_anyone(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", looks=1)
    with scene.first:
        scene.holder[0] = 0  # left there by the one that waits now
        with scene.second:
            pass
    assert scene.waits == [[1, 2], []]


def test_a_look_may_end_the_wait(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "lock", looks=0)

    def give_up(ranks: list[int], waited: float) -> None:
        raise TimeoutError

    scene.second._look = give_up
    with scene.first, pytest.raises(TimeoutError), scene.second:
        pass
