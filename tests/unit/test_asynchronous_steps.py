"""Asynchronous steps over threads: each step is done once, all come to the same state, and no step is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from thread_world import run
from torch import nn

from paceline.comm.assignment.step_claims import FREE, ClaimTable
from paceline.comm.servers import network_claims
from paceline.comm.servers.network_claims import NetworkClaims
from paceline.data.feed import MicrobatchGroup
from paceline.errors import DisagreementError, WorkerLost
from paceline.settings import Settings
from paceline.step.checks import MicrobatchResult, sparse_parameters
from paceline.step.context import StepResult
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.strategies.parameter_server.async_steps import AsyncSteps
from paceline.strategies.parameter_server.final_drain import STATE
from paceline.strategies.parameter_server.network_server import NetworkServer
from paceline.strategies.parameter_server.sharing import copies_of
from paceline.strategies.parameter_server.staleness import Staleness

STEPS = 12


class Client:
    """Asks the handlers of a worker in this process."""

    def __init__(self, peers: Peers, rank: int) -> None:
        self._peers, self._rank = peers, rank

    def ask(self, what: str, words: Any = None, parts: Any = ()) -> Any:
        if self._rank in self._peers.lost:
            raise WorkerLost(f"lost rank {self._rank}")
        data = bytearray(b"".join(bytes(part) for part in parts))
        answer, parts = self._peers.handlers[self._rank, what](self._peers.world.rank, words, data)
        return answer, bytearray(b"".join(parts))

    def start(self, *words: Any) -> None:
        self._answer = self.ask(*words)

    def finish(self) -> Any:
        return self._answer


class Peers:
    """Stands for ``RpcPeers``: the servers of workers that are threads."""

    def __init__(self, world: Any, handlers: dict[Any, Any]) -> None:
        self.world, self.handlers, self.lost = world, handlers, set[int]()
        self.server = SimpleNamespace(serve=self._serve, on_end=lambda call: None, connected=set)
        self._clients: dict[int, Client] = {}

    def _serve(self, what: str, handler: Callable[..., Any]) -> None:
        self.handlers[self.world.rank, what] = handler

    def client(self, rank: int) -> Client:
        return self._clients.setdefault(rank, Client(self, rank))

    def new_client(self, rank: int) -> Client:
        return Client(self, rank)

    def parting(self, rank: int, seconds: float) -> Client:
        return Client(self, rank)

    def machine_of(self, rank: int) -> str:
        return str(rank)


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(float(number))
    return model


def gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * step + number)


def update_of(model: nn.Module) -> OptimizerStep:
    return OptimizerStep(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), None, None, Scaling())


class Batch:
    """Stands for ``FullBatch``: gradients that follow from the step alone."""

    def __init__(self, model: nn.Module, rank: int, fill: Callable[[Any, int], None]) -> None:
        self.model, self.rank, self.fill, self.computed = model, rank, fill, list[int]()

    def groups(self, step: int) -> list[range]:
        return [range(1)]

    def gradients(self, step: int, groups: Any) -> tuple[list[MicrobatchResult], list[torch.Tensor]]:
        self.computed.append(step)
        self.fill(self.model, step)
        return [MicrobatchResult(range(1), self.rank, float(step), 1.0)], []

    def take_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class Worker:
    """A worker, with its loop and its side of the servers."""

    make, update_of = staticmethod(model_of), staticmethod(update_of)
    fill: Callable[[Any, int], None] = staticmethod(gradients)

    def __init__(self, world: Any, handlers: dict[Any, Any], **server: Any) -> None:
        self.model = self.make()
        self.update = self.update_of(self.model)
        self.events: list[tuple[str, dict[str, Any]]] = []
        settings = Settings.model_validate({"strategy": "parameter-server", "server": server})
        world.notice = lambda: self.notice
        self.notice = 0
        self.context: Any = SimpleNamespace(
            world=world, update=self.update, settings=settings, strategy_state={}, warnings=[],
            sparse=sparse_parameters(self.model, "modules"),
            compute=SimpleNamespace(
                model=self.model, metrics=None, batch_loss=None,
                buffers=SimpleNamespace(live=[], accept=lambda buffers: None, reset=lambda: None),
            ),
            events=SimpleNamespace(mark=lambda event, **fields: self.events.append((event, fields))),
            feed=SimpleNamespace(load=lambda step, groups: [MicrobatchGroup(range(1), 1, None)]),
        )  # fmt: skip
        self.peers: Any = Peers(world, handlers)
        self.claims = NetworkClaims(self.peers, copies_of(self.context) if world.size > 1 else 1)
        self.batch: Any = Batch(self.model, world.rank, self.fill)
        self.staleness = Staleness(self.claims.delays, self.claims.rounds, {})
        self.shared: Any = SimpleNamespace(
            context=self.context, claims=self.claims, staleness=self.staleness, batch=self.batch, peers=self.peers
        )
        self.server = NetworkServer(self.shared)
        self.steps = AsyncSteps(self.shared, self.server)

    def train(self, first: int = 0, stop: int = STEPS) -> list[StepResult]:
        return [self.steps.step(step, []) for step in range(first, stop)]

    def made(self) -> dict[int, int]:
        """The version of each update that was made here, by its step."""
        return {fields["step"]: fields["version"] for event, fields in self.events if event == "update"}

    def weights(self) -> list[Any]:
        return [parameter.flatten().tolist() for parameter in self.model.parameters()]

    @classmethod
    def replayed(cls, made: list[dict[int, int]]) -> list[Any]:
        """The weights after these updates in the order of their versions, in one process."""
        versions = {step: version for one in made for step, version in one.items()}
        assert sum(map(len, made)) == len(versions), "a step was done twice"
        model = cls.make()
        update = cls.update_of(model)
        for done, step in enumerate(sorted(versions, key=versions.__getitem__)):
            cls.fill(model, step)
            update.apply(done)
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    @classmethod
    def start(cls, size: int, act: Callable[[Any], None] | None = None, **server: Any) -> list[Any]:
        """Let workers on threads do something. By default they train until all have synchronized."""
        handlers: dict[Any, Any] = {}

        def work(world: Any) -> Worker:
            worker = cls(world, handlers, **server)
            if act is None:
                worker.train()
                worker.steps.synchronize(STEPS)
            else:
                act(worker)
            return worker

        return run(size, work)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Worker]]:
    monkeypatch.setattr(network_claims, "_SLICE_SECONDS", 0.001)
    return Worker.start


SERVERS: list[dict[str, Any]] = [
    {},
    {"count": 2},
    {"mode": "bounded", "staleness": 0},
    {"mode": "bounded", "staleness": 1, "count": 3},
    {"dedicated": True},
    {"drop_after": 0, "count": 2},
]


@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_each_step_is_done_once_and_all_have_its_weights(train: Any, server: dict[str, Any]) -> None:
    workers = train(3, **server)
    made = [worker.made() for worker in workers]
    assert sorted(step for one in made for step in one) == list(range(STEPS))
    assert sorted(version for one in made for version in one.values()) == list(range(1, STEPS + 1))
    expected = Worker.replayed(made)
    for worker in workers:
        assert worker.weights() == expected
        state = worker.context.strategy_state[STATE]
        assert (state["top"], state["open"], state["version"]) == (STEPS, [], STEPS)
        assert sum(count for _, count in state["delays"]) == STEPS == sum(count for _, count in state["rounds"])
        assert worker.steps.close() is None
        assert f"{STEPS} updates so far" in worker.context.warnings[-1]
        assert len(worker.context.warnings) == 2
    delays = [fields["delay"] for worker in workers for event, fields in worker.events if event == "update"]
    rounds = [fields["staleness"] for worker in workers for event, fields in worker.events if event == "update"]
    assert max(rounds) <= server.get("staleness", STEPS)
    assert server.get("drop_after") is None or max(delays) == 0
    assert not (server.get("dedicated") and workers[0].batch.computed)
    told = [event for worker in workers for event, _ in worker.events if event == "staleness"]
    assert len(told) == 1


def test_a_worker_that_pauses_before_its_update_is_made(train: Any) -> None:
    """The other one makes all updates that are left, this worker's too, before it asks for its learning rate."""
    paused, finished = threading.Event(), threading.Event()

    def act(worker: Worker) -> None:
        if worker.context.world.rank == 0:
            enter = worker.steps._enter

            def enter_later(step: int) -> bool:
                assert paused.wait(20), "the other worker is to claim the first step"
                return enter(step)

            worker.steps._enter = enter_later
            worker.train()
            finished.set()
        else:
            client = worker.peers.client(0)
            start = client.start

            def pause(what: str, *rest: Any) -> None:
                if what == "shard.apply" and not paused.is_set():
                    paused.set()
                    assert finished.wait(20)
                start(what, *rest)

            client.start = pause
            worker.train()
        worker.steps.synchronize(STEPS)

    workers = train(2, act)
    made = [worker.made() for worker in workers]
    assert [len(one) for one in made] == [STEPS - 1, 1]
    assert workers[0].weights() == workers[1].weights() == Worker.replayed(made)


