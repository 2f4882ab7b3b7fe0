"""The workers of one run: how they come together, gather values, and send tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.comm.desync import patch
from paceline.comm.desync.board import Board, SharedMemoryBoard, StoreBoard
from paceline.comm.desync.recorder import CallRecorder
from paceline.comm.rendezvous import devices
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.rendezvous.env_init import EnvRendezvous, reason_of
from paceline.comm.rendezvous.process_group import ProcessGroup
from paceline.comm.shm.arena import Arena, SharedMemory, attach_hosts, attach_members, can_share
from paceline.comm.shm.ring import Rings, can_have
from paceline.comm.transport.base import Communicator, Message, Transport, TransportError
from paceline.comm.transport.choice import transport_for
from paceline.comm.transport.gather import all_gather_bytes
from paceline.comm.transport.gloo import Gloo
from paceline.comm.transport.transfer import Transfer
from paceline.comm.values import decode, encode_call
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Membership, neighbours
from paceline.environments.start import Identity
from paceline.errors import (
    DisagreementError,
    PacelineError,
    WorkerLost,
    WorkerSilent,
    name_ranks,
)

PENDING, LEAVING = 1, 2
"""Notices in step headers: the world is about to change; this worker is to leave."""

_POLL_SECONDS = 0.02
_PROBE_TAG = (1 << 28) - 8  # the back end for MPI has those above
_WITHIN = ("start", "step", "audit")
"""Gathers inside something else that is recorded."""


class World(Waiting):
    """All workers of one run, as one of them sees it; with a coordinator they may change.

    Attributes:
        device: where this worker computes; a spare on the CPU until it joins.
        transport: moves tensors between workers.
        generation: how often the workers have changed.
        hosts: the ranks of the workers of each machine.
        host_memory: what the workers of this machine share; none if a worker of any machine cannot, as on GPUs.
        recorder: what the script does with ``torch.distributed``; none in one process.
        end_servers: ends those of a parameter server, which others read until the workers have come together anew.
    """

    recorder: CallRecorder | None = None
    host_memory: SharedMemory | None = None
    hosts: tuple[tuple[int, ...], ...] = ((0,),)

    def __init__(
        self, who: Identity, timeout: float, coordinator: CoordinatorClient | None = None, transport: str = "auto"
    ) -> None:
        super().__init__(who.rank, who.world_size, timeout, coordinator)
        self.local_rank = who.local_rank
        self.local_size = who.local_world_size
        self.generation = who.generation
        self.device, self._shares_device = devices.device_of(who), False
        self._who, self._wanted = who, transport if who.world_size > 1 else "auto"
        self.transport = transport_for(self.device, can_share() and not devices.visible_gpus(), wanted=self._wanted)
        self._host_transport = Gloo(same_host=False)
        self.leaving = self._in_process_group = False
        self._rings: dict[int, Rings] = {}
        self.end_servers: Callable[[], None] = lambda: None
        self._arena: Arena | None = None
        self._group = ProcessGroup(self._agree, timeout)
        if coordinator is not None:
            coordinator.on_alarm = self._interrupt

    def rendezvous(self) -> None:
        """Come together with the workers that the environment names.

        Raises:
            StartError: they did not come.
        """
        if self.size > 1 and not dist.is_initialized():
            EnvRendezvous(self._who, self.timeout).join(lambda *at: self._agree(*at).backend)
        elif self.size > 1:  # the script has made a group, or an earlier session
            self._agree(dist.distributed_c10d._get_default_store(), self.rank, self.size)
        if self.size > 1:
            self.transport.open()
            # launchers number the workers of a machine one after the other; of others no two are taken for neighbours
            self._share_memory(self.gather(self.rank - self.local_rank, "start"))
            self.recorder = self._record_calls()

    def _agree(self, store: Store, rank: int, size: int) -> Transport:
        """The transport of the workers that come together at a store."""
        chosen = devices.agree(store, rank, size, self.device)
        if chosen != (self.device, self._shares_device):
            self.device, self._shares_device = chosen
            self.transport = transport_for(self.device, False, self._shares_device, self._wanted)
        return self.transport

    def join(self, membership: Membership) -> None:
        """Come together with the members of a generation, after :meth:`leave`.

        Raises:
            WorkerLost: one of them was lost on the way.
        """
        assert self.coordinator is not None
        self._members, self.generation = membership.members, membership.generation
        self.rank, self.size = membership.rank_of(self.coordinator.number), len(self._members)
        machines = [(one.host, one.address) for one in self._members]
        near = neighbours(self._members, self.rank)
        self.local_rank, self.local_size = near.index(self.rank), len(near)
        if membership.fenced:  # who was dropped may come back and write into what it knows
            self._arena = None
        if self.size == 1 and self.generation > 0:  # the script may have used a group before
            self._group.enter(self.coordinator.open_store(), 0, 1)
            self._group.join()
        if self.size > 1:
            self._come_together(membership, machines)
            recorder = self._record_calls()
            if self.shared_memory is not None:  # nobody may read what was published in an earlier generation
                self.shared_memory.all_gather(b"")
            self.recorder = recorder

    def _come_together(self, membership: Membership, machines: Sequence[tuple[str, str]]) -> None:
        """Through shared memory alone if that is known to be there: torch's group then follows while training goes on.

        A group takes a tenth of a second, and only the script may want it.
        """
        assert self.coordinator is not None
        self._group.enter(self.coordinator.open_store(), self.rank, self.size)
        self._host_transport.open()
        if self.local_size == self.size and not membership.fenced and self.transport.capabilities.same_host:
            self.hosts = (tuple(range(self.size)),)
            self.host_memory = attach_members(self, self._own_arena(), membership.members, membership.generation)
        if self.host_memory is not None:
            self._group.join_soon()
            return
        self.check()  # before the alarm could interrupt this
        try:
            self._group.join()
            if self.alarmed:  # it came while the connections were made
                raise WorkerLost(f"Rank {self.rank}: another worker was lost while all came together.")
        except RuntimeError as error:
            raise WorkerLost(f"Rank {self.rank}: could not reach the others: {reason_of(error)}.") from error
        self._share_memory(machines)

    def leave(self) -> None:
        """Leave the others, who may be gone or blocked, without sending or waiting."""
        patch.stop()
        if self.host_memory is not None:
            self.host_memory.give_up()
        self.host_memory = self.recorder = None
        self.waits_for(())
        self._rings = {}
        self._group.leave()

    def arena_handle(self) -> tuple[int, str] | None:
        """By what others on this machine find the arena of this worker."""
        return self._own_arena().handle if self.transport.capabilities.same_host else None

    def worker_ids(self, ranks: Sequence[int]) -> list[int]:
        """The numbers of the worker processes that have these ranks."""
        return [self._members[rank].worker for rank in ranks]

    def await_process_group(self) -> None:
        """Until torch's group is there, if it is on its way.

        Raises:
            WorkerLost: another worker was lost meanwhile.
        """
        while self._group.is_connecting(_POLL_SECONDS):
            self.check()

    @property
    def shared_memory(self) -> SharedMemory | None:
        """What all workers share; none if they are on several machines, or on GPUs."""
        return self.host_memory if len(self.hosts) == 1 else None

    def _share_memory(self, machines: Sequence[Hashable]) -> None:
        """Share memory with the workers of the same machine; all workers of all machines call this together."""
        self.hosts = tuple(
            tuple(rank for rank, machine in enumerate(machines) if machine == one) for one in dict.fromkeys(machines)
        )
        if max(map(len, self.hosts)) > 1:
            arena = self._own_arena() if self.transport.capabilities.same_host else None
            self.host_memory = attach_hosts(self, arena, self.hosts, self.gather)

    def _own_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena

    def _interrupt(self) -> None:
        """Somebody was lost: end what blocks on the network. In shared memory each wait looks for itself."""
        if self.shared_memory is None or self._in_process_group:
            self._host_transport.abort()
            self._group.interrupt()

    def rings(self, count: int) -> Rings | None:
        """Ring buffers from each worker to each; none if the workers are on several machines, or too many.

        All workers call this together.
        """
        if self.shared_memory is None or not can_have(self.size, count):
            return None
        if count not in self._rings:
            self._rings[count] = Rings(self.shared_memory, self.size, count)
        return self._rings[count]

    def notice(self) -> int:
        """The notice for the step header: ``LEAVING``, ``PENDING``, or 0."""
        if self.leaving:
            return LEAVING
        return PENDING if self.coordinator is not None and self.coordinator.pending > self.generation else 0

    def request_leave(self) -> None:
        """Leave the run after this step; a signal handler may call it."""
        self.leaving = True

    def become_single(self) -> None:
        """Be the only worker from now on: the others are gone, or end."""
        self.rank, self.size, self.local_size, self.hosts = 0, 1, 1, ((0,),)

    def _record_calls(self) -> CallRecorder:
        if self.shared_memory is not None:
            board: Board = SharedMemoryBoard(self.shared_memory, self.rank)
        else:
            board = StoreBoard(dist.distributed_c10d._get_default_store(), self.rank, self.size)
        recorder = CallRecorder(self.rank, board, weakref.WeakMethod(self.lost))
        patch.record_in(recorder, self.await_process_group)
        return recorder

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a value of every worker, in the order of ranks; of the types that ``values`` can send.

        Raises:
            DisagreementError: the workers are at different places in the script; ``what`` names this one's.
            WorkerLost: another worker went away or stayed silent.
        """
        if self.size == 1:
            return [value]
        met = self.recorder and what not in _WITHIN
        made = self.recorder.meet(f"session.{what}", what) if self.recorder and met else (0.0, 0.0)
        with self.awaiting(f"in a gather of all workers ({what})"):
            values = self._read(self._exchange(encode_call(what, value, made)))
        if any(call != what for call, *_ in values):
            places = ", ".join(f"rank {rank} in {call}" for rank, (call, *_) in enumerate(values))
            raise DisagreementError(
                f"The workers are at different places: {places}. All must call the same methods in the same order; "
                f"look for code that only some ranks run."
            )
        if self.recorder and met:
            self.recorder.check_agreement([made for *_, made in values])
        return [value for _, value, _ in values]

    def _read(self, messages: list[bytes]) -> list[Any]:
        values: list[Any] = []
        for rank, message in enumerate(messages):
            try:
                values.append(decode(message))
            except ValueError as error:
                raise WorkerLost(f"Rank {self.rank}: what rank {rank} sent cannot be read: {error}.") from error
        return values

    def _exchange(self, own: bytes) -> list[bytes]:
        if self.shared_memory is not None:
            return self.shared_memory.all_gather(own)
        return all_gather_bytes(self, own)

    def start_transfers(
        self,
        sends: list[Message],
        receives: list[Message],
        where: str = "",
        over: Communicator | None = None,
        host: bool = False,
    ) -> list[Transfer]:
        """Start to send and receive; each transfer is to be waited for.

        Args:
            sends, receives, over: see :meth:`Transport.start`.
            where: for an error, what this is for.
            host: the tensors are on the CPU, wherever this worker computes.
        """
        if not sends and not receives:
            return []
        where, transport = where or self.purpose, self._host_transport if host else self.transport
        try:
            started = transport.start(sends, receives, over)
        except TransportError as error:
            raise self.lost(error.peers, where, error) from error
        return [Transfer(self, work, peers, where) for work, peers in started]

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Open those of this worker, between neighbours that need one; all workers call this together, in one order.

        Raises:
            WorkerLost: another worker went away.
        """
        own = sorted({one for one in communicators if self.rank in one[1:] and one.sender != one.receiver})
        if own and self.transport.capabilities.ordered:
            with self.waiting_in_group(self.others, [], "while the workers connected"):
                self.transport.open_communicators(own)

    def start_all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """Start to add up a tensor over all workers, in place and in any order; it is to be waited for."""
        self.await_process_group()
        try:
            work = self.transport.all_reduce(tensor)
        except RuntimeError as error:
            raise self.lost([], self.purpose, error) from error
        return Transfer(self, work, [], self.purpose)

    def synchronize(self) -> None:
        """Wait on the host for the device, where a wait does not: what came from others can be believed from now on.

        Raises:
            WorkerLost: another worker went away or stayed silent; what came may be garbage.
        """
        if self.transport.capabilities.blocking_wait:
            return
        with self.waiting_in_group(self.others, [], self.purpose):
            self.transport.synchronize(self._look)
            self.check()  # an abort ends what the device waits for

    def _look(self, waited: float) -> None:
        self.check()
        self.check_silence([], waited)

    def confirm(self, step: int) -> None:
        """Before an update: where a wait does not tell whether tensors came, all tell each other through the host.

        Raises:
            WorkerLost: another worker went away or stayed silent.
        """
        if self.size > 1 and not self.transport.capabilities.blocking_wait:
            self.synchronize()
            self.gather(step, "step")

    @contextmanager
    def waiting_in_group(self, ranks: Sequence[int], suspects: list[int], where: str) -> Iterator[None]:
        """Wait for these ranks in a call of the process group, which the loss of a worker interrupts.

        Args:
            ranks: that this worker waits for.
            suspects: see :meth:`lost`.
            where: see :meth:`lost`.

        Raises:
            WorkerLost: the call failed.
        """
        self.waits_for(ranks)
        self._in_process_group = True
        try:
            self.check()  # before the alarm could interrupt this
            yield
        except RuntimeError as error:
            raise self.lost(suspects, where, error) from error
        finally:
            self._in_process_group = False
        self.waits_for(())

    def lost(self, peers: list[int], where: str, error: RuntimeError) -> PacelineError:
        """What a failed call says of these peers; without any, of whoever cannot be reached."""
        reason, where = reason_of(error), f" {where}" if where else ""
        if self.alarmed:  # the launcher knows who
            return WorkerLost(f"Rank {self.rank}: another worker was lost{where}. [{reason}]")
        silent = peers and "imed out" in reason
        gone = peers if silent else self._gone(peers)
        named = name_ranks(gone) if gone else "another worker"
        what = f"{named} sent nothing for {self.timeout:.0f} s (timeout_seconds)" if silent else f"lost {named}"
        kind = WorkerSilent if silent else WorkerLost
        lost = kind(f"Rank {self.rank}: {what}{where}. See the output of {named} for the cause. [{reason}]")
        return self.explain(lost)

    def _gone(self, peers: list[int]) -> list[int]:
        """These workers and all others whose connection is broken: the one that was lost first is among them."""
        gone = set(peers)
        for peer in range(self.size):
            if peer != self.rank and self.transport.capabilities.blocking_wait:
                try:
                    dist.isend(torch.zeros(1), peer, tag=_PROBE_TAG)
                except RuntimeError:
                    gone.add(peer)
        return sorted(gone)
