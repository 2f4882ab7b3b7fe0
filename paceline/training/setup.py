"""Set-up of a run in this process: identity, settings, event log, coordinator, state and training loop."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline import config
from paceline.adapters.trackers.tracking import Tracking
from paceline.checkpoint.background import join_all
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.collectives.agreement import versions
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient, SocketLink
from paceline.comm.rendezvous.ulfm import find_coordinator
from paceline.coordinator.failure import known_errors
from paceline.data.sampler import SampledOrder
from paceline.environments import env
from paceline.errors import InputError
from paceline.events import EventLog
from paceline.settings import Arguments, CheckpointSettings
from paceline.step.job import Job
from paceline.step.optimizers.own_values import OwnValues
from paceline.step.trials.trial import warn
from paceline.system import excepthook
from paceline.training import build, kept_settings
from paceline.training.loop import TrainingLoop
from paceline.training.recovery.beginning import Beginning
from paceline.training.recovery.preemption import catch_notices
from paceline.training.report import report_profile
from paceline.training.script_state import ScriptState

_log = logging.getLogger("paceline")
_LAST_SAVE_SECONDS = 5.0
_current: TrainingLoop | None = None
"""Loop of the newest session. Earlier sessions are closed."""
_count = 0
"""Number of runs set up in this process."""


@dataclass(frozen=True)
class Run:
    """Objects that a session works with.

    Attributes:
        job: training job.
        loop: training loop.
        state: training state.
        script: registered values of the script.
        tracking: recorder of the script's values and evaluations.
        notes: messages on applied defaults, and warnings.
    """

    job: Job
    loop: TrainingLoop
    state: TrainingState
    script: ScriptState
    tracking: Tracking
    notes: tuple[str, ...]


def set_up(given: build.Components, arguments: Arguments) -> Run:
    """Build the job, run the rendezvous, and return the objects of a session. See :func:`paceline.start`."""
    global _count, _current
    who = env.identity()
    folder = env.run_directory()
    log = EventLog(folder / "events" if folder else None, who.rank, who.generation)
    launched = env.launch_info()
    coordinator: CoordinatorClient | None = None
    excepthook.install(
        lambda: (log.rank, who.world_size),
        env.error_record(),
        _position,
        lambda: _close(log, coordinator),
        known_errors.explain,
    )
    number = _count + 1
    resolved = kept_settings.resolve(arguments, folder, number, who.rank)
    if (report_to := env.config_report()) is not None:
        build.report_config(resolved, report_to)
        raise SystemExit(0)
    tracking = Tracking(resolved.settings, resolved.sources, log, folder, number)
    if _current is not None:
        _current.close()
        _current = None
    if (launched := launched or find_coordinator(resolved.settings.timeout_seconds)) is not None:
        seconds = resolved.settings.timeout_seconds
        link = SocketLink(launched.coordinator, launched.worker, launched.key, seconds)
        coordinator = CoordinatorClient(link, launched.worker, seconds, number)
        atexit.register(coordinator.end_script)
    job, facts = build.build(given, resolved, who, log, coordinator, launched.largest if launched else 0)
    atexit.register(log.close)
    _count = number  # also if start fails from now on, because the coordinator knows this session number
    run = _begin(job, facts, folder, number, tracking)
    if (profile_to := env.profile_report()) is not None:
        report_profile(job, given.loss, profile_to)
        raise SystemExit(0)
    return run


def _begin(job: Job, facts: dict[str, object], folder: Path | None, number: int, tracking: Tracking) -> Run:
    """Run the rendezvous, and load the initial state or a checkpoint."""
    global _current
    settings, script = job.settings, ScriptState()
    job.loop.forward_values.tell = partial(warn, job)
    state = TrainingState(job.compute.model, job.update, *build.conditions(job), job.strategy_state, script, job.loop)
    own = OwnValues(job.update.optimizer, dict(job.compute.model.named_parameters()))
    own.tell = partial(warn, job)
    state.parts.update(data=job.order, buffers=job.compute.buffers, optimizer=own)
    if isinstance(job.order, SampledOrder):
        job.order.may_change = lambda: bool(job.loop.changed)
    if job.compute.carried is not None:
        state.parts["carried"] = job.compute.carried
    saves, resume = settings.checkpoint, settings.resume
    if env.trace() is not None:  # a traced run starts from the beginning and saves nothing
        saves, resume = CheckpointSettings(), None
    state.parts[kept_settings.PART] = kept_settings.KeptSettings(config.kept(settings, job.given))
    place = kept_settings.folder(settings, folder, number)
    checkpointer = Checkpointer(job.world, saves, place, job.events, job.replicated)
    leaves = job.world.coordinator is not None or saves.every is not None
    job.update.on_other_names = partial(_tell_other_names, job, leaves)
    loop = _current = TrainingLoop(Beginning(job, facts, state, checkpointer, resume), script)
    if checkpointer.enabled or job.world.coordinator is not None:
        catch_notices(job.world)
    rules = {"server.mode": settings.server.mode, "pipeline.schedule": settings.pipeline.schedule}
    environment = {"workers": job.world.size, "device": job.world.device.type, **versions()}
    tracking.begin(state.run, loop.position.steps, environment)
    job.events.mark("start", strategy=settings.strategy, workers=job.world.size, run=state.run, **rules)
    return Run(job, loop, state, script, tracking, _noted(job))


def _tell_other_names(job: Job, leaves: bool, text: str) -> None:
    """Report that the model's parameter or buffer names have changed since the start.

    Args:
        job: training job.
        leaves: whether the state may be saved or sent to joining workers. If not, only warn.
        text: description of the change.

    Raises:
        InputError: ``leaves`` is true.
    """
    if leaves:
        raise InputError(text)
    if text not in job.learned.warnings:
        warn(job, text)


def _noted(job: Job) -> tuple[str, ...]:
    warnings = build.warnings(job)
    notes = (*build.summary(job), *warnings)
    for note in notes:
        _log.log(logging.WARNING if note in warnings and job.world.rank == 0 else logging.INFO, note)
        job.events.mark("note", text=note, **({"warning": True} if note in warnings else {}))
    return notes


def _position() -> int:
    """Return the current step for a failure report."""
    return 0 if _current is None else _current.position.steps


def _close(log: EventLog, coordinator: CoordinatorClient | None) -> None:
    """Clean up before a failed process exits: wait at most 5 seconds for running saves, then write out the events."""
    join_all(_LAST_SAVE_SECONDS)
    log.close()
    if coordinator is not None:
        coordinator.end_script()  # the launcher reports the exit code, so the closed connection is not a loss
