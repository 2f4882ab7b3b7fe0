"""For scripts and tests in which a worker waits until the others are there, or have ended."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS = 240.0


def note(folder: Path, rank: int) -> None:
    """Say which process has this rank."""
    own = folder / f"{rank}.new"
    own.write_text(str(os.getpid()))
    own.rename(_file(folder, rank))


def await_all(folder: Path, workers: int) -> None:
    """Until so many workers have said it."""
    until(lambda: all(_file(folder, rank).exists() for rank in range(workers)))


def await_end(folder: Path, ranks: Sequence[int]) -> None:
    """Until the processes of these ranks have said it and have ended."""
    until(lambda: have_ended(folder, ranks))


def have_ended(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether the processes of these ranks have ended; those that have not said it yet have not."""
    files = [_file(folder, rank) for rank in ranks]
    return all(file.exists() and not _runs(int(file.read_text())) for file in files)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pid"


def _runs(process: int) -> bool:
    """Whether it does more than wait to be waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], bool]) -> None:
    """Wait, but not without end."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
