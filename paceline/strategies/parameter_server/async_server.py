"""Servers that apply each gradient as it comes: modes async and bounded of ``strategies.parameter_server.strategy``.

::

    worker   wait until the weights are fresh enough ─ pull ─ compute ─ push ─ answer
    server                                                           └ too late: drop, the step is free again
                                                                     └ update the spare copy, flip

The *delay* of a gradient is the number of updates between its pull and its own; its *staleness* the number of earlier
rounds that were missing, in part or whole, in the weights it was computed with. With ``server.scale_lr`` its learning
rate is divided by 1 + delay (Zhang et al. 2015, arXiv 1511.05950).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.mailbox import Mailbox, Reply
from paceline.comm.servers.shard import Shard, cut
from paceline.data.feed import Piece
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.step.checks import Part, mean_loss
from paceline.step.job import Job, StepResult
from paceline.strategies.parameter_server.async_steps import AsyncSteps, remarks_on_servers, servers_among

_CHIEF = 0
"""The server that decides in which order gradients are applied."""


class SharedShards(AsyncSteps):
    """Whoever pushes makes the update of all shards itself, one after the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._server = job.settings.server
        self._shards = self._made(servers_among(job.settings, job.world.size))
        job.warnings.extend(remarks_on_servers(job))
        self._told = len(job.warnings)
        self._have = self._have_states = self._pulled = self._behind = 0

    def _made(self, count: int) -> list[Shard]:
        update, model = self._job.update, self._job.compute.model
        buffers = [name for name, _ in model.named_buffers()]
        return [
            Shard(self._memory, model, part, [] if place else buffers, update.optimizer, update.schedule)
            for place, part in enumerate(cut(update.parameters, count))
        ]

    @property
    def _computing(self) -> int:
        """How many workers compute: the steps of a round."""
        return self._job.world.size

    def _publish(self, version: int) -> None:
        for shard in self._shards:
            shard.write(version % 2)

    def _take_up(self, version: int) -> None:
        self._have = self._have_states = version

    def _read(self, table: ClaimTable, states: bool) -> None:
        if table.version != (self._have_states if states else self._have):
            for shard in self._shards:
                shard.read(table.version % 2, states)
        self._have = table.version
        if states:
            self._have_states = table.version

    def _pull(self, step: int) -> None:
        around = step // self._computing
        if self._server.mode == "bounded":
            fresh = (around - self._server.staleness) * self._computing
            self._memory.until(
                lambda: self._claims.look().done_before >= fresh, lambda: self._claims.look().owners(fresh)
            )
        with self._claims.hold() as table:
            self._read(table, states=False)
            self._pulled = table.version
            self._behind = max(0, around - table.done_before // self._computing)

    def _factor(self, delay: int) -> float:
        return 1.0 / (1 + delay) if self._server.scale_lr else 1.0

    def _is_late(self, delay: int) -> bool:
        return self._server.drop_after is not None and delay > self._server.drop_after

    def _push(self, step: int, pieces: list[Piece], parts: list[Part], changed: list[torch.Tensor]) -> None:
        outcome = self._judge(step, pieces, parts)
        if outcome is not None:
            self._skip(step, outcome)
            return
        norm = self._job.update.norm()
        with self._claims.change() as table:
            delay = table.version - self._pulled
            if self._is_late(delay):
                table.give_back(step)
                self._mine = table.take(self._job.world.rank)
            else:
                self._read(table, states=True)
                outcome = self._apply(step, parts, changed, table.done, self._factor(delay), norm)
                for shard in self._shards:
                    shard.write((table.version + 1) % 2)
                self._finish(table, step, outcome)
                self._have = self._have_states = table.version
        self._record(step, Reply(table.version if outcome else -1, delay, outcome.learning_rate if outcome else 0.0))

    def _skip(self, step: int, outcome: StepResult) -> None:
        self._have = -1  # the buffers are not those that were pulled
        with self._claims.change() as table:
            self._finish(table, step, outcome)

    def _record(self, step: int, answer: Reply) -> None:
        mark, late = self._job.events.mark, {"pulled": self._pulled, "delay": answer.delay, "staleness": self._behind}
        if answer.version < 0:
            mark("dropped", step=step, **late)
            return
        self._delays.add(answer.delay)
        self._rounds.add(self._behind)
        mark("update", step=step, version=answer.version, learning_rate=answer.rate, **late)

    def _take_state(self, table: ClaimTable, settled: bool) -> None:
        for shard in self._shards:
            shard.read(table.version % 2)


class DedicatedShards(SharedShards):
    """The first workers are servers: each updates its shard, in the order that the first of them decides."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        world, parameters = job.world, job.update.parameters
        values = [value.detach() for value in parameters.values()]
        self._parcels = Mailbox(self._memory, values, sum(value.nbytes for value in job.compute.model.buffers()))
        self._asks = self._memory.reserve(1)
        self._answers = self._memory.reserve(world.size)
        self._orders = self._memory.reserve(2)
        self._asked = self._ordered = 0
        self._handled = [0] * world.size
        self._serves = world.rank < len(self._shards)
        self._others = [rank for rank in range(len(self._shards)) if rank != _CHIEF]
        self._workers = list(range(len(self._shards), world.size))
        if self._serves:
            held = {id(value) for value in self._shards[world.rank].parameters}
            self._own = [place for place, value in enumerate(parameters.values()) if id(value) in held]

    @property
    def _computing(self) -> int:
        return self._job.world.size - len(self._shards)

    # A worker.

    def _push(self, step: int, pieces: list[Piece], parts: list[Part], changed: list[torch.Tensor]) -> None:
        job, rank = self._job, self._job.world.rank
        outcome = self._judge(step, pieces, parts)
        if outcome is not None:
            self._skip(step, outcome)
            return
        job.compute.buffers.accept(changed)
        self._have = -1
        held = dict(job.compute.model.named_buffers())
        buffers = {name: held[name].detach().clone() for name in job.compute.buffers.live}
        norm, loss = job.update.norm(), mean_loss(parts, job.settings.exact)
        gradients = self._whole.take_gradients()
        self._parcels.write(rank, gradients, (step, self._pulled, norm, loss, buffers))
        self._asked += 1
        self._memory.announce(self._asks, self._asked)
        slot = self._answers + rank
        self._memory.until(lambda: self._memory.announced(slot, self._asked, [_CHIEF]), lambda: [_CHIEF])
        answer = self._parcels.answered(_CHIEF, rank)
        if answer.version >= 0:
            self._newest = StepResult(loss, norm, answer.rate)
        with self._claims.change() as table:
            self._mine = table.take(rank)
        self._record(step, answer)

    # A server.

    def _offer(self, table: ClaimTable, step: int) -> None:
        if not self._serves:
            super()._offer(table, step)

    def _work(self, step: int) -> None:
        if self._serves:
            self._serve(lambda: self._claims.look().top > step)
        else:
            super()._work(step)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        if self._serves:
            self._serve(ready)
        else:
            super()._wait_until(ready)

    def _drain(self, steps: int) -> None:
        if self._serves:
            self._serve(lambda: self._is_drained(steps))
        else:
            super()._drain(steps)

    def _serve(self, done: Callable[[], bool]) -> None:
        """Apply what comes in until it is done."""
        chief = self._job.world.rank == _CHIEF
        awaited = self._workers if chief else [_CHIEF]
        while True:
            self._memory.until(lambda: self._waiting(chief) or done(), lambda: awaited)
            while self._waiting(chief):
                if chief:
                    self._decide()
                else:
                    self._follow()
            if done():
                return

    def _waiting(self, chief: bool) -> bool:
        """Whether there is something to do for this server."""
        if not chief:
            return self._memory.announced(self._orders, self._ordered + 1, [_CHIEF])
        return any(self._memory.announced(self._asks, self._handled[rank] + 1, [rank]) for rank in self._workers)

    def _decide(self) -> None:
        """Handle the gradient of each worker that has brought one."""
        for rank in self._workers:
            if not self._memory.announced(self._asks, self._handled[rank] + 1, [rank]):
                continue
            (step, pulled, norm, loss, buffers), there = self._parcels.words(rank)
            table = self._claims.look()
            delay = table.version - pulled
            if self._is_late(delay):
                with self._claims.change() as table:
                    table.give_back(step)
                answer = Reply(-1, delay, 0.0)
            else:
                self._order(rank, table, delay)
                self._put_buffers(buffers)
                rate = self._update(rank, step, norm, there, table, delay)
                self._memory.until(lambda: not self._unready(), self._unready)
                with self._claims.change() as table:
                    self._close_step(table, step, StepResult(loss, norm, rate))
                answer = Reply(table.version, delay, rate)
            self._handled[rank] += 1
            self._parcels.answer(_CHIEF, rank, answer)
            self._memory.announce(self._answers + rank, self._handled[rank])

    def _order(self, rank: int, table: ClaimTable, delay: int) -> None:
        """Let the other servers apply the gradient of a worker, too."""
        self._ordered += 1
        if self._others:
            self._parcels.write(_CHIEF, [None] * len(self._job.update.parameters), (rank, table.done, delay))
            self._memory.announce(self._orders, self._ordered)

    def _unready(self) -> list[int]:
        return [rank for rank in self._others if not self._memory.announced(self._orders + 1, self._ordered, [rank])]

    def _follow(self) -> None:
        """Apply to this server's shard what the first one has decided."""
        (rank, _, delay), _ = self._parcels.words(_CHIEF)
        (step, _, norm, _, _), there = self._parcels.words(rank)
        self._update(rank, step, norm, there, self._claims.look(), delay)
        self._ordered += 1
        self._memory.announce(self._orders + 1, self._ordered)

    def _update(
        self, rank: int, step: int, norm: torch.Tensor, there: list[bool], table: ClaimTable, delay: int
    ) -> float:
        """Update this server's shard with the gradient of a worker, into the spare copy."""
        job, gradients = self._job, self._parcels.gradients(rank)
        parameters = list(job.update.parameters.values())
        for place in self._own:
            parameters[place].grad = gradients[place] if there[place] else None
        seed_torch(seed_of(UPDATE, job.settings.seed, step))
        _, rate = job.update.apply(table.done, self._factor(delay), norm)
        self._shards[job.world.rank].write((table.version + 1) % 2)
        self._whole.take_gradients()
        return rate

    def _put_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        held = dict(self._job.compute.model.named_buffers())
        for name, value in buffers.items():
            held[name].data.copy_(value)
