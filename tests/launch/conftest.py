import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def processes_of(directory: Path) -> list[str]:
    """The command lines of running processes that name this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in line:
            found.append(line)
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Every test ends with all its processes gone. The scripts are named by their whole path for this."""
    yield
    deadline = time.monotonic() + 5
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
