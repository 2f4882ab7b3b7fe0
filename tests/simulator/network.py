"""Network between simulated processes, with delays, lost connections and partitions. Connections preserve order."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.coordinator.types import Message
from paceline.coordinator.wire.connections import TICK_SECONDS, Peer, Receiver
from paceline.coordinator.wire.validation import BLOCK, check
from simulator.hub import Hub, Process

_HEARTBEAT_SECONDS = 1.0
COORDINATOR = -1  # number that stands for the coordinator in place of a worker


class Network:
    """Network that delays each message randomly, but preserves the order of messages on a connection.

    Args:
        random: random numbers for the delays.
        reach: called after a process has sent a message to the coordinator, as an additional fault point.
    """

    def __init__(self, hub: Hub, random: Random, reach: Callable[[str, int], None]) -> None:
        self._hub, self._random, self.reach = hub, random, reach
        self._arrivals: dict[tuple[int, int], float] = defaultdict(float)
        self._cut: dict[int, float] = {}

    def carry(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` after the delay of a message. ``COORDINATOR`` may stand for the sender or the receiver."""
        delay = self._random.uniform(0.0005, 0.03) if self._random.random() < 0.9 else self._random.uniform(0.03, 0.6)
        at = max(self._hub.now + delay, self._cut.get(sender, 0.0), self._cut.get(receiver, 0.0))
        at = max(at, self._arrivals[sender, receiver])
        self._arrivals[sender, receiver] = at
        self._hub.at_time(at, deliver)

    def cut(self, number: int, seconds: float) -> None:
        """Hold back all messages from or to a process for some seconds and deliver them afterwards, as TCP does."""
        self._cut[number] = self._hub.now + seconds


class Link:
    """Connection of a worker to the coordinator, an implementation of ``comm.rendezvous.coordinator_client.Link``.

    Args:
        server: coordinator's end of all connections.
    """

    address = "127.0.0.1"

    def __init__(self, hub: Hub, network: Network, number: int, process: Process, server: Server) -> None:
        self._hub, self._network, self._number, self._process, self._server = hub, network, number, process, server
        self._kept: deque[Message] = deque()
        self._sent: deque[str] = deque()  # messages that the coordinator has not received
        self._client: CoordinatorClient | None = None
        self.peer = Peer(self, self.address, hub.now, None, f"worker {number}")  # type: ignore[arg-type]

    def start(self, client: CoordinatorClient) -> None:
        self._client = client
        self._hub.at(_HEARTBEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        if not self._process.ended:
            assert self._client is not None
            if self._hub.now >= self._process.stopped:
                self._client.send_heartbeat()
            self._hub.at(_HEARTBEAT_SECONDS, self._beat)

    def send(self, message: Message) -> None:
        """See the ``Link`` protocol. The server validates the message, as in a real run."""
        if not self._process.ended:
            self._sent.append(json.dumps(message))
            self._network.carry(self._number, COORDINATOR, self._arrive)
            if self._hub.running is self._process:
                self._network.reach(f"having said {message['type']}", 0)

    def _arrive(self) -> None:
        if self._sent:
            self._server.receive(self.peer, json.loads(self._sent.popleft()))

    def drain(self) -> None:
        """Deliver the messages that have arrived: on the coordinator's machine all that were sent."""
        while self._sent and self._number < BLOCK:
            self._arrive()

    def put(self, message: Message) -> None:
        self._kept.append(message)
        self._process.wake()

    def get(self) -> Message:
        while not self._kept:
            self._hub.block()
        return self._kept.popleft()

    def deliver(self, message: Message) -> None:
        """Deliver a message of the coordinator to the worker, after the end of a stop if the worker is stopped."""
        text = json.dumps(message)

        def arrive() -> None:
            if self._process.ended or self._client is None:
                return
            if self._hub.now < self._process.stopped:
                self._hub.at(self._process.stopped - self._hub.now, arrive)
            else:
                self._client.receive(json.loads(text))

        self._network.carry(COORDINATOR, self._number, arrive)

    def close(self) -> None:
        """Notify the coordinator that the connection has ended, because the process has."""
        self._network.carry(self._number, COORDINATOR, lambda: self._server.disconnected(self.peer))


class Server:
    """Coordinator's end of its connections, in place of ``coordinator.wire.connections.Connections``."""

    def __init__(self, hub: Hub, receiver: Receiver) -> None:
        self._hub, self._receiver = hub, receiver
        self.refused: list[str] = []  # reasons for refused connections. Must stay empty.

    def start(self) -> None:
        """Call the coordinator's ``tick`` every ``TICK_SECONDS``."""

        def tick() -> None:
            self._receiver.tick(self._hub.now)
            self._hub.at(TICK_SECONDS, tick)

        tick()

    def receive(self, peer: Peer, message: Message) -> None:
        """Pass a message to the coordinator if it is valid, otherwise refuse it."""
        try:
            check(message, peer.role.partition(" ")[0])
        except ValueError as error:
            self.refuse(peer, str(error))
        else:
            self._receiver.handle(peer, message)

    def disconnected(self, peer: Peer) -> None:
        """Notify the coordinator that a connection has ended."""
        self._receiver.disconnected(peer)

    def drain(self, peer: Peer) -> None:
        """Handle all messages that have arrived from a worker."""
        peer.connection.drain()  # type: ignore[attr-defined]

    def send(self, peers: list[Peer], message: Message) -> None:
        for peer in peers:
            peer.connection.deliver(message)  # type: ignore[attr-defined]

    def refuse(self, peer: Peer, reason: str) -> None:
        self.refused.append(f"{peer.role}: {reason}")


@dataclass
class Box:
    """Messages that a worker has received from other workers."""

    # received messages, by generation, sender and tag
    messages: dict[tuple[int, int, Any], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    closed: set[tuple[int, int]] = field(default_factory=set)  # generations and senders whose connections have ended
