"""Construction of the training context, and of the run spec that all workers agree on, from arguments of ``start``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.adapters.keras import module as keras_module
from paceline.checkpoint.weights.deferred.model import initial_hashes, materialize
from paceline.comm.collectives import agreement
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.config import Resolved, check_machines, flat
from paceline.data.comparison import facts_of
from paceline.data.feed import Feed
from paceline.data.objects.attributes import Attributes
from paceline.data.objects.loop_changes import LoopChanges
from paceline.data.objects.outside import OutsideParameters
from paceline.data.order import BatchOrder, Order
from paceline.data.recurrent.carried import CarriedState, check_rows, takes_state
from paceline.data.sampler import SampleNumbers, in_order
from paceline.data.source import is_stream, order_of
from paceline.environments.start import Identity
from paceline.errors import ConfigError, InputError
from paceline.events import EventLog
from paceline.launchers.local import become
from paceline.schedule.audits import AuditSchedule
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.settings import ONE_MACHINE, Settings
from paceline.step.checks import sparse_parameters
from paceline.step.closures import check_closures
from paceline.step.context import Batch, TrainingContext
from paceline.step.forward import ForwardRunner, recompute
from paceline.step.gradients.batch_loss import BatchLoss
from paceline.step.loss import Forward, check_function, described, loss_of
from paceline.step.numerics import ask_for_determinism, numerics
from paceline.step.optimizer import OptimizerStep, scaling_of
from paceline.step.optimizers.calling import check_modes
from paceline.step.optimizers.factory import OptimizerFactory, ScheduleFactory
from paceline.step.replicas import digests_of, options_of
from paceline.strategies import registry, requirements
from paceline.strategies.base import Capabilities
from paceline.strategies.phases import named_forwards
from paceline.system.process_memory import keep_freed_pages
from paceline.training.host import threads
from paceline.training.recovery.formation import Formation

_log = logging.getLogger("paceline")
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Wrapper classes of torch, by name, because importing them all takes longer than starting."""


@dataclass(frozen=True)
class Components:
    """Arguments of ``start`` other than the settings."""

    model: nn.Module
    optimizer: OptimizerFactory
    data: Any
    loss: Callable[[Any, Any], Any] | None
    forward: Forward | Mapping[str, Forward] | None
    schedule: ScheduleFactory | Mapping[str, ScheduleFactory | None] | None
    collate: Callable[[list[Any]], Any] | None
    sampler: SampleNumbers | None = None
    batch_loss: Callable[[Any, Batch], Any] | None = None
    microbatch_order: MicrobatchOrder | None = None


def report_config(resolved: Resolved, path: Path) -> None:
    """Write the settings and their sources to a JSON file, for ``paceline config``."""
    path.write_text(json.dumps({"settings": flat(resolved.settings), "sources": resolved.sources}))


def build_context(
    given: Components,
    resolved: Resolved,
    who: Identity,
    events: EventLog,
    coordinator: CoordinatorClient | None = None,
    largest: int = 0,
) -> tuple[TrainingContext, Formation, dict[str, object]]:
    """Validate the arguments and build the context before the rendezvous. The run has at most ``largest`` workers.

    Returns:
        the context, the formation of its memberships, and the run spec: the values on which all workers must agree.

    Raises:
        ConfigError, InputError: an argument is invalid.
        StartError: this machine has too few devices.
    """
    settings = resolved.settings
    largest = largest or who.world_size
    order = _order(given, settings, who.world_size)
    _check_losses(given)
    scaling = scaling_of(settings, who.world_size)
    given = replace(given, model=_checked_model(given.model))
    capabilities, sparse = check(given, settings, order, who.world_size, largest)
    if who.local_world_size < who.world_size:
        check_machines(settings.strategy, f"{who.local_world_size} of {who.world_size} workers are on this one")
    count = threads(settings, who)
    torch.set_num_threads(count)
    if settings.exact and torch.cuda.is_available():
        ask_for_determinism()
    keep_freed_pages(large=False)  # the probes of the first steps leave gaps that later tensors rarely fit into
    formation = Formation(who, settings.timeout_seconds, coordinator, settings.transport)
    world = formation.world
    initial = _move(
        given.model, world.device, later=capabilities.shares_weights and world.transport.capabilities.same_host
    )
    update = OptimizerStep(given.model, given.optimizer, given.schedule, settings.clip_norm, scaling, settings.average)
    phases = phases_of(given, update, capabilities, settings)
    run_spec = _run_spec(settings, order, update, count, initial) | facts_of(given.data, exact=bool(settings.exact))
    compute = _runner(given, settings, order, largest, world.device)
    if settings.recompute != "auto":
        recompute(given.model, settings.recompute, compute.buffers)
    if settings.compile:
        given.model.compile()
    feed = Feed(
        given.data, order, world.device, settings.workers_per_loader, given.collate, settings.stops_at_difference
    )
    # other workers change weights in shared memory at any time
    shared = settings.strategy in ONE_MACHINE or (sparse and largest > 1 and not capabilities.loop_weights)
    digests = None if shared or settings.audit == "off" else digests_of
    keeps = not (phases or capabilities.cuts_model) and (capabilities.exact or capabilities.replicated)
    loop = _loop_changes(given, update, digests, feed, keeps)
    context = TrainingContext(
        *(compute, update, order, settings, world, events, feed, loop, given.collate),
        given={key: source for key, source in resolved.sources.items() if source != "default"},
        sparse=sparse,
        any_sparse=registry.sparse_gradients(settings, largest) == "any",
        divides_update=capabilities.divides_update,
        divides_state=capabilities.divides_state > 0,
        replicated=capabilities.replicated,
        phases=phases,
        audits=AuditSchedule.of(settings.audit, settings.checkpoint.every),
    )
    registry.check_optimizer(context, capabilities)
    return context, formation, run_spec


