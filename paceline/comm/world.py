"""Gathers of values and transfers of tensors between the workers of a membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.comm.desync.recorder import CallRecorder
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.rendezvous.process_group import ProcessGroup
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.ring import Rings, can_have
from paceline.comm.transport.base import Communicator, Message, Transport, TransportError
from paceline.comm.transport.gather import all_gather_bytes
from paceline.comm.values import decode, encode_call
from paceline.comm.waiting import RecordedTransfer, Transfer, Waiting
from paceline.coordinator.types import Membership
from paceline.errors import DisagreementError, WorkerLost

PENDING, LEAVING = 1, 2  # notices in step headers: the membership is about to change; this worker is about to leave

_POLL_SECONDS = 0.02
_PROBE_TAG = (1 << 28) - 8  # the MPI back end reserves the tags above
_WITHIN = ("start", "step", "audit")
"""Gathers that are part of another recorded call, and so are not recorded themselves."""


class World(Waiting):
    """Messages between this worker and the others of its membership, over a transport or through shared memory.

    ``training.recovery.formation`` forms memberships. A world runs over any :class:`Transport`, such as the one between
    threads (``paceline.testing.threads``).

    Attributes:
        host_memory: memory of this machine's workers. None if any worker of the run is on a GPU or cannot share memory.
        latency: seconds until a small message reaches all workers. None before it is measured, and if memory is shared.
        link_shares: share of a reduction that each machine adds up, by the speed of its link. None until measured.
        recorder: recorder of the script's calls of ``torch.distributed``. None in a single process.
        end_servers: stops this worker's parameter servers, which others read until the next membership has formed.
    """

    recorder: CallRecorder | None = None
    host_memory: SharedMemory | None = None
    latency: float | None = None
    link_shares: list[float] | None = None

    def __init__(
        self,
        membership: Membership,  # workers, including this one
        transport: Transport,  # transport of tensors on this worker's device
        host_transport: Transport,  # transport of tensors on the CPU
        timeout: float,  # timeout in seconds of a wait for another worker
        coordinator: CoordinatorClient | None = None,
        group: ProcessGroup | None = None,  # torch's process group, if it may form in the background
    ) -> None:
        super().__init__(membership, timeout, coordinator)
        self.transport, self.host_transport = transport, host_transport
        self.leaving = False
        self.end_servers: Callable[[], None] = lambda: None
        self._group = group
        self._rings: dict[int, Rings] = {}

    def enter(self, membership: Membership, transport: Transport, host_memory: SharedMemory | None = None) -> None:
        """Replace the membership and its transports. Ends waits for workers of the earlier membership."""
        self.waits_for(())
        self.take_waits()  # recorded waits have the ranks of the earlier membership
        self.membership, self.transport, self.host_memory = membership, transport, host_memory
        self.recorder, self.latency, self.link_shares, self._rings = None, None, None, {}

    @property
    def generation(self) -> int:
        """Number of membership changes."""
        return self.membership.generation

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the workers on each machine."""
        return self.membership.hosts

    @property
    def device(self) -> torch.device:
        """Device on which this worker computes. A spare is on the CPU until it joins."""
        return self.transport.capabilities.device

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Memory shared by all workers. None if they are on several machines or on GPUs."""
        return self.host_memory if len(self.hosts) == 1 else None

    def worker_ids(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers of the worker processes with these ranks."""
        return [self.membership.workers[rank] for rank in ranks]

    def await_process_group(self) -> None:
        """Wait until torch's process group has formed, if it is forming in the background."""
        while self._group is not None and self._group.is_connecting(_POLL_SECONDS):
            self.check()

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

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a value of each worker in rank order. ``values`` defines the types that can be sent."""
        if self.size == 1:
            return [value]
        is_recorded = self.recorder and what not in _WITHIN
        calls = self.recorder.barrier(f"session.{what}", what) if self.recorder and is_recorded else (0.0, 0.0)
        with self.awaiting(f"in a gather of all workers ({what})"):
            values = self._read(self._exchange(encode_call(what, value, calls)))
        if any(call != what for call, *_ in values):
            places = ", ".join(f"rank {rank} in {call}" for rank, (call, *_) in enumerate(values))
            raise DisagreementError(
                f"The workers are at different places: {places}. All must call the same methods in the same order; "
                f"look for code that only some ranks run."
            )
        if self.recorder and is_recorded:
            self.recorder.check_agreement([calls for *_, calls in values])
        return [value for _, value, _ in values]

    def _read(self, messages: list[bytes]) -> list[Any]:
        values: list[Any] = []
        for rank, message in enumerate(messages):
            try:
                values.append(decode(message))
            except ValueError as error:
                raise WorkerLost(f"Rank {self.rank}: the message of rank {rank} cannot be read: {error}.") from error
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
        where, transport = where or self.purpose, self.host_transport if host else self.transport
        try:
            started = transport.start(sends, receives, over)
        except TransportError as error:
            raise self.lost(error.peers, where, error) from error
        if self.mark is None:
            return [Transfer(self, work, peers, where) for work, peers in started]
        sizes = [("receive", one.tensor.nbytes) for one in receives] + [("send", one.tensor.nbytes) for one in sends]
        if len(started) != len(sizes):  # the transport has one handle for all messages
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
            self.check()  # an abort ends the device's waits although no data came

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
                self.host_transport.start([Message(torch.zeros(1), peer, _PROBE_TAG)], [])
            except TransportError:
                broken.append(peer)
        return broken
