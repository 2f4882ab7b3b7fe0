"""How workers come together at a store: how often they ask, what they leave there, and who is named when late."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.rendezvous import env_init
from paceline.comm.rendezvous.env_init import EnvRendezvous
from paceline.environments.start import Identity
from paceline.errors import StartError


class CountingStore:
    """A store of one process that counts the keys it is asked for."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def counted(keys: Any, *rest: Any) -> Any:
            self.asked[name] += len(keys) if isinstance(keys, list) else 1
            return getattr(self._store, name)(keys, *rest)

        return counted


def identity(rank: int, size: int) -> Identity:
    return Identity(rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def test_each_asks_for_one_key_and_leaves_none_of_its_own() -> None:
    size, stores = 24, [CountingStore()] * 24

    def come(rank: int) -> None:
        EnvRendezvous(identity(rank, size), 60.0)._await_everyone(stores[rank], "here", identity(rank, size))

    workers = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    asked = stores[0].asked
    assert asked["add"] == 2 * size and asked["set"] == 1 and asked["delete_key"] == size
    assert stores[0]._store.num_keys() <= 3  # how many came, that all did, and torch's own


def test_one_that_asks_twice_counts_once() -> None:
    """A process that has lost its answer and asks again."""
    store = CountingStore()
    rendezvous = EnvRendezvous(identity(0, 2), 0.2)
    for _ in range(2):
        with pytest.raises(StartError, match=r"Rank 0 waited 0 s at node:1, but rank 1 of 2 workers did not arrive"):
            rendezvous._await_everyone(store, "node:1", identity(0, 2))
    EnvRendezvous(identity(1, 2), 5.0)._await_everyone(store, "node:1", identity(1, 2))


def test_all_together_do_not_ask_more_often_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(env_init.time, "sleep", pauses.append)
    for size in (2, 1024):
        with pytest.raises(StartError, match=f"of {size} workers did not arrive"):
            EnvRendezvous(identity(0, size), 0.05)._await_everyone(CountingStore(), "node:1", identity(0, size))
        assert size / pauses[-1] <= env_init._LOOKS_PER_SECOND
