"""Exception hooks: a failed worker writes a record for the launcher, or prints one message for the user."""

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

_LONGEST = 20_000  # largest number of characters of a message or traceback to keep
_installed = False  # whether a hook of this module is installed, possibly wrapped by another library's hook


def install_early() -> None:
    """Install a hook for Paceline errors in a process without a session: before ``start``, and around ``launch``.

    Other exceptions keep the previous hook, as do all exceptions in an interactive interpreter.
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
    """Install a hook that reports any uncaught exception and exits immediately.

    The process exits without waiting for other workers, so that they detect the loss at once.

    Args:
        who: function that returns the rank of this worker and the number of workers.
        path: file to write the failure record to, which the launcher prints. If None, the hook prints the error.
        close: function that is called before the process exits, to flush events.
        explain: function from a printed error to an explanation, empty if it has none.
    """
    global _installed
    _installed = True
    before = getattr(sys.excepthook, "before_paceline", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if path is None and issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)
            return  # Python then ends the process by SIGINT
        try:
            report(kind, error, trace)
        except Exception:
            sys.__excepthook__(kind, error, trace)
            raise
        finally:  # even if the report fails, for example without memory
            os._exit(_code_of(error))

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a loader process ends meanwhile
        sys.stderr = sys.__stderr__ or sys.stderr  # torch.distributed's hook captures the output of earlier hooks
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
    message = " ".join([_message_of(error), *getattr(error, "__notes__", ())])
    if isinstance(error, RunFailed):  # the launcher has already printed the rest
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
    """Return the exit code of a process that ends because of this error; never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return (isinstance(error, PacelineError) and error.exit_code) or 1


def _message_of(error: BaseException) -> str:
    """Return the message of an error, whose ``__str__`` may raise."""
    try:
        return _cut(str(error))
    except Exception as another:  # noqa: BLE001 - it is the user's
        return f"(its text cannot be had: str() raised {type(another).__name__})"


def _cut(text: str) -> str:
    """Remove the middle of a long text, and escape characters that cannot be encoded as UTF-8."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n... {len(text) - _LONGEST} characters ...\n{text[-_LONGEST // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def _line(frames: list[traceback.FrameSummary]) -> str:
    """Return the innermost line as ``train.py:41``; empty without frames."""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _in_script(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Return the traceback of a Paceline error with the user's frames only; empty for other errors."""
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
