"""Memory budget of a run (``memory_gigabytes``): blocks to recompute, and a comparison with the memory used.

Rank 0 measures and decides, because measured times differ between workers. All workers recompute the same blocks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.values import sendable
from paceline.data.keys import preserve_generators
from paceline.environments import env
from paceline.errors import ConfigError, InputError
from paceline.planning.blocks import blocks_of, measure_blocks
from paceline.planning.memory import Choice, Run, Segment, cures, fit, need, of_replicas
from paceline.schedule.link_shares import window_bytes
from paceline.step.context import TrainingContext
from paceline.step.forward import compute_once, recompute_modules
from paceline.step.optimizers.several import parts_of
from paceline.step.probes.optimizer_probe import copy_small, corner_of, set_initial_state, step_of
from paceline.step.probes.probe import warn
from paceline.strategies.registry import capabilities, capabilities_here
from paceline.strategies.sharded.holders import Owners, copies_of
from paceline.system.process_memory import ProcessMemory, keep_freed_pages, process_memory
from paceline.system.wires import OUTER

_log = logging.getLogger("paceline")
_STEPS = 3
"""Number of steps with probes and the first state of the optimizer. After them a worker reports its peak."""
_MOMENTS = 2
"""Number of state values per weight that are assumed if an optimizer cannot be tried."""
_NAMED = 4
"""Largest number of blocks that a message names."""


@sendable
@dataclass(frozen=True)
class _Decision:
    """Rank 0's choice. ``text`` describes it to the user. ``problem`` says why the run does not fit, or is empty."""

    recomputed: frozenset[str]
    fused: bool
    predicted: int
    text: str
    problem: str = ""
    kind: str = "ConfigError"


