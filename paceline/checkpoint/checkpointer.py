"""When to save, and how to resume."""

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
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.training_state import HostBuffers, Snapshot, TrainingState
from paceline.comm.world import World
from paceline.errors import CheckpointError
from paceline.events import EventLog
from paceline.settings import CheckpointSettings

_log = logging.getLogger("paceline")
_GOOD, _DAMAGED, _REFUSED = "good", "damaged", "refused"


class Checkpointer:
    """Save and restore the state of one run.

    Only rank 0 writes: the worker that has this rank at that moment.

    Args:
        world: the workers.
        settings: where, how often, how many.
        folder: where checkpoints go unless the settings name a directory.
        events: the event log.

    Attributes:
        last: location and step of the newest good checkpoint that this worker wrote or resumed from.

    Raises:
        CheckpointError: ``checkpoint.every`` is set, but there is no directory.
        ConfigError: a package that the URL needs is not installed.
    """

    def __init__(self, world: World, settings: CheckpointSettings, folder: Path | None, events: EventLog) -> None:
        self._world = world
        self._settings = settings
        self._events = events
        self._background = Background()
        self._buffers = HostBuffers()
        self._interval = Interval(settings.mtbf_hours * 3600)
        self._measured: tuple[float, float] | None = None
        self.last: tuple[Path | str, int] | None = None
        location = settings.directory or folder
        self._storage = None if location is None else locations.storage_at(location)
        if settings.every and self._storage is None:
            raise CheckpointError("checkpoint.every is set, but there is no directory: set checkpoint.directory.")

    @property
    def enabled(self) -> bool:
        """Whether there is a place to save to."""
        return self._storage is not None

    def due(self, step: int) -> bool:
        """Whether to save now. Call this once after each step.

        With ``checkpoint.every = "auto"`` rank 0 decides by its own clock, without the others, as only rank 0 writes.

        Raises:
            CheckpointError: the last save in the background failed.
        """
        self._raise_if_writer(self._background.check)
        if self._settings.every != "auto":
            return self._settings.every is not None and step % self._settings.every == 0
        self._interval.step()
        self._update_interval()
        return self._world.rank == 0 and self._interval.due(step)

    def save(self, state: TrainingState, step: int) -> Path | str:
        """Write a checkpoint and wait for it on rank 0; the other ranks do not wait.

        Raises:
            CheckpointError: there is no directory, or this save or the last one in the background failed.
        """
        storage = self._require_storage()
        begin = time.perf_counter()
        self.finish()
        if self._world.rank == 0:
            self._write(storage, state.snapshot(step), begin, None)
            self._interval.reset(step)
        return storage.location(manifest.name_of(step))

    def begin_save(self, state: TrainingState, step: int) -> None:
        """Copy the state to host memory on rank 0, and write it in the background.

        Waits for a save that is still running.

        Raises:
            CheckpointError: there is no directory, or the last save failed.
        """
        if not self._settings.background:
            self.save(state, step)
            return
        storage = self._require_storage()
        begin = time.perf_counter()
        self.finish()
        if self._world.rank == 0:
            snapshot = self._buffers.copy(state.snapshot(step))
            stall = time.perf_counter() - begin
            self._background.start(lambda: self._write(storage, snapshot, begin, stall))
            self._interval.reset(step)

    def finish(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed.
        """
        self._raise_if_writer(self._background.finish)

    def _raise_if_writer(self, check: Callable[[], None]) -> None:
        """Raise the error of a save on rank 0 only.

        A worker that was dropped during a save and came back may have another rank: it is not the writer any more.
        """
        try:
            check()
        except CheckpointError as error:
            if self._world.rank == 0:
                raise
            _log.warning("%s Another worker writes checkpoints now.", error)

    def _write(self, storage: Storage, snapshot: Snapshot, begin: float, stall: float | None) -> None:
        """Write a checkpoint, record it, and remove old ones; ``stall`` in seconds, none: training waits for all."""
        name = manifest.name_of(snapshot.step)
        fields = {"step": snapshot.step, "path": str(storage.location(name)), "bytes": snapshot.bytes}
        try:
            location = save.save(storage, snapshot)
        except CheckpointError as error:
            self._events.mark("checkpoint-failed", **fields, reason=str(error))
            raise
        self.last = location, snapshot.step
        save.retain(storage, name, self._settings.keep, self._settings.keep_hours)
        seconds = time.perf_counter() - begin
        stall = seconds if stall is None else stall
        self._events.mark("checkpoint", **fields, stall=stall, seconds=seconds)
        self._measured = stall, seconds

    def _update_interval(self) -> None:
        measured, self._measured = self._measured, None
        if measured is None:
            return
        self._interval.add_save(*measured)
        decision = self._interval.decision()
        if decision is not None:
            _log.info(decision["text"])
            self._events.mark("checkpoint-interval", **decision)

    def _require_storage(self) -> Storage:
        if self._storage is None:
            raise CheckpointError(
                "There is no directory for checkpoints: set checkpoint.directory, or start with paceline run."
            )
        return self._storage

    def resume(self, state: TrainingState, resume: str | None) -> int:
        """Load the checkpoint that ``resume`` names; return its step, 0 for a fresh start.

        All workers load the same one: with ``auto`` the newest that every worker can read.

        Raises:
            CheckpointError: it cannot be used, or ``resume`` is none and the directory holds another run's checkpoints.
        """
        self.finish()
        join_all()  # another session of this process may still be writing what is to be read
        if resume is None:
            self._refuse_leftovers()
            return 0
        found = self._world.gather(load.find(resume, self._storage), "start")[0]  # what rank 0 sees
        skipped: dict[Path | str, str] = {}
        for location in found:
            content, reason = self._read_together(state, location)
            if content is not None:
                if resume != "auto":
                    self._refuse_later(location)
                self._set_aside(skipped)
                return self._restore(state, location, content)
            if resume != "auto":
                raise CheckpointError(reason)
            skipped[location] = reason
        storage = self._require_storage()
        if skipped:
            raise CheckpointError(
                f"No checkpoint in {storage.location()} can be used. {' '.join(skipped.values())} "
                f"Remove them to start from the beginning."
            )
        _log.info("resume: no checkpoint in %s yet, starting from the beginning", storage.location())
        return 0

    def _restore(self, state: TrainingState, location: Path | str, content: Content) -> int:
        step = state.restore(location, content)
        self.last = location, step
        self._interval.reset(step)
        _log.info("resumed from %s at step %d", location, step)
        self._events.mark("resume", step=step, path=str(location))
        return step

    def _read_together(self, state: TrainingState, location: Path | str) -> tuple[Content | None, str]:
        """The content of a checkpoint, or why it is damaged for one of the workers, and so for all.

        Raises:
            CheckpointError: a worker refuses it.
        """
        content, kind, reason = None, _GOOD, ""
        try:
            content = load.read(location, state.check)
        except DamagedError as error:
            kind, reason = _DAMAGED, str(error)
        except CheckpointError as error:
            kind, reason = _REFUSED, str(error)
        results = self._world.gather((kind, reason), f"reading {location}")
        for wanted in (_REFUSED, _DAMAGED):
            reasons = {rank: why for rank, (what, why) in enumerate(results) if what == wanted}
            if not reasons:
                continue
            rank, first = next(iter(reasons.items()))
            prefix = f"rank {rank}: " if len(reasons) < len(results) else ""
            if wanted == _REFUSED:
                raise CheckpointError(reason if kind == _REFUSED else prefix + first)
            return None, prefix + first
        return content, ""

    def _set_aside(self, damaged: dict[Path | str, str]) -> None:
        """Report the checkpoints that were skipped, and rename them, out of the way of later saves."""
        if self._world.rank != 0:
            return
        for location, reason in damaged.items():
            now = self._require_storage().set_aside(locations.split(location)[1])
            _log.warning("%s Skipped it, and renamed it to %s.", reason, now)
            self._events.mark("checkpoint-damaged", path=str(location), reason=reason, now=str(now))

    def _refuse_later(self, location: Path | str) -> None:
        """Refuse to resume from an earlier step than the newest: the directory would mix two histories."""
        parent, name = locations.split(location)
        if self._storage is None or not locations.same(parent, self._storage.location()):
            return
        newest = next(iter(load.complete(self._storage)), name)
        if newest != name:
            raise CheckpointError(
                f"The checkpoint folder holds {newest}, later than {name}, from which this run would resume. "
                f"Choose another checkpoint.directory, or remove the later ones."
            )

    def _refuse_leftovers(self) -> None:
        """Refuse to mix the checkpoints of two runs; all workers look before anyone writes."""
        names = load.complete(self._storage) if self._storage else []
        first = str(self._storage.location(names[0])) if self._storage and names else ""
        found = self._world.gather(first, "start")[0]
        if found:
            raise CheckpointError(
                f"The checkpoint folder already holds {found} of an earlier run. Set resume='auto' to resume from it, "
                f"or choose another checkpoint.directory."
            )
