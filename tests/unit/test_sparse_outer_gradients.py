"""Outer gradients in 2 bits: what a message contains, and what is kept for the next one."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.comm.collectives.subgroup import Subgroup
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.strategies import registry, requirements
from paceline.strategies.local.replica import Replica
from paceline.strategies.local.sparse import SparseReducer, add_message, encode
from paceline.strategies.local.strategy import validate

GROUP = 4096


def decoded(values: torch.Tensor, kept: int) -> torch.Tensor:
    found = torch.zeros(-(-len(values) // GROUP) * GROUP)
    add_message(found, encode(values, kept), kept)
    return found[: len(values)]


def test_the_largest_numbers_of_each_block_are_sent_with_two_sizes() -> None:
    values = torch.randn(2 * GROUP, generator=torch.Generator().manual_seed(0))
    found, kept = decoded(values, 4).view(-1, 256), values.view(-1, 256)
    for sent, block in zip(found, kept, strict=True):
        assert set(sent.nonzero().flatten().tolist()) == set(block.abs().topk(4).indices.tolist())
    assert torch.equal(found.sign(), torch.where(found != 0, kept.sign(), 0))
    assert [len(group.abs().unique()) for group in found.view(2, -1)] == [3, 3]  # and 0
    assert (found - kept).square().sum() < kept.square().sum()


@pytest.mark.parametrize("numel", [1, 255, GROUP, GROUP + 1])
def test_numbers_of_two_sizes_are_sent_as_they_are(numel: int) -> None:
    values = torch.tensor([1.0, -4.0]).repeat(numel)[:numel]
    assert torch.equal(decoded(values, 256), values)


def test_zeros_stay_zero_and_values_that_are_not_finite_are_seen() -> None:
    assert torch.equal(decoded(torch.zeros(300), 2), torch.zeros(300))
    some = torch.randn(2 * GROUP, generator=torch.Generator().manual_seed(0))
    some[300:1000] = 0  # such as rows of an embedding that no sample has used
    assert not decoded(some, 13)[300:1000].any() and decoded(some, 13)[1000:].any()
    for bad in (math.nan, math.inf):
        values = torch.ones(2 * GROUP)
        values[5] = bad
        found = decoded(values, 2)
        assert not found[5].isfinite()
        assert found[GROUP:].isfinite().all()


@pytest.mark.parametrize("exact", [True, "fixed-point"])
def test_what_is_not_sent_is_added_to_the_next_outer_gradient(exact: bool | str) -> None:
    parameters = {"bias": nn.Parameter(torch.zeros(40)), "weight": nn.Parameter(torch.zeros(30, 20))}
    transport = SimpleNamespace(capabilities=SimpleNamespace(on_host=True))
    world = SimpleNamespace(
        device=torch.device("cpu"), rank=0, size=1, others=[], shared_memory=None, transport=transport,
        start_transfers=lambda *_, **__: [],
    )  # fmt: skip
    context = SimpleNamespace(
        settings=Settings.model_validate({"wire": "topk-2bit", "wire_ratio": 0.02, "exact": exact}),
        update=SimpleNamespace(parameters=parameters),
        compute=SimpleNamespace(model=nn.Module()),
        order=SimpleNamespace(microbatches=2),
        events=SimpleNamespace(mark=lambda *_, **__: None),
        strategy_state={},
        world=world,
    )
    replicas = {number: cast(Replica, SimpleNamespace(rests={})) for number in range(2)}
    alone = Subgroup(cast(Any, world), [0])
    reducer = SparseReducer(cast(Any, context), parameters, alone, 0, [[0, 1]], replicas)
    expected = {number: torch.zeros(640) for number in replicas}
    for step in range(3):
        for number in replicas:
            changes = {name: torch.randn(value.shape) for name, value in parameters.items()}
            for name, value in parameters.items():
                value.grad = changes[name].clone()
            expected[number] = 0.95 * expected[number] + torch.cat([one.flatten() for one in changes.values()])
            reducer.take(step, number)
        reducer.send([], [], lambda: 1.0)
        assert reducer.finish()
        sent = [decoded(expected[number], 5) for number in replicas]
        found = torch.cat([value.grad.flatten() for value in parameters.values() if value.grad is not None])
        torch.testing.assert_close(found, sum(sent))
        assert replicas[0].rests.keys() == ({0} if step else set())  # not before the step is accepted
        reducer.accept(applied=False)  # the update was left out
        assert replicas[0].rests.keys() == ({0} if step else set())
        reducer.accept()
        for number, one in enumerate(sent):
            expected[number] -= one
            torch.testing.assert_close(replicas[number].rests[0], expected[number])


def check(model: nn.Module, **given: Any) -> None:
    settings = Settings.model_validate({"batch": 8, "strategy": "diloco"} | given)
    requirements.check(settings, registry.capabilities(settings, 2), None, model)
    validate(settings, model, cast(Any, SimpleNamespace(microbatches=8)), 2, 2)


def test_where_the_format_is_refused() -> None:
    model = nn.Linear(2, 2)
    for exact in (True, "fixed-point"):
        check(model, wire="topk-2bit", exact=exact)
    with pytest.raises(ConfigError, match="in the same format: set wire = 'topk-2bit'"):
        check(model, wire="Linear=topk-2bit")
    with pytest.raises(ConfigError, match="another format for complex parameters"):
        check(nn.Linear(2, 2, dtype=torch.complex64), wire="topk-2bit")
    with pytest.raises(ConfigError, match=r"cannot send gradients as topk-2bit .* or use 'diloco' without local.sites"):
        check(model, wire="topk-2bit", strategy="allreduce")


@pytest.mark.parametrize("wire", ["int8", "topk-2bit"])
def test_a_quorum_names_itself_as_the_reason(wire: str) -> None:
    quorum = {"local": {"uneven": True, "quorum": 3}}
    check(nn.Linear(2, 2), wire="float32", **quorum)
    with pytest.raises(ConfigError, match=f"wire = '{wire}' cannot be combined with local.quorum, because"):
        check(nn.Linear(2, 2), wire=wire, **quorum)
    check(nn.Linear(2, 2), wire=wire)
