"""What a checkpoint contains, as data: written last, so that its presence means that the rest is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from paceline.errors import CheckpointError

FORMAT = 2
FILE = "manifest.json"


class DamagedError(CheckpointError):
    """A checkpoint is not what was written; told to the user as a plain CheckpointError, or passed over."""


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint.

    Attributes:
        step: steps done when it was taken; the position from which training goes on.
        order: length, batch, microbatches, seed and drop_last of the data order.
        tensors: type and shape of each tensor by name.
        fingerprint: SHA-256 of all tensors, checked on loading.
        extra: SHA-256 of everything else in the state, checked on loading.
        numerics: what decides the bits besides the script: exact, threads, cpu.
        versions: of Python and the libraries.
        time: when the state was taken, in seconds since 1970.
    """

    step: int
    order: dict[str, int]
    tensors: dict[str, list[object]]
    fingerprint: str
    extra: str
    numerics: dict[str, object]
    versions: dict[str, str]
    time: float
    format: int = FORMAT

    def to_json(self) -> str:
        """As text, with the SHA-256 of itself."""
        values = asdict(self)
        return json.dumps({**values, "checksum": _checksum(values)}, indent=1)


def parse(text: str, where: object) -> Manifest:
    """The manifest that :meth:`Manifest.to_json` wrote; ``where`` names it in errors.

    Raises:
        Damaged: it is not what was written.
        CheckpointError: it is of another format.
    """
    try:
        values: dict[str, object] = json.loads(text)
        known = values["format"]
        checksum = values.pop("checksum", None)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{where} is damaged: {error}.") from None
    if known != FORMAT:
        raise CheckpointError(f"{where} has format {known}; this version reads format {FORMAT}.")
    if checksum != _checksum(values):
        raise DamagedError(f"{where} is damaged: it does not have the hash that stands in it.")
    return Manifest(**values)  # type: ignore[arg-type]


def _checksum(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def newest_first(names: Iterable[str]) -> list[str]:
    """The names of checkpoints in this order; other names are left out."""
    return sorted((name for name in names if step_of(name) >= 0), key=step_of, reverse=True)


def step_of(name: str) -> int:
    """The number of steps in the name of a checkpoint's directory; -1 for another name."""
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else -1


def name_of(step: int) -> str:
    """The directory name of a checkpoint: ``step-000500`` after 500 steps."""
    return f"step-{step:06d}"


def first_difference(saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first key whose values differ, in words; empty if there is none."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key) != now.get(key):
            return f"{key} was {saved.get(key)!r} and is now {now.get(key)!r}"
    return ""
