"""Sums over workers: the bits are those of the canonical tree in every way to bring them together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_world import ThreadWorld, run

from paceline.comm.reduction import choice, collective, link_rates
from paceline.comm.reduction.buckets import Layout, cut, pack, split
from paceline.comm.reduction.choice import Wanted, reduction_for
from paceline.comm.reduction.collective import CollectiveExchange
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.division import divide, divide_all
from paceline.comm.reduction.exchange import TAGS, Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.hierarchical import HierarchicalExchange
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.comm.transport.gloo import Gloo
from paceline.coordinator.types import Membership
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.schedule.shares import even
from paceline.schedule.tree import Node, push, total

EXAMPLES = [
    torch.zeros(5, 7),
    torch.zeros(4, 3).t(),
    torch.zeros(150),
    torch.zeros(9, dtype=torch.float64),
    torch.zeros(1),
    torch.zeros(40, 40, dtype=torch.float64),
    torch.zeros(3),
]
LEAVES = 7
COUNT = 11.0


class Facts(EventLog):
    """Events, kept."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.all: list[dict[str, Any]] = []

    def mark(self, event: str, **fields: object) -> None:
        self.all.append({"event": event, **fields})


def leaf(step: int, microbatch: int, member: int) -> torch.Tensor:
    """The gradient of a tensor in a microbatch; sums of these round differently in each order."""
    chance = torch.Generator().manual_seed(1000 * step + 10 * microbatch + member)
    example = EXAMPLES[member]
    value = torch.randn(example.shape, generator=chance, dtype=torch.float64)
    return (value * 10.0 ** (microbatch % 5)).to(example.dtype)


def mean(step: int, member: int) -> torch.Tensor:
    leaves = [(Node(0, microbatch), leaf(step, microbatch, member)) for microbatch in range(LEAVES)]
    return total(leaves, torch.add).div_(COUNT)


def held(step: int, share: range, member: int) -> list[tuple[Node, torch.Tensor]]:
    stack: list[tuple[Node, torch.Tensor]] = []
    for microbatch in share:
        push(stack, Node(0, microbatch), leaf(step, microbatch, member), torch.add)
    return stack


def shares_of(step: int, size: int) -> list[range]:
    """In the first step the last worker has the most, in the second one the first; then all have alike."""
    if size == 1 or step == 2:
        return even(LEAVES, size)
    most = [range(0, 5), range(5, LEAVES)] + [range(0)] * (size - 2)
    return most if step else [range(0)] * (size - 2) + [range(0, 2), range(2, LEAVES)]


Make = Callable[[ThreadWorld, Facts], Reduction]


def reduce(world: ThreadWorld, make: Make, members: Sequence[int] = range(len(EXAMPLES))) -> dict[str, Any]:
    """Three steps of a reduction: the means of each, and how many bytes it says to have sent in each bucket."""
    facts, means, order = Facts(), [], list[list[int]]()
    reduction = make(world, facts)
    assert reduction.members == len(EXAMPLES)
    for step in range(3):
        shares = shares_of(step, world.size)
        nodes = [[node for node, _ in held(step, share, 0)] for share in shares]
        asked: list[int] = []
        reduction.begin(nodes)
        for member in members:
            for slot, (_, value) in zip(reduction.slots(member), held(step, shares[world.rank], member), strict=True):
                slot.copy_(value)
            reduction.written(member)
            if reduction.needs_divisor:
                asked.append(member)
                reduction.divide_by(COUNT)
        arrived: list[int] = []
        reduction.finish(lambda views, arrived=arrived: arrived.append(len(views)))  # type: ignore[misc]
        order.append(arrived)
        assert len(asked) == 1
        means.append([reduction.mean(member).clone() for member in members])
        assert all(reduction.mean(member).stride() == EXAMPLES[member].stride() for member in members)
    assert all(sum(arrived) == len(EXAMPLES) for arrived in order)
    exchanges = [one for one in facts.all if one["event"] == "exchange"]
    buckets = reduction.describe()["buckets"]
    assert [one["bucket"] for one in exchanges] == [*range(int(buckets))] * 3
    said = sum(one["bytes"] for one in exchanges)
    kind, freed = reduction.kind, weakref.ref(reduction)
    del reduction
    assert freed() is None, "its memory, and that of others that it maps, would wait for the garbage collector"
    return {"means": means, "said": said, "sent": world.bytes_sent, "kind": kind, "buckets": buckets}


