"""One clock for the records of all machines: that of the coordinator.

Each worker compares its clock with the coordinator's and records the offset and its error (event ``clock``). Between
two comparisons the offset is interpolated, so a clock may also run at another rate::

    offset           ┬ error      ─ ─   beyond the comparisons, at their common rate; the error grows
               ______●______●─────
        ●──────      ┴
    ────────────────────────────────   time of the machine's clock

The workers of a machine share its clock, so their records keep their order. An offset that is smaller than its error is
none: machines with synchronized clocks keep their times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from paceline.observe.records import Record, number

_DRIFT = 1e-4  # Largest rate at which clocks drift apart: 100 ppm. Quartz clocks stay within half of it.
_LEAST_DISTANCE = 2.5  # Least distance of comparisons in seconds. Closer ones would make a rate of their errors.

Key = tuple[str, int]  # clock of a machine: identifier of the launch of the run, and number of the machine


class Point(NamedTuple):
    """Comparison of a machine's clock with the coordinator's."""

    time: float  # of the machine's clock
    offset: float  # seconds by which the coordinator's clock is ahead
    error: float  # largest error of the offset, in seconds


class Clock:
    """Clock of a machine.

    A comparison is left out if a better one is so close to it that the clocks cannot have drifted apart by its error.

    >>> clock = Clock([Point(0.0, 5.0, 0.001), Point(100.0, 5.005, 0.001)])
    >>> clock.corrected(50.0), round(clock.drift * 1e6)
    (55.0025, 50)
    """

    def __init__(self, points: Iterable[Point]) -> None:
        kept: list[Point] = []
        for point in sorted(points, key=attrgetter("error")):
            place = bisect_left(kept, point)
            nearest = min((abs(other.time - point.time) for other in kept[max(0, place - 1) : place + 1]), default=None)
            if nearest is None or nearest >= max(_LEAST_DISTANCE, point.error / _DRIFT):
                insort(kept, point)
        self._points = [one if abs(one.offset) > one.error else _none(one) for one in kept]

    @property
    def differs(self) -> bool:
        """Whether this clock ever differs from the coordinator's."""
        return any(one.offset for one in self._points)

    @property
    def offset(self) -> float:
        return self._points[0].offset

    @property
    def drift(self) -> float:
        """Seconds that the coordinator's clock gains each second. 0 while the comparisons do not show it."""
        first, last = self._points[0], self._points[-1]
        tells = first.error + last.error < _DRIFT / 2 * (last.time - first.time)
        return (last.offset - first.offset) / (last.time - first.time) if tells else 0.0

    @property
    def worst(self) -> float:
        """Largest error of a corrected time between the first and the last comparison, in seconds."""
        return max(point.error for point in self._points)

    def corrected(self, time: float) -> float:
        """Return the coordinator's time at a time of this clock."""
        before, after = self._around(time)
        if before is after:
            return time + before.offset + self.drift * (time - before.time)
        part = (time - before.time) / (after.time - before.time)
        return time + before.offset + part * (after.offset - before.offset)

    def error(self, time: float) -> float:
        """Return the largest error of a corrected time, in seconds."""
        before, after = self._around(time)
        outside = abs(time - before.time) if before is after else 0.0
        return max(before.error, after.error) + _DRIFT * outside

    def _around(self, time: float) -> tuple[Point, Point]:
        """Return the comparisons before and after a time, twice the same one if there is none on the other side."""
        place = bisect_left(self._points, (time,))
        return self._points[max(0, place - 1)], self._points[min(place, len(self._points) - 1)]


def _none(point: Point) -> Point:
    return Point(point.time, 0.0, point.error + abs(point.offset))


def described(clock: Clock) -> str:
    """Describe a clock that differs from the coordinator's.

    >>> described(Clock([Point(0.0, -5.0, 0.00008), Point(100.0, -5.005, 0.00002)]))
    '5 s ahead at the start, gains 50 us each second; known to within 80 us'
    """
    ahead, gains = clock.offset < 0, clock.drift < 0
    return (
        f"{abs(clock.offset):.6g} s {'ahead' if ahead else 'behind'} at the start, {'gains' if gains else 'loses'} "
        f"{1e6 * abs(clock.drift):.3g} us each second; known to within {1e6 * clock.worst:.3g} us"
    )


def key_of(record: Record) -> Key | None:
    """Return the clock that was compared. Return None if the record is not a comparison."""
    if record["event"] != "clock":
        return None
    launch, machine, error = record.get("launch"), record.get("machine"), number(record.get("error"))
    valid = isinstance(launch, str) and type(machine) is int and number(record.get("offset")) is not None
    return (launch, machine) if valid and error is not None and error >= 0 else None  # type: ignore[return-value]


class Clocks:
    """Clocks of the machines of a run."""

    def __init__(self) -> None:
        self._points: dict[Key, list[Point]] = {}
        self._clocks: dict[Key, Clock] = {}

    def add(self, record: Record) -> Key | None:
        if (key := key_of(record)) is not None:
            point = Point(*(float(record[name]) for name in Point._fields))
            self._points.setdefault(key, []).append(point)
            self._clocks.pop(key, None)
        return key

    def of(self, key: Key | None) -> Clock | None:
        """Return a clock. Return None for the coordinator's own, and for a clock that was not compared."""
        if key is None or key not in self._points:
            return None
        if key not in self._clocks:
            self._clocks[key] = Clock(self._points[key])
        return self._clocks[key]

    def all(self) -> dict[Key, Clock]:
        return {key: clock for key in self._points if (clock := self.of(key)) is not None}


def on_one_clock(files: Iterable[Iterable[Record]]) -> Iterator[dict[str, Any]]:
    """Yield the records of some files, each in the order in which it was written, with the coordinator's times."""
    clocks, found = Clocks(), list[tuple[Key | None, Record]]()
    for records in files:
        key: Key | None = None
        begin = len(found)
        for record in records:
            if (known := clocks.add(record)) is not None:
                if key is None:  # records before the first comparison are of the same worker
                    found[begin:] = [(known, one) for _, one in found[begin:]]
                key = known
            found.append((key, record))
    for key, record in found:
        clock = clocks.of(key)
        yield dict(record) if clock is None else {**record, "time": clock.corrected(record["time"])}
