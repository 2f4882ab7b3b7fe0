"""An elastic script of Horovod, unmodified: a worker is killed, the others go on, and a replacement joins."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import paceline.horovod.torch as hvd
from paceline.cli.foreign.horovodrun import translate
from paceline.coordinator.agent import CoordinatorAgent
from paceline.errors import ConfigError
from paceline.horovod.common.elastic import ObjectState, run_fn
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.launchers.clusters.discovery import SlotsHere, is_loopback_alone, parse_slots, slots_here

Paceline = Callable[..., Any]

SCRIPT = """
import json, os, signal, sys, time
import torch
from torch.nn.functional import mse_loss
import paceline.horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
killed = os.environ["PACELINE_WORKER"] == "1"
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.arange(120.0).view(40, 3) / 120
sampler = hvd.elastic.ElasticSampler(range(40), shuffle=True)
story = []

@hvd.elastic.run
def train(state):
    if state.step == 0:
        state.begin = [one.tolist() for one in model.parameters()]
    story.append(("enter", hvd.rank(), hvd.size(), state.step))
    while state.step < 10 or hvd.size() < 2:
        for one in list(sampler)[:1]:
            optimizer.zero_grad()
            mse_loss(model(data[one]), torch.ones(1)).backward()
            if killed and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        both = hvd.allgather_object(one)
        sampler.record_batch(0, 1)
        sampler.reset()
        if not len(sampler):
            sampler.set_epoch(sampler.epoch + 1)
        state.step += 1
        state.samples.append(both)
        if state.step % 2 == 0:
            state.commit()

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, samples=[], begin=None)
state.register_reset_callbacks([lambda: story.append(("reset", hvd.rank(), hvd.size(), state.step))])
train(state)
end = [one.tolist() for one in model.parameters()]
found = {"story": story, "samples": state.samples, "begin": state.begin, "end": end}
with open(f"{sys.argv[1]}/{os.environ['PACELINE_WORKER']}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_a_script_survives_a_kill_and_a_replacement_joins(forked_paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = forked_paceline("run", "--elastic", "1:2", "-n", 2, script, tmp_path)
    assert result.code == 0, result.err
    first, last = (json.loads((tmp_path / f"{worker}.json").read_text()) for worker in (0, 2))
    assert not (tmp_path / "1.json").exists()
    before, *alone, joins, together = first["story"]
    assert before == ["enter", 0, 2, 0]
    assert alone in ([["reset", 0, 1, 4], ["enter", 0, 1, 4]], [])  # from the last commit on; or the next one is there
    assert joins[:3] == ["reset", 0, 2] and joins[3] % 2 == 0
    assert together == ["enter", 0, 2, joins[3]]  # what was done alone is kept
    assert last["story"] == [["enter", 1, 2, joins[3]]]
    assert {key: first[key] for key in ("samples", "begin", "end")} == {
        key: last[key] for key in ("samples", "begin", "end")
    }
    samples = first["samples"]
    assert [len(both) for both in samples] == [2] * 4 + [1] * (joins[3] - 4) + [2] * (len(samples) - joins[3])
    epoch = [one for both in samples for one in both][:40]
    assert sorted(epoch) == list(range(40)) or (len(epoch) < 40 and len(set(epoch)) == len(epoch))
    assert torch.allclose(_train(first["begin"], samples), torch.tensor(first["end"][0]), atol=1e-5)


def _train(begin: list[Any], samples: list[list[int]]) -> torch.Tensor:
    """The same in one process."""
    model, data = nn.Linear(3, 1), torch.arange(120.0).view(40, 3) / 120
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), begin, strict=True):
            parameter.copy_(torch.tensor(value))
    for both in samples:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data[both]), torch.ones(len(both), 1)).backward()
        optimizer.step()
    return model.weight.detach()


def test_a_state_goes_back_to_its_last_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", "")  # init sets them
    hvd.init()
    try:
        model = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, epoch=1, seen=[1])
        committed = model.weight.detach().clone()
        state.commit()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.epoch, _ = 2, state.seen.append(2)
        assert optimizer.state
        state.restore()
        assert torch.equal(model.weight, committed) and not optimizer.state
        assert (state.epoch, state.seen) == (1, [1])
        other = nn.Linear(2, 1)
        state.model = other
        state.sync()
        assert state.model is other
    finally:
        hvd.shutdown()


