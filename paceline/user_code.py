"""Which lines of a traceback or a stack are the user's, and not of a library."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).resolve().parent)
_LIBRARIES = {_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
_LIBRARY_STARTS = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")


def is_user_code(file: str) -> bool:
    """Whether a source file is the user's, and not of Python or an installed package."""
    return not file.startswith(_LIBRARY_STARTS) and "site-packages" not in file


def user_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are in the user's code, the innermost last."""
    return [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code on a stack, as ``train.py:41``; empty if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