def assert_means(found: list[dict[str, Any]], ranks: Sequence[int] | None = None) -> None:
    for rank in range(len(found)) if ranks is None else ranks:
        for step, means in enumerate(found[rank]["means"]):
            for member, value in enumerate(means):
                assert torch.equal(value, mean(step, member)), (rank, step, member)


def over(exchange: Exchange, world: Any, facts: Facts, name: str = "gradients", size: int | None = 600) -> Reduction:
    return Reduction(world, exchange, EXAMPLES, facts, name, size)


def plain(world: Any, facts: Facts) -> Reduction:
    return over(DirectExchange(world, tags=3 * TAGS), world, facts)


def in_memory(world: Any, facts: Facts) -> Reduction:
    return over(SharedMemoryExchange(world.shared_memory), world, facts)


def hierarchical(world: Any, facts: Facts) -> Reduction:
    return over(HierarchicalExchange(world, world.host_memory), world, facts)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_over_the_network(size: int) -> None:
    found = run(size, lambda world: reduce(world, plain))
    assert_means(found)
    assert all(one["said"] == one["sent"] and one["buckets"] == 3 for one in found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_shared_memory(size: int) -> None:
    found = run(size, lambda world: reduce(world, in_memory), hosts=[tuple(range(size))])
    assert_means(found)
    assert all(one["sent"] == 0 and one["kind"] == "tree in shared memory" for one in found)


@pytest.mark.parametrize("machines", [[(0, 1), (2, 3)], [(0, 1, 2), (3,)], [(0,), (1, 2), (3, 4)]], ids=str)
def test_on_several_machines(machines: list[tuple[int, ...]]) -> None:
    found = run(sum(map(len, machines)), lambda world: reduce(world, hierarchical), hosts=machines)
    assert_means(found)
    assert all(one["said"] == one["sent"] for one in found)


@pytest.mark.parametrize(
    ("make", "machines"),
    [(plain, None), (in_memory, [(0, 1, 2, 3)]), (hierarchical, [(0, 1), (2, 3)])],
    ids=["network", "memory", "machines"],
)
def test_nobody_waits_for_others_before_the_divisor(make: Make, machines: list[tuple[int, ...]] | None) -> None:
    """It comes with the step of each worker; one in another step would never send its part."""
    written = threading.Event()

    def act(world: Any) -> tuple[bool, list[torch.Tensor]]:
        reduction = make(world, Facts())
        reduction.begin([[Node(0, rank)] for rank in range(world.size)])
        if world.rank:
            assert written.wait(60)
        for member in range(len(EXAMPLES)):
            reduction.slots(member)[0].fill_(world.rank)
            reduction.written(member)
        needed = reduction.needs_divisor
        written.set()
        reduction.divide_by(4.0)
        reduction.finish()
        return needed, [reduction.mean(member).clone() for member in range(len(EXAMPLES))]

    for needed, means in run(4, act, hosts=machines):
        assert needed and all(bool((one == 1.5).all()) for one in means)


def test_ranks_dealt_to_machines_in_turn() -> None:
    found = run(4, lambda world: reduce(world, hierarchical), hosts=[(0, 2), (1, 3)])
    assert_means(found)


def test_more_sums_than_tags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.reduction.hierarchical.TAGS", 7)

    def act(world: Any) -> None:
        with pytest.raises(ConfigError, match="has 3 sums to send, each in 2 parts: more than the 5 messages"):
            hierarchical(world, Facts()).begin([[Node(0, 0)], [Node(0, 2), Node(0, 4)], [Node(0, 6)], [Node(0, 8)]])

    run(4, act, hosts=[(0, 1), (2, 3)])


def test_machines_with_slow_links_add_up_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_link_shares", lambda *_: [0.6, 0.4, 0.0])

    def unequal(world: Any, facts: Facts) -> Reduction:
        world.membership = replace(world.membership, hosts=((0,), (1, 3), (2,)))
        return reduction_for(world, EXAMPLES, facts, "gradients", wanted=Wanted(megabytes=0.0006))

    found = run(4, lambda world: reduce(world, unequal))
    assert_means(found)
    assert all(one["said"] == one["sent"] for one in found)

    def cuts(world: Any) -> list[int]:
        world.membership = replace(world.membership, hosts=((0,), (1, 3), (2,)))
        return reduction_for(world, [torch.zeros(1600)], Facts(), "")._buckets[0].cuts

    assert run(4, cuts) == [[0, 960, 1280, 1280, 1600]] * 4


def test_machines_cut_unequally() -> None:
    def unequal(world: Any, facts: Facts) -> Reduction:
        return over(HierarchicalExchange(world, world.host_memory, shares=[0.25, 0.75]), world, facts)

    assert_means(run(3, lambda world: reduce(world, unequal), hosts=[(0, 1), (2,)]))


def test_the_back_end_adds_up_by_itself() -> None:
    def act(world: Any) -> list[list[torch.Tensor]]:
        reduction, means = over(CollectiveExchange(world), world, facts := Facts()), []
        for step in range(2):
            nodes = [[Node(0, 0)], [Node(0, 1)], []]
            reduction.begin(nodes, COUNT)
            for member in range(len(EXAMPLES)):
                for slot in reduction.slots(member):
                    slot.fill_(world.rank + step + 1)
                reduction.written(member)
            reduction.finish()
            means.append([reduction.mean(member).clone() for member in range(len(EXAMPLES))])
        assert facts.all[0]["bytes"] == 2 * 2 * reduction._buckets[0].flats[0].nbytes // 3
        return means

    for means in run(3, act):
        for step, values in enumerate(means):
            for value, example in zip(values, EXAMPLES, strict=True):
                assert torch.equal(value, torch.full_like(example, 3 + 2 * step).div_(COUNT))


HOMES = [0, 1, 1, 0, 2, 1, 0]


def test_pushes_through_memory_have_their_mean_at_the_server() -> None:
    def pushes(world: Any, facts: Facts) -> Reduction:
        return over(SharedMemoryExchange(world.shared_memory, HOMES), world, facts, "pushes", None)

    for rank, one in enumerate(run(3, lambda world: reduce(world, pushes), hosts=[(0, 1, 2)])):
        for step, means in enumerate(one["means"]):
            assert all(torch.equal(means[at], mean(step, at)) for at, home in enumerate(HOMES) if home == rank)


def test_pushes_over_the_network_have_their_mean_at_the_server_and_its_copy() -> None:
    copies = {0: [1], 1: [2, 3]}

    def pushes(world: Any, facts: Facts) -> Reduction:
        return over(DirectExchange(world, 5 * TAGS, homes=HOMES, copies=copies), world, facts, "pushes", None)

    for rank, one in enumerate(run(4, lambda world: reduce(world, pushes))):
        for step, means in enumerate(one["means"]):
            for member, home in enumerate(HOMES):
                if rank in (home, *copies.get(home, ())):
                    assert torch.equal(means[member], mean(step, member))
        assert one["said"] == one["sent"]


def test_the_reduction_that_fits_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(world: Any, wanted: Wanted | None = None) -> tuple[str, int | str]:
        reduction = reduction_for(world, EXAMPLES, Facts(), "gradients", wanted=wanted)
        return reduction.kind, reduction.describe()["bucket_bytes"]

    def act(world: Any) -> list[tuple[str, int | str]]:
        return [kind(world, one) for one in (None, Wanted("auto", 0.001), Wanted("collective", 2.0), Wanted())]

    assert run(2, act, hosts=[(0, 1)])[0] == [
        ("tree in shared memory", 5 * 2**20),
        ("tree in shared memory", 1000),
        ("collective", 2_000_000),
        ("tree in shared memory", 5 * 2**20),
    ]
    assert [one for one, _ in run(3, act, hosts=[(0, 1), (2,)])[0]] == [
        "hierarchical tree", "hierarchical tree", "collective", "hierarchical tree",
    ]  # fmt: skip
    assert run(2, act)[1][0][0] == "tree"

    def latencies(world: Any) -> list[dict[str, Any]]:
        facts = Facts()
        for _ in range(2):
            reduction_for(world, EXAMPLES, facts, "gradients")
        assert all(one["seconds"] == world.latency > 0 for one in facts.all)
        return facts.all

    assert [len(one) for one in run(2, latencies)] == [1, 1], "it is measured once"
    assert run(2, latencies, hosts=[(0, 1)]) == [[], []], "no network"

    def on_gpus(world: Any) -> list[dict[str, Any]]:
        world.host_memory = None
        return latencies(world)

    assert run(2, on_gpus, hosts=[(0, 1)]) == [[], []], "no network either, but no memory that can be shared"
    ordered = SimpleNamespace(capabilities=SimpleNamespace(ordered=True, blocking_wait=False))

    def act_ordered(world: Any) -> list[tuple[str, int | str]]:
        world.transport = ordered
        return [kind(world, one) for one in (Wanted("auto"), Wanted("tree"))]

    assert run(3, act_ordered)[0] == [("collective", 25 * 2**20), ("tree", 5 * 2**20)]


def test_links_are_measured_again_until_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts()
    world = SimpleNamespace(hosts=((0,), (1,), (2,)), transport=Gloo(same_host=False), link_shares=None)
    rates = iter([[9e6, 1e6, 8e6], [8e6, 9e6, 9e6], [1e6, 1e6, 1e6], [9e6, 4e6, 9e6], [8e6, 3e6, 8e6], [1.0, 2e6, 1.0]])
    monkeypatch.setattr(choice, "measure_links", lambda _: next(rates))
    large = choice._WORTH_MEASURING
    assert choice._link_shares(world, large, facts) == []  # type: ignore[arg-type]
    assert facts.all == [{"event": "links", "megabytes_per_second": [9.0, 9.0, 9.0], "shares": facts.all[0]["shares"]}]
    assert choice._link_shares(world, large, facts) == []  # type: ignore[arg-type]
    assert len(facts.all) == 1, "measured once for a membership"
    next(rates)
    world.link_shares = None
    shares = choice._link_shares(world, large, facts)  # type: ignore[arg-type]
    assert facts.all[1]["megabytes_per_second"] == [9.0, 4.0, 9.0]
    assert shares == facts.all[1]["shares"] and shares[1] < shares[0] and sum(shares) == pytest.approx(1.0)
    monkeypatch.setattr(choice, "measure_links", None)
    assert choice._link_shares(world, large - 1, facts) == []  # type: ignore[arg-type]
    world.hosts = ((0,), (1,))
    assert choice._link_shares(world, large, facts) == []  # type: ignore[arg-type]


def test_every_link_is_measured_with_two_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: set[tuple[int, int, int]] = set()

    def exchange(world: Any, target: int, source: int) -> float:
        pairs.add((world.rank, target, source))
        return 100.0 if 3 in (world.rank, source) else 1.0 + world.rank

    monkeypatch.setattr(link_rates, "_exchange", exchange)
    hosts = [(0, 1), (2,), (3,), (4,)]
    rates = run(5, link_rates.measure_links, hosts=None)
    assert all(len(one) == 5 for one in rates)
    pairs.clear()

    def act(world: Any) -> list[float]:
        world.membership = replace(world.membership, hosts=hosts)
        return link_rates.measure_links(world)

    rates = run(5, act)
    assert pairs == {(0, 2, 4), (0, 3, 3), (2, 3, 0), (2, 4, 4), (3, 4, 2), (3, 0, 0), (4, 0, 3), (4, 2, 2)}
    assert rates == [[100.0, 100.0, 100.0, 100.0]] * 5


def test_an_exchange_over_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()

    def tick() -> float:
        clock.now = getattr(clock, "now", 1.0) + 0.5
        return clock.now  # type: ignore[no-any-return]

    monkeypatch.setattr(link_rates, "perf_counter", tick)
    assert run(2, lambda world: link_rates._exchange(world, 1 - world.rank, 1 - world.rank)) == [2**22] * 2


def test_tensors_are_packed_by_type_and_size() -> None:
    tensors = [torch.zeros(10), torch.zeros(5), torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)]
    assert split(tensors, 60) == [[0, 1], [2], [3], [4]]
    assert split(tensors, 61) == [[0, 1, 2], [3], [4]]
    assert split(tensors, 40) == [[0], [1, 2], [3], [4]]
    assert split(tensors, 60, neighbors=False) == [[0, 1], [3], [2, 4]]
    assert split(tensors, 40, neighbors=False) == [[0], [3], [1, 2, 4]]
    assert cut(100, [0.5, 0.5]) == [0, 48, 100]
    assert cut(30, [0.9, 0.05, 0.05]) == [0, 30, 30, 30]


