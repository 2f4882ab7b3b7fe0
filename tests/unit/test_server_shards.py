"""What servers hold and make of it: shards in two copies, mailboxes, the table of steps, and how stale weights were."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from torch import nn

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers import network_claims
from paceline.comm.servers.mailbox import Mailbox, Reply
from paceline.comm.servers.network_claims import CommitLog, LoggedCounts, Order
from paceline.comm.servers.row_journal import RowJournal
from paceline.comm.servers.shard import OwnBlocks, Shard, cut
from paceline.errors import InputError, WorkerLost
from paceline.step.checks import MicrobatchResult
from paceline.step.context import StepResult
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.strategies.parameter_server import async_steps
from paceline.strategies.parameter_server.async_steps import finish, set_newest
from paceline.strategies.parameter_server.final_drain import newest_result, restored
from paceline.strategies.parameter_server.hogwild import SharedWeights
from paceline.strategies.parameter_server.shard_replica import PendingGradients, ShardReplica
from paceline.strategies.parameter_server.staleness import Staleness


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.fill_(value + number)
    return model


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.5)


class Worker:
    """A model in training, and its shard."""

    def __init__(self, value: float, memory: Any = None) -> None:
        self.model = model_of(value)
        self.update = OptimizerStep(
            self.model, adam, lambda one: torch.optim.lr_scheduler.StepLR(one, 1, 0.5), None, Scaling()
        )
        self.optimizer, self.schedule = self.update.optimizer, self.update.schedule
        buffers = [name for name, _ in self.model.named_buffers()]
        part = dict(self.model.named_parameters())
        self.shard = Shard(memory or OwnBlocks(), self.model, part, buffers, self.optimizer, self.schedule)

    def train(self) -> None:
        for value in self.model.parameters():
            value.grad = torch.ones_like(value)
        self.update.apply(0)

    def all(self) -> list[Any]:
        """Everything that a shard holds."""
        state = [self.optimizer.state.get(value, {}) for value in self.model.parameters()]
        values = [*self.model.state_dict().values(), *(one[key] for one in state for key in sorted(one))]
        assert self.schedule is not None
        groups = [{key: value for key, value in one.items() if key != "params"} for one in self.optimizer.param_groups]
        return [value.flatten().tolist() for value in values] + [groups, self.schedule.state_dict()]


class OneBlock:
    """Memory that several shards lie in, as on one machine."""

    def __init__(self) -> None:
        self.blocks: list[memoryview] | None = None

    def share(self, size: int) -> list[memoryview]:
        self.blocks = self.blocks or OwnBlocks().share(size)
        return self.blocks


def test_a_copy_is_whole_whatever_is_written_into_the_other() -> None:
    memory = OneBlock()
    first, second = Worker(1.0, memory), Worker(50.0, memory)
    first.shard.write(0)
    before = first.all()
    first.train()
    first.shard.write(1)
    assert first.all() != before
    second.shard.read(0)
    assert second.all() == before
    second.shard.read(1)
    assert second.all() == first.all()
    second.shard.read(0)
    assert second.all() == before
    assert torch.equal(first.shard.views(1)[0], first.model.get_parameter("0.weight"))
    assert len(first.shard.views(0)) == 4


def test_weights_alone_are_enough_for_a_gradient() -> None:
    memory = OneBlock()
    first, second = Worker(1.0, memory), Worker(50.0, memory)
    first.train()
    first.shard.write(1)
    second.shard.read(1, states=False)
    assert second.all()[:7] == first.all()[:7] and not second.optimizer.state
    second.shard.read_states(1)
    assert second.all() == first.all()


def test_buffers_go_by_themselves() -> None:
    memory = OneBlock()
    first, second = Worker(1.0, memory), Worker(50.0, memory)
    second.shard.write(0)
    first.shard.write_buffers(0)
    first.shard.read_buffers(0)
    second.shard.read_buffers(0)
    names = [name for name, _ in first.model.named_buffers()]
    assert all(torch.equal(first.model.get_buffer(name), second.model.get_buffer(name)) for name in names)
    second.shard.read(0)
    assert second.model.get_parameter("0.weight").flatten()[0] == 50.0


def shared_weights(worker: Worker, rank: int, memory: OneBlock) -> SharedWeights:
    claims = SimpleNamespace(read=lambda: ClaimTable(version=1))
    world = SimpleNamespace(rank=rank)
    context = SimpleNamespace(update=worker.update, compute=SimpleNamespace(model=worker.model), world=world)
    shared: Any = SimpleNamespace(context=context, claims=claims, memory=memory, batch=None, staleness=None)
    return SharedWeights(shared)


def test_each_pull_takes_over_the_buffers_of_the_last_update() -> None:
    """Of the strategy ``hogwild``: the first pull, which leaves the weights as they are, and all later ones."""
    memory = OneBlock()
    first, second = Worker(1.0, memory), Worker(1.0, memory)
    server = shared_weights(first, 0, memory)
    other = shared_weights(second, 1, memory)
    for each in (server, other):
        each.begin(0)
    for step, mean in enumerate((100.0, 200.0, 300.0)):
        second.model.get_buffer("1.running_mean").fill_(mean)
        second.shard.write_buffers(0)
        second.model.get_buffer("1.running_mean").fill_(-1.0)
        server.pull(step)
        assert first.model.get_buffer("1.running_mean").tolist() == [mean] * 5
        other.pull(step)
        assert second.model.get_buffer("1.running_mean").tolist() == [mean] * 5


def test_a_shard_goes_to_another_worker_as_bytes() -> None:
    first, second = Worker(1.0), Worker(50.0)
    first.train()
    first.shard.write(1)
    first.train()
    first.shard.write(0)
    content = b"".join(first.shard.contents(0))
    second.shard.fill(0, content)
    second.shard.read(0)
    assert second.all() == first.all()
    assert len(content) < second.shard._size
    third = Worker(7.0)
    third.shard.write(1)
    third.shard.weights(1)[:] = first.shard.weights(0)
    third.shard.read(1, states=False)
    assert third.all()[:7] == first.all()[:7]


def test_states_that_the_copy_does_not_have_are_dropped() -> None:
    memory = OneBlock()
    first, second = Worker(1.0, memory), Worker(1.0, memory)
    first.shard.write(0)
    second.train()
    assert second.optimizer.state
    second.shard.forget()
    second.shard.read(0)
    assert not second.optimizer.state and second.all() == first.all()
    first.optimizer.state[first.shard.parameters[1]]["count"] = 3
    first.shard.write(1)
    second.train()
    second.shard.read(1)
    assert dict(second.optimizer.state) == {second.shard.parameters[1]: {"count": 3}}


class Rows:
    """A table with sparse gradients in training, its shard and its journal."""

    def __init__(self, blocks: list[OneBlock]) -> None:
        self.table = nn.Embedding(6, 2, sparse=True)
        nn.init.ones_(self.table.weight)
        self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.5)
        part = dict(self.table.named_parameters())
        self.shard = Shard(blocks[0], self.table, part, [], self.optimizer, None, part)
        self.journal = RowJournal(blocks[1], self.shard.parameters, self.optimizer)

    def update(self, version: int, rows: list[int]) -> None:
        self.shard.share_tables()
        self.shard.read((version - 1) % 2)
        self.table.weight.grad = None
        self.table(torch.tensor(rows)).sum().backward()
        self.journal.keep(version)
        self.optimizer.step()
        self.shard.write(version % 2)

    def taken(self, version: int) -> list[Any]:
        self.shard.forget()
        self.shard.read(version % 2)
        self.shard.take_tables()
        self.journal.restore(version)
        return [self.table.weight.tolist(), {key: one.tolist() for key, one in self.state.items()}]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state[self.table.weight]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_update_of_rows_in_place_counts_or_not() -> None:
    blocks = [OneBlock(), OneBlock()]
    first, second, third, alone = Rows(blocks), Rows(blocks), Rows(blocks), Rows([OneBlock(), OneBlock()])
    for one in (first, alone):
        one.shard.write(0)
        one.journal.begin()
    first.update(1, [0, 2])
    second.update(2, [2, 3, 3])
    assert first.table.weight.tolist() == second.table.weight.tolist()  # of which there is one copy
    assert first.state["sum"].tolist() == second.state["sum"].tolist()
    alone.update(1, [0, 2])
    before = alone.taken(1)
    assert third.taken(1) == before != third.taken(2)
    alone.update(2, [2, 3, 3])
    assert third.taken(2) == alone.taken(2) == second.taken(2)
    second.optimizer.step()  # in memory of its own
    assert first.table.weight.tolist() == alone.table.weight.tolist()


def test_an_own_copy_is_not_read_back() -> None:
    """Learning rates that the script has changed since stay."""
    one = Worker(1.0)
    one.shard.write(0)
    one.optimizer.param_groups[0]["lr"] = 7.0
    one.shard.read(0)
    assert one.optimizer.param_groups[0]["lr"] == 7.0
    one.shard.forget()
    one.shard.read(0)
    assert one.optimizer.param_groups[0]["lr"] == 0.5


def test_states_that_cannot_be_held_are_refused() -> None:
    one = Worker(1.0)
    parameter = one.shard.parameters[0]
    one.optimizer.state[parameter]["large"] = torch.zeros(9 * 64 * 8)
    with pytest.raises(InputError, match="more than 8 times as large"):
        one.shard.check_states()
    one.optimizer.state[parameter]["large"] = torch.zeros(3, 5).to_sparse()
    with pytest.raises(InputError, match=r"a sparse 'large' for the parameter '0\.weight'"):
        one.shard.check_states()
    one.optimizer.state[parameter]["large"] = object()
    with pytest.raises(InputError, match=r"Adam has 'large' in its state, a object .*keep it beside"):
        one.shard.check_states()
    one.optimizer.state.clear()
    one.optimizer.param_groups[0]["text"] = "x" * (1 << 21)
    with pytest.raises(InputError, match="bytes besides their tensors"):
        one.shard.check_states()
    del one.optimizer.param_groups[0]["text"]
    assert one.schedule is not None
    one.schedule.odd = object()
    with pytest.raises(InputError, match=r"StepLR has 'odd' .*leave it out"):
        one.shard.check_states()


def test_parameters_are_cut_into_shards_of_about_as_many_bytes() -> None:
    sizes = {"a": 1, "b": 8, "c": 0, "d": 5, "e": 4, "f": 0}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    assert [list(part) for part in cut(parameters, 2)] == [["a", "b", "c"], ["d", "e", "f"]]
    assert [list(part) for part in cut(parameters, 1)] == [list(sizes)]
    assert [list(part) for part in cut({name: parameters[name] for name in "cf"}, 2)] == [["c"], ["f"]]
    assert cut(parameters, 2)[0]["b"] is parameters["b"]


def test_mailboxes_hold_gradients_and_answers_of_each_worker() -> None:
    blocks: list[list[memoryview]] = []

    def share(size: int) -> list[memoryview]:
        blocks.append([memoryview(bytearray(size)) for _ in range(3)])
        return blocks[-1]

    examples = [torch.zeros(3, 5), torch.zeros(0), torch.zeros(7, dtype=torch.float64)]
    box = Mailbox(SimpleNamespace(share=share), examples, 64)  # type: ignore[arg-type]
    box.write(1, [torch.ones(3, 5), None, torch.full((7,), 2.0).double()], {"step": 4})
    box.write(2, [None, torch.zeros(0), torch.full((7,), 3.0).double()], [torch.tensor(5.0)])
    assert box.words(1) == ({"step": 4}, [True, False, True])
    words, there = box.words(2)
    assert words[0].item() == 5.0 and there == [False, True, True]
    first, _, third = box.gradients(1)
    assert first.eq(1.0).all() and third.eq(2.0).all() and box.gradients(2)[2].eq(3.0).all()
    box.write(1, [None, None, None], 0)
    assert box.words(1) == (0, [False] * 3)
    for server in range(3):
        for rank in range(3):
            box.answer(server, rank, Reply(10 * server + rank, rank, 0.5 * server))
    assert [box.answered(server, rank) for server in range(3) for rank in range(3)] == [
        Reply(10 * server + rank, rank, 0.5 * server) for server in range(3) for rank in range(3)
    ]


class Counts:
    def __init__(self) -> None:
        self.of = Counter[int]()

    def add(self, number: int) -> None:
        self.of[number] += 1

    def total(self) -> Counter[int]:
        return self.of


def test_staleness_is_counted_over_all_generations() -> None:
    first = Staleness(Counts(), Counts(), {})
    assert first.summary() == "" and first.state() == {"delays": [], "rounds": []}
    first.add(3)
    assert first.summary() == "1 updates so far: 3 others between weights and update on average, 3 at most"
    first.add(1, 0)
    second = Staleness(Counts(), Counts(), first.state())
    second.add(1, 2)
    assert second.counts() == ({3: 1, 1: 2}, {0: 1, 2: 1})
    assert second.state() == {"delays": [[1, 2], [3, 1]], "rounds": [[0, 1], [2, 1]]}
    assert second.summary() == (
        "3 updates so far: 1.7 others between weights and update on average, 3 at most; weights at most 2 rounds behind"
    )


def test_logged_counts_are_those_of_the_log() -> None:
    log = CommitLog(delays={2: 1})
    counts = LoggedCounts(lambda: log.delays)
    counts.add(2)
    counts.add(5)
    assert log.delays == {2: 2, 5: 1} == dict(counts.total())


def held(forward: Any = None) -> tuple[ShardReplica, Worker]:
    worker = Worker(1.0)
    context: Any = SimpleNamespace(update=worker.update, compute=SimpleNamespace(model=worker.model))
    part = {name: value for name, value in worker.model.named_parameters() if name.startswith("0.")}
    holder = ShardReplica(context, part, ["1.running_mean"], (), forward)
    source = Shard(OwnBlocks(), worker.model, part, ["1.running_mean"], worker.optimizer, worker.schedule)
    for copy in (0, 1):
        source.write(copy)
    holder.begin(4, source)
    return holder, worker


def pending(rank: int, step: int, value: float, there: bool = True) -> tuple[PendingGradients, bytearray]:
    about = PendingGradients(
        0, rank, step, [True, there], {}, torch.tensor(1.0), {"1.running_mean": torch.full((5,), value)}
    )
    data = torch.full((15 + 5 * there,), value).numpy().tobytes()
    return about, bytearray(data)


def orders(first: int, *steps: int) -> list[Order]:
    return [Order(first + number, step, step % 2, 3 + number, 1.0) for number, step in enumerate(steps)]


def test_updates_are_made_once_and_in_order() -> None:
    told: list[tuple[str, Any]] = []
    holder, worker = held(SimpleNamespace(ask=lambda what, words, parts=(): told.append((what, words))))
    assert holder.pull([], 4, 4) == (4, ())
    for rank, step, value in ((0, 6, 0.5), (1, 7, -0.25)):
        assert holder.stage(*pending(rank, step, value)) == (None, ())
    log = orders(5, 6, 7)
    assert holder.apply(0, log[:1]) == (0.5, ())
    assert holder.apply(0, log) == (0.25, ()), "the schedule has gone on"
    assert holder.apply(0, log) == (0.25, ()), "nothing is made twice"
    assert [what for what, _ in told] == ["shard.stage"] * 2 + ["shard.apply"] * 3
    for rate, value in ((0.5, 0.5), (0.25, -0.25)):
        for name in ("0.weight", "0.bias"):
            worker.model.get_parameter(name).grad = torch.full_like(worker.model.get_parameter(name), value)
        assert worker.optimizer.param_groups[0]["lr"] == rate
        worker.update.apply(0, norm=torch.tensor(1.0))
    version, (weights,) = holder.pull(log, 6, 5)
    expected = worker.model.get_parameter("0.weight")
    assert version == 6
    assert torch.equal(torch.frombuffer(bytearray(weights), dtype=torch.float32)[:15].view(5, 3), expected)
    assert holder.pull(log, 6, 6) == (6, ())
    assert holder.pull(log, 6, 5)[1] == (weights,)
    version, (content,) = holder.fetch(log, 6)
    again, _ = held()
    again._shard.fill(0, content)
    again._shard.read(0)
    assert version == 6 and torch.equal(again._parameters[0], expected)
    assert again._buffers.named["1.running_mean"].eq(-0.25).all()
    with pytest.raises(WorkerLost, match="has made 6 updates, and 7 were asked for"):
        holder.pull(log, 7, 6)
    with pytest.raises(WorkerLost, match="has made 6 updates, and 8 were asked for"):
        holder.fetch(log, 8)


def test_an_update_that_was_not_asked_for_is_made_when_weights_are() -> None:
    def fail(*_: Any) -> None:
        asked.append(1)
        raise WorkerLost("the other holder is gone")

    asked: list[int] = []
    holder, _ = held(SimpleNamespace(ask=fail))
    holder.stage(*pending(0, 6, 0.5, there=False))
    holder.stage(*pending(1, 7, 0.5))
    assert asked == [1], "a holder that is lost is not told anything more"
    before = holder._parameters[1].clone()
    version, _ = holder.pull(orders(5, 6), 5, 4)
    assert version == 5 and torch.equal(holder._parameters[1], before), "the bias has got no gradient"
    with pytest.raises(AssertionError, match="step 7 instead of 9 of rank 1"):
        holder.fetch(orders(6, 9), 6)


def test_a_table_has_one_owner_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_claims, "_SLICE_SECONDS", 0.0)
    copied: list[bytes] = []
    table = network_claims._Table(SimpleNamespace(ask=lambda what, text: copied.append(text)))  # type: ignore[arg-type]
    none = bytearray()
    table.begin(b"0")
    (changes, text, arrived, gone), _ = table.read(1, -1, none)
    assert (text, arrived, gone) == (b"0", [], [])
    assert table.read(1, changes, none)[0][1] == b"", "it is known"
    assert table.acquire(1, None, none) == ((1, b"0"), ())
    assert table.acquire(1, None, none) == ((1, b"0"), ())
    assert table.acquire(2, None, none) == ((1, b""), ())
    table.release(1, b"1", none)
    assert copied == [b"0", b"1"]
    assert table.read(2, changes, none)[0][1] == b"1"
    assert table.acquire(2, None, none)[0] == (2, b"1")
    table.release(2, b"", none)
    assert table.acquire(3, None, none)[0] == (3, b"1")
    table.end(3)
    assert table.read(1, -1, none)[0][3] == [3]
    assert table.acquire(1, None, none)[0] == (1, b"1"), "the one that is lost changes nothing any more"
    with pytest.raises(WorkerLost, match="the right to change"):
        table.release(3, b"3", none)
    assert table.release(3, b"", none) == (None, ())
    table.end(2)
    assert table.acquire(2, None, none)[0] == (1, b"")
    before = table.read(1, -1, none)[0][0]
    table.arrive(2, None, none)
    table.arrive(0, None, none)
    after = table.read(1, before, none)[0]
    assert after[0] == before + 2 and after[2] == [0, 2]
    table.copy(0, b"copy", none)
    assert table.close(0, None, none) == (b"copy", ())
    for act in (
        lambda: table.release(1, b"4", none),
        lambda: table.copy(0, b"4", none),
        lambda: table.acquire(1, None, none),
    ):
        with pytest.raises(WorkerLost, match="already re-forming"):
            act()
    assert table.close(0, None, none) == (b"copy", ())
    table.begin(b"5")
    assert table.read(1, -1, none)[0][2] == [] and table.close(0, None, none) == (b"5", ())


def test_a_worker_that_has_connected_again_is_not_gone() -> None:
    connected = set[int]()
    table = network_claims._Table(None, lambda: connected)
    table.end(3)
    assert table.read(1, -1, bytearray())[0][3] == [3]
    connected.add(3)
    assert table.read(1, -1, bytearray())[0][3] == []


def test_a_table_goes_on_without_its_copy() -> None:
    asked: list[int] = []

    def fail(*_: Any) -> None:
        asked.append(1)
        raise WorkerLost("it is gone")

    table = network_claims._Table(SimpleNamespace(ask=fail))  # type: ignore[arg-type]
    table.begin(b"0")
    table.begin(b"1")
    assert asked == [1] and table.close(0, None, bytearray()) == (b"1", ())


def test_workers_that_wait_for_the_table_are_woken() -> None:
    table, none = network_claims._Table(None), bytearray()
    table.begin(b"0")
    table.acquire(1, None, none)
    known, found = table.read(0, -1, none)[0][0], dict[int, bytes]()

    def wait(rank: int, ask: Any) -> None:
        while rank not in found:
            _, text, *_ = ask(rank, known, none)[0]
            if text:
                found[rank] = text

    threads = [threading.Thread(target=wait, args=one) for one in ((2, table.acquire), (3, table.read))]
    for thread in threads:
        thread.start()
    table.release(1, b"1", none)
    for thread in threads:
        thread.join()
    assert found == {2: b"1", 3: b"1"}


def test_the_newest_result_outlives_its_workers() -> None:
    table = ClaimTable()
    context: Any = SimpleNamespace(update=SimpleNamespace(learning_rate=0.3))
    unknown = newest_result(table, context)
    assert unknown.learning_rate == 0.3 and unknown.loss != unknown.loss
    result = StepResult(0.5, torch.tensor(2.0), 0.1, applied=True, metrics={"a": 1.0})
    table.open.update({4: 1, 5: 0})
    finish(table, 4, result)
    assert table.version == 1 and list(table.open) == [5]
    assert newest_result(table, context) == StepResult(0.5, 2.0, 0.1, applied=True, metrics={"a": 1.0})
    finish(table, 5, StepResult(0.5, 1.0, 0.1, applied=False))
    assert table.version == 1 and table.newest == 5 and not table.applied
    set_newest(table, 7, result)
    assert table.version == 1
    saved = [table.newest, table.loss, table.norm, table.rate, table.applied, table.metrics]
    again = newest_result(restored(ClaimTable(), {"newest": saved}), context)
    assert again == newest_result(table, context)
    assert restored(ClaimTable(), {"newest": saved[:5]}).metrics == {}
    assert restored(ClaimTable(), {}).newest < 0


def test_an_update_gets_its_factor_and_the_norm_of_all_gradients() -> None:
    given: list[Any] = []

    def apply(done: int, factor: float, norm: Any, made: Any = None) -> tuple[float, float]:
        given.append((done, factor, norm, made))
        return norm, 0.1

    settings = SimpleNamespace(seed=3, exact=True)
    compute = SimpleNamespace(buffers=SimpleNamespace(accept=given.append), metrics=None)
    context: Any = SimpleNamespace(update=SimpleNamespace(apply=apply), settings=settings, compute=compute)
    pushed: Any = SimpleNamespace(step=4, parts=[MicrobatchResult(range(1), 0, 3.0, 2.0)], buffers=["buffer"])
    result = async_steps.update(context, pushed, 5, 0.5, 7.0, print)  # type: ignore[arg-type]
    assert given == [["buffer"], (5, 0.5, 7.0, print)]
    assert (result.loss, result.norm, result.learning_rate, result.applied) == (1.5, 7.0, 0.1, True)
