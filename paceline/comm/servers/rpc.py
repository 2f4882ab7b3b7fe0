"""Requests among the workers of several machines: each answers the others in threads, whatever its main thread does.

::

    worker 0   main thread   ─ compute ─ ask ──────┐       ┌─ compute
    worker 1   a thread                  receive ─ handle ─ answer
               main thread   ─ compute ────────────────────────────

So what a worker holds for the others (a shard of a parameter server, the table of steps) outlives a step that failed:
survivors of a loss read it while they part, as they would in shared memory. A frame is a length of each part, words
that ``comm.values`` can read, and bytes. Whoever connects proves first that it is one of these workers
(``coordinator.authentication``) by a key that they share through the store at which they met.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from paceline import errors
from paceline.comm.assignment.store import Store
from paceline.comm.values import decode, encode
from paceline.comm.world import World
from paceline.coordinator.wire.authentication import NotAuthenticated, admit, authenticate, worker
from paceline.coordinator.wire.messages import keep_alive
from paceline.environments import env
from paceline.errors import WorkerLost, WorkerSilent

_FRAME = struct.Struct("<QQ")
_LONGEST_WORDS = 1 << 26
_PROOF_SECONDS = 10.0
_MOST_UNPROVEN = 64
"""Connections at a time that have yet to prove who they are."""
_PIECE = 1 << 20
"""Bytes handed to the kernel at once: between two pieces a worker looks whether the others are alive."""
_SLICE_SECONDS = 0.05
"""How often a worker that waits for an answer looks whether the others are alive."""

Bytes: TypeAlias = "bytes | bytearray | memoryview"
Answer: TypeAlias = "tuple[Any, Sequence[Bytes]]"
Handler = Callable[[int, Any, bytearray], Answer]
"""Answers (the rank that asks, its words, its bytes) with words and bytes; runs in a thread of that connection."""


class RpcServer:
    """Answers the requests of other workers.

    Args:
        host: the address to listen at.
        key: that who connects must have.
        most: bytes of the largest request, besides its words.
    """

    def __init__(self, host: str, key: bytes, most: int) -> None:
        self._handlers: dict[str, Handler] = {}
        self._ended: list[Callable[[int], None]] = []
        self._key, self._most = key, most
        self._unproven = threading.Semaphore(_MOST_UNPROVEN)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server((host, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="paceline-rpc", daemon=True).start()

    def serve(self, what: str, handler: Handler) -> None:
        """From now on answer such requests."""
        self._handlers[what] = handler

    def on_end(self, act: Callable[[int], None]) -> None:
        """Call this with the rank of a worker whose connection has ended."""
        self._ended.append(act)

    def handle(self, rank: int, what: str, words: Any, data: bytearray) -> Answer:
        """Answer a request."""
        return self._handlers[what](rank, words, data)

    def close(self) -> None:
        """End all connections, and listen no more."""
        with self._lock:
            self._closed = True
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
                time.sleep(_SLICE_SECONDS)  # no file descriptor is left for now
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
                self._open.add(connection)
            connection.settimeout(None)
            try:
                self._answer(connection, rank)
            finally:
                with self._lock:
                    self._open.discard(connection)
                for act in self._ended:
                    act(rank)

    def _answer(self, connection: socket.socket, rank: int) -> None:
        while True:
            (what, words), data = _receive(connection.recv_into, self._most)
            try:
                answer, parts = self.handle(rank, what, words, data)
                said = ("ok", answer)
            except Exception as error:  # noqa: BLE001 - whoever asked raises it
                said, parts = ("error", (type(error).__name__, str(error))), ()
            _send(connection.send, said, parts)


class RpcClient:
    """Asks one other worker; used by one thread at a time.

    Attributes:
        check: called while it waits; may raise.
        seconds: to wait at most.

    Args:
        world: the workers.
        rank: of the other.
        address: where it listens.
        key: of these workers.
        most: bytes of the largest answer, besides its words.
    """

    def __init__(self, world: World, rank: int, address: tuple[str, int], key: bytes, most: int) -> None:
        self._world, self.rank, self._address, self._key, self._most = world, rank, address, key, most
        self._connection: socket.socket | None = None
        self.check: Callable[[], None] = world.check
        self.seconds = world.timeout

    def start(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> None:
        """Send a request; its answer is to be taken by :meth:`finish` before the next one.

        Raises:
            WorkerLost: the other worker went away.
        """
        self.check()
        with self._guarded():
            self._connect()
            _send(self._write, (what, words), parts)

    def finish(self) -> tuple[Any, bytearray]:
        """Wait for the answer.

        Raises:
            WorkerLost: the other worker went away, or stayed silent for the timeout.
            PacelineError: as the handler has raised it.
        """
        with self._guarded():
            (kind, answer), data = _receive(self._read, self._most)
        if kind == "error":
            name, text = answer
            known = getattr(errors, name, RuntimeError)
            raise (known if isinstance(known, type) and issubclass(known, errors.PacelineError) else RuntimeError)(text)
        return answer, data

    def ask(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> tuple[Any, bytearray]:
        """Send a request, and wait for the answer."""
        self.start(what, words, parts)
        return self.finish()

    def close(self) -> None:
        """End the connection; the next request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        if self._connection is not None:
            return
        connection = socket.create_connection(self._address, timeout=min(self.seconds, _PROOF_SECONDS))
        try:
            keep_alive(connection)
            authenticate(connection, worker(self._world.rank), self._key, min(self.seconds, _PROOF_SECONDS))
        except BaseException:
            connection.close()
            raise
        connection.settimeout(min(_SLICE_SECONDS, self.seconds))
        self._connection = connection

    def _read(self, into: memoryview) -> int:
        assert self._connection is not None
        return self._patiently(partial(self._connection.recv_into, into))

    def _write(self, view: memoryview) -> int:
        assert self._connection is not None
        return self._patiently(partial(self._connection.send, view))

    def _patiently(self, move: Callable[[], int]) -> int:
        """Move some bytes, as long as the others are alive."""
        begin = time.monotonic()
        with contextlib.suppress(TimeoutError):
            return move()
        with self._world.waiting_for([self.rank]):
            while True:
                self.check()
                if time.monotonic() - begin > self.seconds:
                    raise WorkerSilent(
                        f"Rank {self._world.rank} waited {self.seconds:.0f} s for an answer of rank {self.rank} "
                        f"(timeout_seconds). See the output of rank {self.rank}: it is stopped, or busy."
                    )
                with contextlib.suppress(TimeoutError):
                    return move()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What was begun on a connection and not finished leaves it useless."""
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
    """Asks this worker itself: the main thread answers."""

    def __init__(self, world: World, server: RpcServer) -> None:
        super().__init__(world, world.rank, ("", 0), b"", 0)
        self._server = server
        self._asked: tuple[str, Any, bytearray] | None = None

    def start(self, what: str, words: Any = None, parts: Sequence[Bytes] = ()) -> None:
        self.check()
        self._asked = what, words, bytearray().join(parts)

    def finish(self) -> tuple[Any, bytearray]:
        assert self._asked is not None
        with self._world.waiting_for(self._world.others):  # the handler may ask the holder of a copy
            answer, parts = self._server.handle(self.rank, *self._asked)
        return answer, bytearray().join(parts)


class RpcPeers:
    """The servers of these workers, one in each; all make it together, in place of the one before.

    Args:
        world: the workers.
        most: bytes of the largest request or answer, besides its words.

    Attributes:
        server: of this worker.
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
        world.end_servers()  # nobody reads any more from those before
        world.end_servers = self._close
        self._clients: dict[int, RpcClient] = {}
        self._more: list[RpcClient] = []

    def _close(self) -> None:
        self.server.close()
        for client in (*self._clients.values(), *self._more):
            client.close()

    def client(self, rank: int) -> RpcClient:
        """The connection of the main thread to another worker."""
        if rank not in self._clients:
            own = rank == self.world.rank
            self._clients[rank] = OwnClient(self.world, self.server) if own else self.new_client(rank)
        return self._clients[rank]

    def new_client(self, rank: int) -> RpcClient:
        """One more connection to another worker, for another thread."""
        self._more.append(RpcClient(self.world, rank, self._addresses[rank], self._key, self._most))
        return self._more[-1]

    def parting(self, rank: int, seconds: float) -> RpcClient:
        """A new connection to a worker, which waits so long at most, and also when a worker was lost."""
        client = self.client(rank)
        client.close()
        client.check, client.seconds = lambda: None, seconds
        return client

    def machine_of(self, rank: int) -> str:
        """What tells the machine of a worker from the others."""
        return self._addresses[rank][0]


