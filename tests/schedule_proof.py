"""Proof that a schedule is correct: no value is used early or missing, and no operation is done twice.

::

    state of a microbatch in a stage      absent --F--> live --B-----------> done
                                                        live --I--> split --W--> done     live and split: in memory

The rules are checked in a dry run of the schedule. At its end no backward pass and no update may be missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from paceline.errors import InputError
from paceline.schedule.pipeline.clock import Reductions, describe, dry_run
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.transfers import receive_before, send_after

_COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True)
class Peaks:
    """Peak memory of each worker."""

    # most pairs of stage and microbatch held between forward pass and end of the backward pass
    activations: tuple[int, ...]
    # most weight versions of a stage: the newest version and those that a later operation names
    versions: tuple[int, ...]


def prove(schedule: Schedule) -> Peaks:
    """Prove that a schedule can be executed and computes every microbatch once in every stage.

    Raises:
        InputError: the schedule is wrong. Names the worker, the operation and the problem.
    """
    checker = _Checker(schedule)
    dry_run(schedule, checker.perform)
    checker.end()
    versions = tuple(max(_versions(operations), default=1) for operations in schedule.workers)
    return Peaks(tuple(checker.most), versions)


def _versions(operations: tuple[Operation, ...]) -> list[int]:
    """Return the number of weight versions kept at each operation of a worker, for the operation's stage."""
    last: dict[tuple[int, int], int] = {}
    for index, operation in enumerate(operations):
        if operation.kind in _COMPUTING:
            last[operation.stage, operation.version] = index
    kept: dict[int, list[int]] = defaultdict(lambda: [0])
    counts = []
    for index, (kind, stage, _, version, _) in enumerate(operations):
        if kind == Kind.UPDATE:
            kept[stage].append(version)
        newest = kept[stage][-1]
        kept[stage] = [one for one in kept[stage] if one == newest or last.get((stage, one), -1) >= index]
        counts.append(len(kept[stage]))
    return counts


class _WrongError(Exception):
    """A rule is broken."""


def _need(met: bool, otherwise: str) -> None:
    if not met:
        raise _WrongError(otherwise)


