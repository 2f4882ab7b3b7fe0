"""Records of a run that a replay needs: its start, its steps with their digests, and its checkpoints. No torch.

A step may be recorded several times: by each worker, and again after a return to a checkpoint. The last record counts,
because later steps follow from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, InputError
from paceline.observe.records import Record, read
from paceline.system.installed import file_hash, version
from paceline.system.masking import MASK
from paceline.system.regular_files import read_text

_EVENTS = ("start", "step", "checkpoint", "resume", "recovered", "communication")
_ASYNCHRONOUS = "Only strategies that compute the same function on any number of workers record digests of their steps"
_SECRET = (
    "An argument or setting of {run} was a secret, which is not recorded: pass secrets to the script in environment "
    "variables or files, so that its runs can be replayed."
)


@dataclass(frozen=True)
class RecordedStep:
    """Last record of a step."""

    time: float
    generation: int
    loss: str  # in hexadecimal digits, because NaN is not equal to itself
    norm: str
    chain: str
    digests: Mapping[str, str] = field(default_factory=dict)  # by parameter

    @property
    def is_finite(self) -> bool:
        return not {self.loss, self.norm} & {"nan", "inf", "-inf"}

    def difference(self, other: RecordedStep) -> str:
        """Describe the first difference from another record of the step. Empty if there is none."""
        for name, mine, theirs in (
            ("loss", self.loss, other.loss),
            *((f"parameter {key}", one, other.digests.get(key, one)) for key, one in self.digests.items()),
            ("chain of all steps so far", self.chain, other.chain),
        ):
            if mine != theirs:
                return f"the {name}, {_shown(mine)} and {_shown(theirs)}"
        return ""


def _shown(value: str) -> str:
    """Return a hexadecimal number in decimal digits. Return a digest unchanged."""
    return repr(float.fromhex(value)) if "x" in value or value in ("nan", "inf", "-inf") else value


@dataclass(frozen=True)
class RecordedRun:
    """Run that can be replayed."""

    folder: Path
    launch: Mapping[str, Any]  # as in launch.json
    starts: tuple[Record, ...]
    steps: Mapping[int, RecordedStep]
    sizes: tuple[tuple[float, int], ...]  # times at which the number of workers changed, with the new number
    checkpoints: Mapping[int, Path]  # checkpoints that still exist, by their number of steps
    formats: tuple[tuple[float, str], ...] = ()  # times at which the run chose formats of gradients, with the formats

    @property
    def script(self) -> Path:
        return Path(self.launch["script"])

    @property
    def same_bits(self) -> bool:
        """Whether any number of workers gives the same bits."""
        return all(one.get("same_bits") for one in self.starts)

    def start_of(self, step: int) -> Record:
        """Return the record of the start, or of the resume, after which a step was taken."""
        until = self.steps[step].time if step in self.steps else math.inf
        return next((one for one in reversed(self.starts) if one["time"] <= until), self.starts[0])

    def settings_of(self, step: int) -> dict[str, str]:
        """Return the settings at a step that come from outside of the script, with the formats that the run chose."""
        settings = dict(self.start_of(step).get("settings", {}))
        if any(MASK in value for value in settings.values()):
            raise ConfigError(_SECRET.format(run=self.folder.name))
        until = self.steps[step].time if step in self.steps else math.inf
        if formats := [text for time, text in self.formats if time <= until]:
            settings["communication"] = formats[-1]
        return settings

    def workers_at(self, step: int) -> int:
        """Return the number of workers at a step."""
        until = self.steps[step].time if step in self.steps else math.inf
        return next((count for time, count in reversed(self.sizes) if time <= until), self.sizes[0][1])

    def checkpoint_before(self, step: int) -> tuple[int, Path | None]:
        """Return the step and path of the nearest checkpoint before a step, or 0 and None to replay from the start."""
        if found := [one for one in self.checkpoints if one <= step]:
            return max(found), self.checkpoints[max(found)]
        if self.steps and min(self.steps) > 0:
            raise InputError(
                f"{self.folder.name} began at step {min(self.steps)}, from a checkpoint that no longer exists, and has "
                f"no other checkpoint before step {step}. Replay a later step."
            )
        return 0, None

    def range_of_steps(self) -> str:
        return f"the steps {min(self.steps)} to {max(self.steps)}" if self.steps else "no steps with a digest"

    def check(self, step: int) -> None:
        """Raise ConfigError or InputError if a step cannot be replayed."""
        last = max(self.steps, default=-1)
        if not 0 <= step <= last + 1:
            raise ConfigError(f"--step {step}: {self.folder.name} has {self.range_of_steps()}.")
        for name, was in self.start_of(step).get("code", {}).items():
            path = self.script.parent / name
            now = file_hash(path)
            if now != was:
                raise ConfigError(
                    f"{path} is not the file with which {self.folder.name} was trained: its hash was {was} and is "
                    f"{now or 'none, because it is missing'}. Check out the version that was trained."
                )


def load(folder: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: a newer version has recorded it, or an argument was a secret and is not in the record.
    """
    launch = _launch(folder)
    records: dict[str, list[Record]] = {name: [] for name in _EVENTS}
    for record in read(folder, _EVENTS):
        records[record["event"]].append(record)
    if not (starts := tuple(sorted(records["start"], key=lambda one: one["time"]))):
        raise InputError(f"{folder} has no record of a start, so there is nothing to replay.")
    if any(one.get("session", 1) != 1 for one in starts):
        raise InputError(f"{folder.name} called paceline.start several times, so a step is not of one session.")
    steps = steps_in(records["step"])
    if not steps and records["step"]:
        strategy = starts[-1].get("strategy")
        raise InputError(
            f"The steps of {folder.name} have no digests, so they cannot be replayed: its strategy is {strategy!r}. "
            f"{_ASYNCHRONOUS}, and only since this version of Paceline."
        )
    found = dict(_checkpoints(folder, [*records["checkpoint"], *records["resume"]]))
    sizes = [(one["time"], int(one.get("workers", 1))) for one in starts]
    changed = [one for one in records["recovered"] if isinstance(one.get("workers"), list)]
    sizes += [(one["time"], len(one["workers"])) for one in changed]
    formats = sorted((one["time"], str(one["formats"])) for one in records["communication"] if one.get("chooses"))
    return RecordedRun(folder, launch, starts, steps, tuple(sorted(sizes)), found, tuple(formats))


