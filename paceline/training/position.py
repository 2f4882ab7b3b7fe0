"""Where the script is in the data: the batches that it gets, and the random numbers that it draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial

from paceline.data.feed import Piece
from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.data.order import UNKNOWN
from paceline.errors import ConfigError
from paceline.recovery.progress import Call
from paceline.step.job import Batch, Job
from paceline.step.trials.trial import warn
from paceline.training.workers import Workers

_NOT_LOADED = -1
"""In place of the generation of the workers for which a batch was loaded."""
_UNUSED = (
    "None of the {count} batches of this loop was given to session.step, so nothing was trained: call "
    "session.step(batch) for each. Weights that the script updates with an optimizer of its own are not synchronized "
    "between workers."
)


class Position:
    """The position of the script, and the batches from there on.

    Args:
        job: what is trained.
        workers: with whom.
        synchronize: called after the last batch; brings all workers to the same state.
        end_batch: called when the script is done with a batch.

    Attributes:
        steps: how many steps the script has come past.
        epoch: the one that :meth:`epochs` has given last; none outside of it.
        among_batches: whether the script is between a batch and the next one, or has left the loop there.
        used: how many batches of the present loop were given to a step.
    """

    def __init__(
        self, job: Job, workers: Workers, synchronize: Callable[[], None], end_batch: Callable[[], None]
    ) -> None:
        self._job = job
        self._workers = workers
        self._synchronize = synchronize
        self._end_batch = end_batch
        self.steps = 0
        self._target: Callable[[], int] = lambda: 0
        self.epoch: int | None = None
        self.among_batches = False
        self._calls: dict[str, tuple[Call, int]] = {}  # where the script last made a call, and how often there
        self._epochs = 0  # where the epochs of the script end
        self._given = -1  # the last step whose batch the script got
        self._running: Generator[Batch, None, None] | None = None
        self.used = self._left_out = 0
        self.move_to(workers.progress.steps)

    @property
    def target(self) -> int:
        """The position at which the last call of :meth:`batches` ends; ``UNKNOWN`` while that is not known."""
        return self._target()

    @property
    def asked(self) -> int:
        """The position, but none that the script has not asked for yet: a resumed one is behind what is done."""
        return min(self.steps, self.target)

    def count(self, what: str) -> tuple[Call, int]:
        """Where in the script this call is, and the how manyth of its kind there, from 0."""
        call = self.asked, -1 if self.epoch is None else self.epoch, int(self.among_batches)
        before, count = self._calls.get(what, (call, 0))
        number = count if before == call else 0
        self._calls[what] = call, number + 1
        return call, number

    def move_to(self, steps: int, before: bool = False, turn: int = 0) -> None:
        """Set the position, and with it the random numbers that the script draws now: after a step, or before one.

        ``turn``: of the phase after which they are drawn, if a batch has several.
        """
        self.steps = steps
        seed_all(seed_of(LOOP, self._job.settings.seed, steps, turn + 1 if turn else before))

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs below ``count`` from the present one on."""
        order, epoch = self._job.order, 0
        self._epochs = count
        try:
            while True:
                self.epoch = epoch = max(epoch, order.epoch_of(self._next_step()))
                if epoch >= count:
                    return
                self._begin_epoch(order.first_of(epoch))
                yield epoch
                epoch += 1
        finally:
            self.epoch = None

    def _begin_epoch(self, first: int) -> None:
        if first == UNKNOWN:
            raise ConfigError(
                "session.epochs cannot go on to the next epoch: the script has left the loop over the batches of a "
                "stream early, and nobody knows where its epoch ends. Take all its batches, or give session.batches a "
                "number of steps."
            )
        self._target, self.among_batches = (lambda: first), False
        if self.steps < first:
            self.move_to(first)

    def _next_step(self) -> int:
        """The step whose batch comes next."""
        progress = self._workers.progress
        again = self._given < progress.received - 1 and progress.result is not None and progress.again
        return progress.received - 1 if again else self.steps

    def batches(self, count: int | None, epochs: bool = False, last: int | None = None) -> Iterator[Batch]:
        """Iterate over the batches of the next ``count`` steps or epochs; the iterator before ends.

        Args:
            count: of steps or epochs; none: to the end of the present epoch.
            epochs: whether it counts epochs.
            last: the step after which no batch follows, if any.
        """
        start, order = self.target, self._job.order
        if self._running is not None:
            self._running.close()
            start = min(start, self.steps)
        if count is None:
            epoch = order.epoch_of(start) if self.epoch is None else self.epoch
            self._target = lambda: order.first_of(epoch + 1)
        else:
            steps = count
            self._target = partial(order.end_of, count, start) if epochs else lambda: start + steps
        self._running = self._batches_until(lambda: min(self.target, UNKNOWN if last is None else last), count)
        return self._running

    def _batches_until(self, end: Callable[[], int], count: int | None) -> Generator[Batch, None, None]:
        self.used = self._left_out = 0
        final = end() if self.epoch is None else max(end(), self._job.order.first_of(self._epochs))
        counted = count is not None or self.epoch is not None
        self._job.audits.last = final - 1 if counted and final != UNKNOWN else None
        self._job.events.mark("batches", position=self.steps, steps=None if final == UNKNOWN else final)
        while True:
            target = end()
            progress = self._workers.progress
            if progress.steps > self.steps:
                self.move_to(progress.steps)
            last = progress.received - 1
            if self._given < last < target and progress.result is not None and progress.again:
                # The others may be in the middle of what the script does after this step, such as an evaluation, as
                # was the run that saved the checkpoint: so this worker gets its batch, too, and step() returns their
                # result.
                self.move_to(last, before=True)
                yield self._batch(last, [], 0.0, _NOT_LOADED)
                self._end_batch()
            elif self.steps < target:
                yield from self._load(self.steps, end)
            else:
                self.among_batches = False
                self._synchronize()
                if self._workers.progress.steps <= self.steps:
                    if self._left_out > 1 and not self.used:
                        warn(self._job, _UNUSED.format(count=self._left_out))
                    return

    def _load(self, start: int, end: Callable[[], int]) -> Iterator[Batch]:
        """Load the batches of some steps, until the workers change: then this one computes other pieces."""
        generation, before = self._job.world.generation, time.perf_counter()
        stop = end() if self._workers.loads_ahead else start + 1
        activity, loop = self._workers.activity, self._job.loop
        activity.begin("in the data loader")
        loop.look()
        for step, pieces in enumerate(self._job.feed.steps(start, stop, self._workers.strategy.pieces), start):
            activity.begin("in the script")
            loop.refresh()
            waited = time.perf_counter() - before
            self.move_to(step, before=True)
            yield self._batch(step, pieces, waited, generation)
            if self.steps == step:
                self._left_out += 1
                self._leave_out(step)
            else:
                self._end_batch()
            if self._job.world.generation != generation or (stop == UNKNOWN and self.steps >= end()):
                return
            before = time.perf_counter()
            activity.begin("in the data loader")
            loop.look()

    def _batch(self, step: int, pieces: list[Piece], waited: float, generation: int) -> Batch:
        order, self._given, self.among_batches = self._job.order, step, True
        samples, last = order.samples_of(step), order.is_last(step)
        return Batch(step, order.epoch_of(step), samples, last, pieces, waited, generation)

    def _leave_out(self, step: int) -> None:
        """Pass over a step whose batch the script did not give to ``step``."""
        progress = self._workers.progress
        progress.left_out.add(step)
        if progress.steps == step:
            progress.steps = step + 1
        self.move_to(step + 1)