class _Checker:
    """State of the dry run, and the rules."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.most = [0] * len(schedule.workers)
        self._owner = _owners(schedule)
        self._live = [dict[tuple[int, int], Operation]() for _ in schedule.workers]
        self._forwards: set[tuple[int, int]] = set()
        # Values are identified by their stage, the neighboring stage that needs them, and the microbatch.
        self._made = [set[tuple[int, int, int]]() for _ in schedule.workers]
        self._there = [set[tuple[int, int, int]]() for _ in schedule.workers]
        self._under_way: dict[tuple[int, int], deque[tuple[int, int, int]]] = defaultdict(deque)
        # For each worker and stage: updates, gradients since the last update, and gradients not yet reduced.
        self._updates: Counter[tuple[int, int]] = Counter()
        self._gradients: Counter[tuple[int, int]] = Counter()
        self._unreduced: Counter[tuple[int, int]] = Counter()
        self._holders = Counter(
            stage for worker in range(len(schedule.workers)) for stage in schedule.stages_of(worker)
        )
        self._reductions = Reductions[tuple[int, int]](self._holders)
        self._rules = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
        }

    def perform(self, worker: int, index: int, operation: Operation) -> bool:
        """Check an operation and return True, or return False if it must wait for another worker."""
        try:
            return self._rules[operation.kind](worker, operation)
        except _WrongError as wrong:
            where = describe(worker, index, operation)
            raise InputError(f"schedule {self.schedule.name}: {where}: {wrong}") from None

    def end(self) -> None:
        """Check that all backward passes are finished and all gradients are used."""
        for worker, live in enumerate(self._live):
            for stage, microbatch in live:
                self._left(
                    f"worker {worker} never finishes the backward pass of stage {stage} for microbatch {microbatch}"
                )
        for (worker, stage), gradients in self._gradients.items():
            if gradients:
                self._left(f"worker {worker} never updates stage {stage} with its last {gradients} gradients")

    def _left(self, what: str) -> None:
        raise InputError(f"schedule {self.schedule.name}: {what}: add the missing operation")

    def _take(self, worker: int, operation: Operation) -> None:
        """Consume the value that an operation needs from the neighboring stage."""
        value = receive_before(operation, self.schedule.stages)
        if value is None:
            return
        key = (value.peer, value.stage, value.microbatch)
        maker = self._owner[value.peer, value.microbatch]
        way = "computed by this worker" if maker == worker else f"received from worker {maker}"
        missing = f"what it needs from stage {value.peer} is missing: it must be {way} first"
        _need(key in self._there[worker], missing)
        self._there[worker].remove(key)

    def _give(self, worker: int, operation: Operation) -> None:
        """Produce the value that the neighboring stage needs."""
        value = send_after(operation, self.schedule.stages)
        if value is not None:
            here = self._owner[value.peer, value.microbatch] == worker
            (self._there if here else self._made)[worker].add((value.stage, value.peer, value.microbatch))

    def _forward(self, worker: int, operation: Operation) -> bool:
        _, stage, microbatch, version, _ = operation
        made = self._updates[worker, stage]
        _need((stage, microbatch) not in self._forwards, "this worker has done it already")
        self._forwards.add((stage, microbatch))
        _need(0 <= version <= made, f"there is no version {version} of its weights yet, only 0 to {made}")
        self._take(worker, operation)
        self._live[worker][stage, microbatch] = operation
        self.most[worker] = max(self.most[worker], len(self._live[worker]))
        self._give(worker, operation)
        return True

    def _begun(self, worker: int, operation: Operation, by: Kind) -> tuple[int, int]:
        """Return the stage and microbatch of an operation after checking that the pass before it is done."""
        _, stage, microbatch, version, _ = operation
        before = self._live[worker].get((stage, microbatch))
        if before is None or before.kind != by:
            raise _WrongError(f"its {by.name.lower()} pass on this worker must come before it, once")
        _need(version == before.version, f"it names version {version}, but its forward pass used {before.version}")
        return stage, microbatch

    def _backward(self, worker: int, operation: Operation) -> bool:
        begun = self._begun(worker, operation, Kind.FORWARD)
        self._take(worker, operation)
        self._give(worker, operation)
        self._live[worker][begun] = operation
        if operation.kind == Kind.BACKWARD:
            self._end(worker, begun)
        return True

    def _weight(self, worker: int, operation: Operation) -> bool:
        self._end(worker, self._begun(worker, operation, Kind.INPUT))
        return True

    def _end(self, worker: int, begun: tuple[int, int]) -> None:
        del self._live[worker][begun]
        self._gradients[worker, begun[0]] += 1
        self._unreduced[worker, begun[0]] += 1

    def _send(self, worker: int, operation: Operation) -> bool:
        key = (operation.stage, operation.peer, operation.microbatch)
        reason = "there is nothing to send: a value must be computed first, sent once, and to another worker"
        _need(key in self._made[worker], reason)
        self._made[worker].remove(key)
        self._under_way[worker, self._owner[operation.peer, operation.microbatch]].append(key)
        return True

    def _receive(self, worker: int, operation: Operation) -> bool:
        key = (operation.peer, operation.stage, operation.microbatch)
        maker = self._owner.get((operation.peer, operation.microbatch), worker)
        mine = self._owner.get((operation.stage, operation.microbatch)) == worker
        _need(abs(operation.peer - operation.stage) == 1 and mine and maker != worker, "nothing is sent to this stage")
        values = self._under_way[maker, worker]
        if not values:
            return False
        stage, peer, microbatch = values[0]
        other = f"microbatch {microbatch} of stage {stage} for stage {peer}"
        _need(values[0] == key, f"worker {maker} sends {other} first: receive in the order of sending")
        self._there[worker].add(values.popleft())
        return True

    def _reduce(self, worker: int, operation: Operation) -> bool:
        stage = operation.stage
        _need(self._holders[stage] > 1, "no other worker holds this stage")
        found = self._reductions.arrive(stage, worker, (self._updates[worker, stage], self._unreduced[worker, stage]))
        if found is None:
            return False
        _need(len({updates for updates, _ in found}) == 1, "the workers of this stage have not made the same updates")
        _need(any(gradients for _, gradients in found), "there is no gradient since the last one")
        self._unreduced[worker, stage] = 0
        self._gradients[worker, stage] = max(1, self._gradients[worker, stage])
        return True

    def _update(self, worker: int, operation: Operation) -> bool:
        key = (worker, operation.stage)
        _need(operation.version == self._updates[key] + 1, f"it must make version {self._updates[key] + 1}")
        _need(self._gradients[key] > 0, "there is no gradient since the last one")
        shared = self._holders[operation.stage] > 1
        _need(not (shared and self._unreduced[key]), "other workers hold this stage: a reduce must come first")
        self._updates[key] += 1
        self._gradients[key] = 0
        self._unreduced[key] = 0
        return True


def _owners(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the worker of each stage and microbatch after checking that there is exactly one."""
    owner: dict[tuple[int, int], int] = {}
    for worker, operations in enumerate(schedule.workers):
        for index, operation in enumerate(operations):
            kind, stage, microbatch, *_ = operation
            numbers = range(-1, 0) if kind in (Kind.REDUCE, Kind.UPDATE) else range(schedule.microbatches)
            if stage not in range(schedule.stages) or microbatch not in numbers:
                where = f"schedule {schedule.name}: {describe(worker, index, operation)}"
                size = f"{schedule.stages} stages and {schedule.microbatches} microbatches"
                raise InputError(f"{where}: there is no such stage or microbatch {microbatch} among {size}")
            if kind == Kind.FORWARD and owner.setdefault((stage, microbatch), worker) != worker:
                where = f"schedule {schedule.name}: {describe(worker, index, operation)}"
                raise InputError(f"{where}: worker {owner[stage, microbatch]} performs it already")
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            if (stage, microbatch) not in owner:
                what = f"the forward pass of stage {stage} for microbatch {microbatch}"
                raise InputError(f"schedule {schedule.name}: no worker performs {what}: assign it")
    return owner
