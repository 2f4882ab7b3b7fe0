"""Formats of gradients on the wire: codes in lanes, and half precision, as functions of values."""

from __future__ import annotations

import copy
import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.comm.reduction.narrow import FLOAT8, add_, wide
from paceline.data.keys import seed_of
from paceline.schedule.shares import even
from paceline.schedule.tree import Node, total
from paceline.settings import Settings
from paceline.step.gradients import thermostat
from paceline.step.gradients.accumulate import Accumulator, Values, add
from paceline.step.gradients.codec import Codec
from paceline.step.gradients.formats import codec_for
from paceline.step.gradients.lanes import LIMITS, lanes_for, pack, round_at_random, unpack, widest
from paceline.strategies.base import WHOLE_WIRES as WIRES

MICROBATCHES = [1, 2, 8, 9, 16, 17, 18, 19, 258, 259, 9000]


def context(parameters: dict[str, torch.Tensor], wire: str, microbatches: int, exact: bool = True) -> Any:
    return SimpleNamespace(
        update=SimpleNamespace(parameters={name: nn.Parameter(value) for name, value in parameters.items()}),
        compute=SimpleNamespace(scale=1.0, seed=lambda use, step, *place: seed_of(use, 0, step, *place)),
        order=SimpleNamespace(microbatches=microbatches),
        settings=Settings.model_validate({"wire": wire, "exact": exact}),
        world=SimpleNamespace(device=torch.device("cpu")),
        events=SimpleNamespace(mark=lambda *event, **values: None),
        strategy_state={},
    )


def codec(parameters: dict[str, torch.Tensor], wire: str, microbatches: int = 8, exact: bool = True) -> Codec:
    of = context(parameters, wire, microbatches, exact)
    made = codec_for(cast(Any, of), of.update.parameters)
    assert made is not None
    return made


def codec_of(one: Codec) -> Codec:
    """The codec of the steps after a decision."""
    made = codec_for(one._context, one._context.update.parameters)
    assert made is not None
    return made


def means_of(
    one: Codec, gradients: list[list[torch.Tensor]], count: float = 1.0, step: int = 0, workers: int = 1
) -> list[torch.Tensor]:
    """The means of a step as so many workers compute them, and how often they do."""
    tree = one._context.settings.along_tree
    while True:
        parts: list[tuple[Node, Values]] = []
        for rank, share in enumerate(even(len(gradients), workers)):
            sums = Accumulator(tree)
            for number in share:
                sums.push(number, one.encode([value.clone() for value in gradients[number]], step, number))
            parts += [(node if tree else Node(0, rank), values) for node, values in sums.nodes()]
        if one.fits():
            break
    means = one.decode(total(parts, add), count)
    one.accept()
    return cast(list[torch.Tensor], means)


