"""Strategies on workers that are threads: the bits of one process, whatever the strategy and the machines."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
import torch.distributed as dist
from thread_world import run
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from paceline.comm.assignment import store as stores
from paceline.config import Resolved
from paceline.data.order import Order
from paceline.environments.start import Identity
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.partition import gradient_check
from paceline.settings import Settings
from paceline.step import forward, optimizer
from paceline.step.probes import optimizer_probe
from paceline.strategies import registry
from paceline.strategies.local import inner as local_training
from paceline.strategies.local import strategy as local_strategy
from paceline.strategies.local.outer import OuterSteps
from paceline.strategies.local.uneven import ClaimedParts
from paceline.strategies.pipeline import executor
from paceline.training import build as jobs
from paceline.training.build import Components

STEPS = 4
LENGTH, BATCH = 40, 16  # the third batch of an epoch has half as many


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 2)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


Result = tuple[dict[str, list[float]], list[float]]


def train(
    make: Callable[[], nn.Module],
    workers: int,
    hosts: Sequence[tuple[int, ...]] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> list[Result]:
    """The state and the losses that each worker has after some steps."""
    torch.manual_seed(0)
    inputs = torch.randn(LENGTH, 6)
    models = [make() for _ in range(workers)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    data = TensorDataset(inputs, inputs[:, :2] * 2)
    resolved = Resolved(
        settings=Settings.model_validate({"batch": BATCH, "microbatches": 4, "threads": 1} | settings), sources={}
    )
    building = threading.Lock()

    def work(world: Any) -> Result:
        model = models[world.rank]
        given = Components(model, partial(torch.optim.AdamW, lr=0.05), data, mse_loss, None, None, None)
        who = Identity(world.rank, world.size, world.rank, world.size)
        with building, pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "Formation", lambda *_: SimpleNamespace(world=world))
            context, *_ = jobs.build_context(given, resolved, who, EventLog(None, world.rank))
        world.gather(None, "built")  # no worker seeds the generators while another one builds
        strategy = registry.build(context)
        losses = []
        for step in range(steps):
            groups = context.feed.load(step, strategy.groups(step))
            losses.append(strategy.step(step, groups).loss)
        strategy.synchronize(steps)
        state = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
        strategy.close()
        world.gather(None, "end")
        world.end_servers()
        return state, losses

    return run(workers, work, hosts=hosts)


@pytest.fixture(autouse=True)
def no_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the global generators, so another one's seed would look like a draw; these models draw nothing."""
    for module in (executor, forward, gradient_check, optimizer, optimizer_probe):
        monkeypatch.setattr(module, "same_states", lambda *_: True)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers on several machines read and write, which torch's process group would have."""
    made = dist.HashStore()
    monkeypatch.setattr(stores, "default_store", lambda: made)


@pytest.fixture(scope="module")
def alone() -> Callable[..., Result]:
    """What one process comes to; each computed once."""
    known: dict[Any, Result] = {}

    def of(make: Callable[[], nn.Module], **settings: Any) -> Result:
        key = make.__name__, str(settings)
        if key not in known:
            (known[key],) = train(make, 1, strategy="single", **settings)
        return known[key]

    return of


ON: dict[str, Any] = {
    "network": (3, None),
    "memory": (3, [(0, 1, 2)]),
    "machines": (4, [(0, 1), (2, 3)]),
}


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("strategy", ["allreduce", "stealing"])
def test_data_parallel_strategies_have_the_bits_of_one_process(alone: Any, strategy: str, on: str) -> None:
    workers, hosts = ON[on]
    for state, losses in train(mlp, workers, hosts, strategy=strategy, exact=True):
        assert (state, losses) == alone(mlp, exact=True)


def test_sums_in_fixed_point_have_the_bits_of_one_process(alone: Any) -> None:
    for state, losses in train(mlp, 3, None, strategy="allreduce", exact="fixed-point"):
        assert (state, losses) == alone(mlp, exact="fixed-point")


@pytest.mark.crossed
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "fp8-e4m3", "int8", "int4"])
@pytest.mark.parametrize(
    ("strategy", "on"), [("allreduce", "memory"), ("allreduce", "machines"), ("stealing", "network")]
)
def test_formats_on_the_wire_have_the_bits_of_one_process(alone: Any, strategy: str, on: str, wire: str) -> None:
    workers, hosts = ON[on]
    for state, losses in train(mlp, workers, hosts, strategy=strategy, exact=True, wire=wire):
        assert (state, losses) == alone(mlp, exact=True, wire=wire)


@pytest.mark.parametrize(("wire", "on"), [("topk", "memory"), ("onebit", "machines"), ("powersgd", "network")])
def test_partial_formats_have_the_bits_of_one_process(alone: Any, on: str, wire: str) -> None:
    workers, hosts = ON[on]
    for state, losses in train(mlp, workers, hosts, strategy="allreduce", exact=True, wire=wire):
        assert (state, losses) == alone(mlp, exact=True, wire=wire)


@pytest.mark.parametrize("strategy", ["allreduce", "stealing"])
def test_a_repeated_step_adds_up_along_the_tree(alone: Any, strategy: str) -> None:
    """A worker with three microbatches has two nodes of the tree, in the second attempt, too."""
    given = {"microbatches": 8, "exact": True, "wire": "float16"}
    for state, losses in train(mlp, 3, None, strategy=strategy, **given):
        assert (state, losses) == alone(mlp, **given)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("on", ON)
def test_halves_without_exact_are_near_float32(alone: Any, on: str, wire: str) -> None:
    """Every worker has the same, and nearly that of one process, which rounds nothing."""
    workers, hosts = ON[on]
    everyone = train(mlp, workers, hosts, strategy="allreduce", wire=wire)
    assert all(one == everyone[0] for one in everyone)
    state, losses = alone(mlp)
    assert alone(mlp, wire=wire) == (state, losses) != everyone[0]
    assert everyone[0][1] == pytest.approx(losses, rel=1e-2)


