"""Test transport that waits and fails as NCCL does, with gloo and CPU tensors.

::

    import ordered_transport

    ordered_transport.use()  # before paceline.start, in each process

It behaves like NCCL in these ways:

- Each communicator runs its operations in order, on a separate thread. A receive blocks all later operations of the
  communicator. Tags have no meaning. A list of sends and receives is one work.
- ``wait()`` returns immediately and never raises. Torch operations that access the memory of the outputs and operations
  given to any communicator afterwards wait for the work, like later work on a stream. A read that bypasses torch
  (``tolist``, ``numpy``) does not wait. Without a call to ``wait()`` nothing waits.
- The output of a receive holds garbage until the data arrive. A send reads its tensor in its turn.
- After the loss of a peer there is no error. The communicator stands still until ``abort`` ends all operations, without
  an error and with garbage in the outputs.
- After :func:`stall` the communicators of a process stand still, as with a lost GPU, while its host continues.

Workers share no memory. Process groups of the script that use ``torch.distributed`` directly use gloo as before.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.transport import choice
from paceline.comm.transport.base import Capabilities, Communicator, Message, Started
from paceline.system.torch_internals import TorchDispatchMode, storage_id, tree_leaves

_LATE_SECONDS = 2e-4  # extra delay of each operation after its turn has come, so that a premature read sees garbage
_POLL_SECONDS = 1e-3
_END_SECONDS = 5.0
_left: list[int] = []  # number of operations that this process still runs, if :func:`stall` was called


def use() -> None:
    """Use this transport for the worker of this process from now on."""
    choice.use(lambda _: OrderedTransport())


def stall(after: int) -> None:
    """Stall all communicators of this process after ``after`` more operations. An abort then leaves garbage."""
    _left[:] = [after]


@dataclass(eq=False)
class _Operation:
    """Operation in a communicator's queue, and the work handle that its caller gets."""

    stream: _Stream
    run: Callable[[], Callable[[], None]]
    """Runs the operation and returns a function that writes the results, which is not called after an abort."""
    outputs: list[torch.Tensor]
    after: list[_Operation] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Make later torch operations wait for this operation, without blocking the host."""
        self.stream.wait_for(self)


class _Stream(TorchDispatchMode):
    """Emulated device stream. Torch operations first wait for the operations that write the memory they use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waited: list[_Operation] = []

    def wait_for(self, operation: _Operation) -> None:
        """Add an operation that later torch operations must wait for."""
        self.waited = [one for one in (*self.waited, operation) if not one.done.is_set()]

    def synchronize(self) -> None:
        """Block until all operations with a ``wait()`` are done."""
        for operation in self.waited:
            operation.done.wait()
        self.waited = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.waited and not func.is_view:
            touched = {id_ for leaf in tree_leaves((args, kwargs)) for id_ in _memory_of(leaf)}
            for operation in self.waited:
                if touched.intersection(id_ for one in operation.outputs for id_ in _memory_of(one)):
                    operation.done.wait()
        return func(*args, **(kwargs or {}))


@functools.cache
def _device() -> _Stream:
    """Return the stream of this process, which is created on the first call."""
    stream = _Stream()
    stream.__enter__()  # type: ignore[no-untyped-call]
    return stream


