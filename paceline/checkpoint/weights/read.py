"""Reader of weights: from a file, a folder of files in Hugging Face's layout, or a checkpoint.

Reading never runs code: safetensors and a checkpoint's manifest hold plain bytes, and ``torch.load`` is called with
``weights_only``.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paceline.checkpoint import load
from paceline.checkpoint.files import reason_of
from paceline.checkpoint.manifest import DamagedError
from paceline.checkpoint.storage.locations import place
from paceline.checkpoint.weights.averages import KEY
from paceline.checkpoint.weights.files import INDEX, SAFETENSORS, TORCH, check_package, check_suffix, file_system
from paceline.errors import CheckpointError, PacelineError
from paceline.system.regular_files import open_regular

_INDEXES = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_SINGLE = "model.safetensors", "pytorch_model.bin"
_MOST_KEYS = 5


def read(path: Path | str, key: str | None = None) -> dict[str, torch.Tensor]:
    """Read weights.

    Args:
        path: a ``.safetensors``, ``.pt``, ``.pth`` or ``.bin`` file, a folder with such files and their index, a
            checkpoint, or a folder of checkpoints, of which the newest is read. Also the URL of a file or a checkpoint.
        key: key of the state_dict in a torch file that holds more than a state_dict.

    Returns:
        the tensors by name, on the host. Tensors of a checkpoint have the names of the model's ``state_dict``.

    Raises:
        ConfigError: the name or the key cannot be used.
    """
    try:
        if str(path).endswith(SAFETENSORS) and not _exists(path) and _exists(index := f"{path}{INDEX}"):
            return _read_parts(index, key)
        if isinstance(path, Path) and not os.path.lexists(path):
            raise CheckpointError(f"There are no weights at {path}: there is no such file or folder.")
        if isinstance(path, Path) and path.is_dir():
            return _read_folder(path, key)
        if isinstance(path, Path) or os.path.splitext(path)[1] in (SAFETENSORS, *TORCH):
            return _read_file(path, key)
        return of_checkpoint(path)
    except PacelineError:
        raise
    except Exception as error:
        raise CheckpointError(f"The weights at {path} cannot be read: {reason_of(error)}.") from error


def of_checkpoint(path: Path | str, *, averaged: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint, by the names of the model's ``state_dict``.

    Args:
        path: path or URL of a checkpoint, or of a folder of checkpoints, of which the newest is read.
        averaged: whether to return averages (:class:`~paceline.checkpoint.weights.averages.Averages`) where they exist.
    """
    where = load.find(str(path))
    if isinstance(where, Path) and where.is_file():
        raise CheckpointError(
            f"{where} is a file, and a checkpoint is a folder, as runs/<name>/checkpoints/step-000100."
        )
    content = load.read(where, lambda *_: None)
    tensors, names = content.tensors, _names(content, where)
    if averaged:
        end = f"/{KEY}"
        averages = [name for name in tensors if name.startswith("optimizer/") and name.endswith(end)]
        if not averages:
            raise CheckpointError(f"{where} has no averaged weights: set average='ema', or 'swa', before training.")
        owners = {name: f"parameter/{name.removeprefix('optimizer/').removesuffix(end)}" for name in averages}
        tensors = tensors | {owner: tensors[name].to(tensors[owner].dtype) for name, owner in owners.items()}
    return {name: tensors[source] for name, source in names.items()}


def converted(weights: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Convert the floating-point tensors to another dtype, such as ``"bfloat16"``."""
    kind = getattr(torch, dtype)
    return {name: value.to(kind) if value.is_floating_point() else value for name, value in weights.items()}


def _names(content: load.Content, where: Path | str) -> dict[str, str]:
    """Map the names in the ``state_dict`` to tensors. An older checkpoint has the names of ``named_parameters``."""
    known = {name for name in content.tensors if name.startswith(("parameter/", "buffer/"))}
    if (names := content.manifest.state.get("names")) is None:
        return {name.partition("/")[2]: name for name in known}
    if not isinstance(names, dict) or not known.issuperset(names.values()):
        raise DamagedError(f"{where} is damaged: the names of its weights are not those of its tensors.")
    return names


def _read_folder(path: Path, key: str | None) -> dict[str, torch.Tensor]:
    for index in _INDEXES:
        if (path / index).exists():
            return _read_parts(str(path / index), key)
    for name in _SINGLE:
        if (path / name).exists():
            return _read_file(path / name, key)
    return of_checkpoint(path)


def _read_parts(index: str, key: str | None) -> dict[str, torch.Tensor]:
    """Read the files that an index names. They lie beside it."""
    with _opened(place(index)) as file:
        names = sorted(set(json.load(file)["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it.")
        found.update(_read_file(place(f"{index.rpartition('/')[0]}/{name}"), key))
    return found


def _exists(path: Path | str) -> bool:
    location = place(str(path))
    if isinstance(location, Path):
        return os.path.lexists(location)
    files, target = file_system(location)
    return bool(files.exists(target))


def _opened(path: Path | str) -> BinaryIO:
    if isinstance(path, Path):
        return open_regular(path)
    files, target = file_system(path)
    return io.BytesIO(files.cat_file(target))


def _read_file(path: Path | str, key: str | None) -> dict[str, torch.Tensor]:
    check_suffix(path)
    check_package(path)
    with _opened(path) as file:
        return _parse(file, path, key)


def _parse(file: BinaryIO, path: Path | str, key: str | None) -> dict[str, torch.Tensor]:
    if str(path).endswith(SAFETENSORS):
        from safetensors.torch import load as parse
        from safetensors.torch import load_file

        return dict(load_file(path) if isinstance(path, Path) else parse(file.read()))
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointError(
            f"{path} holds more than tensors, numbers, text and containers of them, and to open that could run code: "
            f"write its state_dict alone. ({str(error).splitlines()[0]})"
        ) from error
    return _tensors(value, path, key)


def _tensors(value: Any, path: Path | str, key: str | None) -> dict[str, torch.Tensor]:
    """Return the state_dict in the contents of a torch file."""
    if key is not None:
        if not isinstance(value, Mapping) or key not in value:
            raise CheckpointError(f"weights.key = {key!r}: {path} has no such key{_keys(value)}.")
        value = value[key]
    found = {}
    if isinstance(value, Mapping):
        found = {name: one for name, one in value.items() if isinstance(name, str) and isinstance(one, torch.Tensor)}
    if not found:
        raise CheckpointError(
            f"{path} holds no state_dict, a mapping of names to tensors, but a {type(value).__name__}{_keys(value)}. "
            f"If one of them holds it, name that as weights.key."
        )
    return found


def _keys(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return ""
    names = [repr(name) for name in value]
    more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
    return f": its keys are {', '.join(names[:_MOST_KEYS])}{more}"
