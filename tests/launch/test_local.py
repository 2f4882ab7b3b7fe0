import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import StartError
from paceline.launchers import prepare as preparation
from paceline.launchers.base import Launch, Request, RunResult
from paceline.launchers.local import launcher as local_launcher
from paceline.launchers.local.child import command_of
from paceline.launchers.local.launcher import ChildProcess
from paceline.launchers.workers import Supervisor, Workers


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    def make(body: str, workers: int = 2, **fields: object) -> Launch:
        path = tmp_path / "train.py"
        path.write_text("import os, signal, subprocess, sys, time\n" + textwrap.dedent(body))
        request = Request(path, workers=workers, runs=tmp_path / "runs", preload=False, **fields)  # type: ignore[arg-type]
        return held.enter_context(preparation.prepare(request))

    with contextlib.ExitStack() as held:
        yield make


def run(launch: Launch) -> tuple[RunResult, list[tuple[str, str]]]:
    shown: list[tuple[str, str]] = []
    with Workers(launch, lambda name, line: shown.append((name, line))) as workers:
        result = workers.wait()
    return result, shown


def test_all_workers_run_and_everything_is_kept(prepare: Callable[..., Launch]) -> None:
    launch = prepare(
        """
        print("out", os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:])
        print("err", file=sys.stderr)
        """,
        workers=3,
        arguments=("--set", "x=1"),
    )
    result, shown = run(launch)
    assert [one.code for one in result.exits] == [0, 0, 0]
    assert sorted(shown) == [("stderr", "err"), ("stdout", "out 0 3 ['--set', 'x=1']")]
    for rank in range(3):
        assert sorted(launch.output(rank).read_text().splitlines()) == [
            "err",
            f"out {rank} 3 ['--set', 'x=1']",
        ]


def test_output_is_raw_and_complete(prepare: Callable[..., Launch]) -> None:
    launch = prepare("sys.stdout.buffer.write(bytes(range(256)) * 4096); sys.exit(int(os.environ['RANK']))")
    run(launch)
    for rank in (0, 1):
        assert launch.output(rank).read_bytes() == bytes(range(256)) * 4096


def test_one_failure_ends_all(prepare: Callable[..., Launch]) -> None:
    result, _ = run(
        prepare(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            run, rank = os.environ["PACELINE_RUN"], os.environ["RANK"]
            if rank == "1":
                until = time.monotonic() + 60
                while not all(os.path.exists(f"{run}/up-{other}") for other in (0, 2)):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                sys.exit(3)
            open(f"{run}/up-{rank}", "w").close()
            time.sleep(600)
            """,
            workers=3,
        )
    )
    assert [(one.code, one.stopped) for one in result.exits] == [(-9, True), (3, False), (-9, True)]


def test_families_end_with_their_worker(prepare: Callable[..., Launch], tmp_path: Path) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {str(tmp_path)!r}])"
    run(prepare(child))  # the fixture looks for what is left


def test_leaving_the_block_ends_the_workers(prepare: Callable[..., Launch]) -> None:
    with pytest.raises(ZeroDivisionError), Workers(prepare("time.sleep(600)"), lambda name, line: None):
        raise ZeroDivisionError


@pytest.fixture
def in_vain(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChildProcess]]:
    """Workers whose first kill does nothing, as that of one which does not lead its group yet."""
    kill: Callable[[ChildProcess], None] = ChildProcess.kill
    killed: list[ChildProcess] = []

    def late(worker: ChildProcess) -> None:
        if worker in killed:
            kill(worker)
        killed.append(worker)

    monkeypatch.setattr(ChildProcess, "kill", late)
    yield killed
    for worker in killed:
        kill(worker)


def test_leaving_the_block_kills_until_the_workers_have_ended(
    prepare: Callable[..., Launch], in_vain: list[ChildProcess]
) -> None:
    with Workers(prepare("time.sleep(600)"), lambda name, line: None):
        pass
    assert len(in_vain) >= 4


def test_workers_that_must_end_are_killed_until_they_have(
    prepare: Callable[..., Launch], in_vain: list[ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "grace", lambda _: (0.0, 0.0))
    monkeypatch.setattr("paceline.launchers.workers._AGAIN_SECONDS", 0.1)
    result, _ = run(
        prepare(
            """
            up = os.environ["PACELINE_RUN"] + "/up"
            if os.environ["RANK"] == "1":
                until = time.monotonic() + 60
                while not os.path.exists(up):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                sys.exit(3)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(up, "w").close()
            time.sleep(600)
            """
        )
    )
    assert [(one.code, one.stopped) for one in result.exits] == [(-9, True), (3, False)]
    assert len(in_vain) >= 3


def test_a_worker_that_cannot_start(prepare: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    launch = prepare("time.sleep(600)")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StartError, match="Worker 0 of 2 could not be started"):
        run(launch)


def test_signal_handlers_are_put_back(prepare: Callable[..., Launch]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(prepare("pass", workers=1))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


LAUNCHER = """
import signal, sys
from pathlib import Path
from paceline.launchers.base import Request
from paceline.launchers.workers import Workers
from paceline.launchers.prepare import prepare

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
request = Request(Path(sys.argv[1]), workers=2, runs=Path(sys.argv[2]), preload=False, grace_seconds=1000)
with prepare(request) as launch, Workers(launch, lambda name, line: print(line, flush=True)) as workers:
    print("signal", workers.wait().signal)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """A launcher in a process of its own, once its rank 0 has said that it is up with a child of its own.

    After some minutes it is killed, so that no test waits for it without end.
    """
    deadlines = []

    def start(body: str) -> "subprocess.Popen[str]":
        script = tmp_path / "train.py"
        child = f"[sys.executable, '-c', 'import time; time.sleep(600)', {str(tmp_path)!r}]"
        head = f"import os, signal, subprocess, sys, time\nsubprocess.Popen({child})\n"
        script.write_text(head + textwrap.dedent(body) + "\nprint('up')\ntime.sleep(600)\n")
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), str(tmp_path / "runs")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(preparation.__file__).parents[2])},
        )
        deadlines.append(threading.Timer(240, process.kill))
        deadlines[-1].start()
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for deadline in deadlines:
        deadline.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_workers(
    launcher: Callable[[str], "subprocess.Popen[str]"], number: signal.Signals
) -> None:
    says = "signal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), os._exit(0)))"
    with launcher(says) as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == ["asked", f"signal {number.value}"]


