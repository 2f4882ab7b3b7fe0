"""Parameter servers on three machines: a worker is killed, then the machine of two shards goes away."""

import json
import os
import signal
from pathlib import Path

import pytest
from test_machines import Hosts, alone, hosts, needs_root, secret_in, steps_done, until  # noqa: F401 - a fixture

from paceline.observe import ledger

STEPS = 360


def records(hosts: Hosts) -> ledger.Records:  # noqa: F811
    """Of all machines; each has a folder of its own."""
    lines = []
    for file in sorted(hosts.folder.glob("*/runs/*/events/*.jsonl")):
        whole, _, _ = file.read_text().rpartition("\n")
        lines += [json.loads(line) for line in whole.splitlines()]
    return ledger.records_of(lines)


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_and_a_server_are_lost(hosts: Hosts, tmp_path: Path, mode: str) -> None:  # noqa: F811
    """Each machine is the server of one shard, and holds the copy of another one."""
    secret_in(tmp_path)
    words = ["--nodes", "1:3", "--set", "strategy=parameter-server", "--set", f"server.mode={mode}"]
    words += ["--set", "server.count=3", "--set", f"exact={str(mode == 'sync').lower()}"]
    agents = [hosts.start(place, STEPS, *words, *(["--name", "job"] * (not place))) for place in range(3)]
    until(lambda: any(event["event"] == "membership" and len(event["workers"]) == 3 for event in hosts.events()))
    until(lambda: steps_done(hosts) > 5)
    os.kill(hosts.worker(1), signal.SIGKILL)
    until(lambda: any(event["event"] == "recovered" and event["lost"] for event in hosts.events()))
    until(lambda: any(event["event"] == "recovered" and len(event["workers"]) == 3 for event in hosts.events()))
    after = steps_done(hosts)
    until(lambda: steps_done(hosts) > after + 5)
    hosts.pull_cable(2)
    until(lambda: sum(event["event"] == "recovered" and bool(event["lost"]) for event in hosts.events()) > 1)
    hosts.go.touch()
    assert [agents[place].wait(90) for place in (0, 1)] == [0, 0]
    assert not any(event["event"] == "went back" for event in hosts.events())
    if mode == "sync":
        assert hosts.fingerprints() == {alone(tmp_path, STEPS)}
    else:
        assert len(hosts.fingerprints()) == 1
        assert ledger.check(records(hosts), STEPS) == []
