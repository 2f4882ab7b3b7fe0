"""torch's process group for one generation after the other in one process.

gloo's ``abort`` does not end a blocked call, and a peer that is silent holds back whoever tears a group down. So the
sockets that a group opened are remembered, and shut down to leave it: every blocked call then returns with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_LOOK_SECONDS = 0.01
_END_SECONDS = 5.0
_REACH_SECONDS = 5.0
_SOCKETS = "/proc/self/fd"


class ProcessGroup:
    """The default process group of this worker, joined and left again and again.

    Args:
        device: where tensors are.
        timeout: seconds after which torch gives up by itself.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._own: Store | None = None
        self._before: dict[int, str] | None = None
        self._opened: dict[int, str] | None = None
        self._size = 1
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._registered = False

    def open_store(self, address: str) -> int:
        """Open the store at which workers meet when this one is the first of a generation; returns its port."""
        store = TCPStore(address, 0, None, True, self._timeout, wait_for_workers=False)
        self._own = store
        return int(store.port)

    def join(self, store: tuple[str, int], rank: int, size: int, generation: int) -> None:
        """Come together.

        Raises:
            RuntimeError: torch could not, or was interrupted.
        """
        self._before, self._opened, self._size = _open_sockets(), None, size
        if not self._registered:
            self._registered = True
            atexit.register(self.end)
        client = self._client(store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(f"paceline/{generation}", client),
            rank=rank,
            world_size=size,
            timeout=self._timeout,
        )
        self._opened = self._new_sockets()

    def _client(self, address: tuple[str, int]) -> Store:
        """Reach the store; torch would try again and again when its worker is gone."""
        try:
            socket.create_connection(address, timeout=_REACH_SECONDS).close()
        except OSError as error:
            raise RuntimeError(f"The store at {address[0]}:{address[1]} is gone: {error.strerror or error}") from None
        reaching = min(self._timeout, timedelta(seconds=_REACH_SECONDS))
        client = TCPStore(*address, None, False, reaching, wait_for_workers=False)
        client.set_timeout(self._timeout)
        return client

    def join_soon(self, store: tuple[str, int], rank: int, size: int, generation: int) -> None:
        """Come together in the background."""

        def connecting() -> None:
            with contextlib.suppress(RuntimeError):  # who needs the group finds that it is not there
                self.join(store, rank, size, generation)

        self._thread = threading.Thread(target=connecting, name="paceline-group", daemon=True)
        self._thread.start()

    def is_connecting(self, seconds: float) -> bool:
        """Whether the group is still on its way after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def _new_sockets(self) -> dict[int, str]:
        before = self._before or {}
        return {opened: name for opened, name in _open_sockets().items() if before.get(opened) != name}

    def cut(self) -> None:
        """End every blocked call of the group; may be called from any thread."""
        with self._lock:
            if self._before is None:
                return
            if self._device.type == "cuda" and dist.is_initialized():
                dist.distributed_c10d._abort_process_group()
            still = _open_sockets()
            for opened, name in self._mine().items():
                if still.get(opened) == name:
                    _shut_down(opened)
            if self._opened is None:
                for opened in self._mine():
                    _knock(opened, self._size)

    def _mine(self) -> dict[int, str]:
        return self._opened if self._opened is not None else self._new_sockets()

    def interrupt(self) -> None:
        """End every blocked call, and those that another thread, which is about to join, has yet to make."""
        self.cut()
        if self._before is not None and self._opened is None:
            threading.Thread(target=self._cut_on, args=(self._before,), name="paceline-cut", daemon=True).start()

    def _cut_on(self, before: dict[int, str]) -> None:
        while self._before is before and self._opened is None:
            self.cut()
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """Leave the group, whatever its other members do."""
        self.cut()
        while self.is_connecting(_LOOK_SECONDS):  # it may open more
            self.cut()
        self._thread = None
        self._before = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def end(self) -> None:
        """Leave the group in good order: the others may still read what this worker has sent."""
        if self.is_connecting(_END_SECONDS):
            self.leave()
        elif dist.is_initialized():
            dist.destroy_process_group()


def _open_sockets() -> dict[int, str]:
    """The open sockets of this process, each with the name that tells it from a later one of the same number."""
    found = {}
    for number in os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else ():
        with contextlib.suppress(OSError):
            name = os.readlink(f"{_SOCKETS}/{number}")
            if name.startswith("socket:"):
                found[int(number)] = name
    return found


def _shut_down(opened: int) -> None:
    """Shut a connection down; gloo ends the process when its listening socket is touched."""
    with contextlib.suppress(OSError), _socket_of(opened) as connection:
        tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _knock(opened: int, size: int) -> None:
    """Let go of whoever waits for peers to connect, who may be gone: connect for each of them, and hang up.

    A peer of gloo says first which of the expected connections it is. Nothing else ends the wait, which is five times
    the timeout.
    """
    with contextlib.suppress(OSError), _socket_of(opened) as listener:
        tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
        if tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            for number in range(size):
                with socket.socket(listener.family) as peer:
                    peer.settimeout(_LOOK_SECONDS)
                    peer.connect(listener.getsockname())
                    peer.sendall(struct.pack("=q", number))


@contextlib.contextmanager
def _socket_of(opened: int) -> Iterator[socket.socket]:
    connection = socket.socket(fileno=os.dup(opened))
    try:
        yield connection
    finally:
        connection.close()
