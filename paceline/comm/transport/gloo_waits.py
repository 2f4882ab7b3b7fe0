"""Waits for gloo's sends, receives and collectives that another thread can end.

gloo forgets a message in flight when its connection ends: ``Pair::signalException`` tells the buffers whose transfer
has not begun, but neither the buffer being read nor those being written (gloo/transport/tcp/pair.cc in torch 2.13). A
thread that waits for such a message waits until the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.comm.transport.base import Work

INTERRUPTED = "interrupted, as another worker was lost"


class _Wait(Protocol):
    def end(self) -> None:
        """End the wait, from any thread; it may have ended already."""
        ...


class Waits:
    """The waits under way in one process group; once interrupted, every further wait fails until :meth:`reset`.

    Attributes:
        collectives: those that were started, and have not been waited for.
    """

    def __init__(self) -> None:
        self.collectives: set[Any] = set()
        self._current: set[_Wait] = set()
        self._interrupted = False

    def reset(self) -> None:
        """Allow waits again: the process group is new."""
        self._interrupted = False

    def interrupt(self) -> None:
        """End all waits with a RuntimeError, from any thread.

        To destroy the process group takes until its collectives have ended, or gloo gives them up: a thread holds it.
        """
        self._interrupted = True
        for wait in list(self._current):
            wait.end()
        works = tuple(self.collectives)
        self.collectives.clear()
        if works:
            threading.Thread(target=_outlive, args=(works, dist.group.WORLD), name="paceline-gloo", daemon=True).start()

    @property
    def interrupted(self) -> bool:
        """Whether waits fail, since :meth:`interrupt`."""
        return self._interrupted

    def enter(self, wait: _Wait) -> None:
        """Begin a wait.

        Raises:
            RuntimeError: the waits were interrupted.
        """
        self._current.add(wait)  # first: a call of interrupt() sees the wait, or the wait sees that it was called
        if self._interrupted:
            self.leave(wait)
            raise RuntimeError(INTERRUPTED)

    def leave(self, wait: _Wait) -> None:
        """End a wait that :meth:`enter` has begun."""
        self._current.discard(wait)


class MessageWork:
    """A send or receive of gloo."""

    __slots__ = ("_waits", "_work")

    def __init__(self, waits: Waits, work: Work) -> None:
        self._waits = waits
        self._work = work

    def wait(self) -> None:
        """Wait for the message.

        Raises:
            RuntimeError: the connection ended, or the waits were interrupted.
        """
        self._waits.enter(self)
        try:
            arrived = self._work.wait()
        finally:
            self._waits.leave(self)
        if arrived is False:  # of other back ends, which end their waits themselves, some return None
            raise RuntimeError(INTERRUPTED)

    def end(self) -> None:
        _abort(self._work)


class CollectiveWork:
    """A collective of gloo."""

    def __init__(self, waits: Waits, work: Any) -> None:
        self._waits = waits
        self._work = work
        self._over = threading.Event()
        waits.collectives.add(work)

    def wait(self) -> None:
        """Wait for the result.

        Raises:
            RuntimeError: a connection ended, or the waits were interrupted.
        """
        self._work.get_future().add_done_callback(lambda _: self._over.set())
        self._waits.enter(self)
        try:
            self._over.wait()
        finally:
            self._waits.leave(self)
        if self._waits.interrupted:
            raise RuntimeError(INTERRUPTED)
        self._waits.collectives.discard(self._work)
        self._work.wait()

    def end(self) -> None:
        self._over.set()


def _outlive(works: tuple[Any, ...], group: Any) -> None:
    """Hold a process group until its collectives have ended."""
    for work in works:
        with contextlib.suppress(RuntimeError):  # whoever waited for it was told
            work.wait()


def _abort(work: Work) -> None:
    """Let whoever waits for a send or receive of gloo go on; ``wait`` returns False then.

    torch has this method in C++ only (checked: 2.13). The object tells its class by its table of virtual functions; of
    any other class, or without the symbols, nothing happens.
    """
    if not isinstance(work, dist.Work):
        return
    pointer = ctypes.c_void_p.from_address(id(work) + object.__basicsize__)  # where pybind11 keeps it
    if pointer.value and (abort := _ABORTS.get(ctypes.c_void_p.from_address(pointer.value).value)):
        abort(pointer)


def _aborts() -> dict[int | None, Any]:
    """Return the abort methods by the address of the table of virtual functions of their class."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        found: dict[int | None, Any] = {}
        for kind in ("SendWork", "RecvWork"):
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTVN4c10d16ProcessGroupGloo8{kind}E"))
            abort = library[f"_ZN4c10d16ProcessGroupGloo8{kind}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort
    except (StopIteration, OSError, ValueError, AttributeError):
        return {}
    return found


_ABORTS = _aborts()
