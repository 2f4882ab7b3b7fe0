"""The workers of one run: who they are, how they meet, and what they tell each other."""

from __future__ import annotations

import atexit
import errno
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline import env
from paceline.comm.memory import shared_memory
from paceline.errors import DisagreementError, StartError, WorkerLost

_POLL_SECONDS = 0.02
_PROBE_TAG = (1 << 31) - 1
_GRACE_SECONDS = 1.0
"""For torch to notice by itself that the time is up."""


class World:
    """All workers of one run, as one of them sees it.

    Attributes:
        rank: the number of this worker, from 0.
        size: how many workers there are.
        device: where this worker computes.
        timeout: seconds that a worker waits for another one.
        memory: what workers on one machine share; none if they are on several, or on GPUs.
    """

    def __init__(self, who: env.Identity, timeout: float) -> None:
        self.rank = who.rank
        self.size = who.world_size
        self.local_size = who.local_world_size
        self.timeout = timeout
        self.device = _device(who)
        if self.size > 1 and not dist.is_initialized():
            self._join(who)
        self.memory = shared_memory(self)

    def _join(self, who: env.Identity) -> None:
        address = env.rendezvous_address(who)
        store = self._open_store(address, who)
        self._await_everyone(store, address, who)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
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
        except (dist.DistError, RuntimeError, ValueError) as error:
            if opens and (errno.errorcode[errno.EADDRINUSE] in str(error) or "in use" in str(error)):
                raise StartError(
                    f"Port {port} on {host} is in use by another process; choose another one "
                    f"(MASTER_PORT, or --port of the launcher), or leave it out to get a free one."
                ) from None
            reason = str(error).splitlines()[0]
            doing = "open the meeting point" if opens else "reach rank 0"
            raise StartError(
                f"Rank {self.rank} could not {doing} at {address} in {self.timeout:.0f} s: {reason}"
            ) from None

    def _store(self, host: str, port: int, opens: bool) -> Store:
        limit = timedelta(seconds=self.timeout)
        return TCPStore(host, port, self.size, is_master=opens, timeout=limit, wait_for_workers=False)

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
                        f"Rank {self.rank} waited {self.timeout:.0f} s at {address}, but {_ranks(missing)} of "
                        f"{self.size} workers did not come. Look at their output; were all of them started with this "
                        f"address?"
                    )
                time.sleep(_POLL_SECONDS)
        except dist.DistError as error:
            raise StartError(
                f"Rank {self.rank} lost the meeting point at {address} before all workers were there: "
                f"{_reason(error)}. The cause stands in the output of rank 0."
            ) from error

    def gather(self, value: Any, what: str) -> list[Any]:
        """What every worker has to say, in the order of ranks; any value that can be pickled.

        Raises:
            DisagreementError: the workers are at different places in the script; ``what`` names this one's.
            WorkerLost: another worker went away or stayed silent.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, (what, value))
        except RuntimeError as error:
            raise self._lost([], "when all workers compared notes", error) from error
        if any(told != what for told, _ in values):
            places = ", ".join(f"rank {rank} in {told}" for rank, (told, _) in enumerate(values))
            raise DisagreementError(
                f"The workers are at different places: {places}. All must call the same methods in the same order; "
                f"look for code that only some ranks run."
            )
        return [told for _, told in values]

    def post(self, sends: list[Message], receives: list[Message]) -> list[Transfer]:
        """Start to send and receive; each transfer is to be waited for."""
        operations = [dist.P2POp(dist.irecv, message.tensor, message.peer, tag=message.tag) for message in receives]
        operations += [dist.P2POp(dist.isend, message.tensor, message.peer, tag=message.tag) for message in sends]
        if not operations:
            return []
        if self.device.type == "cpu":
            return [self._start(operation) for operation in operations]
        peers = sorted({operation.peer for operation in operations})
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._lost(peers, f"in exchange {operations[0].tag}", error) from error
        return [Transfer(self, work, peers, operations[0].tag) for work in works]

    def _start(self, operation: dist.P2POp) -> Transfer:
        """Start one send or receive, so that an error names the one peer that it is about."""
        try:
            work = operation.op(operation.tensor, operation.peer, tag=operation.tag)
        except RuntimeError as error:
            raise self._lost([operation.peer], f"in exchange {operation.tag}", error) from error
        return Transfer(self, work, [operation.peer], operation.tag)

    def _lost(self, peers: list[int], where: str, error: RuntimeError) -> WorkerLost:
        reason = _reason(error)
        silent = peers and "imed out" in reason
        gone = peers if silent else self._gone(peers)
        named = _ranks(gone) if gone else "another worker"
        what = f"{named} sent nothing for {self.timeout:.0f} s (timeout_seconds)" if silent else f"lost {named}"
        return WorkerLost(f"Rank {self.rank}: {what} {where}. The cause stands in the output of {named}. [{reason}]")

    def _gone(self, peers: list[int]) -> list[int]:
        """These workers and all others whose connection is broken: the one that was lost first is among them."""
        gone = set(peers)
        for peer in range(self.size):
            if peer != self.rank and self.device.type == "cpu":
                try:
                    dist.isend(torch.zeros(1), peer, tag=_PROBE_TAG)
                except RuntimeError:
                    gone.add(peer)
        return sorted(gone)


class Message:
    """A tensor to send to, or receive from, one peer under a tag."""

    __slots__ = ("peer", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag


class Transfer:
    """A send or receive under way."""

    __slots__ = ("_peers", "_tag", "_work", "_world")

    def __init__(self, world: World, work: dist.Work, peers: list[int], tag: int) -> None:
        self._world = world
        self._work = work
        self._peers = peers
        self._tag = tag

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            WorkerLost: the peer went away, or stayed silent for the timeout.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._world._lost(self._peers, f"in exchange {self._tag}", error) from error


def _device(who: env.Identity) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < who.local_world_size:
        raise StartError(
            f"{who.local_world_size} workers on this machine but {torch.cuda.device_count()} GPUs: start as many "
            f"workers as GPUs, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
        )
    device = torch.device("cuda", who.local_rank)
    torch.cuda.set_device(device)
    return device


def _within(seconds: float, connect: Callable[[], Store]) -> Store:
    """Connect; torch would wait without end for another program that listens there but does not answer."""
    found: list[Store | Exception] = []

    def connecting() -> None:
        try:
            found.append(connect())
        except (RuntimeError, ValueError) as error:
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


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _reason(error: BaseException) -> str:
    """The first sentence of what torch or gloo says, without its place in their source."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*:\d+\] ", "", first.strip()).split(". ")[0]
