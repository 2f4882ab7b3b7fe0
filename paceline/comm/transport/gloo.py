"""gloo transport: tagged transfers of tensors in host memory. A wait blocks, and raises if a peer is lost.

gloo forgets a message in flight when its connection ends: ``Pair::signalException`` notifies the buffers whose transfer
has not begun, but neither the buffer being read nor those being written (gloo/transport/tcp/pair.cc in torch 2.13). A
thread that waits for a forgotten message blocks until the timeout of the process group. So waits can be interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.comm.transport.base import Capabilities, Communicator, Message, Started, TransportError, Work
from paceline.system.torch_internals import GLOO_ABORT, GLOO_TABLE

INTERRUPTED = "interrupted, as another worker was lost"


class Gloo:
    """Default process group for tensors on the CPU."""

    backend = "gloo"

    def __init__(self, same_host: bool) -> None:
        self.capabilities = Capabilities(
            device=torch.device("cpu"), on_host=True, same_host=same_host, ordered=False, blocking_wait=True
        )
        self._waits = Waits()

    def open(self) -> None:
        """Allow waits again after :meth:`abort`. gloo connects by itself."""
        self._waits.reset()

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Do nothing, because each tag has its own order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        started = [(self._begin(dist.irecv, message), [message.peer]) for message in receives]
        return started + [(self._begin(dist.isend, message), [message.peer]) for message in sends]

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return CollectiveWork(self._waits, dist.all_reduce(tensor, async_op=True))

    def synchronize(self, look: Callable[[float], None]) -> None:
        """Do nothing, because waits block the host."""

    def abort(self) -> None:
        """End all waits, because gloo does not end all of them when their connections are shut down."""
        self._waits.interrupt()

    def _begin(self, call: Callable[..., Work | None], message: Message) -> Work:
        """Start one send or receive, so that an error names its peer."""
        try:
            work = call(message.tensor, message.peer, tag=message.tag)
        except RuntimeError as error:
            raise TransportError([message.peer], error) from error
        assert work is not None
        return MessageWork(self._waits, work)


class _Wait(Protocol):
    def end(self) -> None:
        """End the wait, which may have ended already. Any thread may call this method."""


class Waits:
    """Current waits in one process group. After :meth:`interrupt`, every wait fails until :meth:`reset`."""

    def __init__(self) -> None:
        self.collectives: set[Any] = set()  # collectives that have been started and not yet waited for
        self._current: set[_Wait] = set()
        self.interrupted = False  # whether waits fail because of :meth:`interrupt`

    def reset(self) -> None:
        """Allow waits again, for a new process group."""
        self.interrupted = False

    def interrupt(self) -> None:
        """End all waits with a RuntimeError. Any thread may call this method.

        Destroying the process group blocks until its collectives have ended or timed out, so a thread keeps it alive.
        """
        self.interrupted = True
        for wait in list(self._current):
            wait.end()
        works = tuple(self.collectives)
        self.collectives.clear()
        if works:
            threading.Thread(target=_outlive, args=(works, dist.group.WORLD), name="paceline-gloo", daemon=True).start()

    def enter(self, wait: _Wait) -> None:
        """Register a wait. Raises RuntimeError if the waits were interrupted."""
        self._current.add(wait)  # before the check: either interrupt() sees this wait, or this wait sees the flag
        if self.interrupted:
            self.leave(wait)
            raise RuntimeError(INTERRUPTED)

    def leave(self, wait: _Wait) -> None:
        """Remove a wait that :meth:`enter` has registered."""
        self._current.discard(wait)


class MessageWork:
    """Send or receive of gloo."""

    __slots__ = ("_waits", "_work")

    def __init__(self, waits: Waits, work: Work) -> None:
        self._waits, self._work = waits, work

    def wait(self) -> None:
        """Wait for the message. Raises RuntimeError if the connection ended, or the waits were interrupted."""
        self._waits.enter(self)
        try:
            arrived = self._work.wait()
        finally:
            self._waits.leave(self)
        if arrived is False:  # not None, which some other back ends return: they end their waits themselves
            raise RuntimeError(INTERRUPTED)

    def end(self) -> None:
        _abort(self._work)


class CollectiveWork:
    """Collective of gloo."""

    def __init__(self, waits: Waits, work: Any) -> None:
        self._waits, self._work = waits, work
        self._over = threading.Event()
        waits.collectives.add(work)

    def wait(self) -> None:
        """Wait for the result. Raises RuntimeError if a connection ended, or the waits were interrupted."""
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
    """Keep a process group alive until its collectives have ended."""
    for work in works:
        with contextlib.suppress(RuntimeError):  # the waiting thread has raised already
            work.wait()


def _abort(work: Work) -> None:
    """Abort a send or receive of gloo, so that ``wait`` returns False.

    torch has this method in C++ only (checked: 2.13). The table of virtual functions identifies the object's class. The
    call has no effect for any other class, or without the symbols.
    """
    if not isinstance(work, dist.Work):
        return
    pointer = ctypes.c_void_p.from_address(id(work) + object.__basicsize__)  # where pybind11 keeps the C++ object
    if pointer.value and (abort := _ABORTS.get(ctypes.c_void_p.from_address(pointer.value).value)):
        abort(pointer)


def _aborts() -> dict[int | None, Any]:
    """Return the abort methods, keyed by the address of their class's table of virtual functions."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        found: dict[int | None, Any] = {}
        for kind in ("SendWork", "RecvWork"):
            table = ctypes.addressof(ctypes.c_char.in_dll(library, GLOO_TABLE.format(kind)))
            abort = library[GLOO_ABORT.format(kind)]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort
    except (StopIteration, OSError, ValueError, AttributeError):
        return {}
    return found


_ABORTS = _aborts()
