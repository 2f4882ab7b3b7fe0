"""The user's own code: lines of a traceback or a stack, the script, and the modules beside it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

_PACKAGE = str(Path(__file__).resolve().parent)
_LIBRARIES = {_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
_LIBRARY_STARTS = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")


def is_user_code(file: str) -> bool:
    """Whether a source file is the user's, and not of Python or an installed package."""
    return not file.startswith(_LIBRARY_STARTS) and "site-packages" not in file


def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's code."""
    try:
        return is_user_code(inspect.getfile(kind))
    except (TypeError, OSError):  # of C, or of a notebook
        return False


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


def script_modules() -> list[ModuleType]:
    """Return the main module and the modules imported from its folder; in a notebook the main module alone."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None:
        return [main]
    folder = os.path.join(os.path.dirname(os.path.realpath(script)), "")
    return [main, *(module for module in list(sys.modules.values()) if module is not main and _is_in(module, folder))]


def script_files() -> dict[str, Path]:
    """Return the files of the script and of the modules beside it, by their sorted paths relative to its folder."""
    files = sorted({Path(file).resolve() for module in script_modules() if (file := getattr(module, "__file__", None))})
    home = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve().parent
    return {str(file.relative_to(home)): file for file in files if file.is_file()}


def _is_in(module: ModuleType, folder: str) -> bool:
    """Whether the module's source is below a folder, and not of a package that is installed there."""
    file = getattr(module, "__file__", None)
    if not file or not os.path.isabs(file) or not file.endswith(".py"):
        return False
    path = _real_path(file)
    return path.startswith(folder) and "site-packages" not in path


@functools.cache
def _real_path(path: str) -> str:
    """Return ``os.path.realpath(path)`` with one look at each folder of the 2,000 modules."""
    folder, name = os.path.split(path)
    if folder == path or name in ("", "..") or os.path.islink(path):
        return os.path.realpath(path)
    return os.path.join(_real_path(folder), name)