def test_a_bucket_for_a_server_is_one_chunk() -> None:
    tensors = [torch.zeros(8, dtype=torch.float64), torch.zeros(24), torch.zeros(1), torch.zeros(20)]
    packed = pack(tensors, Layout(600, [0.25] * 4, homes=[1, 3, 0, 3]), 600)
    assert [(bucket.members, bucket.home) for bucket in packed] == [([0], 1), ([2], 0), ([1, 3], 3)]
    assert [bucket.cuts for bucket in packed] == [[0, 0, 8, 8, 8], [0, 16, 16, 16, 16], [0, 0, 0, 0, 64]]


def test_buckets_of_the_back_end_begin_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "FIRST_BUCKET", 400)
    tensors = [torch.zeros(100) for _ in range(8)]
    (layout,) = run(1, lambda world: CollectiveExchange(world).layout)
    assert [bucket.members for bucket in pack(tensors, layout, 1200)] == [[0], [1, 2, 3], [4, 5, 6], [7]]


def test_buckets_are_larger_with_many_workers() -> None:
    def full(size: int) -> int:
        def act(world: Any) -> int:
            world.membership = Membership(size=size)
            return DirectExchange(world).layout.bucket_bytes

        return run(1, act)[0]

    assert [full(size) for size in (1, 10, 11, 50, 51)] == [5 * 2**20, 5 * 2**20, 11 * 2**19, 25 * 2**20, 25 * 2**20]


