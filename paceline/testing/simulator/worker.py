"""Simulated worker, with Paceline's own loop, recovery and batches around a model that is a number.

The number encodes the steps that the model has seen, in order. So a step that is lost, repeated or computed from
samples that do not belong to the batch shows in every worker that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from paceline import config
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.data.order import UNKNOWN
from paceline.errors import WorkerLost
from paceline.events import EventLog
from paceline.schedule.audits import AuditSchedule
from paceline.step.context import ProbeResults, StepResult
from paceline.strategies.base import Strategy
from paceline.system import fault_points
from paceline.testing.simulator.network import Link
from paceline.testing.simulator.world import Broken, Machines, SimulatedWorld
from paceline.training.batches import Batches
from paceline.training.loop import TrainingLoop
from paceline.training.progress import EVALUATE
from paceline.training.recovery.beginning import Beginning
from paceline.training.script_state import ScriptState

STEPS, MICROBATCHES = 8, 8
SAVES, EVALUATES = 2, 4
"""Number of steps between checkpoints, and step after which the script evaluates."""
_TIMEOUT = 30.0
_MODULUS = (1 << 61) - 1
SETTINGS = config.resolve({"batch": MICROBATCHES, "timeout_seconds": _TIMEOUT, "checkpoint.every": SAVES}).settings


def value_after(steps: int) -> int:
    """Return the value of the model after a number of steps."""
    value = 1
    for step in range(steps):
        value = stepped(value, step)
    return value


def stepped(value: int, step: int) -> int:
    """Return the value of the model after a further step."""
    return (value * 1_000_003 + step + 1) % _MODULUS


@dataclass
class Disk:
    """Checkpoints by step, each with the state tensor and the script's saved state."""

    saved: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    was_empty: bool = False  # whether workers have looked for a checkpoint to go back to before there was one


class State:
    """State of training, in place of ``checkpoint.training_state.TrainingState``.

    Args:
        parts: number of parts of the model. Each part is a number as described in the module docstring.
    """

    run = "simulated"

    def __init__(self, script: ScriptState, parts: int) -> None:
        self.parts = [(1, 0)] * parts  # value and number of applied steps
        self.keeps_script = False
        self.loaded_script: dict[str, Any] = {}
        self.divided: Callable[[], Any] = lambda: None
        self._script = script
        self.tensors = dict

    def take(self, step: int, parts: Sequence[int]) -> None:
        """Apply the update of a step to some parts of the model."""
        for part in parts:
            value, steps = self.parts[part]
            if step != steps:
                raise Broken(f"the update of step {step} on a model after {steps} steps")
            self.parts[part] = stepped(value, step), step + 1

    def script_of_now(self) -> Any:
        """See ``TrainingState``."""
        return self._script.of_now()

    def snapshot(self, steps: int) -> SimpleNamespace:
        """See ``TrainingState``."""
        self.check(steps)
        return SimpleNamespace(tensors={"parts": torch.tensor(self.parts)}, state=self._script.saved(), step=steps)

    def check(self, steps: int) -> None:
        """Raise Broken unless all parts have the values after exactly these steps."""
        if self.parts != [(value_after(steps), steps)] * len(self.parts):
            raise Broken(f"a state after {[steps for _, steps in self.parts]} steps that is to be one after {steps}")

    def load(self, tensors: dict[str, torch.Tensor], state: Any) -> None:
        """See ``TrainingState``."""
        self.parts = [(value, steps) for value, steps in tensors["parts"].tolist()]
        self.loaded_script = state
        if not self.keeps_script:
            self.load_script()

    def load_script(self) -> None:
        """See ``TrainingState``."""
        self._script.load(self.loaded_script)


class Checkpointer:
    """Checkpointer for the disk that all workers share, in place of ``checkpoint.checkpointer.Checkpointer``."""

    enabled, launch, last = True, None, None

    def __init__(self, world: SimulatedWorld, disk: Disk) -> None:
        self._world, self._disk = world, disk

    def due(self, steps: int) -> bool:
        """See ``Checkpointer``."""
        return steps % SAVES == 0

    def save(self, state: State, steps: int) -> str:
        """See ``Checkpointer``."""
        share = state.divided()
        if share is not None:
            share.send(steps)
        if self._world.rank == 0:
            snapshot = state.snapshot(steps)
            fault_points.reach("inside a save", steps)
            self._disk.saved[steps] = snapshot.tensors["parts"], snapshot.state
        if share is not None:
            share.end(steps)
        return "there"

    begin_save = repeat_save = save

    def finish(self) -> None:
        """Do nothing, because saves are synchronous."""

    def resume(self, state: State, source: str | None) -> int:
        """See ``Checkpointer``."""
        newest = max(self._disk.saved, default=0) if source == "auto" else 0
        self._disk.was_empty |= source == "auto" and not newest
        steps: int = self._world.gather(newest, "start")[0]
        if steps:
            parts, script = self._disk.saved[steps]
            state.load({"parts": parts}, script)
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
        """See ``LoopChanges``."""
        return {}

    def not_restored(self) -> str:
        """See ``LoopChanges``."""
        return ""

    def without_effect(self, step: int) -> str:
        """See ``LoopChanges``."""
        return ""

    def end_step(self, step: int) -> None:
        """See ``LoopChanges``."""

    def refresh(self) -> None:
        """See ``LoopChanges``."""


