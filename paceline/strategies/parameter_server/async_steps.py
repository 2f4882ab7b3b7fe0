"""What asynchronous strategies share: each step is computed by one worker, and nobody waits for the others.

::

    worker 0   claim 0 ▓▓▓ update   claim 3 ▓▓▓ update   claim 4 ▓▓▓ update ┐
    worker 1   claim 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ update                         ┼ settle
    worker 2   claim 2 ▓▓▓▓▓ update   claim 5 ▓▓▓▓▓ update                  ┘

Every worker's loop comes to every step, and takes the lowest one that nobody computes yet; when there is none up to its
own it goes on. So there are as many updates, and each sample is used as often, as in one process, and a slow worker
computes fewer steps. To *settle* is to wait until all steps are done, and to take over the same state: before an
evaluation, a checkpoint, and at the end.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.assignment.step_claims import FREE, ClaimTable, StepClaims
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.histogram import Histogram
from paceline.data.feed import Piece
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import ConfigError, DisagreementError
from paceline.settings import Settings
from paceline.step.checks import Part, mean_loss
from paceline.step.commit import judge, located_here
from paceline.step.full_batch import FullBatch
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.single import Single

BOOK = "asynchronous"


class SingleAsync(Single):
    """One worker, after others: first it computes the steps that they had claimed and not done."""

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        book = self._job.strategy_state.get(BOOK, {})
        outcome = self._catch_up(book)
        if step < book.get("top", 0):  # done before, or just now
            return outcome or outcome_of(_with_newest(ClaimTable(), book), self._job)
        return self._note(step, super().step(step, pieces))

    def synchronize(self, steps: int) -> None:
        self._catch_up(self._job.strategy_state.get(BOOK, {}))

    def _catch_up(self, book: dict[str, Any]) -> StepResult | None:
        outcome = None
        while book.get("open"):
            missed = book["open"][0]
            outcome = self._note(missed, super().step(missed, self._job.feed.load(missed, self.pieces(missed))))
            del book["open"][0]
        return outcome

    def _note(self, step: int, outcome: StepResult) -> StepResult:
        if outcome.applied:
            self._job.events.mark("update", step=step, delay=0, learning_rate=outcome.learning_rate)
        newest = step, outcome.loss, float(outcome.norm), outcome.learning_rate, outcome.applied
        self._job.strategy_state.setdefault(BOOK, {})["newest"] = list(newest)
        return outcome


class AsyncSteps(Strategy):
    """Claims steps, and settles."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memory = shared_memory_of(job)
        self._claims = StepClaims(job.world, self._memory)
        self._flag = self._memory.reserve(2)
        self._times = 0
        self._together = True
        self._mine: int | None = None
        self._top = 0
        self._newest: StepResult | None = None
        self._whole = FullBatch(job)
        self._delays = Histogram(self._memory, job.world.rank)
        self._rounds = Histogram(self._memory, job.world.rank)
        book = job.strategy_state.get(BOOK, {})
        self._before = [Counter(dict(book.get(name, []))) for name in ("delays", "rounds")]
        job.warnings.extend(remarks_of(job))
        self._told = len(job.warnings)

    def pieces(self, step: int) -> list[range]:
        """None: which step this worker will compute is not known before."""
        return []

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        self._job.world.check()
        notice = self._set_out(step) if self._together else 0
        self._newest = None
        stops = self._arrive(step)
        self._work(step)
        outcome = self._newest or self._known()
        if stops:
            notice = max(notice, self._claims.look().notice)
        if not notice:
            return outcome
        self.synchronize(step + 1)
        return replace(outcome, notice=notice)

    def synchronize(self, steps: int) -> None:
        if self._together:
            if not self._job.strategy_state.get(BOOK, {}).get("open"):
                return
            self._set_out(steps)  # a worker was lost as they settled: what it had taken is free again
        self._drain(steps)
        self._await_others(steps)
        self._leave_state(self._claims.look())
        self._meet("settling after", steps - 1, None)
        table = self._claims.look()
        self._take_state(table, settled=True)
        self._remember(table)
        self._tell_staleness()
        self._together = True

    def close(self) -> None:
        if not self._together:
            table = self._claims.close()
            while True:  # one update may have been on its way
                self._take_state(table, settled=False)
                before, table = table, self._claims.last()
                if table.version == before.version:
                    break
            self._remember(table)
            self._together = True
        self._whole.take_gradients()

    # What a strategy does in its own way.

    @abstractmethod
    def _publish(self, version: int) -> None:
        """Rank 0: put the state where all see it; it is that after so many updates."""

    @abstractmethod
    def _take_up(self, version: int) -> None:
        """The state is there; what this worker has is the same."""

    @abstractmethod
    def _pull(self, step: int) -> None:
        """Get the weights for a step."""

    @abstractmethod
    def _push(self, step: int, pieces: list[Piece], parts: list[Part], changed: list[torch.Tensor]) -> None:
        """Bring in the gradients of a step, which are in ``.grad``; then :meth:`_finish` it."""

    def _leave_state(self, table: ClaimTable) -> None:
        """Nobody computes any more: put what only this worker has where all see it."""

    @abstractmethod
    def _take_state(self, table: ClaimTable, settled: bool) -> None:
        """Take over the newest state; after a loss, what there is of it."""

    # Together: before the first step, and when all has been settled.

    def _set_out(self, step: int) -> int:
        """Start from the same state; returns what the workers tell each other of the world."""
        notices = self._meet("at", step, self._job.world.notice())
        book = self._job.strategy_state.get(BOOK, {})
        version = int(book.get("version", 0))
        self._times += 1
        self._top = max(step, int(book.get("top", 0)))
        if self._job.world.rank == 0:
            self._publish(version)
            table = ClaimTable(self._top, dict.fromkeys(book.get("open", []), FREE), version)
            self._claims.begin(_with_newest(table, book))
            self._memory.announce(self._flag, self._times)
        else:
            self._memory.wait(self._flag, self._times, ranks=(0,))
        self._take_up(version)
        self._together = False
        return max(map(int, notices))

    def _meet(self, where: str, step: int, value: Any) -> list[Any]:
        told = self._job.world.gather((where, step, value), "step")
        if any(other[:2] != (where, step) for other in told):
            raise _different([f"rank {rank} {place} step {number}" for rank, (place, number, _) in enumerate(told)])
        return [value for *_, value in told]

    def _remember(self, table: ClaimTable) -> None:
        """Write down what the next workers, and a checkpoint, must know."""
        delays, rounds = (sorted(map(list, count.items())) for count in self._staleness())
        self._job.strategy_state[BOOK] = {
            "top": table.top,
            "open": sorted(table.open),
            "version": table.version,
            "delays": delays,
            "rounds": rounds,
            "newest": [table.newest, table.loss, table.norm, table.rate, table.applied],
        }

    def _staleness(self) -> list[dict[int, int]]:
        """How often each delay, and each number of rounds behind, has been so far."""
        tallies = self._delays, self._rounds
        return [dict(before + tally.total()) for before, tally in zip(self._before, tallies, strict=True)]

    def _tell_staleness(self) -> None:
        delays, rounds = self._staleness()
        if not delays:
            return
        if self._job.world.rank == 0:
            self._job.events.mark("staleness", delays=delays, rounds=rounds)
        updates = sum(delays.values())
        mean = math.fsum(late * count for late, count in delays.items()) / updates
        text = (
            f"{updates} updates so far: {mean:.2g} others between weights and update on average, {max(delays)} at most"
        )
        if rounds:
            text += f"; weights at most {max(rounds)} rounds behind"
        self._job.warnings[self._told :] = [text]

    # Apart.

    def _arrive(self, step: int) -> bool:
        """This worker's loop has come to a step; whether all stop at its end, to act on a notice."""
        notice = self._job.world.notice()
        table = self._claims.look()
        if notice or step >= table.top or table.has_free:
            with self._claims.change() as table:
                if notice:
                    if table.stop < 0:
                        table.stop = table.top + 1
                    table.notice = max(table.notice, notice)
                self._offer(table, step)
        return 0 <= table.stop <= step

    def _offer(self, table: ClaimTable, step: int) -> None:
        table.offer(step)
        self._mine = table.take(self._job.world.rank)

    def _work(self, step: int) -> None:
        """Compute what is free up to this step."""
        while self._mine is not None:
            self._compute(self._mine)

    def _known(self) -> StepResult:
        """The newest outcome that all know; until the first step of all is done, this waits for it."""

        def is_known() -> bool:
            table = self._claims.look()
            return table.newest >= 0 or not table.open

        self._wait_until(is_known)
        return outcome_of(self._claims.look(), self._job)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Until those who compute have come so far."""
        self._memory.until(ready, lambda: self._claims.look().owners())

    def _compute(self, step: int) -> None:
        self._job.world.check()
        pieces = self._job.feed.load(step, self._whole.pieces(step))
        self._pull(step)
        parts, changed = self._whole.gradients(step, pieces)
        self._push(step, pieces, parts, changed)

    def _drain(self, steps: int) -> None:
        """Until all steps before this one are done."""
        while True:
            self._memory.until(
                lambda: self._is_drained(steps) or self._claims.look().has_free, lambda: self._claims.look().owners()
            )
            with self._claims.change() as table:
                self._mine = table.take(self._job.world.rank)
            if self._mine is None and not table.open:
                return
            self._work(steps)

    def _await_others(self, steps: int) -> None:
        """Until all workers settle; so one that does not is found before it needs this one."""
        announced, arrived = self._memory.announced, self._flag + 1
        self._memory.announce(arrived, self._times)
        ranks = range(self._job.world.size)
        self._memory.until(
            lambda: self._is_drained(steps) and announced(arrived, self._times, ranks),
            lambda: [rank for rank in ranks if not announced(arrived, self._times, [rank])],
        )

    def _is_drained(self, steps: int) -> bool:
        """Whether no step is open.

        Raises:
            DisagreementError: another worker's loop is beyond the step after which this one settles.
        """
        table = self._claims.look()
        if table.top > max(steps, self._top):
            here = f"rank {self._job.world.rank} settling after step {steps - 1}"
            taken = sorted((rank, step) for step, rank in table.open.items() if step >= steps and rank != FREE)
            ahead = [f"rank {rank} at step {step}" for rank, step in taken]
            raise _different([here, *(ahead or [f"another one at step {table.top - 1}"])])
        return not table.open

    def _judge(self, step: int, pieces: list[Piece], parts: list[Part]) -> StepResult | None:
        return judge(self._job, step, parts, lambda bad: located_here(self._job, step, pieces, bad))

    def _apply(
        self,
        step: int,
        parts: list[Part],
        changed: list[torch.Tensor],
        done: int,
        factor: float = 1.0,
        norm: torch.Tensor | None = None,
    ) -> StepResult:
        """Make the update here, after so many steps; the gradients were judged."""
        job = self._job
        job.compute.buffers.accept(changed)
        seed_torch(seed_of(UPDATE, job.settings.seed, step))
        norm, rate = job.update.apply(done, factor, norm)
        return StepResult(mean_loss(parts, job.settings.exact), norm, rate)

    def _finish(self, table: ClaimTable, step: int, outcome: StepResult) -> None:
        """The step is done; look for the next one that is free."""
        self._close_step(table, step, outcome)
        self._mine = table.take(self._job.world.rank)

    def _close_step(self, table: ClaimTable, step: int, outcome: StepResult) -> None:
        """The step is done, with this outcome."""
        del table.open[step]
        table.newest, table.applied = step, outcome.applied
        table.loss, table.norm, table.rate = outcome.loss, float(outcome.norm), outcome.learning_rate
        table.version += outcome.applied
        self._newest = outcome


def _different(places: list[str]) -> DisagreementError:
    return DisagreementError(
        f"The workers are at different places: {', '.join(places)}. Every worker must take the same batches from "
        f"session.batches, and evaluate and save after the same ones; look for code that only some ranks run."
    )


def _with_newest(table: ClaimTable, book: dict[str, Any]) -> ClaimTable:
    """The table with the newest outcome that was written down."""
    if "newest" in book:
        table.newest, table.loss, table.norm, table.rate, table.applied = book["newest"]
    return table


def outcome_of(table: ClaimTable, job: Job) -> StepResult:
    """The newest outcome that all know, for a worker that did not compute the step."""
    if table.newest < 0:
        return StepResult(math.nan, math.nan, job.update.learning_rate)
    return StepResult(table.loss, table.norm, table.rate, applied=table.applied)


def shared_memory_of(job: Job) -> SharedMemory:
    """The memory of workers on one machine.

    Raises:
        ConfigError: they are on several, or on GPUs.
    """
    if job.world.shared_memory is None:
        raise ConfigError(
            f"strategy {job.settings.strategy!r} needs workers that share memory: all on one Linux machine, on its "
            f"CPU. These {job.world.size} are not: use 'allreduce' or 'local-sgd'."
        )
    return job.world.shared_memory


def servers_among(settings: Settings, workers: int) -> int:
    """How many servers there are among so many workers: as many as are set, or as they can be."""
    return min(settings.server.count, workers - settings.server.dedicated)


def remarks_on_servers(job: Job) -> list[str]:
    """What is to be said if these are fewer."""
    count, wanted = servers_among(job.settings, job.world.size), job.settings.server.count
    if count == wanted:
        return []
    return [f"{job.world.size} workers are left, of which {count} can serve: not server.count = {wanted}"]


def remarks_of(job: Job) -> list[str]:
    """What an asynchronous strategy does not promise."""
    warnings = [
        f"strategy {job.settings.strategy} promises no exact bits: what comes out depends on who was faster; the loss "
        f"of a report is that of the newest step that its worker knows of"
    ]
    if job.compute.buffers.live:
        warnings.append(
            "running statistics, as of batch norm, are those of the last update: updates of others are lost"
        )
    return warnings