class MemoryBudget:
    """Memory budget of this worker, if ``memory_gigabytes`` is set, and how long freed memory is kept."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._decision: _Decision | None = None
        self._begun = False
        self._segments: tuple[Segment, ...] = ()  # measured on rank 0 once
        self._before: ProcessMemory | None = None
        self._steps = 0

    def plan(self, step: int) -> None:
        """Decide which blocks are recomputed. All workers call this together before a strategy is built.

        Raises:
            ConfigError: the run does not fit, before its first step. A later run only gets a warning.
        """
        context = self._context
        settings, world = context.settings, context.world
        if settings.memory_gigabytes is None:
            return
        begun, self._begun = self._begun, True
        if capabilities_here(context).cuts_model and world.size > 1:  # the pipeline looks at its stages
            return
        self._before = process_memory() if self._decision is None else self._before
        own = self._decide(step) if world.rank == 0 else None
        gathered = world.gather((own, begun), "start")
        decision: _Decision | None = gathered[0][0]
        if decision is None:  # the forward pass raises, as the first step will
            return
        if decision.problem and not any(begun for _, begun in gathered):
            raise {"ConfigError": ConfigError, "InputError": InputError}[decision.kind](decision.problem)
        if decision.problem and world.rank == 0:
            warn(context, decision.problem)
        if settings.recompute == "auto":
            blocks = blocks_of(context.compute.model)
            compute_once(blocks.values())
            recompute_modules([blocks[name] for name in sorted(decision.recomputed)], context.compute.buffers)
        if not decision.fused:
            context.probe_results.fusible = False
        if decision != self._decision:
            self._tell(decision.text, predicted=decision.predicted, recomputed=sorted(decision.recomputed))
        self._decision = decision
        _forget_peak()

    def _tell(self, text: str, **fields: object) -> None:
        if self._context.world.rank == 0:
            _log.info(text)
        self._context.events.mark("note", text=text)
        self._context.events.mark("memory", limit=self._limit, **fields)

    @property
    def _limit(self) -> int:
        return int((self._context.settings.memory_gigabytes or 0) * 1e9)

    def _decide(self, step: int) -> _Decision | None:
        context, able = self._context, self._context.settings.recompute == "auto"
        model, classes = context.compute.model, () if able else context.settings.recompute
        named = {name: module for name, module in model.named_modules() if type(module).__name__ in classes}
        blocks = _outermost(named) if named else blocks_of(model)
        before = compute_once(model.modules())
        try:
            self._segments = self._segments or measure_segments(context, blocks, step)
        except (ConfigError, InputError) as error:
            return _Decision(frozenset(), True, 0, "", str(error), type(error).__name__)
        except Exception as error:  # noqa: BLE001 - the step itself will raise it
            _log.debug("the activations could not be measured: %s", error)
            return None
        finally:
            recompute_modules(before, context.compute.buffers)
        run = sizes_of(context, self._segments)
        fixed = frozenset(blocks) if named else frozenset()
        fusible = may_fuse(context)
        choice = fit(run, self._limit, able, fusible, fixed)
        text = _explained(choice, run, self._limit, able, len(blocks))
        if fusible and not choice.fused:
            text += "; microbatches are computed one by one, because a worker's share does not fit in one pass"
        problem = "" if choice.fits else self._problem(choice, run, able, fixed)
        return _Decision(choice.recomputed, choice.fused, choice.need.total, text, problem)

    def _problem(self, choice: Choice, run: Run, able: bool, fixed: frozenset[str]) -> str:
        found = cures(run, self._limit, able, fixed)
        samples = -(-run.batch // run.microbatches)
        with_all = " even if every block is recomputed" if able else ""
        fits = (
            f"It fits with {', or '.join(found)}."
            if found
            else (
                "No smaller microbatches and no number of workers make it fit: give more memory"
                + ("." if run.stage == 3 else ', or use strategy="pipeline", which divides the weights.')
            )
        )
        return (
            f"memory_gigabytes = {self._context.settings.memory_gigabytes:g} is {self._limit:,} bytes for each worker, "
            f"but a worker needs {choice.need.total:,}{with_all}: {choice.need.total - self._limit:,} bytes too many "
            f"({choice.need}, of a microbatch of {samples} sample{'s' * (samples > 1)}). {fits}"
        )

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Keep freed memory during a step, unless it is audited or one of the first, or the workers divide the state.

        Probes and audits allocate tensors in a different order from training, and would leave gaps that later tensors
        rarely fit into. After the first steps, the peak is reported.
        """
        first = self._steps < _STEPS
        keep_freed_pages(large=not (first or self._divides_state or self._context.audits.is_audited(step)))
        yield
        self._steps += 1
        if self._steps == _STEPS:
            self._report()

    @cached_property
    def _divides_state(self) -> bool:
        """Whether the strategy divides the state among several workers. Here it holds for one worker, too."""
        context = self._context
        return bool(capabilities(context.settings, max(context.world.size, 2), bool(context.sparse)).divides_state)

    def _report(self) -> None:
        if self._decision is None:
            return
        predicted, model = self._decision.predicted, self._context.compute.model
        if torch.cuda.is_initialized():
            reached = torch.cuda.max_memory_allocated()
            text = f"memory: {reached:,} bytes of the GPU were allocated at most, and {predicted:,} were predicted"
            self._tell(text, predicted=predicted, reached=reached)
            if reached > self._limit:
                warn(self._context, f"{text}. That is above memory_gigabytes: leave room for the needs of operations")
            return
        if (now := process_memory()) is not None and self._before is not None:
            weights = sum(value.nbytes for value in model.parameters())
            grown = max(0, now.peak - self._before.held)
            self._tell(
                f"memory: this worker has grown by {grown:,} bytes beside its weights, and {predicted - weights:,} "
                f"were predicted; buffers of messages and of the allocator add to this",
                predicted=predicted,
                reached=grown + weights,
            )


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are not inside another of these modules."""
    return {
        name: module
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") or (other == "" and name) for other in modules)
    }


def measure_segments(context: TrainingContext, blocks: dict[str, nn.Module], step: int) -> tuple[Segment, ...]:
    """Measure a forward pass of a microbatch. No microbatch of the step has more samples."""
    with preserve_generators(), context.loop.noting_forward():
        (group,) = context.feed.load(*context.order.example(step))
        return measure_blocks(context, blocks, group, step)


def sizes_of(context: TrainingContext, segments: tuple[Segment, ...]) -> Run:
    """Return the sizes of the run on its current workers."""
    settings, order, model = context.settings, context.order, context.compute.model
    trained = list(context.update.parameters.values())
    able = capabilities_here(context)
    held = {one.untyped_storage().data_ptr(): one.nbytes for one in [*model.parameters(), *model.buffers()]}
    gradients = sum(one.nbytes for one in trained)
    wide = sum(one.numel() * max(4, one.element_size()) for one in trained)
    weights = sum(held.values()) + (gradients if settings.average.kind else 0)
    optimizer = sum(optimizer_bytes(one) for one in parts_of(context.update.optimizer))
    if able.replicas:
        if settings.wire == OUTER:
            optimizer += sum(4 * value.numel() for value in context.update.parameters.values())  # the unsent parts
        weights, optimizer = of_replicas(
            settings.local,
            -(-able.replicas // context.world.size),
            context.world.size,
            _keeps_points(context),
            weights,
            optimizer,
            gradients,
        )
    if settings.keeps_errors:
        optimizer += _of_errors(context, weights + gradients + optimizer)
    owners = Owners.of(settings, context.world.size)
    return Run(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        sums=wide if settings.fixed_point else gradients,
        segments=segments,
        batch=order.batch,
        microbatches=order.microbatches,
        workers=context.world.size,
        tree=settings.along_tree,
        stage=able.divides_state,
        sharing=1 if context.world.host_memory is None else min(map(len, context.world.hosts)),
        window=min(gradients, window_bytes(context.world.size, context.world.shared_memory is not None)),
        holders=1 + len(copies_of(owners, context.world.hosts)[0]) if able.divides_state else 1,
        even_shares=able.even_shares,
    )


def _keeps_points(context: TrainingContext) -> bool:
    """Return whether recovery points are in the memory that is counted."""
    return env.survives_losses() and context.world.device.type == "cpu"


def _of_errors(context: TrainingContext, at_rest: int) -> int:
    """Return the bytes of the unsent parts of a worker's microbatches, before and after the step.

    Recovery points count as in :func:`~paceline.planning.memory.of_replicas`.
    """
    lanes = -(-context.order.microbatches // context.world.size)
    errors = lanes * sum(4 * value.numel() for value in context.update.parameters.values() if value.dim() > 1)
    if not _keeps_points(context):
        return 2 * errors
    return 2 * (errors + at_rest + min(2, context.world.size) * errors)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that an optimizer keeps for its parameters, measured in a step on small parameters.

    Assumes two values per weight, as with Adam, if the optimizer cannot be tried.
    """
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    with preserve_generators():
        try:
            small, copies = copy_small(optimizer, corner_of, state=False)
            set_initial_state(small, optimizer)
            for value in copies:
                value.grad = torch.randn_like(value)
            step_of(small)(small)
        except Exception as error:  # noqa: BLE001 - an optimizer may reject small parameters in any way
            _log.debug("the optimizer cannot be tried: %s", error)
            return _MOMENTS * sum(int(value.nbytes) for value in parameters)
    total: int = 0
    for parameter, value in zip(parameters, copies, strict=True):
        for entry in small.state.get(value, {}).values():
            if isinstance(entry, torch.Tensor):
                alike = entry.shape == value.shape
                total += int(entry.element_size() * parameter.numel() if alike else entry.nbytes)
    return total


def may_fuse(context: TrainingContext) -> bool:
    """Return whether a worker may compute several microbatches in one pass; see ``step.gradients.fusion``."""
    settings = context.settings
    single = settings.exact or settings.microbatches is not None or context.collate is not None
    single = single or context.compute.carried is not None or context.compute.batch_loss is not None
    single = single or context.order.microbatches < 2
    return not single and context.probe_results.fusible is not False


def _explained(choice: Choice, run: Run, limit: int, able: bool, blocks: int) -> str:
    total = choice.need.total
    text = f"memory: {total:,} of {limit:,} bytes predicted ({choice.need})"
    if able:
        names = sorted(choice.recomputed)
        listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        free = need(run).activations - need(run, choice.recomputed).activations
        chosen = f"{len(names)} of {blocks} blocks are recomputed ({listed}), which frees {free:,} bytes"
        text = f"{text}; {chosen if names else 'no block is recomputed'}"
    return text


def _forget_peak() -> None:
    """Reset the peak memory of this process, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
