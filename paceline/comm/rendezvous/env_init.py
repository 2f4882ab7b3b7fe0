"""Rendezvous of workers started by another launcher, at an address derived from the environment."""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported explicitly
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.rendezvous.address import Address, find_address, listen, within
from paceline.comm.rendezvous.networks import interface_towards
from paceline.environments import env
from paceline.environments.start import Identity, Start
from paceline.errors import StartError, name_ranks

_POLL_SECONDS = 0.02
_LOOKS_PER_SECOND = 5000  # Store polls per second, summed over all workers. A blocking wait would not handle signals.
_NO_ANSWER = (
    "nothing answers as rank 0 would. See the output of rank 0, or check whether another program uses the port."
)


def hold_store(host: str) -> tuple[Store, int]:
    """Create a store for workers that connect later, as torchrun does, and return the store and its port."""
    listener = listen(host, 0)
    port = int(listener.getsockname()[1])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


class EnvRendezvous:
    """Rendezvous of this worker in torch's default process group."""

    def __init__(self, who: Identity, timeout: float) -> None:
        self.rank = who.rank
        self.size = who.world_size
        self.timeout, self._who = timeout, who

    def join(self, choose: Callable[[Store, int, int], str]) -> str:
        """Initialize the process group with the back end ``choose(store, rank, size)`` and return rank 0's host.

        Raises:
            StartError: a worker is missing at the timeout, or the address cannot be reached.
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
        opens = self.rank == 0 and env.text("TORCHELASTIC_USE_AGENT_STORE") != "True"
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
        """Wait until every rank has registered in the store. Raise StartError with the missing ranks at the timeout.

        Each rank increments a counter, and the last rank sets a key, so each rank polls a single key for any number of
        workers.
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
                        f"{self.size} workers did not arrive. See their logs; were all of them started with this "
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
    if start.engine == "Slurm" and not env.text("MASTER_PORT"):
        cure = "It follows from the numbers of the job and of the step: set MASTER_PORT to another one."
    else:
        cure = "Choose another one (MASTER_PORT, or --port of the launcher), or leave it out to get a free one."
    return f"Port {where.port} on {where.host} is in use by another process. {cure}"


def _choose_interface(host: str) -> None:
    """Make gloo use the interface by which this worker reaches rank 0, unless the user has chosen an interface."""
    env.keep_inside(host)
    if not env.is_loopback(host) and (name := interface_towards(host)) is not None:
        env.set_default("GLOO_SOCKET_IFNAME", name)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error of torch or gloo, without the source location."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", first.strip()).split(". ")[0]
