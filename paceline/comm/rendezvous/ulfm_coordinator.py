"""The coordinator of workers that mpiexec has started so that it lets the others go on when one is lost (ULFM).

There is no launcher to hold it, so it is a process of its own, which outlives rank 0. Rank 0 starts it, with the socket
on which it listens, and says in a line of JSON on its standard input what the workers prove themselves by. It ends with
the last worker.

No agent sees how a worker's process ends: its connection tells, and before that the worker itself if its script has
come to its end.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any

from paceline.coordinator.server import Coordinator
from paceline.coordinator.types import Bounds, RunInfo
from paceline.coordinator.wire.connections import TICK_SECONDS, Peer
from paceline.coordinator.wire.validation import BLOCK
from paceline.system.secret import Secret

_LAST_SECONDS = 5.0
"""Without a worker, for one that is about to connect."""


def number_of(rank: int) -> int:
    """The number of the worker that starts with this rank: that of the first worker of a machine of its own."""
    return (rank + 1) * BLOCK


class UlfmCoordinator(Coordinator):
    """Believes a worker that says that its script has ended, and takes every other one whose connection ends for lost.

    Args:
        listener: of the workers.
        secret: of the run.
        workers: how many mpiexec has started.
    """

    def __init__(self, listener: socket.socket, secret: Secret, workers: int) -> None:
        bounds = Bounds(least=1, most=workers, wanted=workers, drops=True)
        super().__init__(listener, bounds, _forget, RunInfo("", secret, "", ""))
        for rank in range(workers):
            self.membership.started(number_of(rank))

    def disconnected(self, peer: Peer) -> None:
        """Take note of the end of a worker."""
        number = peer.worker
        known = number is not None and self._workers.get(number) is peer
        super().disconnected(peer)
        if known and number is not None and self.membership.workers[number].ending:
            self.membership.finish(number, time.monotonic())

    @property
    def has_workers(self) -> bool:
        """Whether a worker is connected that takes part."""
        return bool(self._workers)


def _forget(*_: Any, **__: Any) -> None:
    """There is no run directory for events."""


def main() -> None:
    """Serve until the last worker has gone."""
    told = json.loads(sys.stdin.readline())
    listener = socket.socket(fileno=told["listener"])
    coordinator = UlfmCoordinator(listener, Secret(bytes.fromhex(told["secret"])), told["workers"])
    select.select([sys.stdin], [], [])  # rank 0 has ended
    since = time.monotonic()
    while time.monotonic() - since < _LAST_SECONDS:
        time.sleep(TICK_SECONDS)
        if coordinator.has_workers:
            since = time.monotonic()


if __name__ == "__main__":
    main()
