"""World of a simulated worker: memberships and messages over the simulated network."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.transport.base import Message
from paceline.comm.transport.gloo import Gloo
from paceline.comm.world import World
from paceline.coordinator.types import Generation, Membership
from paceline.errors import WorkerLost, name_ranks
from simulator.hub import Hub, Process
from simulator.network import Box, Network


@dataclass
class Machines:
    """Objects that the workers of a run share."""

    hub: Hub
    network: Network
    random: Random  # random numbers that decide whether a worker identifies a lost peer
    boxes: dict[int, Box]  # received messages of each worker, by worker number
    processes: dict[int, Process]  # process of each worker, by worker number
    # worker numbers of each generation, as recorded by the first worker that entered it
    memberships: dict[int, tuple[int, ...]]
    arenas: dict[int, dict[int, int]]  # number of each worker's shared-memory arena, by generation and worker number
    leaving: set[int]  # numbers of the workers that leave the run voluntarily


class Broken(AssertionError):
    """Violation of an invariant of the simulated run."""


class SimulatedWorld(World):
    """World over the simulated network, and the formation of its memberships. A lost worker ends the waits for it."""

    was_dropped = False

    def __init__(self, machines: Machines, coordinator: CoordinatorClient, timeout: float) -> None:
        gloo = Gloo(same_host=False)  # its capabilities alone
        super().__init__(Membership(-1, 0, -1), gloo, gloo, timeout, coordinator)
        self._all, self._number = machines, coordinator.number
        self.clock = machines.hub.clock
        self._gathers = 0
        self._arena = self._arenas = 0
        self._box = machines.boxes.setdefault(self._number, Box())
        coordinator.on_alarm = machines.processes[self._number].wake

    def arena_handle(self) -> tuple[int, str]:
        return self._arena, "00"

    def join(self, generation: Generation) -> None:
        if generation.number <= self.generation:
            raise Broken(f"worker {self._number} entered {generation.number} after {self.generation}")
        self.was_dropped = self.was_dropped or 0 <= self.generation < generation.number - 1
        self.enter(generation.membership_of(self._number), self.transport)
        self._gathers = 0
        if generation.fenced:
            self._arenas += 1
            self._arena = self._arenas
        self._check_members()
        if self.size > 1:
            self.check()
            self.gather(None, "start")
            if self.alarmed:
                raise WorkerLost(f"Rank {self.rank}: another worker was lost while the workers were connecting.")

    def _check_members(self) -> None:
        """Raise Broken if workers disagree on the members, or a dropped worker knows this worker's memory."""
        numbers = self.membership.workers
        known = self._all.memberships.setdefault(self.generation, numbers)
        if known != numbers:
            raise Broken(f"generation {self.generation} has the members {known} and {numbers}")
        self._all.arenas.setdefault(self.generation, {})[self._number] = self._arena
        for generation, members in self._all.memberships.items():
            for other in members:
                dropped = other not in numbers and other not in self._all.leaving
                alive = dropped and not self._all.processes[other].ended
                if alive and self._all.arenas.get(generation, {}).get(self._number) == self._arena:
                    raise Broken(f"worker {other} was dropped, runs, and knows the memory of worker {self._number}")

    def leave(self) -> None:
        self.waits_for(())
        generation, number = self.generation, self._number
        for other in self.membership.workers:
            if other != number:
                self._all.network.carry(number, other, lambda other=other: self._close(other, generation))  # type: ignore[misc]

    def _close(self, other: int, generation: int) -> None:
        self._all.boxes.setdefault(other, Box()).closed.add((generation, self._number))
        self._all.processes[other].wake()

    def _exchange(self, own: bytes) -> list[bytes]:
        self._gathers += 1
        for rank in self.others:
            self._send(rank, self._gathers, own)
        return [own if rank == self.rank else self._receive(rank, self._gathers) for rank in range(self.size)]

    def start_transfers(
        self, sends: list[Message], receives: list[Message], where: str = "", over: Any = None, host: bool = False
    ) -> list[Any]:
        for one in sends:
            self._send(one.peer, f"tensor {one.tag}", one.tensor.clone())
        return [_Receive(self, one) for one in receives]

    def _send(self, rank: int, tag: Any, value: Any) -> None:
        if self._all.processes[self._number].ended:
            return
        other, key = self.membership.workers[rank], (self.generation, self._number, tag)

        def arrive() -> None:
            self._all.boxes.setdefault(other, Box()).messages[key].append(value)
            self._all.processes[other].wake()

        self._all.network.carry(self._number, other, arrive)

    def _receive(self, rank: int, tag: Any) -> Any:
        """Wait for a message and return it. Raise WorkerLost if a worker is lost."""
        hub, other = self._all.hub, self.membership.workers[rank]
        begin, came = hub.now, self._box.messages[self.generation, other, tag]
        self.waits_for([rank])
        try:
            while not came:
                self.check()
                if (self.generation, other) in self._box.closed:
                    ended = self._all.processes[other].ended and self._all.random.random() < 0.5
                    raise WorkerLost(f"Rank {self.rank}: lost {name_ranks([rank])}.", (rank,) if ended else ())
                self.check_silence([rank], hub.now - begin)
                hub.block(begin + self.timeout + 1e-6)
        finally:
            self.waits_for(())
        return came.popleft()


class _Receive:
    """Handle of a pending receive."""

    def __init__(self, world: SimulatedWorld, message: Message) -> None:
        self._world, self._message = world, message

    def wait(self) -> None:
        tensor = self._world._receive(self._message.peer, f"tensor {self._message.tag}")
        self._message.tensor.copy_(tensor)
