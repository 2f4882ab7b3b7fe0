"""Requests between workers on several machines, answered in threads while the main thread computes.

::

    worker 0   main thread   ─ compute ─ ask ──────┐       ┌─ compute
    worker 1   a thread                  receive ─ handle ─ answer
               main thread   ─ compute ────────────────────────────

So data that a worker holds for the others (a shard of a parameter server, the table of steps) outlives a failed step,
and the survivors of a loss read it while they re-form, as they would in shared memory. A frame is two lengths, a
message encoded by ``comm.values``, and bytes. A client first proves that it is one of these workers
(``coordinator.wire.authentication``) with a key that the workers share through the store of their rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

from paceline import errors
from paceline.comm.assignment.store import Store
from paceline.comm.rendezvous.networks import address_towards
from paceline.comm.values import decode, encode
from paceline.comm.world import World
from paceline.coordinator.wire.authentication import NotAuthenticated, admit, worker
from paceline.coordinator.wire.messages import keep_alive, open_socket
from paceline.environments import env
from paceline.errors import WorkerLost, WorkerSilent

_FRAME = struct.Struct("<QQ")
_LONGEST_MESSAGE = 1 << 26
_PROOF_SECONDS = 10.0
_MOST_UNPROVEN = 64  # maximum number of simultaneous connections that are not authenticated yet
_SEND_BYTES = 1 << 20
"""Bytes passed to the kernel in one call. Between calls, a waiting worker checks that the others are alive."""
_SLICE_SECONDS = 0.05  # interval at which a worker that waits for an answer checks that the others are alive

Bytes: TypeAlias = "bytes | bytearray | memoryview"
Answer: TypeAlias = "tuple[Any, Sequence[Bytes]]"
Handler = Callable[[int, Any, bytearray], Answer]
"""Answers (client's rank, message, bytes) with a message and bytes, in the thread of the client's connection."""


class RpcServer:
    """Server for other workers' requests, whose bytes beside the message are at most ``most``."""

    def __init__(self, host: str, key: bytes, most: int) -> None:
        self._handlers: dict[str, Handler] = {}
        self._ended: list[Callable[[int], None]] = []
        self._key, self._most = key, most
        self._unproven = threading.Semaphore(_MOST_UNPROVEN)
        self._open: dict[socket.socket, int] = {}  # rank of the client of each connection
        self._lock = threading.Lock()
        self._registered = threading.Condition(self._lock)
        self._closed = False
        self._listener = socket.create_server((host, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="paceline-rpc", daemon=True).start()

    def serve(self, what: str, handler: Handler) -> None:
        """Register the handler for requests named ``what``, and answer those that have arrived."""
        with self._registered:
            self._handlers[what] = handler
            self._registered.notify_all()

    def on_end(self, act: Callable[[int], None]) -> None:
        """Register a function to be called with the rank of a worker whose connection has ended."""
        self._ended.append(act)

    def connected(self) -> set[int]:
        """Return the ranks of the workers that have a connection now."""
        with self._lock:
            return set(self._open.values())

    def handle(self, rank: int, what: str, words: Any, data: bytearray) -> Answer:
        return self._handlers[what](rank, words, data)

    def close(self) -> None:
        """End all connections and stop listening."""
        with self._lock:
            self._closed = True
            self._registered.notify_all()
            for one in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_SLICE_SECONDS)  # temporarily out of file descriptors
                continue
            if not self._unproven.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="paceline-rpc-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                keep_alive(connection)
                role = admit(connection, lambda role: self._key, _PROOF_SECONDS)
            except NotAuthenticated:
                return
            finally:
                self._unproven.release()
            rank = int(role.split()[1])
            with self._lock:
                if self._closed:
                    return
                self._open[connection] = rank
            connection.settimeout(None)
            try:
                self._answer(connection, rank)
            finally:
                with self._lock:
                    del self._open[connection]
                for act in self._ended:
                    act(rank)

    def _answer(self, connection: socket.socket, rank: int) -> None:
        while True:
            (what, words), data = _receive(connection.recv_into, self._most)
            self._await_handler(what)
            try:
                answer, parts = self.handle(rank, what, words, data)
                reply = ("ok", answer)
            except Exception as error:  # noqa: BLE001 - the client raises it
                reply, parts = ("error", (type(error).__name__, str(error))), ()
            _send(connection.send, reply, parts)

    def _await_handler(self, what: str) -> None:
        """Wait until a handler is registered, because another worker may ask before this one is ready to answer.

        The client has the timeout. The wait also ends when the server closes.
        """
        with self._registered:
            self._registered.wait_for(lambda: what in self._handlers or self._closed)


class RpcClient:
    """Client for requests to another worker. Only one thread at a time may use it.

    Args:
        most: size of the largest answer in bytes, without its message.
    """

    def __init__(self, world: World, rank: int, address: tuple[str, int], key: bytes, most: int) -> None:
        self._world, self.rank, self._address, self._key, self._most = world, rank, address, key, most
        self._connection: socket.socket | None = None
        self._waits = False  # whether an answer is still to come
        self.check: Callable[[], None] = world.check  # called before a request and during waits. May raise.
        self.seconds = world.timeout  # timeout in seconds for an answer

    def start(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> None:
        """Send a request. Call :meth:`finish` for its answer before the next request."""
        self.check()
        if self._waits:  # an error left the last answer unread, and it must not pass for the answer to this request
            self.close()
        with self._guarded():
            self._connect()
            self._waits = True
            _send(self._write, (what, words), parts)

    def finish(self) -> tuple[Any, bytearray]:
        """Wait for the answer to the request and return its message and bytes.

        Raises:
            PacelineError: the handler raised it. Other errors of the handler become a RuntimeError.
        """
        with self._guarded():
            (kind, answer), data = _receive(self._read, self._most, self._arriving)
        self._waits = False
        if kind == "error":
            name, text = answer
            known = getattr(errors, name, RuntimeError)
            raise (known if isinstance(known, type) and issubclass(known, errors.PacelineError) else RuntimeError)(text)
        return answer, data

    def ask(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> tuple[Any, bytearray]:
        """Send a request and wait for its answer."""
        self.start(what, words, parts)
        return self.finish()

    def close(self) -> None:
        """Close the connection. The next request opens a new connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._waits = False

    def _connect(self) -> None:
        if self._connection is not None:
            return
        seconds = min(self.seconds, _PROOF_SECONDS)
        self._connection = open_socket(self._address, worker(self._world.rank), self._key, seconds)
        self._connection.settimeout(min(_SLICE_SECONDS, self.seconds))

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[None]:
        """Count the time for which an answer arrives, if the main thread waits for it, as a wait for the link."""
        begin = self._world.clock()
        yield
        if threading.current_thread() is threading.main_thread():
            self._world.add_received(self.rank, self._world.clock() - begin)

    def _read(self, into: memoryview) -> int:
        assert self._connection is not None
        return self._patiently(partial(self._connection.recv_into, into))

    def _write(self, view: memoryview) -> int:
        assert self._connection is not None
        return self._patiently(partial(self._connection.send, view))

    def _patiently(self, move: Callable[[], int]) -> int:
        """Send or receive some bytes, and check the other workers while waiting."""
        begin = time.monotonic()
        with contextlib.suppress(TimeoutError):
            return move()
        with self._world.waiting_for([self.rank]):
            while True:
                self.check()
                if time.monotonic() - begin > self.seconds:
                    raise WorkerSilent(
                        f"Rank {self._world.rank} waited {self.seconds:.0f} s for an answer from rank {self.rank} "
                        f"(timeout_seconds). See the output of rank {self.rank}: it is stopped, or busy."
                    )
                with contextlib.suppress(TimeoutError):
                    return move()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Close the connection after any error, because it may have stopped within a frame."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()
            self.check()
            other = f"rank {self.rank}"
            raise WorkerLost(
                f"Rank {self._world.rank} lost {other}: {error}. See the output of {other} for the cause."
            ) from error
        except BaseException:
            self.close()
            raise


class OwnClient(RpcClient):
    """Client for requests of a worker to itself, answered in the main thread."""

    def __init__(self, world: World, server: RpcServer) -> None:
        super().__init__(world, world.rank, ("", 0), b"", 0)
        self._server = server
        self._asked: tuple[str, Any, bytearray] | None = None

    def start(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> None:
        self.check()
        self._asked = what, words, bytearray().join(parts)

    def finish(self) -> tuple[Any, bytearray]:
        assert self._asked is not None
        with self._world.waiting_for(self._world.others):  # the handler may send a request to the holder of a copy
            answer, parts = self._server.handle(self.rank, *self._asked)
        return answer, bytearray().join(parts)


class RpcPeers:
    """RPC server and clients of this worker. All workers construct them together, to replace the previous ones.

    Args:
        most: size of the largest request or answer in bytes, without its message.
    """

    def __init__(self, world: World, most: int) -> None:
        self.world = world
        self._most = most
        store = Store(world, "servers", "while they exchanged the addresses of servers")
        store.open()
        if world.rank == 0:
            made = os.urandom(32).hex()
            store.ask(lambda one: one.set(store.key("key"), made))
        self._key = bytes.fromhex(store.ask(lambda one: one.get(store.key("key"))).decode())
        host = _own_address(world)
        self.server = RpcServer(host, self._key, most)
        self._addresses = [(str(one), int(port)) for one, port in world.gather((host, self.server.port), "step")]
        world.end_servers()  # no worker still reads from the previous servers
        world.end_servers = self._close
        self._clients: dict[int, RpcClient] = {}
        self._more: list[RpcClient] = []

    def _close(self) -> None:
        self.server.close()
        for client in (*self._clients.values(), *self._more):
            client.close()

    def client(self, rank: int) -> RpcClient:
        """Return the main thread's client for a worker."""
        if rank not in self._clients:
            own = rank == self.world.rank
            self._clients[rank] = OwnClient(self.world, self.server) if own else self.new_client(rank)
        return self._clients[rank]

    def new_client(self, rank: int) -> RpcClient:
        """Return an additional client for another worker, to be used in another thread."""
        self._more.append(RpcClient(self.world, rank, self._addresses[rank], self._key, self._most))
        return self._more[-1]

    def parting(self, rank: int, seconds: float) -> RpcClient:
        """Return a client with a new connection that waits at most ``seconds``, and works after a worker was lost."""
        client = self.client(rank)
        client.close()
        client.check, client.seconds = lambda: None, seconds
        return client

    def machine_of(self, rank: int) -> str:
        """Return an identifier of a worker's machine: its address."""
        return self._addresses[rank][0]


def holders(peers: RpcPeers, first: int, copies: int) -> list[int]:
    """Return the ranks that hold a copy: ``first``, then the next ranks on other machines, or else the next ranks."""
    size = peers.world.size
    others = [(first + offset) % size for offset in range(1, size)]
    far = [rank for rank in others if peers.machine_of(rank) != peers.machine_of(first)]
    return [first, *(far or others)[: copies - 1]]


def _own_address(world: World) -> str:
    """Return the address at which other workers reach this worker: its own address towards rank 0's host."""
    if world.coordinator is not None:
        return world.coordinator.address
    host = env.started_by().host
    if host is None or env.is_loopback(host):
        return "127.0.0.1"
    return address_towards(host)


def _send(write: Callable[[memoryview], int], words: Any, parts: Sequence[Bytes]) -> None:
    written = encode(words)
    views = [memoryview(part).cast("B") for part in parts]
    head = _FRAME.pack(len(written), sum(map(len, views))) + written
    for view in (memoryview(head), *views):
        while view:
            view = view[write(view[:_SEND_BYTES]) :]


def _receive(
    read: Callable[[memoryview], int],
    most: int,
    arriving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[Any, bytearray]:
    """Read a frame and return its message and bytes. ``arriving``: entered once the frame has begun to arrive."""

    def take(size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = read(view)
            if not count:
                raise ConnectionResetError("it has closed the connection")
            view = view[count:]
        return data

    length, rest = _FRAME.unpack(take(_FRAME.size))
    if length > _LONGEST_MESSAGE or rest > most:
        raise ValueError(f"a message of {length} and {rest} bytes")
    with arriving():
        return decode(bytes(take(length))), take(rest)
