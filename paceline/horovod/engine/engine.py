"""Background thread of each process that negotiates and executes operations while the script computes.

In a loop, the thread takes submitted requests, sends them to rank 0 (which enters them into the table of
``negotiation``), and executes the responses of rank 0 in the order received, which is the same on all workers.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.horovod.engine import operations
from paceline.horovod.engine.handle import Handle
from paceline.horovod.engine.links import Links
from paceline.horovod.engine.negotiation import ADD_SET, JOIN, REMOVE_SET, Item, Negotiation, Response
from paceline.horovod.engine.operations import Members, Task
from paceline.horovod.engine.plan import Plan
from paceline.horovod.engine.requests import GLOBAL, Key, Request, from_json
from paceline.horovod.engine.waits import ANSWER_SECONDS, BLOCKED_SECONDS, EXPLAIN_SECONDS, Waits, say
from paceline.horovod.errors import HorovodInternalError, InvalidRequest
from paceline.horovod.settings import HorovodSettings

PLAN = "plan"
_LEFT = "has left: its process ended"
_OPERATIONS: dict[str, Callable[[Members, Item, Task], None]] = {
    "allgather": operations.allgather,
    "alltoall": operations.alltoall,
    "barrier": operations.barrier,
    "broadcast": operations.broadcast,
    "reducescatter": operations.reducescatter,
}
_RECORDED = frozenset(["allreduce", *_OPERATIONS])


class Engine:
    """Engine of one worker, which negotiates and executes operations.

    Args:
        links: connection to rank 0, or on rank 0 the connections to all other workers.
        group: torch process group of all workers, or None with a single worker.
    """

    def __init__(
        self, rank: int, size: int, links: Links, group: dist.ProcessGroup | None, settings: HorovodSettings
    ) -> None:
        self.rank, self.size, self.settings = rank, size, settings
        self.sets = {GLOBAL: Members(tuple(range(size)), rank, group)}  # members of each process set, by ID
        self.joins = 0  # number of times that all workers have joined
        self.failure = ""  # why the engine has stopped. Empty while it runs.
        self._links = links
        self._negotiation = Negotiation(size, settings.fusion_bytes, settings.cache_capacity) if rank == 0 else None
        self._lock = threading.Lock()
        self._submitted: list[Handle] = []
        self._pending: dict[Key, Handle] = {}
        self._cache: dict[Key, tuple[int, Request]] = {}
        self._keys: dict[int, Key] = {}
        self._unnamed: defaultdict[Key, itertools.count[int]] = defaultdict(itertools.count)
        self._closing = ""
        self._quiet_since = time.monotonic()
        self._departed = threading.Event()
        self._interrupted = ""
        self.waits = Waits(rank, settings, links.wake)  # waits that are not negotiated, and workers that have left
        if rank == 0:
            self.waits.record(settings.timeline, settings.mark_cycles)
            if settings.ignored:
                say(f"without effect here: HOROVOD_{', HOROVOD_'.join(settings.ignored)}.")
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="paceline-horovod", daemon=True)
        self._thread.start()

    def submit(self, request: Request, task: Task) -> Handle:
        """Submit an operation. An empty name is replaced by a counter that is the same on all members of the set.

        Barriers have a counter of their own, so that ranks meet in a barrier again after an error on some of them.
        """
        members = self.sets.get(request.set)
        if members is None or (self.rank not in members.ranks):
            listed = "was removed" if members is None else f"has ranks {list(members.ranks)}"
            raise InvalidRequest(
                f"Rank {self.rank}: {request.words}: the process set {listed}; this rank is not in it."
            )
        with self._lock:
            if self.failure:
                raise HorovodInternalError(self.failure)
            if not request.name:
                counted = "barrier.noname" if request.kind == "barrier" else "noname"
                request = request._replace(name=f"{counted}.{next(self._unnamed[request.set, counted])}")
            self.waits.threads.add(threading.get_ident())
            handle = Handle(request, task, self.waits.block)
            if request.key in self._pending:
                raise InvalidRequest(
                    f"Rank {self.rank}: {request.words}: an operation of this name is under way; give another name, or "
                    f"synchronize it first."
                )
            self._pending[request.key] = handle
            self._submitted.append(handle)
            first = len(self._submitted) == 1
        if first:
            self._links.wake()
        return handle

    def add_plan(self, plan: Plan) -> None:
        """Register a plan for :meth:`plans`, by a weak reference."""
        self._plans.add(plan)

    def plans(self) -> list[Plan]:
        return [one for one in self._plans if one.open]

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    def interrupt(self, why: str) -> None:
        """Stop the engine from any thread. Pending operations fail with the reason ``why``."""
        self._interrupted = why
        self._links.wake()

    def close(self, why: str) -> None:
        """Disconnect from the other workers after sending them the reason. Pending operations fail."""
        self._closing = why
        self._links.wake()
        self._departed.wait()
        for plan in self.plans():
            plan.close()
        for members in list(self.sets.values()):
            if members.group is not None:
                dist.destroy_process_group(members.group)

    def serve(self) -> None:
        """Wait, after :meth:`close`, until no process set needs this worker's negotiation table."""
        self._thread.join()

    # methods of the engine's thread

    def _run(self) -> None:
        why = ""
        try:
            while not self._closing:
                self._turn()
            why = f"Rank {self.rank} {self._closing}."
            if self._is_needed():
                self._lost(0, self._closing)
                self._fail(why)
                self._departed.set()
            while self._is_needed():
                self._turn()
            self._links.send_all({"type": "bye", "why": self._closing}, self.settings.start_seconds)
        except Exception as error:  # noqa: BLE001 - waiting threads raise it
            why = str(error) if isinstance(error, HorovodInternalError) else f"{type(error).__name__}: {error}"
            self._links.send_all({"type": "bye", "why": f"has failed: {why.rstrip('.')}"}, self.settings.start_seconds)
        self._fail(why)
        self._links.close()
        self.waits.record("")
        self._departed.set()

    def _is_needed(self) -> bool:
        """Return whether process sets without rank 0 still have members that negotiate after rank 0 has left."""
        quiet = time.monotonic() - self._quiet_since
        return self._negotiation is not None and self._negotiation.outlive(0) and quiet < self.settings.deadline_seconds

    def _turn(self) -> None:
        messages, ended = self._links.receive(self._patience())
        if self._interrupted:
            raise HorovodInternalError(f"Rank {self.rank}: {self._interrupted}.")
        active = bool(messages or self._submitted)
        if active and (timeline := self.waits.timeline) is not None:
            timeline.cycle()
        if self.settings.cycle_seconds and self._submitted:
            time.sleep(self.settings.cycle_seconds)
        self._send_submitted()
        for rank, message in messages:
            self._read(rank, message)
        for rank in ended:
            self._lost(rank, _LEFT)
        if self._negotiation is not None:
            self._respond(self._negotiation)
        self._quiet_since = time.monotonic() if active else self._quiet_since  # a turn can take long
        self._check_waits()

    def _patience(self) -> float:
        """Return the timeout of the next receive: 0 with submitted requests, else the time to the next stall check."""
        if self._submitted:
            return 0.0
        shortest = min(self.settings.stall_seconds or 60.0, self.settings.deadline_seconds, ANSWER_SECONDS) / 4
        return min(shortest, BLOCKED_SECONDS) if self._pending else shortest

    def _send_submitted(self) -> None:
        with self._lock:
            taken, self._submitted = self._submitted, []
        if not taken:
            return
        again, new = [], []
        for handle in taken:
            number, known = self._cache.get(handle.request.key, (-1, None))
            if number >= 0 and known == handle.request:
                again.append(number)
                continue
            if number >= 0:
                self._cache[handle.request.key] = (number, handle.request)
            new.append(handle.request)
        if self._negotiation is not None:
            self._take(0, again, new)
        else:
            self._links.send(0, {"type": "submit", "again": again, "new": new}, self.settings.deadline_seconds)

    def _take(self, rank: int, again: list[int], new: list[Request]) -> None:
        assert self._negotiation is not None
        now, timeline = time.monotonic(), self.waits.timeline
        for request in (*(self._negotiation.known(rank, number) for number in again), *new):
            if timeline is not None and request.kind in _RECORDED:
                timeline.asked(request, rank)
            self._negotiation.submit(rank, request, now)

    def _read(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "run":
            for written, error, joined in message["responses"]:
                if items := [item for one in written if (item := self._item(one)) is not None]:
                    self._carry_out(Response(tuple(items), error, tuple(joined)))
        elif kind == "submit":
            self._take(rank, message["again"], list(map(from_json, message["new"])))
        elif kind == "bye":
            self._lost(rank, message["why"])
        elif kind == "news":
            self.waits.learn(message)
        elif kind == "waits" and self._negotiation is not None:
            self._note_waits(self._negotiation, rank, message)

    def _note_waits(self, negotiation: Negotiation, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        for name, set_, seconds in message["begun"]:
            negotiation.wait_outside(rank, name, set_, now - seconds)
        for name in message["ended"]:
            negotiation.end_wait(rank, name)
        if message["blocked"]:
            negotiation.block(rank, tuple(message["blocked"]))
        if rank != 0:  # acknowledge: rank 0 is not stopped
            self._links.send(rank, {"type": "news", "gone": [], "stalled": {}}, self.settings.deadline_seconds)

    def _lost(self, rank: int, why: str) -> None:
        if rank in self.waits.gone:
            return
        self.waits.gone[rank] = why
        if self._negotiation is None:
            raise HorovodInternalError(f"Rank {self.rank}: rank 0 {why}. See its log for the cause.")
        self._negotiation.leave(rank, why)
        self._links.send_all({"type": "news", "gone": [(rank, why)], "stalled": {}}, self.settings.deadline_seconds)

    def _respond(self, negotiation: Negotiation) -> None:
        responses = negotiation.take_ready()
        now = time.monotonic()
        if self.settings.stall_seconds is not None:
            self._report(negotiation.stalled(now, self.settings.stall_seconds))
        responses += negotiation.give_up(now, self.settings.deadline_seconds)
        for response in negotiation.untangle():
            say(response.error)
            responses.append(response)
        if responses:
            written = [[one.written, one.error, one.joined] for one in responses]
            self._links.send_all({"type": "run", "responses": written}, self.settings.deadline_seconds)
        for response in responses:
            self._carry_out(response)

    def _report(self, stalled: dict[str, str]) -> None:
        """Print stall warnings on rank 0 and send them to all workers, for the error if the wait fails."""
        for text in stalled.values():
            say(text)
        if stalled:
            self.waits.stalled.update(stalled)
            self._links.send_all({"type": "news", "gone": [], "stalled": stalled}, self.settings.deadline_seconds)

    def _item(self, written: Any) -> Item | None:
        if isinstance(written, int):
            if written not in self._keys:  # request of a process set without this rank
                return None
            return Item(self._cache[self._keys[written]][1], written, (), False)
        request, number, rows, new = written
        return Item(from_json(request), number, tuple(map(tuple, rows)), new)

    def _carry_out(self, response: Response) -> None:
        handles = [self._pending.get(item.request.key) for item in response.items]
        for item, handle in zip(response.items, handles, strict=True):
            if item.new and item.number >= 0 and handle is not None:
                self._cache[item.request.key] = (item.number, handle.request)
                self._keys[item.number] = item.request.key
        if not response.error:
            self._perform(response, handles)
        with self._lock:
            for item in response.items:
                self._pending.pop(item.request.key, None)
        for handle in handles:
            if handle is not None:
                handle.end(response.error)

    def _perform(self, response: Response, handles: list[Handle | None]) -> None:
        """Execute an operation. A failure raises and ends the thread."""
        request, handle = response.items[0].request, handles[0]
        if request.kind in (JOIN, ADD_SET, REMOVE_SET, PLAN):
            value = self._change(request)
            if handle is not None:
                handle.value = value
            return
        members = self.sets[request.set]
        if self.rank not in members.ranks:
            return
        timeline, requests = self.waits.timeline, [item.request for item in response.items]
        if timeline is not None:
            timeline.begin(requests)
        try:
            if request.kind == "allreduce":
                tasks = [None if one is None else one.task for one in handles]
                operations.allreduce(members, response.items, tasks)
            elif handle is not None:
                handle.value = response.items[0].rows
                _OPERATIONS[request.kind](members, response.items[0], handle.task)
        except RuntimeError as error:
            names = ", ".join(repr(item.request.name) for item in response.items[:3])
            raise self._explained(f"{request.kind} of {names}", error) from error
        if timeline is not None:
            timeline.end(requests)

    def _change(self, request: Request) -> Any:
        if request.kind == JOIN:
            self.joins += 1
            for key in [one for one in self._unnamed if one[0] == GLOBAL]:
                del self._unnamed[key]
            return request.root
        if request.kind == REMOVE_SET:
            members = self.sets.pop(request.root, None)
            if members is not None and members.group is not None:
                dist.destroy_process_group(members.group)
            return None
        if request.kind == PLAN:
            return self.open_group(self.sets[request.set].ranks)
        if request.root >= 0:
            ranks = request.splits
            place = ranks.index(self.rank) if self.rank in ranks else -1
            self.sets[request.root] = Members(ranks, place, self.open_group(ranks))
        return request.root

    def open_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Create a torch process group of these ranks. All workers must call this in the same order."""
        return operations.open_group(ranks, self.rank, self.settings.deadline_seconds)

    def _check_waits(self) -> None:
        """Notify rank 0 of this worker's long waits. Raise HorovodInternalError if rank 0 does not end them."""
        if self._negotiation is None:
            with self._lock:
                self.waits.give_up(self._pending.values(), self._quiet_since, self._links.looked)
        if (message := self.waits.news()) is None:
            return
        if self._negotiation is not None:
            self._read(0, message)
        else:
            self._links.send(0, message, self.settings.deadline_seconds)

    def _explained(self, what: str, error: RuntimeError) -> HorovodInternalError:
        """Build the error of a failed operation after waiting briefly to learn which worker left."""
        until, left = time.monotonic() + EXPLAIN_SECONDS, EXPLAIN_SECONDS
        while not self.waits.gone and left > 0:  # looks once more after that: this process may have been stopped
            left = until - time.monotonic()
            messages, ended = self._links.receive(max(0.0, left))
            for _, message in messages:
                if message["type"] == "news":
                    self.waits.learn(message)
            self.waits.gone.update({rank: message["why"] for rank, message in messages if message["type"] == "bye"})
            self.waits.gone.update({rank: _LEFT for rank in ended})
        return self.waits.explain(what, "", error)

    def _fail(self, why: str) -> None:
        with self._lock:
            self.failure = why
            left, self._pending, self._submitted = list(self._pending.values()), {}, []
        for handle in left:
            handle.end(f"{handle.request.words}: {why}")
