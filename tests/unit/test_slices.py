"""Slices of parameters: every element has one owner, cuts lie at blocks, and updates of slices have the same bits."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from paceline.schedule.slices import BLOCK, Slice, covers, even, not_owned, slice_name, split_name, whole
from paceline.step.probes.slice_probe import updates_slices_alike


def check(slices: list[Slice], sizes: list[int], workers: int) -> None:
    assert all(0 <= one.owner < workers and one.start < one.stop for one in slices)
    for parameter, size in enumerate(sizes):
        ranges = sorted((one.start, one.stop) for one in slices if one.parameter == parameter)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])] and ranges[-1][1] == size
        assert all(start % BLOCK == 0 for start, _ in ranges)


def test_each_element_has_one_owner() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice([1, 63, 64, 65, draw.randrange(1, 5000)]) for _ in range(draw.randrange(1, 9))]
        backwards = list(range(len(sizes)))[::-1]
        at = sorted(draw.sample(range(1, len(sizes)), min(2, len(sizes) - 1)))
        runs = [backwards[a:b] for a, b in zip([0, *at], [*at, len(sizes)], strict=True)]
        workers = draw.randrange(1, 9)
        slices = even(sizes, runs, workers)
        check(slices, sizes, workers)
        assert [one.parameter for one in slices] == sorted((one.parameter for one in slices), reverse=True)
        for run in runs:
            total = sum(sizes[index] for index in run)
            held = Counter[int]()
            for one in slices:
                held[one.owner] += (one.stop - one.start) * (one.parameter in run)
            assert max(held.values()) <= total / workers + 2 * BLOCK


def test_whole_parameters_are_shared_out_by_size() -> None:
    sizes = [5, 400, 100, 300, 1, 200]
    slices = whole(sizes, 2)
    check(slices, sizes, 2)
    loads = Counter[int]()
    for one in slices:
        loads[one.owner] += one.stop - one.start
    assert sorted(loads.values()) == [501, 505]
    assert {one.owner for one in whole([3], 4)} == {0}


def test_what_is_not_owned() -> None:
    owned = [slice_name("a", 0, 64), slice_name("a", 64, 100), "b", slice_name("c[1]", 64, 70)]
    assert [split_name(one)[0] for one in owned] == ["a", "a", "b", "c[1]"]
    assert not_owned({"a": 100, "b": 7, "c[1]": 70, "d": 1}, owned) == ["c[1]", "d"]
    assert not_owned({"a": 101}, owned) == ["a"]
    assert covers([(64, 100), (0, 70)], 100) and not covers([(64, 100), (0, 63)], 100)


optim = torch.optim
ALIKE: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    **{name.lower(): getattr(optim, name) for name in ("Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam")},
    **{name.lower(): getattr(optim, name) for name in ("RAdam", "RMSprop", "Rprop")},
}
WAYS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
NOT_FUSED = {("fused", name) for name in ALIKE if name not in ("sgd", "adamw", "adam", "adagrad")}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in ALIKE for way in WAYS if (way, name) not in NOT_FUSED]
)
def test_a_slice_gets_the_bits_of_the_whole(name: str, way: str) -> None:
    """Also in a large parameter, of which torch's threads and vectors see other parts."""
    make = partial(ALIKE[name], **WAYS[way])
    for dtype, size in (torch.float32, 100_003), (torch.float64, 40_001):
        assert updates_slices_alike(make([nn.Parameter(torch.zeros(8, 2, dtype=dtype))]))
        draw = torch.Generator().manual_seed(1)
        given = torch.randn(size, dtype=dtype, generator=draw)
        cuts = [0, BLOCK, 37 * BLOCK, 512 * BLOCK, 513 * BLOCK, size]
        parts = [slice(*pair) for pair in pairwise(cuts)]
        one, several = nn.Parameter(given.clone()), [nn.Parameter(given[part].clone()) for part in parts]
        optimizers = make([one]), make(several)
        for _ in range(3):
            one.grad = torch.randn(size, dtype=dtype, generator=draw)
            for value, part in zip(several, parts, strict=True):
                value.grad = one.grad[part].clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(torch.cat([value.detach() for value in several]), one.detach())


class Normed(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                value.grad = value.grad / value.grad.norm()
        super().step()


class Quantized(optim.SGD):
    """From 4,096 elements on, rounds the gradients in blocks of 256, each with a scale of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.numel() >= 4096:
                    parts = value.grad.reshape(-1).split(256)
                    value.grad = torch.cat([part / part.abs().max() for part in parts]).view_as(value)
        super().step()


class Preconditioned(optim.SGD):
    """Has a matrix for the first dimension of a parameter, which would take 600 MB for a vector of 12,288 elements."""

    largest = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                Preconditioned.largest = max(len(value), self.largest)
                assert len(value) < 1000
                flat = value.grad.reshape(len(value), -1)
                value.grad = torch.linalg.solve(torch.eye(len(value)) + flat @ flat.T, flat).view_as(value)
        super().step()


def test_an_optimizer_with_large_matrices_is_tried_on_few_elements() -> None:
    assert not updates_slices_alike(Preconditioned([nn.Parameter(torch.zeros(8))], lr=0.1))
    assert 0 < Preconditioned.largest < 1000


@pytest.mark.parametrize("make", [optim.Adafactor, optim.Muon, Normed, Quantized, optim.LBFGS])
def test_an_optimizer_that_looks_at_a_whole_parameter_is_noticed(make: Callable[..., optim.Optimizer]) -> None:
    optimizer = make([nn.Parameter(torch.zeros(8, 2))])
    before = torch.get_rng_state()
    assert not updates_slices_alike(optimizer)
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state


def test_an_optimizer_with_a_step_hook_is_not_cut() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(8, 2))], lr=0.1)
    assert updates_slices_alike(optimizer)
    optimizer.register_step_pre_hook(lambda *given: None)
    assert not updates_slices_alike(optimizer)
