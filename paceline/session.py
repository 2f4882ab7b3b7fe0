"""The page to read first: what a script writes, and what happens then.

``start`` brings the workers together and checks that they agree. ``batches`` hands out the microbatches of this worker,
``step`` lets the strategy train on them, ``evaluate`` measures, ``save`` keeps.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import config, env, excepthook
from paceline import job as jobs
from paceline.agreement import versions
from paceline.checkpoint.background import join_all
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.tensors import fingerprint
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.data.feed import Piece
from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.recovery.preemption import catch_notices
from paceline.settings import Arguments, CheckpointSettings
from paceline.step.forward import loss_of
from paceline.step.job import Job
from paceline.training_loop import TrainingLoop, record_step
from paceline.verify.trace_writer import TraceWriter

_log = logging.getLogger("paceline")
_sessions: list[TrainingLoop] = []
"""The newest session's; those before it have closed."""
_count = 0
_LAST_SAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Batch:
    """This worker's pieces of the batch of one step.

    Attributes:
        step: the number of the step, from 0.
        epoch: the epoch it belongs to, from 0.
        samples: samples in the whole batch, over all workers.
        last: whether it is the last batch of its epoch.
        pieces: the microbatches that this worker computes.
        waited: seconds spent to load them.
    """

    step: int
    epoch: int
    samples: int
    last: bool
    pieces: list[Piece]
    waited: float


