"""Files of weights, with the format by suffix: safetensors, or a state_dict written by ``torch.save``.

A file is written under a temporary name in the same folder and renamed, so a reader finds either the whole new file or
the old one. For a URL, the file is written to a local disk first and uploaded in one put.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.files import reason_of
from paceline.checkpoint.storage.locations import is_url, place
from paceline.errors import CheckpointError, ConfigError

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth", ".bin")


def check_suffix(path: Path | str) -> None:
    """Raise ConfigError if the suffix of a path is not that of a weights format."""
    if os.path.splitext(str(path))[1] not in (SAFETENSORS, *TORCH):
        raise ConfigError(
            f"{str(path)!r} cannot be a file of weights: its name must end in .safetensors, or in .pt, .pth or .bin "
            f"for a state_dict written by torch.save."
        )


def check_package(path: Path | str) -> None:
    """Raise CheckpointError if the package for the format of a file is not installed."""
    if str(path).endswith(SAFETENSORS) and find_spec("safetensors") is None:
        raise CheckpointError(
            f"{path} needs the package safetensors: pip install 'paceline[safetensors]', or use a .pt file."
        )


def write(path: Path | str, weights: Mapping[str, Any]) -> Path | str:
    """Write weights to a file, atomically.

    Args:
        path: path, or URL that fsspec supports. The suffix chooses the format.
        weights: tensors on the host by name. A torch file may hold other values too.

    Returns:
        the absolute path, or the URL.
    """
    check_package(path)
    location = place(str(path))
    try:
        if isinstance(location, Path):
            location = location.absolute()
            location.parent.mkdir(parents=True, exist_ok=True)
            _write_beside(location, weights)
        else:
            _put(location, weights)
    except CheckpointError:
        raise
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(f"The weights cannot be written to {location}: {reason_of(error)}.") from error
    return location


def _write_beside(path: Path, weights: Mapping[str, Any]) -> None:
    for left in path.parent.glob(f".{escape(path.name)}.*.partial"):  # left by a killed process
        left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        _write_file(beside, path.suffix, weights)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _put(url: str, weights: Mapping[str, Any]) -> None:
    files, target = file_system(url)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "weights")
        _write_file(local, os.path.splitext(url)[1], weights)
        parent = target.rpartition("/")[0]
        if parent:
            files.makedirs(parent, exist_ok=True)
        files.put_file(str(local), target)


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    assert is_url(url)
    try:
        from fsspec.core import url_to_fs

        files, target = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{url} cannot be used: {error}. URLs need pip install 'paceline[object-store]', and the package of "
            f"fsspec for the kind of store, such as s3fs or gcsfs."
        ) from None
    return files, target


def _write_file(path: Path, suffix: str, weights: Mapping[str, Any]) -> None:
    if suffix != SAFETENSORS:
        torch.save(dict(weights), path)
        return
    from safetensors.torch import save_file

    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"A .safetensors file holds tensors only, and {others[0]!r} is a {type(weights[others[0]]).__name__}, the "
            f"extra state of a module: write a .pt file."
        )
    save_file(_separate(weights), path, metadata={"format": "pt"})


def _separate(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tensors that share memory, which safetensors rejects. A tied weight is written under each of its names."""
    seen: set[int] = set()
    separate = {}
    for name, value in weights.items():
        storage = value.untyped_storage().data_ptr()
        shared = value.numel() > 0 and storage in seen
        seen.add(storage)
        separate[name] = value.clone() if shared else value
    return separate
