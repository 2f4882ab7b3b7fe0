"""Workers of one run: rendezvous, gathers of values, and transfers of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.comm.desync import patch
from paceline.comm.desync.board import Board, SharedMemoryBoard, StoreBoard
from paceline.comm.desync.recorder import CallRecorder
from paceline.comm.rendezvous import devices
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.rendezvous.env_init import EnvRendezvous, reason_of
from paceline.comm.rendezvous.machines import Seat, hosts_of, seat_of
from paceline.comm.rendezvous.process_group import ProcessGroup
from paceline.comm.shm.arena import Arena, SharedMemory, attach_hosts, attach_members, can_share
from paceline.comm.shm.ring import Rings, can_have
from paceline.comm.transport.base import Communicator, Message, Transport, TransportError
from paceline.comm.transport.choice import transport_for
from paceline.comm.transport.gather import all_gather_bytes
from paceline.comm.transport.gloo import Gloo
from paceline.comm.values import decode, encode_call
from paceline.comm.waiting import RecordedTransfer, Transfer, Waiting
from paceline.coordinator.types import Membership, neighbours
from paceline.environments.start import Identity
from paceline.errors import (
    DisagreementError,
    WorkerLost,
)
from paceline.system.torch_internals import default_store

PENDING, LEAVING = 1, 2
"""Notices in step headers: the membership is about to change; this worker is about to leave."""

_POLL_SECONDS = 0.02
_PROBE_TAG = (1 << 28) - 8  # the MPI back end reserves the tags above
_WITHIN = ("start", "step", "audit")
"""Gathers that are part of another recorded call, and so are not recorded themselves."""


class World(Waiting):
    """This worker's view of all workers of a run, which may change if the run has a coordinator.

    Attributes:
        device: device on which this worker computes. A spare is on the CPU until it joins.
        transport: transport of tensors between workers.
        generation: number of membership changes.
        hosts: ranks of the workers on each machine.
        host_memory: memory shared by this machine's workers. None if any worker of the run is on a GPU or cannot share.
        recorder: recorder of the script's calls of ``torch.distributed``. None in a single process.
        end_servers: stops this worker's parameter servers, which others read until the next membership has formed.
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
        self.leaving = False
        self._rings: dict[int, Rings] = {}
        self.end_servers: Callable[[], None] = lambda: None
        self._arena: Arena | None = None
        self._group = ProcessGroup(self._agree, timeout)
        if coordinator is not None:
            coordinator.on_alarm = self._interrupt

    def rendezvous(self) -> None:
        """Join the workers that the environment describes.

        Raises:
            StartError: a worker has not joined before the timeout, or rank 0 cannot be reached.
        """
        if self.size > 1 and not dist.is_initialized():
            EnvRendezvous(self._who, self.timeout).join(lambda *at: self._agree(*at).backend)
        elif self.size > 1:  # the script or an earlier session has made a group
            self._agree(default_store(), self.rank, self.size)
        if self.size > 1:
            self.transport.open()
            seats = self.gather(tuple(seat_of(self._who)), "start")
            self._share_memory(hosts_of([Seat(*seat) for seat in seats]))
            self.recorder = self._record_calls()

    def _agree(self, store: Store, rank: int, size: int) -> Transport:
        """Agree with the other workers at a store on the devices of all, and return the transport for this device."""
        chosen = devices.agree(store, rank, size, self.device)
        if chosen != (self.device, self._shares_device):
            self.device, self._shares_device = chosen
            self.transport = transport_for(self.device, False, self._shares_device, self._wanted)
        return self.transport

    def join(self, membership: Membership) -> None:
        """Join the members of a generation, after :meth:`leave`."""
        assert self.coordinator is not None
        self._members, self.generation = membership.members, membership.generation
        self.rank, self.size = membership.rank_of(self.coordinator.number), len(self._members)
        machines = [(one.host, one.address) for one in self._members]
        near = neighbours(self._members, self.rank)
        self.local_rank, self.local_size = near.index(self.rank), len(near)
        if membership.fenced:  # a dropped worker may resume and write into the old arenas
            self._arena = None
        if self.size == 1 and self.generation > 0:  # the script may have used a process group before
            self._group.enter(self.coordinator.open_store(), 0, 1)
            self._group.join()
        if self.size > 1:
            self._come_together(membership, machines)
            recorder = self._record_calls()
            if self.shared_memory is not None:  # no worker may read calls of an earlier generation
                self.shared_memory.all_gather(b"")
            self.recorder = recorder

    def _come_together(self, membership: Membership, machines: Sequence[tuple[str, str]]) -> None:
        """Connect the members, through shared memory alone if all of them are known to be on one machine.

        torch's group then forms during training: it takes 0.1 seconds, and only the script may need it.
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
        self.check()  # an earlier alarm does not interrupt join()
        try:
            self._group.join()
            if self.alarmed:  # raised while the connections were made
                raise WorkerLost(f"Rank {self.rank}: another worker was lost while all came together.")
        except RuntimeError as error:
            raise WorkerLost(f"Rank {self.rank}: could not reach the others: {reason_of(error)}.") from error
        hosts = [[rank for rank, one in enumerate(machines) if one == machine] for machine in dict.fromkeys(machines)]
        self._share_memory(tuple(map(tuple, hosts)))

    def leave(self) -> None:
        """Leave the other workers without sending or waiting, because they may be gone or blocked."""
        patch.stop()
        if self.host_memory is not None:
            self.host_memory.give_up()
        self.host_memory = self.recorder = None
        self.waits_for(())
        self._rings = {}
        self._group.leave()

    def arena_handle(self) -> tuple[int, str] | None:
        """Return the handle by which workers on this machine open this arena, or None if it cannot be shared."""
        return self._own_arena().handle if self.transport.capabilities.same_host else None

    def worker_ids(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers of the worker processes with these ranks."""
        return [self._members[rank].worker for rank in ranks]

    def await_process_group(self) -> None:
        """Wait until torch's process group has formed, if it is forming in the background."""
        while self._group.is_connecting(_POLL_SECONDS):
            self.check()

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Memory shared by all workers. None if they are on several machines or on GPUs."""
        return self.host_memory if len(self.hosts) == 1 else None

    def _share_memory(self, hosts: tuple[tuple[int, ...], ...]) -> None:
        """Share memory with the workers of the same machine. All workers of the run must call this method together."""
        self.hosts = hosts
        if max(map(len, hosts)) > 1:
            arena = self._own_arena() if self.transport.capabilities.same_host else None
            self.host_memory = attach_hosts(self, arena, hosts, self.gather)

    def _own_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena

    def _interrupt(self) -> None:
        """End the calls that block on the network after a loss. Waits in shared memory check the alarm themselves."""
        if self.shared_memory is None or self.in_process_group:
            self._host_transport.abort()
            self._group.interrupt()

    def rings(self, count: int) -> Rings | None:
        """Return ``count`` ring buffers per pair of workers, or None without shared memory or with too many workers.

        All workers must call this method together.
        """
        if self.shared_memory is None or not can_have(self.size, count):
            return None
        if count not in self._rings:
            self._rings[count] = Rings(self.shared_memory, self.size, count)
        return self._rings[count]

    def notice(self) -> int:
        """Return the notice for the step header: ``LEAVING``, ``PENDING`` or 0."""
        if self.leaving:
            return LEAVING
        return PENDING if self.coordinator is not None and self.coordinator.pending > self.generation else 0

    def request_leave(self) -> None:
        """Request to leave the run after the current step. Signal handlers may call this method."""
        self.leaving = True

    def become_single(self) -> None:
        """Become the only worker of the run, because the others are gone or about to end."""
        self.rank, self.size, self.local_size, self.hosts = 0, 1, 1, ((0,),)

    def _record_calls(self) -> CallRecorder:
        if self.shared_memory is not None:
            board: Board = SharedMemoryBoard(self.shared_memory, self.rank)
        else:
            board = StoreBoard(default_store(), self.rank, self.size)
        recorder = CallRecorder(self.rank, board, weakref.WeakMethod(self.lost))
        patch.record_in(recorder, self.await_process_group)
        return recorder

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a value of each worker in rank order. ``values`` defines the types that can be sent."""
        if self.size == 1:
            return [value]
        met = self.recorder and what not in _WITHIN
        made = self.recorder.barrier(f"session.{what}", what) if self.recorder and met else (0.0, 0.0)
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
        where: str = "",  # purpose of the transfers, for errors. Defaults to :attr:`purpose`.
        over: Communicator | None = None,
        host: bool = False,  # whether the tensors are on the CPU. By default they are on the device of this worker.
    ) -> list[Transfer]:
        """Start sends and receives, and return their transfers. The caller must wait for each transfer."""
        if not sends and not receives:
            return []
        where, transport = where or self.purpose, self._host_transport if host else self.transport
        try:
            started = transport.start(sends, receives, over)
        except TransportError as error:
            raise self.lost(error.peers, where, error) from error
        if self.mark is None:
            return [Transfer(self, work, peers, where) for work, peers in started]
        sizes = [("receive", one.tensor.nbytes) for one in receives] + [("send", one.tensor.nbytes) for one in sends]
        if len(started) != len(sizes):  # one work for all of them
            sizes = [("exchange", sum(size for _, size in sizes))]
        pairs = zip(started, sizes, strict=True)
        return [RecordedTransfer(self, work, peers, where, *size) for (work, peers), size in pairs]

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Open this worker's communicators, if the transport is ordered. All workers must call it in the same order."""
        own = sorted({one for one in communicators if self.rank in one[1:] and one.sender != one.receiver})
        if own and self.transport.capabilities.ordered:
            with self.waiting_in_group(self.others, [], "while the workers connected"):
                self.transport.open_communicators(own)

    def start_all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """Start an in-place sum over all workers, in no fixed order. The caller must wait for the transfer."""
        self.await_process_group()
        try:
            work = self.transport.all_reduce(tensor)
        except RuntimeError as error:
            raise self.lost([], self.purpose, error) from error
        if self.mark is None:
            return Transfer(self, work, [], self.purpose)
        return RecordedTransfer(self, work, [], self.purpose, "all-reduce", tensor.nbytes)

    def synchronize(self) -> None:
        """Synchronize with the device if the transport's waits do not block. Received tensors are valid on return.

        Raises:
            WorkerLost: another worker was lost or timed out. Received tensors may be garbage.
        """
        if self.transport.capabilities.blocking_wait:
            return
        with self.waiting_in_group(self.others, [], self.purpose):
            self.transport.synchronize(self._check_peers)
            self.check()  # an abort ends the waits of the device without data

    def _check_peers(self, waited: float) -> None:
        self.check()
        self.check_silence([], waited)

    def confirm(self, step: int) -> None:
        """Confirm before an update that all workers have their tensors, if the transport's waits do not block."""
        if self.size > 1 and not self.transport.capabilities.blocking_wait:
            self.synchronize()
            self.gather(step, "step")

    def broken_connections(self) -> list[int]:
        """Return the ranks to which the connection is broken. The worker that was lost first is among them."""
        broken = []
        for peer in self.others if self.transport.capabilities.blocking_wait else ():
            try:
                dist.isend(torch.zeros(1), peer, tag=_PROBE_TAG)
            except RuntimeError:
                broken.append(peer)
        return broken
