"""Workers that are forked from one process: each is as a new Python would be."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launchers import early
from paceline.launchers.base import Launch, WorkerProcess, WorkerSpec
from paceline.launchers.local import preload, unsafe
from paceline.launchers.local.launcher import LocalLauncher
from paceline.launchers.local.preload import Forked, Preload

PACKAGES = str(Path(unsafe.__file__).parents[3])
HASH_SEED = "11"
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def launch_of(script: Path, preload: bool = True, **more: str) -> Launch:
    environment = {**os.environ, "PYTHONPATH": PACKAGES, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1", **more}
    return Launch(script, (), 2, script.parent, environment, preload=preload)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def forking(folder: Path) -> Iterator[LocalLauncher]:
    """A launcher whose parent is ready; one for all tests, as that takes seconds."""
    script = folder / "first.py"
    script.write_text("import torch")
    launcher, notes = LocalLauncher(), list[str]()
    launcher.note = notes.append
    launcher.begin(launch_of(script))
    launcher.wait_until_ready(lambda: False)
    assert notes == []
    yield launcher
    launcher.close()


@pytest.fixture
def anew() -> Iterator[LocalLauncher]:
    launcher = LocalLauncher()
    yield launcher
    launcher.close()


class Ran:
    """A worker with all that it printed."""

    def __init__(self, launcher: LocalLauncher, script: Path, words: tuple[str, ...] = (), **more: str) -> None:
        launch = launch_of(script, **more)
        for parent in launcher._preloads.values():
            parent._script = str(script)  # one parent for the scripts of all tests
        self.files = [script.with_suffix(f".{name}") for name in ("out", "err")]
        opened = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for path in self.files]
        command = (sys.executable, "-u", str(script), *words)
        try:
            self.process: WorkerProcess = launcher.start(WorkerSpec(0, command, launch.environment), *opened)
        finally:
            for one in opened:
                os.close(one)

    def end(self) -> tuple[int, str, str]:
        until = time.monotonic() + 60
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        self.process.kill()
        return (code, *(path.read_text() for path in self.files))


@pytest.fixture
def both(folder: Path, forking: LocalLauncher, anew: LocalLauncher) -> Callable[..., list[tuple[int, str, str]]]:
    """Run a script each way; gives how it ended, and what it printed."""

    def run(body: str, **more: str) -> list[tuple[int, str, str]]:
        script = folder / "train.py"
        script.write_text(textwrap.dedent(body))
        ended = []
        for launcher in (forking, anew):
            ran = Ran(launcher, script, **more)
            assert isinstance(ran.process, Forked) == (launcher is forking)
            ended.append(ran.end())
        return ended

    return run


FACTS = """
import gc, inspect, json, os, resource, signal, sys, threading
main, standard = sys.modules["__main__"], (sys.stdin, sys.stdout, sys.stderr)
opened = [int(name) for name in os.listdir("/proc/self/fd")]
facts = {
    "environment": dict(os.environ),
    "arguments": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "flags": [repr(sys.flags), sys.warnoptions, repr(sys._xoptions), hash("text"), sys.getrecursionlimit()],
    "main": {name: repr(value) for name, value in vars(main).items() if name[:2] == "__" and name != "__loader__"},
    "loader": [type(__loader__).__name__, __loader__.name, __loader__.path, main.__dict__ is globals()],
    "directory": os.getcwd(),
    "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "umask": os.umask(0o22),
    "files": sorted(number for number in opened if os.path.exists(f"/proc/self/fd/{number}")),
    "cores": sorted(os.sched_getaffinity(0)),
    "nice": os.nice(0),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "standard": [
        (one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.seekable(),
         one.isatty(), one.fileno(), type(one.buffer).__name__) for one in standard
    ],
    "same": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "collects": [gc.isenabled(), gc.get_threshold()],
    "hooks": str([sys.excepthook, sys.displayhook, threading.excepthook]),
    "threads": [len(os.listdir("/proc/self/task")), threading.main_thread().native_id == os.getpid()],
    "name": open("/proc/self/comm").read(),
    "source": inspect.getsource(main),
}
print(json.dumps(facts))
"""


def test_a_fork_is_as_a_new_python(both: Callable[..., list[tuple[int, str, str]]]) -> None:
    (code, out, err), (_, expected, _) = both(FACTS, RANK="1", PACELINE_WORKER_SECRET="ab")
    assert (code, err) == (0, "")
    facts: dict[str, Any] = json.loads(out)
    assert facts == json.loads(expected)
    assert facts["parent"] == os.getpid()


ENDINGS = {
    "the end": "print('done')",
    "a code": "import sys; sys.exit(3)",
    "a text": "import sys; print('out'); sys.exit('that is all')",
    "an error": "def inner():\n    raise ValueError('no')\ninner()",
    "a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('a') from error",
    "a note": "error = ValueError('no')\nerror.add_note('more')\nraise error",
    "a group": "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])",
    "a hook": "import sys\nsys.excepthook = lambda *a: print(a[2].tb_lineno, sys.last_traceback is a[2])\n1 / 0",
    "a hook that fails": "import sys\ndef hook(*given):\n    1 / 0\nsys.excepthook = hook\nraise ValueError('no')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "asked to end": "import os, time; os.kill(os.getpid(), 15); time.sleep(60)",
    "interrupted": "import os, time; os.kill(os.getpid(), 2); time.sleep(60)",
    "a write that fails": "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
    "at exit": "import atexit; atexit.register(print, 'at exit'); print('first')",
    "an open file": "import sys\nkept = open(__file__ + '.kept', 'w')\nkept.write('text')",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", ENDINGS.values(), ids=ENDINGS)
def test_a_fork_ends_as_a_new_python(body: str, both: Callable[..., list[tuple[int, str, str]]], folder: Path) -> None:
    forked, expected = both(body)
    assert forked == expected
    if "kept" in body:
        assert (folder / "train.py.kept").read_text() == "text"


def test_memory_is_shared(folder: Path, forking: LocalLauncher) -> None:
    script = folder / "memory.py"
    script.write_text("print(open('/proc/self/smaps_rollup').read())")
    _, out, _ = Ran(forking, script).end()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in out.splitlines() if line.endswith("kB")}
    assert sizes["Private_Dirty"] < 0.1 * sizes["Rss"]


def test_each_worker_draws_numbers_of_its_own(folder: Path, forking: LocalLauncher) -> None:
    script = folder / "draws.py"
    script.write_text(
        "import multiprocessing, numpy, random\n"
        "print(numpy.random.random(), random.random(), bytes(multiprocessing.current_process().authkey).hex())"
    )
    drawn = [Ran(forking, script).end()[1].split() for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


SPAWNS = """
import multiprocessing, pickle

