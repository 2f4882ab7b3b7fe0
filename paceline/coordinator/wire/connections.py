"""Connections of the coordinator: authentication, message limits, and the thread that serves them.

A client first authenticates (:mod:`paceline.coordinator.wire.authentication`), in one line of at most 256 bytes and
within 10 seconds. Its messages are then validated (:mod:`paceline.coordinator.wire.validation`). An error on a
connection closes only that connection. One thread serves all connections and never blocks: data that a peer does not
read is buffered.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.coordinator.types import Message
from paceline.coordinator.wire.authentication import LONGEST_LINE, Challenge, Keys, NotAuthenticated
from paceline.coordinator.wire.messages import LONGEST_MESSAGE, Connection, decode, encode, keep_alive
from paceline.coordinator.wire.validation import KINDS, Kind, check

TICK_SECONDS = 0.5
_GREET_SECONDS = 10.0
_MOST_STRANGERS = 128
_ACCEPTED_AT_ONCE = 64
_REPEAT_SECONDS = 60.0
_TOLD_APART = 10
_MOST_REASONS = 1000
_LONGEST_REASON = 200


@dataclass(eq=False)
class Peer:
    """Client of the coordinator: a worker, an agent, or not yet authenticated."""

    connection: Connection  # coordinator's end of the connection
    host: str  # address of the client
    since: float  # time of the connection, on the monotonic clock
    challenge: Challenge | None  # pending challenge; None after authentication
    role: str = ""  # authenticated role, such as ``worker 3``; empty before authentication

    @property
    def worker(self) -> int | None:
        """Number of the worker; None if the client is not an authenticated worker."""
        kind, _, number = self.role.partition(" ")
        return int(number) if kind == "worker" else None


class Receiver(Protocol):
    """Handler of messages. All methods are called with the lock held."""

    def handle(self, peer: Peer, message: Message) -> None:
        """Handle a validated message of an authenticated client."""

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of an authenticated client's connection."""

    def tick(self, now: float) -> None:
        """Run periodic work. Called about every ``TICK_SECONDS``."""


class Refusals:
    """Recorder of refused connections, which aggregates frequent repetitions into counts."""

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, host: str, reason: str, now: float) -> None:
        """Record a refusal. The reason is sanitized and shortened, because a client may control a part of it."""
        reason = "".join(one if one.isprintable() else "?" for one in reason[:_LONGEST_REASON])
        if (host, reason) not in self._seen and len(self._seen) >= _MOST_REASONS:
            host, reason = "others", "too many to tell apart"
        since, count = self._seen.get((host, reason), (now, 0))
        self._seen[host, reason] = since, count + 1
        if count < _TOLD_APART:
            self._record("refused", address=host, reason=reason, count=1)

    def write(self, before: float) -> None:
        """Record the counts of repeated refusals that were first seen at or before this time, and reset them."""
        for (host, reason), (since, count) in list(self._seen.items()):
            if since <= before:
                del self._seen[host, reason]
                if count > _TOLD_APART:
                    self._record("refused", address=host, reason=reason, count=count - _TOLD_APART)


