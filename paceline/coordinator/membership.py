"""Membership protocol, which decides which workers train. No sockets, processes or clock.

The *members* are the workers of one generation in the order of their ranks. They change as follows::

    a member is lost      the others are notified at once, abort their operations, and report ready
    a spare is ready      the members are notified, finish their step, and report ready
    all are ready         the next generation: the members in their order, then spares in place of missing members

There is no vote: the coordinator alone decides. Each message carries its generation, so a worker that was stopped and
resumes late detects that training has continued without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.coordinator.member_list import MemberList
from paceline.coordinator.types import Bounds, Lost, Message, Worker, by_machine, largest_fit, saver_of
from paceline.errors import DEADLINE_PASSED, PREEMPTED, StartError, WorkerLost

Send = Callable[[Sequence[int], Message], None]

_MAX_LOSSES_WITHOUT_STEP = 10  # more losses than this have a common cause
_LAST_SAVE_SECONDS = 5.0
_FIRST_WAIT_SECONDS = 30.0  # time to wait for more workers before the first generation, once the minimum is ready


class MembershipProtocol:
    """State machine of the workers of a run and their membership.

    Args:
        send: function that sends a message to workers, given their numbers.
    """

    def __init__(self, bounds: Bounds, send: Send, record: Callable[..., None]) -> None:
        self.bounds = bounds
        self.generation = -1
        self.members: list[int] = []
        self._ranks: dict[int, int] = {}
        self._list = MemberList()
        self.workers: dict[int, Worker] = {}
        self.over: Message | None = None
        self.lost: list[Lost] = []
        self._send, self._record = send, record
        self.changing = False  # whether a change is announced and the next generation has not formed
        self._shortage_noted = False
        self.fenced = False  # whether a worker that was lost since the last generation may still run
        self._pending_starts = 0
        self._unconfirmed: set[int] = set()  # reported as ended by other workers, but not yet by their launcher
        self._since: float | None = None
        self._losses_since_step = 0
        self._session = 1
        self._furthest: tuple[int, ...] = (-1, -1)
        self._facts: Mapping[str, Any] | None = None

    def rank_of(self, number: int) -> int | None:
        return self._ranks.get(number)

    def name(self, number: int) -> str:
        """Return a name made of a worker's current or last rank, or else its number, and its process and machine."""
        rank = self.rank_of(number)
        worker = self.workers.get(number)
        if rank is None and worker is not None and worker.state == "gone":
            rank = next((lost.rank for lost in reversed(self.lost) if lost.worker == number), None)
        about = worker.about if worker is not None else {}
        where = f" (process {about['pid']} on {about['host']})" if "host" in about else ""
        return (f"rank {rank}" if rank is not None else f"worker {number}") + where

    def announce_start(self) -> None:
        """Expect a worker process that will be started."""
        self._pending_starts += 1

    def started(self, number: int) -> None:
        """Add a worker process that has been started."""
        self._pending_starts = max(0, self._pending_starts - 1)
        self.workers.setdefault(number, Worker(number))

    def register(
        self,
        number: int,
        about: dict[str, Any],  # host, process and address of the worker
        facts: Mapping[str, Any],  # facts on which all workers must agree
        session: int = 1,  # number of ``paceline.start`` calls of the worker's script
        fits: Sequence[int] = (),  # supported numbers of workers. Defaults to any number.
    ) -> None:
        """Register a worker that has built its model, or refuse it if its facts differ from those of the members."""
        worker = self.workers.setdefault(number, Worker(number))
        worker.about, worker.facts, worker.session, worker.knows = about, facts, session, -1
        if self._facts is not None and session == self._session:
            for key in [*self._facts, *facts]:
                here, there = self._facts.get(key, "nothing"), facts.get(key, "nothing")
                if here != there:
                    worker.state, worker.refused = "gone", True
                    self._send([number], {"type": "refused", "key": key, "here": there, "there": here})
                    return
        worker.fits = fits

    def ready(
        self, number: int, progress: tuple[int, ...] | None, now: float, leaving: bool = False, planned: bool = False
    ) -> None:
        """Record that a worker waits for the next generation. ``planned``: all members left at the end of a step."""
        worker = self.workers[number]
        if worker.refused:  # it reported ready before it received the refusal
            return
        if worker.state == "gone" and number not in self._ranks:
            worker.state = "starting"  # it was dropped, and has returned
        worker.progress, worker.leaving, worker.ready_since = progress, leaving, now
        worker.state = "ready"
        if self.over is not None:
            self.advance(now)
            return
        if worker.session > self._session and not self.changing:
            self.changing, self._since = True, now  # all members start the next session without a notice
        if number in self._ranks and not self.changing:
            self._announce_change(urgent=not planned, now=now, why=f"worker {number} left its generation")
        if progress is not None and progress[:2] > self._furthest:
            self._furthest, self._losses_since_step = progress[:2], 0
        self.advance(now)

    def leave(self, number: int, now: float) -> None:
        """Record that a worker was preempted and has ended in order."""
        self._unconfirmed.discard(number)
        worker = self.workers.get(number)
        if worker is not None and worker.state == "training":
            self.lose(number, f"worker {number} left", now)
        elif worker is not None:
            worker.state = "gone"
            self.advance(now)

    def lose(self, number: int, reason: str, now: float, may_run: bool = False, confirmed: bool = True) -> None:
        """Drop a worker whose process has ended or which has not responded in time.

        Args:
            reason: sentence that names the worker and what happened.
            may_run: whether the process may still run. Defaults to False.
            confirmed: whether the loss is known from more than the reports of other workers. Defaults to True.
        """
        worker = self.workers.get(number)
        if confirmed and number in self._unconfirmed:
            self._unconfirmed.discard(number)
            self.advance(now)
        if worker is None or worker.state == "gone" or worker.finished:
            return
        if not confirmed and self.bounds.patience:
            self._unconfirmed.add(number)
        rank = self.rank_of(number)
        worker.state = "gone"
        if self.over is not None or (rank is None and self.generation >= 0):
            self.advance(now)
            return
        self.lost.append(Lost(number, rank, reason, may_run))
        self.fenced = self.fenced or may_run
        self._losses_since_step += 1
        self._record("lost", worker=number, rank_lost=rank, reason=reason)
        if self._losses_since_step > max(_MAX_LOSSES_WITHOUT_STEP, 2 * self.bounds.most):
            text = f"{self._losses_since_step} workers were lost without a step in between; the last one: {reason}"
            self.end(WorkerLost.exit_code, text, now, save=True)
        elif rank is not None:
            self._announce_change(urgent=True, now=now, why=reason)
        elif not self.bounds.drops:
            self.end(WorkerLost.exit_code, reason, now)
        self.advance(now)

    def needs(self, number: int) -> bool:
        """Return whether the failure of a worker ends the run. It does not if the worker never joined or is unfit."""
        return self.generation < 0 or (self.workers[number].joined and not self.workers[number].unfit)

    def finish(self, number: int, now: float) -> None:
        """Record that a worker's process has ended with exit code 0. An unfit one is lost, not finished."""
        worker = self.workers.get(number)
        if worker is not None and worker.unfit:
            return self.lose(number, f"{self.name(number)} could not take part", now)
        self._unconfirmed.discard(number)
        if any(lost.worker == number and not lost.may_run for lost in self.lost):  # others were waiting for this worker
            self._end_early([number], now)
        if worker is None or worker.state == "gone":
            self.advance(now)
            return
        worker.finished, worker.state = True, "gone"
        members = [self.workers[member] for member in self.members]
        if self.members and all(member.state == "gone" for member in members):
            self._finish(now)
        elif self.changing and number in self._ranks:
            self.advance(now)

    def _finish(self, now: float) -> None:
        """End the run after the last member has ended and at least one script has finished.

        If the run drops lost workers, it succeeds unless rank 0 was lost, which may have had results to write.
        """
        unfinished = [number for number in self.members if not self.workers[number].finished]
        if not unfinished or (self.bounds.drops and self.members[0] not in unfinished):
            self.end(0, "training is over", now)
        else:
            self.end(WorkerLost.exit_code, self.lost[-1].reason if self.lost else "a worker is gone", now)

    def _end_early(self, workers: list[int], now: float) -> None:
        why = "ended while the other workers were still training; all workers must take the same batches"
        reason = f"the script of {', '.join(map(self.name, workers))} {why}"
        self.end(1, reason, now, save=True, kind="ended-early", workers=workers)

    def end(self, code: int, reason: str, now: float, save: bool = False, **about: Any) -> None:
        """End the run. With ``save``, the members report ready once more and the most advanced one saves a checkpoint.

        Args:
            save: whether to save a checkpoint first. Defaults to False.
            about: ``kind`` and ``workers`` of a failure that only the coordinator detects, for the report.
        """
        if self.over is not None:
            return
        self.over = {"type": "end", "code": code, "reason": reason, "save": save, "saver": None, **about}
        self._record("end", code=code, reason=reason)
        if save:
            self._announce_change(urgent=True, now=now, why=reason)
            self._since = now
        self.advance(now)

    def _send_end(self, now: float) -> None:
        """Notify the workers of the end of the run. Before a save, wait at most 5 seconds for training members."""
        assert self.over is not None
        if self.over["save"]:
            members = map(self.workers.__getitem__, self.members)
            coming = any(one.state == "training" and not one.ending for one in members)
            if coming and self._since is not None and now - self._since < _LAST_SAVE_SECONDS:
                return
            self.over["saver"] = (
                self.over["saver"] if self.over["saver"] is not None else saver_of(self.members, self.workers)
            )
        known = [one for one in self.workers.values() if one.about and not one.end_sent]
        told = [one for one in known if one.state == "ready" or not self.over["save"]]
        self._send([one.number for one in told], self.over)
        for worker in told:
            worker.end_sent = True

    def resize(self, bounds: Bounds, now: float) -> None:
        """Change the bounds, because a machine has joined or left or its slots have changed."""
        self.bounds = bounds
        self.advance(now)

    def advance(self, now: float) -> None:
        """Form the next generation if possible, or announce one if spares can join."""
        if self.over is not None:
            self._send_end(now)
        elif self.generation < 0:
            self._form_first(now)
        elif self.changing:
            self._form_next(now)
        elif not self._is_finishing and self._may_admit(len(self._spares())):
            self._announce_change(urgent=False, now=now, why="a worker joins")

    def _may_admit(self, spares: int) -> bool:
        there = len(self.members)
        return largest_fit(self._fits, min(self.bounds.wanted, there + spares)) > there

    @property
    def _is_finishing(self) -> bool:
        """Whether a member of this or an earlier generation has finished, so that the others only complete a step."""
        return any(worker.finished and worker.joined for worker in self.workers.values())

    @property
    def _fits(self) -> Sequence[int]:
        """Numbers of workers that can train together, from a member or else a spare; empty for any number."""
        known = [*(self.workers[number] for number in self.members), *self._spares()]
        return next((one.fits for one in known if one.state in ("ready", "training")), ())

    def _spares(self) -> list[Worker]:
        session = self._latest()
        return [
            one
            for one in self.workers.values()
            if one.state == "ready" and one.number not in self._ranks and one.session == session
        ]

    @property
    def is_short(self) -> bool:
        """Whether fewer workers train, are ready to, or are starting than wanted."""
        return sum(worker.state != "gone" for worker in self.workers.values()) < self.bounds.wanted

    def _latest(self) -> int:
        """Return the session that the members are in or are about to enter."""
        there = (self.workers[member] for member in self.members)
        return max((one.session for one in there if one.state == "ready"), default=self._session)

    def _announce_change(self, urgent: bool, now: float, why: str) -> None:
        self._since = self._since if self.changing else now
        self.changing = True
        gone = [member for member in self.members if self.workers[member].state == "gone"]
        message = {"type": "change", "generation": self.generation + 1, "urgent": urgent, "why": why, "lost": gone}
        self._send([one for one in self.members if self.workers[one].state in ("training", "ready")], message)

    def _form_first(self, now: float) -> None:
        alive = sorted(worker.number for worker in self.workers.values() if worker.state != "gone")
        ready = sorted(one.number for one in self._spares())
        finished = [worker.number for worker in self.workers.values() if worker.finished]
        if finished and ready:
            return self._end_early(finished, now)
        if finished and not alive and not self._pending_starts:
            return self.end(0, "no worker has called paceline.start", now)
        waits = ready or not (alive or self._pending_starts)  # the patience also runs if no worker is starting
        self._since = (now if self._since is None else self._since) if waits else None
        most = largest_fit(self._fits, self.bounds.wanted)
        there = largest_fit(self._fits, min(len(ready), most))
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
        if set(first) <= set(ready) and (len(first) == most or not self._pending_starts):
            self._publish(first[:there])
        elif self._since is not None and now - self._since > _FIRST_WAIT_SECONDS:
            self._publish(ready[:there])

    def _form_next(self, now: float) -> None:
        members = [self.workers[member] for member in self.members]
        if any(member.state == "training" for member in members):
            return
        finished = [member.number for member in members if member.finished]
        if finished and not any(member.state == "ready" for member in members):
            self._finish(now)
            return
        if finished and len(finished) == sum(member.state == "gone" for member in members):
            self._end_early(finished, now)
            return  # if a worker was lost in the last step instead, the remaining workers only complete that step
        left = [member.number for member in members if member.state == "ready" and not member.leaving]
        leaving = [member.number for member in members if member.state == "ready" and member.leaving]
        if any(member.state == "gone" and not member.finished for member in members):
            # a leaving worker may now be the only one with what it gave to the lost worker: it leaves after the next
            left, leaving = [member.number for member in members if member.state == "ready"], []
        spares = [one.number for one in self._spares() if not one.leaving]
        chosen = [*left, *spares[: max(0, self.bounds.wanted - len(left))]]
        holders = [number for number in [*left, *leaving] if self.workers[number].progress is not None]
        count = largest_fit(self._fits, len(chosen))  # with fewer spares if necessary
        kept = not holders or any(self.workers[number].progress is not None for number in chosen[:count])
        needed = 0 if leaving else len(left)  # a leaving worker has already sent its shard of the state to the others
        least = 1 if self._is_finishing and holders else self.bounds.least
        if count >= max(least, needed) and kept:
            self._publish(chosen[:count], dismissed=leaving)
        elif leaving:
            self.end(PREEMPTED, "preempted", now, save=True)
        elif not self._may_grow():
            self._end_short(len(chosen), now)
        elif self._since is not None and now - self._since > self.bounds.patience:
            self._end_short(len(chosen), now, f" within {self.bounds.patience:.0f} s")
        elif not self._shortage_noted and not self._unconfirmed:
            self._shortage_noted = True
            self._record("short", text=f"{self.bounds.shortage(len(chosen), self._fits)}; waiting for more")

    def overdue(self, now: float, seconds: float) -> list[int]:
        """Return the members that are still training after others have been ready for this number of seconds."""
        members = [self.workers[number] for number in self.members]
        since = min((one.ready_since for one in members if one.state == "ready"), default=now)
        late = self.changing and now - since >= seconds
        return [one.number for one in members if one.state == "training" and late]

    def _may_grow(self) -> bool:
        starting = any(one.state == "starting" for one in self.workers.values())
        return self.bounds.replaces or self._pending_starts > 0 or starting or bool(self._unconfirmed)

    def _end_short(self, there: int, now: float, when: str = "") -> None:
        last = self.lost[-1].reason if self.lost else "a worker is gone"
        gone = [lost for lost in self.lost if lost.worker in self._ranks]
        late_workers = [lost.worker for lost in gone if lost.may_run]
        hang = bool(late_workers) and len(late_workers) == len(gone)
        about: dict[str, Any] = {"kind": "hang", "workers": late_workers} if hang else {}
        reason = f"{last}; {self.bounds.shortage(there, self._fits)}{when}"
        self.end(DEADLINE_PASSED if hang else WorkerLost.exit_code, reason, now, save=True, **about)

    def _publish(self, chosen: list[int], dismissed: Sequence[int] = ()) -> None:
        chosen = by_machine(chosen, self.workers)
        before, self.members = self._ranks, chosen
        self._ranks = {number: rank for rank, number in enumerate(chosen)}
        self.generation += 1
        self.changing = self._shortage_noted = False
        self._since = None
        for number in chosen:
            worker = self.workers[number]
            if worker.joined and number not in before:  # a returned worker: others dropped with it may still run, too
                self.fenced = True
            worker.state, worker.joined, worker.unfit = "training", True, False
        if self._facts is None or self._session < self.workers[chosen[0]].session:
            self._facts, self._session = self.workers[chosen[0]].facts, self.workers[chosen[0]].session
            self._furthest = (-1, -1)
        joined = [number for number in chosen if number not in before]
        gone = [number for number in before if number not in self._ranks]
        message = {"type": "membership", "joined": joined, "lost": gone, "fenced": self.fenced}
        self.fenced = False
        self._record("membership", generation=self.generation, workers=chosen, joined=joined, gone=gone)
        for told, members in self._list.changes([self.workers[number] for number in chosen], self.generation):
            self._send(told, {**message, **members})
        for number in dismissed:
            self.workers[number].state = "gone"
        self._send(dismissed, {"type": "dismissed"})
