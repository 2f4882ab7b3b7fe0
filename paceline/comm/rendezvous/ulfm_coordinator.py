"""Coordinator process for workers of an mpiexec that survives the loss of a process (ULFM).

No launcher can run the coordinator, so it is a separate process, which outlives rank 0. Rank 0 starts it with the
listening socket and writes the secret that authenticates workers to its standard input, in a line of JSON. It exits
after the last worker.

No agent watches the workers' processes. The coordinator sees the end of a worker by the end of its connection. Before
that, a worker reports that its script has ended.
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

_LAST_SECONDS = 5.0  # time without any worker before the process exits, because a worker may be about to connect


def number_of(rank: int) -> int:
    """Return the number of the worker with this initial rank, as if each worker were the first on its own machine."""
    return (rank + 1) * BLOCK


class UlfmCoordinator(Coordinator):
    """Coordinator that counts a worker as lost if its connection ends before it has reported the end of its script."""

    def __init__(self, listener: socket.socket, secret: Secret, workers: int) -> None:
        bounds = Bounds(least=1, most=workers, wanted=workers, drops=True)
        super().__init__(listener, bounds, _forget, RunInfo("", secret, "", ""))
        for rank in range(workers):
            self.membership.started(number_of(rank))

    def disconnected(self, peer: Peer) -> None:
        number = peer.worker
        known = number is not None and self._workers.get(number) is peer
        super().disconnected(peer)
        if known and number is not None and self.membership.workers[number].ending:
            self.membership.finish(number, time.monotonic())

    def _reports_exit(self, number: int) -> bool:
        """Return True, because ``disconnected`` treats the end of the connection as the exit."""
        return True

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)


def _forget(*_: Any, **__: Any) -> None:
    """Discard events, because the run has no directory for them."""


def main() -> None:
    """Serve until rank 0 has ended and no worker has been connected for ``_LAST_SECONDS``."""
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