def check(
    given: Components, settings: Settings, order: BatchOrder, workers: int, largest: int
) -> tuple[Capabilities, frozenset[str]]:
    """Return the capabilities of the strategy, and the parameters with sparse gradients. Raise if it cannot train."""
    sparse = sparse_parameters(given.model, registry.sparse_gradients(settings, largest))
    entry = registry.entry_of(settings.strategy, tables=bool(sparse))
    capabilities = entry.capabilities(settings, largest)
    requirements.check(settings, capabilities, given.forward, given.model, given.batch_loss, order.located)
    entry.validate(settings, given.model, order, workers, largest)
    return capabilities, sparse


def _runner(
    given: Components, settings: Settings, order: BatchOrder, largest: int, device: torch.device
) -> ForwardRunner:
    """Return the forward runner, with its carried state or its loss over the whole batch if the script has one."""
    forward = _forward(given)
    compute = ForwardRunner(given.model, forward, settings.seed, settings.autocast, largest, order.samples_of)
    if takes_state(given.forward):
        compute.carried = CarriedState(forward, order, device)
        compute.forward = compute.carried.alone
    if given.batch_loss is not None:
        compute.batch_loss = batch_loss = BatchLoss(forward, given.batch_loss, exact=bool(settings.exact))
        compute.forward = batch_loss.alone
    return compute


def _move(model: nn.Module, device: torch.device, *, later: bool) -> dict[str, str]:
    """Move the model to a device, and return a hash of each initial value, or of its record, by name.

    Args:
        later: whether a deferred model may get its values later, in memory that the workers share.
    """
    materialize(model, device=device, later=later)
    model.to(device)
    return initial_hashes(model)


def _loop_changes(
    given: Components,
    update: OptimizerStep,
    digests: Callable[[Sequence[torch.Tensor]], list[int]] | None,
    feed: Feed,
    keeps: bool,
) -> LoopChanges:
    """Return the detector of changes that the script makes between two steps."""
    data = given.data if type(given.data) is TensorDataset else None
    roots = {"model": given.model, "loss": given.loss, "forward": given.forward, "sampler": given.sampler, "data": data}
    roots["batch_loss"] = given.batch_loss
    known = {id(value) for value in [*given.model.parameters(), *given.model.buffers()]}
    held = Attributes(roots, known, copies=False)
    objects = {name: one for name, one in held.objects.items() if name.startswith(("model", "loss", "forward"))}
    outside = OutsideParameters(held, frozenset(known))
    return LoopChanges(given.model, update.optimizer, digests, held.owners | feed.owners, keeps, objects, outside)


