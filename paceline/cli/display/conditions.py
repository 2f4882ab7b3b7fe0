"""Conditions of ``paceline run --alert``: the records of a run, and the times without records, that cause an alert."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from paceline.config import quoted
from paceline.errors import ConfigError

TICK, ENDED = "tick", "ended"  # events that are not records: time has passed, and the run has ended with ``code``
_WINDOW, _LEAST = 50, 10  # maximum and minimum number of steps in a median
_QUIET = 10  # consecutive steps below its limit that end a condition on steps, because durations may alternate
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LIMIT = re.compile(r"(stalled|step|steps|loss|checkpoint) > (\d{1,9}(?:\.\d{1,9})?)\s?(ms|s|m|h|x|)")
FORMS = (
    "stalled > 60s", "step > 2s", "step > 3x", "steps > 2s", "loss is nan", "loss > 10", "checkpoint > 30m",
    "checkpoint failed", "worker lost", "run failed", "run ended",
)  # fmt: skip


@dataclass
class RunState:
    """State of a run as its records show it, for the tests of conditions."""

    begin: float  # start of the run. All times in this class are on the launcher's clock.
    now: float = 0.0
    step: int | None = None
    stepped: float | None = None  # time of the last step
    saved: float | None = None  # time of the last checkpoint
    steps: int | None = None  # number of steps after which the loop over batches ends
    usual: float | None = None  # median duration of the steps before the last one
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def take(self, record: Mapping[str, Any], now: float) -> None:
        """Update the state from a record that was read at time ``now``."""
        self.now = now
        event, steps = record.get("event"), record.get("steps")
        if event == "batches":
            self.steps = steps if isinstance(steps, int) else None
        elif event == "checkpoint":
            self.saved = now
        elif event == "step" and isinstance(record.get("step"), int):
            self.step, self.stepped = record["step"], now
            self.usual = median(self._durations) if len(self._durations) >= _LEAST else None
            self._durations.append(_number(record.get("seconds")) or 0.0)

    @property
    def trains(self) -> bool:
        """Whether the run has steps left: it has not reached the end of its loop over batches."""
        return self.steps is None or self.step is None or self.step + 1 < self.steps


@dataclass(frozen=True)
class Condition:
    """Condition that causes an alert when it becomes true, and again after it has passed."""

    text: str
    events: tuple[str, ...]  # events after which it is tested
    test: Callable[[RunState, Mapping[str, Any], float], str]  # returns a sentence, empty if the condition is not met
    quiet: int  # consecutive failed tests after which the condition has passed. If 0, each record causes an alert.
    limit: float  # number in the condition


@dataclass(frozen=True)
class Alert:
    """Alert about a run."""

    condition: str  # as the user wrote it
    text: str
    step: int | None  # last step of the run
    time: float
    code: int | None = None  # exit code, if the run has ended


class Conditions:
    """Conditions of a run, which turn its records into alerts."""

    def __init__(self, conditions: Iterable[Condition], begin: float) -> None:
        self._quiet = {one: one.quiet for one in conditions}  # consecutive failed tests of each condition
        self._seen = RunState(begin)

    def take(self, record: Mapping[str, Any], now: float) -> list[Alert]:
        """Return the alerts caused by a record that was read at time ``now``."""
        seen, event = self._seen, str(record.get("event"))
        seen.take(record, now)
        alerts = []
        for one, quiet in self._quiet.items():
            if event not in one.events:
                continue
            if not (text := one.test(seen, record, one.limit)):
                self._quiet[one] = min(quiet + 1, one.quiet)
                continue
            if quiet == one.quiet:
                alerts.append(Alert(one.text, text, seen.step, now, record.get("code") if event == ENDED else None))
            self._quiet[one] = 0
        return alerts


def parse(text: str) -> Condition:
    """Parse a condition such as ``stalled > 60s``. Raises ConfigError if it is none of ``FORMS``.

    >>> parse("step>1.5 s").text
    'step > 1.5s'
    """
    words = re.sub(r"\s*>\s*", " > ", " ".join(text.lower().split()))
    subject, number, unit = found.groups() if (found := _LIMIT.fullmatch(words)) else (words, "1", "")
    known = _KNOWN.get((subject, "time" if unit in _UNITS else unit))
    if known is None or not float(number):
        raise ConfigError(
            f"--alert {quoted(text)} is not a condition. Write one of these, with your own number: "
            f"{', '.join(map(repr, FORMS))}. A time has the unit ms, s, m or h; x means times the median."
        )
    return Condition(f"{subject} > {number}{unit}" if found else words, *known, float(number) * _UNITS.get(unit, 1.0))


def _stalled(seen: RunState, record: Mapping[str, Any], limit: float) -> str:
    waited = seen.now - (seen.begin if seen.stepped is None else seen.stepped)
    last = "the run has made none" if seen.step is None else f"the last was step {seen.step}"
    return f"no step has ended for {waited:.0f} s; {last}" if seen.trains and waited > limit else ""


def _slow(seen: RunState, record: Mapping[str, Any], limit: float) -> str:
    seconds = _number(record.get("seconds")) or 0.0
    return f"step {seen.step} took {seconds:.3g} s" if seconds > limit else ""


def _slower(seen: RunState, record: Mapping[str, Any], factor: float) -> str:
    seconds = _number(record.get("seconds")) or 0.0
    if seen.usual is None or not seconds > factor * seen.usual:
        return ""
    return f"step {seen.step} took {seconds:.3g} s, and the median of those before is {seen.usual:.3g} s"


def _slow_median(seen: RunState, record: Mapping[str, Any], limit: float) -> str:
    if seen.usual is None or seen.usual <= limit:
        return ""
    return f"the median of the steps before step {seen.step} is {seen.usual:.3g} s"


def _loss_above(seen: RunState, record: Mapping[str, Any], limit: float) -> str:
    loss = _number(record.get("loss"))
    return f"the loss of step {seen.step} is {loss:.4g}" if loss is not None and loss > limit else ""


def _loss_is_nan(seen: RunState, record: Mapping[str, Any], _: float) -> str:
    loss = _number(record.get("loss"))
    return "" if loss is None or math.isfinite(loss) else f"the loss of step {seen.step} is {loss}"


def _unsaved(seen: RunState, record: Mapping[str, Any], limit: float) -> str:
    age = seen.now - (seen.begin if seen.saved is None else seen.saved)
    return f"no checkpoint has been written for {age:.0f} s" if seen.trains and age > limit else ""


def _checkpoint_failed(seen: RunState, record: Mapping[str, Any], _: float) -> str:
    if record.get("event") == "checkpoint":
        return ""
    return f"the checkpoint of step {record.get('step')} could not be written: {record.get('reason')}"


def _lost(seen: RunState, record: Mapping[str, Any], _: float) -> str:
    return f"worker {record.get('worker')} is lost: {record.get('reason')}"


def _ended(seen: RunState, record: Mapping[str, Any], _: float) -> str:
    return f"the run has ended with exit code {record.get('code')}"


_KNOWN: dict[tuple[str, str], tuple[tuple[str, ...], Callable[[RunState, Mapping[str, Any], float], str], int]] = {
    ("stalled", "time"): ((TICK, "step"), _stalled, 1),
    ("step", "time"): (("step",), _slow, _QUIET),
    ("step", "x"): (("step",), _slower, _QUIET),
    ("steps", "time"): (("step",), _slow_median, _QUIET),
    ("loss", ""): (("step",), _loss_above, _QUIET),
    ("loss is nan", ""): (("step",), _loss_is_nan, _QUIET),
    ("checkpoint", "time"): ((TICK, "checkpoint"), _unsaved, 1),
    ("checkpoint failed", ""): (("checkpoint-failed", "checkpoint"), _checkpoint_failed, 1),
    ("worker lost", ""): (("lost",), _lost, 0),
    ("run failed", ""): ((ENDED,), lambda seen, record, _: _ended(seen, record, _) if record.get("code") else "", 0),
    ("run ended", ""): ((ENDED,), _ended, 0),
}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
