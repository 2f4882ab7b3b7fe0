"""Reading a checkpoint, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoint import files
from paceline.checkpoint.manifest import Manifest, complete
from paceline.checkpoint.state import fingerprint
from paceline.errors import CheckpointError


def find(resume: str, folder: Path | None) -> Path | None:
    """The checkpoint that ``resume`` names: a path, or the newest one in the folder for ``auto``.

    Raises:
        CheckpointError: the path is no complete checkpoint, or there is no folder to look in.
    """
    if resume != "auto":
        path = Path(resume)
        inside = complete(path)
        return inside[0] if inside else path
    if folder is None:
        raise CheckpointError("resume='auto' needs to know where checkpoints are: set checkpoint.directory.")
    newest = complete(folder)
    return newest[0] if newest else None


def check_model(manifest: Manifest, model: nn.Module, where: Path) -> None:
    """Refuse the checkpoint of another model.

    Raises:
        CheckpointError: names the first tensor that is missing, unknown or of another shape.
    """
    here: dict[str, torch.Tensor] = {f"parameter/{name}": value for name, value in model.named_parameters()}
    here.update({f"buffer/{name}": value for name, value in model.named_buffers()})
    saved = {name: entry for name, entry in manifest.tensors.items() if not name.startswith("optimizer/")}
    for name, tensor in here.items():
        if name not in saved:
            raise CheckpointError(f"{where} is of another model: it has no {_words(name)}.")
        kind = [str(tensor.dtype), list(tensor.shape)]
        if saved[name] != kind:
            raise CheckpointError(
                f"{where} is of another model: its {_words(name)} is {saved[name][0]} {saved[name][1]}, "
                f"the model's is {kind[0]} {kind[1]}."
            )
    for name in saved:
        if name not in here:
            raise CheckpointError(f"{where} is of another model: the model has no {_words(name)}.")


def load(directory: Path, manifest: Manifest) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors by name, and what else was saved.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    try:
        state = files.read(directory, [*manifest.tensors, files.EXTRA])
        extra = files.from_tensor(state.pop(files.EXTRA))
    except (Exception, CheckpointException) as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{directory} is damaged and cannot be read: {files.reason_of(error)}.") from error
    if fingerprint(state) != manifest.fingerprint:
        raise CheckpointError(f"{directory} is damaged: its tensors do not have the hash in its manifest.")
    return state, extra


def _words(name: str) -> str:
    kind, _, rest = name.partition("/")
    return f"{kind} {rest!r}"
