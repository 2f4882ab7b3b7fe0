"""Reading of a checkpoint by any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint import files
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.retry import is_storage_error
from paceline.errors import CheckpointError


class MissingError(CheckpointError):
    """Raised if a file of a checkpoint does not exist: it is not visible yet, or was removed."""


@dataclass(frozen=True)
class Content:
    """Checkpoint in memory: manifest and tensors by name, either all tensors or those in the files of a reader."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reader:
    """Reader ``number`` of the ``of`` workers that divide the files of a checkpoint. Defaults to reading all."""

    number: int = 0
    of: int = 1

    def files_of(self, manifest: Manifest) -> list[str]:
        """Return every ``of``-th file. Files have about the same size, as their writers divided the state evenly."""
        return sorted(manifest.files)[self.number :: self.of]


def find(resume: str) -> Path | str:
    """Return the location of the checkpoint that ``resume`` names, or of the newest checkpoint in that folder."""
    named = locations.storage_at(resume)
    parent, step = locations.split(resume)
    if manifests.step_of(step) >= 0:
        storage = locations.storage_at(parent)
        return storage.location(next(iter(storage.complete_in(step)), step))
    return named.location(next(iter(named.complete()), ""))


def read(location: Path | str, check: Callable[[Path | str, Manifest], None], reader: Reader | None = None) -> Content:
    """Read a checkpoint, or the files of one reader.

    Args:
        check: function that is called with location and manifest before the tensors are read, and may raise.
        reader: reader whose files to read. Defaults to all files.

    Raises:
        DamagedError: the content is not what was written.
        MissingError: a file does not exist.
        CheckpointError: ``check`` refused the checkpoint.
        OSError, or an error of the store's client: the storage failed.
    """
    manifest = read_manifest(location)
    check(location, manifest)
    parent, name = locations.split(location)
    storage = locations.storage_at(parent)
    try:
        tensors = files.read(partial(storage.open, name), manifest, (reader or Reader()).files_of(manifest))
    except FileNotFoundError as error:
        raise MissingError(f"{location} is not complete: a file is not there: {files.reason_of(error)}.") from error
    except Exception as error:
        if is_storage_error(error):
            raise
        raise DamagedError(f"{location} is damaged and cannot be read: {files.reason_of(error)}.") from error
    return Content(manifest, tensors)


def read_manifest(location: Path | str) -> Manifest:
    """Read the manifest of a checkpoint. Raises as :func:`read` does."""
    parent, name = locations.split(location)
    try:
        text = locations.storage_at(parent).manifest(name)
    except FileNotFoundError as error:
        raise MissingError(
            f"{location} is not a complete checkpoint: it has no {manifests.FILE}. Give the path of a "
            f"checkpoint, as runs/<name>/checkpoints/step-000100, or 'auto' for the newest."
        ) from error
    except Exception as error:
        if is_storage_error(error):
            raise
        reason = files.reason_of(error)
        raise DamagedError(f"{location} is damaged: {manifests.FILE}: {reason}.") from error
    manifest = manifests.parse(text, f"{location}/{manifests.FILE}")
    if manifests.step_of(name.partition("/")[0]) not in (-1, manifest.step):
        raise DamagedError(f"{location} is damaged: its manifest is that of step {manifest.step}.")
    return manifest


def check_model(manifest: Manifest, model: nn.Module, where: Path | str) -> None:
    """Raise CheckpointError if a checkpoint is of another model."""
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
