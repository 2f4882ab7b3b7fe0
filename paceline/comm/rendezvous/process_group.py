"""torch's process group for one generation after the other in one process.

gloo's ``abort`` does not end a blocked call, and a peer that is silent holds back whoever tears a group down. So the
connections of a group are shut down to leave it: every blocked call then returns with an error.
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
from torch._C._distributed_c10d import Store

from paceline.comm.rendezvous.coordinator_store import CoordinatorStore
from paceline.comm.rendezvous.gloo_sockets import gloo_sockets, listens
from paceline.comm.transport.base import Transport
from paceline.environments import env

_LOOK_SECONDS = 0.01
_END_SECONDS = 5.0


class ProcessGroup:
    """The default process group of this worker, joined and left again and again.

    Args:
        agree: chooses the transport, at the store of a generation, of which this is so many's rank so and so.
        timeout: seconds after which torch gives up by itself.
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
        """Begin to come together: from now on :meth:`interrupt` ends it."""
        with self._lock:
            self._store, self._rank, self._size, self._joined = store, rank, size, False
            self._transport = None
        if not self._registered:
            self._registered = True
            atexit.register(self.end)

    def join(self) -> None:
        """Come together.

        Raises:
            RuntimeError: torch could not, or was interrupted.
        """
        assert self._store is not None
        transport = self._agree(self._store, self._rank, self._size)
        dist.distributed_c10d._world.group_count = 0  # it is in torch's keys, and stays higher after a failure to join
        if "nccl" in transport.backend:
            env.disable_nccl_error_handling()
        dist.init_process_group(
            transport.backend,
            store=self._store,
            rank=self._rank,
            world_size=self._size,
            timeout=self._timeout,
        )
        with self._lock:
            self._transport = transport
        transport.open()
        with self._lock:
            self._joined = True

    def join_soon(self) -> None:
        """Come together in the background."""

        def connecting() -> None:
            with contextlib.suppress(RuntimeError):  # who needs the group finds that it is not there
                self.join()

        self._thread = threading.Thread(target=connecting, name="paceline-group", daemon=True)
        self._thread.start()

    def is_connecting(self, seconds: float) -> bool:
        """Whether the group is still on its way after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def cut(self, only: CoordinatorStore | None = None) -> None:
        """End every blocked call of the group; may be called from any thread.

        Args:
            only: the store of the generation that is meant; None: the present one.
        """
        with self._lock:
            if self._store is None or (only is not None and self._store is not only):
                return
            self._store.close()
            if self._transport is not None:
                self._transport.abort()
            for one in gloo_sockets(list(self._store.written.values()), list(self._store.read.values())):
                with one, contextlib.suppress(OSError):
                    if not listens(one):  # gloo ends the process when that is shut down
                        one.shutdown(socket.SHUT_RDWR)
                    elif not self._joined:
                        _knock(one, self._size)

    def interrupt(self) -> None:
        """End every blocked call, and those that another thread, which is about to join, has yet to make."""
        self.cut()
        store = self._store
        if store is not None and not self._joined:
            threading.Thread(target=self._cut_on, args=(store,), name="paceline-cut", daemon=True).start()

    def _cut_on(self, store: CoordinatorStore) -> None:
        while self._store is store and not self._joined:
            self.cut(store)
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """Leave the group, whatever its other members do."""
        self.cut()
        while self.is_connecting(_LOOK_SECONDS):  # it may open more
            self.cut()
        self._thread = None
        with self._lock:
            self._store = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def end(self) -> None:
        """Leave the group in good order: the others may still read what this worker has sent."""
        if self.is_connecting(_END_SECONDS):
            self.leave()
        elif dist.is_initialized():
            dist.destroy_process_group()


def _knock(listener: socket.socket, size: int) -> None:
    """Let go of whoever waits for peers to connect, who may be gone: connect for each of them, and hang up.

    A peer of gloo says first which of the expected connections it is. Nothing else ends the wait, which is five times
    the timeout.
    """
    for number in range(size):
        with socket.socket(listener.family) as peer:
            peer.settimeout(_LOOK_SECONDS)
            peer.connect(listener.getsockname())
            peer.sendall(struct.pack("=q", number))
