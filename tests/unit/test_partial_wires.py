"""Formats that send a part of a gradient: what they send, what they keep, and what they refuse."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.checkpoint.tensors import REPLICA
from paceline.data.keys import seed_of
from paceline.errors import ConfigError
from paceline.schedule.tree import Node, total
from paceline.settings import Settings
from paceline.step.gradients.accumulate import Values, add
from paceline.step.gradients.codec import Codec
from paceline.step.gradients.compressions import OneBit, PowerSGD, RandomK, TopK
from paceline.step.gradients.formats import codec_for, register
from paceline.step.gradients.partial import Compression
from paceline.strategies import registry, requirements
from paceline.system.wires import PARTIAL_WIRES

LANES = 4
COMPRESSIONS: dict[str, Compression] = {
    "randomk": RandomK(35, 0.25, 7),
    "topk": TopK(35, 0.25),
    "onebit": OneBit(35, LANES),
    "powersgd": PowerSGD(5, 7, 2, 7),
}


def codec(parameters: dict[str, torch.Tensor], wire: str = "topk", state: Any = None, held: Any = None) -> Codec:
    context = SimpleNamespace(
        update=SimpleNamespace(
            parameters={name: nn.Parameter(value) for name, value in parameters.items()}, closure_users=[]
        ),
        compute=SimpleNamespace(
            model=nn.Module(), scale=1.0, seed=lambda use, step, *place: seed_of(use, 0, step, *place)
        ),
        order=SimpleNamespace(microbatches=LANES, parts_of=lambda step: [range(1)] * LANES),
        settings=Settings.model_validate({"wire": wire, "exact": True, "wire_ratio": 0.2, "wire_rank": 2}),
        world=SimpleNamespace(device=torch.device("cpu"), rank=0, size=1),
        events=SimpleNamespace(mark=lambda *event, **values: None),
        strategy_state={} if state is None else state,
        replicas=dict(held or {}),
        warnings=[],
    )
    made = codec_for(cast(Any, context), context.update.parameters)
    assert made is not None
    return made


def sums_of(one: Codec, gradients: list[torch.Tensor], step: int = 0) -> list[torch.Tensor]:
    """Return the sum that the model gets of a parameter's gradients in a step, before the step is accepted."""
    parts: list[tuple[Node, Values]] = [
        (Node(0, lane), one.encode([value.clone()], step, lane)) for lane, value in enumerate(gradients)
    ]
    found = total(parts, add)
    assert one.fits()
    (mean,) = one.decode(found, 1.0)
    assert mean is not None
    return [mean]


def errors(one: Codec) -> dict[str, torch.Tensor]:
    assert one.memory is not None
    return dict(one.memory.point(0, 1) or {})


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_compressed_sum_is_the_sum_of_compressed_ones(name: str) -> None:
    """So it does not matter which worker adds up what."""
    one = COMPRESSIONS[name]
    state = one.start()
    for step in range(3):
        values = [torch.randn(35) for _ in range(LANES)]
        sent = [one.compress(value, state, lane == step) for lane, value in enumerate(values)]
        assert all(value.shape == one.example().shape and value.dtype == one.example().dtype for value in sent)
        added = torch.stack(sent).sum(0)
        apart = torch.stack([one.restore(value, state) for value in sent]).sum(0)
        torch.testing.assert_close(one.restore(added, state), apart)
        state = one.proceed(added, state)
        assert {key: value.shape for key, value in state.items()} == {
            key: value.shape for key, value in one.start().items()
        }


