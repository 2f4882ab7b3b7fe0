"""The order of located shards, which worker computes what, and what workers compare of their shards."""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from paceline.data import Located
from paceline.data.comparison import roundings_of
from paceline.data.keys import ORDER, seed_of
from paceline.data.located import order as order_module
from paceline.data.located import shuffled
from paceline.data.located.agreement import Holding, ShardsLost, agree
from paceline.data.located.contents import Contents
from paceline.data.located.order import LocatedOrder
from paceline.data.located.shards import ShardFacts, firsts_of
from paceline.errors import DisagreementError, InputError
from paceline.evaluation import mapping
from paceline.schedule import feistel
from paceline.schedule.placement import after, moves, place
from paceline.testing import threads
from paceline.training.recovery import lost_shards
from paceline.training.recovery.lost_shards import WorkersJoin

SIZES = {"a": 7, "b": 130, "c": 40, "d": 3, "e": 64, "f": 1, "g": 90, "h": 11}
FIRSTS = firsts_of(SIZES)
BATCH, MICROBATCHES = 32, 8
SAMPLES_OF_B = [*range(FIRSTS["b"], FIRSTS["b"] + SIZES["b"])]


def located(names: str = "abcdefgh", **changed: Any) -> dict[str, list[int]]:
    return {name: changed.get(name, [*range(FIRSTS[name], FIRSTS[name] + SIZES[name])]) for name in names}


def order_of(names: str = "abcdefgh", options: Any = {}, **changed: Any) -> LocatedOrder:  # noqa: B006
    return LocatedOrder(Located(located(names, **changed), **options), BATCH, MICROBATCHES, seed=3, exact=True)


def epoch_of(order: LocatedOrder, epoch: int = 0) -> list[list[list[int]]]:
    return [order.microbatches_of(step) for step in range(order.first_of(epoch), order.first_of(epoch + 1))]


