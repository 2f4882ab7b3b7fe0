"""Gradients are passed to the reduction once a bucket, with the bits and the order of those passed one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_world import ThreadWorld, run
from torch import nn

from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.executor import Reduction
from paceline.errors import InputError, WorkerLost
from paceline.events import EventLog
from paceline.schedule.slices import Slice, even
from paceline.schedule.tree import Node, total
from paceline.step.gradients.accumulate import Accumulator
from paceline.strategies.data_parallel.gradient_groups import Slices, groups_of
from paceline.strategies.data_parallel.reducer import Reducer

SIZES = [2000, 7, 500, 64, 2000]
"""The 2nd parameter gets no gradient, the 5th not in each microbatch."""
SHARES = [[0, 1, 2], [3, 4]]
NODES = [[Node(1, 0), Node(0, 2)], [Node(0, 3), Node(0, 4)]]
CUT = even(SIZES, [[4, 3], [2, 1, 0]], 2)


class Counted(Reduction):
    """Reduction that counts the calls with written tensors."""

    calls = 0

    def written(self, *members: int) -> None:
        self.calls += 1
        super().written(*members)


def parameters() -> dict[str, nn.Parameter]:
    return {f"p{place}": nn.Parameter(torch.zeros(size)) for place, size in enumerate(SIZES)}


def gradient(microbatch: int, place: int) -> torch.Tensor | None:
    if place == 1 or (place == 4 and microbatch % 2):
        return None
    chance = torch.Generator().manual_seed(10 * microbatch + place)
    return torch.randn(SIZES[place], generator=chance) * 10.0 ** (microbatch % 3)


def loss(named: dict[str, nn.Parameter], microbatch: int) -> torch.Tensor:
    """A loss with :func:`gradient` as gradients."""
    both = [(value, gradient(microbatch, place)) for place, value in enumerate(named.values())]
    return sum((value * given).sum() for value, given in both if given is not None)  # type: ignore[return-value]


def reducer_of(
    world: ThreadWorld, named: dict[str, nn.Parameter], slices: list[Slice] | None, size: int, windowed: bool = False
) -> Reducer:
    context: Any = SimpleNamespace(
        world=world,
        settings=SimpleNamespace(fixed_point=False, wire="float32", wires={"default": "float32"}),
        update=None,
        compute=SimpleNamespace(scale=1.0),
    )
    places = [Slice(place, 0, size, 0) for place, size in enumerate(SIZES)][::-1] if slices is None else slices
    values = [[*named.values()][place].detach()[start:stop] for place, start, stop, *_ in places]
    homes = None if slices is None else [one.owner % world.size for one in slices]
    copies = None if slices is None else dict[int, list[int]]()
    exchange = DirectExchange(world, 1, homes=homes, copies=copies, windowed=windowed)  # type: ignore[arg-type]
    reduction = Counted(world, exchange, values, EventLog(None, 0), "gradients", size)  # type: ignore[arg-type]
    return Reducer(context, named, world, reduction, slices=slices and Slices(slices))  # type: ignore[arg-type]


def step(reducer: Reducer, named: dict[str, nn.Parameter], microbatches: list[int]) -> list[list[int]]:
    reducer.begin(NODES, True, 0)
    for microbatch in microbatches[:-1]:
        loss(named, microbatch).backward()
        reducer.push(microbatch)
    reducer.last(microbatches[-1], SimpleNamespace(count=lambda: 5.0))  # type: ignore[arg-type]
    loss(named, microbatches[-1]).backward()
    missing = reducer.written()
    assert reducer.finish()
    return missing


def mean(place: int) -> torch.Tensor:
    given = [(Node(0, number), gradient(number, place)) for number in range(5)]
    absent = torch.full((SIZES[place],), -0.0)
    return total([(node, absent.clone() if value is None else value) for node, value in given], torch.add).div_(5.0)


@pytest.mark.parametrize("windowed", [False, True], ids=["", "windowed"])
@pytest.mark.parametrize("slices", [None, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("size", [1, 3000, 1 << 20])
def test_means_have_the_bits_of_the_tree(slices: list[Slice] | None, size: int, windowed: bool) -> None:
    """Windowed, sums of a bucket overwrite those of an earlier one, also if their gradients come first."""
    if windowed and slices is None:
        pytest.skip("only servers keep means outside of the sums")

    def act(world: Any) -> None:
        named = parameters()
        reducer = reducer_of(world, named, slices, size, windowed)
        late = [bucket.index for bucket in reducer.reduction._buckets if bucket.after >= 0]  # type: ignore[union-attr]
        assert bool(late) == (windowed and size < 1 << 20)
        reduction: Any = reducer.reduction
        for _ in range(2):
            reduction.calls = 0
            missing = step(reducer, named, SHARES[world.rank])
            assert missing == [[1, 4] if number % 2 else [1] for number in SHARES[world.rank]]
            whole = slices is None
            assert reduction.calls == sum(len(one.members) if one.parts else 1 for one in reducer._groups)
            for member, (place, start, stop, owner, _) in enumerate(slices or ()):
                if owner == world.rank:
                    assert torch.equal(reduction.mean(member), mean(place)[start:stop])
            for place, value in enumerate(named.values() if whole else ()):
                assert value.grad is not None and torch.equal(value.grad, mean(place))
        reducer.close()

    run(2, act)


def test_complete_sums_wait_for_the_means_of_the_bucket_before() -> None:
    """As those of a step that is computed again: the first bucket needs no divisor, one that overwrites it does."""

    def act(world: Any) -> None:
        cut = even(SIZES, [[4], [3, 2], [1, 0]], 3)
        reducer = reducer_of(world, parameters(), cut, 1, windowed=True)
        sums = Accumulator(True)
        for microbatch in (*SHARES, [])[world.rank]:
            sums.push(microbatch, [gradient(microbatch, place) for place in range(len(SIZES))])
        reducer.send([*NODES, []], sums.values(), lambda: 5.0)
        assert reducer.finish()
        for member, (place, start, stop, owner, _) in enumerate(cut):
            if owner == world.rank:
                assert torch.equal(reducer.reduction.mean(member), mean(place)[start:stop])  # type: ignore[union-attr]
        reducer.close()

    run(3, act)


def test_the_groups_of_cut_parameters() -> None:
    slices = [Slice(3, 0, 9, 0), Slice(2, 0, 64, 0), Slice(2, 64, 100, 1), Slice(1, 0, 5, 1), Slice(0, 0, 5, 1)]
    groups = groups_of(slices, [[0, 1], [2, 3, 4]])
    assert [(one.places, one.members, one.parts) for one in groups] == [
        ([3], [0], []),
        ([2], [1, 2], [slice(0, 64), slice(64, 100)]),
        ([1, 0], [3, 4], []),
    ]
    values = [torch.arange(100.0).view(4, 25)]
    first, second = groups[1].cut(values)  # type: ignore[arg-type]
    assert first is not None and second is not None and torch.equal(torch.cat([first, second]), torch.arange(100.0))
    assert groups[1].cut([None]) == [None, None] and groups[0].cut(values) is values  # type: ignore[arg-type]


def test_a_worker_gives_up_a_step_in_the_middle_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it to form again. A backward pass of the script's own goes on."""

    def act(world: Any) -> None:
        named = parameters()
        reducer = reducer_of(world, named, None, 1 << 20)
        reducer.begin([[Node(0, 0)]], True, 0)
        reducer.last(0, SimpleNamespace(count=lambda: 1.0))  # type: ignore[arg-type]
        loss(named, 0).backward()
        reducer.written()
        came: list[int] = []
        for place, value in enumerate(named.values()):
            value.register_post_accumulate_grad_hook(lambda _, place=place: came.append(place))
        monkeypatch.setattr(ThreadWorld, "alarmed", True)
        loss(named, 0).backward()
        assert sorted(came) == [0, 2, 3, 4]
        came.clear()
        reducer.begin([[Node(0, 0), Node(0, 1)]], True, 0)
        with pytest.raises(WorkerLost):
            loss(named, 0).backward()
        assert not came
        reducer.close()
        loss(named, 0).backward()

    run(1, act)


ORDERS: dict[str, Callable[[list[nn.Parameter]], list[nn.Parameter]]] = {
    "before the bucket is complete": lambda values: [values[0], values[0], *values[1:]],
    "after the bucket is complete": lambda values: [*values, values[0]],
    "in a bucket that is not complete": lambda values: [values[0], values[0]],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slices", [None, CUT], ids=["whole", "cut"])
def test_a_gradient_in_two_parts_is_refused(order: str, slices: list[Slice] | None) -> None:
    def act(world: Any) -> None:
        named = parameters()
        reducer = reducer_of(world, named, slices, 1 << 20)
        with pytest.raises(InputError, match="'p0' got its gradient in two parts"):
            reducer.begin([[Node(0, 0)]], True, 0)
            reducer.last(0, SimpleNamespace(count=lambda: 1.0))  # type: ignore[arg-type]
            for value in ORDERS[order]([*named.values()]):
                value.sum().backward()
            reducer.written()

    run(1, act)
