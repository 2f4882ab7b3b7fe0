"""Random numbers follow from what they are for."""

import itertools
import random

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from paceline.data import keys
from paceline.data.keys import ORDER, STEP, generator_states, replay_context, same_states, seed_all, seed_of


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.random())]


def test_a_key_has_one_seed_on_every_machine() -> None:
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3)
    assert seed_of(STEP, 0, 7, 3) == 2995460484255561091


def test_neighbouring_keys_do_not_meet() -> None:
    keys = [(use, *rest) for use in (ORDER, STEP) for rest in itertools.product(range(4), range(12), range(8))]
    seeds = {seed_of(*key) for key in [*keys, (ORDER,), (ORDER, 0), (ORDER, 0, 0)]}
    assert len(seeds) == len(keys) + 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_all_generators_are_seeded() -> None:
    seed_all(5)
    first = draws()
    assert draws() != first
    seed_all(5)
    assert draws() == first
    seed_all(2**63 - 1)
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_a_draw_is_noticed_whoever_draws() -> None:
    before = generator_states()
    assert same_states(before, generator_states())
    for draw in (lambda: torch.rand(1), random.random, numpy.random.random):
        before = generator_states()
        draw()
        assert not same_states(before, generator_states())


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    """Also the second time, as where a backward pass is done in two halves."""
    drawn = []

    def noisy(values: torch.Tensor) -> torch.Tensor:
        drawn.append(draws())
        return values.sin() * sum(drawn[-1])

    values = torch.ones((), requires_grad=True)
    made = checkpoint(noisy, values, use_reentrant=False, context_fn=replay_context)
    after = generator_states()
    for _ in range(2):
        seed_all(len(drawn))
        now = generator_states()
        made.backward(retain_graph=True)
        assert same_states(now, generator_states())
    assert drawn == [drawn[0]] * 3
    assert not same_states(after, generator_states())


def test_generators_of_a_device_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.arange(4, dtype=torch.uint8)
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device)
    monkeypatch.setattr(torch.cuda, "set_rng_state", taken.append)
    packed = keys.pack_generators()
    drawn = random.random(), numpy.random.random_sample(), torch.rand(()).item()
    keys.unpack_generators(packed)
    assert (random.random(), numpy.random.random_sample(), torch.rand(()).item()) == drawn
    assert [one.tolist() for one in taken] == [device.tolist()]
