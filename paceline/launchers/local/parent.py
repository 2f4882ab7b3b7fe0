"""Preloaded parent: a process that has imported torch and forks the workers. The launcher runs it as a script.

::

    launcher   Popen ─> child.py ─> parent.py   imports, then waits for requests on a socket
       │                               └ fork ─> another child, which ends at once
       └ adopts ─────────────────────────────────── └ fork ─> the worker, a child of the launcher from then on

The parent never runs an operation or a backward pass and never uses CUDA, because the threads of libgomp and autograd
and CUDA contexts do not survive a fork. Imported objects are frozen, so garbage collection in a worker does not copy
their pages. The parent ends when the launcher closes the socket or ends.
"""

# ruff: noqa: E402 - the modules loaded at startup are recorded before any import

import sys

_ALWAYS = frozenset(name.partition(".")[0] for name in sys.modules)
"""Modules that every Python has imported before it knows the folder of its script."""

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this file's folder, whose modules would shadow others with the same names

import gc
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from paceline.environments import env
from paceline.launchers.local import become, messages, unsafe

MODULES = ("torch", "torch.distributed", "torch.distributed.checkpoint", "paceline.session")
"""Modules that workers import to train, save and recover. Given by name, because they belong to higher layers."""
_MOST_PRINTED = 1 << 16
_SET_WHEN_NEEDED = {"TORCHINDUCTOR_CACHE_DIR"}
"""Variables that an import sets, and that are set again if they are missing when read."""


class Parent:
    """Server that forks a worker for each request of the launcher.

    Args:
        cores: whether this process is bound to cores.
        folders: see :func:`paceline.launchers.local.unsafe.check_folders`.
    """

    def __init__(self, channel: socket.socket, launcher: int, cores: bool, script: str, folders: Sequence[str]) -> None:
        self._channel, self._launcher, self._cores, self._script = channel, launcher, cores, script
        self._folders = folders
        self._added: dict[str, str] = {}
        self._printed = [b"", b""]
        self.paths = list(sys.path)

    def load(self) -> None:
        """Import the modules. Report to the launcher that this process can be forked, or why it cannot."""
        environment = env.inherited()
        gc.disable()  # imports create no garbage, and garbage collection takes a tenth of the import time
        try:
            unsafe.check_binding(self._cores, environment)
            unsafe.check_script(self._script)
            import_modules()
        except unsafe.Unsafe as error:
            self._refuse(str(error))
        except BaseException as error:  # noqa: BLE001 - workers start as new Pythons, which show the error
            self._refuse(f"the imports failed with {type(error).__name__}: {str(error)[:200]}")
        self.paths += [path for path in sys.path if path not in self.paths]
        now = env.inherited()
        self._added = {name: now[name] for name in now if now[name] != environment.get(name)}
        self._added = {name: now[name] for name in self._added.keys() - _SET_WHEN_NEEDED}
        self._printed = [os.pread(stream, _MOST_PRINTED, 0) for stream in (1, 2)]  # repeated by each worker
        gc.freeze()  # without a prior collection, which would cost the time that gc.disable has saved
        gc.enable()
        try:
            os.waitpid(_fork_and_end(), 0)
            unsafe.check_process()
            unsafe.check_folders(self._folders, sys.modules, _ALWAYS)
        except unsafe.Unsafe as error:
            self._refuse(str(error))
        messages.send(self._channel, {"ready": True})

    def _refuse(self, reason: str) -> None:
        messages.send(self._channel, {"refused": reason})
        os._exit(0)

    def serve(self) -> dict[str, Any]:
        """Fork workers until the launcher ends. Return only in a worker, with the request for it."""
        while (received := messages.receive(self._channel)) is not None:
            request, files = received
            try:
                unsafe.check_script(request["command"][2])
                unsafe.check_folders(self._folders, sys.modules, _ALWAYS)
                unsafe.check_process()
                pid = _fork_twice()
            except (unsafe.Unsafe, OSError) as error:
                messages.send(self._channel, {"refused": str(error)})
            else:
                if pid == 0:
                    self._become(request, *files)
                    return request
                messages.send(self._channel, {"pid": pid})
            for opened in files:
                os.close(opened)
        os._exit(0)

    def _become(self, request: dict[str, Any], out: int, err: int, go: int) -> None:
        become.follow(self._launcher, go)
        self._channel.close()
        become.take_over({**request["environment"], **self._added}, request["directory"], out, err)
        for stream, printed in enumerate(self._printed, 1):
            os.write(stream, printed)


def import_modules() -> None:
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("paceline.system.torch_internals").import_compiler()


def _fork_and_end() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def _fork_twice() -> int:
    """Fork a grandchild through a child that ends at once. Return its process id, or 0 in the grandchild."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            grandchild = os.fork()
        except OSError as error:
            os.write(writing, str(-(error.errno or 1)).encode())
            os._exit(1)
        if grandchild:
            os.write(writing, str(grandchild).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    with open(reading, "rb") as file:
        said = int(file.read() or b"-1")
    os.waitpid(child, 0)
    if said < 0:
        raise OSError(-said, os.strerror(-said))
    return said


def _main(words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Run the parent. Return only in a worker, with the code to run and its namespace."""
    channel, launcher, cores, count, *rest = words
    folders, script = rest[: int(count)], rest[int(count)]
    connected = socket.socket(fileno=int(channel))
    connected.set_inheritable(False)
    parent = Parent(connected, int(launcher), cores == "bound", script, folders)
    parent.load()
    command = parent.serve()["command"]
    try:
        return become.main_module(command, parent.paths)
    except (OSError, SyntaxError, ValueError):
        become.start_anew(command)


if __name__ == "__main__":
    _code, _names = _main(sys.argv[1:])
    try:
        exec(_code, _names)
    except SystemExit:
        raise
    except BaseException as _error:
        become.hide_own_frames(_error)
        raise  # Python itself ends the process, with the exit code for this error