def test_sums_of_half_types_are_divided_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        value, divisor = torch.full((3,), 60000.0).to(dtype), torch.tensor(70001.0)
        expected = value.float().div(divisor).to(dtype)
        assert torch.equal(divide(value.clone(), divisor, torch.empty(3, dtype=dtype)), expected)
        mixed = [value.clone(), torch.full((2,), 3.0)]
        divide_all(mixed, divisor)
        assert torch.equal(mixed[0], expected) and torch.equal(mixed[1], torch.full((2,), 3.0).div(divisor))
        divide_all(plain := [value.clone()], 7.0)
        assert torch.equal(plain[0], value / 7.0)
    for whole in (torch.int32, torch.int64):
        assert torch.equal(
            divide(torch.tensor([7], dtype=whole), 2.0, torch.zeros(1, dtype=whole)).double(),
            torch.tensor([7.0]).double(),
        )
    divide_all([], torch.tensor(1.0))
    values = [torch.full((2,), 3.0)]
    divide_all(values, 2.0)
    assert values[0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("windowed", [False, True])
def test_receives_of_all_homes_are_posted_before_the_first_send(windowed: bool) -> None:
    """Gloo tells a sender of a receive behind the bytes that are on their way to it.

    Of four buckets, three fit into a window, and the last one has another home than the first.
    """

    def act(world: ThreadWorld) -> tuple[list[tuple[str, int]], list[torch.Tensor]]:
        tensors, homes = [torch.zeros(128) for _ in range(4)], [0, 1, 0, 1]
        exchange = DirectExchange(world, TAGS, homes=homes, copies={0: [], 1: []}, windowed=windowed)
        exchange.layout = exchange.layout._replace(eager=True)  # as over gloo
        reduction = Reduction(world, exchange, tensors, Facts(), "pushes", 512)
        posted, start = list[tuple[str, int]](), world.start_transfers

        def recorded(sends: Any, receives: Any) -> Any:
            posted.extend([("receive", one.peer) for one in receives] + [("send", one.peer) for one in sends])
            return start(sends, receives)

        world.start_transfers = recorded  # type: ignore[method-assign, assignment]
        reduction.begin([[Node(0, 0)], [Node(0, 1)]], 2.0)
        for member in range(4):
            reduction.slots(member)[0].fill_(member + world.rank)
            reduction.written(member)
        reduction.finish()
        for member in (world.rank, world.rank + 2):
            reduction.mean(member).mul_(10)
        taken: dict[int, torch.Tensor] = {}
        reduction.spread(lambda member, value: taken.setdefault(member, value.clone()))
        return posted, [taken[member] if member in taken else reduction.mean(member) for member in range(4)]

    for rank, (posted, values) in enumerate(run(2, act)):
        other = 1 - rank
        assert posted == [*[("receive", other)] * 2, *[("send", other)] * 2] * 2
        assert [float(value[0]) for value in values] == [10 * (member + 0.5) for member in range(4)]


def test_an_owner_waits_for_no_bucket_before_it_has_sent_all() -> None:
    sent = threading.Event()

    def act(world: ThreadWorld) -> list[float]:
        tensors, homes = [torch.zeros(64) for _ in range(4)], [0, 1, 0, 1]
        exchange = DirectExchange(world, TAGS, homes=homes, copies={0: [], 1: []})
        exchange.layout = exchange.layout._replace(eager=True)  # as over gloo
        reduction = Reduction(world, exchange, tensors, Facts(), "pushes", 512)
        reduction.begin([[Node(0, 0)], [Node(0, 1)]], 2.0)
        assert world.rank == 0 or sent.wait(5), "rank 0 waits for rank 1"
        for member in range(4):
            if member == 3:
                sent.set()
            reduction.slots(member)[0].fill_(member + world.rank)
            reduction.written(member)
        reduction.finish()
        return [float(reduction.mean(member)[0]) for member in range(4) if homes[member] == world.rank]

    assert run(2, act) == [[0.5, 2.5], [1.5, 3.5]]


def test_an_ordered_transport_gets_messages_in_the_same_order_from_every_worker() -> None:
    """A worker may ask for the memory of a bucket before the one ahead of it is written."""

    def act(world: ThreadWorld) -> list[list[int]]:
        world.transport.capabilities = world.transport.capabilities._replace(ordered=True)
        tensors, homes, copies = [torch.zeros(64) for _ in range(8)], [0, 1] * 4, {0: [1], 1: [0]}
        exchange = DirectExchange(world, TAGS, homes=homes, copies=copies, windowed=True)
        reduction = Reduction(world, exchange, tensors, Facts(), "pushes", 256)
        posted, start = list[list[int]](), world.start_transfers

        def recorded(sends: Any, receives: Any) -> Any:
            posted.append([one.tag for one in (*sends, *receives)])
            return start(sends, receives)

        world.start_transfers = recorded  # type: ignore[method-assign, assignment]
        reduction.begin([[Node(0, 0)], [Node(0, 1)]], 2.0)
        for member in range(8):
            reduction.slots(member)
            if world.rank == 0 and member + 1 < 8 and reduction.has_room(member + 1):
                reduction.slots(member + 1)
            reduction.written(member)
        reduction.finish()
        return posted

    first, second = run(2, act)
    assert [tags for tags in first if tags] == [tags for tags in second if tags]


def test_an_owner_awaits_the_others_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the waits of a worker with a slow link are not all for the same sender."""

    def act(world: ThreadWorld) -> list[int]:
        copies: dict[int, list[int]] = {rank: [] for rank in range(4)}
        exchange = DirectExchange(world, TAGS, homes=[0, 1, 2, 3], copies=copies)
        reduction = Reduction(world, exchange, [torch.zeros(64) for _ in range(4)], Facts(), "pushes", 256)
        peers, start, first = dict[int, int](), world.start_transfers, list[int]()

        def recorded(sends: Any, receives: Any) -> Any:
            transfers = start(sends, receives)
            peers.update({id(one): wanted.peer for one, wanted in zip(transfers, receives, strict=False)})
            return transfers

        @contextmanager
        def receiving() -> Iterator[None]:
            first.extend(peers[id(one)] for one in reduction._buckets[world.rank].receives[:1])
            yield

        monkeypatch.setattr(world, "start_transfers", recorded)
        monkeypatch.setattr(world, "receiving", receiving)
        for _ in range(3):
            reduction.begin([[Node(0, rank)] for rank in range(4)], 4.0)
            for member in range(4):
                reduction.slots(member)
                reduction.written(member)
            reduction.finish()
        return first

    assert [set(first) for first in run(4, act)] == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
