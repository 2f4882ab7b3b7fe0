"""Sharded weights that every gradient updates on arrival: modes async and bounded of the parameter server.

::

    worker   wait until the weights are fresh enough ─ pull ─ compute ─ push ┬ too late: drop, the step is free again
                                                                             └ update the spare copy, flip

With ``server.scale_lr`` the learning rate of an update is divided by 1 + its delay (Zhang et al. 2015, arXiv
1511.05950). The worker that pushes a gradient makes the update; ``dedicated_server`` has separate processes for this.
"""

from __future__ import annotations

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.row_journal import RowJournal
from paceline.comm.servers.shard import Shard, cut
from paceline.settings import ServerSettings, Settings
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.parameter_server.async_steps import Gradients, Server, finish, update
from paceline.strategies.parameter_server.sharing import OnOneMachine


class ShardedServer(Server):
    """Server with two copies of the weights in shared memory: workers pull from one, updates go into the other."""

    def __init__(self, shared: OnOneMachine, computing: int) -> None:
        super().__init__(shared)
        context = self._context
        self._memory, self._claims = shared.memory, shared.claims
        self._settings = context.settings.server
        self._computing = computing  # steps per round
        count = servers_among(context.settings, context.world.size)
        buffers = [name for name, _ in context.compute.model.named_buffers()]
        self._shards = [
            Shard(
                self._memory,
                context.compute.model,
                part,
                [] if place else buffers,
                context.update.optimizer,
                context.update.schedule,
                context.sparse,
            )
            for place, part in enumerate(cut(context.update.parameters, count))
        ]
        context.warnings.extend(warnings_of_servers(context))
        tabled, optimizer = [one for one in self._shards if one.tables], context.update.optimizer
        # shards of which some parameters are tables with sparse gradients, and their journals
        self._tabled = [(one, RowJournal(self._memory, one.tables, optimizer)) for one in tabled]
        self._version: int | None = None  # version that this worker's weights and buffers still equal
        self._version_of_states = 0
        self._pulled = self._rounds_behind = 0

    def begin(self, version: int) -> None:
        if self._context.world.rank == 0:
            for _, journal in self._tabled:
                journal.begin()
            self._write(version)
        self._version = self._version_of_states = version
        if self._tabled and self._context.world.rank > 0:
            self._version_of_states = -1  # the states of tables are in the memory of the shards

    def pull(self, step: int) -> None:
        current = step // self._computing
        if self._settings.mode == "bounded":
            oldest = (current - self._settings.staleness) * self._computing
            self._claims.wait_until(lambda table: table.done_before >= oldest, lambda table: table.owners(oldest))
        with self._claims.hold() as table:
            if table.version != self._version:
                for shard in self._shards:
                    shard.read(table.version % 2, states=False)
            self._pulled = table.version
            self._rounds_behind = max(0, current - table.done_before // self._computing)
        self._version = None  # the forward pass changes the buffers

    def restore(self, table: ClaimTable, complete: bool) -> None:
        for shard in self._shards:
            shard.read(table.version % 2)
        for shard, journal in () if complete else self._tabled:
            shard.take_tables()
            journal.restore(table.version)

    def release(self) -> None:
        for shard, _ in self._tabled:
            shard.take_tables()

    def _write(self, version: int) -> None:
        for shard in self._shards:
            shard.write(version % 2)

    def _factor(self, delay: int) -> float:
        return factor_of(self._settings, delay)

    def _is_late(self, delay: int) -> bool:
        return is_late(self._settings, delay)

    def _record_update(self, step: int, delay: int, version: int, rate: float) -> None:
        self._staleness.add(delay, self._rounds_behind)
        age = {"pulled": self._pulled, "delay": delay, "staleness": self._rounds_behind}
        self._context.events.mark("update", step=step, version=version, learning_rate=rate, **age)

    def _record_drop(self, step: int, delay: int) -> None:
        age = {"pulled": self._pulled, "delay": delay, "staleness": self._rounds_behind}
        self._context.events.mark("dropped", step=step, **age)


class InlineServer(ShardedServer):
    """Server inside the workers: the worker that pushes a gradient updates all shards, one after the other."""

    def __init__(self, shared: OnOneMachine) -> None:
        super().__init__(shared, computing=shared.context.world.size)

    def push(self, gradients: Gradients) -> StepResult | None:
        step, norm = gradients.step, self._context.update.norm()
        with self._claims.change() as table:
            delay = table.version - self._pulled
            late = self._is_late(delay)
            if late:
                table.give_back(step)
            else:
                for shard, _ in self._tabled:
                    shard.share_tables()
                if table.version != self._version_of_states:
                    for shard in self._shards:
                        shard.read(table.version % 2)
                for _, journal in self._tabled:
                    journal.keep(table.version + 1)
                result = update(self._context, gradients, table.done, self._factor(delay), norm)
                self._write(table.version + 1)
                finish(table, step, result)
                self._version = self._version_of_states = table.version
        if late:
            self._record_drop(step, delay)
            return None
        self._record_update(step, delay, table.version, result.learning_rate)
        return result


def factor_of(settings: ServerSettings, delay: int) -> float:
    """Return the factor of the learning rate for an update with this delay."""
    return 1.0 / (1 + delay) if settings.scale_lr else 1.0


def is_late(settings: ServerSettings, delay: int) -> bool:
    """Return whether a gradient with this delay must be dropped."""
    return settings.drop_after is not None and delay > settings.drop_after


def servers_among(settings: Settings, workers: int) -> int:
    """Return the number of servers: the configured number, or the largest that this number of workers allows."""
    return min(settings.server.count, workers - settings.server.dedicated)


def warnings_of_servers(context: TrainingContext) -> list[str]:
    """Return a warning if there are fewer servers than configured, otherwise an empty list."""
    count, wanted = servers_among(context.settings, context.world.size), context.settings.server.count
    if count == wanted:
        return []
    return [f"{context.world.size} workers are left, of which {count} can serve: not server.count = {wanted}"]
