"""Checkpointer of a session: when to save, background saves, resume."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint import files, manifest, parts, save
from paceline.checkpoint.background import Background, join_all
from paceline.checkpoint.interval import Interval
from paceline.checkpoint.load import Content
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import Save
from paceline.checkpoint.resume import Check, Search, ask, complete, read_named, read_newest, two_runs
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.base import FencedError, Storage, Writer, split
from paceline.checkpoint.training_state import HostBuffers, Snapshot, TrainingState
from paceline.comm.world import World
from paceline.errors import CheckpointError, ConfigError
from paceline.events import EventLog
from paceline.settings import CheckpointSettings
from paceline.system import secret

_log = logging.getLogger("paceline")


class Checkpointer:
    """Save and restore of the state of a run.

    The worker that has rank 0 at the time of a save writes the checkpoint. It collects the shards of other workers.

    Args:
        folder: checkpoint folder. Used unless the settings name a directory.
        replicated: whether all workers have the same state after each step, so that each can write a shard of it.

    Raises:
        ConfigError: a package that the URL needs is not installed, or the key cannot be read.
    """

    def __init__(
        self,
        world: World,
        settings: CheckpointSettings,
        folder: Path | None,
        events: EventLog,
        replicated: bool = False,
    ) -> None:
        self._world, self._settings, self._events = world, settings, events
        self._divided = replicated and settings.every != "auto"  # with auto only rank 0 knows when to save
        self._absent: tuple[int, set[int]] = -1, set()
        self._background = Background()
        self._buffers = HostBuffers()
        self._interval = Interval(settings.mtbf_hours * 3600)
        self._measured: tuple[float, float] | None = None
        self._token = os.urandom(4).hex()
        # location and step of the newest valid checkpoint that this worker wrote or resumed from
        self.last: tuple[Path | str, int] | None = None
        self.made = -1  # step of the newest save that this worker took part in, or has loaded
        # the same of any worker when this membership was formed. None before the first change of the membership
        self.saved_before: int | None = None
        # number of this launch in the names of checkpoints, the same for all its workers
        self.launch: int | None = None
        self._key = None if settings.key_file is None else key_in(settings.key_file)
        location = settings.directory or folder
        self._storage = None if location is None else locations.storage_at(location)

    @property
    def enabled(self) -> bool:
        """Whether a directory or URL for checkpoints is set."""
        return self._storage is not None

    def due(self, step: int) -> bool:
        """Return whether to save now. Call this once after each step.

        With ``checkpoint.every = "auto"`` rank 0 decides alone by its own clock, because only rank 0 writes.

        Raises:
            CheckpointError: the last save in the background failed.
        """
        self._raise_if_writer(self._background.check)
        if self._settings.every != "auto":
            return self._settings.every is not None and step % self._settings.every == 0
        self._interval.step()
        self._update_interval()
        return self._world.rank == 0 and self._interval.due(step)

    def lacks(self, state: TrainingState, step: int) -> bool:
        """Return whether a save needs the shares of all workers, and was not made before the membership changed."""
        return state.divided() is not None and self.saved_before is not None and self.saved_before < step

    def _has(self, state: TrainingState, step: int) -> bool:
        """Return whether a save was made before the membership changed, but a loss may have interrupted this worker."""
        return state.divided() is not None and self.saved_before is not None and self.saved_before >= step

    def save(self, state: TrainingState, step: int, together: bool = False) -> Path | str:
        """Write a checkpoint and return its location. It is complete on return on rank 0.

        Does nothing if the workers have shares of the state, and any of them made this save before a loss.

        Args:
            together: whether the other ranks wait, so that they can save again if rank 0 is lost. Defaults to False.

        Raises:
            CheckpointError: no directory is set, or this save or the last background save failed.
            WorkerLost: the workers have the state in shares, or wait for each other, and one was lost.
        """
        before, failed = self.made, None
        try:
            self._save(state, step, background=False)
        except CheckpointError as error:
            failed = error
        if together:
            made, self.made = self.made, before  # until all know that it is there
            self._world.gather(None, "saving a checkpoint")
            self.made = made
        if failed is not None:
            raise failed
        return self._require_storage().location(manifest.name_of(step))

    def begin_save(self, state: TrainingState, step: int) -> None:
        """Copy the state to host memory on rank 0, and write it in the background.

        Waits for a save that is still running. Saves in the foreground if ``checkpoint.background`` is off, or if it is
        not set and the workers have the state in shares, so that no worker needs memory for all shares. Raises as
        :meth:`save` does.
        """
        background = self._settings.background
        self._save(state, step, background=state.divided() is None if background is None else background)

    def _save(self, state: TrainingState, step: int, *, background: bool) -> None:
        storage = self._require_storage()
        if self._has(state, step):
            if not background:
                self.finish()
            return
        begin = time.perf_counter()
        if self._world.rank == 0:
            with state.collecting():  # also ends the wait of the others if an earlier save has failed
                self.finish()
                snapshot, writer = state.snapshot(step), self._writer(storage)
                if background:
                    snapshot = self._buffers.copy(snapshot)
                else:
                    self._write(storage, snapshot, writer, begin, None)
            if background:
                stall = time.perf_counter() - begin
                self._background.start(lambda: self._write(storage, snapshot, writer, begin, stall))
            self._interval.reset(step)
        else:
            self._send(storage, state, step)
        self.made = step

    def _send(self, storage: Storage, state: TrainingState, step: int) -> None:
        """Send this worker's share to rank 0, or write a shard of the state that all workers have."""
        self.finish()
        if (share := state.divided()) is not None:
            share.send()
        elif self._divided:
            self._write_part(storage, state.snapshot(step))

    def repeat_save(self, state: TrainingState, step: int, lost: bool, able: bool) -> None:
        """Make the newest save again if its writer may be lost, or report its loss. All workers call this.

        A save of a later step, which the workers will reach again, is then made when it is due.
        """
        found = self._world.gather((lost and self.made >= step, able, self.made), "saving a checkpoint")
        begun, able = (any(one[at] for one in found) for at in range(2))  # workers that have joined take part, too
        if not begun:
            return
        made = max(newest for *_, newest in found)
        storage, is_there, rank = self._require_storage(), False, self._world.rank
        if rank == 0:
            self.finish()
            with contextlib.suppress(Exception):  # each kind of store has errors of its own; a save tries again
                is_there = bool(storage.complete_in(manifest.name_of(made)))
        is_there = self._world.gather(is_there, "saving a checkpoint")[0]
        self.saved_before = made if is_there else None
        if is_there:
            return
        self.made = -1
        if able and made == step:
            self.begin_save(state, step)
            self.saved_before = step
        elif rank == 0 and (made == step or not self.due(made)):
            _log.warning("The checkpoint of step %d was lost with the worker that wrote it: save it again.", made)

    def finish(self) -> None:
        """Wait for the background save. Raises CheckpointError if the save failed. Raised on rank 0 only."""
        self._raise_if_writer(self._background.finish)

    def _raise_if_writer(self, check: Callable[[], None]) -> None:
        """Raise the error of a save on rank 0 only.

        A worker that was dropped during a save and joined again may have another rank, and then no longer writes.
        """
        try:
            check()
        except CheckpointError as error:
            if self._world.rank == 0:
                raise
            _log.warning("%s Another worker writes checkpoints now.", error)

    def _writer(self, storage: Storage) -> Writer:
        """Return the identity of this worker as a writer in this generation."""
        if self.launch is None:
            self.launch = storage.next_launch()
        return Writer(self.launch, self._world.generation, self._token)

    def _save_of(self, storage: Storage, step: int) -> Save:
        generation = self._world.generation
        if self._absent[0] != generation:
            self._absent = generation, set()
        changed = lambda: self._world.alarmed or self._world.generation != generation  # noqa: E731
        return Save(storage, manifest.name_of(step), self._key, changed, self._absent[1])

    def _write_part(self, storage: Storage, snapshot: Snapshot) -> None:
        """Write a copy of this rank's shard in the background. If that fails, rank 0 writes the shard."""
        rank, divided = self._world.rank, parts.divide(snapshot.tensors, self._world.size)
        if self.launch is None or rank >= len(divided):
            return
        tensors = {name: snapshot.tensors[name] for name in divided[rank]}
        copy = self._buffers.copy(replace(snapshot, tensors=tensors))
        about, writer = self._save_of(storage, snapshot.step), (self.launch, self._world.generation)

        def write() -> None:
            begin = time.perf_counter()
            try:
                part = parts.write(about, writer, rank, copy.tensors)
            except Exception as error:  # noqa: BLE001 - each kind of store has errors of its own
                _log.info("rank %d could not write its part of %s: %s", rank, about.step, files.reason_of(error))
            else:
                if part is not None:
                    seconds = time.perf_counter() - begin
                    self._events.mark("checkpoint-part", step=snapshot.step, bytes=part.size, seconds=seconds)

        self._background.start(write)

    def _write(self, storage: Storage, snapshot: Snapshot, writer: Writer, begin: float, stall: float | None) -> None:
        """Write a checkpoint, record it, and remove old ones. ``stall`` is None if training waits for the write."""
        name = manifest.name_of(snapshot.step)
        fields = {"step": snapshot.step, "path": str(storage.location(name)), "bytes": snapshot.bytes}
        try:
            about, workers = self._save_of(storage, snapshot.step), self._world.size if self._divided else 1
            location = save.save(about, snapshot, writer, self._settings.retry_seconds, workers)
        except CheckpointError as error:
            self._events.mark("checkpoint-failed", **fields, reason=str(error))
            if isinstance(error, FencedError) and error.replaced:  # this worker was dropped, and will learn of it
                _log.warning("The checkpoint of step %d was given up: %s", snapshot.step, error)
                return
            raise
        self.last = location, snapshot.step
        save.retain(storage, snapshot.step, writer, self._settings.keep, self._settings.keep_hours)
        seconds = time.perf_counter() - begin
        stall = seconds if stall is None else stall
        self._events.mark("checkpoint", **fields, stall=stall, seconds=seconds)
        self._measured = stall, seconds

    def _update_interval(self) -> None:
        measured, self._measured = self._measured, None
        if measured is None:
            return
        self._interval.add_save(*measured)
        if (decision := self._interval.decision()) is not None:
            _log.info(decision["text"])
            self._events.mark("checkpoint-interval", **decision)

    def _require_storage(self) -> Storage:
        if self._storage is None:
            raise CheckpointError(
                "There is no directory for checkpoints: set checkpoint.directory or .every, or start with paceline run."
            )
        return self._storage

    def resume(self, state: TrainingState, source: str | None) -> int:
        """Load the checkpoint that ``source`` names, and return its step. Return 0 for a fresh start.

        All workers load the same checkpoint. With ``auto`` it is the newest that every worker can read.

        Raises:
            CheckpointError: the checkpoint cannot be used, or ``source`` is None and the directory holds checkpoints.
        """
        self.made, self.saved_before = -1, None
        self.finish()
        join_all()  # another session of this process may still be writing the checkpoint
        seconds = self._settings.retry_seconds
        if (storage := self._storage) is not None:
            new = secrets.token_hex(8)
            self.launch, new = ask(self._world, lambda _: (storage.next_launch(), new), storage.location(), seconds)
            state.run = state.run or new
        if source == "auto":
            assert storage is not None
            return self._resume_newest(state, storage)
        there = [] if storage is None else complete(self._world, storage, seconds)
        if source is None:
            self._refuse_leftovers(there)
            return 0
        location, content = read_named(self._world, source, self._check(state), seconds, state.shares)
        self._refuse_later(location, there)
        return self._restore(state, location, content)

    def _resume_newest(self, state: TrainingState, storage: Storage) -> int:
        seconds = self._settings.retry_seconds
        search = read_newest(self._world, storage, self._check(state), seconds, state.shares)
        skipped = [*search.missing.values(), *search.damaged.values()]
        if search.location is not None and search.content is not None:
            location, saved = search.location, search.content.manifest
            refusal = ask(self._world, lambda _: two_runs(storage, location, saved), storage.location(), seconds)
            if refusal:
                raise CheckpointError(refusal)
            self._set_aside(storage, search)
            return self._restore(state, search.location, search.content)
        if skipped:
            raise CheckpointError(
                f"No checkpoint in {storage.location()} can be used. {' '.join(skipped)} "
                f"Remove them to start from the beginning."
            )
        _log.info("resume: no checkpoint in %s yet, starting from the beginning", storage.location())
        return 0

    def _check(self, state: TrainingState) -> Check:
        """Return a function that raises if a manifest lacks a required signature or does not fit this run."""

        def check(location: Path | str, saved: Manifest) -> None:
            saved.check_signature(self._key, location)
            state.check(location, saved)

        return check

    def _restore(self, state: TrainingState, location: Path | str, content: Content) -> int:
        step = state.restore(location, content)
        self.last, self.made = (location, step), step
        self._interval.reset(step)
        _log.info("resumed from %s at step %d", location, step)
        self._events.mark("resume", step=step, path=str(location))
        return step

    def _set_aside(self, storage: Storage, search: Search) -> None:
        """Report the checkpoints that were skipped, and rename damaged ones. Only rank 0 does this."""
        if self._world.rank != 0:
            return
        for path, reason in search.missing.items():
            _log.warning("%s Passed over it; it stays where it is.", reason)
            self._events.mark("checkpoint-damaged", path=path, reason=reason, now=path)
        for name, reason in search.damaged.items():
            try:
                now = storage.set_aside(name)
                _log.warning("%s Skipped it, and renamed it to %s.", reason, now)
            except Exception as error:  # noqa: BLE001 - a damaged checkpoint under its old name is harmless
                now = storage.location(name)
                _log.warning("%s Skipped it; it cannot be renamed: %s.", reason, files.reason_of(error))
            self._events.mark("checkpoint-damaged", path=str(storage.location(name)), reason=reason, now=str(now))

    def _refuse_later(self, location: Path | str, there: list[str]) -> None:
        """Raise CheckpointError if the directory has a later step than ``location``, because histories would mix."""
        for name in there:
            if self._storage is not None and locations.same(location, self._storage.location(name)):
                newest, this = split(there[0])[0], split(name)[0]
                if newest != this:
                    raise CheckpointError(
                        f"The checkpoint folder holds {newest}, later than {this}, from which this run would resume. "
                        f"Choose another checkpoint.directory, or remove the later ones."
                    )

    def _refuse_leftovers(self, there: list[str]) -> None:
        """Raise CheckpointError if the directory holds checkpoints. All workers check before any of them writes."""
        if there and self._storage is not None:
            raise CheckpointError(
                f"The checkpoint folder already holds {self._storage.location(there[0])} of an earlier run. Set "
                f"resume='auto' to resume from it, or choose another checkpoint.directory."
            )


def key_in(path: Path) -> bytes:
    if (found := secret.read(path)) is None:
        raise ConfigError(f"checkpoint.key_file = {str(path)!r}: there is no such file.")
    return found.key("checkpoint")
