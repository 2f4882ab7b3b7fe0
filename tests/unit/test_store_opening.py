"""What a worker says that could not open the store, or reach it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.rendezvous import env_init
from paceline.comm.rendezvous.env_init import EnvRendezvous
from paceline.errors import StartError


@pytest.mark.parametrize(("rank", "agent", "opens"), [(0, False, True), (0, True, False), (1, False, False)])
def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, rank: int, agent: bool, opens: bool) -> None:
    made: Any = object.__new__(EnvRendezvous)
    made.rank, made.timeout = rank, 5.0

    def fail(*_: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(env_init, "within", fail)
    monkeypatch.setattr(env_init, "env", SimpleNamespace(text=lambda name: str(agent)))
    doing = "open the store" if opens else "reach rank 0"
    with pytest.raises(StartError, match=f"Rank {rank} could not {doing} at here in 5 s: first line$"):
        made._open_store("here", None)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object.__new__(EnvRendezvous)
    made.rank, made.timeout = 0, 5.0

    def fail(*_: Any) -> Any:
        raise OSError("address already in use")

    monkeypatch.setattr(env_init, "within", fail)
    monkeypatch.setattr(env_init, "_in_use", lambda *_: "the port is taken")
    monkeypatch.setattr(env_init, "env", SimpleNamespace(text=lambda name: None))
    with pytest.raises(StartError, match=r"^the port is taken$"):
        made._open_store("here", None)
    made.rank = 1
    with pytest.raises(StartError, match="could not reach rank 0 at here in 5 s: address already in use"):
        made._open_store("here", None)
