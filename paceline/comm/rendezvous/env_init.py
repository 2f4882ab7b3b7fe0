"""Rendezvous of workers that another launcher has started, at an address that follows from the environment."""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.comm.rendezvous.address import Address, find_address, listen, within
from paceline.comm.rendezvous.networks import interface_towards
from paceline.environments import env
from paceline.environments.start import Identity, Start
from paceline.errors import StartError, name_ranks

_POLL_SECONDS = 0.02
_LOOKS_PER_SECOND = 5000
"""Of all workers together, at the one store. A blocking wait would handle no signal."""
_NO_ANSWER = "what listens there does not answer as rank 0 would; is the port used by another program?"


def hold_store(host: str) -> tuple[Store, int]:
    """Hold the store of workers that come later, as torchrun does for its own; gives it, and its port."""
    listener = listen(host, 0)
    port = int(listener.getsockname()[1])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


class EnvRendezvous:
    """The way of one worker into torch's default process group.

    Args:
        who: this worker.
        timeout: seconds to wait for the others.
    """

    def __init__(self, who: Identity, timeout: float) -> None:
        self.rank = who.rank
        self.size = who.world_size
        self.timeout = timeout
        self._who = who

    def join(self, choose: Callable[[Store, int, int], str]) -> str:
        """Come together by the back end that ``choose(store, rank, size)`` gives; returns the host of rank 0.

        Raises:
            StartError: somebody did not come, or the address cannot be reached.
        """
        who, start = self._who, env.started_by()
        with find_address(start, self.timeout) as where:
            store = self._open_store(where, start)
            self._await_everyone(store, str(where), who)
        _choose_interface(where.host)
        own = PrefixStore(f"paceline/{who.generation}", store)
        dist.init_process_group(
            choose(own, self.rank, self.size),
            store=own,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
        )
        atexit.register(_leave)
        return where.host

    def _open_store(self, where: Address, start: Start) -> Store:
        opens = self.rank == 0 and not env.has_agent_store()
        try:
            return within(self.timeout, _NO_ANSWER, lambda: self._store(where, opens))
        except (dist.DistError, RuntimeError, ValueError, OSError) as error:
            if opens and "in use" in str(error):
                raise StartError(_in_use(where, start)) from None
            reason = str(error).splitlines()[0]
            doing = "open the store" if opens else "reach rank 0"
            raise StartError(
                f"Rank {self.rank} could not {doing} at {where} in {self.timeout:.0f} s: {reason}"
            ) from None

    def _store(self, where: Address, opens: bool) -> Store:
        limit, port, listener = timedelta(seconds=self.timeout), where.port, None
        if opens:
            listening = where.listener or listen(where.host, port)
            port = int(listening.getsockname()[1])
            listener = listening.detach()  # the store closes it
        return TCPStore(
            *(where.host, port, self.size),
            is_master=opens,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _await_everyone(self, store: Store, address: str, who: Identity) -> None:
        """Wait until each rank has said that it is here; name those that have not.

        Each counts itself, and the last one says that all are there: one key to look for, however many workers.
        """
        place = f"paceline/{who.generation}"
        keys = [f"{place}/here/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + self.timeout
        try:
            if store.add(keys[self.rank], 1) == 1 and store.add(f"{place}/count", 1) == self.size:
                store.set(f"{place}/all", "here")
            while not store.check([f"{place}/all"]):
                if time.monotonic() > deadline:
                    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    raise StartError(
                        f"Rank {self.rank} waited {self.timeout:.0f} s at {address}, but {name_ranks(missing)} of "
                        f"{self.size} workers did not come. See their logs; were all of them started with this "
                        f"address?"
                    )
                time.sleep(max(_POLL_SECONDS, self.size / _LOOKS_PER_SECOND))
            store.delete_key(keys[self.rank])
        except dist.DistError as error:
            raise StartError(
                f"Rank {self.rank} lost the store at {address} before all workers were there: "
                f"{reason_of(error)}. See the output of rank 0 for the cause."
            ) from error


def _in_use(where: Address, start: Start) -> str:
    if start.engine == "Slurm" and not env.master_port_is_set():
        cure = "It follows from the numbers of the job and of the step: set MASTER_PORT to another one."
    else:
        cure = "Choose another one (MASTER_PORT, or --port of the launcher), or leave it out to get a free one."
    return f"Port {where.port} on {where.host} is in use by another process. {cure}"


def _choose_interface(host: str) -> None:
    """Let gloo reach the others the way that this worker has reached rank 0, unless the user has chosen."""
    env.keep_inside(host)
    if not env.is_loopback(host) and (name := interface_towards(host)) is not None:
        env.use_interface(name)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reason_of(error: BaseException) -> str:
    """The first sentence of what torch or gloo says, without its place in their source."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", first.strip()).split(". ")[0]
