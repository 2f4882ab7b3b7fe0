"""What a person should know while a run goes on, kept until somebody asks; and what is remembered of it for the end.

::

    still waiting: ranks 0, 2 have waited 12 s in the all-reduce of bucket 2 at step 41; rank 1 is in the data loader
    still waiting: rank 1 (process 4242) has not reached paceline.start for 30 s; rank 0 has
    lost: rank 1 (process 4242 on a) was ended by signal 9 (SIGKILL)
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.coordinator.hang_detection import Place, sentence
from paceline.coordinator.membership import MembershipProtocol
from paceline.errors import name_ranks
from paceline.failure.coordinator_report import CoordinatorReport, LastSeen, LostWorker
from paceline.launch.base import WorkerExit
from paceline.launch.kernel import STOPPED, state_of

_START_SECONDS = 30.0
_SILENT_SECONDS = 3.0
"""What a worker said longer ago than that says nothing of where it is now."""
_SHOWN = 8
"""Workers named in one line, at most."""


@dataclass(frozen=True)
class Alert:
    """One thing that happened: ``late``, ``absent``, ``lost``, ``short``, ``joined``; the workers that it is about."""

    kind: str
    text: str
    workers: tuple[int, ...] = ()
    time: float = field(default_factory=time.monotonic)


class Watch:
    """Remembers for one roster.

    Attributes:
        alerts: what nobody has been told yet; the launcher takes it from the left.
        late: the workers for which others wait too long now.
        spoken: the roll call in words; empty when nobody is late.
        hang_seconds: the deadline that the script set, if any.
        timeout_seconds: after which a worker gives up waiting.
        reports: how workers of other machines failed, as they wrote it down.
        exits: how the processes of workers of other machines ended.
        seen: how the processes of lost workers of this machine ended, in words: the others may notice before that.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self.alerts: deque[Alert] = deque(maxlen=1000)
        self.late: tuple[int, ...] = ()
        self.spoken = ""
        self.hang_seconds: float | None = None
        self.timeout_seconds: float | None = None
        self.reports: dict[int, Mapping[str, Any]] = {}
        self.exits: list[WorkerExit] = []
        self.seen: dict[int, str] = {}
        self._note = note
        self._scenes: dict[int, LastSeen] = {}
        self._losses: list[LostWorker] = []
        self._joined = 0
        self._pids: dict[int, int] = {}
        self._there: float | None = None
        self._again = 0.0

    def started(self, number: int, pid: int) -> None:
        """A process was started on this machine."""
        self._pids[number] = pid

    def pid_of(self, number: int) -> int:
        """The process of a worker of this machine; 0 if it is elsewhere."""
        return self._pids.get(number, 0)

    def note(self, event: str, members: MembershipProtocol, places: Sequence[Place], **fields: Any) -> None:
        """Pass on a record of the membership, and keep what matters of it."""
        self._note(event, **fields)
        if event == "lost":
            number = fields["worker"]
            self._losses.append(
                LostWorker(number, fields["rank_lost"], fields["reason"], number in self.late, time.time())
            )
            if fields["rank_lost"] is not None:
                self._scenes.setdefault(number, scene(places, fields["rank_lost"]))
            self.alerts.append(Alert("lost", fields["reason"], (number,)))
        elif event == "short":
            self.alerts.append(Alert("short", fields["text"]))
        elif event == "view" and fields["generation"] > 0 and fields["joined"]:
            joined = fields["joined"]
            self._joined += len(joined)
            names = ", ".join(map(str, joined))
            text = f"worker{'s' if len(joined) > 1 else ''} {names} joined: {len(fields['workers'])} workers train"
            self.alerts.append(Alert("joined", text, tuple(joined)))

    def call(self, places: Sequence[Place], view: Sequence[int], missing: Sequence[Place], limit: float) -> None:
        """Some are late: say so at once, and again whenever the deadline has passed again."""
        numbers, now = tuple(view[place.rank] for place in missing), time.monotonic()
        self.spoken = sentence(places)
        stopped = [number for number in numbers if state_of(self._pids.get(number, 0)) == STOPPED]
        if stopped:
            names = ", ".join(f"{self._pids[number]} of rank {view.index(number)}" for number in stopped)
            self.spoken += f"; stopped by a signal: process {names}"
        for place in missing:
            self._scenes[view[place.rank]] = scene(places, place.rank)
        if numbers != self.late or now >= self._again:
            self._note("roll-call", text=self.spoken, late=[place.rank for place in missing])
            self.alerts.append(Alert("late", f"still waiting: {self.spoken}", numbers))
            self.late, self._again = numbers, now + limit

    def all_there(self) -> None:
        """Nobody is late any more."""
        self.late, self.spoken = (), ""

    def absent(self, members: MembershipProtocol, now: float) -> tuple[tuple[int, ...], str] | None:
        """Before the first view: who has not reached ``paceline.start`` while others wait there.

        Returns:
            their numbers and a sentence, once ``timeout_seconds`` have passed; before that only an alert is kept.
        """
        there = [one.number for one in members.workers.values() if one.state == "ready"]
        missing = tuple(one.number for one in members.workers.values() if one.state == "starting" and not one.about)
        if not there or not missing:
            return None
        if self._there is None:
            limit = self.hang_seconds or _START_SECONDS
            self._there, self._again = now, now + limit
        waited = now - self._there
        several = len(missing) > 1
        text = f"{self._names(missing)} {'have' if several else 'has'} not reached paceline.start for {waited:.0f} s"
        text += f"; {name_ranks(there)} {'has' if len(there) == 1 else 'have'}"
        if now >= self._again:
            self._again = now + (self.hang_seconds or _START_SECONDS)
            self._note("absent", text=text, workers=list(missing))
            self.alerts.append(Alert("absent", f"still waiting: {text}", missing))
        if self.timeout_seconds is None or waited < self.timeout_seconds:
            return None
        for number in missing:
            self._scenes[number] = LastSeen(None, "", "", tuple(there), waited)
        return missing, text

    def _names(self, numbers: Sequence[int]) -> str:
        names = [f"rank {one}" + (f" (process {self._pids[one]})" if one in self._pids else "") for one in numbers]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def account(self, members: MembershipProtocol, places: Sequence[Place], elastic: bool) -> CoordinatorReport:
        """What is known when the run has ended."""
        over = members.over or {}
        done = [place.step for place in places]
        done += [one.progress[0] for one in members.workers.values() if one.progress is not None]
        processes = {number: (pid, platform.node()) for number, pid in self._pids.items()}
        processes |= {
            one.number: (one.about["pid"], one.about["host"]) for one in members.workers.values() if one.about
        }
        return CoordinatorReport(
            code=over.get("code"),
            reason=over.get("reason", ""),
            kind=over.get("kind", ""),
            blamed=tuple(over.get("workers", ())),
            elastic=elastic,
            step=max(done, default=0),
            ranks={number: rank for rank, number in enumerate(members.view)},
            processes=processes,
            lost=tuple(self._losses),
            joined=self._joined,
            leaving=tuple(one.number for one in members.workers.values() if one.leaving),
            last_seen=dict(self._scenes),
            reports=dict(self.reports),
            exits=tuple(self.exits),
        )


def scene(places: Sequence[Place], rank: int) -> LastSeen:
    """Where one worker was, and who waited."""
    own = next((place for place in places if place.rank == rank), None)
    waiting = [place for place in places if place.waits and place.rank != rank]
    seconds = max((place.since + place.silent for place in waiting), default=0.0)
    where = waiting[0].doing if waiting else ""
    ranks = tuple(sorted(place.rank for place in waiting))
    if own is None:
        return LastSeen(None, "", "", ranks, seconds, where)
    if own.silent > _SILENT_SECONDS:
        return LastSeen(max(place.step for place in places), "", "", ranks, seconds, where)
    return LastSeen(own.step, own.doing, own.line, ranks, seconds, where)