def test_training_goes_on_after_workers_have_synchronized(train: Any) -> None:
    def act(worker: Worker) -> None:
        worker.train(0, 5)
        worker.steps.synchronize(5)
        middle.append(worker.weights())
        worker.steps.synchronize(5)
        worker.train(5, STEPS)
        worker.steps.synchronize(STEPS)

    middle: list[Any] = []
    workers = train(2, act, count=2, copies=1)
    made = [worker.made() for worker in workers]
    assert all(one == middle[0] for one in middle)
    assert middle[0] == Worker.replayed([{step: version for step, version in one.items() if step < 5} for one in made])
    assert workers[0].weights() == workers[1].weights() == Worker.replayed(made)
    assert workers[0].context.strategy_state[STATE]["version"] == STEPS
    assert len(workers[0].context.warnings) == 2, "the newest summary alone"


def test_rounds_that_are_missing_in_the_weights_are_counted(train: Any) -> None:
    def act(worker: Worker) -> None:
        if worker.context.world.rank == 0:
            worker.claims.begin(ClaimTable(9, {3: 1}, 5))
        worker.server.begin(5)
        worker.claims.await_begin()
        for step, rounds in ((8, 1), (9, 2), (3, 0)):
            worker.server.pull(step)
            found.append((worker.server._pulled, worker.server._rounds_behind) == (5, rounds))
        worker.context.world.gather(None, "end")

    found: list[bool] = []
    train(3, act)
    assert found == [True] * 9