def holders(peers: RpcPeers, first: int, copies: int) -> list[int]:
    """The ranks that hold copies of what a worker serves: itself, then the next on another machine, or the next."""
    size = peers.world.size
    others = [(first + place) % size for place in range(1, size)]
    far = [rank for rank in others if peers.machine_of(rank) != peers.machine_of(first)]
    return [first, *(far or others)[: copies - 1]]


def _own_address(world: World) -> str:
    """The address by which the others reach this worker: where it came from when it met them."""
    if world.coordinator is not None:
        return world.coordinator.address
    host = env.started_by().host
    if host is None or env.is_loopback(host):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _send(write: Callable[[memoryview], int], words: Any, parts: Sequence[Bytes]) -> None:
    written = encode(words)
    views = [memoryview(part).cast("B") for part in parts]
    head = _FRAME.pack(len(written), sum(map(len, views))) + written
    for view in (memoryview(head), *views):
        while view:
            view = view[write(view[:_PIECE]) :]


def _receive(read: Callable[[memoryview], int], most: int) -> tuple[Any, bytearray]:
    """Read a frame.

    Raises:
        ValueError: it is longer than what is expected, or no frame.
    """

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
    if length > _LONGEST_WORDS or rest > most:
        raise ValueError(f"a message of {length} and {rest} bytes")
    return decode(bytes(take(length))), take(rest)
