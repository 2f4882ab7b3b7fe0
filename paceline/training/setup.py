"""Set-up of a run in this process: identity, settings, event log, coordinator, state and training loop."""

from __future__ import annotations

import atexit
import logging
import platform
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from paceline import config
from paceline.adapters.trackers.tracking import Tracking, masked
from paceline.checkpoint.background import join_all
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.collectives.agreement import versions
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient, SocketLink
from paceline.comm.rendezvous.ulfm import find_coordinator
from paceline.coordinator.failure import known_errors
from paceline.data.growing.order import GrowingOrder
from paceline.data.sampler import SampledOrder
from paceline.data.streams.order import StreamOrder
from paceline.environments import env
from paceline.errors import ConfigError, InputError
from paceline.events import EventLog, Level
from paceline.settings import (
    AverageSettings,
    BackupSettings,
    CheckpointSettings,
    Exact,
    LocalSettings,
    PipelineSettings,
    ServerSettings,
    TrackingSettings,
    WeightsSettings,
)
from paceline.step.context import TrainingContext
from paceline.step.optimizers.own_values import OwnValues
from paceline.step.probes.audit import tell
from paceline.step.probes.probe import warn
from paceline.strategies.registry import capabilities_here
from paceline.system import excepthook
from paceline.system.wires import Wire
from paceline.training import build, saved_settings
from paceline.training.loop import TrainingLoop
from paceline.training.recovery.beginning import Beginning
from paceline.training.recovery.formation import Formation
from paceline.training.recovery.preemption import catch_notices, release_notices
from paceline.training.report import report_profile
from paceline.training.script_state import ScriptState

_log = logging.getLogger("paceline")
_LAST_SAVE_SECONDS = 5.0
_CHANGES = ("strategy=stealing", "wire=bfloat16", "checkpoint.every=auto")
"""Settings that may be advised after the run, if it accepts them."""
_current: TrainingLoop | None = None  # Loop of the newest session. Earlier sessions are closed.
_count = 0  # number of runs set up in this process


class Arguments(TypedDict, total=False):
    """Settings as keyword arguments of ``paceline.start``."""

    strategy: str
    batch: int
    batch_per_worker: int
    microbatches: int
    shares: Literal["speed", "even"]
    reduction: Literal["auto", "tree", "collective"]
    wire: Wire | dict[str | type, Wire] | str
    wire_ratio: float
    wire_rank: int
    communication: str
    tolerance: Literal["bits", "rounding", "convergent"]
    transport: Literal["auto", "mpi"]
    shard: Literal["optimizer", "gradients", "parameters"]
    shard_copy: bool | None
    shard_within: Literal["machine"] | None
    bucket_megabytes: float | None
    backup: BackupSettings | dict[str, Any]
    server: ServerSettings | dict[str, Any]
    local: LocalSettings | dict[str, Any]
    pipeline: PipelineSettings | dict[str, Any]
    seed: int
    exact: Exact
    drop_last: bool
    scale_lr: Literal["linear", "sqrt"] | None
    warmup_steps: int
    clip_norm: float | None
    autocast: Literal["bfloat16", "float16"] | None
    recompute: tuple[str | type, ...] | list[str | type] | Literal["auto"]
    memory_gigabytes: float | None
    compile: bool
    workers_per_loader: int
    checkpoint: CheckpointSettings | dict[str, Any] | str | Path
    weights: WeightsSettings | dict[str, Any] | str | Path
    average: AverageSettings | dict[str, Any] | Literal["ema", "swa"] | None
    resume: str | None
    trackers: tuple[str, ...] | list[str] | str
    tracking: TrackingSettings | dict[str, Any]
    nonfinite: Literal["stop", "skip"]
    missing_gradient: Literal["stop", "zero"]
    audit: Literal["auto", "off"] | int
    audit_action: Literal["stop", "warn"] | None
    threads: int
    events: Level
    profile_steps: str | int | None
    timeout_seconds: float
    hang_seconds: float | None


@dataclass(frozen=True)
class Run:
    """Objects that a session works with."""

    context: TrainingContext
    loop: TrainingLoop
    state: TrainingState
    script: ScriptState
    tracking: Tracking  # recorder of the script's values and evaluations
    notes: tuple[str, ...]  # messages on applied defaults, and warnings


def set_up(given: build.Components, arguments: Arguments) -> Run:
    """Build the context, run the rendezvous, and return the objects of a session. See :func:`paceline.start`."""
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
    resolved = saved_settings.resolve(arguments, folder, number, who.rank)
    if (report_to := env.path(env.SHOW_CONFIG)) is not None:
        build.report_config(resolved, report_to)
        raise SystemExit(0)
    log.level = resolved.settings.events
    tracking = Tracking(resolved.settings, resolved.sources, log, folder, number)
    if _current is not None:
        _current.close()
        release_notices()
        _current = None
    if (launched := launched or find_coordinator(resolved.settings.timeout_seconds)) is not None:
        seconds = resolved.settings.timeout_seconds
        link = SocketLink(launched.coordinator, launched.worker, launched.key, seconds)
        coordinator = CoordinatorClient(link, launched.worker, seconds, number, log.mark)
        atexit.register(coordinator.end_script)
    largest = launched.largest if launched else 0
    context, formation, run_spec = build.build_context(given, resolved, who, log, coordinator, largest)
    context.world.mark = log.mark if log.keeps("transfer") else None
    atexit.register(log.close)
    _count = number  # even if start fails after this line, because the coordinator knows this session number
    accepts = _accepted(replace(given, model=context.compute.model), context, largest or who.world_size)
    run = _begin(context, formation, run_spec, folder, number, tracking, accepts)
    if (profile_to := env.path(env.PROFILE)) is not None:
        report_profile(context, profile_to)
        raise SystemExit(0)
    return run


