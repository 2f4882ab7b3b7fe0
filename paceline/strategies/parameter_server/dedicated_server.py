"""Dedicated server processes: modes async and bounded with ``server.dedicated``.

::

    worker     pull ─ compute ─ push ┐                                   ┌ answer
    server 0                         ┴ decide the order ─ update shard 0 ┤
    server 1                           └ follow ───────── update shard 1 ┘

The first ranks are the servers. Server 0 takes the gradients one after the other, drops late gradients, orders the
other servers to apply the same gradients, and closes the step when all shards are updated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.mailbox import Mailbox, Reply
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.step.commit import means
from paceline.step.context import StepResult
from paceline.strategies.parameter_server.async_server import ShardedServer, servers_among
from paceline.strategies.parameter_server.async_steps import Gradients, finish
from paceline.strategies.parameter_server.sharing import OnOneMachine

_FIRST = 0  # rank of the server that decides in which order gradients are applied


class DedicatedServer(ShardedServer):
    """Server on one of the first ranks, or a worker's client of the servers."""

    def __init__(self, shared: OnOneMachine) -> None:
        context, world = shared.context, shared.context.world
        count = servers_among(context.settings, world.size)
        super().__init__(shared, computing=world.size - count)
        self.computes = world.rank >= count
        parameters = context.update.parameters
        values = [value.detach() for value in parameters.values()]
        self._mailbox = Mailbox(self._memory, values, sum(value.nbytes for value in context.compute.model.buffers()))
        self._pushes = self._memory.reserve(1)
        self._answers = self._memory.reserve(world.size)
        self._orders = self._memory.reserve(2)
        self._pushed = self._ordered = 0
        self._handled = [0] * world.size
        self._followers = list(range(1, count))
        self._workers = list(range(count, world.size))
        if not self.computes:
            held = {id(value) for value in self._shards[world.rank].parameters}
            self._own = [place for place, value in enumerate(parameters.values()) if id(value) in held]

    # On workers.

    def push(self, gradients: Gradients) -> StepResult | None:
        context, rank, step = self._context, self._context.world.rank, gradients.step
        context.compute.buffers.accept(gradients.buffers)
        named = dict(context.compute.model.named_buffers())
        buffers = {name: named[name].detach().clone() for name in context.compute.buffers.live}
        norm, (loss, metrics) = context.update.norm(), means(context, gradients.parts)
        words = step, self._pulled, norm, (loss, metrics), buffers
        self._mailbox.write(rank, self._batch.take_gradients(), words)
        self._pushed += 1
        self._memory.announce(self._pushes, self._pushed)
        slot = self._answers + rank
        self._memory.wait_until(lambda: self._memory.announced(slot, self._pushed, [_FIRST]), lambda: [_FIRST])
        answer = self._mailbox.answered(_FIRST, rank)
        if answer.version < 0:
            self._record_drop(step, answer.delay)
            return None
        self._record_update(step, answer.delay, answer.version, answer.rate)
        return StepResult(loss, norm, answer.rate, metrics=metrics)

    # On servers.

    def wait(self, ready: Callable[[ClaimTable], bool]) -> None:
        def is_ready() -> bool:
            return ready(self._claims.read())

        if self.computes:
            super().wait(ready)
        elif self._context.world.rank == _FIRST:
            self._serve(is_ready, self._has_pushes, self._decide, self._workers)
        else:
            self._serve(is_ready, self._has_orders, self._follow, [_FIRST])

    def _serve(
        self, ready: Callable[[], bool], has_work: Callable[[], bool], work: Callable[[], None], awaited: list[int]
    ) -> None:
        while True:
            self._memory.wait_until(lambda: has_work() or ready(), lambda: awaited)
            while has_work():
                work()
            if ready():
                return

    def _has_pushes(self) -> bool:
        return any(self._has_pushed(rank) for rank in self._workers)

    def _has_pushed(self, rank: int) -> bool:
        return self._memory.announced(self._pushes, self._handled[rank] + 1, [rank])

    def _decide(self) -> None:
        """Handle the gradients of each worker that has pushed."""
        for rank in filter(self._has_pushed, self._workers):
            (step, pulled, norm, (loss, metrics), buffers), there = self._mailbox.words(rank)
            table = self._claims.read()
            delay = table.version - pulled
            if self._is_late(delay):
                with self._claims.change() as table:
                    table.give_back(step)
                answer = Reply(-1, delay, 0.0)
            else:
                self._order(rank, table, delay)
                self._put_buffers(buffers)
                rate = self._update(rank, step, norm, there, table, delay)
                self._memory.wait_until(lambda: not self._behind(), self._behind)
                with self._claims.change() as table:
                    finish(table, step, StepResult(loss, norm, rate, metrics=metrics))
                answer = Reply(table.version, delay, rate)
            self._handled[rank] += 1
            self._mailbox.answer(_FIRST, rank, answer)
            self._memory.announce(self._answers + rank, self._handled[rank])

    def _order(self, rank: int, table: ClaimTable, delay: int) -> None:
        """Order the other servers to apply the gradients of a worker, too."""
        self._ordered += 1
        if self._followers:
            self._mailbox.write(_FIRST, [None] * len(self._context.update.parameters), (rank, table.done, delay))
            self._memory.announce(self._orders, self._ordered)

    def _behind(self) -> list[int]:
        """Return the servers that have not applied the newest order."""
        return [rank for rank in self._followers if not self._memory.announced(self._orders + 1, self._ordered, [rank])]

    def _has_orders(self) -> bool:
        return self._memory.announced(self._orders, self._ordered + 1, [_FIRST])

    def _follow(self) -> None:
        """Apply the order of the first server to this server's shard."""
        (rank, _, delay), _ = self._mailbox.words(_FIRST)
        (step, _, norm, _, _), there = self._mailbox.words(rank)
        self._update(rank, step, norm, there, self._claims.read(), delay)
        self._ordered += 1
        self._memory.announce(self._orders + 1, self._ordered)

    def _update(
        self, rank: int, step: int, norm: torch.Tensor, there: list[bool], table: ClaimTable, delay: int
    ) -> float:
        """Update this server's shard with the gradients of a worker, into the spare copy."""
        context, gradients = self._context, self._mailbox.gradients(rank)
        parameters = list(context.update.parameters.values())
        for place in self._own:
            parameters[place].grad = gradients[place] if there[place] else None
        seed_torch(seed_of(UPDATE, context.settings.seed, step))
        _, rate = context.update.apply(table.done, self._factor(delay), norm)
        self._shards[context.world.rank].write((table.version + 1) % 2)
        self._batch.take_gradients()
        return rate

    def _put_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        held = dict(self._context.compute.model.named_buffers())
        for name, value in buffers.items():
            held[name].data.copy_(value)