def test_a_notice_stops_all_at_the_same_step(train: Any) -> None:
    def act(worker: Worker) -> None:
        for step in count():
            if step == 3 and worker.context.world.rank == 1:
                worker.notice = 2
            if (result := worker.steps.step(step, [])).notice:
                found.append((step, result.notice))
                break
        done.append(sorted(worker.context.strategy_state[STATE]["open"]))

    found: list[Any] = []
    done: list[Any] = []
    train(3, act)
    assert len(found) == 3 and len(set(found)) == 1 and found[0][1] == 2 and found[0][0] >= 3
    assert done == [[]] * 3


def test_a_step_that_is_left_out_is_done(train: Any) -> None:
    def act(worker: Worker) -> None:
        worker.context.settings = worker.context.settings.model_copy(update={"nonfinite": "skip"})
        compute = worker.batch.gradients

        def not_finite(step: int, groups: Any) -> Any:
            parts, buffers = compute(step, groups)
            return ([parts[0]._replace(loss=float("nan"))] if step == 2 else parts), buffers

        worker.batch.gradients = not_finite
        worker.train(0, 4)
        worker.steps.synchronize(4)

    workers = train(2, act)
    made = [worker.made() for worker in workers]
    assert sorted(step for one in made for step in one) == [0, 1, 3]
    assert workers[0].weights() == workers[1].weights() == Worker.replayed(made)
    assert workers[0].context.strategy_state[STATE]["version"] == 3
    assert workers[0].context.strategy_state[STATE]["open"] == []


def test_workers_at_different_places_are_told_so(train: Any) -> None:
    def act(worker: Worker) -> None:
        with pytest.raises(DisagreementError, match="rank 0 at step 0, rank 1 at step 1"):
            worker.steps.step(worker.context.world.rank, [])

    train(2, act)


