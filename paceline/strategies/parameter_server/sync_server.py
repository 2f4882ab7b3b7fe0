"""Synchronous parameter servers: mode sync of ``strategies.parameter_server.strategy``.

::

    worker 0   F0 B0 F1 B1 ─ push ┐                               ┌ pull ─ F0 B0 ...
    worker 1   F2 B2 ─ push       ┼ server 0: add up ─ update ─ flip ┤
    worker 2   F3 B3 ─ push       ┴ server 1: add up ─ update ─ flip ┴ pull ─ F3 B3 ...

The step is that of ``strategies.data_parallel.allreduce``, with the same shares and the same sums, along the canonical
tree with ``exact``. Only the update differs: each server updates its shard, with its part of the optimizer state, and
the workers copy the weights. So the bits are those of all-reduce. Synchronizing copies the optimizer states to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.comm.servers.shard import Shard, cut
from paceline.data.feed import MicrobatchGroup
from paceline.errors import WorkerLost
from paceline.schedule.shares import even
from paceline.step.context import StepResult, TrainingContext
from paceline.step.probes.optimizer_probe import check_draws
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.backup_workers import BackupWorkers
from paceline.strategies.data_parallel.norms import GlobalNorm
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.parameter_server.async_server import servers_among, warnings_of_servers
from paceline.strategies.parameter_server.network_sync import NetworkServers
from paceline.strategies.parameter_server.sharing import shared_memory_of

_TAGS = 1 << 12  # first tag of the gradients, the same as in all-reduce


class SyncServer(Strategy):
    """Strategy in which all workers push gradients to servers, and pull the updated weights.

    With backup workers the servers wait for the first N of N + b workers, and drop later gradients.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._servers: Servers | NetworkServers
        names = [*context.update.parameters][::-1]
        values = [context.update.parameters[name].detach() for name in names]
        exchange: DirectExchange | SharedMemoryExchange
        if context.world.shared_memory is None:
            self._servers = servers = NetworkServers(context)
            homes = [servers.homes[name] for name in names]
            exchange = DirectExchange(context.world, _TAGS, homes=homes, copies=servers.copies)
        else:
            self._servers = Servers(context)
            homes = [self._servers.homes[name] for name in names]
            exchange = SharedMemoryExchange(context.world.shared_memory, homes)
        reduction = Reduction(context.world, exchange, values, context.events, "pushes")
        backup = bool(context.settings.backup.workers)
        self._reducer = Reducer(context, reduction=reduction, overlap=not backup)
        self._norm = GlobalNorm(context.world)
        self._workers: AllReduce | BackupWorkers
        if backup:
            self._workers = BackupWorkers(context, self._reducer, self._apply)
        else:
            self._workers = AllReduce(context, self._reducer, self._shares, self._apply)
        self._before: tuple[int, list[tuple[torch.Tensor, torch.Tensor]]] = (0, [])
        context.warnings.extend(warnings_of_servers(context))

    def _shares(self, microbatches: int) -> Sequence[range]:
        world = self._context.world
        if not self._context.settings.server.dedicated:
            return even(microbatches, world.size)
        servers = len(self._servers.shards)
        return (range(0),) * servers + even(microbatches, world.size - servers)

    def _apply(self, step: int) -> tuple[torch.Tensor, float]:
        self._servers.keep()
        return self._servers.apply(step, self._norm.of_gradients(self._context.update.parameters, self._servers.own))

    def groups(self, step: int) -> list[range]:
        return self._workers.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        buffers = [(value.data, value.detach().clone()) for value in self._context.compute.model.buffers()]
        self._before = self._servers.version, buffers
        result = self._workers.step(step, groups)
        if self._before[0] == 0 < self._servers.version:
            with contextlib.suppress(WorkerLost):  # the step is done; the next step detects the loss
                check_draws(self._context)
        return result

    def synchronize(self, steps: int) -> None:
        self._servers.read_states()

    def close(self) -> frozenset[str] | None:
        self._workers.close()
        owned = self._servers.put_back()
        version, buffers = self._before
        if version == self._servers.version:  # the buffers are one step ahead of the weights
            for now, before in buffers:
                now.copy_(before)
        return owned


class Servers:
    """Update in which each server updates its shard, and all workers copy the shards of the other servers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._memory = shared_memory_of(context)
        update, model = context.update, context.compute.model
        count = servers_among(context.settings, context.world.size)
        parts = cut(update.parameters, count)
        # shards of the parameters. The first ranks are their servers.
        self.shards = [Shard(self._memory, model, part, [], update.optimizer, update.schedule) for part in parts]
        # server of each parameter, by name
        self.homes = {name: next(home for home, part in enumerate(parts) if name in part) for name in update.parameters}
        # names of the parameters whose server is this worker
        self.own = {name for name, home in self.homes.items() if home == context.world.rank}
        self.version = 0  # number of updates made
        self._shard = self.shards[context.world.rank] if context.world.rank < count else None
        self._servers = range(count)
        self._flag = self._memory.reserve(1)
        self._kept = False
        self._has_states = True

    def keep(self) -> None:
        """Save the state before the first update, for survivors that continue without the update."""
        if self._shard is not None and not self._kept:
            self._shard.write(self.version % 2)
            self._kept = True

    def apply(self, step: int, norm: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Update this worker's shard from ``.grad``, if it is a server, and copy the shards of the other servers.

        Args:
            step: number of updates before this one.
            norm: global norm of the mean gradients, before clipping.
        """
        update, copy = self._context.update, (self.version + 1) % 2
        for name, parameter in update.parameters.items():
            if name not in self.own:
                parameter.grad = None
        if self._shard is not None:
            _, rate = update.apply(step, norm=norm)
            self._shard.write(copy)
            self._memory.announce(self._flag, self.version + 1)
        self._memory.wait(self._flag, self.version + 1, places=self._servers)
        if self._shard is None:  # after the wait: this worker keeps no schedule to go back to
            _, rate = update.apply(step, norm=norm, here=False)
        for shard in self.shards:
            if shard is not self._shard:
                shard.read(copy, states=False)
        self.version += 1
        self._has_states = False
        return norm, rate

    def read_states(self) -> None:
        """Take over the optimizer states from all servers."""
        if not self._has_states:
            for shard in self.shards:
                if shard is not self._shard:
                    shard.read_states(self.version % 2)
            self._has_states = True

    def put_back(self) -> None:
        """Restore the state after the last step that all servers have done, when a worker was lost."""
        if self.version > 0:
            for shard in self.shards:
                shard.read(self.version % 2)
        elif self._shard is not None and self._kept:
            self._shard.read(0)
        self._has_states = True
