"""How far a worker is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from paceline.comm.values import sendable
from paceline.step.job import StepResult

_MOST_ASKED = 1 << 32
"""Evaluations and exports of a run; more than any has."""
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
        evaluations: where the script asked for evaluations, and their results in order.
        once: where the script asked for what is done by one worker, and the results in order.
        exports: after how many steps the script asked for the weights, and how often.
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
        turns: how many phases of the last batch were done, if a batch has several; :attr:`results` are theirs.
        received_turns: of the last batch in the state that this worker last received.
        compared: the position in the script at which the workers last compared their states; the same on all after
            they have re-formed, as each of them compares then, or none.
        entered: the step that the script has begun last.
        again: whether a script that has received this gets the batch of the last step once more: not if it received
            the state of workers that had begun the next one.
        changes: what the loop has changed between steps, by name.
        predictions: where the script asked for predictions, and how often; nobody keeps these.
    """

    steps: int = 0
    evaluations: dict[Call, list[Any]] = field(default_factory=dict)
    once: dict[Call, list[Any]] = field(default_factory=dict)
    exports: dict[int, int] = field(default_factory=dict)
    result: StepResult | None = None
    tie_break: int = 0
    holds: frozenset[str] | None = None
    repeat_until: int = 0
    left_out: set[int] = field(default_factory=set)
    received: int = 0
    turns: int = 0
    results: list[StepResult] = field(default_factory=list)
    received_turns: int = 0
    compared: int = 0
    entered: int = -1
    again: bool = True
    changes: list[str] = field(default_factory=list)
    predictions: dict[Call, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int, int]:
        """Return what orders workers: the one with the largest key is the furthest."""
        calls = sum(len(results) for made in (self.evaluations, self.once) for results in made.values())
        asked = calls + sum(self.exports.values()) + sum(self.predictions.values())
        return self.steps, self.turns * _MOST_ASKED + asked, self.tie_break

    @property
    def is_in_step(self) -> bool:
        """Whether the script has begun the next step: nothing that it does behind the last one is still to come."""
        return self.entered == self.steps

    def has_received(self, step: int, turn: int = 0) -> bool:
        """Whether others took this step, or this phase of it, before this worker received their state."""
        return step < self.received - 1 or (step == self.received - 1 and turn < max(self.received_turns, 1))

    def take(self, step: int, result: StepResult, turn: int | None = None) -> None:
        """A step is done, or a phase of it."""
        self.steps, self.result = step + 1, result
        if turn is not None:
            self.turns, self.results = turn + 1, [*self.results[:turn], result]

    def result_of(self, turn: int) -> StepResult | None:
        """The result of a phase of the last batch, or of the last step."""
        return self.results[turn] if turn < len(self.results) else self.result

    def history(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: what the script was told so far."""
        results = [] if self.result is None else [self.result, *self.results[: self.turns]]
        return {
            "evaluations": dict(self.evaluations),
            "once": {call: values for call, values in self.once.items() if call != BEFORE_TRAINING},
            "results": [{key: _number(value) for key, value in asdict(one).items()} for one in results],
        }

    @classmethod
    def resumed(cls, steps: int, history: dict[str, Any]) -> Progress:
        """The progress of a run that goes on from a checkpoint."""
        if not history.get("results"):  # nothing was trained before, or by an older version
            return cls(steps)
        known = {one.name for one in fields(StepResult)}
        given = [{key: value for key, value in one.items() if key in known} for one in history["results"]]
        result, *results = [StepResult(**{**one, "notice": 0}) for one in given]
        progress = cls(steps, history["evaluations"], history["once"], result=result, results=results, received=steps)
        progress.turns = progress.received_turns = len(results)
        return progress


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value
