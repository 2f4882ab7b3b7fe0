"""What a change of the members costs at the coordinator, counted: messages and bytes, not seconds."""

import random
from typing import Any

import pytest
from scripted_membership import ScriptedMembership

from paceline.coordinator.types import Member

PER_MACHINE = 8


class Cluster(ScriptedMembership):
    """Workers on machines of eight, or all on one."""

    def __init__(self, size: int, machines: bool = True) -> None:
        super().__init__(most=size + PER_MACHINE, wanted=size)
        self._machines = machines
        self.come(*range(size))

    def about(self, number: int) -> dict[str, Any]:
        place = number // PER_MACHINE if self._machines else 0
        arena = [9, f"{number:032x}"]
        return {"host": f"node{place:04}", "address": f"10.0.{place // 250}.{place % 250}", "arena": arena}

    def replace(self, number: int, by: int) -> None:
        """Lose a worker, and let another one join once training has gone on."""
        self.lose(number)
        self.ready(*(one for one in self.of.members if one != number))
        self.come(by)
        self.ready(*(one for one in self.of.members if one != by), planned=True)

    def count(self) -> tuple[int, int]:
        """The messages and the bytes since the last call."""
        messages = sum(map(len, self.told.values()))
        size = sum(self.bytes.values())
        self.told.clear()
        self.bytes.clear()
        return messages, size


@pytest.mark.slow
@pytest.mark.parametrize("size", [256, 1024])
def test_a_lost_worker_costs_each_other_the_same_in_any_world(size: int) -> None:
    small, large = Cluster(64), Cluster(size)
    for cluster, count in ((small, 64), (large, size)):
        cluster.count()
        cluster.lose(17)
        cluster.ready(*(one for one in cluster.of.members if one != 17))
        messages, bytes_sent = cluster.count()
        assert messages == 2 * (count - 1)  # the news, and the members
        assert bytes_sent <= 420 * (count - 1)
        assert [one.worker for one in cluster.known[0]] == [one for one in range(count) if one != 17]


@pytest.mark.slow
@pytest.mark.parametrize("size", [256, 1024])
def test_a_joiner_alone_gets_the_whole_list(size: int) -> None:
    cluster = Cluster(size)
    cluster.lose(3)
    cluster.ready(*(one for one in cluster.of.members if one != 3))
    cluster.count()
    cluster.come(size)
    cluster.ready(*(one for one in cluster.of.members if one != size), planned=True)
    whole = cluster.bytes[size]
    messages, bytes_sent = cluster.count()
    assert messages == 2 * (size - 1) + 1
    assert bytes_sent - whole <= 500 * (size - 1)
    assert whole <= 40 * size
    assert cluster.known[size] == cluster.known[0] and len(cluster.known[0]) == size


@pytest.mark.slow
@pytest.mark.parametrize("size", [256, 1024])
def test_the_start_sends_each_worker_one_list(size: int) -> None:
    cluster = Cluster(size)
    messages, bytes_sent = cluster.count()
    assert messages == size
    assert bytes_sent <= 40 * size**2


def test_who_shares_a_machine_learns_of_all_arenas_and_others_of_none() -> None:
    together, apart = Cluster(16, machines=False), Cluster(16)
    assert [one.arena for one in together.known[3]] == [(9, f"{number:032x}") for number in range(16)]
    assert {one.arena for one in apart.known[3]} == {None}


@pytest.mark.parametrize("machines", [True, False])
def test_changes_add_up_to_the_members(machines: bool) -> None:
    """Losses, joins, workers that were dropped and come back, and new arenas, in any order."""
    chance = random.Random(machines)
    cluster = Cluster(40, machines)
    for number in range(40, 100):
        kind = chance.choice(["replace", "comes back", "new arenas"])
        old = chance.choice(cluster.of.members)
        if kind == "replace":
            cluster.replace(old, number)
        elif kind == "comes back":
            cluster.of.lose(old, "it was late", cluster.now, may_run=True)
            cluster.ready(*(one for one in cluster.of.members if one != old), steps=number)
            cluster.ready(old, steps=number)
            cluster.ready(*(one for one in cluster.of.members if one != old), steps=number, planned=True)
        else:
            for one in cluster.of.members:
                cluster.of.workers[one].about["arena"] = [number, f"{one:032x}"]
            cluster.replace(old, number)
        known = {cluster.known[one] for one in cluster.of.members}
        assert len(known) == 1
        assert [one.worker for one in known.pop()] == cluster.of.members


def test_who_starts_again_gets_the_whole_list() -> None:
    """A script that calls paceline.start once more has forgotten who was there."""
    cluster = Cluster(4)
    for number in range(4):
        cluster.known.pop(number)
        about = {"pid": number, **cluster.about(number)}
        cluster.of.register(number, about, {}, session=2)
    for number in range(4):
        cluster.of.ready(number, None, cluster.now)
    expected = tuple(Member(number, "node0000", number, "10.0.0.0", (9, f"{number:032x}")) for number in range(4))
    assert [cluster.known[number] for number in range(4)] == [expected] * 4
