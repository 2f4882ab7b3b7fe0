"""Lock-free updates of shared weights (Niu, Recht, Re and Wright 2011, HOGWILD!, NIPS 24).

::

    shared     w ─────────●────●──────●───●────●────▶      every worker reads and writes it at any time
    worker 0   ▓▓▓▓▓▓▓▓▓▓▓▓●  ▓▓▓▓▓▓▓▓▓▓▓▓●
    worker 1        ▓▓▓▓▓▓▓▓▓▓▓▓●  ▓▓▓▓▓▓▓▓▓▓▓▓●

The weights of all workers are the same memory. Each worker computes its step with the current weights, and its own
optimizer changes them in place, without a lock. An element that two workers change at once may lose one of the changes.
That is rare if gradients are sparse (``nn.Embedding(sparse=True)``), because they touch only the rows of their samples.

A worker computes its first step with the common initial weights, in its own memory. These weights stay unchanged while
the worker finds out whether it may compute microbatches in one pass (``step.gradients.fusion``).

Each worker has its own optimizer state; when the workers synchronize, all take over the state of rank 0. Each worker
has its own buffers while it computes; the buffers of the last update win.

After a loss, survivors read the weights only when none of them is in the middle of an update. So the weights they read
contain every update that the claim table counts, and no other.
"""

from __future__ import annotations

import torch

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.shard import Shard
from paceline.settings import Settings
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Capabilities
from paceline.strategies.parameter_server.async_steps import AsyncSteps, Gradients, Server, finish, update
from paceline.strategies.parameter_server.sharing import OnOneMachine, on_one_machine


def build(context: TrainingContext) -> AsyncSteps:
    """Build the asynchronous loop on shared weights."""
    shared = on_one_machine(context, audited=False)
    return AsyncSteps(shared, SharedWeights(shared))


def capabilities(settings: Settings, workers: int) -> Capabilities:
    return Capabilities(
        exact=False,
        replicated=False,
        sparse_gradients="any",
        averages=False,
        carries=False,
        audits=workers == 1,
        loop_weights=False,
    )


class SharedWeights(Server):
    """Weights in shared memory, which all workers update in place."""

    def __init__(self, shared: OnOneMachine) -> None:
        super().__init__(shared)
        self._memory, self._claims = shared.memory, shared.claims
        trained, model = self._context.update, self._context.compute.model
        names = [name for name, _ in model.named_buffers()]
        self._shard = Shard(self._memory, model, trained.parameters, names, trained.optimizer, trained.schedule)
        self._private: list[torch.Tensor] = []
        self._updates = 0  # updates that the schedule has counted
        self._pulled: int | None = None
        self._checked = False

    def begin(self, version: int) -> None:
        if self._context.world.rank == 0:
            self._shard.write(0)
        self._updates = version
        self._pulled = None
        self._checked = False

    def pull(self, step: int) -> None:
        if self._pulled is None:  # the first step uses the weights in this worker's own memory
            self._pulled = self._updates
        else:
            self._share()
            self._pulled = self._claims.read().version
        self._shard.read_buffers(0)

    def _share(self) -> None:
        """Move the model's parameters into shared memory. They stay the same objects."""
        if self._private:
            return
        self._private = [parameter.data for parameter in self._shard.parameters]
        for parameter, shared in zip(self._shard.parameters, self._shard.views(0), strict=True):
            parameter.data = shared

    def push(self, gradients: Gradients) -> StepResult:
        self._share()
        assert self._pulled is not None
        with self._claims.updating() as table:
            self._schedule_to(table.version)
            result = update(self._context, gradients, table.done, made=lambda: self._claims.made(gradients.step))
            self._updates += 1
            if not self._checked:
                self._shard.check_states()
                self._checked = True
            self._shard.write_buffers(0)
            with self._claims.change() as table:
                delay = table.version - self._pulled
                finish(table, gradients.step, result)
            self._staleness.add(delay)
        age = {"pulled": self._pulled, "delay": delay}
        self._context.events.mark(
            "update", step=gradients.step, version=table.version, learning_rate=result.learning_rate, **age
        )
        return result

    def _schedule_to(self, version: int) -> None:
        """Advance the learning-rate schedule to the global update count."""
        self._context.update.advance_after(version - self._updates)
        self._updates = max(self._updates, version)

    def flush(self, table: ClaimTable) -> None:
        self._schedule_to(table.version)
        if self._context.world.rank == 0:
            self._shard.write_states(0)

    def restore(self, table: ClaimTable, complete: bool) -> None:
        """Move the parameters back into this worker's own memory, because others may write to the shared memory."""
        self._schedule_to(table.version)
        for parameter, private in zip(self._shard.parameters, self._private, strict=False):
            parameter.data = private
        self._private = []
        self._shard.read(0, states=complete)
