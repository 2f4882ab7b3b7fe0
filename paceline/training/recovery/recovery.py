"""Recovery of a worker after a membership change: re-form, catch up, repeat the step.

::

    survivors      step 7 ✗ ─ ready ─ membership 1 ─ rendezvous ─ catch up ─ step 7 ─ step 8
    lost           step 7 †
    spare          ........... ready ─ membership 1 ─ rendezvous ─ catch up ─ step 7 ─ step 8

Surviving processes keep running with their state. *Catch up*: the most advanced workers each send a part of their state
to the workers that are behind, mainly joiners. A step is complete on a worker when its update has been applied. A
worker that is one step behind receives the state after that step, so no step is lost and none is applied twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.coordinator.types import Departure, Generation
from paceline.environments import env
from paceline.errors import PREEMPTED, CheckpointError, DisagreementError, InputError, WorkerLost
from paceline.strategies.base import Strategy
from paceline.strategies.registry import worker_counts
from paceline.strategies.sharded.prepared import forget
from paceline.system import fault_points
from paceline.training.progress import (
    Progress,
    furthest_of,
    gone_back,
    lacks_script,
    maps_since,
    norm_of_done,
    plan_catch_up,
)
from paceline.training.recovery.activity import RE_FORMING
from paceline.training.recovery.beginning import Beginning
from paceline.training.recovery.lost_shards import WorkersJoin, join_data, meet
from paceline.training.recovery.points import Points
from paceline.training.recovery.standby import move_to_device, warm_up
from paceline.training.recovery.state_shards import assemble, go_back, is_replaced, loads_shares, move
from paceline.training.recovery.state_transfer import StateBytes, transfer

_log = logging.getLogger("paceline")


class Recovery:
    """Transition of this worker from one membership to the next.

    Args:
        beginning: training context, and the initial state for when no worker has a state.
        keep_script: function that copies the values of a script that waits for a step, when others have completed it.
        decide: decides about an interrupted step, see :meth:`~paceline.strategies.base.Strategy.decide`.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        beginning: Beginning,
        keep_script: Callable[[], None],
        decide: Callable[[torch.Tensor | float | None], frozenset[str] | None],
    ) -> None:
        self._coordinator = coordinator
        self._keep_script, self._decide = keep_script, decide
        self._is_overwritten = False  # whether parts of others' state have replaced the initial state of this worker
        self._beginning, self._formation = beginning, beginning.formation
        self._context, self._state, self._checkpointer = beginning.context, beginning.state, beginning.checkpointer
        self._points = Points(self._context, self._state)
        self._undo_warm_up: Callable[[], None] = lambda: None
        self._interrupted: WorkerLost | None = None  # loss after which this worker still holds its old share, too

    def register(self, status: Callable[[], dict[str, Any]]) -> None:
        """Register this worker with the coordinator. A spare warms up first.

        Args:
            status: function that returns this worker's activity for hang detection. Called on another thread.
        """
        launched, coordinator = env.launch_info(), self._coordinator
        assert launched is not None
        if launched.spare:
            self._undo_warm_up = warm_up(self._context, self._state)
        coordinator.report(status)
        about = {"host": platform.node(), "pid": os.getpid(), "address": coordinator.address}
        known = {key: value for key, value in self._beginning.run_spec.items() if not key.startswith("initial")}
        fits = worker_counts(self._context.settings, self._context.order.microbatches, launched.largest)
        coordinator.register(about, known, self._context.settings.hang_seconds, fits)

    def re_form(self, progress: Progress | None, planned: bool = False, ended: Sequence[int] = ()) -> Progress:
        """Join the next membership and bring this worker to the state of its most advanced workers.

        Args:
            progress: progress of this worker; None if it has no state yet.
            planned: whether the workers agreed on the change at the end of a step. Defaults to False.
            ended: numbers of worker processes that are known to have ended.

        Raises:
            SystemExit: this worker leaves the run, or the run has ended.
        """
        world, begin, lost = self._context.world, time.perf_counter(), list[int]()
        while True:
            if progress is not None:
                fault_points.reach("during recovery", progress.steps)
            owned = forget(self._context)
            if progress is not None and progress.owned is None:  # lost after a checkpoint was loaded in shares
                progress.owned = owned
            leaving = world.leaving and self._may_leave(progress)
            self._formation.leave()
            if progress is not None:
                progress.point = self._points.steps
            key = None if progress is None else progress.key
            answer = self._coordinator.await_membership(key, self._formation.arena_handle(), leaving, planned, ended)
            if isinstance(answer, Departure):
                self._depart(answer, progress)
            agreed = time.perf_counter()
            lost += answer.lost  # includes losses of memberships that could not be joined
            try:
                self._connect(answer)
                connected = time.perf_counter()
                if answer.fresh:
                    self._undo_warm_up()
                    progress = self._begin()
                    self._points.begin(progress.steps)
                else:
                    progress = self._same_state(progress)
                    self._share_knowledge(answer, progress)
            except WorkerLost as error:
                planned, ended = isinstance(error, WorkersJoin), world.worker_ids(error.ranks)
                continue
            env.set_identity(world.rank, world.size, world.membership.local_rank, len(world.membership.near))
            self._context.events.move(world.rank, answer.number)
            now = time.perf_counter()
            seconds = {"agreeing": agreed - begin, "connecting": connected - agreed, "catching_up": now - connected}
            self._record(answer, lost, progress.steps, seconds)
            return progress

    def _share_knowledge(self, generation: Generation, progress: Progress) -> None:
        """Share the findings of the workers, which have one state, and the data of each."""
        self._settle()
        self._share_findings()
        try:
            meet(self._context, RE_FORMING)
        except (InputError, DisagreementError):
            if not loads_shares(self._context):
                self._save_last(progress)
                self._context.world.gather(None, "leaving")  # no worker exits before the checkpoint is complete
            raise
        joined = [rank for rank, member in enumerate(generation.members) if member.worker in generation.joined]
        self._context.audits.look_at(progress.steps, joined, later=bool(generation.lost))

    def _may_leave(self, progress: Progress | None) -> bool:
        """Return whether others have the state that this worker holds. Else it leaves a step later."""
        divides = loads_shares(self._context) or self._points.steps is not None
        holds = progress is not None and progress.owned is not None and divides
        return not holds or self._context.held.is_handed_on

    def _connect(self, generation: Generation) -> None:
        """Join a generation, perhaps on another device, with the data of the run."""
        world = self._context.world
        before = world.device
        self._context.held.is_handed_on = False  # the workers divide the state again, with this one
        self._formation.join(generation)
        if world.device != before:
            self._undo_warm_up()
            move_to_device(self._context)
        join_data(self._context, generation)

    def _begin(self) -> Progress:
        progress = self._beginning.begin()
        if self._is_overwritten and not progress.steps:
            raise CheckpointError(
                f"Rank {self._context.world.rank}: all workers with a state were lost before this one had received it, "
                f"and there is no checkpoint to begin with. Save regularly (checkpoint.every)."
            )
        return progress

    def _record(self, generation: Generation, lost: Sequence[int], step: int, seconds: dict[str, float]) -> None:
        if self._coordinator.clock is not None:
            self._coordinator.clock.repeat()
        launched, count = env.launch_info(), len(lost)
        if count and launched is not None and launched.ulfm and self._context.world.rank == 0:
            # no launcher reports the loss
            left = len(generation.members)
            _log.warning("lost %d of %d workers; %d continue from step %d", count, left + count, left, step)
        self._context.events.mark(
            "recovered" if generation.number > 0 else "gathered",
            step=step,
            workers=[member.worker for member in generation.members],
            joined=list(generation.joined),
            lost=list(lost),
            seconds=sum(seconds.values()),
            **seconds,
        )

    def _same_state(self, progress: Progress | None) -> Progress:
        """Bring all members to the most advanced state, or to a checkpoint if that is lost; return the progress."""
        if progress is not None:
            progress.changes = self._context.loop.needed
        own, everyone = progress, self._gather(progress)
        if any(one is not None and one.undecided for one in everyone):
            if progress is not None and progress.undecided:
                norm, progress.undecided = norm_of_done(everyone, progress.steps), False
                progress.owned, progress.ahead = self._decide(norm), norm is not None
            everyone = self._gather(progress)
        # the script's own values are newer, unless it is more than one step behind or has not begun
        self._state.keeps_script = progress is not None and progress.has_script_at(furthest_of(everyone).steps)
        if progress is not None and is_replaced(self._context, everyone):
            progress.owned = frozenset()  # until the whole state has arrived, this worker's tensors are of two steps
        self._is_overwritten |= progress is None
        has_point = any(one is not None and one.point is not None for one in everyone)
        if not (has_point or lacks_script(everyone)) and assemble(self._context, everyone):
            progress = None if progress is None else replace(progress, owned=None)
            progress = self._catch_up(everyone, progress)
        else:
            if progress is not None and loads_shares(self._context):
                progress.owned = frozenset()  # until all shares are loaded, this worker's tensors are of two steps
            progress = self._go_back(everyone)
        if own is not None and own.steps < progress.steps == own.entered + 1:
            self._keep_script()  # a worker that joins before the step returns gets the values with which it returns
        progress.compared = max(one.compared for one in everyone if one is not None)
        return progress

    def _gather(self, progress: Progress | None) -> list[Progress | None]:
        """Gather the progress of all workers. That of the others is without the results of ``session.map``."""
        world = self._context.world
        own = None if progress is None else replace(progress)  # later changes are not those that the others see
        everyone: list[Progress | None] = world.gather(None if own is None else own.without_maps(), RE_FORMING)
        everyone[world.rank] = own
        return everyone

    def _catch_up(self, everyone: list[Progress | None], progress: Progress | None) -> Progress:
        """Send the state of the most advanced workers to the others, and return this worker's progress."""
        plan, world, most = plan_catch_up(everyone), self._context.world, furthest_of(everyone).key
        behind = [one is None or one.key != most for one in everyone]
        shares, received = move(self._context, everyone), None
        if any(behind):
            state = None if behind[world.rank] else self._to_send(progress, plan.in_step, shares is not None)
            received = transfer(world, plan.senders, state)
        if shares is not None:
            self._drop_old_share()
        if received is not None:
            self._state.shares = shares
            progress = self._take_over(received, -1 if progress is None else progress.entered)
            self._state.shares = None
        elif shares is not None:
            shares.load({})
        assert progress is not None
        return progress

    def _drop_old_share(self) -> None:
        """Drop this worker's old share of the state if all workers have their new ones, otherwise keep both."""
        try:
            self._context.world.gather(None, RE_FORMING)
        except WorkerLost as lost:  # some may have dropped their old shares, and others lack new ones
            self._interrupted = lost
        else:
            self._context.held.clear()

    def _settle(self) -> None:
        """Raise the loss that has interrupted :meth:`_drop_old_share`, when the progress is known."""
        lost, self._interrupted = self._interrupted, None
        if lost is not None:
            raise lost

    def _to_send(self, progress: Progress | None, in_step: bool, divided: bool) -> StateBytes:
        """Return the state to send: the current one if ``in_step``, otherwise as of the return of the last step.

        Args:
            divided: whether each worker gets its share of parameters and of the optimizer's state by other means.
        """
        assert progress is not None
        self._context.loop.now = in_step
        try:
            with self._state.script_of_now() if in_step else contextlib.nullcontext():
                snapshot = self._state.snapshot(progress.steps, without=("data",) if self._context.order.grows else ())
        finally:
            self._context.loop.now = False
        left_out = ("parameter/", "optimizer/") if divided else ()
        tensors = {name: value for name, value in snapshot.tensors.items() if not name.startswith(left_out)}
        rest = snapshot.state, replace(progress.without_maps(), again=not in_step)
        return StateBytes(tensors, rest, progress.steps)

    def _take_over(self, received: StateBytes, entered: int) -> Progress:
        progress: Progress
        state, progress = received.rest
        self._state.load(dict(received.tensors), state)
        progress = progress.with_maps(self._state.loaded_script)
        return replace(progress, received=progress.steps, received_turns=progress.turns, entered=entered)

    def _go_back(self, everyone: list[Progress | None]) -> Progress:
        """Load the newest checkpoint on all workers, because they lack a part of the state; return the progress."""
        furthest, own = furthest_of(everyone), everyone[self._context.world.rank]
        self._state.keeps_script = own is not None
        if (steps := self._points.go_back(everyone)) is None:
            steps = go_back(self._context, self._checkpointer, self._state, everyone)
            self._points.begin(steps)
        if own is not None and not own.has_script_at(steps):
            self._state.load_script()
        missed = f"changed {furthest.changes[0]!r} between steps" if furthest.changes and steps < furthest.steps else ""
        if maps_since(everyone, self._state.loaded_script):
            missed = "called session.map"
        if missed:
            raise InputError(
                f"A part of the state is lost with its workers. The others would go back to the state after {steps} "
                f"steps, and repeat {furthest.steps - steps} steps without the script, but its loop has {missed}, "
                f"which these would miss. Start the run again, with --resume auto if it has saved a checkpoint: then "
                f"the script repeats them, too."
            )
        if steps < furthest.steps:
            self._context.events.mark("went back", step=steps, steps=furthest.steps - steps)
        return gone_back(everyone, self._context.world.rank, steps, self._state.loaded_script)

    def _share_findings(self) -> None:
        """Share the probe results of the first step, on which communication depends, so that all workers have the same.

        Also share the launch number that checkpoint names contain, and which step was saved last.
        """
        compute = self._context.compute
        buffers = compute.buffers
        changing = list(buffers.agreed) if buffers.fixed else None
        launch = self._checkpointer.launch
        probe_results = self._context.probe_results
        made = self._checkpointer.made
        found = probe_results.fusible, probe_results.repeatable, changing, made, launch, sorted(buffers.added)
        everyone = self._context.world.gather(found, RE_FORMING)
        probe_results.fusible = next((fusible for fusible, *_ in everyone if fusible is not None), None)
        probe_results.repeatable = any(repeatable for _, repeatable, *_ in everyone)
        self._checkpointer.saved_before = max(made for *_, made, _, _ in everyone)
        self._checkpointer.launch = max((launch for *_, launch, _ in everyone if launch is not None), default=None)
        buffers.added.update(name for *_, names in everyone for name in names)
        if known := [changing for _, _, changing, *_ in everyone if changing is not None]:
            buffers.fix(name for names in known for name in names)

    def _depart(self, departure: Departure, progress: Progress | None) -> NoReturn:
        """Save a final checkpoint if the coordinator has chosen this worker to, then raise SystemExit or WorkerLost."""
        world = self._context.world
        world.enter(world.membership.alone(), world.transport)
        self._context.events.mark("departure", code=departure.code, reason=departure.reason)
        if departure.save and progress is not None:
            self._save_last(progress)
        if departure.code in (0, PREEMPTED):
            raise SystemExit(departure.code)
        raise WorkerLost(f"{departure.reason[:1].upper()}{departure.reason[1:]}.")

    def _save_last(self, progress: Progress) -> None:
        """Save the state before this worker ends, if it has the whole state."""
        if not progress.steps or not self._checkpointer.enabled:
            return
        if progress.owned is None:
            self._checkpointer.save(self._state, progress.steps)
        elif self._checkpointer.made < progress.steps:  # a part would be mistaken for a complete checkpoint
            self._context.events.mark("not saved", step=progress.steps)

    def keep(self, progress: Progress, strategy: Strategy) -> None:
        """Keep the current state in memory if the workers go back to it. All workers call this together."""
        wanted = self._points.wanted and self._points.steps != progress.steps
        if wanted and (replicas := strategy.point(progress.steps)) is not None:
            self._points.keep(progress.steps, replicas)
        progress.point = self._points.steps

    def prepare_to_leave(self, steps: int) -> None:
        """Finish pending communication, and a running save if this worker leaves, before a planned :meth:`re_form`.

        If the run is to end, workers that have the state in shares save it together. Otherwise those that leave give
        the replicas that only they keep to the others.
        """
        world = self._context.world
        if self._state.divided() is not None or self._points.steps is not None:
            with contextlib.suppress(WorkerLost):  # the workers re-form without those that are lost
                self._hand_on(steps)
        if world.size > 1 and world.shared_memory is None and not world.alarmed:
            with contextlib.suppress(WorkerLost):  # closing a connection may discard data that a peer has not read
                world.gather(None, "leaving")
        if world.leaving:
            self._checkpointer.finish()  # another worker writes the next checkpoint

    def _hand_on(self, steps: int) -> None:
        """Save the state that the workers have in shares if fewer stay than the run needs; else hand on replicas."""
        world, launched = self._context.world, env.launch_info()
        assert launched is not None
        leaving = [rank for rank, leaves in enumerate(world.gather(world.leaving, "leaving")) if leaves]
        if world.size - len(leaving) < max(1, launched.least or world.size):
            if self._checkpointer.enabled and self._checkpointer.made != steps:
                self._checkpointer.save(self._state, steps)
        elif self._points.steps is not None and leaving:
            self._points.hand_on(leaving)
        else:
            return
        self._context.held.is_handed_on = world.rank in leaving