def some(count: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    return [[scale * torch.randn(shape, generator=chance).to(dtype)] for _ in range(count)]


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("wire", LIMITS)
def test_sums_of_the_largest_codes_fit(wire: str, microbatches: int) -> None:
    lanes = lanes_for(LIMITS[wire], microbatches)
    limit = widest(lanes, microbatches)
    assert limit >= LIMITS[wire]
    for numel in (1, 2, 4, 5, 6, 11, 1000):
        most = torch.full((numel,), limit, dtype=torch.int32)
        most[::2] *= -1
        for codes in (most, -most):
            words = pack(codes, lanes) * microbatches  # every microbatch has the largest code
            assert words.dtype == lanes.dtype
            assert torch.equal(unpack(words, lanes, numel, torch.float64), (microbatches * codes).double())


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("wire", LIMITS)
def test_words_are_added_in_any_order(wire: str, microbatches: int) -> None:
    lanes = lanes_for(LIMITS[wire], microbatches)
    limit, chance = widest(lanes, microbatches), torch.Generator().manual_seed(microbatches)
    codes = torch.randint(-limit, limit + 1, (min(microbatches, 50), 23), generator=chance, dtype=torch.int32)
    words = [pack(one, lanes) for one in codes]
    random.Random(0).shuffle(words)
    added = words[0].clone()
    for one in words[1:]:
        added += one
    assert torch.equal(unpack(added, lanes, 23), codes.sum(0).float())


def test_bytes_of_the_formats() -> None:
    for wire, microbatches, share in (("int8", 8, 0.4), ("int8", 16, 0.4), ("int4", 8, 0.25), ("int4", 18, 0.25)):
        (example,) = codec({"a": torch.zeros(100, 100)}, wire, microbatches).examples()
        assert example.nbytes == share * 40_000
    for wire, nbytes in (("bfloat16", 20_000), ("float16", 20_000), ("fp8-e4m3", 10_000), ("fp8-e5m2", 10_000)):
        (example,) = codec({"a": torch.zeros(100, 100)}, wire).examples()
        assert example.nbytes == nbytes


def test_rounding_at_random_has_no_bias() -> None:
    """Codes are the whole numbers next to the value, with the value as their mean; zeros stay zeros."""
    values = torch.tensor([-2.0, -1.25, -0.001, 0.0, 0.3, 0.5, 6.999, 7.0])
    scaled = (values * 2**16).round().repeat(40_000, 1)
    codes = round_at_random(scaled.reshape(-1), torch.Generator().manual_seed(0)).view(scaled.shape)
    assert (codes >= values.floor()).all() and (codes <= values.ceil()).all()
    assert (codes.float().mean(0) - values).abs().max() < 0.02


def test_noise_raises_the_bits() -> None:
    """Rounding adds noise to small values beside large ones, more than sqrt(3) of a gradient's norm allows."""
    chance = torch.Generator().manual_seed(0)
    alike, row, element = (torch.randn(128, 128, generator=chance) for _ in range(3))
    row[1:] *= 0.02
    element *= 0.01
    element[0, 0] = 1.0
    given = {"alike": alike, "row": row, "element": element}
    one = codec(given, "int-auto", microbatches=16)
    state, gradients = one._context.strategy_state, [[*given.values()]] * 3
    means_of(one, gradients, step=1)
    assert "bits" not in state, "not every step is measured"
    means_of(one, gradients, step=thermostat.EVERY)
    assert state["bits"] == {"row": "int8", "element": "int8"}
    means_of(codec_of(one), gradients, step=2 * thermostat.EVERY)
    assert state["bits"] == {"row": "int8", "element": "float32"}
    assert [value.dtype for value in codec_of(one).examples()] == [torch.int8, torch.int64, torch.int32]


def test_all_workers_raise_the_bits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker alone has too much noise, and the other one does not."""
    chance = torch.Generator().manual_seed(0)
    alike, noisy = torch.randn(128, 128, generator=chance), torch.randn(128, 128, generator=chance)
    noisy[:-1] *= 0.02
    gradients, rows = [0.7 * alike, *[noisy] * 5], list[torch.Tensor]()

    class Gathered:
        """Gathers what all workers have sent before one of them waits."""

        def __init__(self, *of: Any) -> None:
            """Nothing to prepare."""

        def start(self, own: torch.Tensor) -> Any:
            rows.append(own)
            return SimpleNamespace(wait=lambda: torch.stack(rows))

    monkeypatch.setattr("paceline.step.gradients.codec.AllGather", Gathered)
    found = []
    for shares in [[range(6)], [range(1), range(1, 6)], [range(3), range(3, 6)], [range(6), range(0)]]:
        rows.clear()
        workers = [codec({"a": alike}, "int-auto", microbatches=16) for _ in shares]
        for one, share in zip(workers, shares, strict=True):
            one._context.strategy_state["codes"] = {"a": 4.0}
            for number in share:
                one.encode([gradients[number].clone()], thermostat.EVERY, number)
            one.send()
        for one in workers:
            assert one.fits()
            one.accept()
        found += [one._context.strategy_state.get("bits") for one in workers]
    assert found == [{"a": "int8"}] * 7


def test_random_numbers_belong_to_seed_step_microbatch_and_parameter() -> None:
    both = {"a": torch.zeros(9, 50), "b": torch.zeros(9, 50)}
    one = codec(both, "int8")
    value = some(1, 9, 50)[0][0]

    def words(step: int, microbatch: int, places: list[int]) -> list[list[int]]:
        found = one.encode([value.clone() for _ in places], step, microbatch, places)
        return [word.tolist() for word in found if word is not None]

    first = words(3, 5, [0, 1])
    assert first == words(3, 5, [0, 1]) == words(3, 5, [0]) + words(3, 5, [1])
    assert len({str(word) for word in [*first, *words(4, 5, [0]), *words(3, 6, [0])]}) == 4


@pytest.mark.parametrize("wire", WIRES[1:])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 11])
def test_means_do_not_depend_on_the_workers(wire: str, microbatches: int) -> None:
    gradients = [[*values, values[0][0].clone()] for values in some(microbatches, 7, 5)]
    found = []
    for workers in {1, min(2, microbatches), min(3, microbatches), microbatches}:
        one = codec({"a": torch.zeros(7, 5), "bias": torch.zeros(5)}, wire, microbatches)
        found.append([means_of(one, gradients, 4.0, step, workers) for step in range(2)])
        assert found[-1][0][0].dtype == torch.float32
        assert [*one._context.strategy_state] == (
            ["codes", "fixed_point"] if wire in LIMITS else [] if wire == "bfloat16" else ["float16"]
        )
    for steps in found[1:]:
        for means, first in zip(steps, found[0], strict=True):
            assert all(torch.equal(left, right) for left, right in zip(means, first, strict=True))
    true = torch.stack([values[1] for values in gradients]).double().sum(0) / 4
    assert found[0][0][1].tolist() == pytest.approx(true.tolist(), rel=1e-5, abs=1e-6)  # a bias keeps its precision


@pytest.mark.parametrize(
    ("wire", "most"),
    [("bfloat16", 0.01), ("float16", 0.001), ("fp8-e4m3", 0.06), ("fp8-e5m2", 0.12), ("int8", 0.04), ("int4", 0.2)],
)
@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6, 1e20])
def test_means_are_near_the_true_ones(wire: str, most: float, scale: float) -> None:
    gradients = some(8, 60, 20, scale=scale)
    (mean,) = means_of(codec({"a": torch.zeros(60, 20)}, wire), gradients, 8.0)
    true = torch.stack([value.double() for (value,) in gradients]).mean(0)
    assert (mean - true).norm() / true.norm() < most


@pytest.mark.parametrize("dtype", FLOAT8)
def test_sums_of_8_bit_floats(dtype: torch.dtype) -> None:
    """All pairs of numbers: in float32, rounded once, as torch converts them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    assert torch.equal(wide(numbers), numbers.float())
    left, right = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
    sums = (left.float() + right.float()).to(dtype)
    assert torch.equal(add_(left, right).view(torch.uint8), sums.view(torch.uint8))


def test_every_node_of_the_tree_is_rounded() -> None:
    one = codec({"a": torch.zeros(1, 1)}, "bfloat16")
    sums = Accumulator(exact=True)
    for number, value in enumerate((256.0, 1.0, 1.0, 1.0)):
        sums.push(number, one.encode([torch.tensor([[value]])], 0, number))
    (mean,) = cast(list[torch.Tensor], one.decode(sums.total(), 1.0))
    assert mean.item() == 258.0  # 256 + 1 is 256 in bfloat16; 1 + 1 is 2


def test_without_exact_only_what_is_sent_is_rounded() -> None:
    one = codec({"a": torch.zeros(1, 1)}, "bfloat16", exact=False)
    (value,) = one.encode([torch.tensor([[1.00390625 + 2**-12]])], 0, 0)
    assert value is not None and value.dtype == torch.float32 and value.item() == 1.00390625 + 2**-12
    assert one.examples()[0].dtype == torch.bfloat16
    of = context({"a": torch.zeros(1, 1)}, "bfloat16", 8, exact=False)
    assert codec_for(cast(Any, of), of.update.parameters, sends=False) is None


@pytest.mark.parametrize("wire", WIRES[2:])
def test_a_step_is_repeated_if_a_gradient_is_larger_than_foreseen(wire: str) -> None:
    one = codec({"a": torch.zeros(2, 2)}, wire)
    value = torch.full((2, 2), 0.25)

    def attempt(factor: float) -> bool:
        one.encode([value * factor], 0, 0)
        return one.fits()

    assert not attempt(1.0)  # no scale is known
    assert attempt(1.0)
    one.accept()
    assert attempt(1.4)
    one.accept()
    assert not attempt(40.0)
    assert attempt(40.0)
    one.accept()
    assert attempt(1.0) and attempt(-40.0)


@pytest.mark.parametrize("wire", WIRES[2:])
def test_a_change_of_the_loss_scale_changes_no_bits(wire: str) -> None:
    """Without it gradients would look half as large, and use half of the codes until the bound has fallen."""
    plain, scaled = (codec({"a": torch.zeros(6, 2)}, wire) for _ in range(2))
    gradients = some(4, 6, 2)
    for step, scale in enumerate((1024.0, 512.0, 2.0**-20)):
        scaled._context.compute.scale = scale
        means = means_of(plain, gradients, 4.0, step)
        larger = [[value * scale for value in values] for values in gradients]
        found = means_of(scaled, larger, 4.0 * scale, step)
        assert torch.equal(found[0], means[0])
        assert scaled._context.strategy_state == plain._context.strategy_state


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", WIRES[1:])
def test_what_is_not_finite(wire: str, bad: float) -> None:
    """The mean of that parameter is not finite, the others are sound, and the scales stay."""
    one = codec({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, wire)
    sound = [torch.ones(2, 2), torch.ones(2, 2)]
    means_of(one, [sound, sound], 2.0)
    state = copy.deepcopy(one._context.strategy_state)
    first, second = means_of(one, [sound, [torch.tensor([[1.0, bad], [1.0, 1.0]]), sound[1]]], 2.0)
    assert not first.isfinite().all()
    assert torch.allclose(second, torch.ones(2, 2), rtol=0.2)
    assert one._context.strategy_state == state
    if wire != "bfloat16":
        assert first.isnan().all()


@pytest.mark.parametrize("wire", WIRES[1:])
@pytest.mark.parametrize("value", [0.0, 1e-42, -1e-42, 1e38])
def test_zeros_denormals_and_large_floats(wire: str, value: float) -> None:
    one = codec({"a": torch.zeros(1, 1)}, wire)
    for step in range(3):
        (mean,) = means_of(one, [[torch.full((1, 1), value)]], 4.0, step)
        assert mean.item() == pytest.approx(value / 4, rel=0.2, abs=1e-30)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_other_strides_and_types(wire: str) -> None:
    values = torch.randn(4, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    (mean,) = means_of(codec({"a": torch.zeros_like(values)}, wire), [[values]])
    assert mean.stride() == values.stride() and mean.dtype == torch.float64
    assert torch.allclose(mean, values, atol=0.1)


def test_a_parameter_without_gradients() -> None:
    one = codec({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, "int8")
    sums = one.encode([torch.ones(2, 2), None], 0, 0)
    assert one.fits() is False
    sums = one.encode([torch.ones(2, 2), None], 0, 0)
    assert one.fits() and sums[1] is None
    first, none = one.decode(sums, 1.0)
    assert none is None and first is not None and torch.allclose(first, torch.ones(2, 2), rtol=0.05)
