"""How a worker goes on when the world has changed: gather anew, catch up, repeat the step.

::

    survivors      step 7 ✗ ─ ready ─ view 1 ─ groups ─ level ─ step 7 ─ step 8
    lost           step 7 †
    spare          ........... ready ─ view 1 ─ groups ─ level ─ step 7 ─ step 8

All processes and their states stay. *Level*: the most advanced worker gives its state to those that are behind it, to
joiners above all. A step counts as done on a worker when its update has been applied; who is one step behind gets the
state after it, so no step is lost, and none is applied twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline import env
from paceline.checkpoint import files
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.coordinator.types import Departure, Membership
from paceline.errors import WorkerLost
from paceline.recovery.state_shards import StateShard, assemble, go_back
from paceline.recovery.state_transfer import StateBytes, transfer
from paceline.step.job import Job, StepResult


@dataclass
class Progress:
    """How far a worker is, and what those that are behind need besides the tensors.

    Attributes:
        steps: steps done.
        evaluations: after how many steps the script asked for evaluations, and their results in order.
        outcome: what the last step gave.
        apart: different for each worker where states differ though the workers are equally far: then all but one take
            the state of that one.
        holds: where each worker has a part of the state, the parameters and buffers whose newest values are this one's.
        again: so many steps had been done when the workers last went back to a checkpoint.
        left_out: steps that the script did not take.
    """

    steps: int = 0
    evaluations: dict[int, list[float]] = field(default_factory=dict)
    outcome: StepResult | None = None
    apart: int = 0
    holds: frozenset[str] | None = None
    again: int = 0
    left_out: set[int] = field(default_factory=set)

    @property
    def progress(self) -> tuple[int, int, int]:
        """For comparison: who is further."""
        return self.steps, sum(map(len, self.evaluations.values())), self.apart


class Recovery:
    """Takes this worker from one view to the next.

    Args:
        job: what is trained, and with whom.
        coordinator: the connection to the coordinator.
        state: what is handed over.
        checkpointer: of checkpoints.
        begin: called when nobody has a state yet; gives the number of steps done.

    Attributes:
        taken: steps done in the state that this worker has last taken from another one; 0 if it never has.
    """

    taken = 0

    def __init__(
        self,
        job: Job,
        coordinator: CoordinatorClient,
        state: TrainingState,
        checkpointer: Checkpointer,
        begin: Callable[[], int],
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._state = state
        self._checkpointer = checkpointer
        self._begin = begin
        self.standing: Progress | None = None

    def gather(self, stop: Callable[[], None], planned: bool, ended: Sequence[int] = ()) -> Departure | None:
        """Come into the next view, at the state of the most advanced of its workers.

        Args:
            stop: called first, and whenever another worker is lost on the way; ends what the worker was doing.

            planned: at the end of a step, as the workers told each other.
            ended: the numbers of worker processes that are known to have ended.

        Returns:
            how this worker's part ends, if it does; it is alone then.

        Raises:
            WorkerLost: the roster is gone.
        """
        world, begin = self._job.world, time.perf_counter()
        while True:
            stop()
            world.leave()
            progress = self.standing.progress if self.standing else None
            told = self._coordinator.await_membership(progress, world.arena_handle(), world.leaving, planned, ended)
            if isinstance(told, Departure):
                self._part(told)
                return told
            agreed = time.perf_counter()
            try:
                world.join(told)
                entered = time.perf_counter()
                self._level(told)
            except WorkerLost as lost:
                planned, ended = False, world.worker_ids(lost.ranks)
                continue
            env.tell_identity(world.rank, world.size, world.local_rank, world.local_size)
            self._job.events.move(world.rank, told.generation)
            self._record(told, begin, agreed, entered)
            return None

    def _record(self, view: Membership, begin: float, agreed: float, entered: float) -> None:
        now = time.perf_counter()
        self._job.events.mark(
            "recovered" if view.generation > 0 else "gathered",
            step=self.standing.steps if self.standing else 0,
            workers=[seat.worker for seat in view.members],
            joined=list(view.joined),
            lost=list(view.lost),
            seconds=now - begin,
            agreeing=agreed - begin,
            entering=entered - agreed,
            leveling=now - entered,
        )

    def _level(self, view: Membership) -> None:
        most = max((seat.progress for seat in view.members if seat.progress is not None), default=None)
        if most is None:
            steps = self._begin()
            self.standing = Progress(steps)
            return
        if not self._put_together():
            return
        donor = next(rank for rank, seat in enumerate(view.members) if seat.progress == most)
        behind = [rank for rank, seat in enumerate(view.members) if seat.progress != most]
        if behind:
            taken = transfer(self._job.world, donor, behind, self._load() if self._job.world.rank == donor else None)
            if taken is not None:
                self._take(taken)
        self._share_what_was_learned()

    def _put_together(self) -> bool:
        """Where each worker has a part of the state, give all the whole; if that cannot be, go back to a checkpoint.

        Returns:
            whether those that are behind still have to take the state of the most advanced worker.
        """
        own, world = self.standing, self._job.world
        told = world.gather(None if own is None else (StateShard(own.steps, own.holds), own), "gathering anew")
        parts = [None if one is None else one[0] for one in told]
        if assemble(self._job, parts):
            if own is not None:
                own.holds = None
            return True
        furthest = max((one[1] for one in told if one is not None), key=lambda standing: standing.progress)
        steps = go_back(self._job, self._checkpointer, self._state, parts)
        if own is None:
            self.taken = steps
        self.standing = replace(furthest, steps=steps, again=max(furthest.again, furthest.steps), holds=None)
        self._job.events.mark("went back", step=steps, steps=furthest.steps - steps)
        self._share_what_was_learned()
        return False

    def _share_what_was_learned(self) -> None:
        """What the first step finds out decides who sends what: after a loss in it all must know it, or none."""
        compute = self._job.compute
        told = self._job.world.gather((compute.joins, self._changing_buffers()), "gathering anew")
        compute.joins = next((joins for joins, _ in told if joins is not None), None)
        live = [live for _, live in told if live is not None]
        if live:
            compute.buffers.settle(name for names in live for name in names)

    def _changing_buffers(self) -> list[str] | None:
        """The buffers that the forward pass changes; none if the workers have not agreed on them yet."""
        buffers = self._job.compute.buffers
        return list(buffers.agreed) if buffers.settled else None

    def _load(self) -> StateBytes:
        assert self.standing is not None
        snapshot = self._state.snapshot(self.standing.steps)
        return StateBytes(snapshot.tensors, (snapshot.extra, self.standing))

    def _take(self, load: StateBytes) -> None:
        extra, self.standing = load.rest
        self._state.take(dict(load.tensors), files.from_tensor(extra))
        self.taken = self.standing.steps

    def _part(self, parting: Departure) -> None:
        """Out of the world; with the last checkpoint if this worker is to write it."""
        self._job.world.become_single()
        self._job.events.mark("parting", code=parting.code, reason=parting.reason)
        standing = self.standing
        if parting.save and standing is not None and standing.steps and self._checkpointer.enabled:
            if standing.holds is None:
                self._checkpointer.save(self._state, standing.steps)
            else:  # a part of the model would be taken for the whole
                self._job.events.mark("not saved", step=standing.steps)