def cut_at(*names: str, **more: Any) -> dict[str, Any]:
    return {"cut": names} | more


PIPELINES = [
    (2, cut_at("3", schedule="layerwise")),
    (2, cut_at("3", schedule="gpipe")),
    (3, cut_at("1", "4", schedule="1f1b")),
    (3, cut_at("1", "4", schedule="1f1b", recompute=True)),
    (2, cut_at("1", "3", "4", schedule="interleaved")),
    (2, cut_at("2", schedule="zb-h1")),
    (2, cut_at("1", "2", "4", schedule="zb-v")),
    (3, cut_at("3", schedule="1f1b", replicas=(2, 1))),
]


@pytest.mark.crossed
@pytest.mark.parametrize("hosts", [False, True], ids=["network", "memory"])
@pytest.mark.parametrize(("workers", "pipeline"), PIPELINES, ids=str)
def test_pipelines_have_the_bits_of_one_process(
    alone: Any, workers: int, pipeline: dict[str, Any], hosts: bool
) -> None:
    on = [tuple(range(workers))] if hosts else None
    for state, losses in train(mlp, workers, on, strategy="pipeline", pipeline=pipeline, exact=True):
        assert (state, losses) == alone(mlp, exact=True)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_tied_weights_in_several_stages_have_the_bits_of_one_process(alone: Any, schedule: str) -> None:
    pipeline = cut_at("1", "3", schedule=schedule)
    for state, losses in train(tied, 3, None, strategy="pipeline", pipeline=pipeline, exact=True):
        assert (state, losses) == alone(tied, exact=True)


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("count", [1, 2])
def test_synchronous_servers_have_the_bits_of_one_process(alone: Any, count: int, on: str) -> None:
    workers, hosts = ON[on]
    if on == "machines":
        hosts = None
    found = train(mlp, workers, hosts, strategy="parameter-server", server={"count": count}, exact=True)
    for state, losses in found:
        assert (state, losses) == alone(mlp, exact=True)


OTHERS: list[dict[str, Any]] = [
    {"strategy": "local-sgd"},
    {"strategy": "backup"},
    {"strategy": "pipeline", "pipeline": cut_at("1", "3", schedule="pipedream")},
    {"strategy": "pipeline", "pipeline": cut_at("1", "3", schedule="2bw")},
    {"strategy": "parameter-server", "server": {"mode": "async"}},
]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_other_strategies_leave_all_workers_alike(settings: dict[str, Any]) -> None:
    first, *others = train(mlp, 3, [(0, 1, 2)], **settings)
    assert all(state == first[0] for state, _ in others)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_tied_weights_of_asynchronous_pipelines_are_alike_in_all_stages(schedule: str) -> None:
    settings: dict[str, Any] = {"strategy": "pipeline", "pipeline": cut_at("1", "3", schedule=schedule)}
    (first, _), *others = train(tied, 3, None, **settings)
    assert all(state == first for state, _ in others)
    assert first["0.weight"] == first["2.weight"]


@pytest.mark.parametrize("on", ON)
def test_fragments_in_flight_have_the_bits_of_one_process(on: str) -> None:
    """Both fragments are sent in the four steps, and the first one lands while later steps are made."""
    workers, hosts = ON[on]
    local = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.5}
    settings: dict[str, Any] = {"strategy": "diloco", "local": local, "exact": True, "wire": "int8"}
    ((alone, _),) = train(mlp, 1, None, **settings)
    assert all(state == alone for state, _ in train(mlp, workers, hosts, **settings))
    assert alone != train(mlp, 1, None, **settings | {"local": {"every": 4}})[0][0]


def test_periods_get_shorter_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same rule on any number of workers, and not below what the fragments need."""
    sent, outer = list[int](), OuterSteps.send
    monkeypatch.setattr(OuterSteps, "send", lambda self, step, *more: (sent.append(step), outer(self, step, *more)))
    local = {"every": 6, "fragments": 2, "delay": 1, "adaptive": True}
    settings: dict[str, Any] = {"strategy": "local-sgd", "local": local, "exact": True, "steps": 60}
    ((alone, losses),) = train(partial(nn.Linear, 6, 2), 1, None, **settings)
    ends = sent[1::2]
    assert ends[0] == 5 and losses[ends[-2]] < losses[5] / 4, "the loss has fallen"
    for end, then in pairwise(ends):
        assert then - end == max(4, min(6, math.ceil(6 * math.sqrt(losses[end] / losses[5]))))
    assert all(state == alone for state, _ in train(partial(nn.Linear, 6, 2), 3, None, **settings))


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

    def send(outer: OuterSteps, step: int, fragment: int, known: Any, seconds: float) -> None:
        counts.append(known)
        sent(outer, step, fragment, known, seconds)

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


@pytest.mark.parametrize(
    ("local", "named"),
    [
        ({"every": 4, "fragments": 5}, "local.fragments = 5 is more than local.every = 4"),
        ({"every": 6, "fragments": 2, "delay": 3}, "local.delay = 3 is too long.* at most 2"),
        ({"every": 20, "fragments": 13}, "local.fragments = 13, but the model has 10 trained parameters"),
    ],
)
def test_fragments_that_cannot_be_sent_in_turn_are_refused(local: dict[str, Any], named: str) -> None:
    settings = Settings.model_validate({"batch": BATCH, "strategy": "diloco", "local": local})
    with pytest.raises(ConfigError, match=named):
        registry.entry_of("diloco").validate(settings, mlp(), Order(LENGTH, BATCH, 8, seed=0), 2, 2)
