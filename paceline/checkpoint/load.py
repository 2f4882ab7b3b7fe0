"""Read a checkpoint, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint import files, locations
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tensors import fingerprint
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Content:
    """A checkpoint in memory: the manifest, and the tensors by name."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def find(resume: str, storage: Storage | None) -> list[Path | str]:
    """The checkpoints that ``resume`` names: one, or for ``auto`` all in the storage, the newest first.

    Raises:
        CheckpointError: there is no storage, or it cannot be listed.
    """
    if resume == "auto":
        if storage is None:
            raise CheckpointError("resume='auto' needs a directory with checkpoints: set checkpoint.directory.")
        return [storage.location(name) for name in complete(storage)]
    named = locations.storage_at(resume)
    names = complete(named)
    return [named.location(names[0]) if names else named.location()]


def complete(storage: Storage) -> list[str]:
    """The names of the complete checkpoints in a storage, the newest first.

    Raises:
        CheckpointError: it cannot be listed.
    """
    try:
        return storage.complete()
    except Exception as error:  # each kind of store has errors of its own
        raise CheckpointError(f"{storage.location()} cannot be listed: {files.reason_of(error)}.") from error


def read(location: Path | str, check: Callable[[Path | str, Manifest], None]) -> Content:
    """Read a checkpoint.

    Args:
        location: its path or URL.
        check: is called with the manifest before the rest is read, and may raise.

    Raises:
        DamagedError: it is incomplete, or not what was written.
        CheckpointError: it was refused.
    """
    parent, name = locations.split(location)
    storage = locations.storage_at(parent)
    try:
        text = storage.manifest(name)
    except UnicodeDecodeError as error:
        raise DamagedError(f"{location}/{manifests.FILE} is damaged: {error}.") from None
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            raise DamagedError(
                f"{location} is not a complete checkpoint: it has no {manifests.FILE}. Give the path of a "
                f"checkpoint, as runs/<name>/checkpoints/step-100, or 'auto' for the newest."
            ) from error
        reason = files.reason_of(error)
        raise DamagedError(f"{location} is not a complete checkpoint: {manifests.FILE}: {reason}.") from error
    manifest = manifests.parse(text, f"{location}/{manifests.FILE}")
    if manifests.step_of(name) not in (-1, manifest.step):
        raise DamagedError(f"{location} is damaged: its manifest is that of step {manifest.step}.")
    check(location, manifest)
    try:
        tensors = files.read(partial(storage.open, name), manifest)
    except Exception as error:
        raise DamagedError(f"{location} is damaged and cannot be read: {files.reason_of(error)}.") from error
    if fingerprint(tensors) != manifest.fingerprint:
        raise DamagedError(f"{location} is damaged: its content does not match the hashes in its manifest.")
    return Content(manifest, tensors)


def check_model(manifest: Manifest, model: nn.Module, where: Path | str) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: names the first tensor that is missing, unknown or of another shape.
    """
    here: dict[str, torch.Tensor] = {f"parameter/{name}": value for name, value in model.named_parameters()}
    here.update({f"buffer/{name}": value for name, value in model.named_buffers()})
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(("parameter/", "buffer/"))}
    for name, tensor in here.items():
        if name not in saved:
            raise CheckpointError(f"{where} is of another model: it has no {_quoted(name)}.")
        kind = str(tensor.dtype), list(tensor.shape)
        if saved[name] != kind:
            raise CheckpointError(
                f"{where} is of another model: its {_quoted(name)} is {saved[name][0]} {saved[name][1]}, "
                f"the model's is {kind[0]} {kind[1]}."
            )
    for name in saved:
        if name not in here:
            raise CheckpointError(f"{where} is of another model: the model has no {_quoted(name)}.")


def _quoted(name: str) -> str:
    kind, _, rest = name.partition("/")
    return f"{kind} {rest!r}"
