"""Strategies on workers that are threads: the bits of one process, whatever the strategy and the machines."""

from __future__ import annotations

import errno
import math
import resource
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from thread_training import BATCH, LENGTH, STEPS, Result, mlp, no_draws, store, tied, train  # noqa: F401
from torch import nn

from paceline.data.order import Order
from paceline.errors import ConfigError, StartError, WorkerLost
from paceline.settings import Settings
from paceline.strategies import registry
from paceline.strategies.local.outer import OuterSteps
from paceline.strategies.sharded import shared_weights
from paceline.strategies.sharded import strategy as sharded


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


@pytest.mark.parametrize(
    ("local", "named"),
    [
        ({"every": 4, "fragments": 5}, "local.fragments = 5 is more than local.every = 4"),
        ({"every": 6, "fragments": 2, "delay": 3}, "local.delay = 3 is too long.* at most 2"),
        ({"every": 20, "fragments": 13}, "local.fragments = 13, but the model has 10 trained parameters"),
        ({"quorum": 5, "uneven": True}, "local.quorum = 5 is more than local.replicas = 4"),
        ({"quorum": 3}, "local.quorum = 3 .* set local.uneven = True"),
        ({"quorum": 3, "uneven": True, "adaptive": True}, "local.adaptive = True cannot be combined with local.quorum"),
        ({"quorum": 3, "uneven": True, "fragments": 2}, "local.fragments = 2 cannot be combined with local.quorum"),
        ({"quorum": 3, "uneven": True, "delay": 1}, "local.delay = 1 cannot be combined with local.quorum"),
    ],
)
def test_periods_that_cannot_be_kept_are_refused(local: dict[str, Any], named: str) -> None:
    settings = Settings.model_validate({"batch": BATCH, "strategy": "diloco", "local": local})
    with pytest.raises(ConfigError, match=named):
        registry.entry_of("diloco").validate(settings, mlp(), Order(LENGTH, BATCH, 8, seed=0), 2, 2)


def test_sharded_training_returns_freed_memory_once_its_optimizer_has_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc keeps the gaps that the gradients of the first step leave between the moments."""
    returned: list[int] = []
    monkeypatch.setattr(sharded.FreedMemory, "trim", lambda memory: returned.append(1))
    train(mlp, 2, steps=1, strategy="sharded")
    assert len(returned) == 2
    train(mlp, 2, steps=3, strategy="sharded")
    assert len(returned) == 4


@pytest.mark.parametrize("interrupted", [False, True])
def test_copies_outlast_an_interrupted_update(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost owner may have updated a half of its slice in the weights that all see."""
    close, found = sharded.Sharded.close, list[dict[str, list[float]]]()

    def closed(strategy: sharded.Sharded) -> frozenset[str] | None:
        context, weights = strategy._context, strategy._weights
        assert weights is not None
        copied = weights.copied.items()
        named = {strategy._shard.name_of(strategy._slices[at]): one.flatten().tolist() for at, one in copied}
        strategy._unfinished = WorkerLost() if interrupted else None
        owned = close(strategy)
        assert owned is not None and owned >= named.keys()
        kept = {name: context.held.tensors.get(f"parameter/{name}") for name in named}
        found.append({name: one.flatten().tolist() for name, one in kept.items() if one is not None})
        assert found[-1] == (named if interrupted else {})
        return owned

    monkeypatch.setattr(sharded.Sharded, "close", closed)
    train(mlp, 3, [(0, 1, 2)], steps=2, strategy="sharded", shard_copy=True)
    assert len(found) == 3 and any(found) == interrupted


def test_weights_that_cannot_be_mapped_are_an_error_with_sizes_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, size: int) -> memoryview:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(shared_weights, "map_shared", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20 if kind == resource.RLIMIT_AS else -1, -1))
    told = r"no room.* private one of [\d,]+ bytes, .* -d, here unlimited\) .* \(ulimit -v, here 1,048,576 bytes\)"
    with pytest.raises(StartError, match=told):
        train(mlp, 2, [(0, 1)], steps=1, strategy="sharded")
