"""Simulated worker, with Paceline's own loop, recovery and batches around a model that is a number.

The number encodes the steps that the model has seen, in order. So a step that is lost, repeated or computed from
samples that do not belong to the batch shows in every worker that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from paceline import config
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.data.order import UNKNOWN
from paceline.events import EventLog
from paceline.schedule.audits import AuditSchedule
from paceline.step.context import HeldShare, ProbeResults
from paceline.system import fault_points
from paceline.training.batches import Batches
from paceline.training.evaluations import Evaluations
from paceline.training.loop import TrainingLoop
from paceline.training.progress import EVALUATE
from paceline.training.recovery.beginning import Beginning
from paceline.training.script_state import ScriptState
from simulator import samples
from simulator.network import Link
from simulator.strategy import MICROBATCHES, Simulated, State
from simulator.world import Broken, Machines, SimulatedWorld

STEPS = 8
SAVES, EVALUATES = 2, 4  # number of steps between checkpoints, and step after which the script evaluates
_TIMEOUT = 30.0
SETTINGS = config.resolve({"batch": MICROBATCHES, "timeout_seconds": _TIMEOUT, "checkpoint.every": SAVES}).settings


@dataclass
class Disk:
    """Checkpoints by step, each with the state tensor and the script's saved state."""

    saved: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    was_empty: bool = False  # whether workers have looked for a checkpoint to go back to before there was one


class Checkpointer:
    """Checkpointer for the disk that all workers share, in place of ``checkpoint.checkpointer.Checkpointer``."""

    enabled, launch, last, saved_before = True, None, None, None
    made = -1

    def lacks(self, state: State, steps: int) -> bool:
        return False

    def __init__(self, world: SimulatedWorld, disk: Disk) -> None:
        self._world, self._disk = world, disk

    def due(self, steps: int) -> bool:
        return steps % SAVES == 0

    def save(self, state: State, steps: int) -> str:
        share = state.divided()
        if share is not None:
            share.send(steps)
        if self._world.rank == 0:
            snapshot = state.snapshot(steps)
            fault_points.reach("inside a save", steps)
            self._disk.saved[steps] = snapshot.tensors["parts"], snapshot.state
        if share is not None:
            share.end(steps)
        self.made = steps
        return "there"

    begin_save = save

    def repeat_save(self, state: State, steps: int, lost: bool, able: bool) -> None:
        found = self._world.gather([lost and self.made == steps, able], "saving a checkpoint")
        if all(map(any, zip(*found, strict=True))):
            self.save(state, steps)

    def finish(self) -> None:
        """Do nothing, because saves are synchronous."""

    def resume(self, state: State, source: str | None) -> int:
        newest = max(self._disk.saved, default=0) if source == "auto" else 0
        self._disk.was_empty |= source == "auto" and not newest
        steps: int = self._world.gather(newest, "start")[0]
        if steps:
            parts, script = self._disk.saved[steps]
            state.load({"parts": parts}, script)
        self.made = steps or -1
        return steps


class LoopChanges:
    """Stub of ``data.objects.loop_changes.LoopChanges`` for a script that changes nothing between steps."""

    parameter, lacks_copies, now = "", False, False

    def __init__(self) -> None:
        self.needed: list[str] = []
        self.not_watched = nullcontext

    def record_changes(self, begins: bool = False) -> None:
        """See ``LoopChanges``."""

    def take_changes(self) -> dict[str, tuple[Any, Any]]:
        return {}

    def not_restored(self) -> str:
        return ""

    def without_effect(self, step: int) -> str:
        return ""

    def end_step(self, step: int) -> None:
        """See ``LoopChanges``."""

    def refresh(self) -> None:
        """See ``LoopChanges``."""


class Feed:
    """Stub of ``data.feed.Feed`` that loads no data. The batch of a group is the numbers of its microbatches."""

    sizes = None

    def __init__(self, order: Any) -> None:
        self._order = order

    def load(self, step: int, groups: list[range]) -> list[range]:
        if self._order.grows:
            samples.check(self._order, step, STEPS)
        return groups

    def take_seconds(self) -> float:
        return 0.0

    def receive(self, step: int, groups: list[range], events: Any) -> list[range]:
        return groups

    def steps(self, start: int, stop: int, groups: Callable[[int], list[range]]) -> Iterator[list[range]]:
        for step in range(start, stop):
            yield self.load(step, groups(step))