def _launch(folder: Path) -> dict[str, Any]:
    path = folder / "launch.json"
    try:
        launch = json.loads(read_text(path))
        words = launch["arguments"]
        known = isinstance(launch["script"], str) and all(isinstance(word, str) for word in words)
        recorded = launch["versions"]["paceline"]
    except FileNotFoundError:
        raise InputError(f"{folder} has no launch.json, so it is not the directory of a run.") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error!r}.") from None
    if not known:
        raise InputError(f"{path} does not say which script was run.")
    if recorded and _parts(recorded) > _parts(version("paceline") or recorded):
        raise ConfigError(f"{folder.name} was recorded by Paceline {recorded}, which is newer: install that version.")
    if any(MASK in word for word in words):
        raise ConfigError(_SECRET.format(run=folder.name))
    return dict(launch)


def _parts(text: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d{1,9}", text)[:3]]


def steps_in(records: list[Record]) -> dict[int, RecordedStep]:
    """Return the steps in records by number. Records without a digest are left out."""
    found: dict[int, RecordedStep] = {}
    for record in sorted(records, key=lambda one: one["time"]):
        step, loss, norm, chain = (record.get(name) for name in ("step", "loss", "gradient_norm", "chain"))
        if type(step) is not int or not isinstance(chain, str) or not all(_is_number(one) for one in (loss, norm)):
            continue
        one = RecordedStep(record["time"], record["generation"], _hex(loss), _hex(norm), chain)
        before = found.get(step)
        digests = dict[str, str]()
        if before is not None and before.generation == one.generation and before.chain == one.chain:
            digests = dict(before.digests)
        if isinstance(record.get("digest"), str) and isinstance(record.get("tensor"), str):
            digests[record["tensor"]] = record["digest"]
        found[step] = replace(one, digests=digests)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def _hex(value: Any) -> str:
    return float(value).hex()


def _checkpoints(folder: Path, records: list[Record]) -> Iterator[tuple[int, Path]]:
    """Yield the number of steps and the path of each complete checkpoint on this machine."""
    own = [(path.name.rpartition("-")[2], path) for path in folder.glob("checkpoints/step-*")]
    known = [(str(record.get("step")), Path(str(record.get("path")))) for record in records]
    for step, path in [*known, *own]:
        if step.isdecimal() and any(path.glob("**/manifest.json")):
            yield int(step), path
