"""Lock-free updates of shared weights (Niu, Recht, Re and Wright 2011, HOGWILD!, NIPS 24).

::

    shared     w ─────────●────●──────●───●────●────▶      every worker reads and writes it at any time
    worker 0   ▓▓▓▓▓▓▓▓▓▓▓▓●  ▓▓▓▓▓▓▓▓▓▓▓▓●
    worker 1        ▓▓▓▓▓▓▓▓▓▓▓▓●  ▓▓▓▓▓▓▓▓▓▓▓▓●

The weights of all workers are the same memory. Each computes its step with the weights as they are, and lets its own
optimizer change them in place, without a lock: an element that two workers change at once may lose one of the changes.
That is rare where gradients are sparse (``nn.Embedding(sparse=True)``): they touch the rows of their samples alone.

A worker computes its first step with the weights that all set out with, in its own memory: there they stay still while
it finds out whether it may compute microbatches in one pass (``step.fusion``).

The optimizer's state is each worker's own; when they settle, all take that of rank 0. Buffers are each worker's own
while it computes; the last update's win.

When a worker is lost, the others part only when none of them is in the middle of an update: so the weights that they
take with them have each update that the table says is made, and no other.
"""

from __future__ import annotations

import torch

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.shard import Shard
from paceline.data.feed import Piece
from paceline.settings import Settings
from paceline.step.checks import Part
from paceline.step.job import Job
from paceline.strategies.base import Capabilities
from paceline.strategies.parameter_server.async_steps import AsyncSteps


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """See :class:`Capabilities`."""
    return Capabilities(exact=False, replicated=False, sparse_gradients=True)


class HogWild(AsyncSteps):
    """All workers update the same memory."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        update, model = job.update, job.compute.model
        names = [name for name, _ in model.named_buffers()]
        self._shard = Shard(self._memory, model, update.parameters, names, update.optimizer, update.schedule)
        self._private: list[torch.Tensor] = []
        self._scheduled = self._pulled = 0

    def _publish(self, version: int) -> None:
        self._shard.write(0)

    def _take_up(self, version: int) -> None:
        self._scheduled = self._pulled = version

    def _pull(self, step: int) -> None:
        if self._private:
            self._pulled = self._claims.look().version
        self._shard.read_buffers(0)

    def _share(self) -> None:
        """From now on the model's parameters lie in shared memory; they stay the same objects."""
        self._private = [parameter.data for parameter in self._shard.parameters]
        for parameter, shared in zip(self._shard.parameters, self._shard.views(0), strict=True):
            parameter.data = shared

    def _push(self, step: int, pieces: list[Piece], parts: list[Part], changed: list[torch.Tensor]) -> None:
        first = not self._private
        if first:
            self._share()
        skipped = self._judge(step, pieces, parts)
        if skipped is not None:
            with self._claims.change() as table:
                self._finish(table, step, skipped)
            return
        with self._claims.updating() as table:
            self._schedule_to(table.version)
            outcome = self._apply(step, parts, changed, table.done)
            self._scheduled += 1
            if first:
                self._shard.check_states()
            self._shard.write_buffers(0)
            self._claims.made(step)
            with self._claims.change() as table:
                delay = table.version - self._pulled
                self._finish(table, step, outcome)
            self._delays.add(delay)
        self._job.events.mark(
            "update",
            step=step,
            version=table.version,
            pulled=self._pulled,
            delay=delay,
            learning_rate=outcome.learning_rate,
        )

    def _schedule_to(self, version: int) -> None:
        """Let the schedule catch up with the updates of others."""
        self._job.update.advance_after(version - self._scheduled)
        self._scheduled = max(self._scheduled, version)

    def _leave_state(self, table: ClaimTable) -> None:
        self._schedule_to(table.version)
        if self._job.world.rank == 0:
            self._shard.write_states(0)

    def _take_state(self, table: ClaimTable, settled: bool) -> None:
        """The parameters go back into this worker's own memory: others may write into the shared one."""
        self._schedule_to(table.version)
        for parameter, private in zip(self._shard.parameters, self._private, strict=False):
            parameter.data = private
        self._private = []
        self._shard.read(0, states=settled)