def test_a_loop_that_is_further_is_told_so() -> None:
    steps: Any = object.__new__(AsyncSteps)
    steps._top, steps._context = 0, SimpleNamespace(world=SimpleNamespace(rank=2))
    assert steps._is_drained(ClaimTable(top=4), 4) and steps._is_drained(ClaimTable(top=3), 4)
    assert not steps._is_drained(ClaimTable(4, {3: 1}), 4)
    taken = ClaimTable(7, {3: 1, 5: 0, 6: FREE})
    with pytest.raises(DisagreementError, match="rank 2 synchronizing after step 3, rank 0 at step 5"):
        steps._is_drained(taken, 4)
    with pytest.raises(DisagreementError, match="rank 2 synchronizing after step 3, another one at step 6"):
        steps._is_drained(ClaimTable(7, {3: 1}), 4)
    steps._top = 7
    assert not steps._is_drained(taken, 4), "what was offered before it began is no disagreement"


def test_what_others_had_claimed_is_done_after_a_loss(train: Any) -> None:
    def act(worker: Worker) -> None:
        worker.context.strategy_state[STATE] = {
            "top": 5,
            "open": [2, 4],
            "version": 3,
            "newest": [3, 0.5, 1.0, 0.1, True],
        }
        worker.steps.synchronize(5)

    workers = train(2, act)
    made = [worker.made() for worker in workers]
    assert sorted(step for one in made for step in one) == [2, 4]
    assert sorted(version for one in made for version in one.values()) == [4, 5]
    assert workers[0].weights() == workers[1].weights() == Worker.replayed(made)


def test_a_lost_worker_leaves_the_last_whole_state(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is lost after four steps; its shard has a copy, so all that counts is there."""
    monkeypatch.setattr("paceline.strategies.parameter_server.network_server.copies_of", lambda context: 2)
    barrier = threading.Barrier(3, timeout=20)

    def act(worker: Worker) -> None:
        worker.train(0, 4)
        barrier.wait()
        worker.steps._drain(4)
        barrier.wait()
        if worker.context.world.rank == 2:
            return
        worker.peers.lost.add(2)
        worker.context.world.is_missing = lambda rank: rank == 2
        assert worker.steps.close() is None

    workers = train(3, act, count=3)
    expected = Worker.replayed([worker.made() for worker in workers])
    for worker in workers[:2]:
        assert worker.weights() == expected
        state = worker.context.strategy_state[STATE]
        assert (state["top"], state["open"], state["version"]) == (4, [], 4)


def test_what_only_a_lost_worker_had_is_named(train: Any) -> None:
    barrier = threading.Barrier(3, timeout=20)

    def act(worker: Worker) -> None:
        worker.train(0, 4)
        barrier.wait()
        worker.steps._drain(4)
        barrier.wait()
        world = worker.context.world
        lost = 2 if world.rank == 0 else 0
        worker.peers.lost.add(lost)
        world.is_missing = lambda rank: rank == lost
        if world.rank == 0:
            owned = worker.steps.close()
            names = set(dict(worker.model.named_parameters()))
            assert owned is not None and owned < names
            assert names - owned == set(worker.server._parts[2])
        if world.rank == 1:
            assert worker.steps.close() == frozenset(), "the table is lost"

    train(3, act, count=3)


def test_a_change_that_fails_leaves_the_table(train: Any) -> None:
    def act(worker: Worker) -> None:
        if worker.context.world.rank == 0:
            worker.claims.begin(ClaimTable(3, {1: 0}))
        worker.claims.await_begin()

        with pytest.raises(ValueError, match="no"), worker.claims.change() as table:
            table.top = 9
            raise ValueError("no")
        worker.context.world.gather(None, "step")
        assert worker.claims.read() == ClaimTable(3, {1: 0})
        worker.context.world.gather(None, "step")
        with worker.claims.change() as table:
            table.version += 1
        worker.context.world.gather(None, "step")
        assert worker.claims.read().version == 3
        if worker.context.world.rank == 1:
            worker.claims.arrive()
        worker.context.world.gather(None, "step")
        worker.claims.read()
        assert worker.claims.missing() == [0, 2]

    train(3, act)
