"""How far a worker is, and what follows from that: pure, so that it is tested without workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

import torch

from paceline.comm.values import sendable
from paceline.comm.world import LEAVING
from paceline.step.job import StepResult

_MOST_CALLS = 1 << 32
"""Evaluations and exports of a run; more than any has."""
EVALUATE, ONCE, PREDICT, WEIGHTS = "evaluate", "once", "predict", "weights"
"""The kinds of calls that all workers make together. The results of the first two are kept."""
Call = tuple[int, int, int]
"""Where in the script a call is: after how many steps; in which epoch of ``session.epochs``, or -1; whether (1 or 0)
among the batches, where a resumed script does not come."""
BEFORE_TRAINING: Call = (0, -1, 0)


@sendable
@dataclass
class Progress:
    """How far a worker is, and what those that are behind need besides the tensors.

    Attributes:
        steps: steps done.
        results_of: by the kind of a call where in the script it was made, and its results there, in order.
        result: of the last step.
        tie_break: different on each worker where workers that are equally far have different states: then all but one
            take the state of that one.
        holds: where each worker has a part of the state, the parameters and buffers whose newest values are this
            worker's; none: it has the whole state.
        repeat_until: steps below this number were done before the workers went back to a checkpoint.
        left_out: steps whose batch the script did not give to ``step``.
        received: steps done in the state that this worker last received from another one or a checkpoint; 0 if it
            never has. The others may be in the middle of what the script does after the last of them, as was the run
            that saved the checkpoint.
        turns: how many phases of the last batch were done, if a batch has several; :attr:`phases` are their results.
        received_turns: of the last batch in the state that this worker last received.
        compared: the position in the script at which the workers last compared their states; the same on all after
            they have re-formed, as each of them compares then, or none.
        entered: the step that the script has begun last.
        again: whether a script that has received this gets the batch of the last step once more: not if it received
            the state of workers that had begun the next one.
        changes: what the loop has changed between steps, by name.
    """

    steps: int = 0
    results_of: dict[str, dict[Call, list[Any]]] = field(default_factory=dict)
    result: StepResult | None = None
    tie_break: int = 0
    holds: frozenset[str] | None = None
    repeat_until: int = 0
    left_out: set[int] = field(default_factory=set)
    received: int = 0
    turns: int = 0
    phases: list[StepResult] = field(default_factory=list)
    received_turns: int = 0
    compared: int = 0
    entered: int = -1
    again: bool = True
    changes: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        """Return what orders workers: the one with the largest key is the furthest."""
        calls = sum(len(results) for made in self.results_of.values() for results in made.values())
        return self.steps, self.turns * _MOST_CALLS + calls, self.tie_break

    @property
    def is_in_step(self) -> bool:
        """Whether the script has begun the next step: nothing that it does behind the last one is still to come."""
        return self.entered == self.steps

    def has_script_at(self, steps: int) -> bool:
        """Whether the script has begun the last of so many steps, so that its own values are those to keep."""
        return self.entered >= steps - 1

    def has_received(self, step: int, turn: int = 0) -> bool:
        """Whether others took this step, or this phase of it, before this worker received their state."""
        return step < self.received - 1 or (step == self.received - 1 and turn < max(self.received_turns, 1))

    def gives_again(self, given: int) -> bool:
        """Whether the script gets the batch of the last step once more that this worker has received.

        Args:
            given: the last step whose batch the script got.
        """
        return given < self.received - 1 and self.result is not None and self.again

    def to_repeat(self, stop: int) -> bool:
        """Whether the next step is one below ``stop`` that was done before the workers went back to a checkpoint."""
        return self.steps < min(stop, self.repeat_until)

    def results(self, kind: str, call: Call) -> list[Any]:
        """The results so far of the calls of a kind at a place in the script."""
        return self.results_of.get(kind, {}).get(call, [])

    def add_result(self, kind: str, call: Call, result: Any) -> None:
        """Another call of a kind was made at a place in the script."""
        self.results_of.setdefault(kind, {}).setdefault(call, []).append(result)

    def take(self, step: int, result: StepResult, turn: int | None = None) -> None:
        """A step is done, or a phase of it."""
        self.steps, self.result = step + 1, result
        if turn is not None:
            self.turns, self.phases = turn + 1, [*self.phases[:turn], result]

    def leave_out(self, step: int) -> None:
        """The script has left a step out."""
        self.left_out.add(step)
        self.entered = max(self.entered, step)
        if self.steps == step:
            self.steps = step + 1

    def result_of(self, turn: int) -> StepResult | None:
        """The result of a phase of the last batch, or of the last step."""
        return self.phases[turn] if turn < len(self.phases) else self.result

    def history(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: what the script was told so far."""
        results = [] if self.result is None else [self.result, *self.phases[: self.turns]]
        once = self.results_of.get(ONCE, {})
        return {
            "evaluations": dict(self.results_of.get(EVALUATE, {})),
            "once": {call: values for call, values in once.items() if call != BEFORE_TRAINING},
            "results": [{key: _number(value) for key, value in asdict(one).items()} for one in results],
        }

    @classmethod
    def resumed(cls, steps: int, history: dict[str, Any]) -> Progress:
        """The progress of a run that goes on from a checkpoint."""
        if not history.get("results"):  # nothing was trained before, or by an older version
            return cls(steps)
        known = {one.name for one in fields(StepResult)}
        given = [{key: value for key, value in one.items() if key in known} for one in history["results"]]
        result, *phases = [StepResult(**{**one, "notice": 0}) for one in given]
        results_of = {EVALUATE: history["evaluations"], ONCE: history["once"]}
        progress = cls(steps, results_of, result=result, phases=phases, received=steps)
        progress.turns = progress.received_turns = len(phases)
        return progress


