"""Runs of ``paceline run`` for these tests, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import failures
from fork_server import PACELINE, SHOW_THREADS, Command, Forked, ForkServer

from paceline.observe import ledger

OURS = ("PACELINE_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMP_", "TMPDIR")
LENGTH, BATCH = 100, 32  # of the usual case; its epoch has 4 steps, the last one with 4 samples


def processes_in(directory: Path) -> list[int]:
    """The processes whose current directory is there, as that of all who belong to a run is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink().is_relative_to(directory):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Ran:
    """What a run left: the exit code, what the launcher printed, its directory."""

    code: int
    said: str
    run: Path
    logs: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        logs = {path.stem: path.read_text() for path in sorted((self.run / "output").glob("*.log"))}
        object.__setattr__(self, "logs", logs)

    def report(self) -> str:
        """Everything, for a failed assertion."""
        logs = "\n".join(f"-- {name}\n{text}" for name, text in self.logs.items())
        notes = "\n".join(map(str, self.launcher()))
        return f"exit code {self.code}\n{self.said}\n{logs}\n-- launcher\n{notes}"

    def events(self, name: str = "*") -> list[dict[str, Any]]:
        """In the order of time; the half line of a killed worker is left out."""
        found = []
        for path in self.run.glob(f"events/{name}.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    assert path.stem.startswith("rank-"), f"{path.name}: {line}"
        return sorted(found, key=lambda event: event["time"])

    def launcher(self, event: str | None = None) -> list[dict[str, Any]]:
        return [one for one in self.events("launcher") if event in (None, one["event"])]

    def memberships(self) -> list[list[int]]:
        """The workers of each generation."""
        return [one["workers"] for one in self.launcher("membership")]

    def survivors(self) -> list[int]:
        """The workers of the first generation that are in the last; lost ones may have been replaced by then."""
        first, *_, last = self.memberships()
        return [worker for worker in first if worker in last]

    def steps(self, name: str) -> list[int]:
        """The steps that a worker said it did."""
        return [int(line.split()[1]) for line in self.logs[name].splitlines() if line.startswith("step ")]

    def printed(self) -> list[dict[str, Any]]:
        """The last lines of those that came to the end."""
        lines = [line for text in self.logs.values() for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.run.glob("checkpoints/step-*"))

    def check_steps(self, steps: int) -> None:
        """Each step was done exactly once, and by each worker in order without a gap."""
        from paceline.data.order import Order  # imports torch, which the process that starts those of pytest needs not

        order = Order(LENGTH, BATCH, 8, seed=0)
        assert ledger.check(ledger.read(self.run / "events"), steps, order.samples_of) == [], self.report()
        for name in self.logs:
            done = self.steps(name)
            assert done == list(range(done[0], done[-1] + 1)) if done else True, self.report()


def environment_in(directory: Path) -> dict[str, str]:
    """The variables of a run there; what it leaves in the folder for temporary files is found."""
    if not (directory / "tmp").exists():  # a short path: that of a socket has 108 bytes at most
        (directory / "tmp").symlink_to(tempfile.mkdtemp())
    own = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return own | {"TMPDIR": str((directory / "tmp").resolve())}


def launch(server: ForkServer, words: list[str], directory: Path, deadline: float, **variables: str) -> tuple[int, str]:
    """Run ``paceline`` with these words; gives the exit code, and what it printed."""
    failures.used.append(directory)
    environment = environment_in(directory) | variables
    out, err = directory / "launcher.out", directory / "launcher.err"
    (launcher,) = server.start([Command((*PACELINE, *words), environment, out, err, directory)])
    try:
        code = launcher.wait(deadline)
    except TimeoutError:
        _give_up(launcher, directory)
        raise TimeoutError(f"still running after {deadline:.0f} s\n{_all_text(directory)}") from None
    return code, out.read_text() + err.read_text()


def _give_up(launcher: Forked, directory: Path) -> None:
    for process in processes_in(directory):
        if process != launcher.pid:
            send(process, SHOW_THREADS)
    time.sleep(1.0)
    for process in processes_in(directory):
        send(process, signal.SIGKILL)
    launcher.wait()


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _all_text(directory: Path) -> str:
    paths = [*directory.rglob("*.log"), *directory.glob("launcher.*"), *directory.rglob("launcher.jsonl")]
    return "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(paths))


Run = Callable[..., Ran]


_MAY_STAY = ("pymp-", "torchelastic_", "torchinductor_", f"paceline-{os.getuid()}")
"""Temporary folders: Python's, of killed processes; torchrun's, of logs; torch's cache; the one with the secret."""


def _counts_descriptors(file: Path) -> bool:
    """Whether torch's loader has made a file to see if it still can, and was interrupted by the end of its process."""
    return file.name.startswith("tmp") and file.is_file() and not file.stat().st_size


def check_nothing_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 30
    while (left := processes_in(directory)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes that still run: {left}"
    names = os.listdir(directory / "tmp") if (directory / "tmp").exists() else []
    files = [
        name for name in names if not name.startswith(_MAY_STAY) and not _counts_descriptors(directory / "tmp" / name)
    ]
    assert not files, f"temporary files that are left: {files}"
