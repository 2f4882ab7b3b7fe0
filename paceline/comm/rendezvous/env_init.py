"""Rendezvous of workers that another launcher has started, at an address from the environment."""

from __future__ import annotations

import atexit
import errno
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline import env
from paceline.errors import StartError, name_ranks

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
"""For torch to notice by itself that the time is up."""


class EnvRendezvous:
    """The way of one worker into torch's default process group.

    Args:
        who: this worker.
        timeout: seconds to wait for the others.
    """

    def __init__(self, who: env.Identity, timeout: float) -> None:
        self.rank = who.rank
        self.size = who.world_size
        self.timeout = timeout
        self._who = who

    def join(self, device: torch.device) -> None:
        """Come together.

        Raises:
            StartError: somebody did not come, or the address cannot be reached.
        """
        who = self._who
        address = env.rendezvous_address(who)
        store = self._open_store(address, who)
        self._await_everyone(store, address, who)
        env.keep_inside(address.rpartition(":")[0])
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore(f"paceline/{who.generation}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
        )
        atexit.register(_leave)

    def _open_store(self, address: str, who: env.Identity) -> Store:
        host, _, port = address.rpartition(":")
        opens = self.rank == 0 and not env.has_agent_store()
        try:
            return _within(self.timeout, lambda: self._store(host, int(port), opens))
        except (dist.DistError, RuntimeError, ValueError, OSError) as error:
            if opens and "in use" in str(error):
                raise StartError(
                    f"Port {port} on {host} is in use by another process; choose another one "
                    f"(MASTER_PORT, or --port of the launcher), or leave it out to get a free one."
                ) from None
            reason = str(error).splitlines()[0]
            doing = "open the store" if opens else "reach rank 0"
            raise StartError(
                f"Rank {self.rank} could not {doing} at {address} in {self.timeout:.0f} s: {reason}"
            ) from None

    def _store(self, host: str, port: int, opens: bool) -> Store:
        limit, listener = timedelta(seconds=self.timeout), None
        if opens:
            listening = _listen(host, port)
            port = int(listening.getsockname()[1])
            listener = listening.detach()  # the store closes it
        return TCPStore(
            *(host, port, self.size),
            is_master=opens,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _await_everyone(self, store: Store, address: str, who: env.Identity) -> None:
        """Wait until each rank has said that it is here; name those that have not."""
        keys = [f"paceline/{who.generation}/here/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + self.timeout
        try:
            store.set(keys[self.rank], "here")
            while not store.check(keys):
                if time.monotonic() > deadline:
                    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    raise StartError(
                        f"Rank {self.rank} waited {self.timeout:.0f} s at {address}, but {name_ranks(missing)} of "
                        f"{self.size} workers did not come. See their logs; were all of them started with this "
                        f"address?"
                    )
                time.sleep(_POLL_SECONDS)
        except dist.DistError as error:
            raise StartError(
                f"Rank {self.rank} lost the store at {address} before all workers were there: "
                f"{reason_of(error)}. See the log of rank 0 for the cause."
            ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address alone; torch would at all that the machine has.

    At all if the name stands for none by which others reach this machine, but for a service, or for loopback, as in
    the file of hosts of many systems.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if env.is_loopback(host) or not env.is_loopback(str(address[0])):
            try:
                return socket.create_server((str(address[0]), port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return socket.create_server(("", port))


def _within(seconds: float, connect: Callable[[], Store]) -> Store:
    """Connect; torch would wait without end for another program that listens there but does not answer."""
    found: list[Store | Exception] = []

    def connecting() -> None:
        try:
            found.append(connect())
        except (RuntimeError, ValueError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=connecting, daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)
    if not found:
        raise ValueError("what listens there does not answer as rank 0 would; is the port used by another program?")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reason_of(error: BaseException) -> str:
    """The first sentence of what torch or gloo says, without its place in their source."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", first.strip()).split(". ")[0]
