"""Conversion of a forked process into a worker, in the state that a new Python sets up for a script."""

from __future__ import annotations

import importlib.machinery
import io
import logging
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, TextIO

from paceline.environments import env
from paceline.launchers.local import unsafe
from paceline.launchers.local.child import current_directory, end_with_parent

_SPECIAL = "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__builtins__"
_own_main = sys.modules["__main__"]

began_with: dict[str, str] | None = None  # environment at the start of this worker, if it is a fork


def follow(launcher: int, go: int) -> None:
    """Wait until the launcher has adopted this process. Exit if the launcher gives up or ends.

    Args:
        go: pipe with a byte after the adoption, or without one if the launcher gives up. Closed by this function.
    """
    wanted = os.read(go, 1)
    os.close(go)
    end_with_parent()
    if not wanted or os.getppid() != launcher:
        os._exit(1)
    os.setsid()


def take_over(environment: Mapping[str, str], directory: str, out: int, err: int) -> None:
    """Set environment, current directory and output of a worker, and reseed. Close the two descriptors."""
    global began_with
    env.replace(environment)
    began_with = dict(environment)
    if directory and directory != current_directory():
        os.chdir(directory)
    take_output(out, err)
    reseed()


def take_output(out: int, err: int) -> None:
    """Redirect standard output and error to two descriptors, which are closed. Standard input becomes empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, opened in enumerate((nothing, out, err)):
        os.dup2(opened, stream)
    for opened in {nothing, out, err}:
        if opened > 2:
            os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        _open_again(getattr(sys, f"__{name}__"), number, name)


def _open_again(stream: TextIO, number: int, name: str) -> None:
    """Reinitialize a standard stream as ``python -u`` does. Keep the object, because logging handlers may hold it."""
    assert isinstance(stream, io.TextIOWrapper)
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
    raw.name = f"<{name}>"
    stream.__init__(raw, stream.encoding, stream.errors, "\n", False, True)  # type: ignore[misc]
    stream.mode = "w"  # type: ignore[misc]


def reseed() -> None:
    """Refresh random state and cached values that a new process sets at startup but a fork inherits."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # os.fork reseeds Python's own generator
    multiprocessing.process.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # cached once per process
    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):  # some versions of Python do not update it after a fork
        main._set_native_id()
    start = vars(logging)["_startTime"]  # integer nanoseconds since Python 3.13
    vars(logging)["_startTime"] = time.time_ns() if isinstance(start, int) else time.time()


def main_module(command: Sequence[str], paths: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Create the module ``__main__`` of ``python -u script.py ...``. Return its code and its namespace.

    Args:
        command: interpreter, ``-u``, script and arguments.

    Raises:
        OSError: the script cannot be read.
        SyntaxError: the script is not valid Python.
        ValueError: the script contains a null character.
    """
    script = command[2]
    with open(script, "rb") as file:
        source = file.read()
    path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script.removeprefix("./"))
    code = compile(source, path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    given = vars(_own_main)
    vars(main).clear()
    vars(main).update({name: given[name] for name in _SPECIAL if name in given})
    vars(main).update(__name__="__main__", __doc__=None, __package__=None, __spec__=None)
    vars(main)["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    if "__annotations__" in given:
        vars(main)["__annotations__"] = {}
    vars(main).update(__file__=path, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv[:] = command[2:]
    sys.orig_argv[:] = command
    sys.path[:] = paths if sys.flags.safe_path else [os.path.dirname(os.path.realpath(script)), *paths]
    return code, vars(main)


def late_variables() -> list[str]:
    """Return warnings about variables that the script changed after the libraries which read them were loaded."""
    return [] if began_with is None else unsafe.late_variables(began_with, env.inherited())


def hide_own_frames(error: BaseException) -> None:
    """Make the traceback of an error that ends this process begin in the script, without the caller's frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = trace
        try:
            hook(kind, raised.with_traceback(trace), trace)
        except SystemExit:
            raise
        except BaseException as failed:  # noqa: BLE001 - printed as Python does, without this function's frame
            own = failed.__traceback__ and failed.__traceback__.tb_next
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(failed), failed.with_traceback(own), own)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, raised.with_traceback(trace), trace)

    sys.excepthook = show


def start_anew(command: Sequence[str]) -> NoReturn:
    """Replace this process with a new Python, which reports the error in the script itself."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored signals stay ignored after an exec
        signal.signal(number, signal.SIG_DFL)
    os.execv(command[0], list(command))
