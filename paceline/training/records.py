"""Step records."""

from __future__ import annotations

import time
from functools import partial

from paceline.checkpoint.training_state import TrainingState
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import UNKNOWN
from paceline.diagnostics.branches import RunningBranch
from paceline.diagnostics.replay.digests import StepDigests
from paceline.diagnostics.replay.observer import end, observed, profiled
from paceline.diagnostics.verify.trace_writer import TraceWriter
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.events import seconds_without_core
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Strategy
from paceline.system.number_kinds import steps_of
from paceline.system.process_memory import process_memory
from paceline.training.progress import Progress
from paceline.training.report import Throughput

_MEMORY_STEPS = 0, 5, 12, 19
"""Steps of a tried run after which it reads its memory: few, because that takes some milliseconds a GB."""


class Records:
    """Recorder of steps: as events, and in a trace for ``paceline verify``."""

    def __init__(self, context: TrainingContext, state: TrainingState) -> None:
        self._context, self._state = context, state
        traced = env.trace()
        self._trace = None if traced is None else TraceWriter(traced, context, state.tensors)
        self._replay, branch = env.replay(), env.branch()
        self._branch = None if branch is None else RunningBranch(branch, context)
        self._profiled, self._folder = steps_of(context.settings.profile_steps or "0:0"), env.run_directory()
        if self._profiled and self._folder is None:
            raise ConfigError(
                f"profile_steps = {context.settings.profile_steps!r}: profiles go to the directory of a run, which "
                f"paceline run makes. Start the script with it, or leave out profile_steps."
            )
        self.throughput = Throughput()
        self._ended = time.perf_counter()  # end of the last step
        self._delay = seconds_without_core()
        self._digests = StepDigests(context)
        self._digest: tuple[int, dict[str, str]] = -1, {}  # step that this worker has taken last, and its digest

    @property
    def needs_whole_state(self) -> bool:
        """Whether each step records the whole state, which not every worker has by itself."""
        return self._trace is not None and not self._context.replicated

    @property
    def last_step(self) -> int:
        """Number of steps after which a traced, tried or replayed run ends; ``UNKNOWN`` for other runs."""
        if self._replay is not None:
            return self._replay.step + 1
        return (self._trace.steps if self._trace else env.tried_steps()) or UNKNOWN

    def begin(self) -> float:
        """Begin a step. Returns the time."""
        self._context.world.begin_step()
        return time.perf_counter()

    def observe(self, strategy: Strategy, step: int, groups: list[MicrobatchGroup]) -> StepResult | None:
        """Take a step and observe it, if it is to be replayed or profiled, or of a branch. Otherwise return None."""
        if self._branch is not None:
            return self._branch.take(step, partial(strategy.step, step, groups))
        if self._replay is not None and self._replay.step == step:
            return observed(self._replay, self._context, self._state, strategy, step, groups)
        if step in self._profiled and self._folder is not None and self._replay is None:
            path = self._folder / "profiles" / f"step-{step}-rank-{self._context.world.rank}.json"
            return profiled(self._context, step, path, partial(strategy.step, step, groups))
        return None

    def chain(self, strategy: Strategy, progress: Progress, step: int, result: StepResult) -> None:
        """Chain the digest of a step that was just taken to the progress."""
        digest = self._digests.after(progress.chain, step, result, strategy)
        self._digest = step, digest
        progress.chain = digest.get("chain", "")

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
        """Record a step. If a batch has several phases, the first is recorded as the step, later ones as phases.

        Ends the process if it was the step to replay.
        """
        context = self._context
        samples = context.order.samples_of(step)
        self.throughput.add(samples, seconds, result.paced_over)
        metrics = {"metrics": result.metrics} if result.metrics else {}
        waits, ended, delay = context.world.take_waits(), time.perf_counter(), seconds_without_core()
        between = max(0.0, ended - self._ended - seconds)
        if not turn:
            self._ended = ended
        taken, digest = self._digest  # of an earlier step if this worker got the step's result from others
        context.events.mark(
            "phase" if turn else "step",
            **({"optimizer": phase} if phase else {}),
            step=step,
            seconds=seconds,
            waited=min(seconds, waited + context.feed.take_seconds()),  # some strategies load inside the step
            awaited=waits.seconds,
            update=context.update.take_seconds(),
            between=between,
            awaited_between=waits.between,
            delayed=delay - self._delay,
            **({} if waits.late is None else {"late": waits.late}),
            **({"links": waits.links} if waits.links else {}),
            loss=result.loss,
            samples=samples,
            samples_per_second=self.throughput.samples_per_second,
            gradient_norm=float(result.norm),
            learning_rate=result.learning_rate,
            **metrics,
            **(digest if taken == step else {}),
        )
        self._delay = delay
        if step in _MEMORY_STEPS and env.tried_steps() and not turn and (memory := process_memory()) is not None:
            context.events.mark("memory", after=step, reached=memory.peak)
        if self._trace is not None and not turn and not again:
            self._trace.step(step, result.loss, context.order.samples_before(step + 1), result.learning_rate)
        if self._branch is not None:
            self._branch.after(step, result.loss)
        if self._replay is not None and step == self._replay.step and turn + 1 >= len(context.phases):
            end(context)
