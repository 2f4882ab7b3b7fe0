"""The roster: the one place that knows who trains. A thread of the first agent, so that no worker's end takes it along.

Workers and the agents of other machines keep a connection to it and send messages, one JSON object a line. That a
connection ends says nothing by itself on the roster's own machine, where the agent sees the process end; of another
machine's worker it is the evidence.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.coordinator.hang_detection import Place, deadline, late, places_of
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.messages import Peer, keep_alive, write
from paceline.coordinator.types import Bounds, Lost, Message
from paceline.coordinator.watch import Watch
from paceline.errors import DEADLINE_PASSED, PREEMPTED, StartError, WorkerLost
from paceline.failure.coordinator_report import CoordinatorReport
from paceline.launch.base import WorkerExit
from paceline.launch.kernel import is_ending

_TICK_SECONDS = 0.5
_SEND_SECONDS = 0.5
_GUESTS_SECONDS = 60.0
_FIRST_STEP_SECONDS = 600.0
BLOCK = 1000
"""Numbers of workers that each agent has for itself."""


class Coordinator:
    """Hears what workers and agents say, and lets :class:`MembershipProtocol` decide.

    Args:
        listener: see :func:`paceline.coordinator.messages.listen`.
        bounds: how many workers there must and may be.
        note: called with what happened, for records.
        describe: what an agent of another machine is told of the run.
        own: workers of this machine.
    """

    def __init__(
        self,
        listener: socket.socket,
        bounds: Bounds,
        note: Callable[..., None],
        describe: Message | None = None,
        own: int = 0,
    ) -> None:
        self._lock = threading.RLock()
        self._note = note
        self._describe = describe
        self._links: dict[int, socket.socket] = {}
        self._agents: dict[int, Peer] = {}
        self._heard: dict[int, tuple[float, Place]] = {}
        self._viewed = time.monotonic()
        self.watch = Watch(note)
        self.members = MembershipProtocol(bounds, self._send, self._note_change)
        self._listener = listener
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._own = own
        self._agents_seen = 0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="paceline-roster", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._thread.join(2 * _TICK_SECONDS + 1)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def expect(self, number: int, pid: int) -> None:
        """A worker was started on this machine."""
        with self._lock:
            self.watch.started(number, pid)
            self.members.expect(number)

    def expect_soon(self) -> None:
        """A worker is to be started."""
        with self._lock:
            self.members.hope()

    def lose(self, number: int, what: str) -> None:
        """A worker's process ended before its script did."""
        with self._lock:
            self.watch.seen[number] = what
            self.members.lose(Lost(number, self.rank_of(number), what), time.monotonic())

    def leave(self, number: int) -> None:
        """A worker's process ended in good order, to be resumed."""
        with self._lock:
            self.members.leave(number, time.monotonic())

    def finish(self, number: int) -> None:
        """A worker's script came to its end."""
        with self._lock:
            self.members.finish(number, time.monotonic())

    def fail(self, number: int, report: Message) -> bool:
        """A worker's script has failed, as the worker itself wrote down; whether that ends the run."""
        with self._lock:
            reason = f"{self._name(number)} failed: {report['type']}: {report['message']}"
            if not self.members.needs(number):
                self._note("not-joined", worker=number, reason=reason)
                self.members.lose(Lost(number, None, reason), time.monotonic())
                return False
            self.watch.reports[number] = report
            self.members.end(report.get("exit_code", 1), reason, time.monotonic(), save=True)
            return True

    def rank_of(self, number: int) -> int | None:
        """The rank of a worker in the present view."""
        view = self.members.view
        return view.index(number) if number in view else None

    def account(self, elastic: bool) -> CoordinatorReport:
        """How this saw the run end."""
        with self._lock:
            return self.watch.account(self.members, self._places(time.monotonic()), elastic)

    @property
    def view(self) -> list[int]:
        """The workers in the order of their ranks."""
        return list(self.members.view)

    def preempt(self) -> None:
        """This machine is to be taken away, and the roster with it: if others take part, the run stops for all."""
        with self._lock:
            if self._agents:
                self.members.end(PREEMPTED, "preempted", time.monotonic(), save=True)

    @property
    def waits(self) -> bool:
        """Whether the members wait for more workers to come."""
        return self.members.changing or self.members.generation < 0

    @property
    def over(self) -> Message | None:
        """How the run ended, if it has."""
        return self.members.over

    def _serve(self) -> None:
        try:
            self._hear_all()
        finally:
            if not self._closed:  # a mistake of ours must not let everybody wait for ever
                for key in list(self._selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]

    def _hear_all(self) -> None:
        ticked = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - ticked > _TICK_SECONDS:
                ticked = time.monotonic()
                self._tick(ticked)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or too many files are open
            return
        connection.settimeout(_SEND_SECONDS)
        keep_alive(connection)
        self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except (OSError, TimeoutError):
            data = b""
        if not data:
            self._hang_up(peer)
            return
        try:
            for message in peer.reader.feed(data):
                with self._lock:
                    self._handle(peer, message)
        except (ValueError, KeyError, TypeError):
            self._hang_up(peer)  # not one of ours

    def _hang_up(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        with self._lock:
            if peer.worker is not None and self._links.get(peer.worker) is peer.connection:
                del self._links[peer.worker]
                if not peer.local:
                    lost = Lost(peer.worker, self.rank_of(peer.worker), f"{self._name(peer.worker)} cannot be reached")
                    self.members.lose(lost, time.monotonic())
            if peer.agent is not None:
                self._agents.pop(peer.agent, None)
                self._note("agent-left", agent=peer.agent)
                self._count_machines()

    def _handle(self, peer: Peer, message: Message) -> None:
        kind, now = message["type"], time.monotonic()
        if kind == "hello":
            peer.worker, peer.local = message["worker"], message.get("local", True)
            self._links[peer.worker] = peer.connection
            self.watch.hang_seconds = message.get("hang_seconds")
            self.watch.timeout_seconds = message.get("timeout_seconds")
            self.members.greet(peer.worker, message["about"], message["facts"], message["session"], message["fits"])
        elif kind == "ready" and peer.worker is not None:
            progress = message["progress"]
            self._heard.pop(peer.worker, None)
            self.members.workers[peer.worker].about["arena"] = message["arena"]
            self._believe(message["ended"], now)
            self.members.ready(
                peer.worker,
                tuple(progress) if progress else None,
                now,
                leaving=message["leaving"],
                planned=message["planned"],
            )
        elif kind == "place" and peer.worker is not None and self._links.get(peer.worker) is peer.connection:
            self._heard[peer.worker] = now, Place(rank=-1, **message["place"])
        elif kind == "finished" and peer.worker is not None:
            self.members.finish(peer.worker, now)
        elif kind == "agent":
            self._welcome(peer, message)
        elif kind == "started":
            self.members.expect(message["worker"])
        elif kind == "ended":
            self._take_end(message, now)

    def _believe(self, ended: list[int], now: float) -> None:
        """A worker says that others have ended; on this machine that can be seen before their agent is told."""
        for number in ended:
            worker = self.members.workers.get(number)
            if worker is not None and number < BLOCK and worker.about and is_ending(worker.about["pid"]):
                lost = Lost(number, self.rank_of(number), f"{self._name(number)} ended")
                self.members.lose(lost, now, seen=False)

    def _take_end(self, message: Message, now: float) -> None:
        """How a worker of another machine ended, as its agent saw it."""
        number = message["worker"]
        self.watch.exits.append(
            WorkerExit(number, message["code"], time.time(), False, out_of_memory=message["out_of_memory"])
        )
        if message["code"] == 0:
            self.members.finish(number, now)
        elif message["code"] == PREEMPTED:
            self.members.leave(number, now)
        elif message["report"]:
            self.fail(number, message["report"])
        else:
            self.members.lose(Lost(number, self.rank_of(number), f"{self._name(number)} {message['what']}"), now)

    def _welcome(self, peer: Peer, message: Message) -> None:
        peer.agent = self._agents_seen = self._agents_seen + 1
        peer.workers = message["workers"]
        self._agents[peer.agent] = peer
        write(peer.connection, {"type": "run", "first": peer.agent * BLOCK, **(self._describe or {})})
        self._note("agent-joined", agent=peer.agent, host=message.get("host"))
        self._count_machines()

    def _count_machines(self) -> None:
        bounds = self.members.bounds
        wanted = self._own + sum(peer.workers for peer in self._agents.values())
        self.members.want(replace(bounds, wanted=max(bounds.least, min(bounds.most, wanted))), time.monotonic())

    def _send(self, number: int, message: Message) -> None:
        connection = self._links.get(number)
        if connection is not None:
            write(connection, message)

    def wait_for_guests(self) -> None:
        """Until the run is over for the other machines, too, and they know it; not longer than a minute."""
        deadline = time.monotonic() + _GUESTS_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if not self._agents or (self.over is not None and all(peer.told for peer in self._agents.values())):
                    return
            time.sleep(_TICK_SECONDS / 5)

    def _tell_agents(self) -> None:
        """Tell the agents of the other machines that the run is over."""
        for peer in self._agents.values():
            if not peer.told:
                peer.told = True
                write(peer.connection, {"type": "end", **(self.members.over or {})})

    def _name(self, number: int) -> str:
        rank = self.rank_of(number)
        about = self.members.workers[number].about if number in self.members.workers else {}
        where = f" (process {about['pid']} on {about['host']})" if about else ""
        return (f"rank {rank}" if rank is not None else f"worker {number}") + where

    def name(self, number: int) -> str:
        """A worker in words: its rank, process and machine."""
        with self._lock:
            return self._name(number)

    def _places(self, now: float) -> list[Place]:
        heard = {
            number: replace(place, rank=self.rank_of(number) or 0, silent=max(0.0, now - at))
            for number, (at, place) in self._heard.items()
        }
        for number in self.members.view:
            worker = self.members.workers[number]
            if number not in heard and worker.state == "training":  # stopped before it could say anything
                rank, steps = self.rank_of(number) or 0, worker.progress[0] if worker.progress else 0
                waited = now - self._viewed
                heard[number] = Place(rank, steps, "re-forming", False, 0.0, silent=waited)
        return places_of(self.members.view, heard)

    def _tick(self, now: float) -> None:
        with self._lock:
            self.members.settle(now)
            if self.members.over is not None:
                self._tell_agents()
                return
            if self.members.generation < 0:
                self._await_start(now)
            elif self.watch.late and self._gave_up():
                self._end_hang(now)
            elif overdue := self.members.overdue(now, self.watch.timeout_seconds or _FIRST_STEP_SECONDS):
                self._give_up_on(overdue, now)
            else:
                self._look_for_late(self._places(now))

    def _note_change(self, event: str, **fields: Any) -> None:
        if event == "view":
            self._viewed = time.monotonic()
            self._heard.clear()
        self.watch.note(event, self.members, self._places(time.monotonic()), **fields)

    def _await_start(self, now: float) -> None:
        absent = self.watch.absent(self.members, now)
        if absent is not None:
            numbers, text = absent
            self.members.end(StartError.exit_code, text, now, kind="not-started", workers=numbers)

    def _gave_up(self) -> bool:
        """Whether all others have waited for those that are late until their own deadline."""
        states = {number: self.members.workers[number].state for number in self.members.view}
        there = [states[number] for number in states if number not in self.watch.late]
        return (
            self.members.changing
            and bool(there)
            and all(state == "ready" for state in there)
            and all(states.get(number) == "training" for number in self.watch.late)
        )

    def _look_for_late(self, places: list[Place]) -> None:
        limit = deadline(places, self.watch.hang_seconds, _FIRST_STEP_SECONDS)
        if self.watch.timeout_seconds is not None:  # when they give up it is too late to ask where they are
            limit = min(limit, 0.9 * self.watch.timeout_seconds)
        missing = late(places, limit)
        if not missing:
            if not self.members.changing:
                self.watch.all_there()
            return
        view, bounds, now = self.members.view, self.members.bounds, time.monotonic()
        drops = bounds.drops
        if self.watch.late and self.members.changing and not drops:
            self._end_hang(now)
            return
        self.watch.call(places, view, missing, limit)
        if drops:
            for number in [view[place.rank] for place in missing]:
                what = f"{self._name(number)} was late for more than {limit:.0f} s: {self.watch.spoken}"
                self.members.lose(Lost(number, self.rank_of(number), what, runs=True), now)
        elif self.members.changing:
            self._end_hang(now)

    def _give_up_on(self, numbers: list[int], now: float) -> None:
        """These did not come to gather with the others within the longest time that any worker waits."""
        waited = f"did not come back to the others within {self.watch.timeout_seconds or _FIRST_STEP_SECONDS:.0f} s"
        for number in numbers:
            self.members.lose(Lost(number, self.rank_of(number), f"{self._name(number)} {waited}", runs=True), now)

    def _end_hang(self, now: float) -> None:
        gone = [lost for lost in self.members.lost if lost.worker in self.members.view]
        if gone:
            self.members.end(WorkerLost.exit_code, gone[-1].what, now, save=True)
            return
        for number in self.watch.late:
            self.members.workers[number].state = "gone"  # the others save without it
        self.members.end(DEADLINE_PASSED, self.watch.spoken, now, save=True, kind="hang", workers=self.watch.late)