class Connections:
    """Thread that serves all connections."""

    def __init__(
        self,
        listener: socket.socket,
        keys: Keys,
        receiver: Receiver,
        lock: threading.RLock,  # lock that is held during calls of the receiver and while sending
        record: Callable[..., None],
        kinds: Mapping[str, Kind] = KINDS,  # kinds of messages that clients may send. Defaults to those of a run.
    ) -> None:
        self._kinds = kinds
        self._listener = listener
        self._keys = keys
        self._receiver = receiver
        self._lock = lock
        self._refusals = Refusals(record)
        self._strangers: dict[Peer, None] = {}  # the oldest first
        self._touched: set[Peer] = set()  # peers with traffic since the last call of _settle
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._closed = False
        self._accepts_at = 0.0
        listener.setblocking(False)
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(1 << 12))
        self._thread = threading.Thread(target=self._serve, name="paceline-coordinator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wake_up()
        self._thread.join(2 * TICK_SECONDS + 1)

    def send(self, peers: Sequence[Peer], message: Message) -> None:
        """Send a message, encoded once, to all peers without blocking. Any thread may call this with the lock held."""
        line = encode(message) if peers else b""
        for peer in peers:
            peer.connection.send(line)
        self._touched.update(peers)
        if threading.current_thread() is not self._thread:
            self._wake_up()

    def refuse(self, peer: Peer, reason: str) -> None:
        """Close a connection and record the reason."""
        self._refusals.add(peer.host, f"{peer.role}: {reason}" if peer.role else reason, time.monotonic())
        self._drop(peer)

    def drain(self, peer: Peer) -> None:
        """Handle all messages that have arrived from a peer. Any thread may call this with the lock held."""
        poll = select.poll()
        poll.register(peer.connection.socket, select.POLLIN)
        while not peer.connection.broken and poll.poll(0):
            self._serve_peer(peer, selectors.EVENT_READ)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # the thread is already awake, or has ended
            self._wake.send(b"x")

    def _serve(self) -> None:
        try:
            ticked = 0.0
            while not self._closed:
                events = self._selector.select(TICK_SECONDS)
                with self._lock:
                    for key, mask in events:
                        if isinstance(key.data, Peer):
                            self._serve_peer(key.data, mask)
                        else:
                            key.data()
                    now = time.monotonic()
                    if now - ticked > TICK_SECONDS:
                        ticked = now
                        self._tick(now)
                    self._settle()
        finally:  # also after a bug in this thread: workers must not wait forever
            self._refusals.write(time.monotonic())
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._wake.close()
            self._selector.close()

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client has already disconnected
                continue
            except OSError:  # too many open files: retry later, when some may have been closed
                self._selector.unregister(self._listener)
                self._accepts_at = now + TICK_SECONDS
                return
            self._welcome(connection, str(address[0]), now)

    def _welcome(self, connection: socket.socket, host: str, now: float) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            most = Counter(peer.host for peer in self._strangers).most_common(1)[0][0]
            oldest = next(peer for peer in self._strangers if peer.host == most)
            self.refuse(oldest, f"more than {_MOST_STRANGERS} connections without a proof")
        try:
            keep_alive(connection)
        except OSError:  # the client has already disconnected
            connection.close()
            return
        challenge = Challenge()
        peer = Peer(Connection(connection, LONGEST_LINE), host, now, challenge)
        self._strangers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._touched.add(peer)
        peer.connection.send(challenge.line)

    def _serve_peer(self, peer: Peer, mask: int) -> None:
        self._touched.add(peer)
        if mask & selectors.EVENT_WRITE:
            peer.connection.flush()
        if not mask & selectors.EVENT_READ or peer.connection.broken:  # another peer's message may have closed it
            return
        try:
            for line in peer.connection.receive():
                if peer.challenge is not None:
                    self._authenticate(peer, line)
                elif not peer.connection.closed:
                    message = decode(line)
                    check(message, peer.role.partition(" ")[0], self._kinds)
                    self._receiver.handle(peer, message)
        except NotAuthenticated as error:
            peer.connection.send(Challenge.refusal)
            self.refuse(peer, str(error))
        except ValueError as error:
            self.refuse(peer, str(error))
        except Exception as error:  # noqa: BLE001 - a bad message must end its sender only; the reason is recorded
            self.refuse(peer, f"{type(error).__name__}: {error}")

    def _authenticate(self, peer: Peer, line: bytes) -> None:
        assert peer.challenge is not None
        role, welcome = peer.challenge.check(line, self._keys)
        peer.role, peer.challenge = role, None
        del self._strangers[peer]
        peer.connection.longest = LONGEST_MESSAGE
        peer.connection.send(welcome)

    def _tick(self, now: float) -> None:
        if self._accepts_at and now >= self._accepts_at:
            self._accepts_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while self._strangers and now - next(iter(self._strangers)).since > _GREET_SECONDS:
            self.refuse(next(iter(self._strangers)), f"no proof within {_GREET_SECONDS:.0f} s")
        self._refusals.write(now - _REPEAT_SECONDS)
        self._receiver.tick(now)

    def _settle(self) -> None:
        """Drop connections that have ended, and poll connections with unsent data for writing."""
        while self._touched:
            peer = self._touched.pop()
            connection = peer.connection
            if connection.closed:
                continue
            if connection.broken and peer.challenge is not None:
                self.refuse(peer, "ended without a proof")
            elif connection.broken:
                self._drop(peer)
            else:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
                if self._selector.get_key(connection.socket).events != wanted:
                    self._selector.modify(connection.socket, wanted, peer)

    def _drop(self, peer: Peer) -> None:
        if peer.connection.closed:
            return
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.connection.socket)
        peer.connection.close()
        if peer.role:
            self._receiver.disconnected(peer)
