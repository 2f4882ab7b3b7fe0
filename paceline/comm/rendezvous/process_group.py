"""torch's default process group, re-created for each generation in the same process.

gloo's ``abort`` does not end a blocked call, and a silent peer blocks the teardown of a group. To leave a group, its
connections are therefore shut down, which makes every blocked call return with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.comm.rendezvous.coordinator_store import CoordinatorStore
from paceline.comm.rendezvous.gloo_sockets import gloo_sockets, listens
from paceline.comm.transport.base import Transport
from paceline.environments import env
from paceline.system.torch_internals import restart_group_count

_POLL_SECONDS = 0.01
_END_SECONDS = 5.0


class ProcessGroup:
    """Default process group of this worker, which it joins and leaves in each generation.

    Args:
        agree: chooses the transport, called with the generation's store, this worker's rank and the number of workers.
    """

    def __init__(self, agree: Callable[[Store, int, int], Transport], timeout: float) -> None:
        self._agree = agree
        self._transport: Transport | None = None
        self._timeout = timedelta(seconds=timeout)
        self._lock = threading.Lock()
        self._store: CoordinatorStore | None = None
        self._joined = False
        self._rank, self._size = 0, 1
        self._thread: threading.Thread | None = None
        self._registered = False

    def enter(self, store: CoordinatorStore, rank: int, size: int) -> None:
        """Prepare to join a generation's group, so that :meth:`interrupt` can already end the join."""
        with self._lock:
            self._store, self._rank, self._size, self._joined = store, rank, size, False
            self._transport = None
        if not self._registered:
            self._registered = True
            atexit.register(self.end)

    def join(self) -> None:
        """Initialize torch's process group and open the transport.

        Raises:
            RuntimeError: torch could not connect or was interrupted.
        """
        assert self._store is not None
        transport = self._agree(self._store, self._rank, self._size)
        restart_group_count()
        if "nccl" in transport.backend:
            env.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # groups are aborted after a loss
        dist.init_process_group(
            transport.backend, store=self._store, rank=self._rank, world_size=self._size, timeout=self._timeout
        )
        with self._lock:
            self._transport = transport
        transport.open()
        with self._lock:
            self._joined = True

    def join_soon(self) -> None:
        def connecting() -> None:
            with contextlib.suppress(RuntimeError):  # a later use of the group fails with its own error
                self.join()

        self._thread = threading.Thread(target=connecting, name="paceline-group", daemon=True)
        self._thread.start()

    def is_connecting(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the background join and return whether it is still running."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def cut(self, only: CoordinatorStore | None = None) -> None:
        """End every blocked call of the group. Any thread may call this.

        Args:
            only: do nothing unless this is the current generation's store. Defaults to the current generation.
        """
        with self._lock:
            if self._store is None or (only is not None and self._store is not only):
                return
            self._store.close()
            if self._transport is not None:
                self._transport.abort()
            for one in gloo_sockets(list(self._store.written.values()), list(self._store.read.values())):
                with one, contextlib.suppress(OSError):
                    if not listens(one):  # gloo ends the process when its listening socket is shut down
                        one.shutdown(socket.SHUT_RDWR)
                    elif not self._joined:
                        _knock(one, self._size)

    def interrupt(self) -> None:
        """End every blocked call, and the later calls of a thread that is still joining."""
        self.cut()
        store = self._store
        if store is not None and not self._joined:
            threading.Thread(target=self._cut_on, args=(store,), name="paceline-cut", daemon=True).start()

    def _cut_on(self, store: CoordinatorStore) -> None:
        while self._store is store and not self._joined:
            self.cut(store)
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Leave the group without waiting for the other members."""
        self.cut()
        while self.is_connecting(_POLL_SECONDS):  # the background join may open more connections
            self.cut()
        self._thread = None
        with self._lock:
            self._store = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def end(self) -> None:
        """Destroy the group in order, so that peers can still read what this worker has sent."""
        if self.is_connecting(_END_SECONDS):
            self.leave()
        elif dist.is_initialized():
            dist.destroy_process_group()


def _knock(listener: socket.socket, size: int) -> None:
    """End gloo's wait for peers, which may be lost: connect to the listener in place of each peer and hang up.

    A gloo peer first sends the number of the expected connection. Nothing else ends the wait, which lasts five times
    the timeout.
    """
    for number in range(size):
        with socket.socket(listener.family) as peer:
            peer.settimeout(_POLL_SECONDS)
            peer.connect(listener.getsockname())
            peer.sendall(struct.pack("=q", number))
