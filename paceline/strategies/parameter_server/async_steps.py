"""Loop of the asynchronous strategies: each step is computed by one worker, which does not wait for the others.

::

    worker 0   claim 0 ▓▓▓ push   claim 3 ▓▓▓ push   claim 4 ▓▓▓ push ┐
    worker 1   claim 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ push                     ┼ synchronize
    worker 2   claim 2 ▓▓▓▓▓ push   claim 5 ▓▓▓▓▓ push                ┘

The loop of each worker visits every step. On a visit it claims and computes unclaimed steps up to that step, lowest
first, and moves on if there are none. So there are as many updates, and each sample is used as often, as in one
process, and a slow worker computes fewer steps. Before an evaluation or a checkpoint, and at the end, the workers
*synchronize*: they wait until all steps are done and take over the same state.

A :class:`Server` decides where the weights are, and which process updates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.comm.assignment.step_claims import FREE, Claims, ClaimTable
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import DisagreementError, WorkerLost
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import locate_here, means, skip
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Strategy
from paceline.strategies.parameter_server.final_drain import STATE, newest_result, restored
from paceline.strategies.parameter_server.sharing import Shared

_PACE_ROUNDS = 8  # steps of each worker over which the throughput is averaged


@dataclass(frozen=True)
class Gradients:
    """Mean gradients of a step, which are in ``.grad``."""

    step: int
    parts: list[MicrobatchResult]  # results of its microbatch groups
    buffers: list[torch.Tensor]  # means of the buffers that the forward pass changes


class Server(ABC):
    """Storage of the weights between the steps."""

    computes = True  # whether this worker computes steps. Otherwise it only serves.
    # parameters and buffers that could be restored after a loss. None if all could.
    owned: frozenset[str] | None = None

    def __init__(self, shared: Shared) -> None:
        self._context, self._batch, self._staleness = shared.context, shared.batch, shared.staleness
        self._table: Claims = shared.claims

    @abstractmethod
    def begin(self, version: int) -> None:
        """Start from the state that all workers have after ``version`` updates. Rank 0 finishes before others pull."""

    @abstractmethod
    def pull(self, step: int) -> None:
        """Pull the weights for a step."""

    @abstractmethod
    def push(self, gradients: Gradients) -> StepResult | None:
        """Apply gradients and close their step. Returns None if they came too late and the step is free again."""

    def wait(self, ready: Callable[[ClaimTable], bool]) -> None:
        """Wait until ``ready`` accepts the claim table. A timeout names the workers that hold claims."""
        self._table.wait_until(ready, lambda table: table.owners())

    def record_result(self, table: ClaimTable) -> None:  # noqa: B027 - most know it when they push
        """Write the last update's result into the claim table if it became known only after the push."""

    def flush(self, table: ClaimTable) -> None:  # noqa: B027 - most have nothing left
        """Write state that only this worker has to where all workers can read it, after all steps are computed."""

    def release(self) -> None:  # noqa: B027 - most have nothing there
        """Move parameters that lie in memory of the workers into this worker's own, after the last :meth:`restore`."""

    @abstractmethod
    def restore(self, table: ClaimTable, complete: bool) -> None:
        """Take over the newest state. If not ``complete``, take over what is available after a loss."""