class Feed:
    """Feed that loads no data. The batch of a group is the group itself, the numbers of its microbatches."""

    sizes = None

    def load(self, step: int, groups: list[range]) -> list[range]:
        """See ``data.feed.Feed``."""
        return groups

    def steps(self, start: int, stop: int, groups: Callable[[int], list[range]]) -> Iterator[list[range]]:
        """See ``data.feed.Feed``."""
        for step in range(start, stop):
            yield groups(step)


class Share:
    """Share of the state, in place of ``step.divided.optimizer_state.DividedOptimizerState``.

    For a save rank 0 borrows the parts of the others.
    """

    def __init__(self, world: SimulatedWorld, state: State, own: Sequence[int]) -> None:
        self.hashes: list[Any] | None = None
        self._world, self._state, self._own, self._kept = world, state, own, list(state.parts)

    def hash(self) -> None:
        """See ``DividedOptimizerState``."""
        fault_points.reach("inside the collective")
        self.hashes = self._world.gather([self._state.parts[part] for part in self._own], "synchronizing")

    def check(self, steps: int) -> None:
        """Raise Broken unless the hashes are known and those of all parts after exactly these steps."""
        found = None if self.hashes is None else [one for hashes in self.hashes for one in hashes]
        if found != [(value_after(steps), steps)] * len(self._state.parts):
            raise Broken(f"hashes of {found}, that are to be those after {steps} steps")

    def send(self, steps: int) -> None:
        """Send the own parts to rank 0, and keep the parts that they replace there."""
        self._kept = list(self._state.parts)
        fault_points.reach("inside the collective")
        everyone = self._world.gather([[part, *self._state.parts[part]] for part in self._own], "saving")
        for part, value, after in (one for parts in everyone for one in parts):
            if self._world.rank == 0:
                self._state.parts[part] = value, after

    def end(self, steps: int) -> None:
        """Wait until rank 0 has saved, and give the parts back."""
        self._state.parts = list(self._kept)
        self._world.gather(steps, "saving")