@pytest.mark.parametrize("wire", PARTIAL_WIRES)
def test_what_is_not_sent_is_kept(wire: str) -> None:
    """All gradients of some steps are in the updates of the model, or still with their lanes."""
    torch.manual_seed(0)
    one, given, got = codec({"a": torch.zeros(40, 50)}, wire), torch.zeros(40, 50), torch.zeros(40, 50)
    for step in range(30):
        gradients = [torch.randn(40, 50) + 1 for _ in range(LANES)]
        given += torch.stack(gradients).sum(0)
        got += sums_of(one, gradients, step)[0]
        one.accept()
    left = torch.stack([*errors(one).values()]).sum(0).view(40, 50)
    assert len(errors(one)) == LANES
    torch.testing.assert_close(got + left, given, rtol=1e-4, atol=1e-3)
    assert float(left.norm()) < 0.5 * float(given.norm())


def test_topk_sends_the_largest_of_what_the_leader_had_left() -> None:
    one = TopK(10, 0.2)
    state = one.start()
    value = torch.tensor([9.0, 1, 0, -5, 2, 3, 0, 0, 0, 1])  # the first positions are sent at once
    sent = one.compress(value, state, leads=True)
    assert one.restore(sent, state).tolist() == [9, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    state = one.proceed(sent, state)
    assert state["positions"].view(-1).tolist() == [3, 4]
    others = one.compress(-value, state, leads=False)
    assert one.restore(others, state).tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.001, 1e-8])
def test_positions_of_any_size_arrive(ratio: float) -> None:
    numel = 5000
    one = TopK(numel, ratio)
    value = torch.zeros(numel)
    value[numel - 1] = 1.0
    state = one.start()
    state = one.proceed(one.compress(value, state, leads=True), state)
    assert one.restore(one.compress(value, state, leads=False), state)[-1] == 1.0


def test_a_low_rank_arrives_whole() -> None:
    torch.manual_seed(0)
    one = PowerSGD(30, 20, 2, 3)
    matrix = (torch.randn(30, 2) @ torch.randn(2, 20)).view(-1)
    state = one.start()
    state = one.proceed(one.compress(matrix, state, leads=False), state)
    torch.testing.assert_close(one.restore(one.compress(matrix, state, leads=False), state), matrix)


def test_signs_have_the_mean_size_of_the_step_before() -> None:
    one = OneBit(3000, LANES)
    value = torch.cat((torch.full((1024,), 0.5), torch.full((1976,), -2.0)))
    state = one.start()
    sums = one.compress(value, state, leads=False) + one.compress(3 * value, state, leads=False)
    assert not one.restore(sums, state).any()
    state = one.proceed(sums, state)
    assert state["sizes"].tolist() == [1.0, 4.0, pytest.approx(4.0 * 952 / 1024)]
    assert one.restore(sums, state)[:1025].tolist() == [2.0] * 1024 + [-8.0]


@pytest.mark.parametrize("wire", PARTIAL_WIRES)
def test_a_step_that_does_not_count_leaves_the_errors(wire: str) -> None:
    one = codec({"a": torch.zeros(40, 50)}, wire)
    for step in range(3):
        sums_of(one, [torch.randn(40, 50) for _ in range(LANES)], step)
        one.accept()
    before = {name: value.clone() for name, value in errors(one).items()}
    bad = torch.full((40, 50), 0.5)
    bad[3, 7] = float("nan")
    assert sums_of(one, [bad] * LANES, 3)[0].isnan().all()
    one.accept()
    sums_of(one, [torch.randn(40, 50) for _ in range(LANES)], 3)
    one.accept(applied=False)
    assert all(torch.equal(value, before[name]) for name, value in errors(one).items())


@pytest.mark.parametrize("wire", PARTIAL_WIRES)
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e30])
def test_zeros_denormals_and_large_floats(wire: str, value: float) -> None:
    one = codec({"a": torch.zeros(40, 50)}, wire)
    for step in range(3):
        (mean,) = sums_of(one, [torch.full((40, 50), value)] * LANES, step)
        one.accept()
        assert mean.isfinite().all()


def test_small_parameters_are_sent_whole() -> None:
    whole = {"one": torch.zeros(1, 1), "bias": torch.zeros(500), "none": torch.zeros(0, 3)}
    one = codec(whole)
    assert one.memory is None
    assert [value.shape for value in one.examples()] == [value.shape for value in whole.values()]


