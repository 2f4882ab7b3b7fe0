"""What a checkpoint contains, as data. It is written last, so its presence means that the rest is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from paceline.errors import CheckpointError

FORMAT = 3
FILE = "manifest.json"


class DamagedError(CheckpointError):
    """A checkpoint is not what was written. The user sees a plain CheckpointError, or it is skipped."""


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint.

    Attributes:
        step: steps done; training resumes at this position.
        order: length, batch, microbatches, seed and drop_last of the data order.
        tensors: dtype and shape of each tensor by name.
        fingerprint: SHA-256 of all tensors, checked on loading.
        extra: SHA-256 of the rest of the state, checked on loading.
        numerics: what affects the bits besides the script: exact, threads, cpu.
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
        """As JSON with its own SHA-256."""
        values = asdict(self)
        return json.dumps({**values, "checksum": _checksum(values)}, indent=1)


def parse(text: str, where: object) -> Manifest:
    """Parse what :meth:`Manifest.to_json` wrote; ``where`` names it in errors.

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
        raise CheckpointError(
            f"{where} has format {known}, and this version of Paceline reads format {FORMAT}. Resume with the version "
            f"that wrote it, or start a new run."
        )
    if checksum != _checksum(values):
        raise DamagedError(f"{where} is damaged: its checksum does not match.")
    return Manifest(**values)  # type: ignore[arg-type]


def _checksum(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def newest_first(names: Iterable[str]) -> list[str]:
    """Sort the names of checkpoints, and leave out other names."""
    return sorted((name for name in names if step_of(name) >= 0), key=step_of, reverse=True)


def step_of(name: str) -> int:
    """The number of steps in the name of a checkpoint; -1 for another name."""
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else -1


def name_of(step: int) -> str:
    """The name of a checkpoint: ``step-000500`` after 500 steps."""
    return f"step-{step:06d}"


def first_difference(saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe the first key whose values differ; empty if there is none."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key) != now.get(key):
            return f"{key} was {saved.get(key)!r} and is now {now.get(key)!r}"
    return ""
