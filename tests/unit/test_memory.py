"""Which blocks of a model are recomputed to fit into a budget of memory, and what would fit otherwise."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from paceline.planning.blocks import blocks_of
from paceline.planning.budget import optimizer_bytes
from paceline.planning.memory import Run, Segment, choose, cures, fit, held_sums, need, peak_bytes


def blocks(*saved: int, inputs: int = 10) -> list[Segment]:
    """Blocks of a second each, and a loss."""
    return [Segment(f"b{place}", size, inputs, 1.0) for place, size in enumerate(saved)] + [Segment("", 30)]


RUN = Run(1000, 1000, 2000, 1000, tuple(blocks(100, 100, 100)), batch=64, microbatches=8, workers=2, tree=True)


def test_a_recomputed_block_needs_its_activations_once_more() -> None:
    layers = blocks(100, 100, 100)
    assert peak_bytes(layers) == 330
    assert peak_bytes(layers, {"b0"}) == 240
    assert peak_bytes(layers, {"b2"}) == 310  # the backward pass of the last block begins when the loss is released
    assert peak_bytes(layers, {"b0", "b1", "b2"}) == 130


def test_a_block_that_is_called_twice_is_recomputed_twice() -> None:
    layers = [Segment("shared", 100, 10, 1.0), Segment("", 5), Segment("shared", 100, 10, 1.0), Segment("", 5)]
    assert peak_bytes(layers, {"shared"}) == 125
    assert choose(layers, 130) == frozenset({"shared"})


def test_nothing_is_recomputed_without_need() -> None:
    assert choose(blocks(100, 100), 230) == frozenset()


def test_cheap_blocks_come_first() -> None:
    layers = [
        Segment("slow", 100, 0, 9.0),
        Segment("cheap", 90, 0, 1.0),
        Segment("small", 10, 0, 1.0),
        Segment("", 50),
    ]
    assert choose(layers, 190) == frozenset({"cheap"})
    assert choose(layers, 189) == frozenset({"slow"})  # the backward pass of the other one needs its activations again
    assert choose(layers, 149) == frozenset({"slow", "cheap"})
    assert choose(layers, 99) is None


def test_what_turns_out_to_be_needless_is_left_out() -> None:
    layers = [Segment("small", 20, 0, 0.1), Segment("large", 100, 0, 1.0), Segment("", 100)]
    assert choose(layers, 130) == frozenset({"large"})


def test_a_block_whose_inputs_are_as_large_is_kept() -> None:
    assert choose([Segment("a", 100, 100, 1.0), Segment("", 10)], 100) is None
    assert fit(replace(RUN, segments=tuple(blocks(10, 10))), 0, able=True, fusible=False).recomputed == frozenset()


def test_the_choice_fits_and_is_not_far_from_the_best() -> None:
    draw = random.Random(7)
    for _ in range(60):
        layers = [
            Segment(f"b{place}", draw.randint(50, 200), draw.randint(0, 40), draw.uniform(1.0, 2.0))
            for place in range(6)
        ] + [Segment("", 40)]
        limit = draw.randint(250, peak_bytes(layers))
        every = [set(some) for size in range(7) for some in itertools.combinations([f"b{i}" for i in range(6)], size)]
        fitting = [some for some in every if peak_bytes(layers, some) <= limit]
        chosen = choose(layers, limit)
        if chosen is None:
            assert not fitting
            continue
        assert chosen in fitting

        def seconds(some: set[str] | frozenset[str], layers: list[Segment] = layers) -> float:
            return sum(one.seconds for one in layers if one.name in some)

        assert seconds(chosen) <= min(map(seconds, fitting)) + 2.0  # one block more at most


def test_the_state_of_a_strategy() -> None:
    alone = need(RUN)
    assert (alone.weights, alone.gradients, alone.optimizer) == (1000, 1000, 2000)
    assert need(replace(RUN, stage=1)).optimizer == 1000
    assert need(replace(RUN, stage=1, workers=3)).optimizer == 667
    one, two, three = (need(replace(RUN, stage=stage, sharing=2, window=7)) for stage in (1, 2, 3))
    assert (one.weights, one.gradients, two.weights) == (RUN.weights, RUN.gradients, RUN.weights)
    assert two.gradients == three.gradients == RUN.gradients // RUN.workers + 7
    assert three.weights == RUN.weights // RUN.workers


def test_sums_of_microbatches() -> None:
    assert [held_sums(8, workers, tree=True) for workers in (1, 2, 3, 8)] == [3, 2, 2, 0]
    assert [held_sums(8, workers, tree=False) for workers in (1, 2, 8)] == [1, 1, 0]
    assert need(RUN).sums == 2000
    assert need(replace(RUN, even_shares=False)).sums == 3000  # a fast worker may compute all of a batch


def test_microbatches_are_computed_one_by_one_before_a_block_is_recomputed() -> None:
    run = replace(RUN, tree=False, segments=tuple(blocks(1000, 1000, 1000)))
    assert need(run, fused=True).activations == 4 * 3030
    whole, apart = (fit(run, limit, able=True, fusible=True) for limit in (16120, 16119))
    assert (whole.fused, whole.need.total) == (True, 16120)
    assert (apart.fused, apart.need.total, apart.recomputed) == (False, 8030, frozenset())
    assert fit(run, 8029, able=True, fusible=True).recomputed


def test_what_would_fit() -> None:
    assert cures(RUN, 6200, able=False) == [
        'recompute="auto" (6,150 bytes)',
        'strategy="sharded" (4,830 bytes)',
    ]
    assert cures(RUN, 4600, able=True) == ['3 workers and strategy="sharded" (4,331 bytes)']
    wide = replace(RUN, tree=False, segments=tuple(blocks(1000, 1000)))
    assert "microbatches=16 (6,015 bytes)" in cures(wide, 6500, able=False)
    (alone,) = cures(RUN, 1500, able=True)
    assert alone.startswith('microbatches=16, recompute="auto", strategy="sharded" and 16 workers')
    assert cures(RUN, 1050, able=True) == []


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 4),
        (torch.optim.AdamW, 8),
        (partial(torch.optim.AdamW, amsgrad=True), 12),
        (torch.optim.LBFGS, 8),  # cannot be tried without a closure
    ],
)
def test_the_state_of_an_optimizer(kind: partial[torch.optim.Optimizer], each: int) -> None:
    model = nn.Linear(100, 30)
    found = optimizer_bytes(kind(model.parameters()))
    assert found - 8 <= each * 3030 <= found  # Adam counts the steps of each parameter


class Layer(nn.Module):
    """A layer with layers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def body(*children: nn.Module) -> nn.Module:
    model = nn.Module()
    model.first, model.body, model.last = nn.Linear(2, 2), nn.Sequential(*children), nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (body(Layer(), Layer()), ["body.0", "body.1"]),
        (
            body(nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])),
            ["body.0.0", "body.0.1", "body.1.0", "body.1.1"],
        ),
        (body(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))), ["body.0", "body.1"]),
        (body(nn.Linear(2, 2), nn.ReLU()), ["first", "body", "last"]),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), ["0.0", "0.1"]),
        (nn.Linear(2, 2), []),
    ],
)
def test_blocks_are_repeated_classes_or_children(model: nn.Module, names: list[str]) -> None:
    assert list(blocks_of(model)) == names
