"""Tensors in parts on several workers are put together where they are needed, with little room."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from thread_world import run

from paceline.comm.shm.tensors import Kinds
from paceline.comm.transport.base import Message
from paceline.errors import WorkerLost
from paceline.schedule.slices import slice_name
from paceline.step.divided import tensors as divided_tensors
from paceline.step.divided.tensors import Division
from paceline.training.progress import Progress
from paceline.training.recovery.recovery import Recovery

SHAPES = {"a": (40, 5), "b": (7,), "c": (130,), "d": (), "e": (0, 3)}
WHOLE = {
    name: torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) for name, shape in SHAPES.items()
}


def parts_of(rank: int) -> dict[str, torch.Tensor]:
    """``a`` and ``c`` in slices, ``d`` on all workers, the others on one worker each."""
    cuts = {"a": [(0, 64), (64, 128), (128, 200)], "c": [(64, 130), (0, 64)]}
    found = {"d": WHOLE["d"]}
    for name, places in cuts.items():
        for start, stop in places[rank : rank + 1]:
            found[slice_name(name, start, stop)] = WHOLE[name].view(-1)[start:stop]
    return found | {name: WHOLE[name] for owner, name in enumerate("be") if owner == rank}


def divided(world: Any) -> Division:
    return Division(world, parts_of(world.rank), lambda name: WHOLE[name].shape, "a test")


@pytest.mark.parametrize("late", [False, True])
def test_each_target_gets_whole_tensors(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounds this small, one has no bytes: nothing is sent then."""
    monkeypatch.setattr(divided_tensors, "ROUND_BYTES", 0)
    targets = {"a": [1], "b": [0, 2], "c": [], "d": [2], "e": [1, 2]}

    def act(world: Any) -> dict[str, torch.Tensor]:
        start = world.start_transfers

        def start_transfers(sends: list[Message], receives: list[Message], *where: str, **host: bool) -> list[Any]:
            assert all(len(one.tensor) for one in [*sends, *receives])
            return list(start(sends, receives, *where, **host))

        world.start_transfers = start_transfers
        division = divided(world)
        assert {name: tuple(shape) for name, (_, shape) in division.kinds.items()} == SHAPES
        return {name: value.clone() for name, value in division.put_together([*SHAPES], targets.__getitem__)}

    for rank, found in enumerate(run(3, act, blocking_wait=not late)):
        assert [*found] == [name for name, ranks in targets.items() if rank in ranks]
        assert all(torch.equal(value, WHOLE[name]) for name, value in found.items())


def test_a_round_needs_room_for_few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_tensors, "ROUND_BYTES", 1200)
    rooms: list[int] = []
    room_of = divided_tensors.room_of

    def recorded(kinds: Kinds) -> int:
        rooms.append(room_of(kinds))
        return rooms[-1]

    def act(world: Any) -> int:
        division = divided(world)
        rooms.clear()
        monkeypatch.setattr(divided_tensors, "room_of", recorded)
        return len([*division.put_together([*SHAPES] * 20, lambda _: range(3))])

    assert run(3, act) == [100] * 3
    assert max(rooms) == room_of({"a": (torch.float64, torch.Size([200]))})


def test_slices_of_a_large_tensor_are_not_copied_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_tensors, "ROUND_BYTES", 1200)

    def act(world: Any) -> bool:
        start, moved, division = world.start_transfers, list[int](), divided(world)

        def start_transfers(sends: list[Message], receives: list[Message], *where: str) -> list[Any]:
            moved.extend(one.tensor.untyped_storage().data_ptr() for one in [*sends, *receives])
            return list(start(sends, receives, *where))

        world.start_transfers = start_transfers
        known = {WHOLE["a"].untyped_storage().data_ptr()}
        known |= {value.untyped_storage().data_ptr() for _, value in division.put_together(["a"], lambda _: [1])}
        return bool(moved) and known.issuperset(moved)

    assert all(run(3, act))


def test_owners_take_turns_with_tensors_in_equal_slices() -> None:
    names = [f"{number:02}" for number in range(40)]

    def act(world: Any) -> list[int]:
        mine = {slice_name(name, 64 * world.rank, 64 * world.rank + 64): torch.ones(64) for name in names}
        division = Division(world, mine, lambda _: torch.Size([128]), "a test")
        return [division.owner_of(name) for name in names]

    first, second = run(2, act)
    assert first == second and 10 < sum(first) < 30


def test_what_is_replaced_in_part_is_owned_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is behind is lost to the sender of the whole state: its own part may be of either step."""

    def lost(*_: Any) -> bool:
        raise WorkerLost("the sender")

    monkeypatch.setattr("paceline.training.recovery.recovery.assemble", lost)

    def act(world: Any, given: list[Progress]) -> frozenset[str] | None:
        made: Any = Recovery.__new__(Recovery)
        loop = type("Loop", (), {"needed": []})()
        settings = type("Settings", (), {"strategy": "allreduce"})
        context = {"world": world, "order": None, "loop": loop, "settings": settings, "sparse": ()}
        made._context = type("Context", (), context)()
        made._state, made._is_overwritten = type("State", (), {"keeps_script": False})(), False
        with pytest.raises(WorkerLost):
            made._same_state(given[world.rank])
        return given[world.rank].owned

    whole, part = Progress(7), frozenset({"a"})
    assert run(2, partial(act, given=[whole, Progress(6, owned=part)])) == [None, frozenset()]
    assert run(2, partial(act, given=[Progress(6, owned=part), Progress(6, owned=part)])) == [part, part]