def square(number):
    return number * number

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(square)) is square
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(square, [2, 3]))
"""


def test_processes_of_the_script(both: Callable[..., list[tuple[int, str, str]]]) -> None:
    assert both(SPAWNS) == [(0, "[4, 9]\n[4, 9]\n", "")] * 2


LOADS = """
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return torch.tensor(number * number)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context=method)
        print([int(one) for one in loader])
"""


@pytest.mark.slow(turns=6)
def test_loaders_of_the_script(both: Callable[..., list[tuple[int, str, str]]]) -> None:
    assert both(LOADS) == [(0, "[0, 1, 4, 9]\n[0, 1, 4, 9]\n", "")] * 2


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch", "names OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '2')", "names MKL_NUM_THREADS"),
        ("import os\nos.environ.update(KMP_BLOCKTIME='1')", "names KMP_BLOCKTIME"),
        ("import os\nfor name in ['OPENBLAS_NUM_THREADS']: os.environ[name] = '1'", "names OPENBLAS_NUM_THREADS"),
        ("import os\nos.environ |= {'TORCH_LOGS': 'all'}", "names TORCH_LOGS"),
        ("if:", "cannot be parsed"),
        ("PK\5\6" + "\0" * 18, "not plain source"),
    ],
)
def test_scripts_that_are_not_forked(source: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    with pytest.raises(unsafe.Unsafe, match=reason):
        unsafe.check_script(str(script))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'), os.getenv('OMP_PLACES')",
        "import os\nif 'OMP_NUM_THREADS' not in os.environ: pass",
        "import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
    ],
)
def test_scripts_that_are_forked(source: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    unsafe.check_script(str(script))


def test_modules_that_a_new_python_would_import_instead(tmp_path: Path) -> None:
    def check(*folders: Path, modules: tuple[str, ...] = ("queue",)) -> None:
        unsafe.check_folders([str(one) for one in folders], {name: sys.modules[name] for name in modules}, {"abc"})

    for name in ("train.py", "abc.py", "queues.py", "time.py"):
        (tmp_path / name).touch()
    (tmp_path / "queue").mkdir()  # no package, so the module is found
    own = Path(PACKAGES)
    check(tmp_path, Path("/nowhere"))
    check(own, modules=("paceline.errors", "paceline"))
    (tmp_path / "queue.py").touch()
    with pytest.raises(unsafe.Unsafe, match=r"queue\.py hides the module queue"):
        check(tmp_path)
    check(Path(os.__file__).parent, tmp_path)  # found in the first one, where it has come from
    (tmp_path / "queue.py").unlink()
    (tmp_path / "queue" / "__init__.py").touch()
    with pytest.raises(unsafe.Unsafe, match="hides the module queue"):
        check(tmp_path)


def test_variables_that_are_changed_too_late() -> None:
    before = {"OMP_NUM_THREADS": "1", "MKL_DEBUG": "1", "OTHER": "1", "KMP_BLOCKTIME": "0"}
    now = {"OMP_NUM_THREADS": "2", "OTHER": "2", "KMP_BLOCKTIME": "0", "KMP_INIT_AT_FORK": "FALSE"}
    assert unsafe.late_variables(before, before) == []
    (warning,) = unsafe.late_variables(before, now)
    assert warning.startswith("MKL_DEBUG, OMP_NUM_THREADS: changed by the script")


def test_a_parent_that_dies(folder: Path) -> None:
    """Workers then start anew; this parent dies while it imports, which costs less than one that is ready."""
    script = folder / "alone.py"
    script.write_text("print('up')\nif False: import torch")
    launcher, notes = LocalLauncher(), list[str]()
    launcher.note = notes.append
    launcher.begin(launch_of(script))
    (parent,) = launcher._preloads.values()
    parent._process.send_signal(signal.SIGKILL)
    launcher.wait_until_ready(lambda: False)
    assert Ran(launcher, script).end() == (0, "up\n", "")
    launcher.close()
    assert notes == ["note: each worker imports torch itself, which takes longer: the process that forks has ended."]


READY = """
import socket, sys
from paceline.launchers.local import messages