def test_a_second_signal_does_not_wait(launcher: Callable[[str], "subprocess.Popen[str]"]) -> None:
    with launcher("signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"  # the launcher has seen the first one
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == f"signal {signal.SIGTERM.value}\n"


def test_a_second_notice_does_not_hasten(launcher: Callable[[str], "subprocess.Popen[str]"]) -> None:
    """Slurm sends SIGTERM to all processes of a job, and srun passes SIGUSR1 on."""
    says = """
        def leave(*_):
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(1)  # many times as long as the launcher takes to see it
            print('saved', flush=True)
            os._exit(0)
        signal.signal(signal.SIGTERM, leave)
    """
    with launcher(says) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == ["saved", f"signal {signal.SIGTERM.value}"]


def test_nothing_outlives_a_killed_launcher(launcher: Callable[[str], "subprocess.Popen[str]"]) -> None:
    with launcher("") as process:
        process.kill()  # the fixture looks for what is left


def test_a_killed_launcher_ends_no_group_of_an_ended_worker() -> None:
    """Its id may be that of another program by then, which leads a group as well."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    ended, runs, later = [subprocess.Popen(sleeps, start_new_session=True) for _ in range(3)]
    lines = f"{ended.pid}\n{runs.pid}\n-{ended.pid}\n{later.pid}\n"
    subprocess.run(["/bin/sh", "-c", local_launcher._REAPER], input=lines, text=True, check=True, timeout=60)
    assert [process.wait(60) for process in (runs, later)] == [-signal.SIGKILL] * 2
    assert ended.poll() is None
    ended.kill()
    ended.wait()


def test_the_reaper_is_told_of_workers_that_have_ended(
    prepare: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "_REAPER", f"cat > '{tmp_path}/told'")
    result, _ = run(prepare("pass"))
    numbers = [one.pid for one in result.exits]
    *told, last = (tmp_path / "told").read_text().splitlines()
    assert last == "done"
    assert sorted(map(int, told)) == sorted([*numbers, *(-number for number in numbers)])


STARTS = """
import os, sys
from pathlib import Path
from paceline.launchers.base import Request
from paceline.launchers.prepare import prepare
from paceline.launchers.workers import Workers

os.register_at_fork(before=lambda: print("forked", flush=True))
request = Request(Path(sys.argv[1]), workers=2, runs=Path(sys.argv[2]), preload=False)
with prepare(request) as launch, Workers(launch, lambda name, line: print(line, flush=True)) as workers:
    print([one.code for one in workers.wait().exits])
"""


def test_no_python_runs_between_the_fork_and_the_worker(tmp_path: Path) -> None:
    """A fork beside threads copies the locks that they hold."""
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nprint(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT))")
    ran = subprocess.run(
        [sys.executable, "-c", STARTS, str(script), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(preparation.__file__).parents[2])},
    )
    assert ran.stdout.splitlines() == ["True <built-in function default_int_handler>", "[0, 0]"], ran.stderr


def test_a_command_that_is_not_there() -> None:
    command = command_of(frozenset(), ("/nowhere/python", "train.py"))
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (127, "/nowhere/python cannot be started: No such file or directory.\n")


def test_a_worker_is_bound_to_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    command = command_of(frozenset([core]), (sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"))
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == f"{{{core}}}\n"


def test_without_its_launcher_a_worker_does_not_start() -> None:
    command = command_of(frozenset(), (sys.executable, "-c", "print('up')"))
    command[command.index(str(os.getpid()))] = "1"
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "")
