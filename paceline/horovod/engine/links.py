"""Connections between rank 0 and the other workers, over which operations are negotiated.

Messages have the format of ``coordinator.wire.messages``. Each end first proves that it belongs to the run, with a key
from the store of the rendezvous. One thread reads, and any thread may wake it.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.comm.rendezvous.address import listen
from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import NotAuthenticated, admit, worker
from paceline.coordinator.wire.messages import Connection, connect, decode, encode, keep_alive
from paceline.errors import StartError, name_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PROOF_SECONDS = 10.0
_POLL_SECONDS = 0.2


class Links:
    """Connections of this worker: to rank 0, or from rank 0 to all others. None if it is the only worker."""

    def __init__(self, rank: int, connections: dict[int, Connection]) -> None:
        self.rank = rank
        # monotonic time of the last :meth:`receive` call. Messages that had arrived by then have been read.
        self.looked = time.monotonic()
        self._connections = connections
        self._sleeping, self._waking = socket.socketpair()
        self._sleeping.setblocking(False)
        self._waking.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sleeping, select.POLLIN)
        self._ranks = {one.socket.fileno(): rank for rank, one in connections.items()}
        for one in connections.values():
            self._poll.register(one.socket, select.POLLIN)

    def wake(self) -> None:
        """End the current wait in :meth:`receive`, or the next wait if no thread is waiting."""
        with contextlib.suppress(OSError):  # already woken, or closed
            self._waking.send(b"\0")

    def send(self, rank: int, message: Message, seconds: float) -> None:
        """Send a message and wait until the kernel has accepted it. Broken connections are detected by reading."""
        self._send(rank, encode(message), seconds)

    def send_all(self, message: Message, seconds: float) -> None:
        line = encode(message)
        for rank in self._connections:
            self._send(rank, line, seconds)

    def _send(self, rank: int, line: bytes, seconds: float) -> None:
        connection, deadline = self._connections[rank], time.monotonic() + seconds
        connection.send(line)
        while connection.unsent and time.monotonic() < deadline:
            select.select([], [connection.socket], [], 1.0)
            connection.flush()

    def receive(self, seconds: float) -> tuple[list[tuple[int, Message]], list[int]]:
        """Wait for messages. Return them with their ranks, and the ranks whose connections have ended."""
        self.looked = time.monotonic()
        messages: list[tuple[int, Message]] = []
        ended = []
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if descriptor == self._sleeping.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._sleeping.recv(4096)
                continue
            rank = self._ranks[descriptor]
            connection = self._connections[rank]
            messages += [(rank, decode(line)) for line in connection.receive()]
            if connection.broken:
                self._poll.unregister(descriptor)
                ended.append(rank)
        return messages, ended

    def close(self) -> None:
        for one in self._connections.values():
            one.close()
        self._sleeping.close()
        self._waking.close()


def open_links(
    rank: int, size: int, host: str, store: Store, seconds: float, is_cut_short: Callable[[], bool]
) -> Links:
    """Connect all workers with rank 0. All workers call this together.

    Args:
        host: address at which the other workers reach rank 0.
        store: store used by this call alone, in which rank 0 publishes its address.
        is_cut_short: returns whether a worker is known to be lost.
    """
    if size == 1:
        return Links(rank, {})
    if rank == 0:
        return Links(rank, _accept(size, host, store, seconds, is_cut_short))
    try:
        store.set_timeout(timedelta(seconds=seconds))
        host, port, key = store.get("address").decode().split()
        return Links(rank, {0: connect((host, int(port)), worker(rank), bytes.fromhex(key), seconds)})
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"Rank {rank} could not reach rank 0 for hvd.init within {seconds:.0f} s: {error}. Do all ranks call it?"
        ) from None


def _accept(
    size: int, host: str, store: Store, seconds: float, is_cut_short: Callable[[], bool]
) -> dict[int, Connection]:
    key = secrets.token_bytes(32)
    found: dict[int, Connection] = {}
    with listen(host, 0) as listener:
        store.set("address", f"{host} {listener.getsockname()[1]} {key.hex()}")
        deadline = time.monotonic() + seconds
        while len(found) < size - 1:
            listener.settimeout(_POLL_SECONDS)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() < deadline and not is_cut_short():
                    continue
                missing = [rank for rank in range(1, size) if rank not in found]
                raise StartError(
                    f"Rank 0 waited {seconds:.0f} s in hvd.init for {name_ranks(missing)}. Do all ranks call it?"
                ) from None
            try:
                keep_alive(connection)
                role = admit(connection, lambda role: key, _PROOF_SECONDS)
                found[int(role.split()[1])] = Connection(connection)
            except (NotAuthenticated, OSError):
                connection.close()
    return found
