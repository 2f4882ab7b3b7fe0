"""A transport for tests that waits and breaks as NCCL does, over gloo, with tensors on the CPU.

::

    from paceline.testing import ordered_transport

    ordered_transport.use()  # before paceline.start, in each process

What is like NCCL:

- Each communicator runs what it is given in order, on a thread of its own. A receive holds up what was given after it;
  tags mean nothing; a list of sends and receives is one work.
- ``wait()`` returns at once and never raises. The operations of torch that read or write the tensor, and what is given
  to any communicator afterwards, wait for it, as what follows on a stream does; a read behind torch's back
  (``tolist``, ``numpy``) does not. Without ``wait()`` nothing does.
- What is received into holds garbage until it is there. What is sent is read when its turn comes.
- When a peer is gone nothing happens: the communicator stands still. ``abort`` ends everything, without an error, and
  leaves garbage.
- After :func:`stall` the communicators of a process stand still, as those of a GPU that is lost; its host goes on.

Workers share no memory. Processes of the script itself that call ``torch.distributed`` use gloo as before.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.comm.transport import choice
from paceline.comm.transport.base import Capabilities, Communicator, Message, Started

_LATE_SECONDS = 2e-4
"""After its turn has come, each operation takes so much longer: what is read too early is garbage."""
_LOOK_SECONDS = 1e-3
_END_SECONDS = 5.0
_left: list[int] = []
"""How many works this process still does, if :func:`stall` was called."""


def use() -> None:
    """Let the workers of this process use the transport from now on."""
    choice.use(OrderedTransport)


def stall(after: int) -> None:
    """Let this process do so many more works, then none: who waits for them gets garbage when they are aborted."""
    _left[:] = [after]


@dataclass(eq=False)
class _Operation:
    """What a communicator was given, and the work that its caller gets."""

    stream: _Stream
    run: Callable[[], Callable[[], None]]
    """Does it; what it returns writes the results, unless it was aborted meanwhile."""
    outputs: list[torch.Tensor]
    after: list[_Operation] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Let what torch does next wait; not the host."""
        self.stream.wait_for(self)


class _Stream(TorchDispatchMode):
    """What the device does next: it waits for operations in the memory that they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waited: list[_Operation] = []

    def wait_for(self, operation: _Operation) -> None:
        """From now on wait for an operation."""
        self.waited = [one for one in (*self.waited, operation) if not one.done.is_set()]

    def synchronize(self) -> None:
        """Block until all that was waited for is done."""
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
    """The one stream of this process."""
    stream = _Stream()
    stream.__enter__()  # type: ignore[no-untyped-call]
    return stream


class _Queue:
    """Runs operations one after the other."""

    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted
        self._operations: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self._outstanding: list[_Operation] = []
        threading.Thread(target=self._run, name="paceline-queue", daemon=True).start()

    def give(self, operation: _Operation) -> None:
        """Run an operation after all before it."""
        self._outstanding = [one for one in (*self._outstanding, operation) if not one.done.is_set()]
        self._operations.put(operation)
        if self._aborted.is_set():
            self.end()

    def end(self) -> None:
        """Count everything as done, whatever has come."""
        for one in self._outstanding:
            one.done.set()

    def drain(self, seconds: float) -> None:
        """Wait until all is done, but not longer than so many seconds."""
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
    """Moves tensors as NCCL does; see the module."""

    backend = "gloo"

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            device=torch.device("cpu"),
            on_host=False,
            same_host=False,
            point_to_point=True,
            collectives=True,
            ordered=True,
            blocking_wait=False,
        )
        self._stream = _device()
        self._queues: dict[Communicator | None, _Queue] = {}
        self._aborted = threading.Event()

    def open(self) -> None:
        """See :class:`Transport`."""
        self._aborted = threading.Event()
        self._group = dist.new_group(backend="gloo")
        self._queues = {None: _Queue(self._aborted)}
        atexit.register(self._close)  # before the group is left: the others may still need what was sent

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """See :class:`Transport`."""
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
        """See :class:`Transport`."""
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
        """See :class:`Transport`."""
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
        """See :class:`Transport`."""
        begin = time.monotonic()
        for operation in self._stream.waited:
            while not operation.done.wait(_LOOK_SECONDS):
                look(time.monotonic() - begin)
        self._stream.waited = []

    def abort(self) -> None:
        """See :class:`Transport`."""
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
    """Write behind autograd's back, as the back ends do."""
    tensor.data.copy_(value)


def _spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with what is hardly ever right: NaN, or the largest number."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    else:
        tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _memory_of(leaf: object) -> list[int]:
    """What tells the memory of a tensor from others; nothing if it has none, or is no tensor."""
    if not isinstance(leaf, torch.Tensor):
        return []
    try:
        return [leaf.untyped_storage()._cdata]
    except (NotImplementedError, RuntimeError):
        return []
