"""Workers that call different operations of torch.distributed are told so; those that do the same are left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import peers
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as summed
import paceline
from paceline.comm.desync.board import SharedMemoryBoard, StoreBoard
from subjects import *

RANK = int(os.environ["RANK"])
given = CASES["mlp, momentum"]() | {"timeout_seconds": 30}
session = paceline.start(**given)
SIZE = session.workers

def patient():  # who has found a difference waits for all others, who may be late, before it names their calls
    for board in (SharedMemoryBoard, StoreBoard):
        def wait(own, number, seconds, barrier=board.barrier):
            barrier(own, number, 60.0)
        board.barrier = wait

def hurry(calls=1, group=dist.group.WORLD, ranks=range(SIZE)):
    # over the network some differences are found only when a worker gives up: soon after all have told this call
    name, numbers = "publish" if group is dist.group.WORLD else "publish_in_group", []
    publish, files = getattr(StoreBoard, name), [Path(__file__).with_name(f"told-{rank}") for rank in ranks]
    def noted(*record):
        publish(*record)
        numbers.append(record[1])
        if len(numbers) == calls:
            files[ranks.index(RANK)].touch()
            peers.until(lambda: all(file.exists() for file in files))
            session._context.world.timeout = 3.0
            for one in (dist.group.WORLD, group):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), one)
    setattr(StoreBoard, name, noted)

def go(during, steps=6):
    for batch in session.batches(steps=steps):
        if batch.step == 3:
            during()
        session.step(batch)
    tell(position=session.position, fingerprint=session.fingerprint())
"""


def failures(ended: list[Ended]) -> list[str]:
    """What the workers say that found the cause; the others lost one of them, or were ended by gloo."""
    said = []
    for one in ended:
        assert one.code in (3, 5, 124, -6), one
        found = re.findall(rf"^paceline: rank {one.rank}: (\w+): (.*)$", one.err, re.MULTILINE)
        if one.code == 3:
            assert [kind for kind, _ in found] == ["DisagreementError"], one
            said.append(found[0][1])
    assert said, ended
    return said


@dataclass(frozen=True)
class Differs:
    """A script of three workers that do different things, and what is said about it, with parts for their lines."""

    body: str
    words: str


DIFFERENT = {
    "types": Differs(
        "def metric():\n    dist.barrier()\n"
        "    dist.all_reduce(torch.ones(10)) if RANK != 1 else dist.all_reduce(torch.ones(10, dtype=torch.int32))\n",
        "since step 2: call 2 was all_reduce of float32 [10] on ranks 0, 2 (script.py:{dist.all_reduce}) but "
        "all_reduce of int32 [10] on rank 1 (script.py:{dist.all_reduce})",
    ),
    "shapes": Differs(
        "def metric():\n    if RANK == 0:\n        dist.all_reduce(torch.ones(10))\n"
        "    else:\n        summed(torch.ones(20))\n",
        "since step 2: call 1 was all_reduce of float32 [10] on rank 0 (script.py:{dist.all_reduce}) but all_reduce of "
        "float32 [20] on ranks 1, 2 (script.py:{summed})",
    ),
    "kinds of reduction": Differs(
        "def metric():\n    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if RANK == 2 else dist.ReduceOp.SUM)\n",
        "all_reduce of float32 [2] on ranks 0, 1 (script.py:{dist.all_reduce}) but all_reduce of float32 [2] (max) on "
        "rank 2",
    ),
    "roots": Differs(
        "def metric():\n    dist.broadcast(torch.ones(2), src=RANK)\n",
        "call 1 was broadcast of float32 [2] from rank 0 on rank 0 (script.py:{dist.broadcast}) but broadcast of "
        "float32 [2] from rank 1 on rank 1",
    ),
    "operations": Differs(
        "def metric():\n"
        "    dist.all_gather_object([None] * SIZE, 1) if RANK == 2 else dist.all_reduce(torch.ones(1))\n",
        "call 1 was all_reduce of float32 [1] on ranks 0, 1 (script.py:{dist.all_gather_object}) but "
        "all_gather_object on rank 2",
    ),
    "orders of types": Differs(
        "def metric():\n    pair = [torch.ones(4), torch.ones(4, dtype=torch.int32)]\n"
        "    for value in pair[:: -1 if RANK == 1 else 1]:\n        dist.all_reduce(value)\n",
        "call 1 was all_reduce of float32 [4] on ranks 0, 2 (script.py:{dist.all_reduce}) but all_reduce of int32 [4] "
        "on rank 1",
    ),
    "a call that only one makes": Differs(
        "def metric():\n    if RANK == 1:\n        dist.all_reduce(torch.ones(1))\n",
        "since step 2: call 1 was session.step on ranks 0, 2 (script.py:{session.step}) but all_reduce of float32 [1] "
        "on rank 1 (script.py:{dist.all_reduce})",
    ),
}
SWAPPED = Differs(
    "loss, hits = torch.ones(3), torch.zeros(3)\n"
    "def sums(value):\n    dist.all_reduce(value)\n"
    "def metric():\n"
    "    if RANK == 1:\n        names = [1, 0]\n    else:\n        names = [0, 1]\n"
    "    for name in names:\n        one() if name else two()\n"
    "def one():\n    sums(loss)\n"
    "def two():\n    sums(hits)\n",
    "The workers called all_reduce of float32 [3] in different orders since step 2, so that values are mixed up: call "
    "1 was the one at script.py:{dist.all_reduce}, called at script.py:{sums(hits)}",
)


