"""What the coordinator's messages make of a worker, and what the coordinator makes of a lost connection."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.coordinator.member_list import written
from paceline.coordinator.server import Coordinator, System
from paceline.coordinator.types import Bounds, Departure, Member, RunInfo
from paceline.errors import PREEMPTED, StartError, WorkerLost

MEMBERS = (Member(4, "a", 40, "10.0.0.1"), Member(7, "b", 70, "10.0.0.2"))


def client_of(*messages: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Worker 4 in generation 1, to which the coordinator says this."""
    sent: list[dict[str, Any]] = []
    kept = queue.Queue[Any]()
    link: Any = SimpleNamespace(address="", send=sent.append, start=lambda _: None, put=kept.put, get=kept.get_nowait)
    client: Any = CoordinatorClient(link, 4, 10.0)
    client.generation, client._members = 1, MEMBERS[:1]
    for message in messages:
        client.receive(message)
    return client, sent


def membership(generation: int) -> dict[str, Any]:
    about = {"joined": [7], "lost": [5], "fenced": True, "fresh": False}
    return {"type": "membership", "generation": generation, "members": written(MEMBERS[:1], MEMBERS), **about}


def test_a_worker_waits_for_a_later_generation() -> None:
    change = {"type": "change", "generation": 3, "urgent": True, "lost": [5]}
    client, sent = client_of(change, membership(1), membership(3))
    assert client.alarm > client.generation and client.missing == {5}
    found = client.await_membership((5, 1, 0), (3, "00"), True, False, [9])
    assert (found.number, found.members, found.joined, found.lost) == (3, MEMBERS, (7,), (5,))
    assert (found.fenced, found.fresh, client.generation) == (True, False, 3)
    ready = {"progress": (5, 1, 0), "arena": (3, "00"), "leaving": True, "planned": False, "ended": [9]}
    assert sent == [{"type": "ready", **ready}]
    client.end_script()
    assert sent[1:] == [{"type": "ending"}]


@pytest.mark.parametrize(
    ("save", "saver", "saves"), [(True, 4, True), (True, 7, False), (True, None, False), (False, 4, False)]
)
def test_a_worker_departs(save: bool, saver: int | None, saves: bool) -> None:
    end = {"type": "end", "code": 5, "reason": "rank 1 was killed", "save": save, "saver": saver}
    assert client_of(end)[0].await_membership(None, None) == Departure(5, "rank 1 was killed", saves)
    departure = client_of({"type": "dismissed"})[0].await_membership(None, None)
    assert (departure.code, departure.save) == (PREEMPTED, False)


def test_a_worker_that_does_not_match_or_is_cut_off_ends() -> None:
    refused = {"type": "refused", "key": "batch", "here": "8", "there": "16"}
    with pytest.raises(StartError, match="batch is 8 here and 16 there"):
        client_of(refused)[0].await_membership(None, None)
    with pytest.raises(WorkerLost, match="Worker 4 lost its connection"):
        client = client_of()[0]
        client.lose()
        client.await_membership(None, None)
    assert client.broken and client.alarm > client.generation


class Cut:
    """A coordinator of workers 3 (here) and 1001 and 1002 (of agent 1), of which 1002 has its own connection."""

    def __init__(self, ending: bool = False) -> None:
        self.lost: list[Any] = []
        self.agent = SimpleNamespace(worker=None, number=1, exits={})
        self.peers = {number: SimpleNamespace(worker=number) for number in (3, 1001, 1002)}
        workers = {number: SimpleNamespace(ending=ending) for number in (3, 1001, 1002)}
        self.of: Any = object.__new__(Coordinator)
        self.of._workers, self.of._agents = dict(self.peers), {1: self.agent}
        self.of._clock = lambda: 0.0
        self.of._agent = lambda peer: peer if peer is self.agent else None
        self.of._record = lambda *_, **__: None
        self.of._count_machines = lambda: None
        self.of.membership = SimpleNamespace(
            workers=workers, fenced=False, name="worker {}".format, lose=lambda *given: self.lost.append(given[:2])
        )


def test_workers_of_other_machines_are_lost_with_their_connection() -> None:
    cut = Cut()
    cut.of.disconnected(cut.peers[3])
    assert cut.lost == [] and not cut.of.membership.fenced, "its launcher sees how it ends"
    cut.of.disconnected(cut.peers[1001])
    assert cut.lost == [(1001, "worker 1001 cannot be reached")] and cut.of.membership.fenced
    assert set(cut.of._workers) == {1002}
    cut.of.disconnected(cut.peers[1001])
    assert len(cut.lost) == 1, "the connection of another one in its place"
    ended = Cut(ending=True)
    ended.of.disconnected(ended.peers[1001])
    assert ended.lost == [], "its agent will tell how it ended"
    ended.of.disconnected(ended.agent)
    ended.of.disconnected(ended.peers[1002])
    assert [number for number, _ in ended.lost] == [1001, 1002], "nobody will"


def test_workers_without_a_connection_are_lost_with_their_agent() -> None:
    cut = Cut()
    del cut.of._workers[1001]
    cut.of.disconnected(cut.agent)
    assert cut.lost == [(1001, "worker 1001 cannot be reached")] and cut.of._agents == {}


def coordinator_of(most: int) -> Coordinator:
    """A coordinator without connections."""
    nothing = {name: lambda *_: None for name in ("start", "send", "drain")}
    connections = SimpleNamespace(**nothing)
    run: Any = RunInfo("id", None, "train.py", "run")  # type: ignore[arg-type]
    system = System(connect=lambda *_: connections)  # type: ignore[arg-type,return-value]
    bounds = Bounds(1, most, most, drops=True)
    return Coordinator(None, bounds, lambda *_, **__: None, run, most, system=system)  # type: ignore[arg-type]


ABOUT = {"host": "a", "pid": 1, "address": "10.0.0.1"}
ABOUT_RUN = {"facts": {}, "hang_seconds": None, "timeout_seconds": 30.0, "fits": [], "session": 1}
HELLO = {"type": "hello", "about": ABOUT, **ABOUT_RUN}
READY = {"type": "ready", "progress": None, "arena": None, "leaving": False, "planned": False, "ended": []}


@pytest.mark.parametrize(("code", "report"), [(0, {}), (2, {}), (-9, {}), (2, {"consequence": True}), (PREEMPTED, {})])
def test_the_end_of_an_unfit_worker_ends_nothing_and_is_not_made_good(code: int, report: dict[str, Any]) -> None:
    coordinator, replaced = coordinator_of(3), list[int]()
    peers: list[Any] = [SimpleNamespace(worker=number) for number in range(3)]
    for peer in peers:
        coordinator.started(peer.worker, 1)
    for message in (HELLO, READY):
        for peer in peers:
            coordinator.handle(peer, {**message, "about": dict(ABOUT)})
    assert coordinator.members == [0, 1, 2]
    coordinator.handle(peers[2], {"type": "unfit"})
    coordinator.handle(peers[0], READY)
    assert coordinator.ended(2, code, report, lambda: replaced.append(2)) and not replaced
    coordinator.handle(peers[1], READY)
    assert coordinator.members == [0, 1] and coordinator.over is None


def test_what_arrives_after_the_end_of_a_worker_is_ignored() -> None:
    coordinator = coordinator_of(1)
    peer: Any = SimpleNamespace(worker=0)
    coordinator.started(0, 1)
    coordinator.handle(peer, HELLO)
    coordinator.ended(0, -9, {}, coordinator.announce_start)
    coordinator.handle(peer, READY)
    assert coordinator.members == [] and coordinator.membership.workers[0].state == "gone"
