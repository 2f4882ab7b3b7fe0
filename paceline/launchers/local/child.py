"""A process that ends with the one that started it; run as a script, it becomes a worker.

::

    launcher   Popen ─ vfork, exec ┐
    child                          └ python -I -S child.py <launcher> <cores> <command ...> ─ exec ─> the worker

The launcher has threads, and a fork copies the locks that they hold. So no Python runs between its fork and the exec:
what a worker is to have before its first line is set here, in a process without threads (about 15 ms). This file
imports nothing of the package.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127
"""As a shell says it."""


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux).

    A parent that has ended already is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def command_of(cores: frozenset[int], command: tuple[str, ...]) -> list[str]:
    """The command with which this process starts a worker bound to cores; none: the system decides."""
    bound = ",".join(map(str, sorted(cores))) or "-"
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), bound, *command]


def become(parent: int, cores: str, command: list[str]) -> None:
    """Become the worker, if the launcher is still there."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so over an exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}.\n")
        sys.stderr.flush()
        os._exit(_CANNOT_START)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
