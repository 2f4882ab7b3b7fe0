"""Values that ``session.log`` accepts: numbers, texts and images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.adapters.trackers.png import encode
from paceline.adapters.trackers.values import STEP_VALUES
from paceline.errors import InputError


@dataclass
class Logged:
    """Values of one call, by name. Images are 8-bit arrays [height, width, channels]."""

    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def write(self, folder: Path, step: int) -> dict[str, dict[str, str]]:
        """Write texts and images to files. Return their paths by name, under ``texts`` and ``images``."""
        folder.mkdir(parents=True, exist_ok=True)
        texts, images = ({name: _path(folder, name, step) for name in named} for named in (self.texts, self.images))
        for name, path in texts.items():
            path.with_suffix(".txt").write_text(self.texts[name])
        for name, path in images.items():
            path.with_suffix(".png").write_bytes(encode(self.images[name]))
        return {
            "texts": {name: str(path.with_suffix(".txt")) for name, path in texts.items()},
            "images": {name: str(path.with_suffix(".png")) for name, path in images.items()},
        }


def _path(folder: Path, name: str, step: int) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:100]}-{step:06d}"


def sort_out(values: Any) -> Logged:
    """Sort values into numbers, texts and images. Raises InputError if a name or a value cannot be recorded."""
    if not isinstance(values, Mapping):
        raise InputError(f"session.log takes a mapping of names to values, not a {type(values).__name__}.")
    logged = Logged()
    for name, value in values.items():
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"session.log: {name!r} is not a valid name; names are non-empty strings.")
        if name in STEP_VALUES:
            raise InputError(f"session.log: {name!r} is recorded in each step; choose another name for this value.")
        if isinstance(value, str):
            logged.texts[name] = value
        elif isinstance(value, Real):
            logged.scalars[name] = float(value)
        elif isinstance(value, torch.Tensor | np.ndarray | np.generic):
            array = _array(value)
            if array.size == 1 and array.ndim <= 1:
                logged.scalars[name] = float(array.reshape(()))
            else:
                logged.images[name] = _pixels(name, array)
        else:
            raise InputError(
                f"session.log: {name!r} is a {type(value).__name__}; give a number, a text, or an image: a tensor "
                f"[channels, height, width] of uint8, or of floats from 0 to 1."
            )
    return logged


def _array(value: torch.Tensor | NDArray[Any] | np.generic) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    found: NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return found


def _pixels(name: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    image = array[None] if array.ndim == 2 else array
    if image.ndim != 3 or image.shape[0] not in (1, 2, 3, 4) or image.size == 0:
        raise InputError(
            f"session.log: {name!r} has the shape {list(array.shape)}; an image is [channels, height, width] with 1 "
            f"to 4 channels, or [height, width]."
        )
    if image.dtype != np.uint8:
        image = (np.clip(np.nan_to_num(image.astype(np.float32)), 0.0, 1.0) * 255 + 0.5).astype(np.uint8)
    return np.ascontiguousarray(image.transpose(1, 2, 0))
