"""Waits of a worker that are not negotiated, workers that have left, and the errors of failed operations."""

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
"""Time to wait for rank 0 to report which worker left, after which an error is raised without that cause."""
BLOCKED_SECONDS = 1.0  # time for which the script must have waited for an operation before rank 0 is notified
ANSWER_SECONDS = 10.0  # time after the deadline for which rank 0 may be silent before it is considered stopped
_POLL_SECONDS = 0.01


class Waits:
    """Waits and lost peers of one worker.

    Args:
        wake: wakes the engine's thread, which then notifies rank 0.
    """

    def __init__(self, rank: int, settings: HorovodSettings, wake: Callable[[], None]) -> None:
        self.rank, self._settings, self._wake = rank, settings, wake
        self.gone: dict[int, str] = {}  # reason why a worker no longer takes part, by rank
        # description of each stalled operation and the ranks that it waits for, by name
        self.stalled: dict[str, str] = {}
        self.timeline: Timeline | None = None  # recorder of operations, or None
        self.threads: set[int] = set()  # identifiers of the threads that have submitted operations
        # operation that the script is blocked on and the start of that wait. None once rank 0 is notified.
        self.blocked: tuple[Handle, float] | None = None
        self._begun: dict[str, tuple[float, int, bool]] = {}
        self._ended: list[str] = []
        self._asked: float | None = None
        self._lock = threading.Lock()

    def waiting(self, name: str, set_: int) -> None:
        """Record the start of a wait for an operation that is not negotiated, so that a stall warning can name it."""
        self._begun[name] = (time.monotonic(), set_, False)

    def waited(self, name: str) -> None:
        """Record the end of a wait, and notify rank 0 if it knows of the wait."""
        _, _, told = self._begun.pop(name)
        if told:
            with self._lock:
                self._ended.append(name)
            self._wake()

    def block(self, handle: Handle) -> None:
        """Record that the script is blocked on an operation, unless other threads may still submit operations."""
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
        """Raise HorovodInternalError if rank 0 is silent. Rank 0 enforces the deadline of all waits but joins.

        Args:
            quiet_since: time of the last message to or from rank 0.
            looked: time of the last read of messages. If this process was suspended since, a message may be unread.
        """
        limit = looked - self._settings.deadline_seconds - ANSWER_SECONDS
        if quiet_since < limit and any(one.since < limit and one.request.kind != JOIN for one in pending):
            raise HorovodInternalError(
                f"Rank {self.rank}: rank 0, which ends waits, has not answered for {looked - quiet_since:.0f} s: it is "
                f"stopped, or cannot be reached."
            )

    def record(self, path: str, mark_cycles: bool = False) -> None:
        """Close the current timeline and record operations to ``path``, if it is not empty. Only rank 0 records."""
        old, self.timeline = self.timeline, None
        if old is not None:
            old.close()
        if path and self.rank == 0:
            self.timeline = open_timeline(path, mark_cycles)

    def learn(self, news: dict[str, Any]) -> None:
        """Store news from rank 0 about lost workers and stalls. Empty news acknowledges this worker's message."""
        self._asked = None
        self.gone.update(dict(news["gone"]))
        self.stalled.update(news["stalled"])

    def news(self) -> dict[str, Any] | None:
        """Return a message for rank 0 about new long waits and those that have ended, or None if there are none."""
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
        """Build the error for a failed operation, naming the workers that left or are missing."""
        why = "; ".join(f"rank {rank} {why}" for rank, why in self.gone.items()) or self.stalled.get(name)
        if not why and (asked := self._asked) is not None:
            why = f"rank 0 has not answered for {time.monotonic() - asked:.0f} s: {reason_of(error)}"
        return HorovodInternalError(f"Rank {self.rank}: {what} failed: {why or reason_of(error)}")

    def await_cause(self, name: str, error: RuntimeError) -> HorovodInternalError:
        """Build the error for failed gradients in the script's thread, once the engine's thread knows which left."""
        for _ in range(round(EXPLAIN_SECONDS / _POLL_SECONDS)):  # a clock would run on while this process is stopped
            if self.gone or name in self.stalled:
                break
            time.sleep(_POLL_SECONDS)
        return self.explain(f"allreduce of the gradients {name!r}", name, error)


def say(text: str) -> None:
    """Print a message to stderr, where Horovod writes its log."""
    print(f"paceline.horovod: {text}", file=sys.stderr, flush=True)  # noqa: T201
