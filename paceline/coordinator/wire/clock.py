"""Clock of a worker, compared with the coordinator's by messages that carry the time.

::

    worker       sent ──┐          ┌── returned          offset = at - (sent + returned) / 2
    coordinator         └─── at ───┘                     error  = (returned - sent) / 2

The coordinator answers after the question was sent and before the answer returned, so the offset is off by at most half
the round trip. Slow exchanges are inaccurate: of several, the one with the shortest round trip is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.coordinator.types import Message
from paceline.coordinator.wire.validation import BLOCK

_FIRST_EXCHANGES = 8  # exchanges in a row at the start, so that short runs have a good one
_EXCHANGES = 5  # exchanges, one with each heartbeat, of which the best is recorded


def answer(message: Message, launch: str, at: float) -> Message:
    """Return the coordinator's answer.

    Args:
        launch: identifier of this launch of the run, because the next launch may have another coordinator.
        at: time of the coordinator's clock, in seconds since 1970.
    """
    return {"type": "clock", "sent": message["sent"], "at": at, "launch": launch}


class Comparison(NamedTuple):
    """Comparison of a worker's clock with the coordinator's."""

    time: float  # time of the worker's clock
    machine: int  # number of the machine, whose workers have one clock
    launch: str  # identifier of the launch of the run
    offset: float  # seconds by which the coordinator's clock is ahead
    error: float  # largest error of the offset, in seconds


class ClockMeter:
    """Comparisons of this worker's clock with the coordinator's.

    Args:
        send: sends a message to the coordinator.
        mark: records a comparison as an event.
    """

    def __init__(self, worker: int, send: Callable[[Message], None], mark: Callable[..., None]) -> None:
        self._machine, self._send, self._mark = worker // BLOCK, send, mark
        self._left = _FIRST_EXCHANGES
        self._first = True
        self._best: Comparison | None = None
        self._recorded: Comparison | None = None

    def ask(self) -> None:
        self._send({"type": "clock", "sent": time.time()})

    def receive(self, message: Message) -> None:
        """Compare the clocks by an answer. Record the best comparison after the last exchange of several."""
        returned = time.time()
        middle, error = (message["sent"] + returned) / 2, (returned - message["sent"]) / 2
        if error >= 0 and (self._best is None or error < self._best.error):  # else this clock was set back meanwhile
            self._best = Comparison(middle, self._machine, message["launch"], message["at"] - middle, error)
        self._left -= 1
        if self._left > 0:
            if self._first:
                self.ask()
            return
        self._recorded, self._best = self._best or self._recorded, None
        self._left, self._first = _EXCHANGES, False
        self.repeat()

    def repeat(self) -> None:
        """Record the last comparison, even under a new rank, whose file then tells which machine writes to it."""
        if self._recorded is not None:
            self._mark("clock", **self._recorded._asdict())