channel = socket.socket(fileno=int(sys.argv[1]))
messages.send(channel, {"ready": True})
channel.recv(1)
"""


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preload]:
    """A parent that has imported nothing, and has said that it is ready."""
    (tmp_path / "ready.py").write_text(READY)
    monkeypatch.setattr(preload, "_PARENT", tmp_path / "ready.py")
    parent = Preload(launch_of(tmp_path / "train.py").environment, frozenset(), [str(tmp_path / "train.py")], [])
    assert select.select([parent._channel], [], [], 60)[0]
    yield parent
    parent.close()


def test_a_launcher_that_was_stopped_beyond_the_deadline_takes_the_parent_that_is_ready(ready: Preload) -> None:
    ready._until = time.monotonic() - 1
    assert ready.wait(lambda: False) and ready.problem is None


def test_a_parent_that_dies_before_it_is_asked(ready: Preload) -> None:
    assert ready.wait(lambda: False)
    ready._process.kill()
    ready._process.wait()
    assert ready.fork(WorkerSpec(0, (sys.executable, "-u", "train.py"), os.environ), 1, 2) is None
    assert ready.problem == "the process that forks has ended"


def test_a_parent_that_cannot_import_torch(folder: Path, tmp_path: Path) -> None:
    script = folder / "broken.py"
    script.write_text("import torch")
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is damaged')")
    launcher, notes = LocalLauncher(), list[str]()
    launcher.note = notes.append
    launch = launch_of(script, PYTHONPATH=f"{tmp_path}:{PACKAGES}")
    launcher.begin(launch)
    launcher.wait_until_ready(lambda: False)
    code, _, err = Ran(launcher, script, PYTHONPATH=launch.environment["PYTHONPATH"]).end()
    launcher.close()
    assert (code, err.splitlines()[-1]) == (1, "ImportError: libtorch.so is damaged")
    assert notes == [
        "note: each worker imports torch itself, which takes longer: the imports failed with ImportError: "
        "libtorch.so is damaged."
    ]


def test_a_worker_without_its_launcher_ends(
    folder: Path, forking: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the launcher ends, or gives up, between the fork and its answer."""
    script = folder / "unwanted.py"
    script.write_text("print('up')")
    monkeypatch.setattr(os, "write", lambda opened, data: 0)
    ran = Ran(forking, script)
    monkeypatch.undo()
    assert ran.end() == (1, "", "")


