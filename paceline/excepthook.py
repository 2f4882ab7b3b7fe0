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

from paceline.errors import PacelineError, WorkerLost
from paceline.user_code import user_frames


def install(
    who: Callable[[], tuple[int | str, int]], path: Path | None, step: Callable[[], int], close: Callable[[], None]
) -> None:
    """Report an exception that nobody catches, and end the process at once.

    The process does not wait for others on its way out, so that they learn of its end immediately.

    Args:
        who: gives the rank of this worker, and the number of workers.
        path: where to leave the record; the launcher then prints. None: print here.
        step: the step that was being done.
        close: called before the end, to write out events.
    """
    before = getattr(sys.excepthook, "before_paceline", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader process ends meanwhile
        sys.stderr = sys.__stderr__ or sys.stderr  # torch.distributed holds back what its hook's predecessors print
        rank, size = who()
        if path is not None:
            _write(path, _record(rank, step(), error, trace))
        elif isinstance(error, PacelineError):
            name = f"rank {rank}: " if size > 1 else ""
            where = f" [{line.replace(':', ', line ')}]" if (line := _line(user_frames(trace))) else ""
            sys.stderr.write(f"paceline: {name}{type(error).__name__}: {error}{where}\n")
        else:
            before(kind, error, trace)
        close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)

    hook.before_paceline = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def _record(rank: int | str, step: int, error: BaseException, trace: TracebackType | None) -> dict[str, object]:
    own = user_frames(trace)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": str(error),
        "line": _line(own),
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "in_script": _in_script(error, own),
        "exit_code": error.exit_code if isinstance(error, PacelineError) else 1,
        "consequence": isinstance(error, WorkerLost),
        "time": time.time(),
        "step": step,
    }


def _line(frames: list[traceback.FrameSummary]) -> str:
    """``train.py:41``; empty if unknown."""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _in_script(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """The traceback of one of our own errors: inside the library it tells the user nothing."""
    if not isinstance(error, PacelineError):
        return ""
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(type(error), error)])


def _write(path: Path, record: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(record, indent=1))
        beside.replace(path)
    except OSError:
        sys.stderr.write(str(record["traceback"]))
