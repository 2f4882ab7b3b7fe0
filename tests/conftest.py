import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer, adopt_orphans

adopt_orphans()
for number in (signal.SIGINT, signal.SIGHUP):  # a shell starts what runs in the background without them
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

_SECONDS_TO_END = 30.0
_OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}
"""Set when torch is first asked to look for its compiler."""
_OF_PYTEST = {"PYTEST_CURRENT_TEST"}


def _descendants() -> dict[int, str]:
    """The command lines of the running processes that come from this one, by their id.

    Orphans are among them: this process adopts them.
    """
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if state not in "ZX":
            parents.setdefault(int(parent), []).append(int(path.parent.name))
    found: dict[int, str] = {}
    waiting = list(parents.get(os.getpid(), ()))
    while waiting:
        pid = waiting.pop()
        waiting += parents.get(pid, ())
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found[pid] = line[:200]
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {*_OF_PYTEST, *_OF_TORCH}}


def _process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is ``crossed``, what is not on the diagonal of its parameters is ``slow``."""
    places: dict[pytest.Function, tuple[int, ...]] = {}
    axes: dict[object, list[list[str]]] = {}  # of each test: the values of each ``parametrize``, in their order
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("crossed"):
            given = [_values(item, mark) for mark in item.iter_markers("parametrize")]
            known = axes.setdefault((item.path, item.originalname), [[] for _ in given])
            for value, values in zip(given, known, strict=True):
                if value not in values:
                    values.append(value)
            places[item] = tuple(values.index(value) for value, values in zip(given, known, strict=True))
    for item, place in places.items():
        sizes = [len(values) for values in axes[item.path, item.originalname]]
        if place not in {tuple(number % size for size in sizes) for number in range(max(sizes))}:
            item.add_marker(pytest.mark.slow)


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
        yield server


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