def test_workers_that_need_another_process(forking: LocalLauncher) -> None:
    """Such as those of a launcher that puts a command of its own before Python."""
    (parent,) = forking._preloads.values()
    script = parent._script
    environment = launch_of(Path(script)).environment
    command = (sys.executable, "-u", script)
    assert parent.fits(WorkerSpec(0, (*command, "more"), {**environment, "RANK": "1"}))
    assert not parent.fits(WorkerSpec(0, ("numactl", *command), environment))
    assert not parent.fits(WorkerSpec(0, command, {**environment, "OMP_NUM_THREADS": "3"}))
    assert not parent.fits(WorkerSpec(0, command, {**environment, "PYTHONHASHSEED": "3"}))


def test_processes_of_the_user_are_not_adopted(folder: Path, forking: LocalLauncher) -> None:
    """An adopted process stays a zombie, as nobody waits for it."""
    script = folder / "nothing.py"
    script.write_text("")
    libc, adopts = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    try:
        assert Ran(forking, script).end() == (0, "", "")
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts))
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # as all tests expect
    assert adopts.value == 0


IMPORTS = """
import os
import torch

def refuse(*given):
    raise AssertionError("CUDA was asked")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
torch.Tensor.backward = refuse
calls = []

class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, given=(), named=None):
        calls.append(str(function))
        return function(*given, **(named or {}))

from paceline.launchers.local.parent import import_modules

with Mode():
    import_modules()
print(calls, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
def test_imports_compute_nothing(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"},
    )
    assert ran.stdout == "[] 1\n", ran.stderr


TRAINS = """
import os, sys, time
from functools import partial
from pathlib import Path
import torch
import paceline

run, number = Path(os.environ["PACELINE_RUN"]), int(os.environ["PACELINE_WORKER"])
(run / f".started-{number}").write_text(str(os.getpid()))
(run / f".started-{number}").rename(run / f"started-{number}")
session = paceline.start(
    model=torch.nn.Linear(4, 1),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1)),
    batch=8,
)
for batch in session.batches(steps=100_000):
    session.step(batch)
    (run / f"trained-{number}").touch()
    if session.once((run / "enough").exists):  # the same answer for all, or some would leave the loop before others
        break
"""


@pytest.fixture
def run_elastic(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(*options: str, script: str = TRAINS) -> subprocess.Popen[str]:
        path = tmp_path / "train.py"
        path.write_text(script)
        words = ["run", "-n", "2", "--elastic", "1:2", "--name", "it", "--runs-dir", str(tmp_path), *options, str(path)]
        environment = {**os.environ, "PYTHONPATH": PACKAGES}
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words], env=environment, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_file(path: Path, seconds: float = 240) -> str:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)
    return path.read_text()


def parents_of(launcher: int) -> list[int]:
    """The processes that fork for a launcher."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        status = Path(f"/proc/{child}/stat").read_text()
        cmdline = Path(f"/proc/{child}/cmdline").read_text()  # none of one that has ended
        if "/local/parent.py" in "".join(cmdline.split("\0")[2:3]) and int(child) == int(status.split()[0]):
            found.append(int(child))
    return found