def _checked_model(model: Any) -> nn.Module:
    model = keras_module.adapted(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be a torch.nn.Module, but it is {described(model)}. Give an object of such a class; put "
            f"several models into one module."
        )
    for name, value in model.named_parameters():
        if isinstance(value, nn.UninitializedParameter):
            raise InputError(f"The parameter {name!r} has no shape yet: run the model once before paceline.start.")
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        if held.is_meta:
            raise InputError(
                f"{name!r} of the model is on the meta device, so it has no values: build the model on the CPU, or "
                f"call model.to_empty(device='cpu') and give it values before paceline.start."
            )
    for name, module in model.named_modules():
        if wrapper := _WRAPPERS.intersection(kind.__name__ for kind in type(module).__mro__):
            what = f"{name!r} of the model" if name else "model"
            raise InputError(
                f"{what} is wrapped in {min(wrapper)}, which reduces gradients or gathers weights itself: give start "
                f"the model inside it, such as model.module."
            )
        if isinstance(module, nn.SyncBatchNorm) and not torch.cuda.is_available():
            raise InputError(
                f"{name!r} is a SyncBatchNorm, which torch computes on GPUs only, and this worker has none: leave out "
                f"convert_sync_batchnorm. Batch norm takes the statistics of a microbatch here, so the result does not "
                f"depend on the number of workers."
            )
    return model


def conditions(context: TrainingContext) -> tuple[dict[str, int], dict[str, int | str], dict[str, str]]:
    """Return the sample order, numerics and versions for the manifest of a checkpoint."""
    settings = context.settings
    return context.order.facts(), numerics(bool(settings.exact)) | settings.facts, agreement.versions()


def summary(context: TrainingContext) -> list[str]:
    """Return messages on applied defaults and derived values, such as a scaled learning rate."""
    order, world, settings = context.order, context.world, context.settings
    threads, parts = torch.get_num_threads(), order.microbatches
    sentences = [
        f"{world.size} worker{'s' * (world.size > 1)} on {world.device.type}, strategy {settings.strategy}"
        f"{_spelled(settings)}; batch of {order.batch} in {parts} microbatch{'es' * (parts > 1)}; {threads} thread"
        f"{'s' * (threads > 1)} each"
    ]
    audits = registry.without_audits(settings, world.size, context.given, bool(context.sparse))
    return [*sentences, *filter(None, (context.update.scaling.reason, audits))]


def _spelled(settings: Settings) -> str:
    exact = ", exact in fixed point" if settings.exact == "fixed-point" else ", exact" if settings.exact else ""
    return exact if settings.wire == "float32" else f"{exact}, {settings.wire} on the wire"


def warnings(context: TrainingContext) -> list[str]:
    """Return warnings on arguments and settings that the user may not have intended."""
    found = become.late_variables()
    if keys := registry.without_effect(context.settings, context.given):
        found.append(f"set, but without effect with strategy {context.settings.strategy}: {', '.join(keys)}")
    if isinstance(context.order, Order) and context.order.batch > context.order.length:
        found.append(
            f"batch = {context.order.batch} is more than the {context.order.length} samples of the data set: each step "
            f"takes all of them, and an epoch is one step. Give a smaller batch for more updates"
        )
    if left := context.update.without_optimizer:
        found.append(
            f"no optimizer has the parameter {left[0]!r}{f' and {len(left) - 1} more' if left[1:] else ''}: they stay "
            f"as they are. Freeze them by requires_grad_(False), or give them to an optimizer"
        )
    if not context.compute.model.training:
        found.append(
            "the model is in evaluation mode: it is trained without dropout, and its batch norm does not learn "
            "statistics. Call model.train() before paceline.start if that is not meant"
        )
    return found


def _order(given: Components, settings: Settings, workers: int) -> BatchOrder:
    """Return the sample order, which is not shuffled if ``forward`` passes a state from batch to batch."""
    data, sampler, carries = given.data, given.sampler, takes_state(given.forward)
    if carries and sampler is None and isinstance(data, Sized) and not is_stream(data):
        sampler = partial(in_order, data)
    order = order_of(data, sampler, settings, _batch(settings, workers), given.microbatch_order)
    if carries:
        check_rows(order, data)
    return order


def _batch(settings: Settings, workers: int) -> int:
    if (settings.batch is None) == (settings.batch_per_worker is None):
        given = "neither is" if settings.batch is None else "both are"
        raise ConfigError(f"Give either batch (samples per step over all workers) or batch_per_worker; {given} given.")
    return settings.batch or (settings.batch_per_worker or 0) * workers


def _check_losses(given: Components) -> None:
    if given.batch_loss is not None:
        _check_batch_loss(given)
    if (given.loss is None) == (given.forward is None):
        got = "neither is" if given.loss is None else "both are"
        raise ConfigError(f"Give either loss(output, target) or forward(model, microbatch); {got} given.")
    check_function("loss", given.loss, "loss=torch.nn.functional.cross_entropy", "output", "target")
    check_function("collate", given.collate, "collate=torch.utils.data.default_collate", "samples")
    if not isinstance(given.forward, Mapping):
        example = "def forward(model, microbatch): return model(microbatch).mean()"
        arguments = ("model", "microbatch", "state") if takes_state(given.forward) else ("model", "microbatch")
        check_function("forward", given.forward, example, *arguments)


