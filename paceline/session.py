"""The page to read first: what a script writes, and what happens then.

``start`` brings the workers together and checks that they agree. ``batches`` hands out the microbatches of this worker,
``step`` lets the strategy train on them, ``evaluate`` measures, ``save`` keeps.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral
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
from paceline.config import quoted
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.failure import known_errors
from paceline.recovery.preemption import catch_notices
from paceline.settings import Arguments, CheckpointSettings
from paceline.step.forward import loss_of
from paceline.step.job import Batch, Job
from paceline.training_loop import TrainingLoop

__all__ = ["Batch", "Report", "Session", "start"]

_log = logging.getLogger("paceline")
_current: TrainingLoop | None = None
"""The loop of the newest session; those before it have closed."""
_count = 0
"""How often start() was called."""
_LAST_SAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Report:
    """What one step did; the same on every worker but for the times.

    With an asynchronous strategy the result is that of the newest step that this worker knows of (it waits for the
    first), with local SGD, between two averages, that of this worker's share, and with PipeDream that of what came back
    to this worker.

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


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


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
    launched = env.launch_info()
    name = launched.name if launched else f"rank-{who.rank}"
    path = run / "errors" / f"{name}.json" if run else None
    excepthook.install(lambda: (log.rank, who.world_size), path, _position, lambda: _close(log), known_errors.explain)
    resolved = config.resolve_here(settings)
    report_to = env.config_report()
    if report_to is not None:
        jobs.report_config(resolved, report_to)
        raise SystemExit(0)
    given = jobs.Components(model, optimizer, data, loss, forward, schedule, collate)
    global _count, _current
    number = _count + 1
    if _current is not None:
        _current.close()
        _current = None
    coordinator = None
    if launched is not None:
        coordinator = CoordinatorClient(
            launched.coordinator, launched.worker, launched.key, resolved.settings.timeout_seconds, number
        )
        atexit.register(coordinator.end_script)
    job, facts = jobs.build(given, resolved, who, log, coordinator, launched.largest if launched else 0)
    atexit.register(log.close)
    _count = number  # also if it fails: the others have heard of it
    session = Session(job, facts, run, number, by_loss=loss is not None)
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


def _position() -> int:
    """The step that the session is at, for the report of a failure."""
    return 0 if _current is None else _current.position


def _close(log: EventLog) -> None:
    """Before a failed process ends: let a save under way end, if that takes not long, and write out the events."""
    join_all(_LAST_SAVE_SECONDS)
    log.close()


class Session:
    """A training run, as one of its workers sees it. Made by :func:`paceline.start`."""

    def __init__(self, job: Job, facts: dict[str, object], run: Path | None, number: int, *, by_loss: bool) -> None:
        global _current
        self._job = job
        self._by_loss = by_loss
        settings = job.settings
        self._state = TrainingState(
            job.compute.model, job.update, job.order.facts(), jobs.numerics(settings), versions(), job.strategy_state
        )
        saves, resume = settings.checkpoint, settings.resume
        if env.trace() is not None:  # a run that is recorded starts from the beginning and saves nothing
            saves, resume = CheckpointSettings(), None
        folder = "checkpoints" if number == 1 else f"checkpoints-{number}"
        self._checkpointer = Checkpointer(job.world, saves, run / folder if run else None, job.events, job.replicated)
        self._loop = _current = TrainingLoop(job, facts, self._state, self._checkpointer, resume)
        if self._checkpointer.enabled or job.world.coordinator is not None:
            catch_notices(job.world)
        rules = {"server.mode": settings.server.mode, "pipeline.schedule": settings.pipeline.schedule}
        job.events.mark("start", strategy=settings.strategy, workers=job.world.size, **rules)
        warnings = jobs.warnings(job)
        self._notes = (*jobs.summary(job), *warnings)
        for note in self._notes:
            _log.log(logging.WARNING if note in warnings and job.world.rank == 0 else logging.INFO, note)
            job.events.mark("note", text=note)

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
        return self._loop.position

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data."""
        return self._job.order.steps_per_epoch

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """The batches of the next epochs or steps; calls add up, and each call ends the one before.

        A resumed run goes through the same calls and gets nothing from those that are already done, so a loop over
        epochs with one call in each continues where it was. A batch not given to :meth:`step` is left out.

        Raises:
            ConfigError: not exactly one of ``epochs`` and ``steps`` is given, or it is no whole number from 0 on.
        """
        if (epochs is None) == (steps is None):
            raise ConfigError("batches() takes either epochs= or steps=.")
        what, count, each = ("epochs", epochs, self.steps_per_epoch) if steps is None else ("steps", steps, 1)
        if not _is_count(count):
            raise ConfigError(f"batches({what}={quoted(count)}): give a whole number from 0 on.")
        return self._loop.batches(int(count or 0) * each)

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
        result, seconds = self._loop.step(batch)
        return Report(
            step=batch.step,
            loss=result.loss,
            samples=self._job.order.samples_before(batch.step + 1),
            seconds=seconds,
            samples_per_second=batch.samples / seconds,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
            applied=result.applied,
            notes=(*self._notes, *self._job.learned.warnings, *self._job.warnings),
        )

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
        return self._loop.evaluate(forward, data)

    def save(self) -> Path | str:
        """Write a checkpoint of the state after the steps done; returns its directory, or its URL.

        It is in its place when this returns on rank 0, which writes it.

        Raises:
            CheckpointError: there is nowhere to save to, or writing failed, now or in the background before.
        """
        return self._loop.save()

    def fingerprint(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state, as 64 hex digits.

        It is the same on every rank; any rank may call it alone. (With an asynchronous strategy, local SGD or a
        pipeline: after the last batch of :meth:`batches`, :meth:`evaluate` or :meth:`save`.)
        """
        return fingerprint(self._state.tensors())