def test_errors_are_those_of_the_state_that_was_loaded() -> None:
    held = {f"{REPLICA}{lane}/feedback/a": torch.full((2000,), float(lane)) for lane in range(LANES)}
    assert {name: value[0].item() for name, value in errors(codec({"a": torch.zeros(40, 50)}, held=held)).items()} == {
        name: value[0].item() for name, value in held.items()
    }


def test_another_ratio_begins_with_new_positions() -> None:
    one = codec({"a": torch.zeros(40, 50)}, state={"feedback": {"a": {"positions": torch.zeros(3, 1)}}})
    assert sums_of(one, [torch.ones(40, 50)] * LANES)[0].count_nonzero() == 400


class Halves:
    """Even and odd elements in turn."""

    def __init__(self, shape: tuple[int, ...], microbatches: int) -> None:
        self.half = torch.Size(shape).numel() // 2

    def start(self) -> dict[str, torch.Tensor]:
        return {"turn": torch.zeros(1, dtype=torch.int64)}

    def example(self) -> torch.Tensor:
        return torch.empty(self.half)

    def compress(self, value: torch.Tensor, state: dict[str, torch.Tensor], leads: bool) -> torch.Tensor:
        return value.view(-1, 2)[:, int(state["turn"])]

    def restore(self, sums: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        found = torch.zeros(self.half, 2)
        found[:, int(state["turn"])] = sums
        return found.view(-1)

    def proceed(self, sums: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"turn": 1 - state["turn"]}


def test_a_format_of_ones_own() -> None:
    before = [*PARTIAL_WIRES]
    register("halves", Halves)
    try:
        one = codec({"a": torch.zeros(2, 2)}, "halves")
        assert sums_of(one, [torch.ones(2, 2)] * LANES)[0].tolist() == [[4, 0], [4, 0]]
        one.accept()
        assert sums_of(one, [torch.ones(2, 2)] * LANES, 1)[0].tolist() == [[0, 8], [0, 8]]
    finally:
        PARTIAL_WIRES[:] = before


def check(wire: Any, forward: object = None, **given: Any) -> None:
    settings = Settings.model_validate({"batch": 8, "wire": wire} | given)
    requirements.check(settings, registry.capabilities(settings, 2), forward, nn.Linear(2, 2))


def test_a_format_for_each_module_class() -> None:
    mixed = Settings.model_validate({"wire": {nn.Embedding: "bfloat16", "default": "int8"}, "exact": True})
    assert mixed.wire == "Embedding=bfloat16,default=int8"
    assert mixed.along_tree  # the sums of bfloat16 have an order
    assert Settings.model_validate({"wire": "default=int8"}).wire == "int8"
    assert Settings.model_validate({"wire": "Embedding=int8"}).wires == {"default": "float32", "Embedding": "int8"}
    check({nn.Linear: "int8"})
    with pytest.raises(ConfigError, match="the model has no module of class 'Embedding'; it has Linear"):
        check({nn.Embedding: "int8"})
    with pytest.raises(ValueError, match="there is no format 'int3'"):
        check({"Linear": "int3"})
    with pytest.raises(ValueError, match="'topk' has no module class: write Embedding=topk"):
        check("topk,int8")


@pytest.mark.parametrize("wire", PARTIAL_WIRES)
def test_what_a_partial_format_refuses(wire: str) -> None:
    check(wire, exact=True)
    for strategy in ("stealing", "auto", "diloco", "sharded"):
        with pytest.raises(ConfigError, match=f"cannot send gradients as {wire}.*or use 'allreduce'"):
            check({"Linear": wire}, strategy=strategy)
    with pytest.raises(ConfigError, match="adds up as whole numbers"):
        check(wire, exact="fixed-point")
    with pytest.raises(ConfigError, match="cannot train with a forward for each optimizer"):
        check(wire, forward={"a": None, "b": None})
