"""Iterators over epochs and batches for the script."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import partial
from numbers import Integral

from paceline.config import quoted
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import UNKNOWN
from paceline.errors import ConfigError
from paceline.step.context import Batch
from paceline.step.probes.probe import warn
from paceline.training.loop import TrainingLoop

_NOT_LOADED = -1  # generation of a batch without loaded microbatches
_UNUSED = (
    "None of the {count} batches of this loop was given to session.step, so nothing was trained: call "
    "session.step(batch) for each. Weights that the script updates with an optimizer of its own are not synchronized "
    "between workers."
)
_UNEVEN = (
    "The collate function returned {sizes}. The loss is a mean over a microbatch, and each microbatch is weighted by "
    "its items, so samples do not have equal weight: the result is not that of one large batch. Return the loss as the "
    "pair (sum, count), or leave samples out of the data set before paceline.start. Training continues."
)


def _count_in(call: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ConfigError(f"{call}{quoted(value)}): give a whole number from 0 on.")
    return int(value)


class Batches:
    """Iterators over epochs and batches, from the script's current position."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._context = loop.context
        self._position = loop.position
        self._last_epoch = 0  # end of the script's epoch loop, exclusive
        self._left_out = 0  # batches of the current loop that were not passed to a step
        self._running: Generator[Batch, None, None] | None = None
        self._warned = False  # of a collate function that changes the weights of samples

    def epochs(self, first: int, end: int | None = None) -> Iterator[int]:
        """Iterate over the epochs from the current one, as :meth:`paceline.Session.epochs` does.

        Raises:
            ConfigError: an argument is not a non-negative integer.
        """
        if end is None:
            return self._epochs(_count_in("epochs(", first))
        count = _count_in("epochs(..., ", end) - _count_in("epochs(", first)
        return (first + epoch for epoch in self._epochs(max(0, count)))

    def _epochs(self, count: int) -> Iterator[int]:
        self._check_count("epochs(0)", count)
        position, order, epoch = self._position, self._context.order, 0
        self._last_epoch = count
        try:
            while True:
                position.epoch = epoch = max(epoch, order.epoch_of(self._next_step()))
                if epoch >= count:
                    return
                self._begin_epoch(order.first_of(epoch))
                yield epoch
                epoch += 1
        finally:
            position.epoch = None

    def _check_count(self, call: str, count: int | None) -> None:
        if count == 0 and self._position.steps == 0:
            warn(self._context, f"session.{call} is an empty loop, which trains nothing. Give it 1 or more.")

    def _begin_epoch(self, first: int) -> None:
        if first == UNKNOWN:
            if self._context.order.grows:
                self._context.order.steps_at(self._position.steps)  # raises because there are no samples
            raise ConfigError(
                "session.epochs cannot move on to the next epoch: the script has left the loop over the batches of a "
                "stream early, so the end of its epoch is unknown. Take all its batches, or give session.batches a "
                "number of steps."
            )
        self._position.aim_at(lambda: first)
        self._position.among_batches = False
        if self._position.steps < first:
            self._position.move_to(first)

    def _next_step(self) -> int:
        """Return the step of the next batch."""
        progress = self._loop.progress
        again = progress.gives_again(self._position.given)
        return progress.received - 1 if again else self._position.steps

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """Return an iterator over the batches of the next steps or epochs, and close the previous iterator.

        Without a number it continues to the end of the current epoch.

        Raises:
            ConfigError: both numbers are given, or a number is not a non-negative integer.
        """
        if epochs is not None and steps is not None:
            raise ConfigError("batches() takes either epochs= or steps=.")
        unit, asked = ("epochs", epochs) if steps is None else ("steps", steps)
        count = None if asked is None else _count_in(f"batches({unit}=", asked)
        self._check_count(f"batches({unit}=0)", count)
        position, order = self._position, self._context.order
        start = position.target
        if self._running is not None:
            self._running.close()
            start = min(start, position.steps)
        if count is None:
            epoch = order.epoch_of(start) if position.epoch is None else position.epoch
            position.aim_at(lambda: order.first_of(epoch + 1))
        else:
            end = start + count
            position.aim_at(partial(order.end_of, count, start) if unit == "epochs" else lambda: end)
        self._running = self._until_target(counted=count is not None or position.epoch is not None)
        return self._running

    def _end(self) -> int:
        """Return the step at which the current loop ends, exclusive."""
        return min(self._position.target, self._loop.records.last_step)

    def _until_target(self, counted: bool) -> Generator[Batch, None, None]:
        context, position = self._context, self._position
        used, self._left_out = position.used, 0
        final = self._end() if position.epoch is None else max(self._end(), context.order.first_of(self._last_epoch))
        context.audits.last = final - 1 if counted and final != UNKNOWN and not context.order.grows else None
        context.events.mark("batches", position=position.steps, steps=None if final == UNKNOWN else final)
        while True:
            target, progress = self._end(), self._loop.progress
            if progress.steps > position.steps:
                position.move_to(progress.steps)
            last = progress.received - 1
            if last < target and progress.gives_again(position.given):
                # The other workers, or the run that saved the checkpoint, may be in code after this step, such as an
                # evaluation. So this worker's script gets the batch, too, and step() returns their result.
                position.move_to(last, before=True)
                yield self._batch(last, [], 0.0, _NOT_LOADED)
                self._loop.end_batch()
            elif position.steps < target:
                yield from self._load(position.steps)
            else:
                position.among_batches = False
                self._loop.synchronize()
                if self._loop.progress.steps <= position.steps:
                    if self._left_out > 1 and position.used == used:
                        warn(context, _UNUSED.format(count=self._left_out))
                    return

    def _load(self, start: int) -> Iterator[Batch]:
        """Yield batches from a step on. Stop when the workers change, because the microbatches are then reassigned."""
        loop, context, position = self._loop, self._context, self._position
        generation, before = context.world.generation, time.perf_counter()
        stop = self._end() if loop.loads_ahead else start + 1
        if context.order.grows:  # the script may add samples to the next epoch until it begins
            stop = min(stop, context.order.first_of(context.order.epoch_of(start) + 1))
        loop.activity.begin("in the data loader")
        context.loop.record_changes()
        for step, groups in enumerate(context.feed.steps(start, stop, loop.strategy.groups), start):
            loop.activity.begin("in the script")
            context.loop.refresh()
            waited = time.perf_counter() - before
            position.move_to(step, before=True)
            yield self._batch(step, groups, waited, generation)
            if position.steps == step:
                self._left_out += 1
                loop.leave_out(step)
            else:
                loop.end_batch()
            self._compare_sizes()
            if context.world.generation != generation or (stop == UNKNOWN and position.steps >= self._end()):
                return
            before = time.perf_counter()
            loop.activity.begin("in the data loader")
            context.loop.record_changes()

    def _compare_sizes(self) -> None:
        """Warn once if the collate function gives samples unequal weights."""
        sizes = self._context.feed.sizes
        if sizes is not None and sizes.uneven and not self._warned and self._context.compute.counts is False:
            self._warned = True
            warn(self._context, _UNEVEN.format(sizes=sizes.uneven))

    def _batch(self, step: int, groups: list[MicrobatchGroup], waited: float, generation: int) -> Batch:
        order, self._position.given, self._position.among_batches = self._context.order, step, True
        samples, last = order.samples_of(step), order.is_last(step)
        return Batch(step, order.epoch_of(step), samples, last, groups, waited, generation)
