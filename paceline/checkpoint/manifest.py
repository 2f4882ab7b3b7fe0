"""What a checkpoint contains, as data: written last, so that its presence means that the rest is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import CheckpointError

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint.

    Attributes:
        step: steps done when it was taken; the position from which training goes on.
        order: length, batch, microbatches, seed and drop_last of the data order.
        tensors: type and shape of each tensor by name.
        fingerprint: SHA-256 of the state, checked on loading.
        numerics: what decides the bits besides the script: exact, threads, cpu.
        versions: of Python and the libraries.
    """

    step: int
    order: dict[str, int]
    tensors: dict[str, list[object]]
    fingerprint: str
    numerics: dict[str, object]
    versions: dict[str, str]
    format: int = FORMAT

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)


def read(directory: Path) -> Manifest:
    """The manifest in a checkpoint's directory.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another format.
    """
    try:
        values: Mapping[str, object] = json.loads((directory / FILE).read_text())
        manifest = Manifest(**values)  # type: ignore[arg-type]
    except OSError as error:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {FILE}: {error.strerror}.") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / FILE} is damaged: {error}.") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{directory} has format {manifest.format}; this version reads format {FORMAT}.")
    return manifest


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.glob("step-*") if (path / FILE).is_file()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number of steps in the name of a checkpoint's directory; -1 for another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def name_of(step: int) -> str:
    """The directory name of a checkpoint: ``step-000500`` after 500 steps."""
    return f"step-{step:06d}"


def first_difference(saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first key whose values differ, in words; empty if there is none."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key) != now.get(key):
            return f"{key} was {saved.get(key)!r} and is now {now.get(key)!r}"
    return ""
