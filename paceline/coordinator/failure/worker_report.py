"""Failure report of one worker, from the record that it wrote, or else from its exit code and last output."""

from __future__ import annotations

import json
import platform
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.coordinator.failure import known_errors
from paceline.coordinator.failure.known_errors import KnownError
from paceline.launchers.base import Launch, WorkerExit
from paceline.system.regular_files import open_regular, read_text
from paceline.system.user_code import is_user_code

_TAIL_LINES = 30
_LONGEST_TRACEBACK = 500
_TAIL_BYTES = 64 * 1024
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
_CUT_OFF = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")
_LEFT = ("has left: its process ended", "has called shutdown", "has ended by ", "has failed: rank ")
"""Texts in errors of ``paceline.horovod`` about a rank that has ended."""
_KINDS = {
    "ConfigError": "settings",
    "InputError": "input",
    "NonFiniteLoss": "non-finite",
    "StartError": "start",
    "DisagreementError": "disagreement",
    "CheckpointError": "checkpoint",
    "WorkerLost": "lost-connection",
    "WorkerSilent": "hang",
}
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+)')
_RANK = re.compile(r"^\[rank\d+\]: ")  # prefix of torch for each line of a traceback
_NUMBER = r"-?(?:0x[0-9a-fA-F]+|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_NUMBERS = re.compile(rf"{_NUMBER}(?:, ?{_NUMBER})*")
_HEADER = "Traceback (most recent call last):"
_WITHOUT_HEADER = ("SyntaxError: ", "IndentationError: ", "TabError: ")


@dataclass(frozen=True)
class UncaughtException:
    """Uncaught exception of a worker."""

    type: str  # name of its class without the module
    message: str  # message of the exception
    line: str = ""  # last line of the user's code in the traceback, such as ``train.py:41``. Empty if unknown.
    notes: str = ""  # notes that were added to the exception

    @property
    def short(self) -> str:
        """Exception in one line, such as ``ValueError: bad``. For data loaders, the original error."""
        lines = [line for line in self.message.splitlines() if line.strip()] or [""]
        if "Original Traceback" in self.message:  # notes may follow its last line
            return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[0])
        if hasattr(errors, self.type):
            return lines[0]
        return f"{self.type}: {lines[0]}" if lines[0] else self.type


@dataclass(frozen=True)
class WorkerReport:
    """Failure of one worker."""

    worker: int  # number of the worker
    kind: str  # stable identifier, such as ``exception`` or ``killed``
    message: str  # description, which follows the worker's name
    time: float  # time of the failure, in seconds since 1970
    code: int  # exit code of the run if this failure is the cause
    exit_code: int | None = None  # exit code of the process. None if a signal ended it.
    signal: int | None = None  # signal that ended the process, or None
    host: str = ""  # name of the worker's machine
    pid: int = 0  # process id
    step: int | None = None  # step of the worker. None if the worker did not report it.
    exception: UncaughtException | None = None  # uncaught exception, or None
    details: str = ""  # traceback, or the last lines that the worker printed
    self_reported: bool = False  # whether the worker itself wrote the report
    consequence: bool = False  # whether the worker failed only because it lost another worker
    last_line: str = ""  # last line that the worker printed, if it wrote no report
    known: KnownError | None = None  # matching entry of the table of known errors, or None

    def same_cause(self, other: WorkerReport) -> bool:
        """Return whether both workers seem to have failed for the same reason.

        Numbers are ignored for errors at the same line, which may name different samples, addresses or shapes.
        """
        if self.kind == other.kind == "exit" and self.exit_code != 1:  # 1 is too common to identify a cause
            return self.exit_code == other.exit_code
        if (self.message, self.last_line) == (other.message, other.last_line):
            return True
        alike = _without_numbers(self.message) == _without_numbers(other.message)
        return alike and self.kind == other.kind and self._line == other._line != ""

    @property
    def _line(self) -> str:
        return self.exception.line if self.exception else ""

    def caused_by_loss(self) -> bool:
        """Return whether the exception follows from the loss of another worker."""
        if self.exception is None:
            return False
        text, of_horovod = self.exception.message.lower(), self.exception.type == "HorovodInternalError"
        return any(words in text for words in (*_CUT_OFF, *(_LEFT if of_horovod else ())))


def report_of(
    launch: Launch, ended: WorkerExit, seen: int | None, record: Mapping[str, Any] | None = None
) -> WorkerReport:
    """Return the failure report of a worker.

    Args:
        record: report that the worker wrote. Defaults to its file in the run directory.
    """
    plain = WorkerReport(
        ended.worker,
        "exit",
        describe_exit(ended.code),
        ended.time,
        ended.exit_code,
        exit_code=ended.code if ended.code >= 0 else None,
        signal=-ended.code if ended.code < 0 else None,
        host=platform.node(),
        pid=ended.pid,
    )
    record = record_of(launch, ended.worker) if record is None else record
    try:
        if record:
            return _by_itself(plain, record, ended.out_of_memory)
        lines = [_RANK.sub("", line) for line in tail(launch, ended.worker, _LONGEST_TRACEBACK)]
        return _unreported(plain, ended, lines, seen)
    except (ValueError, KeyError, TypeError):
        return plain


