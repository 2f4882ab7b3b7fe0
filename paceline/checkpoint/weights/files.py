"""Files of weights, with the format by suffix: safetensors, or a state_dict written by ``torch.save``.

A file is written under a temporary name in the same folder and renamed, so a reader finds either the whole new file or
the old one. For a URL, the file is written to a local disk first and uploaded in one put. Large safetensors are written
as Hugging Face does, one file after the other::

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from glob import escape, glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.files import reason_of
from paceline.checkpoint.storage.folder import sync_directory
from paceline.checkpoint.storage.locations import is_url, place
from paceline.errors import CheckpointError, ConfigError

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth", ".bin")
INDEX = ".index.json"  # end of the name of the file that tells which file has which tensor
MAX_SHARD_SIZE = 5_000_000_000  # number of bytes in a file of safetensors, as in ``save_pretrained`` of Hugging Face


def complete_weights(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return copies of the contents of ``model.state_dict()`` on the host, see :func:`on_host`."""
    return on_host(model.state_dict(keep_vars=True), dtype, copied=True)


def on_host(values: Mapping[str, Any], dtype: torch.dtype | None = None, *, copied: bool = False) -> dict[str, Any]:
    """Return tensors and other values of a state_dict on the host.

    Args:
        values: values by name, all of which this worker has.
        dtype: dtype of the floating-point tensors. Defaults to their own.
        copied: whether to copy tensors that are contiguous, of this dtype and on the host already.

    Returns:
        the values, by the same names. A tensor that has several names, such as a tied weight, is returned once.
    """
    found: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # from a module's get_extra_state()
            return copy.deepcopy(value)
        if id(value) not in found:
            kind = dtype_of(value, dtype)
            found[id(value)] = value.detach().to("cpu", kind, copy=copied, memory_format=torch.contiguous_format)
        return found[id(value)]

    return {name: moved(value) for name, value in values.items()}


def dtype_of(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after the conversion of floating-point tensors."""
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def check_suffix(path: Path | str) -> None:
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


def write(
    path: Path | str, weights: Mapping[str, Any], dtype: torch.dtype | None = None, max_shard_size: int = MAX_SHARD_SIZE
) -> Path | str:
    """Write weights to a file, atomically, or to several files with an index, which is written last.

    Weights are moved to the host and converted when their file is written, so that only those of one file need memory.

    Args:
        path: path, or URL that fsspec supports. The suffix chooses the format.
        weights: tensors by name. A torch file may hold other values too.
        dtype: type of the floating-point tensors in the file. Defaults to their own.
        max_shard_size: number of bytes above which safetensors are written to several files.

    Returns:
        the absolute path, or the URL. If there are several files, they have names that begin alike, in the same folder.
    """
    check_package(path)
    location = place(str(path))
    name = os.path.basename(str(location))
    try:
        parts = _parts_of(weights, dtype, max_shard_size if name.endswith(SAFETENSORS) else None)
        files = _files_of(name, weights, dtype, parts)
        if isinstance(location, Path):
            location = location.absolute()
            location.parent.mkdir(parents=True, exist_ok=True)
            _write_beside(location, files)
        else:
            _put(location, files)
    except CheckpointError:
        raise
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(f"The weights cannot be written to {location}: {reason_of(error)}.") from error
    return location


def _parts_of(weights: Mapping[str, Any], dtype: torch.dtype | None, most: int | None) -> list[list[str]]:
    """Return the names of the weights in each file, in order. A tensor of more than ``most`` bytes has its own file."""
    parts, room = [list[str]()], most or 0
    for name, value in weights.items():
        size = value.numel() * dtype_of(value, dtype).itemsize if most and isinstance(value, torch.Tensor) else 0
        if parts[-1] and size > room:
            parts.append([])
            room = most or 0
        parts[-1].append(name)
        room -= size
    return parts


def _files_of(
    name: str, weights: Mapping[str, Any], dtype: torch.dtype | None, parts: Sequence[Sequence[str]]
) -> dict[str, Callable[[Path], None]]:
    """Return the function that writes each file, by name. The index is the last file, as Hugging Face names it."""
    stem, suffix = os.path.splitext(name)

    def write_part(names: Sequence[str], path: Path) -> None:
        _write_file(path, suffix, on_host({name: weights[name] for name in names}, dtype))

    if len(parts) == 1:
        return {name: partial(write_part, parts[0])}
    of = {f"{stem}-{number:05d}-of-{len(parts):05d}{suffix}": names for number, names in enumerate(parts, 1)}
    tensors = (one for one in weights.values() if isinstance(one, torch.Tensor))  # else writing the file raises
    total = sum(one.numel() * dtype_of(one, dtype).itemsize for one in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": {one: file for file in of for one in of[file]}}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    made: dict[str, Callable[[Path], None]] = {file: partial(write_part, names) for file, names in of.items()}
    return made | {name + INDEX: lambda path: path.write_text(text)}


def _patterns(path: str) -> list[str]:
    """Return patterns of all files that may hold weights exported to a path, the index first."""
    stem, suffix = os.path.splitext(escape(path))
    return [escape(path) + INDEX, escape(path), f"{stem}-?????-of-?????{suffix}"] if suffix == SAFETENSORS else []


def _write_beside(path: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """Write files under temporary names, rename them, and remove those of an earlier export to this path."""
    folder, made = path.parent, list[tuple[Path, Path]]()
    for name in (escape(path.name), f"{escape(path.stem)}-?????-of-?????{path.suffix}"):
        for left in folder.glob(f".{name}.*.partial"):  # left by a killed process
            left.unlink(missing_ok=True)
    try:
        for name, write in files.items():
            made.append((folder / f".{name}.{os.urandom(4).hex()}.partial", folder / name))
            write(made[-1][0])
            with made[-1][0].open("rb+") as file:
                os.fsync(file.fileno())
        if len(files) > 1:  # no reader mixes files of two exports
            Path(f"{path}{INDEX}").unlink(missing_ok=True)
        for beside, final in made:
            beside.replace(final)
    finally:
        for beside, _ in made:
            beside.unlink(missing_ok=True)
    for old in (Path(found) for pattern in _patterns(str(path)) for found in glob(pattern)):
        if old.name not in files:
            old.unlink(missing_ok=True)
    sync_directory(folder)


def _put(url: str, files: Mapping[str, Callable[[Path], None]]) -> None:
    system, target = file_system(url)
    if parent := target.rpartition("/")[0]:
        system.makedirs(parent, exist_ok=True)
    for name, write in files.items():
        with tempfile.TemporaryDirectory() as folder:
            write(local := Path(folder, name))
            system.put_file(str(local), f"{parent}/{name}" if parent else name)
    for old in (found for pattern in _patterns(target) for found in system.glob(pattern)):
        if os.path.basename(old) not in files:
            system.rm(old)


def file_system(url: str) -> tuple[Any, str]:
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

    if others := [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]:
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
