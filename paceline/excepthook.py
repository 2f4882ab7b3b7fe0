"""What a worker leaves behind when it fails: one record for the launcher, one clear message for the reader."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.errors import PacelineError, WorkerLost

_PACKAGE = str(Path(__file__).resolve().parent) + os.sep


def install(rank: int, size: int, directory: Path | None, step: Callable[[], int], close: Callable[[], None]) -> None:
    """Report an exception that nobody catches, and end the process at once.

    The process does not wait for others on its way out, so that they learn of its end immediately.

    Args:
        rank: of this worker.
        size: number of workers.
        directory: where to leave ``rank-<rank>.json``; the launcher then prints. None: print here.
        step: the step that was being done.
        close: called before the end, to write out events.
    """
    before = getattr(sys.excepthook, "before_paceline", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)
            return
        sys.stderr = sys.__stderr__ or sys.stderr  # torch.distributed holds back what its hook's predecessors print
        if directory is not None:
            _write(directory / f"rank-{rank}.json", _record(rank, step(), error, trace))
        elif isinstance(error, PacelineError):
            who = f"rank {rank}: " if size > 1 else ""
            sys.stderr.write(f"paceline: {who}{type(error).__name__}: {error}{_script_line(trace)}\n")
        else:
            before(kind, error, trace)
        close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)

    hook.before_paceline = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def _record(rank: int, step: int, error: BaseException, trace: TracebackType | None) -> dict[str, object]:
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": f"{error}{_script_line(trace) if isinstance(error, PacelineError) else ''}",
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "exit_code": error.exit_code if isinstance(error, PacelineError) else 1,
        "consequence": isinstance(error, WorkerLost),
        "time": time.time(),
        "step": step,
    }


def _script_line(trace: TracebackType | None) -> str:
    """The line of the user's code from which the library was called."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" [{Path(own[-1].filename).name}, line {own[-1].lineno}]" if own else ""


def _write(path: Path, record: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(record, indent=1))
        beside.replace(path)
    except OSError:
        sys.stderr.write(str(record["traceback"]))
