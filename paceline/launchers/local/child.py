"""Child processes that end with their parent. Run as a script, this file becomes a worker.

::

    launcher   Popen ─ vfork, exec ┐
    child                          └ python -I -S child.py <launcher> <cores> <command ...> ─ exec ─> the worker

The launcher has threads, and a fork copies the locks that they hold. Therefore no Python code runs between its fork and
the exec. This script sets up the worker's process instead, in a process without threads (about 15 ms). This file
imports nothing from the package.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127  # exit code of a shell for a command that it cannot start


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only).

    Has no effect if the parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def current_directory() -> str:
    """Return the current directory. Empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def command_of(cores: frozenset[int], command: tuple[str, ...]) -> list[str]:
    """Return the command that starts a worker bound to `cores`, or unbound if `cores` is empty."""
    bound = ",".join(map(str, sorted(cores))) or "-"
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), bound, *command]


def become(parent: int, cores: str, command: list[str]) -> None:
    """Replace this process with the worker. Exit if the launcher has ended."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and they stay ignored after an exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}.\n")
        sys.stderr.flush()
        os._exit(_CANNOT_START)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
