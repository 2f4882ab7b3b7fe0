"""Detection of the user's code: frames of a traceback or stack, the script, and the modules in its folder."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = {_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
_LEFT_OUT = "<left out>"
_FRAME = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)
_MARK = re.compile(rf'  File "{_LEFT_OUT}", line (\d+)(, in )?')
_IN_USER_CALL = "_paceline_in_user_call"
_LIBRARY_STARTS = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")


def is_user_code(file: str) -> bool:
    """Return whether a source file belongs to the user, not to Python, Paceline or an installed package."""
    return not file.startswith(_LIBRARY_STARTS) and "site-packages" not in file


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the user's code. All classes of the main module are, whatever its file."""
    try:
        return kind.__module__ == "__main__" or is_user_code(inspect.getfile(kind))
    except (TypeError, OSError):  # a class in C
        return False


def user_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are in user code, innermost last."""
    return [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]


def in_user_call(error: BaseException, note: str) -> None:
    """Add a note to an error from a user function, and mark it as raised inside a call of such a function."""
    error.add_note(note)
    setattr(error, _IN_USER_CALL, True)


def without_own_frames(error: BaseException, trace: TracebackType | None, where: str) -> str:
    """Return a traceback without Paceline's frames between the user's call and the user function that it calls.

    An error that is raised in Paceline itself keeps all frames.

    Returns:
        the formatted traceback; empty if no frames are omitted.
    """
    whole = traceback.TracebackException(type(error), error, trace)
    pending, counts = [whole], []
    while pending:
        one = pending.pop()
        counts += _leave_out(one, hasattr(error, _IN_USER_CALL))
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
    return _MARK.sub(partial(_left_out, where), "".join(whole.format())) if counts else ""


def _left_out(where: str, mark: re.Match[str]) -> str:
    lines = f"{mark[1]} line{'' if mark[1] == '1' else 's'}"
    return f"  [{lines} of Paceline left out; {where}]"


def _leave_out(one: traceback.TracebackException, in_call: bool) -> list[int]:
    """Replace each run of frames between two user frames with a marker, and return the lengths of the runs."""
    ours = [frame.filename.startswith(_PACKAGE + os.sep) for frame in one.stack]
    users = [is_user_code(frame.filename) for frame in one.stack]
    wanted = [number for number, user in enumerate(users) if user]
    if in_call:  # the called function may belong to a library, so that no user frame follows
        wanted.append(max((number + 1 for number, own in enumerate(ours) if own), default=0))
    last = min(max(wanted, default=0), len(ours) - 1)
    kept: list[traceback.FrameSummary] = []
    counts, run = [], 0
    for number, frame in enumerate(one.stack):
        if number < last and (ours[number] or (run and not users[number])):
            run += 1
            continue
        if run:
            kept.append(traceback.FrameSummary(_LEFT_OUT, run, "", lookup_line=False, line=""))
            counts.append(run)
            run = 0
        kept.append(frame)
    one.stack = traceback.StackSummary.from_list(kept)
    return counts


def locations_in_message(message: str) -> list[str]:
    """Return the user's lines from the traceback text in a loader process's error, as ``file:line``, innermost last."""
    found = _FRAME.findall(message) if "Original Traceback" in message else []
    return [f"{Path(file).name}:{line}" for file, line in found if is_user_code(file)]


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code on a stack as ``train.py:41``; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def script_modules() -> list[ModuleType]:
    """Return the main module and the modules imported from its folder; in a notebook, the main module only."""
    main = sys.modules["__main__"]
    if (script := getattr(main, "__file__", None)) is None:
        return [main]
    folder = os.path.join(os.path.dirname(os.path.realpath(script)), "")
    names = [name for name in [*sys.modules] if not _is_installed(name.partition(".")[0])]
    others = (module for name in names if (module := sys.modules.get(name, main)) is not main)
    return [main, *(one for one in others if _source_of(getattr(one, "__file__", None) or "").startswith(folder))]


def script_files() -> dict[str, Path]:
    """Return the files of the script and of the modules in its folder, keyed by sorted relative path."""
    files = sorted({Path(file).resolve() for module in script_modules() if (file := getattr(module, "__file__", None))})
    home = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve().parent
    return {str(file.relative_to(home)): file for file in files if file.is_file()}


@functools.cache
def _is_installed(name: str) -> bool:
    """Return whether a top-level module belongs to a library, so that about 2,000 modules below it can be skipped."""
    return not is_user_code(getattr(sys.modules.get(name), "__file__", None) or "")


def _source_of(file: str) -> str:
    """Return the real path of a module's source; empty if it has none, or belongs to an installed package."""
    path = os.path.realpath(file) if os.path.isabs(file) and file.endswith(".py") else ""
    return "" if "site-packages" in path else path