def _fixed_order() -> Any:
    return SimpleNamespace(
        batch=MICROBATCHES, microbatches=MICROBATCHES, samples_of=lambda step: MICROBATCHES,
        samples_before=lambda step: step * MICROBATCHES, epoch_of=lambda step: 0, is_last=lambda step: False,
        first_of=lambda epoch: UNKNOWN if epoch else 0, grows=False, state=lambda step: {}, load=lambda state: None,
        meet=lambda world, doing: None, example=lambda step: (step, [range(1)]),
    )  # fmt: skip


@contextmanager
def _span(*_: object, **__: object) -> Iterator[None]:
    yield


class Worker:
    """Worker of a simulated run.

    Args:
        random: random numbers for the durations of computations.
        parts: number of parts of the model. More than one are divided among the workers (see :class:`Simulated`).
        grows: whether the script adds samples to its data set (``samples``).

    Attributes:
        seen: steps that its script took, and the losses that the script received.
        evaluated: results of its evaluations.
        done: registered value of the script: steps whose loop body has run in this worker or the source of its state.
        left_at: number of steps that its script had taken when it was asked to leave, or None.
    """

    def __init__(
        self, machines: Machines, link: Link, number: int, disk: Disk, random: Random, parts: int, grows: bool
    ) -> None:
        self.client = CoordinatorClient(link, number, _TIMEOUT)
        self.world = SimulatedWorld(machines, self.client, _TIMEOUT)
        self.seen: list[tuple[int, float]] = []
        self.evaluated: list[float] = []
        self.done: list[int] = []
        self.left_at: int | None = None
        self._hub, self._disk, self._random = machines.hub, disk, random
        self._parts, self._grows = parts, grows

    def run(self) -> None:
        """Run the equivalent of a training script, from ``paceline.start`` to its last line."""
        script = ScriptState()
        order: Any = samples.order_of(samples.data(), MICROBATCHES) if self._grows else _fixed_order()
        state = State(script, self._parts, order)
        context = self._context(state, order)
        checkpointer = Checkpointer(self.world, self._disk)
        beginning: Any = Beginning(context, self.world, {}, state, checkpointer, None)  # type: ignore[arg-type]

        def build(context: Any) -> Simulated:
            return Simulated(context, state, self._hub.pause, self._random)

        loop = TrainingLoop(beginning, script, build)
        script.register({"done": self.done})
        evaluations = Evaluations(loop)
        for batch in Batches(loop).batches(steps=STEPS):
            result, _ = loop.step(batch)
            self.seen.append((batch.step, result.loss))
            self.done.append(batch.step)
            self._hub.pause(self._random.uniform(0.0, 0.05))
            if batch.step == EVALUATES:
                self.evaluated.append(loop.make(EVALUATE, "evaluating", self._evaluate))
            if self._grows and batch.step in samples.EXTENDS:
                evaluations.extend(samples.made_after(batch.step))
        if self._grows:
            samples.check_end(order, STEPS)
        share: Any = loop.strategy.divided
        state.check(STEPS) if share is None else share.check(STEPS)
        if self.done != list(range(STEPS)) and not self.world.was_dropped:  # after a drop, loop bodies can run again
            raise Broken(f"the registered steps are {self.done}")
        self.client.end_script()

    def leave(self) -> None:
        """Handle a signal: request to leave the run."""
        if self.left_at is None:
            self.left_at = len(self.seen)
        self.world.request_leave()

    def _evaluate(self, call: Any) -> tuple[float, int]:
        fault_points.reach("in evaluate", call[0])
        everyone = self.world.gather([call[0], self.world.notice()], "evaluate")
        return float(sum(steps for steps, _ in everyone) / len(everyone)), max(notice for _, notice in everyone)

    def _context(self, state: State, order: Any) -> Any:
        names = [(str(part), SimpleNamespace(numel=lambda: 1)) for part in range(self._parts)]
        model = SimpleNamespace(
            modules=list, parameters=list, named_buffers=list, named_parameters=lambda: names,
        )  # fmt: skip
        buffers = SimpleNamespace(fixed=False, agreed=(), added=set(), reset=lambda: None, fix=lambda names: None)
        return SimpleNamespace(
            world=self.world, settings=SETTINGS, order=order, loop=LoopChanges(), feed=Feed(order), phases={},
            probe_results=ProbeResults(repeatable=True), audits=AuditSchedule(off=True),
            events=EventLog(None, -1), warnings=[], prepared=[], sparse=(), held=HeldShare(), replicas={},
            compute=SimpleNamespace(buffers=buffers, model=model, batch_loss=None), state=state,
            update=SimpleNamespace(parameters={}, take_seconds=float), every=frozenset(name for name, _ in names),
        )  # fmt: skip
