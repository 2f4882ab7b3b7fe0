"""What this worker waits for that is not negotiated, who is gone, and the error of an operation that has failed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.comm.rendezvous.env_init import reason_of
from paceline.horovod.engine.handle import Handle
from paceline.horovod.engine.negotiation import JOIN
from paceline.horovod.engine.requests import Key
from paceline.horovod.engine.timeline import Timeline, open_timeline
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.settings import HorovodSettings

EXPLAIN_SECONDS = 2.0
"""How long to wait for the news of who left, before an error is raised without it."""
BLOCKED_SECONDS = 1.0
"""How long the script must have waited for an operation before rank 0 hears of it."""
ANSWER_SECONDS = 10.0
"""How long after the deadline rank 0 may say nothing before it is taken for stopped."""
_LOOK_SECONDS = 0.01


class Waits:
    """The waits of one worker.

    Args:
        rank: of this worker.
        settings: from the environment.
        wake: wakes the engine's thread, which tells rank 0.

    Attributes:
        gone: workers that take part in nothing any more, and why.
        stalled: operations that some worker has waited for long, by name, and for whom.
        timeline: where operations are recorded, if they are.
        threads: those that have asked for operations.
        blocked: what the script waits for, if it can do nothing else, and since when; None once rank 0 knows.
    """

    def __init__(self, rank: int, settings: HorovodSettings, wake: Callable[[], None]) -> None:
        self.rank, self._settings, self._wake = rank, settings, wake
        self.gone: dict[int, str] = {}
        self.stalled: dict[str, str] = {}
        self.timeline: Timeline | None = None
        self.threads: set[int] = set()
        self.blocked: tuple[Handle, float] | None = None
        self._begun: dict[str, tuple[float, int, bool]] = {}
        self._ended: list[str] = []
        self._asked: float | None = None
        self._lock = threading.Lock()

    def waiting(self, name: str, set_: int) -> None:
        """Note that this worker now waits for an operation that is not negotiated, so that a stall can name it."""
        self._begun[name] = (time.monotonic(), set_, False)

    def waited(self, name: str) -> None:
        """Note that the wait is over."""
        _, _, told = self._begun.pop(name)
        if told:
            with self._lock:
                self._ended.append(name)
            self._wake()

    def block(self, handle: Handle) -> None:
        """Note that the script waits for an operation; with several threads one of them may ask for others."""
        if len(self.threads) == 1:
            self.blocked = handle, time.monotonic()

    def _new_block(self) -> Key | None:
        if (blocked := self.blocked) is None:
            return None
        handle, since = blocked
        if not handle.done() and time.monotonic() - since < BLOCKED_SECONDS:
            return None
        self.blocked = None
        return None if handle.done() else handle.request.key

    def give_up(self, pending: Iterable[Handle], quiet_since: float, looked: float) -> None:
        """Do not wait for ever for rank 0, which has a deadline for all waits but those in a join.

        Args:
            pending: what is under way.
            quiet_since: since when nothing was sent to rank 0, or came from it.
            looked: when that was last seen; this process may have been stopped since, with an answer unread.

        Raises:
            HorovodInternalError: it has let the deadline of an operation pass: it, or its machine, is stopped.
        """
        limit = looked - self._settings.deadline_seconds - ANSWER_SECONDS
        if quiet_since < limit and any(one.since < limit and one.request.kind != JOIN for one in pending):
            raise HorovodInternalError(
                f"Rank {self.rank}: rank 0, which ends waits, has not answered for {looked - quiet_since:.0f} s: it is "
                f"stopped, or cannot be reached."
            )

    def record(self, path: str, mark_cycles: bool = False) -> None:
        """Record operations in a file from now on, in no other; without a path in none. Only rank 0 does.

        Raises:
            ConfigError: the file cannot be written.
        """
        old, self.timeline = self.timeline, None
        if old is not None:
            old.close()
        if path and self.rank == 0:
            self.timeline = open_timeline(path, mark_cycles)

    def learn(self, news: dict[str, Any]) -> None:
        """Take the news of rank 0: who is gone, and what stalls; none is its answer to news from here."""
        self._asked = None
        self.gone.update(dict(news["gone"]))
        self.stalled.update(news["stalled"])

    def news(self) -> dict[str, Any] | None:
        """What rank 0 does not know yet: long waits that have begun, and those that are over."""
        begun, now = [], time.monotonic()
        for name, (since, set_, told) in list(self._begun.items()):
            if not told and now - since > (self._settings.stall_seconds or 60.0) / 2:
                self._begun[name] = (since, set_, True)
                begun.append((name, set_, now - since))
        with self._lock:
            ended, self._ended = self._ended, []
        blocked = self._new_block()
        if not (begun or ended or blocked):
            return None
        if self.rank != 0 and self._asked is None:
            self._asked = now
        return {"type": "waits", "begun": begun, "ended": ended, "blocked": blocked}

    def explain(self, what: str, name: str, error: RuntimeError) -> HorovodInternalError:
        """The error of an operation that has failed, with who left or is missing."""
        why = "; ".join(f"rank {rank} {why}" for rank, why in self.gone.items()) or self.stalled.get(name)
        if not why and (asked := self._asked) is not None:
            why = f"rank 0 has not answered for {time.monotonic() - asked:.0f} s: {reason_of(error)}"
        return HorovodInternalError(f"Rank {self.rank}: {what} failed: {why or reason_of(error)}")

    def await_cause(self, name: str, error: RuntimeError) -> HorovodInternalError:
        """The same for gradients, in the script's thread: wait until the engine's has heard who left."""
        until = time.monotonic() + EXPLAIN_SECONDS
        while not self.gone and name not in self.stalled and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return self.explain(f"allreduce of the gradients {name!r}", name, error)


def say(text: str) -> None:
    """Tell the user, where Horovod writes its log."""
    print(f"paceline.horovod: {text}", file=sys.stderr, flush=True)  # noqa: T201
