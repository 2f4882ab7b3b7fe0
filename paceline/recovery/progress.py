"""How far a worker is."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.comm.values import sendable
from paceline.step.job import StepResult


@sendable
@dataclass
class Progress:
    """How far a worker is, and what those that are behind need besides the tensors.

    Attributes:
        steps: steps done.
        evaluations: after how many steps the script asked for evaluations, and their results in order.
        result: of the last step.
        tie_break: different on each worker where workers that are equally far have different states: then all but one
            take the state of that one.
        holds: where each worker has a part of the state, the parameters and buffers whose newest values are this
            worker's; none: it has the whole state.
        repeat_until: steps below this number were done before the workers went back to a checkpoint.
        left_out: steps whose batch the script did not give to ``step``.
        received: steps done in the state that this worker last received from another one; 0 if it never has. The
            others may be in the middle of what the script does after the last of them.
        compared: the position in the script at which the workers last compared their states; the same on all after
            they have re-formed, as each of them compares then, or none.
    """

    steps: int = 0
    evaluations: dict[int, list[float]] = field(default_factory=dict)
    result: StepResult | None = None
    tie_break: int = 0
    holds: frozenset[str] | None = None
    repeat_until: int = 0
    left_out: set[int] = field(default_factory=set)
    received: int = 0
    compared: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Return what orders workers: the one with the largest key is the furthest."""
        return self.steps, sum(map(len, self.evaluations.values())), self.tie_break
