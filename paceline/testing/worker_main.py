"""Worker side of ``paceline.testing.processes``: finds the test function, calls it and reports its failure."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import reprlib
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from paceline.environments import env
from paceline.environments.start import Identity
from paceline.errors import WorkerLost
from paceline.launchers.local.child import end_with_parent

CALL, ARGUMENTS = "call.json", "arguments.pickle"
PARAMETER = "worker"
FUNCTION = "_paceline_function"  # attribute of the decorated function that holds the undecorated function
_STACK_SECONDS = 1.0  # seconds before the deadline at which a worker prints the stacks of its threads


@dataclass(frozen=True)
class Worker:
    """Argument of a test function: the rank of its process, from 0, and the number of processes."""

    rank: int
    size: int


@dataclass(frozen=True)
class Call:
    """Location of the function to call, for the worker processes."""

    file: str  # source file of the test
    module: str  # module of the function in the process that started the test
    name: str  # qualified name of the function in the module
    home: str | None  # ``module:class`` of the instance, if the function is a method
    directory: str  # directory of the arguments and the reports
    path: tuple[str, ...]  # ``sys.path`` of the process that started the test
    until: float  # deadline on the monotonic clock

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def report(self, rank: int) -> Path:
        return Path(self.directory) / f"rank-{rank}.json"


@dataclass(frozen=True)
class Report:
    """Failure or skip of the function in one process."""

    rank: int
    size: int
    time: float
    message: str
    details: str
    skipped: bool
    consequence: bool

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}: {self.message}\n{self.details}"


def main(script: str) -> None:
    """Run the function in a new Python process."""
    directory = Path(script).resolve().parent
    call = Call(**json.loads((directory / CALL).read_text()))
    sys.path[:] = list(dict.fromkeys([*call.path, *sys.path]))

    def function_and_arguments() -> tuple[Callable[..., None], dict[str, Any], object]:
        function, instance = _find(call)
        stored = pickle.loads((directory / ARGUMENTS).read_bytes())
        return function, {name: pickle.loads(value) for name, value in stored.items()}, instance

    _run(call, function_and_arguments)


def call_in_worker(call: Call, function: Callable[..., None], given: dict[str, Any], instance: object) -> None:
    """Run the function in a fork of the test process."""
    _run(call, lambda: (function, given, instance))


def _run(call: Call, find: Callable[[], tuple[Callable[..., None], dict[str, Any], object]]) -> None:
    """Call the function. On failure, write a report and end the process immediately, so that the others notice."""
    end_with_parent()
    faulthandler.dump_traceback_later(max(0.1, call.until - time.monotonic() - _STACK_SECONDS))
    who = env.identity()
    try:
        function, given, instance = find()
        with _set_up(instance):
            own = {} if instance is None else {"self": instance}
            function(**own, **given, **{PARAMETER: Worker(who.rank, who.world_size)})
    except BaseException as error:  # noqa: BLE001 - also pytest's skip and fail exceptions, and SystemExit
        report = _report(who, error)
        path = call.report(who.rank)
        path.with_suffix(".tmp").write_text(json.dumps(asdict(report)))
        path.with_suffix(".tmp").replace(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if report.skipped else 1)
    faulthandler.cancel_dump_traceback_later()


def _find(call: Call) -> tuple[Callable[..., None], object]:
    """Return the undecorated function, and an instance of its class if it is a method, otherwise None."""
    found: Any = _module(call.module, call.file)
    for part in call.name.split("."):
        found = getattr(found, part)
    while FUNCTION not in vars(found):
        found = found.__wrapped__
    function: Callable[..., None] = getattr(found, FUNCTION)
    if call.home is None:
        return function, None
    module, _, name = call.home.partition(":")
    kind: Any = _module(module, call.file)
    for part in name.split("."):
        kind = getattr(kind, part)
    return function, kind(call.name.rpartition(".")[2]) if issubclass(kind, unittest.TestCase) else kind()


def _module(name: str, file: str) -> ModuleType:
    """Import the test module, by name if the name resolves to the file, otherwise from the file."""
    if name != "__main__":
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if _same(module, file):
                return module
    name = Path(file).stem if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _same(module: ModuleType, file: str) -> bool:
    try:
        return os.path.samefile(module.__file__ or "", file)
    except OSError:
        return False


@contextlib.contextmanager
def _set_up(instance: object) -> Iterator[None]:
    """Run setUp, tearDown and cleanups around the test if it belongs to a ``unittest.TestCase``."""
    if not isinstance(instance, unittest.TestCase):
        yield
        return
    try:
        instance.setUp()
        try:
            yield
        finally:
            instance.tearDown()
    finally:
        instance.doCleanups()


def _report(who: Identity, error: BaseException) -> Report:
    skipped = isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped"  # the second is pytest's
    lines = "".join(traceback.format_exception(_own_part(error)))
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Report(
        rank=who.rank,
        size=who.world_size,
        time=time.time(),
        message=str(error) if skipped else message,
        details=lines + _values(error),
        skipped=skipped,
        consequence=isinstance(error, WorkerLost),
    )


def _own_part(error: BaseException) -> BaseException:
    """Remove the frames of this file from the error's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _values(error: BaseException) -> str:
    """Return the local variables at a failed ``assert`` without a message, because the line does not show them."""
    if not isinstance(error, AssertionError) or str(error) or error.__traceback__ is None:
        return ""
    frame = _last_frame(error.__traceback__)
    shown = [f"  {name} = {reprlib.repr(value)}" for name, value in frame.f_locals.items() if not name.startswith("@")]
    return "where\n" + "\n".join(shown) if shown else ""


def _last_frame(trace: TracebackType) -> FrameType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame
