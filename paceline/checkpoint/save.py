"""Writing a checkpoint: into a new directory, the manifest last, then one rename.

A kill at any moment leaves the checkpoints before untouched, and at most a hidden directory that the next save removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.files import EXTRA, as_tensor, reason_of, write
from paceline.checkpoint.manifest import Manifest
from paceline.errors import CheckpointError

_PARTIAL = ".partial-"


def save(folder: Path, manifest: Manifest, state: Mapping[str, torch.Tensor], extra: Any, keep: int) -> Path:
    """Write a checkpoint; called by one worker.

    Args:
        folder: where the checkpoints of the run are.
        manifest: what is written.
        state: the tensors by name.
        extra: anything else that can be pickled (schedule, parameter groups).
        keep: how many of the newest checkpoints stay.

    Returns:
        the directory of the checkpoint; one of the same state that is there already is left as it is.

    Raises:
        CheckpointError: it could not be written; the checkpoints before are untouched.
    """
    final = folder / manifests.name_of(manifest.step)
    if (final / manifests.FILE).exists():
        _check_same(final, manifest)
        return final
    partial = folder / f"{_PARTIAL}{final.name}"
    try:
        _remove_partial(folder)
        partial.mkdir(parents=True)
        _check_space(folder, state)
        write(partial, {**state, EXTRA: as_tensor(extra)})
        _write_synced(partial / manifests.FILE, manifest.to_json())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _write_latest(folder, final.name)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _failed(folder, manifest.step, error) from error
    earlier = [path for path in manifests.complete(folder) if manifests.step_of(path) < manifest.step]
    for old in earlier[keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _check_same(there: Path, manifest: Manifest) -> None:
    if manifests.read(there).fingerprint != manifest.fingerprint:
        raise CheckpointError(
            f"{there} holds another state of step {manifest.step}, from another session or run. "
            f"Give each its own checkpoint.directory."
        )


def _check_space(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"No space left on device: {needed:,} bytes are needed, {free:,} are free")


def _failed(folder: Path, step: int, error: BaseException) -> CheckpointError:
    before = manifests.complete(folder)
    kept = f"The last good one is {before[0]}." if before else "There is no earlier one."
    reason = reason_of(error)
    return CheckpointError(
        f"The checkpoint of step {step} could not be written to {folder}: {reason}. {kept} "
        f"Free some space or choose another folder with checkpoint.directory."
    )


def _remove_partial(folder: Path) -> None:
    for left in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _write_latest(folder: Path, name: str) -> None:
    beside = folder / ".latest"
    _write_synced(beside, name + "\n")
    beside.replace(folder / "latest")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
