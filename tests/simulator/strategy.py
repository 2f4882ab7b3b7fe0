"""Model of a simulated run: numbers that encode the steps that they have seen, and a strategy that divides them.

With six parts two workers hold each part, as with ``shard_copy`` in ``strategies.sharded``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from paceline.errors import WorkerLost
from paceline.step.context import StepResult
from paceline.strategies.base import Strategy
from paceline.system import fault_points
from paceline.training.script_state import ScriptState
from simulator.world import Broken, SimulatedWorld

MICROBATCHES = 8
_MODULUS = (1 << 61) - 1
_COPIED = 6  # number of parts of which each has a copy


def value_after(steps: int) -> int:
    value = 1
    for step in range(steps):
        value = stepped(value, step)
    return value


def stepped(value: int, step: int) -> int:
    """Return the value of the model after a further step."""
    return (value * 1_000_003 + step + 1) % _MODULUS


class State:
    """State of training, in place of ``checkpoint.training_state.TrainingState``.

    Args:
        parts: number of parts of the model. Each part is a number as described in the module docstring.
        data: order of the samples, which may have a state.
    """

    run = "simulated"

    def __init__(self, script: ScriptState, parts: int, data: Any) -> None:
        self.parts = [(1, 0)] * parts  # value and number of applied steps
        self.keeps_script = False
        self.loaded_script: dict[str, Any] = {}
        self.divided: Callable[[], Any] = lambda: None
        self._script, self._data = script, data
        self.tensors = dict

    def take(self, step: int, parts: Sequence[int]) -> None:
        """Apply the update of a step to some parts of the model."""
        for part in parts:
            value, steps = self.parts[part]
            if step != steps:
                raise Broken(f"the update of step {step} on a model after {steps} steps")
            self.parts[part] = stepped(value, step), step + 1

    def script_of_now(self) -> Any:
        return self._script.of_now()

    def snapshot(self, steps: int, without: Collection[str] = ()) -> SimpleNamespace:
        self.check(steps)
        data = {} if "data" in without else {"data": self._data.state(steps)}
        state = {**self._script.saved(), **data}
        return SimpleNamespace(tensors={"parts": torch.tensor(self.parts)}, state=state, step=steps)

    def check(self, steps: int) -> None:
        """Raise Broken unless all parts have the values after exactly these steps."""
        if self.parts != [(value_after(steps), steps)] * len(self.parts):
            raise Broken(f"a state after {[steps for _, steps in self.parts]} steps that is to be one after {steps}")

    def load(self, tensors: dict[str, torch.Tensor], state: Any) -> None:
        self.parts = [(value, steps) for value, steps in tensors["parts"].tolist()]
        self.loaded_script = state
        self._data.load(state.get("data", {}))
        if not self.keeps_script:
            self.load_script()

    def load_script(self) -> None:
        self._script.load(self.loaded_script)


class Share:
    """Share of the state, in place of ``step.divided.optimizer_state.DividedOptimizerState``.

    For a save rank 0 borrows the parts of the others.
    """

    def __init__(self, world: SimulatedWorld, state: State, own: Sequence[int]) -> None:
        self.hashes: list[Any] | None = None
        self._world, self._state, self._own, self._kept = world, state, own, list(state.parts)

    def hash(self) -> None:
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
        self._copied = self._divides and len(every) == _COPIED
        self._held = [part for part in every if part in self._own or (part + 1) % self._world.size == self._world.rank]
        self._held = self._held if self._copied else self._own
        self._undecided: int | None = None
        self._unfinished: WorkerLost | None = None

    def groups(self, step: int) -> list[range]:
        rank, size = self._world.rank, self._world.size
        return [range(rank * MICROBATCHES // size, (rank + 1) * MICROBATCHES // size)]

    def step(self, step: int, groups: list[Any]) -> StepResult:
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
        if self._copied:
            self._undecided = step
            self._world.gather(step, "step")
            self._undecided = None
        fault_points.reach("between reduction and update", step)
        self._state.take(step, self._held)
        fault_points.reach("after update", step)
        result = StepResult(float(step), 1.0, 0.1, notice=max(notice for *_, notice in everyone))
        if self._copied:
            try:
                self._world.gather(step, "step")
            except WorkerLost as lost:
                self._unfinished = lost
                return result
        if self._keeps_shares and result.notice:
            try:
                self.unite(step + 1)
            except WorkerLost as lost:
                self._unfinished = lost
        return result

    def settle(self) -> None:
        if self._unfinished is not None:
            raise self._unfinished

    @property
    def undecided(self) -> bool:
        return self._undecided is not None

    def decide(self, norm: Any) -> frozenset[str] | None:
        assert self._undecided is not None
        if norm is not None:
            self._state.take(self._undecided, self._held)
        self._undecided = None
        return self._names()

    def synchronize(self, steps: int) -> None:
        if not self._keeps_shares:
            self.unite(steps)

    @property
    def divided(self) -> Any:
        return self._share if self._keeps_shares and not self._synchronized else None

    def unite(self, steps: int) -> None:
        if self._divides and not self._synchronized:
            _gather(self._world, self._state, self._own)
            self._synchronized = True

    def close(self) -> frozenset[str] | None:
        return self._names()

    def _names(self) -> frozenset[str] | None:
        return frozenset(map(str, self._held)) if self._divides else None


def _gather(world: SimulatedWorld, state: State, own: Sequence[int]) -> None:
    everyone = world.gather([[part, *state.parts[part]] for part in own], "synchronizing")
    for part, value, steps in (one for parts in everyone for one in parts):
        state.parts[part] = value, steps


def gather_parts(context: Any, owned: Sequence[frozenset[str] | None]) -> None:
    """Send all parts to all workers, in place of ``step.divided.consolidate.consolidate_state_dict``."""
    held = [context.every if part is None else part for part in owned]
    own = held[context.world.rank].difference(*held[: context.world.rank])
    _gather(context.world, context.state, sorted(map(int, own)))
