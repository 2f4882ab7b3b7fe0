"""Run a script on several worker processes of this machine, and kill some of them on the way.

::

    first, second = run("train.py", 2, tmp_path, kill=Kill("step 7", ranks=(1,)))
    assert second.signal == "SIGKILL" and "rank 1" in first.err

Every process started here has ended when :func:`run` returns, however it returns.
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

_LOOK_SECONDS = 0.01
_PACKAGES = str(Path(__file__).resolve().parents[2])
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Kill:
    """Kill some workers at once when a worker has printed a text.

    Attributes:
        text: what to look for in the standard output.
        ranks: whom to kill; none: all.
        by: the worker whose output to look at.
        signal: another signal than SIGKILL.
    """

    text: str
    ranks: tuple[int, ...] | None = None
    by: int = 0
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Worker:
    """What one process is to run, with which environment, and where its output goes."""

    rank: int
    script: Path
    environment: dict[str, str]
    out: Path
    err: Path


@dataclass(frozen=True)
class Ended:
    """How a worker ended.

    ``code`` is negative if a signal ended it; ``late`` if it was killed for not ending after the failure of another.
    """

    rank: int
    code: int
    out: str
    err: str
    late: bool = False

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        return signal.Signals(-self.code).name if self.code < 0 else ""


class Process(Protocol):
    """A process that was started; ``subprocess.Popen`` is one."""

    def poll(self) -> int | None:
        """The exit code; none while it runs."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal to it."""
        ...

    def wait(self) -> object:
        """Wait until it has ended."""
        ...


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
        script: its text, or the path of a file.
        workers: how many.
        directory: where to write the script's text and the output of the workers.
        environment: more variables for all of them.
        kill: whom to kill, and when.
        deadline: seconds after which workers that still run are killed.
        one_machine: false: each worker counts as alone on a machine, so that they talk over the network.
        machines: how many workers count as being on each machine; empty: as ``one_machine`` says.
        absent: ranks that are not started.
        start: starts the processes; the default starts a new Python for each.
        after_failure: seconds that the others have to end once one has failed; those that still run then are killed.
            None: they have until the deadline.

    Raises:
        TimeoutError: not all workers ended before the deadline; shows what they printed.
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
    """Start a new Python for each worker."""
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
    """Wait for all to end, and kill on the way; return the ranks that still run after the deadline."""
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
        time.sleep(_LOOK_SECONDS)
    return []


def _send(number: signal.Signals, processes: Sequence[Process]) -> None:
    """Send a signal to all; stop all before killing any, so that none of them sees another one gone."""
    for each in [signal.SIGSTOP, number] if number == signal.SIGKILL and len(processes) > 1 else [number]:
        for process in processes:
            process.send_signal(each)


@contextlib.contextmanager
def _ending(processes: Sequence[Process]) -> Iterator[Sequence[Process]]:
    """Kill what still runs on the way out."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()