@pytest.mark.parametrize("largest", [1 << 20, 100])
def test_an_epoch_has_every_sample_once(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr(shuffled, "LARGEST_SHUFFLE", largest)
    order, shard_of = order_of(), {FIRSTS[name] + one: name for name, size in SIZES.items() for one in range(size)}
    before, epochs = 0, [epoch_of(order, epoch) for epoch in (0, 1)]
    for epoch, steps in enumerate(epochs):
        samples = [sample for step in steps for microbatch in step for sample in microbatch]
        assert sorted(samples) == [*range(sum(SIZES.values()))]
        for step, microbatches in enumerate(steps, order.first_of(epoch)):
            assert all(len({shard_of[sample] for sample in one}) == 1 for one in microbatches)
            assert all(len(one) <= BATCH // MICROBATCHES for one in microbatches)
            assert order.samples_before(step) == before
            assert [len(one) for one in order.parts_of(step)] == [len(one) for one in microbatches]
            before += order.samples_of(step)
    assert epochs[0] != epochs[1]


def test_batches_have_microbatches_of_each_shard_in_proportion() -> None:
    """Microbatches sorted by their positions; those of a shard are as far apart in the epoch as its size says."""
    order = order_of()
    total, steps = sum(-(-size // 4) for size in SIZES.values()), epoch_of(order)
    assert [len(one) for one in steps] == [MICROBATCHES] * (total // MICROBATCHES) + [total % MICROBATCHES]
    for name, size in SIZES.items():
        counts = [sum(FIRSTS[name] <= one[0] < FIRSTS[name] + size for one in step) for step in steps]
        share = MICROBATCHES * -(-size // 4) / total
        done = [*itertools.accumulate(counts)]
        assert all(abs(now - (step + 1) * share) < 2 for step, now in enumerate(done[:-1])), (name, counts)


def test_workers_have_one_order_and_compute_what_they_have() -> None:
    whole, held = order_of(), ["abc", "bcdeh", "fgh"]
    steps = epoch_of(whole)

    def meet(world: Any) -> list[tuple[tuple[int, ...], ...] | None]:
        order = order_of(held[world.rank])
        order.meet(world, "start")
        assert epoch_of(order) == steps and order.samples_of(3) == whole.samples_of(3)
        at, (microbatch,) = order.example(2)
        (own,) = (order.microbatches_of(at)[one] for one in microbatch)
        assert [order._data[sample] for sample in own] == own
        assert len([*order._data]) == len(order._data) == sum(SIZES[name] for name in held[world.rank])
        for number in (-1, sum(SIZES.values()), FIRSTS["faa"[world.rank]]):
            with pytest.raises(InputError, match=f"no sample {number} on this worker"):
                order._data[number]
        return [order.holders_of(step) for step in range(len(steps))]

    first, *others = threads.run(3, meet)
    assert all(one == first for one in others)
    for holders, microbatches in zip(first, steps, strict=True):
        names = [next(name for name in SIZES if one[0] - FIRSTS[name] in range(SIZES[name])) for one in microbatches]
        assert holders == tuple(tuple(rank for rank in range(3) if name in held[rank]) for name in names)


def test_samples_are_read_in_one_call_from_shards_that_can() -> None:
    asked = list[list[int]]()

    class Table(list[int]):
        def __getitems__(self, samples: list[int]) -> list[int]:
            asked.append(samples)
            return [self[sample] for sample in samples]

    order = order_of(b=Table(located("b")["b"]))
    for step in epoch_of(order):
        for numbers in step:
            assert order._data.__getitems__(numbers) == numbers
    counts = [len(samples) for samples in asked]
    assert sum(counts) == SIZES["b"] and max(counts) == BATCH // MICROBATCHES, "a microbatch in one call"
    assert order._data.__getitems__([0, 1, 7, 9, 2]) == [0, 1, 7, 9, 2] and asked[-1] == [0, 2]
    with pytest.raises(IndexError) as raised:
        order._data.shards["b"].clear()
        order._data.__getitems__([7])
    assert raised.value.__notes__ == ["Shard 'b' was asked for its samples 0."]


def test_the_placement_ends_as_early_as_possible() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        workers = drawn.randint(1, 4)
        every = [drawn.sample(range(workers), drawn.randint(1, workers)) for _ in range(drawn.randint(1, 6))]
        holders = tuple(tuple(sorted(ranks)) for ranks in every)
        speeds = tuple(drawn.choices([1, 2, 3], k=workers)) if drawn.random() < 0.5 else (1,) * workers
        placed = place(holders, workers, speeds)
        assert sorted(itertools.chain(*placed)) == [*range(len(holders))]
        assert all(rank in holders[one] for rank, own in enumerate(placed) for one in own)
        ends = (
            max(count / speeds[rank] for rank, count in Counter(one).items()) for one in itertools.product(*holders)
        )
        assert max(len(own) / speed for own, speed in zip(placed, speeds, strict=True)) == min(ends), (holders, placed)
    assert place(((0,), (0, 1, 2, 3), (0, 1)), 4) == ((0,), (2,), (1,), ())  # 1 moves on, as 0 has no other holder
    assert place(((0, 1, 2, 3),) * 8, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))  # adjacent sums are sent as one
    assert place(((1,), (0, 1), (0, 1), (0, 1)), 2) == ((2, 3), (0, 1))


def test_samples_travel_until_no_worker_has_more_than_an_even_share() -> None:
    drawn = random.Random(2)
    for _ in range(300):
        workers, count = drawn.randint(1, 5), drawn.randint(1, 12)
        holders = tuple(
            tuple(sorted(drawn.sample(range(workers), drawn.choice([1, 1, workers])))) for _ in range(count)
        )
        sent = {one.microbatch: one for one in moves(holders, workers)}
        assert all(one.reader in holders[at] and one.worker not in holders[at] for at, one in sent.items())
        placed = place(after([*sent.values()], holders), workers)
        assert max(map(len, placed)) == -(-count // workers), (holders, sent)
        assert all(at in placed[one.worker] for at, one in sent.items()), (holders, sent)
    assert moves(((0, 1),) * 8, 2) == ()


@pytest.mark.parametrize(
    ("faster", "warm", "held"), [(0.5, 1.0, ""), (0.99, 1.0, ""), (1.0, 2.0, ""), (0.5, 1.0, "abcdefgh")]
)
def test_samples_are_sent_from_a_step_that_no_worker_has_asked_for_if_steps_then_take_less_time(
    monkeypatch: pytest.MonkeyPatch, faster: float, warm: float, held: str
) -> None:
    """Rank 0 has asked for more steps than rank 1, and rank 1 is slower. The first steps may be slow for other reasons.

    A run that is resumed goes on with the choice if its workers have the shards then, whatever their ranks.
    """
    clock = threading.local()
    monkeypatch.setattr(order_module, "perf_counter", lambda: clock.now)
    held, options = ["abcdefgh", held], {"move": "auto"}

    def train(world: Any, state: Any = None, ranks: Any = (0, 1)) -> tuple[list[bool], list[str], dict[str, Any]]:
        order, told = order_of(held[ranks[world.rank]], options), list[str]()
        if state is not None:
            order.load(state)
        order.meet(world, "start")
        clock.now, sent, asked = 0.0, list[bool](), dict[int, bool]()
        for step in range(45):
            ahead = range(step, step + (4 if world.rank == 0 else 2))
            asked |= {one: one in order._choice.sending for one in ahead if one not in asked}
            events: Any = SimpleNamespace(mark=lambda _, text: told.append(text))
            for phase in range(2):
                clock.now += 0.1 * phase
                order.choose(step, ahead[-1], events)
            sent.append(step in order._choice.sending)
            assert sent[-1] == asked[step], "a change of a step that was asked for"
            seconds = faster if sent[-1] else warm if step < 13 else 1.0
            clock.now += seconds * (1.0 if world.rank == 0 else 1.5) + 50 * (step == 3) - 0.1
        return sent, told, order.state(45)

    (sent, told, state), other = threads.run(2, train)
    assert (sent, told, state) == other
    if held[1]:
        assert not any(sent) and not told and not state["choices"]
        return
    sends = faster < 0.97
    assert sent[:39] == [False] * 13 + [True] * 13 + [False] * 13 and sent[39:] == [sends] * 6, sent
    assert re.search(r"from step 13 on, samples are sent on trial.* share is 2\.\d times", told[0]), told
    assert len(told) == 2 + (faster < 0.97 * warm) and f"{faster:.2f} times" in told[-1], told
    assert [*state["choices"].values()] == [sends]

    def resumed(*ranks: int) -> list[Any]:
        return threads.run(len(ranks), lambda world: train(world, state if world.rank else None, ranks))

    for sent, told, again in resumed(0, 1) + resumed(1, 0):
        assert sent == [sends] * 45 and not told and again["choices"] == state["choices"]
    tried = resumed(0, 1, 1)  # with another worker that has no shard
    assert all(len(told) > 1 and len(again["choices"]) == 2 and again == tried[0][2] for _, told, again in tried)


def test_training_goes_on_without_a_lost_shard_until_a_worker_has_it_again() -> None:
    whole, marks, options = epoch_of(order_of()), list[str](), {"lost": "leave out", "move": "samples"}
    lost = {*range(FIRSTS["b"], FIRSTS["b"] + SIZES["b"]), *range(FIRSTS["h"], FIRSTS["h"] + SIZES["h"])}
    left = [[one for one in step if not lost.intersection(one)] for step in whole]
    orders = order_of("acdefg", options), order_of("bdh", options)

    def met(world: Any) -> list[list[list[int]]]:
        order, events = orders[world.rank], SimpleNamespace(mark=lambda _, text, **__: marks.append(text))
        lost_shards.meet(SimpleNamespace(world=world, order=order, events=events), "start")  # type: ignore[arg-type]
        return epoch_of(order)

    assert threads.run(2, met) == [whole] * 2 and not marks
    assert threads.run(1, met) == [left] and orders[0].exchange is None  # what a lost worker sends never arrives
    assert "continues without shards" in marks[0] and "'b' of rank 1" in marks[0] and "'h' of rank 1" in marks[0]
    assert orders[0].samples_of(0) == sum(map(len, left[0])) < sum(map(len, whole[0]))
    assert threads.run(2, met) == [whole] * 2

    only = order_of("fb", options), order_of("b", options)
    threads.run(2, lambda world: only[world.rank].meet(world, "start"))
    only = only[0:1]
    only[0]._own = {"f": only[0]._own["f"]}
    threads.run(1, lambda world: only[0].meet(world, "start", without=True))
    with pytest.raises(InputError, match=r"No worker still has a sample of step \d+"):
        epoch_of(only[0])


@pytest.mark.parametrize(("joins", "elastic"), [(False, True), (True, True), (True, False)])
def test_workers_wait_together_for_lost_shards(joins: bool, elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They re-form if one of them knows of a worker that joins. Else they stop when rank 0 has waited long enough.

    If no worker can join, they stop at once.
    """
    monkeypatch.setattr(lost_shards.env, "launch_info", lambda: SimpleNamespace(elastic=elastic))
    orders = [order_of(names, {"wait_seconds": 36_000 if joins else 0.01}) for names in ("ab", "cd", "e")]
    threads.run(3, lambda world: orders[world.rank].meet(world, "start"))
    told = list[str]()

    def wait(world: Any) -> None:
        world.coordinator = SimpleNamespace(
            pending=world.generation + (joins and world.rank == 1), alarm=-1, generation=0
        )
        events = SimpleNamespace(mark=lambda *_, text, **__: told.append(text))
        with pytest.raises((WorkersJoin, InputError)) as raised:
            lost_shards.meet(SimpleNamespace(world=world, order=orders[world.rank], events=events), "start")  # type: ignore[arg-type]

        assert raised.type is (WorkersJoin if joins and elastic else ShardsLost)

    threads.run(2, wait)
    if joins and elastic:
        assert re.match(r"waiting at most 3\d{4} s \(wait_seconds\) for shards", told[0]), "with all its digits"
        for order in orders[:2]:  # in the next membership, which forms ten thousand seconds later
            order.lost_since = {name: since - 10_000 for name, since in order.lost_since.items()}
        threads.run(2, wait)
        assert re.match(r"waiting at most 2\d{4} s", told[-1]), "from the loss, not from the membership"


A, B, LONGER, OTHER = (ShardFacts(*one) for one in ((5, "x", "x"), (5, "y", "y"), (6, "x", "x"), (5, "z", "z")))
NOTHING = Holding({}, {}, {}, {})
RUN = Holding({"a": A, "b": B}, {"a": "rank 0 (m)", "b": "rank 1 (n)"}, {}, {})


@pytest.mark.parametrize(
    ("everyone", "error", "text"),
    [
        ([("m", {"a": A}, NOTHING), ("n", {"a": OTHER}, NOTHING)], DisagreementError, "rank 1.*but other values"),
        ([("m", {"a": A}, NOTHING), ("n", {"a": LONGER}, NOTHING)], DisagreementError, "5 samples and 6 samples"),
        ([("m", {"a": A}, NOTHING), ("n", {"b": A}, NOTHING)], InputError, "'a' of rank 0.*'b' of rank 1.*twice"),
        ([("m", {"a": A}, RUN)], InputError, r"No worker still has these.* 'b' of rank 1 \(n\)\. "),
        ([("m", {}, RUN)], ShardsLost, r"No worker still has these.* 'a' of rank 0 \(m\), 'b' of rank 1"),
        ([("m", {}, NOTHING)], InputError, r"No worker has a shard of the Located data"),
        ([("m", {"a": A, "b": B}, RUN), ("n", {"c": OTHER}, NOTHING)], InputError, "'c' of rank 1.*is not part"),
        ([("m", {"a": LONGER, "b": B}, RUN)], InputError, "'a' has changed.*5 samples and 6 samples"),
        ([("m", {"a": A}, RUN), ("n", {"b": OTHER}, NOTHING)], InputError, "'b' has changed"),
    ],
)
def test_shards_that_do_not_fit_are_refused(everyone: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        agree(everyone)


def test_parquet_files_are_compared_by_their_footers(tmp_path: Path) -> None:
    """Sample 14 of 30 differs, which is not one of the samples that workers compare."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def meet(world: Any, own: str) -> None:
        path, values = tmp_path / own / str(world.rank), [*range(30)]
        values[14] += 100 * (own == "other" and world.rank)
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"x": values}), path)
        order_of("a", a=paceline.ParquetDataset(path)).meet(world, "start")

    threads.run(2, lambda world: meet(world, "same"))
    with pytest.raises(DisagreementError, match=r"Shard 'a' is not the same .* 30 samples each, but other values"):
        threads.run(2, lambda world: meet(world, "other"))


class Noisy(list[Any]):
    """Samples that are not the same each time."""

    reads = 0

    def __getitem__(self, number: Any) -> Any:
        self.reads += 1
        return super().__getitem__(number) + random.Random().random() * (number % 9 == 4)


class Broken(list[Any]):
    """Samples of which only the first few in the order of the comparison can be read."""

    def __getitem__(self, number: Any) -> Any:
        if number not in READABLE:
            raise OSError(number)
        return super().__getitem__(number)


READABLE = feistel.permute(0, 5, 40, seed_of(ORDER, 3))


class Once(list[Any]):
    """Samples that can be read only once."""

    def __getitem__(self, number: Any) -> Any:
        found = super().__getitem__(number)
        self[number] = None
        if found is None:
            raise OSError(number)
        return found


def differing(exact: bool, *shards: Any, joined: tuple[int, ...] = ()) -> list[Any]:
    """Compare shards of two or more workers, and return what each of them finds."""

    def compare(world: Any) -> Any:
        contents = Contents(Located(shards[world.rank]), 3, exact=exact)
        every = {name: tuple(rank for rank, own in enumerate(shards) if name in own) for name in "ab"}
        found = [contents.compare(world, every, "start", joined) for _ in range(2)]
        assert found[0] == found[1]
        return found[0]

    first, *others = threads.run(len(shards), compare)
    assert all(one == first for one in others)
    return [tuple(one) for one in first]


def test_a_sample_that_differs_in_another_copy_is_named() -> None:
    """Of two pairs of holders. Sample 14 is not one of those that every start compares."""
    values = [torch.randn(6) for _ in range(300)]
    other = [one.clone() for one in values]
    other[14][3] += 0.1
    same, differs = {"a": [*values]}, {"a": other}
    for exact in (True, False):
        assert differing(exact, {"a": values, "b": values}, same, {"b": values}) == []
        assert differing(exact, same, {"b": values}, differs) == [("a", 0, 2, 14)]
        assert differing(exact, {"b": values}, differs, same, joined=(1,)) == [("a", 2, 1, 14)]
        for scalars in ([0.5] * 40, [5] * 40, ["five"] * 40):
            changed: list[Any] = [*scalars]
            changed[21] = scalars[0] + scalars[0]
            assert differing(exact, {"a": scalars}, {"a": changed}) == [("a", 0, 1, 21)]


def test_rounding_errors_and_noise_are_no_difference_of_samples() -> None:
    values = [torch.randn(6) for _ in range(100)] + [torch.zeros(2), torch.tensor(float("nan")), torch.zeros(0)]
    rounded = [value * (1 + 1e-7) for value in values]
    assert differing(False, {"a": values}, {"a": rounded}) == []
    assert len(differing(True, {"a": values}, {"a": rounded})) == 1
    noisy = [Noisy([0.0] * 40) for _ in range(2)]
    assert differing(True, {"a": noisy[0]}, {"a": noisy[1]}) == []
    assert all(one.reads == 40 + 4 for one in noisy), "not again at the second comparison"
    assert differing(True, {"a": [*range(40)]}, {"a": Once(range(1, 41))}) == [], "left to the audits"


def test_samples_are_compared_as_far_as_all_have_read_them() -> None:
    other = [*range(40)]
    other[last := feistel.permute(5, 6, 40, seed_of(ORDER, 3))[0]] += 100
    assert differing(True, {"a": [*range(40)]}, {"a": other}) == [("a", 0, 1, last)]
    assert differing(True, {"a": [*range(40)]}, {"a": Broken(other)}) == []
    assert differing(True, {"a": [*range(40)]}, {"a": Broken(range(1, 41))}) == [("a", 0, 1, READABLE[0])]


def test_a_worker_that_joins_with_other_samples_is_refused() -> None:
    """Two workers have the shards. Each has read its own before the third one joins with another sample 14."""
    orders = order_of("ab"), order_of("ab"), order_of("b", b=[*SAMPLES_OF_B[:14], 0, *SAMPLES_OF_B[15:]])
    threads.run(2, lambda world: orders[world.rank].meet(world, "start"))
    text = r"Shard 'b' is not the same on rank 0 .* and rank 2 .*: sample 14 has different values"
    for found in threads.run(3, lambda world: orders[world.rank].strangers(world, [2], "start")):
        assert [*found] == [2] and re.match(text, found[2])
    with pytest.raises(DisagreementError, match=text):
        threads.run(3, lambda world: orders[world.rank].meet(world, "start"))
    threads.run(2, lambda world: orders[world.rank].meet(world, "start"))


def test_a_digest_that_an_earlier_version_saved_is_a_prefix() -> None:
    """Without what this version adds, such as the footers of Parquet files. Workers of a run do not differ so."""
    longer = A._replace(digest="x and more")
    agree([("m", {"a": longer, "b": B}, RUN)])
    with pytest.raises(InputError, match="'a' has changed"):
        agree([("m", {"a": longer._replace(digest="more x"), "b": B}, RUN)])
    with pytest.raises(DisagreementError):
        agree([("m", {"a": longer, "b": B}, RUN), ("n", {"a": A}, NOTHING)])


def test_a_state_has_the_shards_of_the_run() -> None:
    def train_on(world: Any, state: dict[str, Any] | None, **changed: Any) -> dict[str, Any]:
        order = order_of(**changed)
        if state is not None:
            order.load(state)
        order.meet(world, "start")
        return order.state(4)

    (state,) = threads.run(1, lambda world: train_on(world, None))
    assert threads.run(1, lambda world: train_on(world, state)) == [state]
    with pytest.raises(InputError, match=r"Shard 'c' has changed.* 40 samples and 39 samples"):
        threads.run(1, lambda world: train_on(world, state, c=[*range(39)]))


def test_a_repeated_map_has_the_shards_of_the_call() -> None:
    """Workers divide the shards by length and keep their results. A shard that a loss has taken is named."""
    held = ["abcd", "bcde", "efgh"]
    known = [mapping.Known() for _ in held]

    def divide(world: Any, *ranks: int) -> str:
        context: Any = SimpleNamespace(world=world, settings=SimpleNamespace(seed=0, exact=True))
        rank = ranks[world.rank]
        shards = Located({name: [*range(FIRSTS[name], FIRSTS[name] + SIZES[name])] for name in held[rank]})
        share = mapping._own(context, shards, known[rank])
        known[rank].results.update(dict.fromkeys(share))
        return "".join(name[-2] for name, _ in share.values())

    assert threads.run(3, lambda world: divide(world, 0, 1, 2)) == ["acd", "b", "efgh"]
    with pytest.raises(InputError, match=r"No worker still has these .* 'f' of rank 2 .*, 'g' of rank 2"):
        threads.run(2, lambda world: divide(world, 0, 1))
    held[0], known[0] = "abcdefgh", mapping.Known()  # a worker that has joined, and has no result
    assert threads.run(2, lambda world: divide(world, 0, 1)) == ["afgh", "cde"]


def test_roundings_of_samples_with_infinite_and_huge_values() -> None:
    def found(*values: float) -> list[tuple[str, ...]]:
        return roundings_of((torch.tensor(values, dtype=torch.float64), 1))

    usual = found(0.5, -math.inf, math.nan, 1e200)
    assert all({*a} & {*b} for a, b in zip(usual, found(0.5, -math.inf, math.nan, 1e200 * (1 + 1e-12)), strict=True))
    assert usual[1] != found(0.5, math.inf, math.nan, 1e200)[1], "an infinity of the other sign is no rounding error"
