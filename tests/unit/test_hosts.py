"""The machines of the workers follow from what each worker says of its own, whatever the order of the ranks."""

from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm.rendezvous.machines import Seat, hosts_of, seat_of
from paceline.comm.world import World
from paceline.environments.start import Identity
from paceline.training.recovery import formation
from paceline.training.recovery.formation import Formation


@pytest.mark.parametrize(
    ("seats", "hosts"),
    [
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)], ((0, 1), (2, 3))),
        ([("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2)], ((0, 2), (1, 3))),
        ([("a", 0, 3), ("b", 0, 1), ("a", 1, 3), ("a", 2, 3)], ((0, 2, 3), (1,))),
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 1), ("a", 0, 2), ("a", 1, 2)], ((0, 1), (2,), (3, 4))),
        ([("a", 0, 3), ("a", 0, 3), ("a", 0, 3)], ((0,), (1,), (2,))),
    ],
    ids=["in blocks", "round robin", "round robin, unequal", "several starts on one host", "without local ranks"],
)
def test_workers_are_grouped_by_machine(seats: list[tuple[str, int, int]], hosts: Any) -> None:
    assert hosts_of([Seat(*seat) for seat in seats]) == hosts


def test_a_rendezvous_groups_ranks_that_were_dealt_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``mpirun --map-by node``, ranks 0 and 2 are on one machine."""
    own = Identity(rank=1, world_size=4, local_rank=0, local_world_size=2)
    host = seat_of(own).host
    said = [["a", 0, 2], [host, 0, 2], ["a", 1, 2], [host, 1, 2]]
    sent: list[Any] = []

    def gather(_: World, value: Any, what: str) -> list[Any]:
        sent.append(value)
        return said if len(sent) == 1 else [None] * 4

    def attach(*arguments: Any) -> None:
        sent.append(arguments[0].hosts)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(formation, "default_store", lambda: None)
    monkeypatch.setattr(World, "gather", gather)
    monkeypatch.setattr(Formation, "_agree", lambda *_: None)
    monkeypatch.setattr(Formation, "_record_calls", lambda _: None)
    monkeypatch.setattr(formation, "attach_hosts", attach)
    formed = Formation(own, 1.0)
    world = formed.world
    monkeypatch.setattr(type(world.transport), "open", lambda _: None)
    formed.rendezvous()
    assert world.hosts == ((0, 2), (1, 3))
    assert list(sent[0]) == said[1]
    assert sent[1] == world.hosts