class AsyncSteps(Strategy):
    """Strategy that claims steps, computes them with the weights of a server and pushes the gradients to it."""

    def __init__(self, shared: Shared, server: Server) -> None:
        self._context, self._claims, self._server = shared.context, shared.claims, server
        self._batch, self._staleness = shared.batch, shared.staleness
        self._context.warnings.extend(_warnings(self._context))
        self._warned = len(self._context.warnings)
        self._synchronized = True
        self._claimed: int | None = None
        self._top = 0

    def groups(self, step: int) -> list[range]:
        """Return no groups, because this worker does not know in advance which step it will compute."""
        return []

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        self._context.world.check()
        notice = self._start(step) if self._synchronized else 0
        stops = self._enter(step)
        result = replace(self._work(step) or self._newest(), paced_over=_PACE_ROUNDS * self._context.world.size)
        if stops:
            notice = max(notice, self._claims.read().notice)
        if not notice:
            return result
        self.synchronize(step + 1)
        return replace(result, notice=notice)

    def synchronize(self, steps: int) -> None:
        if self._synchronized:
            if not self._context.strategy_state.get(STATE, {}).get("open"):
                return
            self._start(steps)  # a worker was lost while synchronizing, so its claimed steps are free again
        self._drain(steps)
        self._await_others(steps)
        self._server.flush(self._claims.read())
        self._gather("synchronizing after", steps - 1, None)
        table = self._claims.read()
        self._server.restore(table, complete=True)
        self._save_state(table)
        self._report_staleness()
        self._synchronized = True

    def close(self) -> frozenset[str] | None:
        if not self._synchronized:
            try:
                table = self._claims.close()
            except WorkerLost:  # the lost worker held the claim table
                return frozenset()
            while True:  # an update may have been in flight
                self._server.restore(table, complete=False)
                before, table = table, self._claims.last()
                if table.version == before.version:
                    break
            self._save_state(table)
            self._synchronized = True
        else:
            self._server.release()
        self._batch.take_gradients()
        return self._server.owned

    # While synchronized: before the first step, and after all steps are done.

    def _start(self, step: int) -> int:
        """Start from the same state on all workers. Returns the highest notice of any worker."""
        notices = self._gather("at", step, self._context.world.notice())
        state = self._context.strategy_state.get(STATE, {})
        version = int(state.get("version", 0))
        self._top = max(step, int(state.get("top", 0)))
        self._server.begin(version)
        if self._context.world.rank == 0:
            table = ClaimTable(self._top, dict.fromkeys(state.get("open", []), FREE), version)
            self._claims.begin(restored(table, state))
        self._claims.await_begin()
        self._synchronized = False
        return max(map(int, notices))

    def _gather(self, where: str, step: int, value: Any) -> list[Any]:
        found = self._context.world.gather((where, step, value), "step")
        if any(other[:2] != (where, step) for other in found):
            raise _different([f"rank {rank} {place} step {number}" for rank, (place, number, _) in enumerate(found)])
        return [value for *_, value in found]

    def _save_state(self, table: ClaimTable) -> None:
        """Save the state that the next membership and a checkpoint need."""
        self._context.strategy_state[STATE] = {
            "top": table.top,
            "open": sorted(table.open),
            "version": table.version,
            **self._staleness.state(),
            "newest": [table.newest, table.loss, table.norm, table.rate, table.applied, table.metrics],
        }

    def _report_staleness(self) -> None:
        summary = self._staleness.summary()
        if not summary:
            return
        if self._context.world.rank == 0:
            delays, rounds = self._staleness.counts()
            self._context.events.mark("staleness", delays=delays, rounds=rounds)
        self._context.warnings[self._warned :] = [summary]

    # While not synchronized.

    def _enter(self, step: int) -> bool:
        """Offer a step and claim a free one. Returns whether all workers stop after ``step`` to act on a notice."""
        notice = self._context.world.notice()
        table = self._claims.read()
        if notice or step >= table.top or table.has_free:
            with self._claims.change() as table:
                if notice:
                    if table.stop < 0:
                        table.stop = table.top + 1
                    table.notice = max(table.notice, notice)
                if self._server.computes:
                    table.offer(step)
                    self._claimed = table.take(self._context.world.rank)
        return 0 <= table.stop <= step

    def _work(self, step: int) -> StepResult | None:
        """Compute free steps, or serve until workers are beyond a step. Returns this worker's newest result, if any."""
        if not self._server.computes:
            self._server.wait(lambda table: table.top > step)
        newest = None
        while self._claimed is not None:
            newest = self._compute(self._claimed) or newest
        return newest

    def _newest(self) -> StepResult:
        """Return the newest result known to all workers, and wait for the first step if none is done yet."""
        self._server.wait(lambda table: table.newest >= 0 or not table.open)
        return newest_result(self._claims.read(), self._context)

    def _compute(self, step: int) -> StepResult | None:
        """Compute a step and claim the next one. Returns None if its gradients came too late."""
        context = self._context
        context.world.check()
        groups = context.feed.load(step, self._batch.groups(step))
        self._server.pull(step)
        parts, buffers = self._batch.gradients(step, groups)
        result = skip(context, step, parts, lambda bad: locate_here(context, step, groups, bad))
        if result is None:
            result = self._server.push(Gradients(step, parts, buffers))
            with self._claims.change() as table:
                self._server.record_result(table)
                self._claimed = table.take(context.world.rank)
        else:  # skipped
            with self._claims.change() as table:
                finish(table, step, result)
                self._claimed = table.take(context.world.rank)
        return result

    def _drain(self, steps: int) -> None:
        """Compute or serve until all steps before this one are done."""
        if not self._server.computes:
            self._server.wait(lambda table: self._is_drained(table, steps))
            return
        while True:
            self._server.wait(lambda table: self._is_drained(table, steps) or table.has_free)
            with self._claims.change() as table:
                self._claimed = table.take(self._context.world.rank)
            if self._claimed is None and not table.open:
                return
            self._work(steps)

    def _await_others(self, steps: int) -> None:
        """Wait until all workers synchronize, and detect a worker whose loop is ahead of this worker's loop."""
        self._claims.arrive()
        self._claims.wait_until(
            lambda table: self._is_drained(table, steps) and not self._claims.missing(),
            lambda table: self._claims.missing(),
        )

    def _is_drained(self, table: ClaimTable, steps: int) -> bool:
        if table.top > max(steps, self._top):
            here = f"rank {self._context.world.rank} synchronizing after step {steps - 1}"
            taken = sorted((rank, step) for step, rank in table.open.items() if step >= steps and rank != FREE)
            ahead = [f"rank {rank} at step {step}" for rank, step in taken]
            raise _different([here, *(ahead or [f"another one at step {table.top - 1}"])])
        return not table.open


