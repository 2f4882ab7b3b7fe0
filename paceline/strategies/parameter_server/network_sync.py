"""Update at servers on several machines: mode sync.

::

    server 0    means of shard 0 ┬ update ─ wait for the copy ─ weights ──┬ all workers
    its copy    means of shard 0 ┴ update ─ written                       │ pull ─ next step
    server 1    means of shard 1 ┬ update ...                             ┘

The worker with the copy of a shard receives the mean gradients as well, and makes the same update. A server hands out
weights only after both have made it. So after a loss a worker that has finished a step can restore the state after it,
and a worker that has not can restore the state before it: each holder keeps the two newest versions.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from paceline.comm.servers.rpc import Answer, holders
from paceline.comm.servers.shard import OwnBlocks, Shard, cut
from paceline.errors import WorkerLost
from paceline.step.context import TrainingContext
from paceline.strategies.parameter_server.async_server import servers_among
from paceline.strategies.parameter_server.sharing import connect_servers, copies_of

_SLICE_SECONDS = 0.1
"""Longest time that a server holds a request before it answers that the update has not been made yet."""
_PART_SECONDS = 10.0  # timeout for a holder to send its shard while the workers re-form


class NetworkServers:
    """Update in which each server updates its shard, and all workers pull the shards of the other servers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._peers = connect_servers(context)
        update, rank = context.update, context.world.rank
        count = servers_among(context.settings, context.world.size)
        parts = cut(update.parameters, count)
        memory, model = OwnBlocks(), context.compute.model
        # shards of the parameters, in the memory of this worker. The first ranks are their servers.
        self.shards = [Shard(memory, model, part, [], update.optimizer, update.schedule) for part in parts]
        # server of each parameter, by name
        self.homes = {name: next(home for home, part in enumerate(parts) if name in part) for name in update.parameters}
        self._holders = [holders(self._peers, home, copies_of(context)) for home in range(count)]
        # for each server, the ranks with a copy of its shard. Servers without a copy are left out.
        self.copies = {home: one[1:] for home, one in enumerate(self._holders) if len(one) > 1}
        # names of the parameters whose server is this worker
        self.own = {name for name, home in self.homes.items() if home == rank}
        self.version = 0  # number of updates made
        self._parts = parts
        self._held = [home for home, one in enumerate(self._holders) if rank in one]
        self._here = {name for home in self._held for name in parts[home]}
        self._order = [home for place in range(count) if (home := (rank + place) % count) not in self._held]
        self._kept, self._has_states = False, True
        self._changed = threading.Condition()
        self._written = self._given = -1  # newest version in local shards, and open to pulls
        for name in ("written", "weights", "fetch"):
            self._peers.server.serve(f"shard.{name}", getattr(self, f"_answer_{name}"))

    def keep(self) -> None:
        """Save the state before the first update, for survivors that continue without the update."""
        if not self._kept:
            for shard in self.shards:
                shard.write(0)
            self._kept = True
            self._announce(written=0)

    def apply(self, step: int, norm: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Update the shards that this worker holds from ``.grad``, and pull the others."""
        update, version = self._context.update, self.version + 1
        for name, parameter in update.parameters.items():
            if name not in self._here:
                parameter.grad = None
        _, rate = update.apply(step, norm=norm, here=bool(self._held))
        for home in self._held:
            self.shards[home].write(version % 2)
        self._announce(written=version)
        if self._context.world.rank in self.copies:
            (copy,), world = self.copies[self._context.world.rank], self._context.world
            with world.awaiting("to update its copy of a shard"), world.waiting_for([copy]):
                begin = time.monotonic()
                while not self._peers.client(copy).ask("shard.written", version)[0]:
                    world.check_silence([copy], time.monotonic() - begin)
        self._announce(given=version)
        self._pull(version)
        self.version = version
        self._has_states = False
        return norm, rate

    def _pull(self, version: int) -> None:
        """Pull the weights of the shards that this worker does not hold."""
        world, turn = self._context.world, version % max(1, len(self._order))
        waiting = self._order[turn:] + self._order[:turn]  # each comes first in turn
        with world.awaiting("to pull weights"), world.waiting_for(waiting):
            begin = time.monotonic()
            while waiting:
                world.check_silence(waiting, time.monotonic() - begin)
                for home in waiting:
                    self._peers.client(home).start("shard.weights", version)
                answers = {home: self._peers.client(home).finish() for home in waiting}
                for home, (ready, data) in answers.items():
                    if ready:
                        self.shards[home].weights(version % 2)[:] = data
                        self.shards[home].read(version % 2, states=False)
                waiting = [home for home, (ready, _) in answers.items() if not ready]

    def read_states(self) -> None:
        """Take over the optimizer states from all servers."""
        if self._has_states:
            return
        for home in self._order:
            self.shards[home].fill(self.version % 2, self._peers.client(home).ask("shard.fetch", self._words(home))[1])
            self.shards[home].read_states(self.version % 2)
        self._context.world.gather(None, "step")  # no worker ends while another still reads from it
        self._has_states = True

    def put_back(self) -> frozenset[str] | None:
        """Restore the state after the last step that all servers have done, when a worker was lost.

        Returns:
            Names of the parameters and buffers that could be restored. None if all of them could.
        """
        lost: list[str] = []
        for home, shard in enumerate(self.shards) if self._kept else ():
            if self.version > 0 and home not in self._held and not self._has_states:
                found = self._fetch(home)
                if found is None:
                    lost += self._parts[home]
                    continue
                shard.fill(self.version % 2, found)
            shard.forget()
            shard.read(self.version % 2)
        self._has_states = True
        model = self._context.compute.model
        everything = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        return frozenset(everything.difference(lost)) if lost else None

    def _fetch(self, home: int) -> bytearray | None:
        """Return a whole shard from a worker that still has it, or None if no worker has."""
        for rank in self._holders[home]:
            if not self._context.world.is_missing(rank):
                try:
                    return self._peers.parting(rank, _PART_SECONDS).ask("shard.fetch", self._words(home))[1]
                except WorkerLost:
                    continue
        return None

    def _words(self, home: int) -> tuple[int, int]:
        return home, self.version

    # In the threads that answer other workers.

    def _announce(self, written: int = -1, given: int = -1) -> None:
        with self._changed:
            self._written, self._given = max(self._written, written), max(self._given, given)
            self._changed.notify_all()

    def _answer_written(self, rank: int, version: int, data: bytearray) -> Answer:
        with self._changed:
            return self._changed.wait_for(lambda: self._written >= version, _SLICE_SECONDS), ()

    def _answer_weights(self, rank: int, version: int, data: bytearray) -> Answer:
        with self._changed:
            ready = self._changed.wait_for(lambda: self._given >= version, _SLICE_SECONDS)
        own = self._context.world.rank
        return ready, (self.shards[own].weights(version % 2),) if ready else ()

    def _answer_fetch(self, rank: int, words: Any, data: bytearray) -> Answer:
        home, version = words
        if home not in self._held or version not in (self._written, self._written - 1):
            raise WorkerLost(f"version {version} of shard {home} was asked for, and the newest is {self._written}.")
        return None, self.shards[home].contents(version % 2)