def test_notices_interrupt_and_errors_end_what_is_not_elastic() -> None:
    resets: list[bool] = []
    state = ObjectState(lambda value: value, lambda: 0, calls=0)

    def train(state: Any) -> str:
        state.calls += 1
        if state.calls == 1:
            state.on_hosts_updated(1, 2)
            state.commit()
        if state.calls == 2:
            state.on_hosts_updated(2, 1)
            state.check_host_updates()
        return f"call {state.calls}"

    assert run_fn(train, resets.append)(state) == "call 3"
    assert resets == [True, True]

    def fails(state: Any) -> None:
        raise hvd.HorovodInternalError("lost")

    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        run_fn(fails, resets.append)(state)


def test_what_fails_again_and_again_ends_unless_it_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(commits=0, furthest=0, number=0, pending=0, on_change=None)
    monkeypatch.setattr("paceline.horovod.common.elastic.generations", lambda: found)
    calls = 0

    def fails(state: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            state.commit()
        raise (hvd.HorovodInternalError if calls < 50 else AssertionError)("lost")

    def reset(planned: bool) -> None:
        found.furthest = found.commits

    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        run_fn(fails, reset)(ObjectState(lambda value: value, lambda: 0))
    assert calls == 8 + 10


def test_what_is_left_of_an_epoch_is_divided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    at = {"rank": 1, "size": 2}
    monkeypatch.setattr("paceline.horovod.torch.elastic.sampler.rank", lambda: at["rank"])
    monkeypatch.setattr("paceline.horovod.torch.elastic.sampler.size", lambda: at["size"])
    sampler = ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 4 and list(sampler) == [1, 3, 5, 7, 9]  # until the workers change
    at.update(rank=2, size=4)
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == [6, 4] and len(sampler) == 2  # two of six samples twice
    sampler.set_epoch(1)
    assert len(sampler) == 3 and sampler.processed_num == 0
    sampler.load_state_dict({"epoch": 1, "processed_num": 9})
    assert len(sampler) == 1 and list(sampler) == [9]
    sampler.load_state_dict({"epoch": 1, "processed_num": 12})
    assert len(sampler) == 0 and list(sampler) == []
    shuffled = ElasticSampler(range(100))
    first = list(shuffled)
    shuffled.set_epoch(1)
    assert list(shuffled) != first
    shuffled.set_epoch(0)
    assert list(shuffled) == first


def test_the_options_of_horovodrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(line: str) -> str:
        return " ".join(translate(line.split()).words)

    assert run("-np 2 python -u train.py -np 3") == "run --horovod -n 2 train.py -np 3"
    assert run("-np 6 -H h1:4,h2:4 train.py") == "run --horovod --hosts h1:4,h2:2 train.py"
    assert run("-H localhost:3 train.py") == "run --horovod -n 3 train.py"
    assert run("-np 2 --min-np 1 --max-np 3 train.py") == "run --horovod -n 2 --elastic 1:3 train.py"
    found = "run --horovod -n 2 --elastic 2:3 --host-discovery-script d.sh train.py"
    assert run("--min-np 2 --max-np 3 --host-discovery-script d.sh train.py") == found
    file = tmp_path / "hosts"
    file.write_text("# mine\nh1 slots=2\nh2\n")
    assert run(f"--hostfile {file} train.py") == "run --horovod --hosts h1:2,h2:1 train.py"
    program = tmp_path / "program"
    program.write_text("#!/usr/bin/env python3\n")
    program.chmod(0o700)
    assert run(f"-np 2 {program} -v") == f"run --horovod -n 2 {program} -v"
    line = (
        "-np 1 --timeline-filename t.json --fusion-threshold-mb 1 --network-interfaces eth0 --no-stall-check train.py"
    )
    assert translate(line.split()).environment == {
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_FUSION_THRESHOLD": str(2**20),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    for line, text in (
        ("-np 2", "name the command"),
        ("train.py", "as in -np 4"),
        ("-np 3 -H h1:2 train.py", "the hosts have 2 slots"),
        ("-np 2 -H h1:x train.py", "as in -H host1:4"),
        ("-np 2 ./program", "as in `python train.py`"),
        ("-np 2 python -m", "as in `python -m pytest`"),
        ("-np 2 sh -c true", "a script of Python"),
        ("-np 2 -p 22 python train.py", "set Port in ~/.ssh/config"),
        ("-np 2 --mpi-args=-x train.py", "--on mpi"),
        ("-np 2 --unknown train.py", "'--unknown' has no counterpart"),
        ("--host-discovery-script d.sh train.py", "-np or --min-np"),
    ):
        with pytest.raises(ConfigError, match=text):
            translate(line.split())


@pytest.mark.slow
def test_a_script_adds_workers(paceline: Paceline, tmp_path: Path) -> None:
    hosts, script, discovery = tmp_path / "hosts", tmp_path / "train.py", tmp_path / "discover.sh"
    hosts.write_text("localhost:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o700)
    script.write_text(GROWS)
    words = ["-np", 1, "--min-np", 1, "--max-np", 2, "--host-discovery-script", discovery]
    result = paceline("horovodrun", *words, "python", script, hosts)
    assert result.code == 0, result.err
    assert re.fullmatch(r"\[rank 0\] 0 1\n\[rank 0\] (\d+) 2\n\[rank 0\] end \1\n", result.out), result.out


GROWS = """
import pathlib, sys, time
import horovod.torch as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    print(state.step, hvd.size(), flush=True)
    while hvd.size() == 1:
        pathlib.Path(sys.argv[1]).write_text("localhost:1\\n127.0.0.1:1\\n")
        state.step += 1
        state.commit()
        time.sleep(0.01)

state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
train(state)
print("end", state.step, flush=True)
"""


def test_what_a_discovery_script_prints() -> None:
    found = parse_slots(f"localhost:2\n\n127.0.0.1\n::1\nelsewhere:8\n{socket.gethostname()}:1\nelsewhere\n")
    assert slots_here(found) == 5 and found["elsewhere"] == 9
    assert not is_loopback_alone(found) and is_loopback_alone(parse_slots("localhost:2\n127.0.0.1:0\n"))
    for wrong in ("localhost:two\n", ":2\n", "-o:2\n", "two hosts\n"):
        with pytest.raises(ConfigError, match="must be host:slots"):
            parse_slots(wrong)


def test_a_discovery_script_may_fail_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.launchers.clusters.discovery._EVERY_SECONDS", 0.01)
    said, asked, script = tmp_path / "said", tmp_path / "asked", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\necho >> {asked}\ncat {said}\n")
    script.chmod(0o700)
    said.write_text("localhost:1\n")
    over = Event()
    try:
        found = SlotsHere(script, over.is_set)
        said.unlink()
        failing = len(asked.read_text())
        _await(lambda: len(asked.read_text()) > failing + 2)
        assert found.slots == 1
        said.write_text("localhost:2\nelsewhere:1\n")
        _await(lambda: found.slots == 2)
        _await(lambda: (text := capsys.readouterr().err) and "elsewhere cannot join" in text)
    finally:
        over.set()


def _await(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_script_that_wants_fewer_for_a_moment_starts_no_more() -> None:
    coordinator, discovery = MagicMock(over=None, waiting=False), SimpleNamespace(slots=4)
    request = SimpleNamespace(
        workers=2, nodes=None, smallest=2, most=8, elastic=True, patience_seconds=0.0, standby=0, discovery=None
    )
    agent: Any = CoordinatorAgent(MagicMock(), request, coordinator, discovery)  # type: ignore[arg-type]
    for number in range(2):
        agent.started(number, 0)
    running = 2
    for slots in (4, 0, 4, 5, 0, 5):
        discovery.slots = slots
        more = agent.to_start(at_once=False)
        for number in range(running, running + more):
            agent.started(number, 0)
        running += more
    assert running == 5
