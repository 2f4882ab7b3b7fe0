"""What does not fit together is an error on all ranks that names rank, tensor and cause; nothing blocks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.horovod.engine import engine, handle, waits
from paceline.horovod.engine.handle import Handle
from paceline.horovod.engine.negotiation import REMOVE_SET, Item, Negotiation, Response
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, Request
from paceline.horovod.engine.waits import Waits
from paceline.horovod.settings import read_settings
from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

HEAD = """
import sys, time
import torch
from torch import nn
import paceline.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
"""

CALLS = """
def refused(call, *texts, kind=hvd.HorovodInternalError):
    try:
        call()
    except kind as error:
        assert all(text.lower() in str(error).lower() for text in texts), (rank, texts, str(error))
    else:
        raise SystemExit(f"no error: {texts}")

ones, odd = torch.ones, rank == 1
refused(lambda: hvd.allreduce(ones(17 + rank), name="x"), "'x'", "shape", "[17] on rank 0", "[18] on rank 1")
refused(lambda: hvd.allreduce(ones(6).view([6] if odd else [2, 3])), "[2, 3] on", "[6] on rank 1")
refused(lambda: hvd.allreduce(ones(2, dtype=torch.int32 if odd else torch.float32)), "type", "int32 on rank 1")
refused(lambda: hvd.allreduce(ones(2), op=hvd.Sum if odd else hvd.Max, name="y"), "reduction", "Sum on rank 1")
refused(lambda: hvd.allreduce(ones(2), prescale_factor=1.0 + rank), "prescale")
refused(lambda: hvd.broadcast(ones(2), root_rank=rank), "root rank", "1 on rank 1")
refused(lambda: hvd.allgather(ones(2, 3 + rank)), "but for its first dimension", "[2, 4] on rank 1")
refused(lambda: hvd.allgather(ones(2)) if odd else hvd.allreduce(ones(2)), "kind", "allgather on rank 1")
refused(lambda: hvd.grouped_allreduce([ones(2)] * (1 + odd)), "on rank 1")
refused(lambda: hvd.allreduce(ones(2, dtype=torch.complex64) if odd else ones(2), name="z"), "rank 1", "complex64", "z")
refused(lambda: hvd.allreduce(ones(2, 3).t() if odd else ones(3, 2)), "rank 1", "contiguous")
refused(lambda: hvd.alltoall(ones(size + 1) if odd else ones(size)), "rank 1", "give splits")
refused(lambda: hvd.alltoall(ones(size), splits=[2] * size), f"splits {[2] * size}", kind=ValueError)
refused(lambda: hvd.alltoall(ones(size), splits=torch.ones(size)), "whole numbers", kind=ValueError)
refused(lambda: hvd.broadcast(ones(2), root_rank=size), "root rank", kind=ValueError)
refused(lambda: hvd.allreduce(ones(2), process_set=hvd.ProcessSet([0])), "not added", kind=ValueError)
refused(lambda: hvd.allreduce(ones(2), process_set=[0], name="w"), f"Rank {rank}", "'w'", "ProcessSet", kind=ValueError)
refused(lambda: hvd.reducescatter(torch.tensor(1.0)), "no dimension", kind=ValueError)
refused(lambda: hvd.allreduce(torch.tensor([True])), "truth values", "hvd.Max", kind=ValueError)
refused(lambda: hvd.allreduce(ones(2, device="meta") if odd else ones(2), name="z"), "rank 1", "z", "meta device")
refused(lambda: hvd.synchronize(hvd.sparse_allreduce_async(ones(2 + rank).to_sparse(), "s", hvd.Sum)),
        "'s.values' differs in its arguments", "shape [2] on rank 0", "shape [3] on rank 1")
refused(lambda: hvd.sparse_allreduce_async(ones(2).to_sparse(), "s", hvd.Max), "'s'", "not for Max", kind=ValueError)
refused(lambda: hvd.synchronize(3), "synchronize(3)", "handle", kind=TypeError)
refused(lambda: hvd.poll(None), "poll(None)", "handle", kind=TypeError)
for _ in range(3):  # the same name again, at once
    refused(lambda: hvd.allgather("text" if odd else ones(2), name="z"), "rank 1", "'z'" if odd else "z", "a str")
    refused(lambda: hvd.broadcast_(ones(2).to_sparse() if odd else ones(2), 0, name="z"), "rank 1", "z", "sparse_coo")
