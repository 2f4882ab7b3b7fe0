"""Random processes by which rented machines are lost: at a constant rate, or as in a recorded trace."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from paceline.errors import ConfigError
from paceline.system.regular_files import read_text

_COLUMNS = ["time", "machine", "event"]
_START, _INTERRUPTION, _OBSERVED = "start", "interruption", "observed"
_FORMS = "in seconds", "a date"
_SILENCES, _SILENT = 20, 5
"""A trace's longest silence is a gap if the trace has at least 20 and it is 5 times as long as the second longest."""


class Interruption(NamedTuple):
    """Loss of some machines at the same time."""

    time: float
    slots: Sequence[int]  # numbers of the machines
    delay: float  # seconds until the provider has others


class Interruptions(Protocol):
    """Random process by which machines are lost."""

    def history(self, random: Random, slots: int) -> Iterator[Interruption]:
        """Yield the interruptions of ``slots`` machines, without end, in the order of their times."""
        ...


@dataclass(frozen=True)
class Exponential:
    """Interruptions of each machine at a constant rate, independent of each other."""

    per_hour: float  # interruptions per hour of a machine

    def history(self, random: Random, slots: int) -> Iterator[Interruption]:
        """Yield the interruptions of ``slots`` machines."""
        time, rate = 0.0, slots * self.per_hour / 3600
        while rate:
            time += random.expovariate(rate)
            yield Interruption(time, (int(random.random() * slots),), 0.0)
        yield Interruption(math.inf, (), 0.0)


@dataclass(frozen=True)
class Trace:
    """Recorded interruptions, replayed cyclically from a random time.

    When the recording loses a part of its machines, each machine of a run is lost with this probability. So bursts and
    quiet hours remain, for any number of machines.
    """

    # time since the beginning of the recording, and the part of the machines that is lost
    losses: tuple[tuple[float, float], ...]
    seconds: float  # length of the recording
    # seconds from each interruption until the next machine started, the longest waiting first
    delays: tuple[float, ...]

    def history(self, random: Random, slots: int) -> Iterator[Interruption]:
        """Yield the interruptions of ``slots`` machines."""
        begin = random.random() * self.seconds
        place, turn = bisect_right(self.losses, (begin, math.inf)), 0
        while self.losses:
            if place == len(self.losses):
                place, turn = 0, turn + 1
            time, part = self.losses[place]
            lost = [slot for slot in range(slots) if random.random() < part]
            if lost:
                delay = random.choice(self.delays) if self.delays else 0.0
                yield Interruption(time - begin + turn * self.seconds, lost, delay)
            place += 1
        yield Interruption(math.inf, (), 0.0)


class _Row(NamedTuple):
    line: int
    time: float
    machine: str
    event: str


def read_trace(path: Path) -> Trace:
    """Read a trace: CSV with the columns time, machine, event.

    Times are seconds, or dates of ISO 8601, in ascending order. Events are ``start``, ``interruption``, and
    ``observed``, a row without a machine, which says that the recording continued. A machine whose first row is an
    interruption was up when the recording began, at its first row.

    Raises:
        ConfigError: the trace cannot be read, or has unknown columns, unordered times or gaps.
    """
    try:
        rows = list(_rows(path))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"The trace {path} is not CSV: {error}.") from None
    if len(rows) < 2 or rows[-1].time == rows[0].time:
        raise ConfigError(f"The trace {path} has {len(rows)} events at one time: it must cover a span of time.")
    _check_silences(path, rows)
    return _trace(path, rows)


def _rows(path: Path) -> Iterator[_Row]:
    lines = read_text(path).removeprefix("\ufeff").splitlines()
    if not lines:
        raise ConfigError(f"The trace {path} is empty: its first line must be {','.join(_COLUMNS)}.")
    reader = csv.reader(lines, strict=True)
    header = [name.strip() for name in next(reader)]
    if header != _COLUMNS:
        raise ConfigError(f"The trace {path} has the columns {', '.join(header)}: they must be {', '.join(_COLUMNS)}.")
    before, dated = -math.inf, None
    for cells in filter(None, reader):
        where = f"The trace {path}, line {reader.line_num}"
        if len(cells) != len(_COLUMNS):
            raise ConfigError(f"{where}, has {len(cells)} values: it must have {', '.join(_COLUMNS)}.")
        text, machine, event = (cell.strip() for cell in cells)
        if event not in (_START, _INTERRUPTION, _OBSERVED):
            raise ConfigError(f"{where}: event {event!r} is unknown: write {_START}, {_INTERRUPTION} or {_OBSERVED}.")
        if not machine and event != _OBSERVED:
            raise ConfigError(f"{where}: the {event} has no machine: write its name.")
        time, is_date = _seconds(text, where)
        if dated not in (None, is_date):
            raise ConfigError(f"{where}: time {text} is {_FORMS[is_date]}, and those above are {_FORMS[not is_date]}.")
        dated = is_date
        if time < before:
            raise ConfigError(f"{where}: time {text} is before that of the row above: sort the rows by time.")
        before = time
        yield _Row(reader.line_num, time, machine, event)


def _seconds(text: str, where: str) -> tuple[float, bool]:
    """Return a time in seconds, and whether it is a date."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(f"{where}: time {text!r} is neither seconds nor a date of ISO 8601.") from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp(), True
    if not math.isfinite(seconds):
        raise ConfigError(f"{where}: time {text} is not finite.")
    return seconds, False


def _check_silences(path: Path, rows: Sequence[_Row]) -> None:
    silences = sorted((later.time - sooner.time, sooner, later) for sooner, later in pairwise(rows))
    silences = [one for one in silences if one[0] > 0]
    if len(silences) >= _SILENCES and silences[-1][0] > _SILENT * silences[-2][0]:
        longest, sooner, later = silences[-1]
        raise ConfigError(
            f"The trace {path} has a gap: no event for {longest:,.0f} s between lines {sooner.line} and {later.line}, "
            f"and elsewhere for {silences[-2][0]:,.0f} s at most. Use a part of it without the gap, or, if nothing "
            f"happened then, add rows with the event {_OBSERVED} and no machine."
        )


def _trace(path: Path, rows: Sequence[_Row]) -> Trace:
    """Build a trace, and check that each machine starts and is interrupted alternately."""
    first: dict[str, _Row] = {}
    for row in rows:
        if row.event != _OBSERVED:
            first.setdefault(row.machine, row)
    state = {name: row._replace(event=_START) for name, row in first.items() if row.event == _INTERRUPTION}
    up, begin = len(state), rows[0].time
    losses, delays, missing = [], [], list[float]()
    for time, together in groupby(rows, key=lambda row: row.time):
        before, lost = up, 0
        for row in together:
            if row.event == _OBSERVED:
                continue
            known = state.get(row.machine)
            if known is not None and known.event == row.event:
                raise ConfigError(
                    f"The trace {path} has a gap: machine {row.machine!r} has the event {row.event!r} in lines "
                    f"{known.line} and {row.line}, and no other event between them. Add the missing row."
                )
            state[row.machine] = row
            if row.event == _INTERRUPTION:
                up, lost = up - 1, lost + 1
                missing.append(time)
                continue
            up += 1
            if missing:
                delays.append(time - missing.pop(0))
        if lost:
            losses.append((time - begin, min(1.0, lost / max(before, lost))))
    return Trace(tuple(losses), rows[-1].time - begin, tuple(delays))