class Action(Enum):
    """What a worker does about a notice."""

    GO_ON = "go on"
    RE_FORM = "re-form"
    SAVE_AND_STOP = "save and stop"


def decide(notice: int, elastic: bool, joiners_wait: bool) -> Action:
    """Return what all workers do after a step in which they heard a notice.

    Args:
        notice: the largest of all workers (``comm.rendezvous.coordinator_client``).
        elastic: whether a coordinator forms another membership.
        joiners_wait: whether nobody has all of the state as it was when this step returned: the loop has changed a
            tensor for the first time, or lost steps are repeated. Then joiners wait for a later step.
    """
    if not notice or (notice < LEAVING and (joiners_wait or not elastic)):
        return Action.GO_ON
    return Action.RE_FORM if elastic else Action.SAVE_AND_STOP


@dataclass(frozen=True)
class CatchUp:
    """How workers come to the same state.

    Attributes:
        senders: the ranks that are furthest; the others get their state.
        in_step: whether all senders have begun the next step, and none of the others has a state: so these begin with
            that step, too. Otherwise they get the state with which the last step returned.
    """

    senders: list[int]
    in_step: bool


def plan_catch_up(everyone: Sequence[Progress | None]) -> CatchUp:
    """Return who sends the state, by the progress of each rank; None: it has no state yet."""
    keys = [None if one is None else one.key for one in everyone]
    furthest = max(key for key in keys if key is not None)
    senders = [rank for rank, key in enumerate(keys) if key == furthest]
    in_step = all(
        one is not None and one.is_in_step if rank in senders else one is None for rank, one in enumerate(everyone)
    )
    return CatchUp(senders, in_step)


def furthest_of(everyone: Sequence[Progress | None]) -> Progress:
    """Return the progress of the worker that is furthest."""
    return max((one for one in everyone if one is not None), key=lambda one: one.key)


def gone_back(everyone: Sequence[Progress | None], rank: int, steps: int, history: dict[str, Any]) -> Progress:
    """Return the progress of a rank after all have taken a checkpoint, as a part of the state is lost.

    Args:
        everyone: the progress of each rank; None: it had no state.
        rank: the rank.
        steps: of the checkpoint.
        history: what the checkpoint keeps of the progress.
    """
    own, known = everyone[rank], [one for one in everyone if one is not None]
    # some may have gone back before: they have fewer steps than the furthest, and know of more calls
    repeat_until = max(max(one.repeat_until, one.steps) for one in known)
    results_of = _all_results(known)
    back = replace(furthest_of(everyone), steps=steps, repeat_until=repeat_until, holds=None, results_of=results_of)
    if own is not None and own.has_script_at(steps):
        return replace(back, received=own.received, again=own.again, entered=own.entered)
    entered = -1 if own is None else own.entered
    return replace(back, again=True, received=steps, entered=entered, result=Progress.resumed(steps, history).result)


def _all_results(known: Sequence[Progress]) -> dict[str, dict[Call, list[Any]]]:
    """Return what any of them knows of the calls of the script; those of one call are alike on all."""
    found: dict[str, dict[Call, list[Any]]] = {}
    for one in known:
        for kind, calls in one.results_of.items():
            before = found.setdefault(kind, {})
            before.update({call: max(before.get(call, []), results, key=len) for call, results in calls.items()})
    return found


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value
