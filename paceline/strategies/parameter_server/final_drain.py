"""Strategy for asynchronous settings with a single worker, from the start or after losses."""

from __future__ import annotations

import math
from typing import Any

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.data.feed import MicrobatchGroup
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Strategy
from paceline.strategies.single import Single

STATE = "asynchronous"  # key of the strategy state of all asynchronous strategies


class FinalDrain(Strategy):
    """Training on one worker, which first computes the steps that earlier workers claimed but did not finish."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._single = Single(context)

    def groups(self, step: int) -> list[range]:
        return self._single.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        state = self._context.strategy_state.get(STATE, {})
        result = self._catch_up()
        if step < state.get("top", 0):  # done earlier, or by _catch_up
            return result or newest_result(restored(ClaimTable(), state), self._context)
        return self._compute(step, groups)

    def synchronize(self, steps: int) -> None:
        self._catch_up()

    def close(self) -> None:
        self._single.close()

    def _catch_up(self) -> StepResult | None:
        result, claimed = None, self._context.strategy_state.get(STATE, {}).get("open", [])
        while claimed:
            result = self._compute(claimed[0], self._context.feed.load(claimed[0], self.groups(claimed[0])))
            del claimed[0]
        return result

    def _compute(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        result = self._single.step(step, groups)
        if result.applied:
            self._context.events.mark("update", step=step, delay=0, learning_rate=result.learning_rate)
        newest = [step, result.loss, float(result.norm), result.learning_rate, result.applied, result.metrics]
        self._context.strategy_state.setdefault(STATE, {})["newest"] = newest
        return result


def restored(table: ClaimTable, state: dict[str, Any]) -> ClaimTable:
    """Return the claim table with the newest result from the strategy state."""
    if "newest" in state:
        table.newest, table.loss, table.norm, table.rate, table.applied, *rest = state["newest"]
        table.metrics = rest[0] if rest else {}  # older checkpoints have no metrics
    return table


def newest_result(table: ClaimTable, context: TrainingContext) -> StepResult:
    """Return the newest result known to all workers, for a worker that did not compute the step."""
    if table.newest < 0:
        return StepResult(math.nan, math.nan, context.update.learning_rate)
    return StepResult(table.loss, table.norm, table.rate, applied=table.applied, metrics=table.metrics)
