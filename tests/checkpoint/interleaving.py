"""Threads that take turns, one operation on a storage at a time, in an order that a seed decides.

An operation is a call of the file system: of ``os`` for folders, of fsspec for stores. Before each one a thread gives
up its turn. The order has short and long turns: a thread may sleep for nearly the whole life of the others, as a
process that was stopped. A thread may be killed at any operation: from then on it has no effect, as after SIGKILL.

    with monkeypatch.context() as patch:
        turns = Interleaving(seed, patch)
        turns.run({"one": save_six_steps, "two": save_others}, after_each=check)
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from paceline.checkpoint import parts
from paceline.checkpoint.manifest import name_of
from paceline.checkpoint.parts import Save
from paceline.checkpoint.save import save
from paceline.checkpoint.storage import retry
from paceline.checkpoint.storage.base import Storage, Writer
from paceline.checkpoint.training_state import Snapshot

OF_OS = ("rename", "replace", "mkdir", "rmdir", "unlink", "listdir", "scandir", "open", "fsync")
OF_STORES = ("open", "ls", "info", "pipe_file", "rm_file", "cp_file", "makedirs", "rmdir", "cat_file")
Fault = Callable[[str, str, tuple[Any, ...]], None]


class Killed(BaseException):
    """The thread has been killed."""


class Actor:
    """A thread that works only in its turns."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._mine, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.ended = self.killed = False
        self.error: BaseException | None = None
        self.thread.start()

    def turn(self) -> None:
        """Let it go on to its next operation, or to its end."""
        self._mine.release()
        self._over.acquire()

    def pause(self) -> None:
        """Give up the turn; called by the thread itself."""
        self._over.release()
        self._mine.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self.killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error
        self.ended = True
        self._over.release()


class Interleaving:
    """The turns of some threads.

    Args:
        seed: decides the order.
        patch: puts the turns into the operations of the storage.
        fault: called before each operation of a thread with its name, the operation and its arguments; may raise.
    """

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, fault: Fault | None = None) -> None:
        self.random = random.Random(seed)
        self._fault = fault
        self._actors: dict[int, tuple[str, Actor]] = {}
        self.now = 0.0
        self.operations: list[tuple[str, str]] = []
        for name in OF_OS:
            patch.setattr(os, name, self._stepped(name, getattr(os, name)))
        for kind in (MemoryFileSystem, LocalFileSystem):
            for name in OF_STORES:
                patch.setattr(kind, name, self._stepped(name, getattr(kind, name)))
        self._own = threading.get_ident()
        for module in (retry, parts):
            patch.setattr(module, "time", SimpleNamespace(monotonic=self._monotonic, sleep=self._sleep))

    def run(
        self,
        work: dict[str, Callable[[], None]],
        after_each: Callable[[], None],
        kill: dict[str, int] | None = None,
    ) -> dict[str, Actor]:
        """Run all to their ends; ``kill`` says after how many operations one is killed."""
        actors = {name: Actor(one) for name, one in work.items()}
        self._actors = {one.thread.ident or 0: (name, one) for name, one in actors.items()}
        taken = dict.fromkeys(actors, 0)
        patience = self.random.choice([0.5, 0.2, 0.05, 0.01])
        current = self.random.choice(sorted(actors))
        while left := sorted(name for name, one in actors.items() if not one.ended):
            if current not in left or self.random.random() < patience:
                current = self.random.choice(left)
            if kill and taken[current] >= kill.get(current, 10**9):
                actors[current].killed = True
            actors[current].turn()
            taken[current] += 1
            after_each()
        for one in actors.values():
            one.thread.join()
        return actors

    def _stepped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **options: Any) -> Any:
            self._step(name, arguments)
            return function(*arguments, **options)

        return stepped

    def _step(self, operation: str, arguments: tuple[Any, ...]) -> None:
        known = self._actors.get(threading.get_ident())
        if known is not None:
            name, actor = known
            actor.pause()
            self.operations.append((name, operation))
            if self._fault is not None and operation != "sleep":
                self._fault(name, operation, arguments)

    def _is_stranger(self) -> bool:
        """Whether this is a thread of an earlier test, which still tries to save."""
        return threading.get_ident() not in {self._own, *self._actors}

    def _monotonic(self) -> float:
        return time.monotonic() if self._is_stranger() else self.now

    def _sleep(self, seconds: float) -> None:
        if self._is_stranger():
            time.sleep(seconds)
            return
        self.now += seconds
        self._step("sleep", ())


def save_alone(storage: Storage, snapshot: Snapshot, writer: Writer, seconds: float) -> None:
    """Write a checkpoint, without other ranks."""
    save(Save(storage, name_of(snapshot.step), None, bool), snapshot, writer, seconds)