@dataclass(frozen=True)
class Report:
    """What one step did; the same on every worker but for the times.

    With an asynchronous strategy the outcome is that of the newest step that this worker knows of (it waits for the
    first there is), with local SGD, between two averages, that of this worker's share, and with PipeDream that of what
    came back to this worker.

    Attributes:
        step: the number of the step, from 0.
        loss: the mean loss over the whole batch, before the update.
        samples: samples seen since the beginning of training, this step's included.
        seconds: time for loading the batch and for the step.
        samples_per_second: samples of this batch, over all workers, per second.
        gradient_norm: the global 2-norm of the mean gradient, before clipping.
        learning_rate: what the update used (first parameter group).
        applied: false if the step was skipped because its loss was not finite.
        notes: what was applied that the script did not spell out, such as a scaled learning rate, and why.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    samples_per_second: float
    gradient_norm: float
    learning_rate: float
    applied: bool
    notes: tuple[str, ...]


def start(
    *,
    model: nn.Module,
    optimizer: Callable[..., Optimizer],
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    **settings: Unpack[Arguments],
) -> Session:
    """Bring the workers together to train a model.

    Alone, the script trains in one process; under ``paceline run`` or ``torchrun`` every worker calls this with the
    same arguments, and they train together.

    Args:
        model: the model, built alike on every worker (seed before you build it). It is moved to the worker's device.
        optimizer: a factory, called with the model's parameters, such as ``partial(torch.optim.SGD, lr=0.1)``.
        data: a map-style data set; with ``loss`` its items are pairs (input, target).
        loss: ``loss(output, target)``: a scalar, the mean over the samples given, or a pair (sum, count), for a mean
            over something else than samples, such as tokens.
        forward: ``forward(model, microbatch)``, instead of ``loss``, with the same choice of results.
        schedule: a factory, called with the optimizer, that returns a torch learning-rate scheduler; stepped once for
            each update, without a metric.
        collate: makes a microbatch from a list of items; torch's default if none.
        settings: the fields of :class:`paceline.Settings`; the command line and the environment go before them.

    Raises:
        ConfigError: a setting cannot be used.
        InputError: an argument cannot be used.
        StartError: the workers did not come together or do not agree.
        CheckpointError: ``resume`` names something that cannot be used.
    """
    who = env.identity()
    run = env.run_directory()
    log = EventLog(run / "events" if run else None, who.rank, who.generation)
    progress = [0]
    launched = env.launch_info()
    name = launched.name if launched else f"rank-{who.rank}"
    path = run / "errors" / f"{name}.json" if run else None
    excepthook.install(lambda: (log.rank, who.world_size), path, lambda: progress[0], lambda: _close(log))
    resolved = config.resolve_here(settings)
    report_to = env.config_report()
    if report_to is not None:
        jobs.report_config(resolved, report_to)
        raise SystemExit(0)
    given = jobs.Arguments(model, optimizer, data, loss, forward, schedule, collate)
    global _count
    place = _count + 1
    while _sessions:
        _sessions.pop().close()
    coordinator = (
        CoordinatorClient(launched.coordinator, launched.worker, resolved.settings.timeout_seconds, place)
        if launched
        else None
    )
    job, facts = jobs.job_of(given, resolved, who, log, coordinator, launched.largest if launched else 0)
    atexit.register(log.close)
    _count = place  # also if it fails: the others have heard of it
    session = Session(job, facts, run, place, progress, by_loss=loss is not None)
    if coordinator is not None:
        atexit.register(coordinator.finish)
    profile_to = env.profile_report()
    if profile_to is not None:
        _report_profile(job, loss, profile_to)
        raise SystemExit(0)
    return session


def _report_profile(job: Job, loss: Callable[[Any, Any], Any] | None, path: Path) -> None:
    """Write what the model costs, for ``paceline profile``."""
    from paceline.plan import costs
    from paceline.plan.profile import profile  # what traces models takes seconds to import

    found = profile(job, loss)
    if job.world.rank == 0:
        costs.write(found, path)


def _close(log: EventLog) -> None:
    """Before a failed process ends: let a save under way end, if that takes not long, and write out the events."""
    join_all(_LAST_SAVE_SECONDS)
    log.close()


class Session:
    """A training run, as one of its workers sees it. Made by :func:`paceline.start`."""

    def __init__(
        self, job: Job, facts: dict[str, object], run: Path | None, place: int, progress: list[int], *, by_loss: bool
    ) -> None:
        self._job = job
        self._by_loss = by_loss
        numerics = jobs.numerics(job.settings)
        self._state = TrainingState(
            job.compute.model, job.update, asdict(job.order), numerics, versions(), job.strategy_state
        )
        traced = env.trace() is not None
        keeping = CheckpointSettings() if traced else job.settings.checkpoint
        name = "checkpoints" if place == 1 else f"checkpoints-{place}"
        self._checkpointer = Checkpointer(job.world, keeping, run / name if run else None, job.events)
        self._progress = progress
        resume = None if traced else job.settings.resume
        self._loop = TrainingLoop(job, facts, self._state, self._checkpointer, resume)
        _sessions.append(self._loop)
        if self._checkpointer.enabled or job.world.coordinator is not None:
            catch_notices(job.world)
        rules = {"server.mode": job.settings.server.mode, "pipeline.schedule": job.settings.pipeline.schedule}
        job.events.mark("start", strategy=job.settings.strategy, workers=job.world.size, **rules)
        warnings = jobs.warnings(job)
        self._notes = (*jobs.notes(job), *warnings)
        for note in self._notes:
            _log.log(logging.WARNING if note in warnings and job.world.rank == 0 else logging.INFO, note)
            job.events.mark("note", text=note)
        self._target = self._fed = self._position = 0
        self._given = -1  # the last step whose batch the script has got
        self._running: Generator[Batch, None, None] | None = None
        self._move_to(self._loop.standing.steps)
        self._trace = self._start_trace(job)

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._job.world.rank

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._job.world.size

    @property
    def position(self) -> int:
        """Steps done since the beginning of training; from here a resumed run goes on."""
        return self._position

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data."""
        return self._job.order.steps_per_epoch

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """The batches of the next epochs or steps; calls add up, and each call ends the one before.

        A resumed run goes through the same calls and gets nothing from those that are already done, so a loop over
        epochs with one call in each continues where it was. A batch not given to :meth:`step` is left out.

        Raises:
            ConfigError: not exactly one of ``epochs`` and ``steps`` is given, or it is negative.
        """
        if (epochs is None) == (steps is None):
            raise ConfigError("batches() takes either epochs= or steps=.")
        count = steps if steps is not None else (epochs or 0) * self.steps_per_epoch
        if count < 0:
            raise ConfigError(f"batches() cannot give {count} steps.")
        if self._running is not None:
            self._running.close()
            self._target = min(self._target, self.position)
        self._target += count
        self._running = self._until(self._target)
        return self._running

    def _until(self, target: int) -> Generator[Batch, None, None]:
        job = self._job
        if self._trace is not None:
            target = min(target, self._trace.steps)
        job.events.mark("batches", position=self.position, steps=target)
        course = self._loop
        while True:
            if course.standing.steps > self.position:
                self._move_to(course.standing.steps)
            if self._given < course.taken - 1 < target and course.standing.outcome is not None:
                yield self._again(course.taken - 1)
            elif self.position < target:
                stop = target if course.loads_ahead else self.position + 1
                yield from self._pass(self.position, stop)
            else:
                course.settle()
                if course.standing.steps <= self.position:
                    return

    def _again(self, step: int) -> Batch:
        """The batch of a step that the others have done, for a worker that has their state since.

        They may be in the middle of what the script does after it, such as an evaluation: so this worker does that too.
        """
        self._move_to(step, before=True)
        return self._batch(step, [], 0.0)

    def _batch(self, step: int, pieces: list[Piece], waited: float) -> Batch:
        order = self._job.order
        self._given = step
        last = (step + 1) % order.steps_per_epoch == 0
        return Batch(step, order.epoch_of(step), order.samples_of(step), last, pieces, waited)

    def _pass(self, start: int, stop: int) -> Iterator[Batch]:
        course = self._loop
        views = course.views
        before = time.perf_counter()
        course.at("in the data loader")
        for step, pieces in enumerate(self._job.feed.steps(start, stop, course.strategy.pieces), start):
            self._fed = views
            course.at("in the script")
            waited = time.perf_counter() - before
            self._move_to(step, before=True)
            yield self._batch(step, pieces, waited)
            if self.position == step:  # left out by the script
                self._move_to(step + 1)
            if course.views != views:  # the shares are others now
                return
            before = time.perf_counter()
            course.at("in the data loader")

    def step(self, batch: Batch) -> Report:
        """Train on a batch: forward, backward, synchronise, update.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite (unless ``nonfinite`` is ``skip``).
            InputError: the loss is no scalar; a parameter gets no gradient from some microbatches, or a sparse one; the
                forward pass changes a weight; the optimizer, its state or the model cannot be used on several workers.
            DisagreementError: the workers are not at the same step.
            WorkerLost: another worker went away or stayed silent.
            CheckpointError: a checkpoint was due and could not be written, now or in the background before.
        """
        begin = time.perf_counter()
        outcome = self._loop.step(batch.step, batch.pieces, self._fed)
        self._move_to(batch.step + 1)
        seconds = time.perf_counter() - begin + batch.waited
        report = Report(
            step=batch.step,
            loss=outcome.loss,
            samples=self._job.order.samples_before(batch.step + 1),
            seconds=seconds,
            samples_per_second=batch.samples / seconds,
            gradient_norm=float(outcome.norm),
            learning_rate=outcome.learning_rate,
            applied=outcome.applied,
            notes=(*self._notes, *self._job.warnings),
        )
        if batch.step >= self._loop.taken:  # else it stands in the records of those that took it
            record_step(self._job, batch.step, outcome, seconds, batch.waited)
            if self._trace is not None:
                self._trace.step(report.step, report.loss, report.samples, report.learning_rate)
        if self.position == self._loop.standing.steps and self._checkpointer.due(self.position):
            self._loop.save(self._checkpointer.begin_save)
        self._loop.heed(outcome.notice)
        return report

    def evaluate(self, data: Any, metric: Callable[[Any, Any], Any] | None = None) -> float:
        """The mean of a metric over a data set; every worker must call it, and all get the same value.

        Args:
            data: a map-style data set like the one trained on. Each sample is visited exactly once.
            metric: ``metric(output, target)``, or ``metric(model, microbatch)`` in a session with ``forward``: a
                number, the mean over the samples given, or a pair (sum, count). None: the loss.

        Raises:
            InputError: the data set is empty, the metric returns no number, or it changes a weight of the model.
            DisagreementError: the weights are not the same on all workers; only looked for with ``exact``.
            WorkerLost: another worker went away or stayed silent.
        """
        forward = metric or self._job.compute.forward
        if metric is not None and self._by_loss:
            forward = loss_of(metric)
        with self._job.events.span("evaluate", step=self.position):
            value = self._loop.evaluate(min(self.position, self._target), forward, data)
        self._move_to(self.position)
        return value

    def save(self) -> Path | str:
        """Write a checkpoint of the state after the steps done; returns its directory, or its URL.

        It is in its place when this returns on rank 0, which writes it.

        Raises:
            CheckpointError: there is nowhere to save to, or writing failed, now or in the background before.
        """
        return self._loop.save(self._checkpointer.save)

    def fingerprint(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state, as 64 hex digits.

        It is the same on every rank; any rank may call it alone. (With an asynchronous strategy, local SGD or a
        pipeline: after the last batch of :meth:`batches`, :meth:`evaluate` or :meth:`save`.)
        """
        return fingerprint(self._state.tensors())

    def _move_to(self, position: int, before: bool = False) -> None:
        """Set the position, and with it the random numbers that the script draws now: after a step, or before one."""
        self._position = self._progress[0] = position
        self._loop.standing.steps = max(self._loop.standing.steps, position)
        seed_all(seed_of(LOOP, self._job.settings.seed, position, before))

    def _start_trace(self, job: Job) -> TraceWriter | None:
        wanted = env.trace()
        if wanted is None:
            return None
        return TraceWriter(wanted, job, self._state.tensors)
