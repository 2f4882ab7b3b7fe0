"""Who trains: the decisions, without sockets, processes or a clock.

A *view* is the list of workers of one generation in the order of their ranks. It changes like this::

    a member is lost      the others are told at once, stop what they do, and say that they are ready
    a spare is ready      the members are told, finish their step, and say that they are ready
    all are ready         the next view: the members in their order, spares for those that are missing

Nobody is asked for a vote: the roster alone decides, and every message carries its generation, so that a worker that
was stopped and comes back late finds out that training went on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.coordinator.types import Bounds, Lost, Message, Worker
from paceline.errors import DEADLINE_PASSED, PREEMPTED, StartError, WorkerLost, name_ranks

Send = Callable[[int, Message], None]

_FRUITLESS = 10
"""So many losses without a step in between are no accident."""
_LAST_WORDS_SECONDS = 5.0
_LAST_CALL_SECONDS = 30.0
"""How long the first view waits for the rest once the minimum is there."""


class MembershipProtocol:
    """The workers of a run, and the view they train in.

    Args:
        bounds: how many workers there must and may be, and how many are wanted.
        send: called with the number of a worker and what to tell it.
        note: called with what happened, for records.
    """

    def __init__(self, bounds: Bounds, send: Send, note: Callable[..., None]) -> None:
        self.bounds = bounds
        self.generation = -1
        self.view: list[int] = []
        self.workers: dict[int, Worker] = {}
        self.over: Message | None = None
        self.lost: list[Lost] = []
        self._send = send
        self._note = note
        self._changing = False
        self._waits = False
        self._fenced = False
        self._hopes = 0
        self._unseen: set[int] = set()
        """Others say that these have ended; their launcher has not seen it yet, and may start new ones then."""
        self._since: float | None = None
        self._fruitless = 0
        self._session = 1
        self._furthest: tuple[int, ...] = (-1, -1)
        self._facts: Mapping[str, Any] | None = None

    @property
    def changing(self) -> bool:
        """Whether the members are on their way into the next view."""
        return self._changing

    def hope(self) -> None:
        """A worker process is to be started."""
        self._hopes += 1

    def expect(self, number: int) -> None:
        """A worker process was started."""
        self._hopes = max(0, self._hopes - 1)
        self.workers.setdefault(number, Worker(number))

    def greet(
        self,
        number: int,
        about: dict[str, Any],
        facts: Mapping[str, Any],
        session: int = 1,
        fits: Sequence[int] = (),
    ) -> None:
        """A worker has built its model; ``fits``: how many workers can train together, none: any number."""
        worker = self.workers.setdefault(number, Worker(number))
        worker.about, worker.facts, worker.session = about, facts, session
        if self._facts is not None and session == self._session:
            for key in [*self._facts, *facts]:
                here, there = self._facts.get(key, "nothing"), facts.get(key, "nothing")
                if here != there:
                    worker.state, worker.refused = "gone", True
                    self._send(number, {"type": "refused", "key": key, "here": there, "there": here})
                    return
        worker.fits = fits

    def ready(
        self, number: int, progress: tuple[int, ...] | None, now: float, leaving: bool = False, planned: bool = False
    ) -> None:
        """A worker waits for the next view; ``planned`` if it came at the end of a step, as all others do."""
        worker = self.workers[number]
        if worker.refused:  # it said so before it heard that
            return
        if worker.state == "gone" and number not in self.view:
            worker.state = "starting"  # it was dropped, and is back
        worker.progress, worker.leaving = progress, leaving
        worker.state = "ready"
        if self.over is not None:
            self.settle(now)
            return
        if worker.session > self._session and not self._changing:
            self._changing, self._since = True, now  # all members come of themselves
        if number in self.view and not self._changing:
            self._announce(urgent=not planned, now=now, why=f"worker {number} is out of the view")
        if progress is not None and progress[:2] > self._furthest:
            self._furthest, self._fruitless = progress[:2], 0
        self.settle(now)

    def leave(self, number: int, now: float) -> None:
        """A worker's process has ended in good order, to be resumed."""
        self._unseen.discard(number)
        worker = self.workers.get(number)
        if worker is not None and worker.state == "training":
            self.lose(Lost(number, self.view.index(number), f"worker {number} left"), now)
        elif worker is not None:
            worker.state = "gone"
            self.settle(now)

    def lose(self, lost: Lost, now: float, seen: bool = True) -> None:
        """A worker's process has ended, or it stayed silent for too long; ``seen``: not only others say so."""
        worker = self.workers.get(lost.worker)
        if seen and lost.worker in self._unseen:
            self._unseen.discard(lost.worker)
            self.settle(now)
        if worker is None or worker.state == "gone" or worker.finished:
            return
        if not seen and self.bounds.patience:
            self._unseen.add(lost.worker)
        was_member = lost.worker in self.view
        worker.state = "gone"
        if not was_member or self.over is not None:
            self.settle(now)
            return
        self.lost.append(lost)
        self._fenced = self._fenced or lost.runs
        self._fruitless += 1
        self._note("lost", worker=lost.worker, rank_lost=lost.rank, reason=lost.what)
        if self._fruitless > max(_FRUITLESS, 2 * self.bounds.most):
            self.end(
                5,
                f"{self._fruitless} workers were lost without a step in between, the last one was {lost.what}",
                now,
                True,
            )
            return
        self._announce(urgent=True, now=now, why=lost.what)
        self.settle(now)

    def needs(self, number: int) -> bool:
        """Whether the failure of a worker is that of the run; one that never joined is not missed."""
        return self.generation < 0 or self.workers[number].joined

    def finish(self, number: int, now: float) -> None:
        """A worker's script came to its end."""
        worker = self.workers.get(number)
        if worker is None or worker.state == "gone":
            self._unseen.discard(number)
            self.settle(now)
            return
        worker.finished = True
        worker.state = "gone"
        members = [self.workers[member] for member in self.view]
        if self.view and all(member.state == "gone" for member in members):
            self._close(now)
        elif self._changing and number in self.view:
            self.settle(now)

    def _close(self, now: float) -> None:
        """Nobody trains any more, and somebody's script came to its end: so did training.

        Of the others only the first may be missed: it may have had results to write.
        """
        if self.workers[self.view[0]].finished or not self.lost:
            self.end(0, "training is over", now)
        else:
            self.end(WorkerLost.exit_code, self.lost[-1].what, now)

    def end(self, code: int, reason: str, now: float, save: bool = False, **about: Any) -> None:
        """The run ends; with ``save`` the members gather once more, and the one that is furthest saves.

        Args:
            code: the exit code of the run.
            reason: in words.
            now: seconds of the clock that the caller uses.
            save: whether to save first.
            about: ``kind`` and ``workers``, where the processes themselves do not tell
            (``failure.coordinator_report``).
        """
        if self.over is not None:
            return
        self.over = {"type": "end", "code": code, "reason": reason, "save": save, "saver": None, **about}
        self._note("end", code=code, reason=reason)
        if save:
            self._announce(urgent=True, now=now, why=reason)
            self._since = now
        self.settle(now)

    def _part(self, now: float) -> None:
        """Tell those that are there that the run is over, once all who can come are there."""
        assert self.over is not None
        if self.over["save"]:
            coming = any(self.workers[member].state == "training" for member in self.view)
            if coming and self._since is not None and now - self._since < _LAST_WORDS_SECONDS:
                return
            self.over["saver"] = self.over["saver"] if self.over["saver"] is not None else self._saver()
        for worker in self.workers.values():
            if worker.about and not worker.told and (worker.state == "ready" or not self.over["save"]):
                worker.told = True
                self._send(worker.number, self.over)

    def _saver(self) -> int | None:
        """Who writes the last checkpoint: the first of those that are furthest."""
        ranks = {number: rank for rank, number in enumerate(self.view)}
        holders = [one for one in self.workers.values() if one.state == "ready" and one.progress is not None]
        holders.sort(key=lambda one: ranks.get(one.number, len(ranks)))
        if not holders:
            return None
        most = max(one.progress for one in holders if one.progress is not None)
        return next(one.number for one in holders if one.progress == most)

    def want(self, bounds: Bounds, now: float) -> None:
        """Another number of workers is wanted: a machine came or went."""
        self.bounds = bounds
        self.settle(now)

    def settle(self, now: float) -> None:
        """Form the next view if it can be; else ask for it if it is due."""
        if self.over is not None:
            self._part(now)
        elif self.generation < 0:
            self._form_first(now)
        elif self._changing:
            self._form_next(now)
        elif self._fitting(min(self.bounds.wanted, len(self.view) + len(self._spares()))) > len(self.view):
            self._announce(urgent=False, now=now, why="a worker joins")

    def _fitting(self, count: int) -> int:
        """The most workers among so many that can train together; 0 if none can."""
        return max((fit for fit in self._fits if fit <= count), default=0) if self._fits else count

    @property
    def _fits(self) -> Sequence[int]:
        """How many can train together, as those say who train, or the first to be ready; empty: any number."""
        told = [*(self.workers[number] for number in self.view), *self._spares()]
        return next((one.fits for one in told if one.state in ("ready", "training")), ())

    def _spares(self) -> list[Worker]:
        session = self._latest()
        return [
            one
            for one in self.workers.values()
            if one.state == "ready" and one.number not in self.view and one.session == session
        ]

    def _latest(self) -> int:
        """The session that the members are in, or come to."""
        there = (self.workers[member] for member in self.view)
        return max((one.session for one in there if one.state == "ready"), default=self._session)

    def _announce(self, urgent: bool, now: float, why: str) -> None:
        if not self._changing:
            self._since = now
        self._changing = True
        gone = [member for member in self.view if self.workers[member].state == "gone"]
        message = {"type": "change", "generation": self.generation + 1, "urgent": urgent, "why": why, "lost": gone}
        for member in self.view:
            if self.workers[member].state in ("training", "ready"):
                self._send(member, message)

    def _form_first(self, now: float) -> None:
        alive = sorted(worker.number for worker in self.workers.values() if worker.state != "gone")
        ready = sorted(one.number for one in self._spares())
        if ready:
            self._since = self._since if self._since is not None else now
        most = self._fitting(self.bounds.wanted)
        there = self._fitting(min(len(ready), most))
        if there < self.bounds.least:
            if self.bounds.replaces and self._since is not None and now - self._since > self.bounds.patience:
                self.end(
                    StartError.exit_code,
                    f"{len(ready)} of at least {self.bounds.least} workers came within {self.bounds.patience:.0f} s; "
                    f"start paceline run with the same --rendezvous on the other machines, or lower --nodes",
                    now,
                    kind="not-started",
                )
            return
        first = alive[:most]
        if set(first) <= set(ready) and (len(first) == most or not self._hopes):
            self._publish(first[:there])
        elif self._since is not None and now - self._since > _LAST_CALL_SECONDS:
            self._publish(ready[:there])

    def _form_next(self, now: float) -> None:
        members = [self.workers[member] for member in self.view]
        if any(member.state == "training" for member in members):
            return
        finished = [self.view.index(member.number) for member in members if member.finished]
        if finished and not any(member.state == "ready" for member in members):
            self._close(now)
            return
        if finished:
            self.end(
                1,
                f"the script of {name_ranks(finished)} ended while the other workers were still training; all "
                f"workers must take the same batches",
                now,
                save=True,
                kind="ended-early",
                workers=[member.number for member in members if member.finished],
            )
            return
        left = [member.number for member in members if member.state == "ready" and not member.leaving]
        leaving = [member.number for member in members if member.state == "ready" and member.leaving]
        spares = [one.number for one in self._spares() if not one.leaving]
        chosen = [*left, *spares[: max(0, self.bounds.wanted - len(left))]]
        holders = [number for number in [*left, *leaving] if self.workers[number].progress is not None]
        count = self._fitting(len(chosen))  # fewer spares if need be
        kept = not holders or any(self.workers[number].progress is not None for number in chosen[:count])
        needed = 0 if leaving else len(left)  # who leaves has given the others its part of the state before
        if count >= max(self.bounds.least, needed) and kept:
            self._publish(chosen[:count], dismissed=leaving)
        elif leaving:
            self.end(PREEMPTED, "preempted", now, save=True)
        elif not self._hope():
            self._end_short(len(chosen), now)
        elif self._since is not None and now - self._since > self.bounds.patience:
            self._end_short(len(chosen), now, f" within {self.bounds.patience:.0f} s")
        elif not self._waits and not self._unseen:
            self._waits = True
            self._note("short", text=f"{self._short(len(chosen))}; waiting for more")

    def overdue(self, now: float, seconds: float) -> list[int]:
        """The members for whom others have waited so long in order to gather, whatever they do."""
        states = {number: self.workers[number].state for number in self.view}
        if not self._changing or self._since is None or now - self._since < seconds or "ready" not in states.values():
            return []
        return [number for number, state in states.items() if state == "training"]

    def _hope(self) -> bool:
        """Whether somebody is on the way, or may be started."""
        starting = any(one.state == "starting" for one in self.workers.values())
        return self.bounds.replaces or self._hopes > 0 or starting or bool(self._unseen)

    def _end_short(self, there: int, now: float, when: str = "") -> None:
        last = self.lost[-1].what if self.lost else "a worker is gone"
        gone = [lost for lost in self.lost if lost.worker in self.view]
        late = [lost.worker for lost in gone if lost.runs]
        hang = bool(late) and len(late) == len(gone)
        about: dict[str, Any] = {"kind": "hang", "workers": late} if hang else {}
        reason = f"{last}; {self._short(there)}{when}"
        self.end(DEADLINE_PASSED if hang else WorkerLost.exit_code, reason, now, save=True, **about)

    def _short(self, there: int) -> str:
        """Why so many workers do not go on, in words."""
        if there >= self.bounds.least and self._fits and there not in self._fits:
            counts = [str(count) for count in self._fits if self.bounds.least <= count <= self.bounds.most]
            return f"these settings are for {' or '.join(counts)} workers, and {there} are left"
        return f"{there} of at least {self.bounds.least} workers are left"

    def _publish(self, chosen: list[int], dismissed: list[int] | None = None) -> None:
        before = self.view
        self.generation += 1
        self.view = chosen
        self._changing = self._waits = False
        self._since = None
        members = []
        for number in chosen:
            worker = self.workers[number]
            if worker.joined and number not in before:  # it was dropped: who was with it may still run, too
                self._fenced = True
            worker.state, worker.joined = "training", True
            members.append({"worker": number, **worker.about, "progress": worker.progress})
        if self._facts is None or self._session < self.workers[chosen[0]].session:
            self._facts, self._session = self.workers[chosen[0]].facts, self.workers[chosen[0]].session
            self._furthest = (-1, -1)
        joined = [number for number in chosen if number not in before]
        gone = [number for number in before if number not in chosen]
        view = {"type": "view", "generation": self.generation, "members": members, "joined": joined, "lost": gone}
        view["fenced"], self._fenced = self._fenced, False
        self._note("view", generation=self.generation, workers=chosen, joined=joined, gone=gone)
        for number in chosen:
            self._send(number, view)
        for number in dismissed or []:
            self.workers[number].state = "gone"
            self._send(number, {"type": "dismissed"})
