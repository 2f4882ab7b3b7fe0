"""Settings stored in checkpoints, so that settings from outside of the script need not be repeated on resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import config
from paceline.adapters.trackers.tracking import script
from paceline.checkpoint import files, load
from paceline.checkpoint.checkpointer import key_in
from paceline.checkpoint.load import MissingError
from paceline.checkpoint.manifest import DamagedError, Manifest, name_of
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.retry import MISSING_SECONDS, Retries, may_pass
from paceline.config import Resolved
from paceline.environments import env
from paceline.errors import CheckpointError
from paceline.settings import Settings

_log = logging.getLogger("paceline")
PART = "settings"  # name under which the settings are stored in the state
_Saved = dict[str, list[object]]  # stored settings by dotted key: the value, and whether the script has set it
_NOTHING: tuple[int, _Saved] = 0, {}


@dataclass(frozen=True)
class SavedSettings:
    """Stored settings as a stateful object of a checkpoint."""

    values: _Saved

    def state(self, _step: int) -> _Saved:
        """Return the settings, which are equal after every step."""
        return self.values

    def load(self, state: object) -> None:
        """Do nothing, because :func:`resolve` has already read the settings."""


def folder(settings: Settings, run: Path | None, number: int) -> Path | None:
    """Return the directory for checkpoints if ``checkpoint.directory`` is not set, or None to save nothing.

    Args:
        run: run directory, if there is one. Otherwise the default is checkpoints/<script>.
    """
    suffix = "" if number == 1 else f"-{number}"
    if run is not None:
        return run / f"checkpoints{suffix}"
    wanted = settings.checkpoint.every is not None or settings.resume == "auto"
    return Path("checkpoints") / f"{script().stem}{suffix}" if wanted and not env.is_rehearsal() else None


def resolve(given: Mapping[str, Any], run: Path | None, number: int, rank: int) -> Resolved:
    """Resolve the settings of this process, including those stored in the checkpoint to resume from.

    Rank 0 logs which settings come from the checkpoint and which differ from it.

    Args:
        run, number: as for :func:`folder`.

    Raises:
        ConfigError: a setting is invalid.
        CheckpointError: the storage fails for longer than ``checkpoint.retry_seconds``.
    """
    resolved = config.resolve_here(given)
    notes = []
    if resolved.settings.resume is not None and not env.starts_anew():
        step, saved = _find(resolved.settings, folder(resolved.settings, run, number))
        resolved = config.resolve_here(given, config.outside(saved))
        notes = _notes(step, saved, resolved)
    settings = resolved.settings
    if run is None and settings.checkpoint.directory is None and (place := folder(settings, run, number)) is not None:
        notes.append(f"checkpoints go to {place}: checkpoint.directory is not set")
    for note in notes if rank == 0 else ():
        _log.warning(note)
    return resolved


def _notes(step: int, saved: _Saved, now: Resolved) -> list[str]:
    name, values = name_of(step), config.flat(now.settings)
    taken = [f"{key} = {config.shown(value)}" for key, value in values.items() if now.sources[key] == "checkpoint"]
    changed = config.changes(saved, now) if saved else []
    return [
        *([f"resume: settings as in {name}: {', '.join(taken)}"] if taken else []),
        *([f"resume: settings differ from {name}: {', '.join(changed)}"] if changed else []),
    ]


def _find(settings: Settings, folder: Path | None) -> tuple[int, _Saved]:
    """Return the step and the settings of the checkpoint to resume from, or ``_NOTHING`` if it is unusable.

    Errors of an unusable checkpoint are reported later, when it is loaded.
    """
    where = settings.resume if settings.resume != "auto" else settings.checkpoint.directory or folder
    assert where is not None
    retries = Retries(settings.checkpoint.retry_seconds)
    while True:
        try:
            return _read(settings, where)
        except MissingError as error:  # removed after it was listed, because a newer one exists
            if settings.resume != "auto" or retries.elapsed > min(MISSING_SECONDS, settings.checkpoint.retry_seconds):
                return _NOTHING
            retries.wait(str(error))
        except DamagedError:
            return _NOTHING
        except Exception as error:
            if not may_pass(error):
                return _NOTHING
            reason = f"{where} cannot be read: {files.reason_of(error)}{retries.duration(error)}"
            if not retries.left():
                raise CheckpointError(f"{reason}. All checkpoints stay.") from error
            retries.wait(reason)


def _read(settings: Settings, where: Path | str) -> tuple[int, _Saved]:
    key = None if settings.checkpoint.key_file is None else key_in(settings.checkpoint.key_file)
    if settings.resume != "auto":
        location = load.find(str(where))
        return _saved_in(load.read_manifest(location), key, location)
    storage = locations.storage_at(where)
    for name in storage.complete():
        location = storage.location(name)
        try:
            return _saved_in(load.read_manifest(location), key, location)
        except DamagedError:
            continue
    return _NOTHING


def _saved_in(manifest: Manifest, key: bytes | None, where: object) -> tuple[int, _Saved]:
    """Check the signature of an untrusted manifest, and return its step and settings."""
    manifest.check_signature(key, where)
    found = manifest.state
    for name in ("parts", PART):
        found = found.get(name) if isinstance(found, dict) else None
    pairs = found.items() if isinstance(found, dict) else ()
    return manifest.step, {name: pair for name, pair in pairs if isinstance(pair, list) and len(pair) == 2}
