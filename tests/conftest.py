import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import failures
import pytest
from fork_server import PACELINE, Command, ForkServer, adopt_orphans
from launching import Ran, Result, Run, check_nothing_is_left, environment_in, launch

from paceline.testing import ranks as processes
from paceline.testing.faults import Plan

adopt_orphans()
for number in (signal.SIGINT, signal.SIGHUP):  # a shell starts what runs in the background without them
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

Ranks = Callable[..., list[processes.Ended]]
_SECONDS_TO_END = 30.0
_TURNS = 3
_OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}
"""Set when torch is first asked to look for its compiler."""
_OF_PYTEST = {"PYTEST_CURRENT_TEST"}


def _descendants() -> dict[int, str]:
    """The command lines of the running processes that come from this one, by their id.

    Orphans are among them: this process adopts them.
    """
    found: dict[int, str] = {}
    waiting = _children(os.getpid())
    while waiting:
        pid = waiting.pop()
        waiting += _children(pid)
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if state not in "ZX":
            found[pid] = line[:200]
    return found


def _children(pid: int) -> list[int]:
    """The processes that this one has started; the kernel's list, as a look at all processes takes 0.01 s a test."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has
                found += map(int, path.read_text().split())
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {*_OF_PYTEST, *_OF_TORCH}}


def _process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def pytest_runtest_setup() -> None:
    failures.used.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the output and the events of a failed test's processes, and show the end of their output."""
    report = yield
    if report.failed:
        given = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Path)]
        folders = [path for path in [*given, *failures.used] if path.is_dir()]
        folder = failures.keep(item.nodeid, report.longreprtext, folders, afresh=report.when != "teardown")
        report.sections.append((f"processes; all of it is in {folder}", failures.last_lines(folder)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what ``sampled`` and ``crossed`` make slow.

    Where ``TESTS_TURN`` is set to a number, take a third of the slow tests and of those of engines in turn, or as few
    as their marks tell.
    """
    for item in _slow_by_sample(items):
        sampled = item.get_closest_marker("sampled")
        item.add_marker(pytest.mark.slow(**(sampled.kwargs if sampled else {})))
    if turn := os.environ.get("TESTS_TURN"):
        left_out = set(_not_in_turn(items, int(turn)))
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what imports and collection have made out of later garbage collections, which take 0.4 s with it."""
    gc.collect()
    gc.freeze()


def _slow_by_sample(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The later cases of a ``sampled`` test, and those off the diagonal of a ``crossed`` one."""
    taken: Counter[tuple[Path, str]] = Counter()
    crossed: dict[pytest.Function, tuple[int, ...]] = {}
    axes: dict[object, list[list[str]]] = {}  # of each test: the values of each ``parametrize``, in their order
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if (sampled := item.get_closest_marker("sampled")) and not item.get_closest_marker("slow"):
            taken[item.path, item.originalname] += 1
            if taken[item.path, item.originalname] > sampled.args[0]:
                yield item
        if item.get_closest_marker("crossed"):
            given = [_values(item, mark) for mark in item.iter_markers("parametrize")]
            known = axes.setdefault((item.path, item.originalname), [[] for _ in given])
            for value, values in zip(given, known, strict=True):
                if value not in values:
                    values.append(value)
            crossed[item] = tuple(values.index(value) for value, values in zip(given, known, strict=True))
    for item, place in crossed.items():
        sizes = [len(values) for values in axes[item.path, item.originalname]]
        if place not in {tuple(number % size for size in sizes) for number in range(max(sizes))}:
            yield item


def _not_in_turn(items: list[pytest.Item], turn: int) -> Iterator[pytest.Item]:
    """The slow tests, and those of engines, whose turn it is not. A test keeps its turn when others are added."""
    for item in items:
        mark = item.get_closest_marker("place") or item.get_closest_marker("slow")
        if mark and (zlib.crc32(item.nodeid.encode()) - turn) % mark.kwargs.get("turns", _TURNS):
            yield item


def _values(item: pytest.Function, mark: pytest.Mark) -> str:
    names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
    return repr([item.callspec.params[name.strip()] for name in names])


@pytest.fixture(autouse=True, scope="session")
def no_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What processes leave in the folder for temporary files goes with it, such as the sockets of torch's loaders."""
    tmp_path_factory.getbasetemp()  # not in there: pytest keeps the newest ones to look at
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def fork_server(no_temporary_files: None) -> Iterator[ForkServer]:
    """The process from which those of tests are forked."""
    with ForkServer() as server:
        assert sys.platform != "linux" or _descendants(), "nothing_leaks sees no process"
        yield server


@pytest.fixture(scope="session")
def ranks(fork_server: ForkServer) -> Ranks:
    """``paceline.testing.ranks.run``, with a quick start of each worker."""

    def start(script: str | Path, workers: int, directory: Path, **options: Any) -> list[processes.Ended]:
        failures.used.append(directory)
        return processes.run(script, workers, directory, start=fork_server.start_workers, **options)

    return start


@pytest.fixture(scope="session")
def printed(ranks: Ranks) -> Callable[..., list[dict[str, Any]]]:
    """Run a script that must end well; all that each worker told, put together."""

    def start(script: str | Path, workers: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
        everyone = ranks(script, workers, directory, **options)
        assert [one.code for one in everyone] == [0] * workers, "\n".join(one.out + one.err for one in everyone)
        found = []
        for one in everyone:
            values: dict[str, Any] = {}
            for line in one.out.splitlines():
                if line.startswith("{"):
                    values.update(json.loads(line))
            found.append(values)
        return found

    return start


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[[str], set[str]]:
    """The values of a parameter, as text, in the tests of the file that are to run."""

    def of(name: str) -> set[str]:
        items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        return {str(item.callspec.params[name]) for item in items if name in item.callspec.params}

    return of


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Iterator[Run]:
    """Run a script with ``paceline run``; nothing of it may be left when the test ends."""

    def start(
        script: str,
        *words: object,
        arguments: Sequence[object] = (),
        faults: Plan | None = None,
        name: str = "one",
        deadline: float = 120.0,
        **environment: str,
    ) -> Ran:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        if faults is not None:
            environment |= faults.environment(tmp_path / "marks")
        given = ["run", "--quiet", "--name", name, *map(str, words), str(path), *map(str, arguments)]
        code, said = launch(fork_server, given, tmp_path, deadline, **environment)
        check_nothing_is_left(tmp_path)
        return Ran(code, said, tmp_path / "runs" / name)

    yield start
    check_nothing_is_left(tmp_path)


@pytest.fixture
def forked_paceline(fork_server: ForkServer, tmp_path: Path) -> Callable[..., Result]:
    """Run a ``paceline`` command in a process whose workers are forked, with tmp_path as the current directory."""

    def start(*words: object) -> Result:
        out, err = tmp_path / "command.out", tmp_path / "command.err"
        command = Command((*PACELINE, *map(str, words)), environment_in(tmp_path), out, err, tmp_path)
        return Result(fork_server.run(command, 120.0), out.read_text(), err.read_text())

    return start


@pytest.fixture(scope="session")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What comes out of a script in one process to which nothing happens; each is run once."""
    known: dict[str, dict[str, Any]] = {}

    def of(script: str, arguments: Sequence[object] = (), **environment: str) -> dict[str, Any]:
        key = json.dumps((script, arguments, environment))
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            (directory / "train.py").write_text(textwrap.dedent(script))
            words = ["run", "--quiet", "--name", "one", str(directory / "train.py"), *map(str, arguments)]
            code, said = launch(fork_server, words, directory, 60.0, ALONE="1", **environment)
            ran = Ran(code, said, directory / "runs" / "one")
            assert code == 0, ran.report()
            (known[key],) = ran.printed()
        return known[key]

    return of


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """A test fails that leaves a process, a variable of the environment or a process group behind."""
    before, environment = _descendants(), _environment()
    yield
    until = time.monotonic() + _SECONDS_TO_END
    while (left := _descendants().keys() - before.keys()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, f"processes that still run: {[_descendants().get(pid) for pid in left]}"
    assert _environment() == environment
    assert not _process_group(), "a process group was left open"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test starts with the same generators, whatever ran before."""
    random.seed(0)
    for name in ("numpy", "torch"):
        module = sys.modules.get(name)
        if module is not None:
            (module.random.seed if name == "numpy" else module.manual_seed)(0)
