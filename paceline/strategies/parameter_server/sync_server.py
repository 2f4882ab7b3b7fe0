"""Servers that wait for all workers: mode sync of ``strategies.parameter_server.strategy``.

::

    worker 0   F0 B0 F1 B1 ─ push ┐                               ┌ pull ─ F0 B0 ...
    worker 1   F2 B2 ─ push       ┼ server 0: add up ─ update ─ flip ┤
    worker 2   F3 B3 ─ push       ┴ server 1: add up ─ update ─ flip ┴ pull ─ F3 B3 ...

The step is that of ``strategies.data_parallel.allreduce``: the same shares, the same sums, with ``exact`` along the
canonical tree. Only the update is not made by everybody: each server makes that of its shard, with its part of the
optimizer's state, and the workers copy the weights. So the bits are those of all-reduce. When they settle, all get all
states.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from paceline.comm.all_gather import AllGather
from paceline.comm.reduction.bucketed import BucketedReduction
from paceline.comm.reduction.to_servers import PushReduction
from paceline.comm.servers.shard import Shard, cut
from paceline.data.feed import Piece
from paceline.errors import WorkerLost
from paceline.schedule.shares import even
from paceline.step.job import Job, StepResult
from paceline.step.optimizer import Update
from paceline.step.optimizer_probe import check_drawn
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.backup_workers import BackupWorkers
from paceline.strategies.parameter_server.async_server import servers_among, warnings_of_servers
from paceline.strategies.parameter_server.async_steps import shared_memory_of

_NORMS = 3
"""The tag of the servers' notes."""


class SyncServer(AllReduce):
    """All workers push to servers, and pull what comes out."""

    def __init__(self, job: Job) -> None:
        shared_memory_of(job)
        self._served = Served(job)
        self._before: tuple[int, list[tuple[torch.Tensor, torch.Tensor]]] = (0, [])
        super().__init__(replace(job, update=cast(Update, self._served)))
        job.warnings.extend(warnings_of_servers(job))

    def _exchange_of(self, job: Job) -> BucketedReduction | None:
        homes = list(self._served.homes.values())[::-1]
        values = [value.detach() for value in job.update.parameters.values()][::-1]
        return PushReduction(job.world, shared_memory_of(job), values, homes, job.events)

    def _shares(self, step: int) -> tuple[range, ...]:
        parts, world = len(self._job.order.parts_of(step)), self._job.world
        if not self._job.settings.server.dedicated:
            return even(parts, world.size)
        servers = len(self._served.shards)
        return (range(0),) * servers + even(parts, world.size - servers)

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        buffers = [(value.data, value.detach().clone()) for value in self._job.compute.model.buffers()]
        self._before = self._served.version, buffers
        outcome = super().step(step, pieces)
        if self._before[0] == 0 < self._served.version:
            with contextlib.suppress(WorkerLost):  # the step is done; the next one finds the loss
                check_drawn(self._job)
        return outcome

    def synchronize(self, steps: int) -> None:
        self._served.take_states()

    def close(self) -> None:
        super().close()
        self._served.put_back()
        version, buffers = self._before
        if version == self._served.version:  # the buffers are one step ahead of the weights
            for now, before in buffers:
                now.copy_(before)


class SyncServerWithBackup(SyncServer, BackupWorkers):
    """Servers that wait for the first N of N + b workers; what comes later is dropped, as in
    ``strategies.data_parallel.backup_workers``."""


class Served:
    """The update in the place of ``step.optimizer.Update``: each server makes its part, and all take over the rest.

    Attributes:
        shards: of the parameters; the first ranks are their servers.
        homes: the server of each parameter, by name.
        optimizer: of all parameters.
        version: updates made.
    """

    def __init__(self, job: Job) -> None:
        self._world = job.world
        self._update = update = job.update
        self._memory = shared_memory_of(job)
        count = servers_among(job.settings, job.world.size)
        parts = cut(update.parameters, count)
        model = job.compute.model
        self.shards = [Shard(self._memory, model, part, [], update.optimizer, update.schedule) for part in parts]
        self.parameters, self.optimizer = update.parameters, update.optimizer
        self.homes = {name: next(home for home, part in enumerate(parts) if name in part) for name in update.parameters}
        self.check_frozen = update.check_frozen
        self._servers = range(count)
        self._flag = self._memory.reserve(1)
        self._norms = AllGather(job.world, _NORMS, 8 * len(update.parameters))
        self.version = 0
        self._kept = False
        self._has_states = True

    @property
    def learning_rate(self) -> float:
        """That of the update."""
        return self._update.learning_rate

    @property
    def drew(self) -> bool | None:
        """Whether the first update that was made here drew random numbers."""
        return self._update.drew

    @property
    def _own(self) -> Shard | None:
        return self.shards[self._world.rank] if self._world.rank < len(self.shards) else None

    def apply(self, step: int) -> tuple[torch.Tensor, float]:
        """Update this server's shard from its ``.grad``, if this is a server, and take over those of the others."""
        copy = (self.version + 1) % 2
        if self._own is not None and not self._kept:
            self._own.write(self.version % 2)  # for those that go on without this step
            self._kept = True
        norm = self._norm()
        for name, parameter in self.parameters.items():
            if self.homes[name] != self._world.rank:
                parameter.grad = None
        _, rate = self._update.apply(step, norm=norm, here=self._own is not None)
        if self._own is not None:
            self._own.write(copy)
            self._memory.announce(self._flag, self.version + 1)
        self._memory.wait(self._flag, self.version + 1, ranks=self._servers)
        for shard in self.shards:
            if shard is not self._own:
                shard.read(copy, states=False)
        self.version += 1
        self._has_states = False
        return norm, rate

    def _norm(self) -> torch.Tensor:
        """The global norm, from the norms of all gradients at their servers."""
        own = torch.full((len(self.parameters),), -1.0, dtype=torch.float64)
        given: list[tuple[int, nn.Parameter]] = [
            (place, parameter)
            for place, (name, parameter) in enumerate(self.parameters.items())
            if self.homes[name] == self._world.rank and parameter.grad is not None
        ]
        norms = torch._foreach_norm([cast(torch.Tensor, parameter.grad) for _, parameter in given]) if given else []
        for (place, _), norm in zip(given, norms, strict=True):
            own[place] = norm
        tables = self._norms.start(own).wait()
        known = [
            tables[self.homes[name]][place].to(parameter.dtype)
            for place, (name, parameter) in enumerate(self.parameters.items())
            if tables[self.homes[name]][place] != -1.0
        ]
        if not known:
            return torch.zeros(())
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(known))
        return total

    def take_states(self) -> None:
        """Take over the optimizer's states from all servers."""
        if not self._has_states:
            for shard in self.shards:
                if shard is not self._own:
                    shard.read_states(self.version % 2)
            self._has_states = True

    def put_back(self) -> None:
        """After a loss: have the state after the last step that was done by all servers."""
        if self.version > 0:
            for shard in self.shards:
                shard.read(self.version % 2)
        elif self._own is not None and self._kept:
            self._own.read(0)
        self._has_states = True