def check(ended: list[Ended], differs: Differs) -> None:
    body = differs.body + "go(metric)"
    words = re.sub(r"{([^}]*)}", lambda found: str(_line(body, found[1])), differs.words)
    for said in failures(ended):
        assert words in said, said
    assert all("fingerprint" not in one.out for one in ended)


def _line(body: str, part: str) -> int:
    script = HEAD + body
    start = 0 if part == "session.step" else len(HEAD)
    return script[: script.index(part, start)].count("\n") + 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_on_one_machine(ranks: Run, tmp_path: Path, name: str) -> None:
    differs = DIFFERENT[name]
    check(ranks(HEAD + differs.body + "patient(); go(metric)", 3, tmp_path, deadline=60), differs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in DIFFERENT if name != "a call that only one makes"])
def test_different_calls_over_the_network(ranks: Run, tmp_path: Path, name: str) -> None:
    differs = DIFFERENT[name]
    end = "go(lambda: [hurry(), metric()])" if name == "roots" else "patient(); go(metric)"
    check(ranks(HEAD + differs.body + end, 3, tmp_path, deadline=60, one_machine=False), differs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_equal_calls_in_another_order(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    script = HEAD + SWAPPED.body + "patient(); go(metric)"
    check(ranks(script, 3, tmp_path, deadline=60, one_machine=one_machine), SWAPPED)


@pytest.mark.slow
def test_a_call_that_only_one_makes_over_the_network(ranks: Run, tmp_path: Path) -> None:
    differs = DIFFERENT["a call that only one makes"]
    script = HEAD + differs.body + "patient(); go(metric)"
    check(ranks(script, 3, tmp_path, deadline=60, one_machine=False), differs)


KNOWN = """
long, short = torch.ones(20), torch.ones(10)
for value in (long, short):
    dist.all_reduce(value)
def metric():
    dist.all_reduce(short if RANK == 0 else long)
go(metric)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_shapes_that_were_all_seen_before(ranks: Run, tmp_path: Path, workers: int) -> None:
    ended = ranks(HEAD + KNOWN, workers, tmp_path, deadline=60)
    for said in failures(ended):
        assert "all_reduce of float32 [10] on rank 0" in said
        assert "all_reduce of float32 [20] on rank" in said


EVALUATED = """
def metric(output, target):
    return (output.argmax(1) == target).double().mean()
def during():
    dist.all_reduce(torch.ones(10)) if RANK else dist.all_reduce(torch.ones(10, dtype=torch.int32))
    session.evaluate(classes(64), metric)
    tell(evaluated=True)
go(during)
"""


def test_before_an_evaluation(ranks: Run, tmp_path: Path) -> None:
    ended = ranks(HEAD + EVALUATED, 2, tmp_path, deadline=60, one_machine=False)
    for said in failures(ended):
        assert "since step 2: call 1 was all_reduce of int32 [10] on rank 0" in said
    assert all("evaluated" not in one.out for one in ended)


IN_A_GROUP = """
pair = dist.new_group([0, 2])
def metric():
    if RANK != 1:
        for count in (1, 2, 2 + RANK):
            dist.all_reduce(torch.ones(count), group=pair)
go(metric)
"""


@pytest.mark.slow
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_in_a_smaller_group(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    script = HEAD + IN_A_GROUP
    if not one_machine:
        script = script.replace("go(metric)", "go(lambda: [RANK == 1 or hurry(3, pair, [0, 2]), metric()])")
    ended = ranks(script, 3, tmp_path, deadline=60, one_machine=one_machine)
    said = [one for one in failures(ended) if "in the group of ranks 0, 2" in one]
    assert said
    for one in said:
        assert "call 3 was in the group of ranks 0, 2, all_reduce of float32 [2] on rank 0" in one
        assert "all_reduce of float32 [4] on rank 2" in one


LEGITIMATE = """
import torch.distributed.distributed_c10d as c10d
pair = dist.new_group([0, 1])
calls = []

def average(value):
    summed(value)
    return value / SIZE

def metric():
    value = torch.full((2,), float(RANK))
    if RANK == 0:
        dist.broadcast(value, src=0)
    else:
        dist.broadcast(value, src=0)
    assert value.tolist() == [0.0, 0.0]
    if RANK == 0:
        low = average(torch.ones(3))
        high = average(torch.ones(3))
    else:
        low, high = [average(torch.ones(3)) for _ in range(2)]
    assert low.tolist() == high.tolist() == [1.0] * 3
    if RANK != 2:
        dist.all_reduce(value, group=pair)
        dist.all_reduce(value[:1], group=pair)
    works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    sends = [[1, 2, 3], [0, 2, 2], [3, 2, 0]]
    gets = [sends[rank][RANK] for rank in range(SIZE)]
    dist.all_to_all_single(torch.empty(sum(gets)), torch.ones(sum(sends[RANK])), gets, sends[RANK])
    lengths = [None] * SIZE
    dist.all_gather_object(lengths, "x" * RANK)
    assert lengths == ["", "x", "xx"]
    gathered = [torch.empty(2) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(torch.ones(2), gathered, dst=0)
    if RANK == 0:
        dist.send(torch.ones(2), 1)
    elif RANK == 1:
        dist.recv(torch.ones(2), 0)
    c10d.barrier()
    dist.barrier()
    if RANK == 1:
        try:
            dist.all_reduce("no tensor")
        except (TypeError, ValueError) as error:
            calls.append(type(error).__name__)
    def aside():
        for place in range(3):
            dist.all_reduce(torch.ones(place + 1), group=aside_group)
    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    calls.append(dist.all_reduce.__name__)

aside_group = dist.new_group()
for batch in session.batches(steps=6):
    metric()
    session.step(batch)
session.evaluate(classes(64))
kept = [call.record()["call"] for call in session._context.world.recorder._kept]
tell(last=kept[-1], barriers=kept.count("barrier"), position=session.position)
dist.destroy_process_group()
tell(done=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_scripts_that_are_right(printed: Printed, tmp_path: Path, one_machine: bool) -> None:
    """Lines by rank, smaller groups, calls that do not wait, sizes by rank, other threads, a call that is refused."""
    for one in printed(HEAD + LEGITIMATE, 3, tmp_path, deadline=60, one_machine=one_machine):
        assert one["position"] == 6
        assert one["last"] == "session.evaluate"
        assert one["barriers"] >= 1
        assert one["done"]


PLAIN = """
from paceline.comm.desync import patch
if SIZE > 1:
    recorded = summed
    assert recorded is dist.all_reduce is not dist.distributed_c10d.all_reduce
    patch.stop()
assert summed is dist.all_reduce is dist.distributed_c10d.all_reduce
go(lambda: None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_functions_are_put_back(printed: Printed, tmp_path: Path, workers: int) -> None:
    """In one process they stay what they are."""
    for one in printed(HEAD + PLAIN, workers, tmp_path):
        assert one["position"] == 6


COMPILED = """
@torch.compile(backend="eager", fullgraph=True)
def mean(value):
    dist.all_reduce(value)
    return value * 2
got = mean(torch.ones(3))
tell(got=got.tolist())
go(lambda: None)
"""


@pytest.mark.slow
def test_compiled_calls(printed: Printed, tmp_path: Path) -> None:
    """torch's compiler still knows the functions."""
    for one in printed(HEAD + COMPILED, 2, tmp_path):
        assert one["got"] == [4.0] * 3


LOST = """
here = Path(__file__).with_name("here")
def metric():
    if RANK == 1:
        peers.until(here.exists)
        os._exit(7)
    here.touch()
    dist.all_reduce(torch.ones(3))
go(metric)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_a_worker_that_ends_while_others_call(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    ended = ranks(HEAD + LOST, 2, tmp_path, deadline=60, one_machine=one_machine)
    assert [one.code for one in ended] == [5, 7]
    assert f"lost rank 1 in all_reduce of float32 [3] (script.py:{_line(LOST, 'dist.all_reduce')})" in ended[0].err
