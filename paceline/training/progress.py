"""Progress of workers, and the decisions that depend on it: pure functions, testable without workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol

import torch

from paceline.comm.values import sendable
from paceline.comm.world import LEAVING
from paceline.data.nested import map_tensors
from paceline.step.context import StepResult

_MOST_CALLS = 1 << 32  # upper bound on the number of collective calls of a run
EVALUATE, ONCE, MAP, PREDICT, WEIGHTS, EXTEND = "evaluate", "once", "map", "predict", "weights", "extend"
"""Kinds of collective calls. Checkpoints store the results of the first three."""
Call = tuple[int, int, int]
"""Position of a call in the script: number of steps; epoch of ``session.epochs``, or -1; and 1 inside a batch loop,
which a resumed script does not enter for completed batches, else 0."""
BEFORE_TRAINING: Call = (0, -1, 0)


class CallResults(Protocol):
    """Store of the results of collective calls, by kind of call and position in the script."""

    def results(self, kind: str, call: Call) -> Sequence[Any]:
        """Return the results of the calls of this kind at this position in the script, in order."""

    def add_result(self, kind: str, call: Call, result: Any) -> None:
        """Add the result of a call of this kind at this position in the script."""


@sendable
@dataclass
class Progress:
    """Progress of a worker: everything besides tensors that other workers need to catch up."""

    steps: int = 0  # number of completed steps
    # results of collective calls, in order, by kind of call and position in the script
    results_of: dict[str, dict[Call, list[Any]]] = field(default_factory=dict)
    result: StepResult | None = None  # result of the last step
    # distinct number per worker if equally advanced workers have different states, so that all workers take the state
    # of the worker with the largest number
    tie_break: int = 0
    # names of the parameters and buffers whose newest values this worker has, if the state is sharded. None if the
    # worker has the whole state.
    owned: frozenset[str] | None = None
    repeat_until: int = 0  # steps before this number were completed before the workers went back to a checkpoint
    left_out: set[int] = field(default_factory=set)  # steps whose batch the script did not pass to ``step``
    # number of completed steps in the state that this worker last received from another worker or a checkpoint; 0 if
    # never. The sender, or the run that saved the checkpoint, may have been in code after the last of these steps.
    received: int = 0
    turns: int = 0  # number of completed phases of the last batch, if a batch has several
    phases: list[StepResult] = field(default_factory=list)  # results of these phases
    received_turns: int = 0  # ``turns`` in the state that this worker last received
    # position in the script at which the workers last compared their states. Equal on all workers after re-forming, so
    # that either all or none of them compare again.
    compared: int = 0
    entered: int = -1  # step that the script has begun last
    # whether a script that receives this progress gets the batch of the last step again. False if the senders had
    # already begun the next step.
    again: bool = True
    # whether a loss has interrupted a step that others may have done, for which this worker has all inputs
    undecided: bool = False
    # whether the tensors in ``owned`` are those after one more step, which others have done
    ahead: bool = False
    # number of completed steps in the newest state that the workers can go back to in memory. None if a loss needs none
    point: int | None = None
    # names of the values that the script's loop has changed between steps
    changes: list[str] = field(default_factory=list)
    chain: str = ""  # chained digest of all steps so far (``diagnostics.replay.digests``)

    @property
    def key(self) -> tuple[int, int, int]:
        """Sort key: the worker with the largest key is the most advanced."""
        calls = sum(len(results) for made in self.results_of.values() for results in made.values())
        return self.steps, self.turns * _MOST_CALLS + calls, self.tie_break

    @property
    def is_in_step(self) -> bool:
        """Whether the script has begun or begins with the next step, so that no code after the last step is pending."""
        return self.entered == self.steps or self.begins_next

    @property
    def begins_next(self) -> bool:
        """Whether the state is as of the beginning of the next step, so that this worker has no earlier state."""
        return self.received == self.steps and not self.again

    def has_script_at(self, steps: int) -> bool:
        """Return whether the script has begun step ``steps - 1``, so that its own registered values are current."""
        return self.entered >= steps - 1

    def has_received(self, step: int, turn: int = 0) -> bool:
        """Return whether the state that this worker has received already includes this step, or this phase of it."""
        return step < self.received - 1 or (step == self.received - 1 and turn < max(self.received_turns, 1))

    def gives_again(self, given: int) -> bool:
        """Return whether the script must get the batch of the last received step again.

        Args:
            given: last step whose batch the script received.
        """
        return given < self.received - 1 and self.result is not None and self.again

    def to_repeat(self, stop: int) -> bool:
        """Return whether the next step is before ``stop`` and was completed before the return to a checkpoint."""
        return self.steps < min(stop, self.repeat_until)

    def results(self, kind: str, call: Call) -> list[Any]:
        """Return the results of the calls of this kind at this position in the script, in order."""
        return self.results_of.get(kind, {}).get(call, [])

    def add_result(self, kind: str, call: Call, result: Any) -> None:
        """Add the result of a call of this kind at this position in the script."""
        self.results_of.setdefault(kind, {}).setdefault(call, []).append(result)

    def forget_maps(self, epoch: int) -> None:
        """Drop the results of ``session.map`` in earlier epochs, in which no script can still begin.

        Calls outside of ``session.epochs`` keep theirs. The number of calls, which is part of :attr:`key`, stays.
        """
        for (_, called_in, _), results in self.results_of.get(MAP, {}).items():
            if 0 <= called_in < epoch:
                results[:] = [None] * len(results)

    def without_maps(self) -> Progress:
        """Return this progress without the results of ``session.map``, which may be large. Their number stays."""
        calls = {call: [None] * len(results) for call, results in self.results_of.get(MAP, {}).items()}
        return replace(self, results_of={**self.results_of, MAP: calls}) if calls else self

    def with_maps(self, history: Mapping[str, Any]) -> Progress:
        """Return this progress with the results of ``session.map`` in a :meth:`history`."""
        if not (maps := history.get("maps")):
            return self
        # received tensors are parts of one tensor, the whole state
        return replace(self, results_of={**self.results_of, MAP: map_tensors(torch.clone, maps)})

    def take(self, step: int, result: StepResult, turn: int | None = None) -> None:
        """Record a completed step, or a completed phase of it."""
        self.steps, self.result = step + 1, result
        if turn is not None:
            self.turns, self.phases = turn + 1, [*self.phases[:turn], result]

    def leave_out(self, step: int) -> None:
        """Record that the script has left out a step."""
        self.left_out.add(step)
        self.entered = max(self.entered, step)
        if self.steps == step:
            self.steps = step + 1

    def result_of(self, turn: int) -> StepResult | None:
        """Return the result of a phase of the last batch, or of the last step if there is no such phase."""
        return self.phases[turn] if turn < len(self.phases) else self.result

    def history(self) -> dict[str, Any]:
        """Return the results to store in a checkpoint: those that the session has returned to the script."""
        results = [] if self.result is None else [self.result, *self.phases[: self.turns]]
        once = self.results_of.get(ONCE, {})
        return {
            "evaluations": dict(self.results_of.get(EVALUATE, {})),
            "once": {call: values for call, values in once.items() if call != BEFORE_TRAINING},
            "maps": dict(self.results_of.get(MAP, {})),
            "results": [{key: _number(value) for key, value in asdict(one).items()} for one in results],
            **({"chain": self.chain} if self.chain else {}),
            **({"again": False} if self.begins_next else {}),
        }

    @classmethod
    def resumed(cls, steps: int, history: dict[str, Any]) -> Progress:
        """Create the progress of a run that resumes from a checkpoint."""
        if not history.get("results"):  # no step was trained, or an older version wrote the checkpoint
            return cls(steps)
        known = {one.name for one in fields(StepResult)}
        given = [{key: value for key, value in one.items() if key in known} for one in history["results"]]
        result, *phases = [StepResult(**{**one, "notice": 0}) for one in given]
        results_of = {EVALUATE: history["evaluations"], ONCE: history["once"]}
        again = history.get("again", True)
        progress = cls(steps, results_of, result=result, phases=phases, received=steps, again=again)
        progress.chain = history.get("chain", "")
        progress.turns = progress.received_turns = len(phases)
        return progress.with_maps(history)


class Action(Enum):
    """Reaction of a worker to a notice."""

    GO_ON = "go on"
    RE_FORM = "re-form"
    SAVE_AND_STOP = "save and stop"


def decide(notice: int, elastic: bool, joiners_wait: bool) -> Action:
    """Return the action of all workers after a step with this notice.

    Args:
        notice: largest notice of any worker (``comm.world``), 0 if there is none.
        elastic: whether the run has a coordinator, which forms the next membership.
        joiners_wait: whether joining workers wait for a later step, because no worker has a copy of the state as of the
            return of this step: the loop has changed a tensor for the first time, or lost steps are being repeated.
    """
    if not notice or (notice < LEAVING and (joiners_wait or not elastic)):
        return Action.GO_ON
    return Action.RE_FORM if elastic else Action.SAVE_AND_STOP


@dataclass(frozen=True)
class CatchUp:
    """Plan of the state transfer that brings all workers to the same state."""

    senders: list[int]  # most advanced ranks that have the state to send. The ranks that are behind receive it.
    # whether all senders have begun the next step and no receiver has a state, so that the receivers begin with that
    # step. Otherwise they receive the state as of the return of the last step, unless no sender has it.
    in_step: bool


def plan_catch_up(everyone: Sequence[Progress | None]) -> CatchUp:
    """Return the plan of the state transfer, given the progress of each rank; None for ranks without a state."""
    keys = [None if one is None else one.key for one in everyone]
    furthest = max(key for key in keys if key is not None)
    senders = [rank for rank, key in enumerate(keys) if key == furthest]
    in_step = all(
        one is not None and one.is_in_step if rank in senders else one is None for rank, one in enumerate(everyone)
    )
    if not in_step:
        ended = [rank for rank in senders if (one := everyone[rank]) is not None and not one.begins_next]
        in_step, senders = not ended, ended or senders
    return CatchUp(senders, in_step)


def furthest_of(everyone: Sequence[Progress | None]) -> Progress:
    """Return the progress of the most advanced worker."""
    return max((one for one in everyone if one is not None), key=lambda one: one.key)


def norm_of_done(everyone: Sequence[Progress | None], step: int) -> torch.Tensor | float | None:
    """Return the norm of the gradients of a step from a worker that has done it. None if no worker has."""
    return next((one.result.norm for one in everyone if one and one.steps == step + 1 and one.result), None)


def lacks_script(everyone: Sequence[Progress | None]) -> bool:
    """Return whether a worker needs the script's values as of the state of the most advanced workers, which lack them.

    While they repeat lost steps, they have a later step's values, from before they went back to a checkpoint.
    """
    most = furthest_of(everyone)
    behind = [one for one in everyone if one is None or one.key != most.key]
    return most.steps < most.repeat_until and any(one is None or not one.has_script_at(most.steps) for one in behind)


def maps_since(everyone: Sequence[Progress | None], history: Mapping[str, Any]) -> bool:
    """Return whether a worker has called ``session.map`` after a checkpoint, whose ``history`` then lacks the call."""
    known = history.get("maps", {})
    made = [one.results_of.get(MAP, {}) for one in everyone if one is not None]
    return any(len(results) > len(known.get(call, ())) for calls in made for call, results in calls.items())


def gone_back(everyone: Sequence[Progress | None], rank: int, steps: int, history: dict[str, Any]) -> Progress:
    """Return the progress of a rank after all ranks have loaded a checkpoint because some state was lost.

    Args:
        everyone: progress of each rank before the loss; None for ranks without a state.
        history: results stored in the checkpoint (:meth:`Progress.history`).
    """
    own, known = everyone[rank], [one for one in everyone if one is not None]
    # workers that have gone back before may have fewer steps than the most advanced worker, but more results of calls
    repeat_until = max(max(one.repeat_until, one.steps) for one in known)
    results_of = _all_results(known)
    most = replace(furthest_of(everyone), owned=None, ahead=False)
    saved = Progress.resumed(steps, history)
    back = replace(most, steps=steps, repeat_until=repeat_until, results_of=results_of, chain=saved.chain)
    back = back.with_maps(history)
    # a script that waits for a step before the checkpoint gets the result of others, because it must not take the step
    # again
    if own is not None and own.steps >= steps and own.has_script_at(steps):
        return replace(back, received=own.received, again=own.again, entered=own.entered)
    entered = -1 if own is None else own.entered
    return replace(back, again=saved.again, received=steps, entered=entered, result=saved.result)


def _all_results(known: Sequence[Progress]) -> dict[str, dict[Call, list[Any]]]:
    """Return the union of all known results of collective calls, which are equal on all workers that have them."""
    found: dict[str, dict[Call, list[Any]]] = {}
    for one in known:
        for kind, calls in one.results_of.items():
            before = found.setdefault(kind, {})
            before.update({call: max(before.get(call, []), results, key=len) for call, results in calls.items()})
    return found


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value
