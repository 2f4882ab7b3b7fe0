"""Write a checkpoint, and remove old ones once it is complete."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline import fault_points
from paceline.checkpoint import files
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.training_state import Snapshot
from paceline.errors import CheckpointError

_log = logging.getLogger("paceline")


def save(storage: Storage, snapshot: Snapshot) -> Path | str:
    """Write a checkpoint; one worker calls this.

    Args:
        storage: of the run.
        snapshot: the state.

    Returns:
        the location of the checkpoint. An existing one of the same state is left as it is.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    name = manifests.name_of(snapshot.step)
    manifest = snapshot.manifest()
    try:
        if _exists(storage, name, manifest):
            return storage.location(name)
        storage.begin(name, snapshot.bytes)
        written = files.write(partial(storage.create, name), snapshot.tensors)
        fault_points.reach("inside a save", snapshot.step)
        storage.commit(name, replace(manifest, files=written.files, offsets=written.offsets).to_json())
    except CheckpointError:
        raise
    except Exception as error:  # each kind of store has errors of its own
        raise _failed(storage, name, error) from error
    return storage.location(name)


def retain(storage: Storage, newest: str, keep: int, keep_hours: float | None) -> None:
    """Remove all checkpoints but the newest ``keep``, and of these the old ones. The newest stays in any case."""
    try:
        earlier = [name for name in storage.complete() if manifests.step_of(name) < manifests.step_of(newest)]
        for index, name in enumerate(earlier, 1):
            if index >= keep or (keep_hours is not None and _hours(storage, name) > keep_hours):
                storage.remove(name)
    except Exception as error:  # noqa: BLE001 - an extra checkpoint is no reason to end a run
        _log.warning("Old checkpoints in %s could not be removed: %s", storage.location(), files.reason_of(error))


def _hours(storage: Storage, name: str) -> float:
    """The age of a checkpoint; 0 if it is unknown."""
    try:
        return (time.time() - manifests.parse(storage.manifest(name), storage.location(name)).time) / 3600
    except CheckpointError:
        return 0.0


def _exists(storage: Storage, name: str, manifest: Manifest) -> bool:
    """Whether this state is saved already. Sets a damaged checkpoint of this name aside."""
    if name not in storage.complete():
        return False
    try:
        existing = manifests.parse(storage.manifest(name), storage.location(name))
    except DamagedError:
        storage.set_aside(name)
        return False
    if (existing.fingerprint, existing.state) != (manifest.fingerprint, manifest.state):
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
    except Exception as second:  # noqa: BLE001 - the first error is the one to report
        _log.warning("The partial checkpoint %s could not be removed: %s", storage.location(name), second)
    return CheckpointError(
        f"The checkpoint of step {manifests.step_of(name)} could not be written to {storage.location()}: {reason}. "
        f"{kept}Free some space or choose another folder with checkpoint.directory."
    )
