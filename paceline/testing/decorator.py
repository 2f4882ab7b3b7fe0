"""Decorator that runs a test function on several real processes, under pytest and unittest.

::

    @processes(3, deadline=60)
    def test_sum(worker, tmp_path):
        dist.init_process_group("gloo")
        total = torch.tensor(worker.rank)
        dist.all_reduce(total)
        assert total == 3

The test passes if the function returns in every process. Each process is a new Python with torchrun's variables, which
imports the test file and finds the function by name. No code is pickled. No process outlives the test.
"""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from paceline.errors import ConfigError
from paceline.testing import ranks
from paceline.testing.faults import Plan
from paceline.testing.forks import fork
from paceline.testing.ranks import Ended, Process
from paceline.testing.worker_main import ARGUMENTS, CALL, FUNCTION, PARAMETER, Call, Report, Worker, call_in_worker

__all__ = ["Worker", "WorkersFailed", "processes"]

_AFTER_FAILURE_SECONDS = 3.0
_SCRIPT = "from paceline.testing.worker_main import main\n\nmain(__file__)\n"
_SHOWN_LINES = 40

Start = Literal["new", "fork"] | Callable[[list[ranks.Worker]], Sequence[Process]]


class WorkersFailed(AssertionError):
    """Failure of the function in some processes. The message starts with the traceback of the first failure."""


@dataclass(frozen=True)
class _Settings:
    count: int
    deadline: float
    ends: Mapping[int, str | int]
    faults: Plan | None
    environment: Mapping[str, str]
    one_machine: bool
    start: Start


def processes(
    count: int,
    *,
    deadline: float = 60.0,
    ends: Mapping[int, str | int] | None = None,
    faults: Plan | None = None,
    environment: Mapping[str, str] | None = None,
    one_machine: bool = True,
    start: Start = "new",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test function on several processes of this machine.

    The function must have a parameter ``worker`` (:class:`Worker`), which the test runner does not see. All other
    parameters are fixtures or test parameters as usual, and must be picklable. Each process creates its own instance
    of a ``unittest.TestCase``, with its own ``setUp`` and ``tearDown``.

    Args:
        count: number of processes.
        deadline: seconds after which processes that still run print their stacks and are killed.
        ends: expected end of ranks that must not end with exit code 0: an exit code or the name of a signal.
        faults: faults to inject (:mod:`paceline.testing.faults`).
        environment: additional environment variables for all processes.
        one_machine: whether all processes count as on one machine. If false, each is alone and uses the network.
        start: "new" starts a new Python for each process. "fork" forks this process, which may run no other thread, and
            accepts any function and arguments. Or a function that starts them, as for :func:`paceline.testing.run`.

    Raises:
        WorkersFailed: from the test, if the function failed in a process, or a process ended in an unexpected way.
        TimeoutError: from the test, if not all processes ended before the deadline.
        ConfigError: the function has no parameter ``worker``, or ``ends`` names a rank that does not exist.
    """
    wanted = _Settings(count, deadline, ends or {}, faults, environment or {}, one_machine, start)
    if count < 1 or any(rank not in range(count) for rank in wanted.ends):
        raise ConfigError(f"processes({count}, ends={dict(wanted.ends)}): there are ranks 0 to {count - 1} only.")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        seen = _without_worker(function)

        @functools.wraps(function)
        def test(*arguments: Any, **named: Any) -> None:
            __tracebackhide__ = True  # pytest shows the failure in the process, not its start
            given = seen.bind(*arguments, **named).arguments
            with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
                _test(function, given, wanted, Path(directory))

        setattr(test, FUNCTION, function)
        test.__signature__ = seen  # type: ignore[attr-defined]
        return test

    return decorate


def _without_worker(function: Callable[..., None]) -> inspect.Signature:
    """Return the function's signature without ``worker``, for the test runner."""
    seen = inspect.signature(function)
    if PARAMETER not in seen.parameters:
        raise ConfigError(f"{function.__qualname__} runs on several processes, so it needs a parameter 'worker'.")
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY) for one in seen.parameters.values()):
        raise ConfigError(f"{function.__qualname__} can have named parameters only.")
    return seen.replace(parameters=[one for name, one in seen.parameters.items() if name != PARAMETER])