@pytest.mark.slow(turns=6)
def test_without_its_parent_a_run_goes_on(run_elastic: Callable[..., Any], tmp_path: Path) -> None:
    process, run = run_elastic(), tmp_path / "it"
    workers = [int(await_file(run / f"started-{number}")) for number in (0, 1)]
    await_file(run / "trained-1")
    forked = parents_of(process.pid)
    (parent,) = set(forked) - set(workers)
    os.kill(parent, signal.SIGKILL)
    os.kill(workers[1], signal.SIGKILL)
    await_file(run / "trained-2")
    assert "parent.py" not in Path(f"/proc/{await_file(run / 'started-2')}/cmdline").read_text()
    (run / "enough").touch()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "note: each worker imports torch itself, which takes longer: the process that forks has ended" in err


@pytest.mark.slow
def test_nothing_that_was_forked_outlives_a_killed_launcher(run_elastic: Callable[..., Any], tmp_path: Path) -> None:
    process = run_elastic()
    await_file(tmp_path / "it" / "trained-1")
    assert len(parents_of(process.pid)) == 3  # workers are shown with the command line of their parent
    process.kill()  # the fixture looks for what is left


@pytest.mark.slow
def test_a_folder_that_hides_a_module(run_elastic: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("from _queue import *\nfrom _queue import SimpleQueue\nOWN = 1\n")
    process = run_elastic(script="import queue\nprint('own', queue.OWN)\nif False: import torch")
    _, err = process.communicate(timeout=240)
    assert (process.returncode, "own 1") == (0, (tmp_path / "it" / "output" / "rank-1.log").read_text().strip())
    assert f"note: each worker imports torch itself, which takes longer: {tmp_path}/queue.py hides" in err


@pytest.mark.slow
def test_no_preload(run_elastic: Callable[..., Any], tmp_path: Path) -> None:
    process = run_elastic("--no-preload", script="print(open('/proc/self/cmdline').read().count('parent.py'))")
    process.communicate(timeout=240)
    assert (process.returncode, (tmp_path / "it" / "output" / "rank-1.log").read_text()) == (0, "0\n")


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ([], {}, (4, False)),
        (["batch=8", "threads=3"], {"PACELINE_THREADS": "2"}, (3, True)),
        ([], {"PACELINE_THREADS": "2"}, (2, True)),
        (["exact=true"], {}, (1, False)),
        (["exact=false"], {"PACELINE_EXACT": "1"}, (4, False)),
        (["threads=many"], {}, (4, False)),
    ],
)
def test_a_guess_of_the_threads(settings: list[str], environment: dict[str, str], expected: tuple[int, bool]) -> None:
    assert early.guess_threads(settings, environment, 4) == expected


def test_what_has_begun_early(folder: Path) -> None:
    script = folder / "early.py"
    script.write_text("import torch")
    launch = launch_of(script)
    taken = {}
    for threads in ("1", "2"):
        LocalLauncher.begin_early(launch.command(), {**launch.environment, "OMP_NUM_THREADS": threads})
        begun = LocalLauncher._early
        launcher = LocalLauncher()
        launcher.begin(launch)
        taken[threads] = begun in launcher._preloads.values()
        assert LocalLauncher._early is None
        launcher.close()
    assert taken == {"1": True, "2": False}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os, sys\nfrom multiprocessing import Pool", False),
        ("if:", False),
        ("def run():\n    import torch", True),
        ("from own import train", True),
        ("from . import own", True),
        ("import runpy\nrunpy.run_path('other.py')", True),
        ("exec(open('other.py').read())", True),
    ],
)
def test_scripts_that_need_libraries(source: str, expected: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert unsafe.needs_libraries(str(script)) == expected
