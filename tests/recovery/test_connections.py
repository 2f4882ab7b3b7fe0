"""Who may speak to the coordinator, and what it does with those who may not: one in this process, and its peers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.coordinator.server import Coordinator
from paceline.coordinator.types import Bounds, RunInfo
from paceline.coordinator.wire import connections, messages
from paceline.coordinator.wire.authentication import AGENT, Challenge, NotAuthenticated, Refused, authenticate, worker
from paceline.coordinator.wire.messages import LONGEST_MESSAGE, Connection, connect, decode, encode, listen
from paceline.diagnostics.doctor.start import differences
from paceline.system import secret as secrets

SECRET = secrets.make()
RUN = RunInfo("this run", SECRET, "train.py", "job", differences=partial(differences, {"torch": "2.13.0"}))
ABOUT = {"host": "a", "pid": 4242, "address": "127.0.0.1"}
HELLO: dict[str, Any] = {
    "type": "hello",
    "about": ABOUT,
    "facts": {"batch": 32},
    "hang_seconds": None,
    "timeout_seconds": 60.0,
    "fits": [],
    "session": 1,
}
STORE: dict[str, Any] = {
    "type": "store",
    "generation": 0,
    "call": 1,
    "do": "set",
    "keys": ["a"],
    "value": "AA==",
    "expected": "",
}
READY: dict[str, Any] = {
    "type": "ready",
    "progress": None,
    "arena": [7, "00ff"],
    "leaving": False,
    "planned": False,
    "ended": [],
}
STATUS: dict[str, Any] = {
    "step": 1,
    "doing": "loading",
    "waiting": False,
    "busy": False,
    "since": 0.1,
    "step_seconds": None,
    "line": "train.py:1",
}
JOIN: dict[str, Any] = {"type": "agent", "workers": 2, "host": "b", "script": "train.py", "name": None, "about": {}}
ENDING: dict[str, Any] = {"type": "ending"}
ENDED: dict[str, Any] = {"type": "ended", "worker": 1000, "code": 1, "out_of_memory": False, "report": {}}
REPORT = {"type": "ValueError", "message": "bad", "consequence": False, "time": 1.0}
FORGED = [
    HELLO,
    READY | {"leaving": True},
    ENDING,
    {"type": "unfit"},
    JOIN,
    ENDED | {"worker": 0, "report": REPORT},
    {"type": "change", "generation": 1, "urgent": True, "why": "", "lost": [0]},
    {"type": "end", "code": 0, "reason": "training is over", "save": False},
    {"type": "report", "worker": 0},
]


STREAMS = int(os.environ.get("STREAMS", "60"))


class Lab:
    """A coordinator, the events that it has recorded, and ways to reach it."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.opened = contextlib.ExitStack()
        self.listener = listener or listen(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        bounds = Bounds(least=2, most=4, wanted=2)
        self.coordinator = Coordinator(self.listener, bounds, self._record, RUN, 2)

    def _record(self, event: str, **fields: Any) -> None:
        json.dumps(fields)
        self.events.append({"event": event, **fields})

    def refusals(self) -> list[str]:
        return [one["reason"] for one in self.events if one["event"] == "refused"]

    def plain(self) -> socket.socket:
        stranger = self.opened.enter_context(socket.create_connection(self.address, timeout=10))
        challenge = stranger.recv(256)
        assert challenge.startswith(b"paceline 1 ") and len(challenge) == 76
        return stranger

    def worker(self, number: int) -> Connection:
        return self._connect(worker(number), SECRET.of_run(RUN.id).key(worker(number)))

    def agent(self) -> Connection:
        return self._connect(AGENT, SECRET.key(AGENT))

    def _connect(self, role: str, key: bytes) -> Connection:
        connection = connect(self.address, role, key, 10)
        self.opened.callback(connection.close)
        return connection

    def close(self) -> None:
        self.opened.close()
        self.coordinator.close()
        assert not self.coordinator._connections._thread.is_alive()

    def train(self) -> list[Connection]:
        """Two workers, which are members then."""
        members = [self.worker(0), self.worker(1)]
        for number, member in enumerate(members):
            self.coordinator.started(number, os.getpid())
            tell(member, HELLO, READY)
        assert [answer(member)["type"] for member in members] == ["membership"] * 2
        return members

    def still_works(self) -> None:
        """A worker of another machine gets in, and what it says is taken."""
        agent = self.agent()
        tell(agent, JOIN)
        first = answer(agent)["first"]
        tell(agent, {"type": "started", "worker": first})
        until(lambda: first in self.coordinator.membership.workers)
        agent.close()


def tell(connection: Connection, *messages: dict[str, Any]) -> None:
    for message in messages:
        connection.send(encode(message))


def answer(connection: Connection) -> dict[str, Any]:
    lines: list[bytes] = []
    while not lines:
        assert readable(connection.socket, 10), "no answer"
        lines = connection.receive()
        assert not connection.broken
    return decode(lines[0])


def readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def rest(stranger: socket.socket) -> bytes:
    """What comes until the other end hangs up."""
    stranger.settimeout(10)
    data = b""
    try:
        while more := stranger.recv(1 << 16):
            data += more
    except ConnectionResetError:  # it has not read all that was sent
        pass
    return data


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


@pytest.mark.parametrize("message", FORGED, ids=lambda message: message["type"])
def test_no_message_counts_without_a_proof(lab: Lab, message: dict[str, Any]) -> None:
    members = lab.train()
    with lab.plain() as stranger:
        stranger.sendall(encode(message))
        assert rest(stranger) in (b"refused\n", b"")
    until(lambda: len(lab.refusals()) == 1)
    assert lab.coordinator.members == [0, 1]
    assert lab.coordinator.over is None
    assert not lab.coordinator.membership.changing
    assert not any(readable(member.socket, 0) for member in members)  # nobody heard of it


def test_the_key_of_another_run_is_refused_once(lab: Lab) -> None:
    for other in (secrets.make().of_run(RUN.id), SECRET.of_run("another run"), SECRET):
        with pytest.raises(Refused):
            connect(lab.address, worker(0), other.key(worker(0)), 10)
    with pytest.raises(Refused):
        connect(lab.address, AGENT, secrets.make().key(AGENT), 10)
    until(lambda: len(lab.refusals()) == 4)
    assert lab.refusals()[-1] == "does not have the key of agent of this run"


def test_the_key_of_a_worker_is_good_for_nothing_else(lab: Lab) -> None:
    key = SECRET.of_run(RUN.id).key(worker(0))
    for role in (AGENT, worker(1), worker(1000)):
        with pytest.raises(Refused):
            connect(lab.address, role, key, 10)


def test_a_recorded_connection_is_worth_nothing(lab: Lab) -> None:
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(lab.address) as behind:
        genuine = socket.create_connection(listener.getsockname())
        front, _ = listener.accept()
        front.sendall(behind.recv(256))

        def forward() -> None:
            while data := front.recv(1 << 16):
                sent.append(data)
                behind.sendall(data)
                front.sendall(behind.recv(256))

        between = threading.Thread(target=forward)
        between.start()
        authenticate(genuine, worker(0), SECRET.of_run(RUN.id).key(worker(0)), 10)
        genuine.close()
        between.join()
        front.close()
    with lab.plain() as stranger:
        stranger.sendall(b"".join(sent) + encode(HELLO) + encode(READY))
        assert rest(stranger) in (b"refused\n", b"")
    assert 0 not in lab.coordinator.membership.workers


def test_a_proof_cannot_be_reflected() -> None:
    """Whoever listens there without the key, and sends back what it got, is not believed."""
    for reflected in (lambda proof: b"welcome " + proof, lambda proof: b"refused"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(Challenge().line)

            def reflect(theirs: socket.socket = theirs, reflected: Any = reflected) -> None:
                theirs.sendall(reflected(theirs.recv(256).split()[-1]) + b"\n")

            thread = threading.Thread(target=reflect)
            thread.start()
            with pytest.raises(NotAuthenticated):
                authenticate(ours, AGENT, SECRET.key(AGENT), 10)
            thread.join()


def test_an_agent_speaks_for_the_workers_that_it_started(lab: Lab) -> None:
    lab.train()
    wrong = [
        [ENDED | {"worker": 0}],
        [{"type": "started", "worker": 5}],
        [{"type": "started", "worker": 999_999}],
        [ENDED | {"worker": "own"}],  # not started
        [{"type": "started", "worker": "own"}, ENDED | {"worker": "own"}, ENDED | {"worker": "own"}],  # twice
        [JOIN],
    ]
    for forged in wrong:
        agent = lab.agent()
        tell(agent, JOIN)
        first = answer(agent)["first"]
        tell(agent, *(one | ({"worker": first} if one.get("worker") == "own" else {}) for one in forged))
        while not agent.broken:
            assert readable(agent.socket, 10)
            agent.receive()
        agent.close()
    assert len(lab.refusals()) == len(wrong)
    assert lab.coordinator.members == [0, 1]
    assert lab.coordinator.over is None
    assert all(lab.coordinator.membership.workers[number].state == "training" for number in (0, 1))


def test_an_exit_counts_after_what_the_worker_has_sent(lab: Lab) -> None:
    """Its launcher may see the end of a process before the coordinator's thread has read its last message."""
    members = lab.train()
    with lab.coordinator._lock:
        tell(members[1], {"type": "heartbeat", "status": STATUS}, ENDING)
        members[1].close()
        assert not lab.coordinator.ended(1, 3, {}, lab.coordinator.announce_start), "the script has ended by itself"
        assert lab.coordinator.over is not None and lab.coordinator.over["code"] == 3
    until(lambda: 1 not in lab.coordinator._workers)


@pytest.mark.parametrize(
    ("said", "drops", "code", "report", "ends_with"),
    [
        ([ENDING], True, -9, {}, 0),
        ([], True, -9, {}, 5),
        ([ENDING], False, -9, {}, 5),
        ([ENDING], True, 3, {}, 3),
        ([ENDING], True, -11, {}, 5),
        ([ENDING], True, -9, REPORT, 1),
    ],
)
def test_a_worker_is_killed_after_the_end_of_its_script(
    said: list[dict[str, Any]], drops: bool, code: int, report: dict[str, Any], ends_with: int, lab: Lab
) -> None:
    """Rank 0 may have had results to write, unless its script has ended."""
    membership = lab.coordinator.membership
    membership.bounds = replace(membership.bounds, drops=drops)
    members = lab.train()
    lab.coordinator.ended(1, 0, {}, lab.coordinator.announce_start)
    tell(members[0], *said)
    lab.coordinator.ended(0, code, report, lab.coordinator.announce_start)
    assert membership.over is not None and membership.over["code"] == ends_with


def test_a_machine_with_another_run_is_told_so(lab: Lab) -> None:
    for other in ({"script": "other.py"}, {"name": "other"}, {"script": "other\ud800\n" + 5000 * "x"}):
        agent = lab.agent()
        tell(agent, JOIN | other)
        said = answer(agent)
        assert said["type"] == "refused"
        assert "job" in said["reason"] and "other" in said["reason"]
        agent.close()
    until(lambda: len(lab.refusals()) == 3)
    assert all(reason.isprintable() and len(reason) <= 200 for reason in lab.refusals())


def test_a_machine_that_is_unlike_is_named(lab: Lab) -> None:
    agent = lab.agent()
    tell(agent, JOIN | {"about": {"torch": "2.6.0", "time": 0.0}})
    assert answer(agent)["type"] == "run"
    until(lambda: len(lab.coordinator.monitor.alerts) >= 2)
    texts = [alert.text for alert in lab.coordinator.monitor.alerts if alert.kind == "unlike"]
    assert "the version of torch differs: 2.13.0 on " in texts[0] and ", 2.6.0 on b" in texts[0]
    assert "the clock of b is" in texts[1]
    agent.close()


def deep(count: int) -> bytes:
    return b'{"type": "hello", "facts": ' + count * b"["


HOSTILE = [
    HELLO | {"facts": "text"},
    *(HELLO | {"hang_seconds": value} for value in (0.001, -1, 0, True, "3", [], 10**400, 1e300)),
    *(HELLO | {"timeout_seconds": value} for value in (None, float("nan"), float("inf"), -5.0, {})),
    *(HELLO | {"fits": value} for value in (None, [0], ["2"], [True], {"2": 2})),
    HELLO | {"session": -1},
    HELLO | {"worker": 1},
    *(HELLO | {"about": ABOUT | change} for change in ({"pid": -1}, {"port": 7}, {"address": "../x"}, {"host": 7})),
    HELLO | {"about": ABOUT | {"arena": None}},
    {key: value for key, value in HELLO.items() if key != "fits"},
    *(READY | {"progress": value} for value in ("12", [1.5], [None], {"0": 1}, [10**30])),
    *(READY | {"arena": value} for value in ([1], [1, "../../etc"], [-1, "00"], "x", [1, "00", 2])),
    *(READY | {"ended": value} for value in (None, [-1], ["0"], [10**12], 3)),
    READY | {"leaving": 1},
    {"type": "heartbeat", "status": {}},
    *({"type": "heartbeat", "status": STATUS | {"since": value}} for value in (float("nan"), -1.0, "1", None)),
    {"type": "heartbeat", "status": STATUS | {"rank": 3}},
    *({"type": kind} for kind in ("", "end", "change", "membership", "agent", "started", "ended", "__class__")),
    {"type": "started", "worker": 1},
    ENDED,
    {},
    {"type": ["hello"]},
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: json.dumps(message)[:60])
def test_a_worker_that_sends_hostile_values_is_refused(message: dict[str, Any], lab: Lab) -> None:
    genuine = lab.worker(1)
    tell(genuine, HELLO)
    hostile = lab.worker(0)
    tell(hostile, message)
    assert rest(hostile.socket) == b""
    hostile.close()
    until(lambda: len(lab.refusals()) == 1)
    tell(genuine, READY)
    until(lambda: lab.coordinator.membership.workers[1].state == "ready")
    assert 0 not in lab.coordinator.membership.workers
    genuine.close()


@pytest.mark.parametrize(
    "data",
    [b"\n", b"[]\n", b"null\n", b"\xff\xfe\n", b"9" * 5000 + b"\n", deep(200_000) + b"\n", b'{"a":' * 200_000 + b"\n"],
    ids=["empty", "list", "null", "no text", "digits", "brackets", "braces"],
)
def test_lines_that_are_no_message(lab: Lab, data: bytes) -> None:
    hostile = lab.worker(0)
    hostile.send(data)
    while hostile.unsent:
        hostile.flush()
    assert rest(hostile.socket) == b""
    until(lambda: len(lab.refusals()) == 1)
    lab.still_works()


def test_a_line_has_an_end(lab: Lab) -> None:
    """A gigabyte is not read: before the proof not even a kilobyte, after it 16 MB."""
    with lab.plain() as stranger, pytest.raises(OSError):
        for _ in range(1000):
            stranger.sendall(bytes(1 << 20).replace(b"\0", b"x"))
    hostile = lab.worker(0)
    hostile.socket.setblocking(True)
    sent = 0
    with pytest.raises(OSError):
        while sent < 1 << 30:
            sent += hostile.socket.send(b"x" * (1 << 16))
    assert sent < 2 * LONGEST_MESSAGE
    assert len(lab.refusals()) == 2
    lab.still_works()


def test_a_thousand_idle_connections(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GREET_SECONDS", 1000.0)
    for _ in range(1000):
        lab.opened.enter_context(socket.create_connection(lab.address))
    lab.train()
    until(lambda: len(lab.coordinator._connections._strangers) <= 128)
    lab.still_works()
    lab.opened.close()
    until(lambda: not lab.coordinator._connections._strangers)
    lab.close()
    refused = [one for one in lab.events if one["event"] == "refused"]
    assert sum(one["count"] for one in refused if "without a proof" in one["reason"]) == 1000
    assert len(refused) < 40


def test_bytes_one_at_a_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GREET_SECONDS", 0.5)
    with lab.plain() as stranger, pytest.raises(OSError):
        while True:
            stranger.sendall(b"w")
            time.sleep(0.01)
    assert lab.refusals()[0].startswith("no proof within")
    lab.still_works()


def test_who_does_not_read_holds_nobody_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MOST_UNSENT", 1 << 20)
    reading, silent = lab.train()
    text = "x" * (1 << 18)
    for number in range(60):
        with lab.coordinator._lock:
            lab.coordinator._send([0], {"type": "change", "why": text, "number": number})
            lab.coordinator._send([1], {"type": "change", "why": text, "number": number})
        assert answer(reading)["number"] == number
    until(lambda: 1 not in lab.coordinator._workers)
    silent.socket.setblocking(True)
    whole, _, cut = rest(silent.socket).rpartition(b"\n")
    assert [json.loads(line)["number"] for line in whole.splitlines()] == list(range(whole.count(b"\n") + 1))
    assert len(cut) < len(text) + 100  # the last one was cut off, and nothing was put after it


def test_too_many_open_files_do_not_keep_a_core_busy() -> None:
    class Exhausted(socket.socket):
        tries = 0

        def accept(self) -> Any:
            Exhausted.tries += 1
            if Exhausted.tries < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    lab = Lab(listener)
    connection = lab.worker(0)  # in the end it comes in
    assert Exhausted.tries < 6
    connection.close()
    lab.close()


def mutated(source: random.Random) -> bytes:
    """A line like those of workers and agents, more or less."""
    message = dict(source.choice([HELLO, READY, STORE, {"type": "heartbeat", "status": STATUS}, JOIN, ENDED, *FORGED]))
    odd = [None, -1, 2**70, 1e308, "", "x" * 3000, [], {}, [[[]]], True, "../../x", "\ud800", float("nan")]
    for _ in range(source.randrange(4)):
        message[source.choice([*message, "more"])] = source.choice(odd)
    line = bytearray(encode(message))
    for _ in range(source.randrange(3)):
        line[source.randrange(len(line))] = source.randrange(256)
    return bytes(line)


@pytest.mark.parametrize("proven", ["nobody", "a worker", "an agent"])
def test_fuzzed_streams(lab: Lab, proven: str) -> None:
    source = random.Random(proven)
    for _ in range(STREAMS):
        if proven == "nobody":
            peer = Connection(lab.plain())
            peer.send(mutated(source)[source.randrange(2) :] + source.randbytes(source.randrange(400)))
        else:
            peer = lab.agent() if proven == "an agent" else lab.worker(source.randrange(4))
            for _ in range(source.randrange(1, 6)):
                peer.send(mutated(source))
        peer.close()
    lab.still_works()


def test_fuzzed_streams_of_members() -> None:
    source = random.Random(0)
    for _ in range(STREAMS // 3):
        lab = Lab()
        for member in lab.train():
            for _ in range(source.randrange(1, 6)):
                member.send(mutated(source))
        lab.still_works()
        lab.close()
