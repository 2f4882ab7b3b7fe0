"""Workers of different speeds in local training: they leave parts, and outer steps, to others."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from thread_training import mlp, no_draws, store, train  # noqa: F401

from paceline.comm.assignment import part_claims
from paceline.comm.world import PENDING, World
from paceline.strategies.local import inner as local_training
from paceline.strategies.local import strategy as local_strategy
from paceline.strategies.local.outer import OuterSteps
from paceline.strategies.local.uneven import ClaimedParts


@pytest.mark.parametrize("hosts", [None, [(0, 1)]], ids=["network", "memory"])
def test_a_slow_worker_leaves_its_inner_steps_to_others(monkeypatch: pytest.MonkeyPatch, hosts: Any) -> None:
    """Rank 1 ends its inner step when rank 0 has begun all others of the period, and leaves the next period to it."""
    begun, ahead, made, counts = threading.Event(), threading.Event(), list[tuple[int, int]](), list[Any]()

    def inner_step(context: Any, batch: Any, step: int, groups: Any, replica: Any) -> Any:
        made.extend((step, one) for group in groups for one in group.microbatches)
        if len(made) == 4 + 4 + 2 + 4:
            ahead.set()
        begun.set() if context.world.rank else None
        assert (ahead if context.world.rank else begun).wait(20), f"rank {context.world.rank} is held up at {made}"
        return local_training.inner_step(context, batch, step, groups, replica)

    def send(outer: OuterSteps, step: int, fragment: int, known: Any, *more: Any) -> None:
        counts.append(known)
        sent(outer, step, fragment, known, *more)

    def step(strategy: local_strategy.LocalTraining, *given: Any) -> Any:
        paced.add((result := stepped(strategy, *given)).paced_over)
        return result

    sent, stepped, paced = OuterSteps.send, local_strategy.LocalTraining.step, set[int]()
    monkeypatch.setattr(local_strategy.LocalTraining, "step", step)
    monkeypatch.setattr(ClaimedParts, "pace", property(lambda self: (1.0, 100.0)[self._rank]))
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    monkeypatch.setattr(OuterSteps, "send", send)
    local = {"every": 4, "replicas": 2, "uneven": True}
    (first, _), (second, _) = train(mlp, 2, hosts, steps=8, strategy="diloco", local=local)
    assert sorted(made) == [(step, part) for step in range(8) for part in range(2 if step in (2, 5) else 4)]
    assert sorted(map(sorted, map(dict.items, counts))) == [[(0, 48), (1, 8)]] * 2 + [[(0, 56), (1, 0)]] * 2
    assert first == second
    assert paced == {4}, "throughput is that of a period, as a batch may take a worker no time"


@pytest.mark.parametrize("hosts", [None, [(0, 1)]], ids=["network", "memory"])
def test_the_first_batch_has_a_part_for_each_worker(monkeypatch: pytest.MonkeyPatch, hosts: Any) -> None:
    """Also for one that begins when others have computed theirs: it would have no loss to report."""
    ended = threading.Event()

    def step(strategy: local_strategy.LocalTraining, number: int, groups: Any) -> Any:
        if strategy._context.world.rank:
            strategy._claimed._claims.meet()  # type: ignore[union-attr]
            strategy._claimed._claims.meet = lambda: None  # type: ignore[union-attr,method-assign]
            assert ended.wait(20)
        return stepped(strategy, number, groups)

    def inner_step(context: Any, batch: Any, number: int, *more: Any) -> Any:
        result = local_training.inner_step(context, batch, number, *more)
        ended.set() if number == 1 else None
        return result

    stepped = local_strategy.LocalTraining.step
    monkeypatch.setattr(local_strategy.LocalTraining, "step", step)
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    local = {"every": 4, "replicas": 2, "uneven": True}
    trained = train(mlp, 2, hosts, steps=4, strategy="diloco", local=local)
    assert all(math.isfinite(loss) for _, losses in trained for loss in losses)


@pytest.mark.parametrize("hosts", [None, [(0, 1)]], ids=["network", "memory"])
def test_outer_steps_go_on_without_a_late_worker(monkeypatch: pytest.MonkeyPatch, hosts: Any) -> None:
    """Rank 1 makes its first inner step while rank 0 makes two outer steps, and brings its difference to the third."""
    begun, ahead, back = threading.Event(), threading.Event(), threading.Event()
    made, outer, moved = list[tuple[int, int]](), dict[tuple[int, int], Any](), list[list[torch.Tensor]]()

    def inner_step(context: Any, batch: Any, step: int, groups: Any, replica: Any) -> Any:
        rank = context.world.rank
        made.append((rank, step))
        last = made.count((0, 5)) == 2
        begun.set() if rank else None
        ahead.set() if last else None
        assert (ahead if rank else back if last else begun).wait(20), f"rank {rank} is held up at {made}"
        before = [value.clone() for value in replica.weights.values()]
        result = local_training.inner_step(context, batch, step, groups, replica)
        if rank:
            moved.append([old - new for old, new in zip(before, replica.weights.values(), strict=True)])
        return result

    def step(strategy: local_strategy.LocalTraining, number: int, groups: Any) -> Any:
        back.set() if number == 5 and strategy._context.world.rank else None
        return stepped(strategy, number, groups)

    def send(steps: OuterSteps, number: int, fragment: int, known: Any, *more: Any) -> None:
        rank, weights = steps._context.world.rank, steps._context.update.parameters
        shift = [weights[name].detach() - one for name, one in steps._replicas[rank].weights.items()]
        outer[rank, number] = known, shift
        sent(steps, number, fragment, known, *more)

    sent, stepped = OuterSteps.send, local_strategy.LocalTraining.step
    monkeypatch.setattr(part_claims, "is_over", lambda all_are, enough, *_: all_are or (enough and not ahead.is_set()))
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    monkeypatch.setattr(local_strategy.LocalTraining, "step", step)
    monkeypatch.setattr(OuterSteps, "send", send)
    local = {"every": 2, "replicas": 2, "uneven": True, "quorum": 1}
    (first, _), (second, _) = train(mlp, 2, hosts, steps=6, strategy="diloco", local=local)
    assert {key: known for key, (known, _) in outer.items()} == {
        (0, 1): {0: 24.0},
        (0, 3): {0: 24.0},
        (0, 5): {0: 24.0, 1: 8.0},
        (1, 5): {0: 24.0, 1: 8.0},
    }
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(outer[1, 5][1], moved[0], strict=True))
    assert first == second


def test_a_worker_that_stays_late_gets_the_outer_weights_when_all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gone_on = threading.Event(), threading.Event()

    def inner_step(context: Any, batch: Any, step: int, groups: Any, replica: Any) -> Any:
        begun.set() if context.world.rank else None
        assert (gone_on if context.world.rank else begun).wait(20)
        return local_training.inner_step(context, batch, step, groups, replica)

    def send(outer: OuterSteps, step: int, *more: Any) -> None:
        sent(outer, step, *more)
        ranks.append(outer._context.world.rank)
        gone_on.set() if step == 3 else None

    sent, ranks = OuterSteps.send, list[int]()
    monkeypatch.setattr(OuterSteps, "send", send)
    monkeypatch.setattr(part_claims, "is_over", lambda all_are, enough, *_: enough)
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    local = {"every": 2, "replicas": 2, "uneven": True, "quorum": 1}
    (first, _), (second, _) = train(mlp, 2, None, steps=4, strategy="diloco", local=local)
    assert ranks == [0, 0] and first == second


@pytest.mark.parametrize(("at", "parts"), [(2, 1), (3, 2)], ids=["others are left", "with a whole batch"])
def test_each_part_is_trained_once_if_a_faster_worker_is_late(
    monkeypatch: pytest.MonkeyPatch, at: int, parts: int
) -> None:
    """Rank 0 would leave the second period to rank 1, which stops until rank 0 has gone on to the third."""
    begun, stopped, gone_on = threading.Event(), threading.Event(), threading.Event()
    made, steps = list[tuple[int, int]](), list[int]()  # steps of rank 1

    def inner_step(context: Any, batch: Any, step: int, groups: Any, replica: Any) -> Any:
        made.extend((step, one) for group in groups for one in group.microbatches)
        if context.world.rank:
            steps.append(step)
            stopped.set() if steps.count(at) == parts else None
            assert step < 2 or (gone_on if stopped.is_set() else begun).wait(20), f"rank 1 is held up at {made}"
        elif step >= 2:
            begun.set()
            assert stopped.wait(20), f"rank 0 is held up at {made}"
        return local_training.inner_step(context, batch, step, groups, replica)

    def step(strategy: local_strategy.LocalTraining, number: int, groups: Any) -> Any:
        result = stepped(strategy, number, groups)
        gone_on.set() if number == 4 and not strategy._context.world.rank else None
        return result

    stepped = local_strategy.LocalTraining.step
    monkeypatch.setattr(ClaimedParts, "pace", property(lambda self: (100.0, 1.0)[self._rank]))
    monkeypatch.setattr(part_claims, "is_over", lambda all_are, enough, *_: all_are or (enough and stopped.is_set()))
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    monkeypatch.setattr(local_strategy.LocalTraining, "step", step)
    local = {"every": 2, "replicas": 2, "uneven": True, "quorum": 1}
    train(mlp, 2, [(0, 1)], steps=6, strategy="diloco", local=local)
    assert sorted(made) == [(step, part) for step in range(6) for part in range(2 if step in (2, 5) else 4)]


@pytest.mark.parametrize(
    ("notice", "last", "hosts"), [(PENDING, 3, None), (0, 5, [(0, 1)])], ids=["notice", "in a row"]
)
def test_outer_steps_come_back_to_all_workers(
    monkeypatch: pytest.MonkeyPatch, notice: int, last: int, hosts: Any
) -> None:
    """After a notice, or two incomplete ones: rank 0 waits for rank 1, which goes on only then."""
    begun, awaited, outer = threading.Event(), threading.Event(), list[tuple[int, list[int]]]()

    def inner_step(context: Any, *more: Any) -> Any:
        begun.set() if context.world.rank else None
        assert (awaited if context.world.rank else begun).wait(20)
        return local_training.inner_step(context, *more)

    def arrive(claimed: ClaimedParts, step: int, *more: Any) -> list[int]:
        awaited.set() if step == last and not claimed._rank else None
        ranks = arrived(claimed, step, *more)
        outer.append((step, ranks))
        return ranks

    arrived = ClaimedParts.arrive
    monkeypatch.setattr(World, "notice", lambda _: notice)
    monkeypatch.setattr(local_strategy, "_MOST_INCOMPLETE", 2)
    monkeypatch.setattr(part_claims, "is_over", lambda all_are, enough, *_: all_are or enough)
    monkeypatch.setattr(local_strategy, "inner_step", inner_step)
    monkeypatch.setattr(ClaimedParts, "arrive", arrive)
    local = {"every": 2, "replicas": 2, "uneven": True, "quorum": 1}
    train(mlp, 2, hosts, steps=last + 1, strategy="diloco", local=local)
    alone = [(step, ranks) for step in range(1, last, 2) for ranks in ([], [0])]
    assert sorted(outer) == [*alone, *[(last, [0, 1])] * 2]
