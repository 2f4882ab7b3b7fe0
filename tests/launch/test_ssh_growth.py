"""Agents for hosts that a discovery script names while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters import discovery
from paceline.launchers.clusters.base import Agent, Options
from paceline.launchers.clusters.clients import Client
from paceline.launchers.clusters.ssh import place as ssh
from paceline.launchers.clusters.ssh.check import Needs


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the script ``discover.sh`` beside it prints."""
    monkeypatch.setattr(discovery, "_EVERY_SECONDS", 0.01)
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/named\n")
    script.chmod(0o700)
    return tmp_path / "named"


def _request(named: Path, most: int) -> Request:
    script = named.with_name("discover.sh")
    return Request(Path("train.py"), least=1, most=most, horovod=True, discovery=script)


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def _await(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_coordinator_is_here_and_the_most_workers_are_kept(named: Path) -> None:
    named.write_text("h1:3\nlocalhost:1\nh2:4\n")
    placement = ssh.Ssh().decide(_request(named, 6), Options(), {"HOROVOD_TIMELINE": "t", "GLOO_SOCKET_IFNAME": "lo"})
    workers = [(one.machine, one.command[one.command.index("-n") + 1]) for one in placement.agents]
    assert workers == [("localhost", "1"), ("h1", "3"), ("h2", "2")]
    assert all(
        "--elastic 1:6 --nodes 1:6 --rendezvous localhost:PORT" in " ".join(one.command) for one in placement.agents
    )
    given = placement.agents[0].environment
    assert given["HOROVOD_TIMELINE"] == "t" and "GLOO_SOCKET_IFNAME" not in given


def test_hosts_come_go_and_come_again(
    named: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[str] = []

    def check(hosts: dict[str, list[str]], needs: Needs, more_come: bool) -> tuple[str, int]:
        checked.append(list(hosts)[-1])
        if checked[-1] == "bad":
            raise StartError("bad: it does not answer")
        return "", 0

    monkeypatch.setattr(ssh, "check_hosts", check)
    named.write_text("h1:1\n")
    started: list[Agent] = []

    def client(agent: Agent) -> Client:
        started.append(agent)
        return Client(agent.machine, agent.command)

    request = _request(named, 5)
    first = ssh.Ssh().decide(request, Options(), {}).agents
    needs = Needs("python", "/", (), {})
    assert request.discovery is not None
    growth = ssh._Growth(request.discovery, request, first, needs, client)
    found: list[str] = []

    def workers() -> list[str]:
        found.extend(f"{one.name} {one.command[list(one.command).index('-n') + 1]}" for one in growth.take())
        return found

    try:
        _replace(named, "h1:2\nbad:1\nh2:1\n")
        _await(lambda: len(workers()) == 2)
        assert found == ["h1 1", "h2 1"]
        _await(lambda: checked.count("bad") > 2)
        assert capsys.readouterr().err == "bad: it does not answer\n"
        assert growth.keeps("h2")
        _replace(named, "h1:2\n")
        _await(lambda: not growth.keeps("h2"))
        _replace(named, "h1:2\nh2:9\n")
        _await(lambda: len(workers()) == 3)
        assert found[2] == "h2 3"
    finally:
        growth.over.set()