def record_of(launch: Launch, worker: int) -> dict[str, Any]:
    """Return the failure report that a worker wrote itself (``paceline.system.excepthook``). Empty if there is none."""
    try:
        record = json.loads(read_text(launch.error(worker)))
        whole = isinstance(record, dict) and {"type", "message", "consequence", "time"} <= record.keys()
        return record if whole else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _by_itself(plain: WorkerReport, record: Mapping[str, Any], out_of_memory: bool) -> WorkerReport:
    exception = UncaughtException(
        str(record["type"]).rpartition(".")[2], *(str(record.get(key) or "") for key in ("message", "line", "notes"))
    )
    report = _by_exception(plain, exception)
    if out_of_memory and "killed by signal" in exception.message:
        message = f"a process of its data loader ran out of memory (the kernel ended it): {exception.short}"
        report = replace(report, kind="out-of-memory", message=message)
    own = getattr(errors, exception.type, None)
    return replace(
        report,
        time=float(record["time"]),
        code=int(record.get("exit_code") or (own.exit_code if own else 1)),
        host=str(record.get("host") or plain.host),
        pid=int(record.get("pid") or plain.pid),
        step=record.get("step"),
        details=str(record.get("in_script") or record.get("traceback") or ""),
        self_reported=True,
        consequence=bool(record["consequence"]),
    )


def _by_exception(plain: WorkerReport, exception: UncaughtException) -> WorkerReport:
    known = known_errors.find(f"{exception.type}: {exception.message}")
    kind = (known and known.kind) or _KINDS.get(exception.type, "exception")
    message = exception.short
    if kind == "out-of-memory":
        gpu = "GPU " if "cuda" in f"{exception.type}: {exception.message}".lower() else ""
        message = f"ran out of {gpu}memory: {message}"
    return replace(plain, kind=kind, message=message, exception=exception, known=known)


def _unreported(plain: WorkerReport, ended: WorkerExit, lines: list[str], seen: int | None) -> WorkerReport:
    last_line = lines[-1] if lines else ""
    if ended.code == 1 and (found := exception_in(lines)) is not None:
        exception, text = found
        report = _by_exception(plain, exception)
        after = lines[len(lines) - lines[::-1].index(text.rpartition("\n")[2]) - 1 :]  # NCCL's last line is specific
        return replace(report, details=text, known=known_errors.find_printed(after))
    lines = lines[-_TAIL_LINES:]
    details = "the last lines it printed:\n" + "\n".join(lines) if lines and ended.worker != seen else ""
    plain = replace(plain, details=details, last_line=last_line)
    known = known_errors.find_printed([*lines, plain.message])
    if ended.code >= 0:
        return replace(plain, kind=(known and known.kind) or plain.kind, known=known)
    if -ended.code in _CRASHES:
        return replace(plain, kind="crashed", known=known)
    if ended.code == -signal.SIGINT:
        return replace(plain, kind="killed")
    plain = replace(plain, code=errors.WorkerLost.exit_code)
    if ended.code == -signal.SIGKILL and ended.out_of_memory:
        return replace(plain, kind="out-of-memory", message="ran out of memory (the kernel ended it)")
    return replace(plain, kind="killed")


def _without_numbers(text: str) -> str:
    """Replace each number, address or list of numbers, such as a shape, by ``#``."""
    return _NUMBERS.sub("#", text)


def describe_exit(code: int) -> str:
    """Return a description of an exit code, such as ``was killed by signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal_name(-code)})"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def exception_in(lines: list[str]) -> tuple[UncaughtException, str] | None:
    """Return the last exception that Python printed and its traceback, or None."""
    if not (starts := [number for number, line in enumerate(lines) if line == _HEADER]):
        starts = [number - 1 for number, line in enumerate(lines) if line.startswith(_WITHOUT_HEADER) and number]
        while starts and starts[-1] > 0 and not _FRAME.match(lines[starts[-1]]):
            starts[-1] -= 1
    if not starts:
        return None
    where = ""
    for number in range(starts[-1], len(lines)):
        frame = _FRAME.match(lines[number])
        if frame and is_user_code(frame[1]):
            where = f"{Path(frame[1]).name}:{frame[2]}"
        found = _EXCEPTION.match(lines[number])
        if found and number > starts[-1]:
            exception = UncaughtException(found[1].rpartition(".")[2], found[2] or "", where)
            return exception, "\n".join(lines[starts[-1] : number + 1])
    return None


def tail(launch: Launch, worker: int, count: int = _TAIL_LINES) -> list[str]:
    """Return the last lines that a worker printed."""
    try:
        with open_regular(launch.output(worker)) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []
