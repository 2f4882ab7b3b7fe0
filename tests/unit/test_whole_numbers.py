"""Gradients as whole numbers: they fit, in any order and for any values, and what does not fit is found."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.step.gradients.accumulate import Values
from paceline.step.gradients.codec import Codec
from paceline.step.gradients.fixed_point import TYPES, WholeNumbers, bits_of

TYPE = pytest.mark.parametrize("dtype", TYPES, ids=str)


def fixed(parameters: dict[str, torch.Tensor], microbatches: int = 8, state: Any = None) -> Codec:
    """For one worker, with what it knows of steps before."""
    context = SimpleNamespace(
        update=SimpleNamespace(parameters={name: nn.Parameter(value) for name, value in parameters.items()}),
        compute=SimpleNamespace(scale=1.0),
        order=SimpleNamespace(microbatches=microbatches),
        world=SimpleNamespace(device=torch.device("cpu")),
        events=SimpleNamespace(mark=lambda *event, **values: None),
        strategy_state={} if state is None else state,
    )
    return Codec(
        cast(Any, context), parameters, [WholeNumbers(value.dtype, microbatches) for value in parameters.values()]
    )


def sums_of(one: Codec, gradients: list[list[torch.Tensor]]) -> Values:
    """The sums over microbatches of copies, in this order."""
    sums: list[torch.Tensor] = []
    for values in gradients:
        whole = [value for value in one.encode([value.clone() for value in values], 0, 0) if value is not None]
        sums = [before + now for before, now in zip(sums, whole, strict=True)] if sums else whole
    return [*sums]


def means_of(one: Codec, gradients: list[list[torch.Tensor]], count: float = 1.0) -> list[torch.Tensor]:
    """As a step does it."""
    while True:
        sums = sums_of(one, gradients)
        if one.fits():
            break
    means = one.decode(sums, count)
    one.accept()
    return cast(list[torch.Tensor], means)


@TYPE
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 11, 1000, 2**16])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_do_not_overflow(dtype: torch.dtype, microbatches: int, sign: int) -> None:
    """All microbatches have the largest gradient that is allowed."""
    below = torch.nextafter(torch.tensor(4.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    largest = sign * (below if dtype == torch.float64 else torch.tensor(4.0 - 4.0 * torch.finfo(dtype).eps / 2))
    one = fixed({"a": torch.zeros(3, dtype=dtype)}, microbatches, {"fixed_point": {"a": 0.0}})
    (whole,) = one.encode([largest.to(dtype).repeat(3)], 0, 0)
    assert whole is not None and one.fits()
    for value in whole.tolist():
        assert abs(value * microbatches) <= torch.iinfo(whole.dtype).max
        assert abs(value) >= 0.99 * 2 ** bits_of(whole.dtype, microbatches)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 9, 2**16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_no_bit_is_wasted(kind: torch.dtype, microbatches: int) -> None:
    bits, most = bits_of(kind, microbatches), torch.iinfo(kind).max
    assert microbatches * 2**bits <= most < microbatches * 2 ** (bits + 1)


@TYPE
def test_the_order_does_not_count(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(50, 7, generator=generator).to(dtype)] for _ in range(11)]
    results = []
    for seed in range(4):
        random.Random(seed).shuffle(gradients)
        one = fixed({"a": torch.zeros(50, 7, dtype=dtype)}, 11)
        results.append(means_of(one, gradients, 11.0)[0])
    assert results[0].dtype == dtype
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_the_mean_is_as_good_as_that_of_floats(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [[scale * torch.randn(4000, generator=generator)] for _ in range(8)]
    (mean,) = means_of(fixed({"a": torch.zeros(4000)}), gradients, 8.0)
    true = torch.stack([value.double() for (value,) in gradients]).mean(0)
    assert (mean - true).norm() / true.norm() < 2**-23


def test_the_ends_of_the_range() -> None:
    """The largest floats are added up; what is below the smallest normal number counts as zero."""
    top = torch.finfo(torch.float32).max
    one = fixed({"a": torch.zeros(2), "b": torch.zeros(2)})
    tiny = torch.full((2,), 1e-42)
    largest, nothing = means_of(one, [[torch.full((2,), top), tiny]], 4.0)
    assert largest.tolist() == pytest.approx([top / 4] * 2, rel=1e-7)
    assert nothing.tolist() == [0.0, 0.0]
    double = fixed({"a": torch.zeros(2, dtype=torch.float64)})
    most = torch.finfo(torch.float64).max
    (mean,) = means_of(double, [[torch.full((2,), most, dtype=torch.float64)]], 4.0)
    assert mean.tolist() == pytest.approx([most / 4] * 2, rel=1e-15)


def test_what_is_not_known_or_too_large_is_found() -> None:
    state: dict[str, Any] = {}
    one = fixed({"a": torch.zeros(2), "b": torch.zeros(2)}, state=state)
    small = torch.tensor([0.3, -0.75])

    def attempt(a: torch.Tensor, b: torch.Tensor) -> bool:
        sums_of(one, [[a, b]])
        return one.fits()

    assert not attempt(small, small)
    assert attempt(small, small)
    one.accept()
    assert state["fixed_point"] == {"a": 0.0, "b": 0.0}
    assert attempt(small, torch.tensor([3.99, 0.0]))
    assert not attempt(small, torch.tensor([0.0, -4.0]))
    assert attempt(small, torch.tensor([0.0, -4.0]))
    one.accept()
    assert state["fixed_point"] == {"a": 0.0, "b": 3.0}


def test_a_bound_rises_at_once_and_falls_slowly() -> None:
    state: dict[str, Any] = {}
    one = fixed({"a": torch.zeros(1)}, state=state)
    for largest in (1.5, 0.01, 0.01, 0.0, 0.01, 20.0):
        means_of(one, [[torch.tensor([largest])]])
    assert state["fixed_point"] == {"a": 5.0}
    for _ in range(8):
        means_of(one, [[torch.tensor([1.0])]])
    assert state["fixed_point"] == {"a": 4.0}
    means_of(one, [[torch.tensor([0.0])]])
    assert state["fixed_point"] == {"a": 4.0}


def test_a_parameter_without_gradients() -> None:
    """None stays none; zeros are zeros, and say nothing of the gradients to come."""
    state: dict[str, Any] = {}
    one = fixed({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, state=state)
    for _ in range(2):
        whole = one.encode([torch.ones(2), None, torch.zeros(2)], 0, 0)
        one.fits()
    assert one.decode([], 2.0, [], []) == []  # of a worker that owns no slice
    first, none, zeros = one.decode(whole, 2.0)
    one.accept()
    assert first is not None and first.tolist() == [0.5, 0.5]
    assert none is None
    assert zeros is not None and zeros.tolist() == [0.0, 0.0]
    assert list(state["fixed_point"]) == ["a"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(bad: float) -> None:
    """The mean of that parameter is NaN, the others are sound, and the units stay."""
    state: dict[str, Any] = {}
    one = fixed({"a": torch.zeros(2), "b": torch.zeros(2)}, state=state)
    sound = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])]
    for gradients in ([sound, sound], [sound, [torch.tensor([bad, 1.0]), sound[1]]]):
        first, second = means_of(one, gradients, 2.0)
        assert second.tolist() == [0.5, 0.25]
        assert state["fixed_point"] == {"a": 2.0, "b": 0.0}
    assert first.isnan().all()


def test_other_strides() -> None:
    values = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    one = fixed({"a": torch.zeros_like(values)})
    (mean,) = means_of(one, [[values]])
    assert mean.stride() == values.stride()
    assert torch.allclose(mean, values, atol=1e-6)
