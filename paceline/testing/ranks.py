"""Runs of a script on several worker processes of this machine, with the option to kill some of them.

::

    first, second = run("train.py", 2, tmp_path, kill=Kill("step 7", ranks=(1,)))
    assert second.signal == "SIGKILL" and "rank 1" in first.err

All started processes have ended when :func:`run` returns or raises.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.environments import env
from paceline.launchers.machine import choose_port

_POLL_SECONDS = 0.01
_PACKAGES = str(Path(__file__).resolve().parents[2])
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Kill:
    """Order to kill workers simultaneously as soon as a worker has printed a text.

    Attributes:
        text: text to look for in the standard output.
        ranks: ranks to kill. Defaults to all.
        by: rank of the worker whose output is searched.
        signal: signal to send. Defaults to SIGKILL.
    """

    text: str
    ranks: tuple[int, ...] | None = None
    by: int = 0
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Worker:
    """Specification of a worker process: its rank, script, environment and output files."""

    rank: int
    script: Path
    environment: dict[str, str]
    out: Path
    err: Path


@dataclass(frozen=True)
class Ended:
    """Result of a worker that has ended.

    ``code`` is negative if a signal ended the worker. ``late`` is true if it did not end in time and was killed.
    """

    rank: int
    code: int
    out: str
    err: str
    late: bool = False

    @property
    def signal(self) -> str:
        """Name of the signal that ended the worker. Empty if it exited by itself."""
        return signal.Signals(-self.code).name if self.code < 0 else ""


class Process(Protocol):
    """Started process, such as a ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the process."""

    def wait(self) -> object:
        """Wait until the process has ended."""


def run(  # noqa: PLR0913 - all but the first three are rarely given
    script: str | Path,
    workers: int,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    kill: Kill | None = None,
    deadline: float = 120.0,
    one_machine: bool = True,
    machines: Sequence[int] = (),
    absent: Sequence[int] = (),
    start: Callable[[list[Worker]], Sequence[Process]] | None = None,
    after_failure: float | None = None,
) -> list[Ended]:
    """Run a script on several workers and wait until all have ended.

    Args:
        script: text of the script, or the path of a file.
        workers: number of workers.
        directory: directory for the script's text and the output of the workers.
        environment: additional environment variables for all workers.
        kill: workers to kill, and the output that triggers it.
        deadline: seconds after which workers that still run are killed.
        one_machine: whether all workers count as on one machine. If false, each is alone and uses the network.
        machines: number of workers on each simulated machine. If empty, ``one_machine`` decides.
        absent: ranks that are not started.
        start: function that starts the processes. Defaults to :func:`start_new`.
        after_failure: seconds that the others have to end after a failure before they are killed. Defaults to the time
            until the deadline.

    Raises:
        TimeoutError: not all workers ended before the deadline. The message shows their output.
    """
    sizes = machines or ([workers] if one_machine else [1] * workers)
    places = [(rank, size) for size in sizes for rank in range(size)]
    path = _path_of(script, directory)
    started = [_worker(rank, workers, path, directory, place) for rank, place in enumerate(places)]
    port = str(choose_port(None))
    for worker in started:
        worker.environment.update({"MASTER_PORT": port, **(environment or {})})
    started = [worker for worker in started if worker.rank not in absent]
    with _ending((start or start_new)(started)) as processes:
        until = time.monotonic() + deadline
        late = _wait(started, processes, kill, until, after_failure)
    codes = [process.poll() for process in processes]
    if late and time.monotonic() > until:
        said = "\n".join(f"-- rank {one.rank}\n{one.out.read_text()}{one.err.read_text()}" for one in started)
        raise TimeoutError(f"Still running after {deadline:.0f} s: ranks {', '.join(map(str, late))}.\n{said}")
    return [
        Ended(
            worker.rank,
            code or 0,
            worker.out.read_text(errors="replace"),
            worker.err.read_text(errors="replace"),
            worker.rank in late,
        )
        for worker, code in zip(started, codes, strict=True)
    ]


def start_new(workers: list[Worker]) -> Sequence[Process]:
    """Start a new Python process for each worker."""
    processes = []
    for worker in workers:
        with worker.out.open("wb") as out, worker.err.open("wb") as err:
            command = [sys.executable, str(worker.script)]
            processes.append(
                subprocess.Popen(command, env=worker.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            )
    return processes


def _path_of(script: str | Path, directory: Path) -> Path:
    if isinstance(script, Path):
        return script
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "script.py"
    path.write_text(script)
    return path


def _worker(rank: int, workers: int, script: Path, directory: Path, place: tuple[int, int]) -> Worker:
    own = {name: value for name, value in env.inherited().items() if name not in _LAUNCHER}
    own = {name: value for name, value in own.items() if not name.startswith(("PACELINE_", "TORCHELASTIC_"))}
    own["PYTHONPATH"] = ":".join(filter(None, [_PACKAGES, own.get("PYTHONPATH", "")]))
    own.update(PYTHONUNBUFFERED="1", MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(workers))
    own.update(LOCAL_RANK=str(place[0]), LOCAL_WORLD_SIZE=str(place[1]))
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return Worker(rank, script, own, directory / f"rank-{rank}.out", directory / f"rank-{rank}.err")


def _wait(
    workers: list[Worker], processes: Sequence[Process], kill: Kill | None, until: float, after_failure: float | None
) -> list[int]:
    """Wait until all workers have ended, and send the kill. Return the ranks that still run after the time limit."""
    failed = False
    while any(process.poll() is None for process in processes):
        if kill is not None and any(kill.text in one.out.read_text() for one in workers if one.rank == kill.by):
            pairs = zip(workers, processes, strict=True)
            chosen = [process for worker, process in pairs if kill.ranks is None or worker.rank in kill.ranks]
            _send(kill.signal, chosen)
            kill = None
        if after_failure is not None and not failed and any(process.poll() for process in processes):
            failed, until = True, min(until, time.monotonic() + after_failure)
        if time.monotonic() > until:
            pairs = zip(workers, processes, strict=True)
            return [worker.rank for worker, process in pairs if process.poll() is None]
        time.sleep(_POLL_SECONDS)
    return []


def _send(number: signal.Signals, processes: Sequence[Process]) -> None:
    """Send a signal to all processes. Before SIGKILL, stop them all, so that no process sees the loss of another."""
    for each in [signal.SIGSTOP, number] if number == signal.SIGKILL and len(processes) > 1 else [number]:
        for process in processes:
            process.send_signal(each)


@contextlib.contextmanager
def _ending(processes: Sequence[Process]) -> Iterator[Sequence[Process]]:
    """Kill the processes that still run on exit."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()