def finish(table: ClaimTable, step: int, result: StepResult) -> None:
    del table.open[step]
    set_newest(table, step, result)
    table.version += result.applied


def set_newest(table: ClaimTable, step: int, result: StepResult) -> None:
    table.newest, table.applied, table.metrics = step, result.applied, result.metrics
    table.loss, table.norm, table.rate = result.loss, float(result.norm), result.learning_rate


def update(
    context: TrainingContext,
    gradients: Gradients,
    done: int,
    factor: float = 1.0,
    norm: torch.Tensor | None = None,
    made: Callable[[], None] | None = None,
) -> StepResult:
    """Update the weights of this process after ``done`` steps; ``made`` is called as soon as they are updated."""
    context.compute.buffers.accept(gradients.buffers)
    seed_torch(seed_of(UPDATE, context.settings.seed, gradients.step))
    norm, rate = context.update.apply(done, factor, norm, made=made)
    loss, metrics = means(context, gradients.parts)
    return StepResult(loss, norm, rate, metrics=metrics)


def _different(places: list[str]) -> DisagreementError:
    return DisagreementError(
        f"The workers are at different places: {', '.join(places)}. Every worker must take the same batches from "
        f"session.batches, and evaluate and save after the same ones; look for code that only some ranks run."
    )


def _warnings(context: TrainingContext) -> list[str]:
    """Return warnings about guarantees that asynchronous training does not give."""
    warnings = [
        f"strategy {context.settings.strategy} does not promise exact bits: the result depends on which worker was "
        f"faster; the loss of a report is that of the newest step that its worker knows"
    ]
    if context.compute.buffers.live:
        warnings.append(
            "running statistics, such as those of batch norm, are those of the last update: other workers' are lost"
        )
    return warnings
