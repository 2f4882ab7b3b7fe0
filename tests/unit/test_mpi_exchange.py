"""How processes of MPI learn where rank 0 listens, over a communicator that is made up."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.rendezvous import mpi_exchange, ulfm
from paceline.errors import StartError


class Comm:
    """One rank's side of two machines."""

    def __init__(self, rank: int, theirs: dict[str, Any], port: int = 0) -> None:
        self.rank, self.theirs, self.port = rank, theirs, port
        self.sent: int | None = None

    def Get_size(self) -> int:
        return 2

    def Get_rank(self) -> int:
        return self.rank

    def Allgather(self, mine: bytes, theirs: bytearray) -> None:
        other = json.dumps(self.theirs).encode().ljust(len(mine))
        theirs[:] = mine + other if self.rank == 0 else other + mine

    def Bcast(self, port: bytearray) -> None:
        assert len(port) == 2
        if self.rank == 0:
            self.sent = int.from_bytes(port)
        else:
            port[:] = self.port.to_bytes(2)


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = {"10.0.0.1": "10.0.0.0/8"}
    monkeypatch.setattr(mpi_exchange, "networks", lambda: own)
    monkeypatch.setattr(mpi_exchange, "shared_address", lambda ranks: next(iter({*ranks[0]} & {*ranks[1]}), None))
    return own


def listen(address: str) -> Any:
    return SimpleNamespace(getsockname=lambda: (address, 700), address=address)


def test_rank_0_listens_where_all_reach_it(networks: dict[str, Any]) -> None:
    comm = Comm(0, networks)
    address, port, listener = mpi_exchange._exchange(comm, None, listen)
    assert (address, port, comm.sent) == ("10.0.0.1", 700, 700)
    assert listener is not None and listener.address == "10.0.0.1"  # type: ignore[attr-defined]
    assert mpi_exchange._exchange(Comm(1, networks, 600), None, listen) == ("10.0.0.1", 600, None)
    assert mpi_exchange._exchange(Comm(1, {}, 600), "host", listen) == ("host", 600, None)


def test_a_failure_reaches_every_rank(networks: dict[str, Any]) -> None:
    def fail(address: str) -> Any:
        raise OSError("in use")

    comm = Comm(0, networks)
    with pytest.raises(StartError, match=r"at no address that all machines reach: in use\. Rank 0 has 10\.0\.0\.1"):
        mpi_exchange._exchange(comm, None, fail)
    assert comm.sent == 0
    with pytest.raises(StartError, match="at no address"):
        mpi_exchange._exchange(Comm(1, networks, 0), None, listen)
    comm = Comm(0, {"10.9.9.9": ""})
    with pytest.raises(StartError, match=r"reach\. Rank 0 has 10\.0\.0\.1"):
        mpi_exchange._exchange(comm, None, listen)
    assert comm.sent == 0
    with pytest.raises(StartError, match="Rank 0 has none but loopback"):
        mpi_exchange._exchange(Comm(1, {}, 600), None, listen)


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_of_ulfm_learn_the_key_of_rank_0(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    told: list[Any] = []
    who = SimpleNamespace(rank=rank, world_size=2)
    start = SimpleNamespace(survives=True, identity=who)
    listener = object() if rank == 0 else None

    def broadcast(key: bytearray) -> None:
        if rank:
            key[:] = bytes(range(len(key)))
        told.append(bytes(key))

    comm = SimpleNamespace(Set_errhandler=told.append, Bcast=broadcast)
    monkeypatch.setattr(ulfm, "initialized", lambda: SimpleNamespace(COMM_WORLD=comm, ERRORS_RETURN="return"))
    monkeypatch.setattr(ulfm, "exchange_by_mpi", lambda *_: Where(listener))
    monkeypatch.setattr(ulfm, "within", lambda seconds, late, call: call())
    monkeypatch.setattr(ulfm, "_start", lambda *given: told.append(given))
    env: Any = SimpleNamespace(
        started_by=lambda: start, set_launch_info=lambda *given: told.append(given), launch_info=lambda: "info"
    )
    monkeypatch.setattr(ulfm, "env", env)
    assert ulfm.find_coordinator(5.0) == "info"  # type: ignore[comparison-overlap]
    handler, key, *started, info = told
    secret = ulfm.Secret(key)
    number = ulfm.number_of(rank)
    assert handler == "return"
    assert info == ("10.0.0.1:700", number, secret.of_run("").key(ulfm.worker(number)), 2)
    assert [(one, workers) for one, _, workers in started] == ([(listener, 2)] if rank == 0 else [])
    for change in ({"survives": False}, {"identity": SimpleNamespace(rank=0, world_size=1)}):
        monkeypatch.setattr(env, "started_by", lambda change=change: SimpleNamespace(**(vars(start) | change)))
        assert ulfm.find_coordinator(5.0) is None


class Where:
    """Where the coordinator listens."""

    def __init__(self, listener: Any) -> None:
        self.listener = listener

    def __str__(self) -> str:
        return "10.0.0.1:700"