def _forward(given: Components) -> Forward:
    if isinstance(given.forward, Mapping):
        return _no_forward
    if given.forward is not None:
        return given.forward
    assert given.loss is not None
    return loss_of(given.loss)


def _check_batch_loss(given: Components) -> None:
    if given.loss is not None:
        raise ConfigError(
            "Give either loss= or batch_loss=; both are given. batch_loss(outputs, batch) gets the results of "
            "forward(model, microbatch) for the whole batch, and takes the place of loss."
        )
    if given.forward is None:
        raise ConfigError(
            "batch_loss(outputs, batch) needs forward(model, microbatch), which returns the outputs of a microbatch, "
            "such as embeddings. Give forward=, too."
        )
    if isinstance(given.forward, Mapping) or takes_state(given.forward):
        what = "a forward for each optimizer" if isinstance(given.forward, Mapping) else "a state from batch to batch"
        raise ConfigError(f"batch_loss= cannot be combined with {what}: give one forward(model, microbatch).")
    example = "def batch_loss(outputs, batch): return contrastive(outputs['first'], outputs['second'])"
    check_function("batch_loss", given.batch_loss, example, "outputs", "batch")


def _no_forward(model: nn.Module, microbatch: Any) -> Any:
    raise InputError("This session has a forward for each optimizer: give evaluate a metric(model, microbatch).")


def phases_of(
    given: Components, update: OptimizerStep, capabilities: Capabilities, settings: Settings
) -> dict[str, Forward]:
    """Return the forward functions by optimizer name, empty if there is only one, and check the optimizers."""
    phases = named_forwards(given.forward, update, capabilities, settings)
    carries = takes_state(given.forward)
    if given.batch_loss is not None and update.closure_users:
        raise ConfigError(
            f"{update.closure_users[0]} computes the loss several times in each step (it needs a closure), which "
            f"batch_loss= cannot do: use another optimizer."
        )
    able = capabilities.closures and settings.autocast != "float16"
    check_closures(update, settings.strategy, able=able, phases=bool(phases), carries=carries)
    whole = capabilities.replicated and not (capabilities.divides_update or capabilities.cuts_model)
    check_modes(update.optimizer, settings.strategy, able=whole)
    return phases


def phase_of(context: TrainingContext, optimizer: str | None) -> str:
    """Return the phase that the script requests, empty if the session has one forward function."""
    if optimizer is None and not context.phases:
        return ""
    if optimizer is not None and optimizer in context.phases:
        return optimizer
    names = ", ".join(map(repr, context.phases))
    if not context.phases:
        raise ConfigError(
            f"session.step got optimizer={optimizer!r}, but this session has one forward, whose gradients are for all "
            f"optimizers: leave optimizer= out, or give start a forward for each optimizer, by name."
        )
    what = "no optimizer is named" if optimizer is None else f"there is no optimizer {optimizer!r}"
    raise ConfigError(
        f"session.step takes one phase of a batch, and {what}: call session.step(batch, optimizer=...) with one of "
        f"{names}, one after the other."
    )


def _run_spec(
    settings: Settings, order: BatchOrder, update: OptimizerStep, threads: int, initial: dict[str, str]
) -> dict[str, object]:
    run_spec: dict[str, object] = {f"code of {name}": value for name, value in agreement.code_hashes().items()}
    run_spec.update({f"version of {name}": value for name, value in agreement.versions().items()})
    run_spec.update({f"setting {key}": value for key, value in settings.model_dump(mode="json").items()})
    run_spec.update(order.agreed())
    run_spec["optimizer class"] = update.kind
    run_spec.update({f"optimizer {key}": value for key, value in options_of(update.optimizer).items()})
    groups = {value: index for index, group in enumerate(update.optimizer.param_groups) for value in group["params"]}
    run_spec.update({f"trained parameter {name}": groups.get(value) for name, value in update.parameters.items()})
    run_spec.update({f"initial value of {name}": value for name, value in initial.items()})
    if settings.exact:
        own = numerics(exact=True)
        run_spec |= {"threads": threads, "cpu capability": own["cpu"], "canary of the processor": own["canary"]}
        run_spec |= {"gpu model": own["gpu"], "float32 precision": own["float32"], "cublas workspace": own["cublas"]}
    return run_spec
