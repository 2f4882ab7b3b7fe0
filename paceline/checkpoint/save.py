"""Write of a checkpoint, and removal of old checkpoints once it is complete."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import files, parts
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.encoding import PREFIX
from paceline.checkpoint.parts import Save
from paceline.checkpoint.storage.base import Storage, Writer, split, writer_of
from paceline.checkpoint.storage.retry import Retries, is_storage_error, may_pass
from paceline.checkpoint.tensors import each, hash_of
from paceline.checkpoint.training_state import Snapshot
from paceline.errors import CheckpointError, WorkerLost
from paceline.system import fault_points

_log = logging.getLogger("paceline")
_OF_CALLS = "evaluations", "once", "maps"


def save(about: Save, snapshot: Snapshot, writer: Writer, retry_seconds: float, workers: int = 1) -> Path | str:
    """Write a checkpoint. Rank 0 calls this.

    Args:
        workers: number of workers that write shards. Defaults to 1: this worker writes all tensors.

    Returns:
        the location of the checkpoint. An existing checkpoint of the same state is kept and not written again.

    Raises:
        FencedError: another worker writes checkpoints now.
        CheckpointError: the checkpoint could not be written. Earlier checkpoints are untouched.
        WorkerLost: a worker was lost before it had sent its share of the state.
    """
    storage, step, key, retries = about.storage, about.step, about.key, Retries(retry_seconds)
    hashes: dict[str, str] = {}
    while True:
        try:
            if not _exists(storage, step, writer, snapshot, hashes, key):
                _write(about, writer, snapshot, hashes, workers)
            return storage.location(step)
        except (CheckpointError, WorkerLost):
            _abandon(storage, step, writer)
            raise
        except Exception as error:  # each kind of store has errors of its own
            _abandon(storage, step, writer)
            _check_fence(storage, writer)
            if not (may_pass(error) and retries.left()):
                raise _failed(storage, step, error, retries) from error
            retries.wait(f"{storage.location(step)} cannot be written: {files.reason_of(error)}")


def _write(about: Save, writer: Writer, snapshot: Snapshot, hashes: dict[str, str], workers: int) -> None:
    storage, step = about.storage, about.step
    storage.begin(step, writer, snapshot.bytes)
    written = parts.write_all(about, writer, snapshot.tensors, hashes, workers)
    index = files.write_index(partial(storage.create, step, writer), snapshot.tensors, written)
    fault_points.reach("inside a save", snapshot.step)
    manifest = snapshot.manifest(written, index).signed(about.key)
    storage.commit(step, writer, manifest.to_json(), manifest.files)


def retain(storage: Storage, newest: int, writer: Writer, keep: int, keep_hours: float | None) -> None:
    """Remove all but the newest ``keep`` checkpoints, and those older than ``keep_hours``. The newest always stays."""
    try:
        earlier: dict[str, list[str]] = {}
        for name in storage.complete():
            step = split(name)[0]
            if manifests.step_of(step) < newest:
                earlier.setdefault(step, []).append(name)
        for index, names in enumerate(earlier.values(), 1):
            if index >= keep or (keep_hours is not None and _hours(storage, names[0]) > keep_hours):
                for name in names:
                    if writer.may_remove(writer_of(name)):
                        storage.remove(name)
    except Exception as error:  # noqa: BLE001 - an extra checkpoint must not end a run
        _log.warning("Old checkpoints in %s could not be removed: %s", storage.location(), files.reason_of(error))


def _hours(storage: Storage, name: str) -> float:
    """Return the age of a checkpoint in hours, or 0 if it is unknown."""
    try:
        return (time.time() - manifests.parse(storage.manifest(name), storage.location(name)).time) / 3600
    except (CheckpointError, ValueError):
        return 0.0


def _exists(
    storage: Storage, step: str, writer: Writer, snapshot: Snapshot, hashes: dict[str, str], key: bytes | None
) -> bool:
    """Return whether this state is saved already. Sets damaged checkpoints of this step aside."""
    for name in storage.complete_in(step):
        try:
            existing = manifests.parse(storage.manifest(name), storage.location(name))
            existing.check_signature(key, storage.location(name))
        except Exception as error:
            if is_storage_error(error):
                raise
            storage.set_aside(name)
            continue
        hashes.update({name: hash_of(value).hex() for name, value in each(snapshot.tensors) if name not in hashes})
        if _at_step(existing.state, existing.hashes) == _at_step(snapshot.state, hashes):
            return True
        other = writer_of(name)
        if other is not None and not other.is_before(writer):
            storage.check_fence(writer)
            raise CheckpointError(
                f"{storage.location(name)} holds another state of step {snapshot.step}, from another session or run. "
                f"Give each its own checkpoint.directory."
            )
    return False


def _at_step(state: Any, hashes: Mapping[str, str]) -> Any:
    """Return a state without the results of calls of the script, which may be added after the step.

    Values are compared as text, in which a NaN, such as the loss of a skipped step, equals itself.
    """
    script = {name: value for name, value in state.get("script", {}).items() if name not in _OF_CALLS}
    named = {name: value for name, value in hashes.items() if not name.startswith(PREFIX)}
    return named, json.dumps(_hashed({**state, "script": script}, hashes), sort_keys=True)


def _hashed(value: Any, hashes: Mapping[str, str]) -> Any:
    """Return an encoded value with the hash of each tensor in place of its name, which counts the tensors before it."""
    if isinstance(value, list):
        return [_hashed(one, hashes) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tensor"}:
        return {"$tensor": hashes.get(value["$tensor"])}
    return {key: _hashed(one, hashes) for key, one in value.items()}


def _abandon(storage: Storage, step: str, writer: Writer) -> None:
    try:
        storage.abandon(step, writer)
    except Exception as error:  # noqa: BLE001 - the first error is the one to report
        where = storage.location(step)
        _log.warning("The partial checkpoint %s could not be removed: %s", where, files.reason_of(error))


def _check_fence(storage: Storage, writer: Writer) -> None:
    """Raise FencedError if another writer has taken over, which may be the cause of an error."""
    try:
        storage.check_fence(writer)
    except CheckpointError:
        raise
    except Exception:  # noqa: BLE001 - the first error is the one to report
        return


def _failed(storage: Storage, step: str, error: Exception, retries: Retries) -> CheckpointError:
    reason = files.reason_of(error)
    kept = ""
    try:
        before = storage.complete()
        kept = (
            f"The last good one is {storage.location(split(before[0])[0])}. " if before else "There is no earlier one. "
        )
    except Exception as second:  # noqa: BLE001 - the first error is the one to report
        _log.warning("%s cannot be listed: %s", storage.location(), files.reason_of(second))
    return CheckpointError(
        f"The checkpoint of step {manifests.step_of(step)} could not be written to {storage.location()}: "
        f"{reason}{retries.duration(error)}. {kept}Free some space or choose another folder with checkpoint.directory."
    )
