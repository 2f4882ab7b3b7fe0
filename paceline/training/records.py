"""Step records."""

from __future__ import annotations

from paceline.checkpoint.training_state import TrainingState
from paceline.data.order import UNKNOWN
from paceline.diagnostics.verify.trace_writer import TraceWriter
from paceline.environments import env
from paceline.step.context import StepResult, TrainingContext


class Records:
    """Recorder of steps: as events, and in a trace for ``paceline verify``."""

    def __init__(self, context: TrainingContext, state: TrainingState) -> None:
        self._context = context
        traced = env.trace()
        self._trace = None if traced is None else TraceWriter(traced, context, state.tensors)

    @property
    def needs_whole_state(self) -> bool:
        """Whether each step records the whole state, which not every worker has by itself."""
        return self._trace is not None and not self._context.replicated

    @property
    def last_step(self) -> int:
        """Number of steps after which a traced run ends; ``UNKNOWN`` for other runs."""
        return UNKNOWN if self._trace is None else self._trace.steps

    def add(
        self,
        step: int,
        result: StepResult,
        seconds: float,
        waited: float = 0.0,  # part of the duration spent waiting for data, in seconds
        phase: str = "",  # name of an optimizer, if the batch has several phases
        turn: int = 0,
        again: bool = False,  # whether the step is a repetition, which is not traced again
    ) -> None:
        """Record a step. If a batch has several phases, the first is recorded as the step, later ones as phases."""
        context = self._context
        samples = context.order.samples_of(step)
        metrics = {"metrics": result.metrics} if result.metrics else {}
        awaited, late = context.world.take_waits()
        context.events.mark(
            "phase" if turn else "step",
            **({"optimizer": phase} if phase else {}),
            step=step,
            seconds=seconds,
            waited=waited,
            awaited=awaited,
            **({} if late is None else {"late": late}),
            loss=result.loss,
            samples=samples,
            samples_per_second=samples / seconds,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
            **metrics,
        )
        if self._trace is not None and not turn and not again:
            self._trace.step(step, result.loss, context.order.samples_before(step + 1), result.learning_rate)