def _test(function: Callable[..., None], given: dict[str, Any], wanted: _Settings, directory: Path) -> None:
    __tracebackhide__ = True
    until = time.monotonic() + wanted.deadline
    instance = given.pop("self", None)
    call = _call(function, instance, directory, until)
    start: Callable[[list[ranks.Worker]], Sequence[Process]] | None
    if wanted.start == "fork":
        start = functools.partial(fork, lambda: call_in_worker(call, function, given, instance))
    else:
        _write_call(call, given, directory)
        start = None if wanted.start == "new" else wanted.start
    environment = {**wanted.environment, **(wanted.faults.environment(directory / "faults") if wanted.faults else {})}
    try:
        ended = ranks.run(
            _SCRIPT,
            wanted.count,
            directory,
            environment=environment,
            deadline=wanted.deadline,
            one_machine=wanted.one_machine,
            start=start,
            after_failure=None if wanted.ends else _AFTER_FAILURE_SECONDS,
        )
    except TimeoutError as error:
        reports = "".join(f"{report}\n\n" for report in _reports(call, wanted.count))
        raise TimeoutError(f"{reports}{error}") from None
    _check(call, ended, wanted)


def _call(function: Callable[..., None], instance: object, directory: Path, until: float) -> Call:
    """Return the location of the function for the worker processes."""
    kind = type(instance)  # may be a subclass of the class that defines the method
    return Call(
        file=inspect.getsourcefile(function) or "",
        module=function.__module__,
        name=function.__qualname__,
        home=None if instance is None else f"{kind.__module__}:{kind.__qualname__}",
        directory=str(directory),
        path=tuple(sys.path),
        until=until,
    )


def _write_call(call: Call, given: dict[str, Any], directory: Path) -> None:
    """Write the function's location and arguments to files for the processes."""
    if "<locals>" in call.name or not Path(call.file).is_file():
        raise ConfigError(
            f"A new process cannot find {call.name} by its name: write it at the top level of a file, or use "
            f"start='fork'."
        )
    stored = {}
    for name, value in given.items():
        try:
            stored[name] = pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"The argument {name!r} of {call.name} cannot be given to another process ({error}). Make it in the "
                f"function, or use start='fork'."
            ) from None
    (directory / CALL).write_text(call.to_json())
    (directory / ARGUMENTS).write_bytes(pickle.dumps(stored))


def _check(call: Call, ended: list[Ended], wanted: _Settings) -> None:
    """Raise SkipTest if a process skipped the test, or WorkersFailed if a process did not end as expected."""
    __tracebackhide__ = True
    reports = _reports(call, wanted.count)
    if skipped := [report for report in reports if report.skipped]:
        raise unittest.SkipTest(skipped[0].message)
    if failed := [one for one in ended if _how(one) != wanted.ends.get(one.rank, 0)]:
        _fail(ended, failed, [report for report in reports if report.rank in {one.rank for one in failed}], wanted)


def _how(one: Ended) -> str | int:
    return one.signal or one.code


def _fail(ended: list[Ended], failed: list[Ended], reports: list[Report], wanted: _Settings) -> NoReturn:
    """Raise WorkersFailed with the tracebacks in order of time, other unexpected ends, and the output of all."""
    __tracebackhide__ = True
    messages = [str(report) for report in reports]
    reported = {report.rank for report in reports}
    for one in failed:
        if one.late:
            messages.append(f"rank {one.rank} of {len(ended)} still ran {_AFTER_FAILURE_SECONDS:.0f} s later")
        elif one.rank not in reported:
            expected = wanted.ends.get(one.rank, 0)
            expectation = f" instead of {_ending(expected)}" if expected else ""
            messages.append(f"rank {one.rank} of {len(ended)} ended with {_ending(_how(one))}{expectation}")
    raise WorkersFailed("\n\n".join(messages + [_output(one) for one in ended if one.out or one.err]))


def _ending(how: str | int) -> str:
    return how if isinstance(how, str) else f"exit code {how}"


def _output(one: Ended) -> str:
    lines = (one.out + one.err).splitlines()
    left_out = [f"({len(lines) - _SHOWN_LINES} lines before)"] if len(lines) > _SHOWN_LINES else []
    return "\n".join([f"-- output of rank {one.rank}", *left_out, *lines[-_SHOWN_LINES:]])


def _reports(call: Call, count: int) -> list[Report]:
    """Return the reports of the processes, causes before consequences, and in order of time."""
    paths = [call.report(rank) for rank in range(count)]
    reports = [Report(**json.loads(path.read_text())) for path in paths if path.exists()]
    return sorted(reports, key=lambda report: (report.consequence, report.time))
