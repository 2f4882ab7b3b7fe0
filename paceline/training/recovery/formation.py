"""Formation of this worker's memberships: rendezvous, shared memory, process group."""

from __future__ import annotations

import weakref
from dataclasses import replace

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
from paceline.comm.shm.arena import Arena, attach_hosts, attach_members, can_share
from paceline.comm.transport.base import Transport
from paceline.comm.transport.choice import transport_for
from paceline.comm.transport.gloo import Gloo
from paceline.comm.world import World
from paceline.coordinator.types import Generation, Membership
from paceline.environments.start import Identity
from paceline.errors import WorkerLost
from paceline.system.torch_internals import default_store


class Formation:
    """Forms the memberships of this worker, one after the other if the run has a coordinator.

    Attributes:
        world: messages between this worker and the others of the current membership.
    """

    def __init__(
        self, who: Identity, timeout: float, coordinator: CoordinatorClient | None = None, transport: str = "auto"
    ) -> None:
        self._who, self._wanted = who, transport if who.world_size > 1 else "auto"
        self._arena: Arena | None = None
        self._shares_device = False
        self._group = ProcessGroup(self._agree, timeout)
        device = devices.device_of(who)
        chosen = transport_for(device, can_share() and not devices.visible_gpus(), wanted=self._wanted)
        membership = Membership(who.rank, who.world_size, who.generation)
        self.world = World(membership, chosen, Gloo(same_host=False), timeout, coordinator, self._group)
        if coordinator is not None:
            coordinator.on_alarm = self._interrupt

    def rendezvous(self) -> None:
        """Join the workers that the environment describes.

        Raises:
            StartError: a worker has not joined before the timeout, or rank 0 cannot be reached.
        """
        world = self.world
        if world.size == 1:
            return
        if dist.is_initialized():  # the script or an earlier session has made a group
            self._agree(default_store(), world.rank, world.size)
        else:
            EnvRendezvous(self._who, world.timeout).join(lambda *at: self._agree(*at).backend)
        world.transport.open()
        seats = world.gather(tuple(seat_of(self._who)), "start")
        self._share_memory(replace(world.membership, hosts=hosts_of([Seat(*seat) for seat in seats])))
        world.recorder = self._record_calls()

    def join(self, generation: Generation) -> None:
        """Join the members of a generation, after :meth:`leave`."""
        world, coordinator = self.world, self.world.coordinator
        assert coordinator is not None
        world.enter(generation.membership_of(coordinator.number), world.transport)
        if generation.fenced:  # a dropped worker may resume and write into the old arenas
            self._arena = None
        if world.size == 1 and generation.number > 0:  # the script may have used a process group before
            self._group.enter(coordinator.open_store(), 0, 1)
            self._group.join()
        if world.size > 1:
            self._group.enter(coordinator.open_store(), world.rank, world.size)
            self._come_together(generation)
            recorder = self._record_calls()
            if world.shared_memory is not None:  # no worker may read calls of an earlier generation
                world.shared_memory.all_gather(b"")
            world.recorder = recorder

    def leave(self) -> None:
        """Leave the other workers without sending or waiting, because they may be gone or blocked."""
        patch.stop()
        if self.world.host_memory is not None:
            self.world.host_memory.give_up()
        self.world.enter(self.world.membership, self.world.transport)
        self._group.leave()

    def arena_handle(self) -> tuple[int, str] | None:
        """Return the handle by which workers on this machine open this arena, or None if it cannot be shared."""
        return self._own_arena().handle if self.world.transport.capabilities.same_host else None

    def _agree(self, store: Store, rank: int, size: int) -> Transport:
        """Agree with the other workers at a store on the devices of all, and return the transport for this device."""
        world = self.world
        chosen = devices.agree(store, rank, size, world.device)
        if chosen != (world.device, self._shares_device):
            device, self._shares_device = chosen
            world.enter(world.membership, transport_for(device, False, self._shares_device, self._wanted))
        return world.transport

    def _come_together(self, generation: Generation) -> None:
        """Connect the members, through shared memory alone if all of them are known to be on one machine.

        torch's group then forms during training: it takes 0.1 seconds, and only the script may need it.
        """
        world, membership = self.world, self.world.membership
        world.host_transport.open()
        if len(membership.hosts) == 1 and not generation.fenced and world.transport.capabilities.same_host:
            memory = attach_members(world, self._own_arena(), generation.members, generation.number)
            if memory is not None:
                world.enter(membership, world.transport, memory)
                self._group.join_soon()
                return
        world.check()  # an earlier alarm does not interrupt join()
        try:
            self._group.join()
            if world.alarmed:  # raised while the connections were made
                raise WorkerLost(f"Rank {world.rank}: another worker was lost while the workers were connecting.")
        except RuntimeError as error:
            raise WorkerLost(f"Rank {world.rank}: could not reach the others: {reason_of(error)}.") from error
        self._share_memory(membership)

    def _share_memory(self, membership: Membership) -> None:
        """Share memory with the workers of the same machine. All workers of the run must call this method together."""
        world = self.world
        world.enter(membership, world.transport)
        if max(map(len, membership.hosts)) > 1:
            arena = self._own_arena() if world.transport.capabilities.same_host else None
            world.enter(membership, world.transport, attach_hosts(world, arena, world.gather))

    def _own_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena

    def _interrupt(self) -> None:
        """End the calls that block on the network after a loss. Waits in shared memory check the alarm themselves."""
        if self.world.shared_memory is None or self.world.in_process_group:
            self.world.host_transport.abort()
            self._group.interrupt()

    def _record_calls(self) -> CallRecorder:
        world = self.world
        if world.shared_memory is not None:
            board: Board = SharedMemoryBoard(world.shared_memory, world.rank)
        else:
            board = StoreBoard(default_store(), world.rank, world.size)
        recorder = CallRecorder(world.rank, board, weakref.WeakMethod(world.lost))
        patch.record_in(recorder, world.await_process_group, world.add_wait)
        return recorder