class _Queue:
    """Queue whose thread runs a communicator's operations in order."""

    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted
        self._operations: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self._outstanding: list[_Operation] = []
        threading.Thread(target=self._run, name="paceline-queue", daemon=True).start()

    def give(self, operation: _Operation) -> None:
        self._outstanding = [one for one in (*self._outstanding, operation) if not one.done.is_set()]
        self._operations.put(operation)
        if self._aborted.is_set():
            self.end()

    def end(self) -> None:
        """Mark all outstanding operations as done, even if their data have not arrived."""
        for one in self._outstanding:
            one.done.set()

    def drain(self, seconds: float) -> None:
        """Wait until all operations are done, for at most ``seconds``."""
        until = time.monotonic() + seconds
        for one in self._outstanding:
            one.done.wait(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            operation = self._operations.get()
            for before in operation.after:
                before.done.wait()
            try:
                if not self._aborted.is_set():
                    write = operation.run()
                    if not self._aborted.is_set():
                        write()
            except RuntimeError:  # a peer is gone
                self._aborted.wait()
            operation.done.set()


class OrderedTransport:
    """Transport that moves tensors as NCCL does. See the module docstring."""

    backend = "gloo"

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            device=torch.device("cpu"), on_host=False, same_host=False, ordered=True, blocking_wait=False
        )
        self._stream = _device()
        self._queues: dict[Communicator | None, _Queue] = {}
        self._aborted = threading.Event()

    def open(self) -> None:
        self._aborted = threading.Event()
        self._group = dist.new_group(backend="gloo")
        self._queues = {None: _Queue(self._aborted)}
        atexit.register(self._close)  # runs before the group ends: peers may still need data

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        for communicator in communicators:
            if communicator not in self._queues:
                peer = communicator.receiver if dist.get_rank() == communicator.sender else communicator.sender
                hello = torch.zeros(1)
                works = [
                    dist.isend(hello, peer, self._group, communicator.number),
                    dist.irecv(hello, peer, self._group, communicator.number),
                ]
                for work in works:
                    assert work is not None
                    work.wait()
                self._queues[communicator] = _Queue(self._aborted)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        group, tag = self._group, 0 if over is None else over.number

        def run() -> Callable[[], None]:
            buffers = [torch.empty_like(one.tensor, memory_format=torch.contiguous_format) for one in receives]
            for one in receives:
                _spoil(one.tensor)
            time.sleep(_LATE_SECONDS)
            works = [dist.irecv(buffer, one.peer, group, tag) for buffer, one in zip(buffers, receives, strict=True)]
            works += [dist.isend(one.tensor.detach().clone(), one.peer, group, tag) for one in sends]
            for work in works:
                assert work is not None
                work.wait()

            def write() -> None:
                for buffer, one in zip(buffers, receives, strict=True):
                    _write(one.tensor, buffer)

            return write

        work = self._give(run, [one.tensor for one in receives], over)
        return [(work, sorted({one.peer for one in (*sends, *receives)}))]

    def all_reduce(self, tensor: torch.Tensor) -> _Operation:
        group = self._group

        def run() -> Callable[[], None]:
            total = tensor.detach().clone()
            _spoil(tensor)
            time.sleep(_LATE_SECONDS)
            dist.all_reduce(total, group=group)
            return lambda: _write(tensor, total)

        return self._give(run, [tensor], None)

    def _give(
        self, run: Callable[[], Callable[[], None]], outputs: list[torch.Tensor], over: Communicator | None
    ) -> _Operation:
        after = [one for one in self._stream.waited if not one.done.is_set()]
        operation = _Operation(self._stream, _stalled if _left == [0] else run, outputs, after)
        _left[:] = [max(0, one - 1) for one in _left]
        self._queues[over].give(operation)
        return operation

    def synchronize(self, look: Callable[[float], None]) -> None:
        begin = time.monotonic()
        for operation in self._stream.waited:
            while not operation.done.wait(_POLL_SECONDS):
                look(time.monotonic() - begin)
        self._stream.waited = []

    def abort(self) -> None:
        self._aborted.set()
        for one in [*self._queues.values()]:
            one.end()

    def _close(self) -> None:
        for one in self._queues.values():
            one.drain(_END_SECONDS)
        self.abort()


def _stalled() -> Callable[[], None]:
    raise RuntimeError("this process has come to a standstill")


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor without autograd, as back ends do."""
    tensor.data.copy_(value)


def _spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with a value that is almost never correct: NaN, the largest integer, or True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    else:
        tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _memory_of(leaf: object) -> list[int]:
    """Return the identity of a tensor's storage in a list, or an empty list for an object without storage."""
    if not isinstance(leaf, torch.Tensor):
        return []
    try:
        return [storage_id(leaf)]
    except (NotImplementedError, RuntimeError):
        return []