class Simulated(Strategy):
    """Strategy in which workers gather their microbatches and then update all parts, or their own if parts are divided.

    With an even number of parts the workers keep their shares for evaluations and saves, as in sharded training.

    Args:
        pause: function that suspends the worker for some virtual seconds.
        random: random numbers for the duration of a step.
    """

    def __init__(self, context: Any, state: State, pause: Callable[[float], None], random: Random) -> None:
        self._world, self._state, self._pause, self._random = context.world, state, pause, random
        every = range(len(state.parts))
        self._divides = len(every) > 1 and self._world.size > 1
        self._own = [part for part in every if part % self._world.size == self._world.rank or not self._divides]
        self._synchronized = True
        self._keeps_shares = self._divides and len(every) % 2 == 0
        self._share = Share(self._world, state, self._own)

    def groups(self, step: int) -> list[range]:
        """See ``Strategy``."""
        rank, size = self._world.rank, self._world.size
        return [range(rank * MICROBATCHES // size, (rank + 1) * MICROBATCHES // size)]

    def step(self, step: int, groups: list[Any]) -> StepResult:
        """See ``Strategy``."""
        self._pause(self._random.uniform(0.01, 0.3))
        own = [number for group in groups for number in group]
        self._synchronized, self._share.hashes = False, None
        everyone = self._world.gather([step, own, self._world.notice()], "step")
        fault_points.reach("inside the collective")
        if any(found != step for found, *_ in everyone):
            raise Broken(f"steps {[one[0] for one in everyone]} at once")
        samples = sorted(number for _, numbers, _ in everyone for number in numbers)
        if samples != list(range(MICROBATCHES)):
            raise Broken(f"step {step} was computed from the microbatches {samples}")
        fault_points.reach("between reduction and update", step)
        self._state.take(step, self._own)
        fault_points.reach("after update", step)
        result = StepResult(float(step), 1.0, 0.1, notice=max(notice for *_, notice in everyone))
        if self._keeps_shares and result.notice:
            with suppress(WorkerLost):
                self.unite(step + 1)
        return result

    def synchronize(self, steps: int) -> None:
        """See ``Strategy``."""
        if not self._keeps_shares:
            self.unite(steps)

    @property
    def divided(self) -> Any:
        """See ``Strategy``."""
        return self._share if self._keeps_shares and not self._synchronized else None

    def unite(self, steps: int) -> None:
        """See ``Strategy``."""
        if self._divides and not self._synchronized:
            _gather(self._world, self._state, self._own)
            self._synchronized = True

    def close(self) -> frozenset[str] | None:
        """See ``Strategy``."""
        return frozenset(map(str, self._own)) if self._divides else None


def _gather(world: SimulatedWorld, state: State, own: Sequence[int]) -> None:
    everyone = world.gather([[part, *state.parts[part]] for part in own], "synchronizing")
    for part, value, steps in (one for parts in everyone for one in parts):
        state.parts[part] = value, steps


def gather_parts(context: Any, owned: Sequence[frozenset[str] | None]) -> None:
    """Send all parts to all workers, in place of ``step.divided.consolidate.consolidate_state_dict``."""
    held = [context.every if part is None else part for part in owned]
    own = held[context.world.rank].difference(*held[: context.world.rank])
    _gather(context.world, context.state, sorted(map(int, own)))


@contextmanager
def _span(*_: object, **__: object) -> Iterator[None]:
    yield


class Worker:
    """Worker of a simulated run.

    Args:
        random: random numbers for the durations of computations.
        parts: number of parts of the model. More than one are divided among the workers (see :class:`Simulated`).

    Attributes:
        seen: steps that its script took, and the losses that the script received.
        evaluated: results of its evaluations.
        done: registered value of the script: steps whose loop body has run in this worker or the source of its state.
        left_at: number of steps that its script had taken when it was asked to leave, or None.
    """

    def __init__(self, machines: Machines, link: Link, number: int, disk: Disk, random: Random, parts: int) -> None:
        self.client = CoordinatorClient(link, number, _TIMEOUT)
        self.world = SimulatedWorld(machines, self.client, _TIMEOUT)
        self.seen: list[tuple[int, float]] = []
        self.evaluated: list[float] = []
        self.done: list[int] = []
        self.left_at: int | None = None
        self._hub, self._disk, self._random = machines.hub, disk, random
        self._parts = parts

    def run(self) -> None:
        """Run the equivalent of a training script, from ``paceline.start`` to its last line."""
        script = ScriptState()
        state = State(script, self._parts)
        context = self._context(state)
        checkpointer = Checkpointer(self.world, self._disk)
        beginning: Any = Beginning(context, {}, state, checkpointer, None)  # type: ignore[arg-type]

        def build(context: Any) -> Simulated:
            return Simulated(context, state, self._hub.pause, self._random)

        loop = TrainingLoop(beginning, script, build)
        script.register({"done": self.done})
        for batch in Batches(loop).batches(STEPS):
            result, _ = loop.step(batch)
            self.seen.append((batch.step, result.loss))
            self.done.append(batch.step)
            self._hub.pause(self._random.uniform(0.0, 0.05))
            if batch.step == EVALUATES:
                self.evaluated.append(loop.make(EVALUATE, "evaluating", self._evaluate))
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

    def _context(self, state: State) -> Any:
        names = [(str(part), SimpleNamespace(numel=lambda: 1)) for part in range(self._parts)]
        model = SimpleNamespace(
            modules=list, parameters=list, named_buffers=list, named_parameters=lambda: names,
        )  # fmt: skip
        buffers = SimpleNamespace(fixed=False, agreed=(), added=set(), reset=lambda: None, fix=lambda names: None)
        order = SimpleNamespace(
            batch=MICROBATCHES, microbatches=MICROBATCHES, samples_of=lambda step: MICROBATCHES,
            samples_before=lambda step: step * MICROBATCHES, epoch_of=lambda step: 0, is_last=lambda step: False,
            first_of=lambda epoch: UNKNOWN if epoch else 0,
        )  # fmt: skip
        return SimpleNamespace(
            world=self.world, settings=SETTINGS, order=order, loop=LoopChanges(), feed=Feed(), phases={},
            probe_results=ProbeResults(repeatable=True), audits=AuditSchedule(off=True),
            events=EventLog(None, -1), warnings=[], prepared=[],
            compute=SimpleNamespace(buffers=buffers, model=model), state=state,
            update=SimpleNamespace(parameters={}), every=frozenset(name for name, _ in names),
        )  # fmt: skip
