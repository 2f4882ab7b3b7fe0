"""What a worker leaves behind when it fails: one record for the launcher, one clear message for the reader."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.environments import env
from paceline.errors import PacelineError, RunFailed, WorkerLost
from paceline.system.user_code import locations_in_message, user_frames, without_own_frames

_LONGEST = 20_000
"""Characters of a message or a traceback that are kept."""
_installed = False
"""Whether a hook of this module is in place, perhaps below one of another library."""


def install_early() -> None:
    """Report Paceline's own errors alike in a process without a session: before ``start``, and around ``launch``.

    Other exceptions are left to Python, and so is the end of the process. An interactive Python goes on.
    """
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PacelineError) or hasattr(sys, "ps1"):
            before(kind, error, trace)
            return
        if (path := env.error_record()) is not None:
            _write(path, _record(path, env.identity().rank, None, error, trace))
        else:
            _print(error, trace, "")
        raise SystemExit(_code_of(error))

    hook.before_paceline = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def install(
    who: Callable[[], tuple[int | str, int]],
    path: Path | None,
    step: Callable[[], int],
    close: Callable[[], None],
    explain: Callable[[str], str],
) -> None:
    """Report an exception that nobody catches, and end the process at once.

    The process does not wait for others on its way out, so that they learn of its end immediately.

    Args:
        who: gives the rank of this worker, and the number of workers.
        path: where to leave the record; the launcher then prints. None: print here.
        step: the step that was being done.
        close: called before the end, to write out events.
        explain: says more of an error that is printed here, if it can.
    """
    global _installed
    _installed = True
    before = getattr(sys.excepthook, "before_paceline", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if path is None and issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)
            return  # Python ends the process by SIGINT then
        try:
            report(kind, error, trace)
        except Exception:
            sys.__excepthook__(kind, error, trace)
            raise
        finally:  # whatever goes wrong in a report, such as no memory
            os._exit(_code_of(error))

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader process ends meanwhile
        sys.stderr = sys.__stderr__ or sys.stderr  # torch.distributed holds back what its hook's predecessors print
        rank, size = who()
        if path is not None:
            _write(path, _record(path, rank, step(), error, trace))
        elif isinstance(error, PacelineError):
            _print(error, trace, f"rank {rank}: " if size > 1 else "")
        elif before is sys.__excepthook__ and (shown := without_own_frames(error, trace, "`paceline run` keeps them")):
            sys.stderr.write(shown)
        else:
            before(kind, error, trace)
        if path is None and (more := explain(f"{kind.__name__}: {_message_of(error)}")):
            sys.stderr.write(f"paceline: {more}\n")
        close()
        sys.stdout.flush()
        sys.stderr.flush()

    hook.before_paceline = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def _print(error: PacelineError, trace: TracebackType | None, name: str) -> None:
    message = _message_of(error)
    if isinstance(error, RunFailed):  # its launcher has printed all of it
        message = message.partition("\n")[0]
    where = f" [{line.replace(':', ', line ')}]" if (line := _line(user_frames(trace))) else ""
    sys.stderr.write(f"paceline: {name}{type(error).__name__}: {message}{where}\n")


def _record(
    path: Path, rank: int | str, step: int | None, error: BaseException, trace: TracebackType | None
) -> dict[str, object]:
    own = user_frames(trace)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": _message_of(error),
        "line": next(reversed(locations_in_message(_message_of(error))), _line(own)),
        "notes": _cut(" ".join(map(str, getattr(error, "__notes__", ())))),
        "traceback": _cut("".join(traceback.format_exception(type(error), error, trace))),
        "in_script": _in_script(error, own) or _cut(without_own_frames(error, trace, f"errors/{path.name} has them")),
        "exit_code": _code_of(error),
        "consequence": isinstance(error, WorkerLost),
        "time": time.time(),
        "step": step,
    }


def _code_of(error: BaseException) -> int:
    """The exit code of a process that ends by this error; never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return (isinstance(error, PacelineError) and error.exit_code) or 1


def _message_of(error: BaseException) -> str:
    """What the error says; its own code may fail."""
    try:
        return _cut(str(error))
    except Exception as another:  # noqa: BLE001 - it is the user's
        return f"(its text cannot be had: str() raised {type(another).__name__})"


def _cut(text: str) -> str:
    """Leave out the middle of a text that nobody can read, and what cannot be written as UTF-8."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n... {len(text) - _LONGEST} characters ...\n{text[-_LONGEST // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def _line(frames: list[traceback.FrameSummary]) -> str:
    """``train.py:41``; empty if unknown."""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _in_script(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """The traceback of one of our own errors: inside the library it tells the user nothing."""
    if not isinstance(error, PacelineError):
        return ""
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return _cut("".join([*head, *traceback.format_exception_only(type(error), error)]))


def _write(path: Path, record: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(record, indent=1))
        beside.replace(path)
    except OSError:
        sys.stderr.write(str(record["traceback"]))