refused(lambda: hvd.add_process_set([rank]), "add_process_set", "[0] on rank 0", "[1] on rank 1")
if rank == 0:
    first, other = hvd.allreduce_async(ones(2), name="twice"), hvd.allgather_async(ones(2), name="twice")
    refused(lambda: hvd.allreduce_async(ones(2), name="twice"), "'twice'", "under way", kind=ValueError)
hvd.barrier()  # until then the others do not call it, and it stays under way
if rank != 0:
    first, other = hvd.allreduce_async(ones(2), name="twice"), hvd.allgather_async(ones(2), name="twice")
assert torch.equal(hvd.synchronize(other), ones(2 * size))
assert torch.equal(hvd.synchronize(first), ones(2))
assert hvd.allreduce(ones(2), op=hvd.Sum).tolist() == [size, size]  # and all goes on

# a plan that differs: hidden sizes
model = nn.Linear(2 + rank, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(ones(1, 2 + rank)).sum().backward()
refused(optimizer.step, "'weight'", "[1, 2] on rank 0", "[1, 3] on rank 1")
"""

# Nobody ends before both have their errors: who is late finds the other one there.
STALL = """
import peers
from pathlib import Path

try:
    if rank == 0:
        hvd.allreduce(torch.ones(2), name="only here")
    else:
        handle = hvd.allreduce_async(torch.ones(2), name="another")
        while not hvd.poll(handle):
            time.sleep(0.01)
        hvd.synchronize(handle)
except hvd.HorovodInternalError as error:
    print("error:", error)
peers.note(Path(__file__).parent, rank)
peers.await_all(Path(__file__).parent, size)
"""

TANGLE = """
for name in "abc" if rank == 0 else "ac":
    try:
        hvd.allreduce(torch.ones(2), name=name)
    except hvd.HorovodInternalError as error:
        print("error:", error)
hvd.barrier()
try:
    hvd.broadcast(torch.ones(2), 0) if rank == 0 else hvd.barrier()
except hvd.HorovodInternalError as error:
    print("error:", error)
if rank == 0:
    hvd.barrier()
else:
    hvd.allgather(torch.ones(2))
"""

LEAVES = """
model = nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(100):
    if rank == 1 and step == LAST:
        WAY
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.promise(
    "docs/horovod.md",
    "**What differs is an error on all ranks**, and says how: `allreduce 'x' differs in its shape: [17] on rank "
    "0, [18] on rank 1`.",
)
def test_calls_that_differ_are_named_on_all_ranks(ranks: Run, tmp_path: Path) -> None:
    for one in ranks(HEAD + CALLS, 3, tmp_path, deadline=120):
        assert one.code == 0, one.err


def test_calls_before_init_name_rank_and_tensor() -> None:
    for call in (
        lambda: hvd.allreduce(torch.ones(1), name="x"),
        lambda: hvd.broadcast(torch.ones(1), 0, name="x"),
        lambda: hvd.alltoall(torch.ones(1), name="x"),
    ):
        with pytest.raises(
            hvd.HorovodInternalError, match=r"Rank 0: \w+ 'x': Horovod is not initialized: call hvd.init"
        ):
            call()


def test_a_missing_tensor_is_named_and_ends_the_wait(ranks: Run, tmp_path: Path) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    first, second = ranks(HEAD + STALL, 2, tmp_path, environment=limits, deadline=120)
    for here in (r"'only here': rank 0 waited \d+ s for rank 1", r"'another': rank 1 waited \d+ s for rank 0"):
        assert re.search(f"allreduce {here}, which did not call it.\n", first.err), first.err  # before the deadline
    assert "error: allreduce 'only here': rank 0 waited" in first.out
    assert "error: allreduce 'another': rank 1 waited" in second.out


def test_ranks_that_wait_for_each_other_end_with_an_error_and_meet_in_a_barrier(ranks: Run, tmp_path: Path) -> None:
    everyone = ranks(HEAD + TANGLE, 3, tmp_path, deadline=120)
    b = "allreduce 'b': rank 0 waited for ranks 1, 2 in allreduce 'c', which waited in turn"
    assert f"error: {b}" in everyone[0].out and f"paceline.horovod: {b}" in everyone[0].err
    for one in everyone[1:]:
        assert "error: allreduce 'c': ranks 1, 2 waited for rank 0 in allreduce 'b', which waited in turn" in one.out
    assert "error: broadcast 'noname.0': rank 0 waited for ranks 1, 2 in barrier 'noname.1'" in everyone[0].out
    assert all("rank 0 has called shutdown" in one.err for one in everyone[1:]), everyone[1].err


def test_who_can_go_on_is_not_failed() -> None:
    def asked(rank: int, name: str, set_: int = GLOBAL) -> None:
        table.submit(rank, Request(set_, name, "allreduce", op="Sum", dtypes=("float32",), shapes=((2,),)), 0.0)
        table.block(rank, (set_, name))

    def errors() -> list[str]:
        return [one.error for one in (*table.take_ready(), *table.untangle())]

    table = Negotiation(3, threshold=16, capacity=8)
    table.sets[1] = (0, 1)
    asked(0, "x", 1), asked(1, "y")
    assert not errors()  # rank 2 may come to y, then rank 1 to x
    asked(2, "z")
    assert len(errors()) == 3
    asked(0, "x"), asked(1, "x"), asked(2, "x")
    assert errors() == [""]
    asked(0, "x", 1), asked(1, "y"), table.submit(2, Request(GLOBAL, "join", "join"), 0.0)
    (error, other) = errors()
    assert error == (
        "allreduce 'x': rank 0 waited for rank 1 in allreduce 'y', which waited in turn: all must call the same "
        "operations."
    )
    assert "rank 1 waited for rank 0 in allreduce 'x', rank 2 in join, which" in other
    asked(0, "x"), table.block(1, (GLOBAL, "x"))
    assert not errors()  # what rank 1 has waited for was another x


def test_who_waits_in_a_process_set_that_is_removed_is_told() -> None:
    table = Negotiation(3, threshold=16, capacity=8)
    table.sets[1] = (0, 1)
    table.submit(0, Request(1, "x", "allreduce"), 0.0)
    for rank in range(3):
        table.submit(rank, Request(GLOBAL, REMOVE_SET, REMOVE_SET, root=1, detail="1"), 0.0)
    failed, removed = table.take_ready()
    assert not removed.error and "'x': there is no process set 1; it was removed" in failed.error


def test_a_process_set_is_removed_after_what_it_has_still_to_do() -> None:
    table = Negotiation(2, threshold=16, capacity=8)
    table.sets[1] = (0, 1)
    for rank in range(2):
        table.submit(rank, Request(1, "x", "allreduce", ("float32",), ((2,),), op="Sum"), 0.0)
        table.submit(rank, Request(GLOBAL, REMOVE_SET, REMOVE_SET, root=1, detail="1"), 0.0)
    assert [one.items[0].request.kind for one in table.take_ready()] == ["allreduce", REMOVE_SET]


# From the stop on the deadline is short: a rank that is late before is waited for.
STOPS = """
import peers
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path

def hurry():
    for group in dist.distributed_c10d._world.pg_map:
        ends = group._get_backend(torch.device("cpu")).options._timeout
        assert ends == timedelta(seconds=100) or group is dist.group.WORLD, ends
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), group)

stopped = Path(__file__).with_name("stopped")
model = nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(20):
    if rank == 1 and step == 10:
        stopped.touch()
        time.sleep(1000)
    if step == 10:
        peers.until(stopped.exists)
        hurry()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_rank_that_stops_in_fixed_buckets_is_named(ranks: Run, tmp_path: Path) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "100"}
    first, second = ranks(HEAD + STOPS, 2, tmp_path, environment=limits, deadline=120, after_failure=0)
    assert re.search(r"paceline.horovod: allreduce 'bias and 1 more': rank 0 waited \d+ s for rank 1", first.err)
    assert "HorovodInternalError: Rank 0: allreduce of the gradients 'bias and 1 more' failed" in first.err
    assert "for rank 1, which did not call it" in first.err.splitlines()[-1]
    assert second.late


def test_a_stopped_rank_0_does_not_hold_the_others() -> None:
    """Waits in a join, for which there is no deadline, stay."""
    waits = Waits(1, replace(read_settings(), deadline_seconds=0.0), lambda: None)
    call, join = (Handle(Request(GLOBAL, "x", kind), Task([], []), waits.block) for kind in ("allreduce", "join"))
    now = time.monotonic()
    before = now - 20.0
    waits.give_up([call, join], before, now)
    call.since = join.since = before
    waits.give_up([join], before, now)
    waits.give_up([call, join], now, now)  # it may have much to do
    with pytest.raises(hvd.HorovodInternalError, match=r"Rank 1: rank 0, .* has not answered for 20 s: it is stopped"):
        waits.give_up([join, call], before, now)


class Stopping:
    """Links of a process that is stopped for a while after it has looked; the answer has come by then."""

    def __init__(self) -> None:
        self.looked = self.now = 0.0
        self._awake = threading.Event()
        self._asked: list[Request] = []

    def monotonic(self) -> float:
        return self.now

    def wake(self) -> None:
        self._awake.set()

    def receive(self, seconds: float) -> tuple[list[Any], list[int]]:
        self.looked = self.now
        if not self._asked:
            self._awake.wait()
            return [], []
        if self.now == 0.0:
            self.now = 1000.0
            return [], []
        (request,), self._asked = self._asked, []
        self._awake.clear()
        answer = Response((Item(request),), "all have called something else")
        return [(0, {"type": "run", "responses": [[answer.written, answer.error, answer.joined]]})], []

    def send(self, rank: int, message: dict[str, Any], seconds: float) -> None:
        self._asked += message.get("new", [])

    def send_all(self, message: dict[str, Any], seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_process_that_was_stopped_itself_does_not_blame_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    links: Any = Stopping()
    for module in (engine, handle, waits):
        monkeypatch.setattr(module, "time", links)
    one = engine.Engine(1, 2, links, None, replace(read_settings(), cycle_seconds=0.0, deadline_seconds=60.0))
    try:
        call = one.submit(Request(GLOBAL, "x", "allreduce"), Task([], []))
        with pytest.raises(hvd.HorovodInternalError, match=r"^all have called something else$"):
            call.wait()
    finally:
        one.close("ends")


def test_a_rank_0_that_answers_nothing_is_named_where_a_wait_fails() -> None:
    waits = Waits(1, replace(read_settings(), stall_seconds=1e-9), lambda: None)
    timed_out = RuntimeError("Timed out waiting 4000ms for recv operation to complete")
    waits.waiting("weight", GLOBAL)
    assert waits.news()
    assert "failed: rank 0 has not answered for " in str(waits.explain("allreduce", "weight", timed_out))
    waits.learn({"gone": [], "stalled": {}})
    assert "rank 0" not in str(waits.explain("allreduce", "weight", timed_out))


class Clock:
    """That of a process which is stopped for longer than it waits for a cause; the cause has come by then."""

    def __init__(self, come: Callable[[], object]) -> None:
        self._come, self._now, self._waits = come, 0.0, 0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now, self._waits = self._now + 1000.0, self._waits + 1
        if self._waits == 2:
            self._come()


def test_a_process_that_was_stopped_while_it_looked_for_a_cause_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, left = RuntimeError("Connection closed by peer"), Waits(0, read_settings(), lambda: None)
    monkeypatch.setattr(waits, "time", Clock(lambda: left.gone.update({1: "has left"})))
    assert "rank 1 has left" in str(left.await_cause("weight", failed))

    ended: list[int] = []
    clock = Clock(lambda: ended.append(1))
    monkeypatch.setattr(engine, "time", clock)

    def receive(seconds: float) -> tuple[list[Any], list[int]]:
        clock.sleep(seconds)
        return [], ended

    one: Any = SimpleNamespace(waits=Waits(0, read_settings(), lambda: None), _links=SimpleNamespace(receive=receive))
    assert "rank 1 has left" in str(engine.Engine._explained(one, "allreduce of 'x'", failed))


@pytest.mark.slow
def test_a_rank_that_leaves_is_named(ranks: Run, tmp_path: Path) -> None:
    for last in (1, 10):  # before there is a plan, and with one
        for way, code, why in (
            ("sys.exit(0)", 0, "has called shutdown"),
            ("import os; os._exit(7)", 7, "has left"),
            ("raise ValueError('no such thing.')", 1, "has ended by ValueError: no such thing"),
            ("exec('1 +')", 1, "has ended by SyntaxError: invalid syntax"),
        ):
            script = HEAD + LEAVES.replace("LAST", str(last)).replace("WAY", way)
            first, second = ranks(script, 2, tmp_path / f"{last}{way[:4]}", deadline=120)
            assert second.code == code, second
            assert first.code == 1 and f"rank 1 {why}" in first.err and f"{why}.." not in first.err, first
            assert ("HorovodInternalError" in first.err and "weight" in first.err) or "bias" in first.err, first
