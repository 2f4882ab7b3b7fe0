"""Only one launcher has the directory of a run, until it ends, however it ends."""

from __future__ import annotations

import errno
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.lease import lease

HOLD = """
import sys
from pathlib import Path
from paceline.launchers import runs
from paceline.launchers.base import Request

folder, *resume = sys.argv[1:]
request = Request(Path("train.py"), runs=Path(folder), name="mine", settings={"resume": "auto"} if resume else {})
try:
    with runs.claim(request):
        print("has it", flush=True)
        sys.stdin.read()
except ValueError as error:
    print(error, flush=True)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that claims a run and keeps it until its input ends."""
    running: list[subprocess.Popen[str]] = []

    def of(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), *words]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield of
    for one in running:
        one.kill()
        one.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def resumed(tmp_path: Path) -> Request:
    return Request(Path("train.py"), runs=tmp_path, name="mine", settings={"resume": "auto"})


@pytest.mark.slow
def test_of_two_at_once_one_has_it(start: Start) -> None:
    processes = [start() for _ in range(4)]
    found = sorted(map(said, processes), key=len)
    assert found[0] == "has it"
    assert all("exists already" in text or "in use" in text for text in found[1:]), found


@pytest.mark.slow
def test_of_two_that_resume_at_once_one_has_it_and_is_named(start: Start) -> None:
    processes = [start("resume") for _ in range(3)]
    found = {process.pid: said(process) for process in processes}
    (holder,) = [pid for pid, text in found.items() if text == "has it"]
    others = [text for text in found.values() if text != "has it"]
    assert all("is in use by another launcher" in text for text in others), others
    again = said(start("resume"))
    assert f": process {holder} on {platform.node()}, since 20" in again


def test_a_run_that_another_launcher_creates_after_the_look_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    looks = []

    def created_after_the_first_look(path: Path) -> bool:
        looks.append(path)
        found = exists(path)
        path.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", created_after_the_first_look)
    with runs.claim(resumed(tmp_path)) as run:
        assert run == tmp_path / "mine"
    assert looks


def test_a_killed_launcher_has_nothing(start: Start, tmp_path: Path) -> None:
    first = start()
    assert said(first) == "has it"
    with pytest.raises(ConfigError, match=f"process {first.pid} on "), runs.claim(resumed(tmp_path)):
        pass
    first.send_signal(signal.SIGKILL)
    first.wait()
    with runs.claim(resumed(tmp_path)) as run:
        assert run == tmp_path / "mine"


def test_unnamed_runs_of_the_same_second_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    request = Request(Path("train.py"), runs=tmp_path)

    def one(_: int) -> str:
        with runs.claim(request) as run:
            return run.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(one, range(32)))
    assert len(set(names)) == 32


def test_a_name_that_is_taken_after_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train-now").mkdir()
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    exists, first = Path.exists, iter([False])
    monkeypatch.setattr(Path, "exists", lambda path: next(first, True) and exists(path))
    with runs.claim(Request(Path("train.py"), runs=tmp_path)) as run:
        assert run.name == "train-now-2"


def test_a_folder_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with lease(tmp_path), lease(tmp_path):
        pass


def test_another_machine_of_the_run_needs_no_lease(start: Start, tmp_path: Path) -> None:
    assert said(start()) == "has it"
    with runs.claim(Request(Path("train.py"), runs=tmp_path, name="mine", first=1000)) as run:
        assert run == tmp_path / "mine"
