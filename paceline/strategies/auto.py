"""Adaptive choice between all-reduce and work stealing, by measured step times.

::

    steps  0 ... 12   all-reduce   the slowest worker takes 1.8 times as long as the mean: try stealing
    steps 13 ... 25   stealing     a step takes 0.6 times as long: stay
    ...

All-reduce overlaps communication with the backward pass and may compute a worker's whole share in one pass. Work
stealing can do neither, but does not wait for the slowest worker. ``Auto`` runs a window of steps with each and keeps
the faster one. After a failed trial it waits longer before the next trial. Both strategies compute the same function,
and with ``exact`` the same bits, so a switch does not change the result.
"""

from __future__ import annotations

import logging
import time
from statistics import fmean

from paceline.data.feed import MicrobatchGroup
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.work_stealing import WorkStealing

_log = logging.getLogger("paceline")
WINDOW = 12  # Number of measured steps before each decision. An additional first step is not counted.
_UNEVEN = 1.1  # try stealing if the slowest worker's compute time is at least this multiple of the mean
_WORTH = 0.97  # keep stealing if its step time is at most this fraction of the step time of all-reduce


class Auto(Strategy):
    """Synchronous strategy that switches to all-reduce or work stealing, whichever is faster for these workers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._steals = context.order.microbatches >= 2 * context.world.size
        self._inner: AllReduce | WorkStealing = AllReduce(context)
        self._patience = 1
        self._windows = 0
        self._usual = 0.0
        self._begin_window()

    def _begin_window(self) -> None:
        self._seconds: list[float] = []
        self._uneven: list[tuple[float, float]] = []

    def groups(self, step: int) -> list[range]:
        return self._inner.groups(step)

    def encodes(self, step: int) -> list[range]:
        return self._inner.encodes(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        wanted = self._inner.groups(step)
        if [group.microbatches for group in groups] != wanted:  # prefetched for the previous strategy
            groups = self._context.feed.load(step, wanted)
        begin = time.perf_counter()
        result = self._inner.step(step, groups)
        self._seconds.append(time.perf_counter() - begin)
        self._uneven.append((max(self._inner.seconds), fmean(self._inner.seconds)))
        if len(self._seconds) > WINDOW:
            self._decide(step)
            self._begin_window()
        return result

    def close(self) -> None:
        self._inner.close()

    def _decide(self, step: int) -> None:
        """Decide at the end of a window whether to change the strategy. All workers decide alike."""
        if isinstance(self._inner, WorkStealing):
            self._end_trial(step)
            return
        self._windows += 1
        slowest, mean = (sum(column) for column in zip(*self._uneven[1:], strict=True))
        if self._windows < self._patience or slowest < _UNEVEN * mean:
            return
        reason = f"the slowest worker computes {slowest / mean:.2f} times as long as the mean"
        if not self._steals:
            if not self._context.warnings:
                least = 4 * self._context.world.size
                self._say(
                    step, "allreduce", f"{reason}; with {least} microbatches or more others could take over from it"
                )
            return
        self._usual = self._measured()
        self._change(step, WorkStealing, "stealing", f"{reason}: trying stealing")

    def _end_trial(self, step: int) -> None:
        if not self._usual:
            return
        ratio = self._measured() / self._usual
        self._usual = 0.0
        reason = f"a step with stealing takes {ratio:.2f} times as long as with all-reduce"
        if ratio <= _WORTH:
            self._say(step, "stealing", f"{reason}: it stays")
            return
        self._patience, self._windows = 4 * self._patience, 0
        self._change(step, AllReduce, "allreduce", f"{reason}: back to all-reduce")

    def _measured(self) -> float:
        """Return the mean step time of this window in seconds, as measured by rank 0."""
        measured: float = self._context.world.gather(fmean(self._seconds[1:]), "step")[0]
        return measured

    def _change(self, step: int, kind: type[AllReduce] | type[WorkStealing], name: str, reason: str) -> None:
        self._inner.close()
        said = len(self._context.warnings)
        self._inner = kind(self._context)
        del self._context.warnings[said:]  # advice for users who chose that strategy themselves
        self._say(step, name, reason)

    def _say(self, step: int, name: str, reason: str) -> None:
        text = f"from step {step + 1}: {reason}"
        self._context.warnings.append(text)
        self._context.events.mark("strategy", step=step + 1, strategy=name, text=text)
        if self._context.world.rank == 0:
            _log.info(text)
