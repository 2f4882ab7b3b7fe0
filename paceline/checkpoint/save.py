"""Writing one checkpoint, and removing those that are to go: only after the new one is in its place."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from paceline import fault_points
from paceline.checkpoint import files
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError

_log = logging.getLogger("paceline")


def save(storage: Storage, snapshot: Snapshot) -> Path | str:
    """Write a checkpoint; called by one worker.

    Args:
        storage: where the checkpoints of the run are.
        snapshot: the state.

    Returns:
        where the checkpoint is; one of the same state that is there already is left as it is.

    Raises:
        CheckpointError: it could not be written; the checkpoints before are untouched.
    """
    name = manifests.name_of(snapshot.step)
    manifest = snapshot.manifest()
    try:
        if _is_there(storage, name, manifest):
            return storage.location(name)
        writer = storage.begin(name, snapshot.bytes)
        files.write(writer, {**snapshot.tensors, files.EXTRA: snapshot.extra})
        fault_points.reach("inside a save", snapshot.step)
        storage.commit(name, manifest.to_json())
    except CheckpointError:
        raise
    except Exception as error:  # each kind of store has errors of its own
        raise _failed(storage, name, error) from error
    return storage.location(name)


def retain(storage: Storage, newest: str, keep: int, keep_hours: float | None) -> None:
    """Remove checkpoints before the newest one: all but ``keep``, and those that are too old. The newest stays."""
    try:
        earlier = [name for name in storage.complete() if manifests.step_of(name) < manifests.step_of(newest)]
        for place, name in enumerate(earlier, 1):
            if place >= keep or (keep_hours is not None and _hours(storage, name) > keep_hours):
                storage.remove(name)
    except Exception as error:  # noqa: BLE001 - a checkpoint too many is no reason to end a run
        _log.warning("Old checkpoints in %s could not be removed: %s", storage.location(), files.reason_of(error))


def _hours(storage: Storage, name: str) -> float:
    """How long ago the state was taken; 0 for one that does not tell."""
    try:
        return (time.time() - manifests.parse(storage.manifest(name), storage.location(name)).time) / 3600
    except CheckpointError:
        return 0.0


def _is_there(storage: Storage, name: str, manifest: Manifest) -> bool:
    """Whether this state is saved already; what is damaged under its name is set aside."""
    if name not in storage.complete():
        return False
    try:
        there = manifests.parse(storage.manifest(name), storage.location(name))
    except DamagedError:
        storage.set_aside(name)
        return False
    if (there.fingerprint, there.extra) != (manifest.fingerprint, manifest.extra):
        raise CheckpointError(
            f"{storage.location(name)} holds another state of step {manifest.step}, from another session or run. "
            f"Give each its own checkpoint.directory."
        )
    return True


def _failed(storage: Storage, name: str, error: Exception) -> CheckpointError:
    reason = files.reason_of(error)
    kept = ""
    try:
        storage.abandon(name)
        before = storage.complete()
        kept = f"The last good one is {storage.location(before[0])}. " if before else "There is no earlier one. "
    except Exception as second:  # noqa: BLE001 - the first error is the one to tell
        _log.warning("What was written of %s could not be removed: %s", storage.location(name), second)
    return CheckpointError(
        f"The checkpoint of step {manifests.step_of(name)} could not be written to {storage.location()}: {reason}. "
        f"{kept}Free some space or choose another folder with checkpoint.directory."
    )
