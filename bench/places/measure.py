"""One run of a contender, and what its steps tell: when the first one was done, and the longest stall."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import scripts

RUN = "run"
"""The folder of a run, in that of its place."""
_SECONDS = 300.0
"""After which a run hangs."""
_STARTS = 3
_SHOWN = 3000


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        name: in the table.
        words: the command.
        own: whether it is the engine's own way, to which the others are compared.
        again: whether a user must start it again after a loss.
        environment: more variables.
    """

    name: str
    words: tuple[str | Path, ...]
    own: bool = False
    again: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A run.

    Attributes:
        start: seconds from the command to the first step.
        stall: seconds from the kill to the next new step; None if the run did not finish.
        said: its output.
    """

    start: float
    stall: float | None
    said: str


Starter = Callable[..., "subprocess.Popen[str]"]
"""Starts words with ``cwd`` and ``environment``, and captures both outputs in one."""


def start_here(*words: str | Path, cwd: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command on this machine."""
    return subprocess.Popen(
        list(map(str, words)),
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(contender: Contender, folder: Path, start: Starter) -> Result:
    """Train once, through a kill.

    Raises:
        RuntimeError: the run ended before the kill. The message has its output.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in scripts.FILES.items():
        (folder / name).write_text(text)
    environment = {"OMP_NUM_THREADS": "1", **({"AGAIN": "1"} if contender.again else {}), **contender.environment}
    began, said, code = time.time(), "", None
    for _ in range(_STARTS if contender.again else 1):
        process = start(*contender.words, cwd=folder, environment=environment)
        code, output = _end(process)
        said += output
        if code is None or (code == 0 and _is_through(folder)):  # TorchDistributor ends with 0 in any case
            break
    if not (folder / "killed").exists():
        raise RuntimeError(f"{contender.name} failed with exit code {code}:\n{said[-_SHOWN:]}")
    return _read(folder, began, said, code == 0)


def _end(process: subprocess.Popen[str]) -> tuple[int | None, str]:
    """The exit code and what was said; None for a run that hangs, which is ended."""
    try:
        said, _ = process.communicate(timeout=_SECONDS)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return None, process.communicate(timeout=_SECONDS / 4)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[0]


def _read(folder: Path, began: float, said: str, ended_well: bool) -> Result:
    killed = float((folder / "killed").read_text())
    steps = _steps(folder)
    first = min(at for at, step in steps if step == 1)
    after = [at for at, step in steps if step > scripts.KILLED]
    return Result(first - began, min(after) - killed if ended_well and _is_through(folder) else None, said)


def _steps(folder: Path) -> list[tuple[float, int]]:
    """When each step was done."""
    file = folder / "steps"
    lines = file.read_text().splitlines() if file.exists() else ()
    return [(float(at), int(step)) for at, step, _ in map(str.split, lines)]


def _is_through(folder: Path) -> bool:
    return any(step == scripts.STEPS for _, step in _steps(folder))