def _begin(
    context: TrainingContext,
    formation: Formation,
    run_spec: dict[str, object],
    folder: Path | None,
    number: int,
    tracking: Tracking,
    accepts: list[str],
) -> Run:
    """Run the rendezvous, and load the initial state or a checkpoint.

    Args:
        accepts: settings that may be advised, because the run would accept them.
    """
    global _current
    settings, script = context.settings, ScriptState()
    context.loop.forward_values.tell = partial(warn, context)
    context.loop.outside.tell = partial(tell, context)
    state = TrainingState(
        context.compute.model, context.update, *build.conditions(context), context.strategy_state, script, context.loop
    )
    state.replicas = context.replicas
    own = OwnValues(context.update.optimizer, dict(context.compute.model.named_parameters()))
    own.tell = partial(warn, context)
    state.parts.update(data=context.order, buffers=context.compute.buffers, optimizer=own)
    if isinstance(context.order, SampledOrder):
        context.order.may_change = lambda: bool(context.loop.changed)
    if context.compute.carried is not None:
        state.parts["carried"] = context.compute.carried
    saves, resume = settings.checkpoint, settings.resume
    if env.is_rehearsal():  # saves into the run's temporary directory, and only what the script itself saves
        saves = saves.model_copy(update={"every": None, "directory": None})
        resume = None if env.starts_anew() else resume
    state.parts[saved_settings.PART] = saved_settings.SavedSettings(config.kept(settings, context.given))
    place = saved_settings.folder(settings, folder, number)
    checkpointer = Checkpointer(context.world, saves, place, context.events, context.replicated)
    divided = capabilities_here(context).divides_state
    leaves = divided or context.world.coordinator is not None or saves.every is not None
    context.update.on_other_names = partial(_tell_other_names, context, bool(leaves))
    loop = _current = TrainingLoop(Beginning(context, formation, run_spec, state, checkpointer, resume), script)
    if checkpointer.enabled or context.world.coordinator is not None:
        catch_notices(context.world)
    rules: dict[str, object] = {
        "server.mode": settings.server.mode,
        "servers": settings.server.count * settings.server.dedicated,
        "pipeline.schedule": settings.pipeline.schedule,
    }
    rules |= {"workers_per_loader": settings.workers_per_loader, "wire": settings.facts["wire"]}
    rules |= {"microbatches": context.order.microbatches, "located": context.order.located}
    rules |= {"checkpoint.every": settings.checkpoint.every, "accepts": accepts}
    rules |= {"stream": isinstance(context.order, StreamOrder | GrowingOrder)}
    environment = {"workers": context.world.size, "device": context.world.device.type, **versions()}
    tracking.begin(state.run, loop.position.steps, environment)
    about = {"strategy": settings.strategy, "workers": context.world.size, "host": platform.node()}
    by_workers = settings.batch_per_worker is not None or settings.scale_lr is not None
    about |= {"same_bits": bool(settings.exact) and not by_workers, "session": number}
    about["code"] = {name.removeprefix("code of "): run_spec[name] for name in run_spec if name.startswith("code of ")}
    about["settings"] = {key: masked(text) for key, text in config.given_outside(settings, context.given).items()}
    context.events.mark("start", **about, run=state.run, **rules)
    return Run(context, loop, state, script, tracking, _noted(context))


def _accepted(given: build.Components, context: TrainingContext, largest: int) -> list[str]:
    """Return the items of ``_CHANGES`` that this run would accept instead of its own settings."""
    found = []
    for change in _CHANGES:
        key, _, value = change.partition("=")
        group, _, name = key.rpartition(".")
        new = {name: value}
        if group:
            new = {group: getattr(context.settings, group).model_copy(update=new)}
        settings = context.settings.model_copy(update=new)
        try:
            capabilities, _ = build.check(given, settings, context.order, context.world.size, largest)
            build.phases_of(given, context.update, capabilities, settings)
        except (ConfigError, InputError):
            continue
        found.append(change)
    return found


def _tell_other_names(context: TrainingContext, leaves: bool, text: str) -> None:
    """Report that the model's parameter or buffer names have changed since the start.

    Args:
        leaves: whether the state may be saved or sent to other workers. If not, only warn.
    """
    if leaves:
        raise InputError(text)
    if text not in context.probe_results.warnings:
        warn(context, text)


def _noted(context: TrainingContext) -> tuple[str, ...]:
    warnings = build.warnings(context)
    notes = (*build.summary(context), *warnings)
    for note in notes:
        _log.log(logging.WARNING if note in warnings and context.world.rank == 0 else logging.INFO, note)
        context.events.mark("note", text=note, **({"warning": True} if note in warnings else {}))
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
