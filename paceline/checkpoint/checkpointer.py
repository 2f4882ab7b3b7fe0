"""When to save, and how to go on from what was saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import load, locations, manifest, save
from paceline.checkpoint.background import Background, join_all
from paceline.checkpoint.interval import Interval
from paceline.checkpoint.load import Content
from paceline.checkpoint.manifest import DamagedError
from paceline.checkpoint.snapshot import HostBuffers, Snapshot
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.training_state import TrainingState
from paceline.comm.world import World
from paceline.errors import CheckpointError
from paceline.events import EventLog
from paceline.settings import CheckpointSettings

_log = logging.getLogger("paceline")
_GOOD, _DAMAGED, _REFUSED = "good", "damaged", "refused"


class Checkpointer:
    """Keeps the state of one run in checkpoints.

    Rank 0 writes: the worker that has this rank at that moment.

    Args:
        world: the workers.
        settings: where, how often, how many.
        folder: where checkpoints go unless the settings say so.
        events: where to record what was done.

    Attributes:
        last: the newest good checkpoint that this worker wrote or went on from, and its step.

    Raises:
        CheckpointError: checkpoints are to be saved, but not said where.
        ConfigError: the URL of the folder needs something that is not installed.
    """

    def __init__(self, world: World, settings: CheckpointSettings, folder: Path | None, events: EventLog) -> None:
        self._world = world
        self._settings = settings
        self._events = events
        self._background = Background()
        self._staging = HostBuffers()
        self._interval = Interval(settings.mtbf_hours * 3600)
        self._measured: tuple[float, float] | None = None
        self.last: tuple[Path | str, int] | None = None
        place = settings.directory or folder
        self._folder = None if place is None else locations.storage_at(place)
        if settings.every and self._folder is None:
            raise CheckpointError("checkpoint.every is set but not where to save: set checkpoint.directory.")

    @property
    def enabled(self) -> bool:
        """Whether there is somewhere to save to."""
        return self._folder is not None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be taken now; to be called once after each step.

        With ``checkpoint.every = "auto"`` rank 0 decides alone, by its own clock, as it alone writes. Were all to
        write, it would have to tell them.

        Raises:
            CheckpointError: the save before, in the background, has failed.
        """
        self._heed(self._background.check)
        if self._settings.every != "auto":
            return self._settings.every is not None and step % self._settings.every == 0
        self._interval.step()
        self._take_in_measurement()
        return self._world.rank == 0 and self._interval.due(step)

    def save(self, state: TrainingState, step: int) -> Path | str:
        """Write a checkpoint and wait until it is in its place; rank 0 does, the others go on.

        Raises:
            CheckpointError: there is nowhere to save to, or writing failed, now or in the background before.
        """
        folder = self._somewhere()
        begin = time.perf_counter()
        self.finish()
        if self._world.rank == 0:
            self._write(folder, state.snapshot(step), begin, None)
            self._interval.begun(step)
        return folder.location(manifest.name_of(step))

    def begin_save(self, state: TrainingState, step: int) -> None:
        """Copy the state to host memory, and let a thread write it while training goes on; only rank 0 does.

        A save that is still under way is waited for.

        Raises:
            CheckpointError: there is nowhere to save to, or the save before has failed.
        """
        if not self._settings.background:
            self.save(state, step)
            return
        folder = self._somewhere()
        begin = time.perf_counter()
        self.finish()
        if self._world.rank == 0:
            snapshot = self._staging.copy(state.snapshot(step))
            stall = time.perf_counter() - begin
            self._background.start(lambda: self._write(folder, snapshot, begin, stall))
            self._interval.begun(step)

    def finish(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed.
        """
        self._heed(self._background.finish)

    def _heed(self, ask: Callable[[], None]) -> None:
        """Raise the error of a save, but not that of a worker which was dropped in the middle of it and came back.

        It is not the one that writes any more.
        """
        try:
            ask()
        except CheckpointError as error:
            if self._world.rank == 0:
                raise
            _log.warning("%s Another worker writes now.", error)

    def _write(self, folder: Storage, snapshot: Snapshot, begin: float, stall: float | None) -> None:
        """Write, record, and remove what is to go; ``stall``: seconds that training stood still, none: all the time."""
        name = manifest.name_of(snapshot.step)
        facts = {"step": snapshot.step, "path": str(folder.location(name)), "bytes": snapshot.bytes}
        try:
            place = save.save(folder, snapshot)
        except CheckpointError as error:
            self._events.mark("checkpoint-failed", **facts, reason=str(error))
            raise
        self.last = place, snapshot.step
        save.retain(folder, name, self._settings.keep, self._settings.keep_hours)
        seconds = time.perf_counter() - begin
        stall = seconds if stall is None else stall
        self._events.mark("checkpoint", **facts, stall=stall, seconds=seconds)
        self._measured = stall, seconds

    def _take_in_measurement(self) -> None:
        measured, self._measured = self._measured, None
        if measured is None:
            return
        self._interval.measured(*measured)
        news = self._interval.news()
        if news is not None:
            _log.info(news["text"])
            self._events.mark("checkpoint-interval", **news)

    def _somewhere(self) -> Storage:
        if self._folder is None:
            raise CheckpointError("There is nowhere to save to: set checkpoint.directory, or start with paceline run.")
        return self._folder

    def resume(self, state: TrainingState, resume: str | None) -> int:
        """Load the checkpoint that ``resume`` asks for; returns the step to go on from, 0 for a fresh start.

        All workers take the same: with ``auto`` the newest one that every worker can read.

        Raises:
            CheckpointError: it cannot be used, or the folder holds another run's checkpoints and none was asked for.
        """
        self.finish()
        join_all()  # another session of this process may still be writing what is to be read
        if resume is None:
            self._refuse_leftovers()
            return 0
        found = self._world.gather(load.find(resume, self._folder), "start")[0]  # what rank 0 sees
        passed: dict[Path | str, str] = {}
        for place in found:
            content, reason = self._read_together(state, place)
            if content is not None:
                if resume != "auto":
                    self._refuse_later(place)
                self._set_aside(passed)
                return self._go_on(state, place, content)
            if resume != "auto":
                raise CheckpointError(reason)
            passed[place] = reason
        if passed:
            raise CheckpointError(
                f"No checkpoint in {self._somewhere().location()} can be used. {' '.join(passed.values())} "
                f"Remove them to start from the beginning."
            )
        _log.info("resume: no checkpoint in %s yet, starting from the beginning", self._somewhere().location())
        return 0

    def _go_on(self, state: TrainingState, place: Path | str, content: Content) -> int:
        step = state.put(place, content)
        self.last = place, step
        self._interval.begun(step)
        _log.info("resumed from %s at step %d", place, step)
        self._events.mark("resume", step=step, path=str(place))
        return step

    def _read_together(self, state: TrainingState, place: Path | str) -> tuple[Content | None, str]:
        """What is in a checkpoint, or why it is damaged for one of the workers, and so for all.

        Raises:
            CheckpointError: a worker refuses it.
        """
        content, kind, reason = None, _GOOD, ""
        try:
            content = load.read(place, state.check)
        except DamagedError as error:
            kind, reason = _DAMAGED, str(error)
        except CheckpointError as error:
            kind, reason = _REFUSED, str(error)
        told = self._world.gather((kind, reason), f"reading {place}")
        for wanted in (_REFUSED, _DAMAGED):
            reasons = {rank: why for rank, (what, why) in enumerate(told) if what == wanted}
            if not reasons:
                continue
            rank, first = next(iter(reasons.items()))
            alone = f"rank {rank}: " if len(reasons) < len(told) else ""
            if wanted == _REFUSED:
                raise CheckpointError(reason if kind == _REFUSED else alone + first)
            return None, alone + first
        return content, ""

    def _set_aside(self, damaged: dict[Path | str, str]) -> None:
        """Report the checkpoints that were passed over, and take them out of the way of later saves."""
        if self._world.rank != 0:
            return
        for place, reason in damaged.items():
            folder = self._somewhere()
            now = folder.set_aside(locations.split(place)[1])
            _log.warning("%s It is passed over, and now called %s.", reason, now)
            self._events.mark("checkpoint-damaged", path=str(place), reason=reason, now=str(now))

    def _refuse_later(self, place: Path | str) -> None:
        """Going on from an earlier step beside later ones would mix two courses of training in one folder."""
        above, name = locations.split(place)
        if self._folder is None or not locations.same(above, self._folder.location()):
            return
        newest = next(iter(load.complete(self._folder)), name)
        if newest != name:
            raise CheckpointError(
                f"The checkpoint folder holds {newest}, later than {name}, from which this run is to go on. "
                f"Choose another checkpoint.directory, or remove the later ones."
            )

    def _refuse_leftovers(self) -> None:
        """A new run must not mix its checkpoints with those of another one; all workers look before anyone writes."""
        there = load.complete(self._folder) if self._folder else []
        found = self._world.gather(str(self._folder.location(there[0])) if self._folder and there else "", "start")[0]
        if found:
            raise CheckpointError(
                f"The checkpoint folder already holds {found} of an earlier run. Set resume='auto' to go on from it, "
                f"or choose another checkpoint.directory."
            )
