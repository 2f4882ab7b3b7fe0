"""What follows from the losses and gradients of a step."""

import pytest
import torch

from paceline.errors import InputError
from paceline.step.accumulate import Accumulator
from paceline.step.checks import Part, check_gradients, mean_loss, not_finite, unused
from paceline.step.forward import sum_and_count


def part(microbatch: int, loss: float = 1.0, count: float = 2.0, missing: frozenset[int] = frozenset()) -> Part:
    return Part(range(microbatch, microbatch + 1), 0, loss, count, missing)


def test_the_mean_is_over_what_is_counted() -> None:
    parts = [part(0, 10.0, 1.0), part(1, 2.0, 5.0)]
    assert mean_loss(parts, exact=True) == mean_loss(parts, exact=False) == 2.0
    with pytest.raises(InputError, match="count of 0"):
        mean_loss([part(0, 1.0, 0.0)], exact=True)


def test_the_first_loss_that_is_not_finite_is_found() -> None:
    assert not_finite([part(0), part(1)]) is None
    found = not_finite([part(0), part(1, float("inf")), part(2, float("nan"))])
    assert found is not None
    assert found.microbatches == range(1, 2)


def test_a_parameter_used_by_some_microbatches_only_is_named() -> None:
    parts = [part(0), part(1, missing=frozenset({1}))]
    with pytest.raises(InputError, match=r"'head\.weight' got no gradient from microbatch 1 on rank 0"):
        check_gradients(parts, ["body.weight", "head.weight"])
    everywhere = [part(0, missing=frozenset({1})), part(1, missing=frozenset({1}))]
    check_gradients(everywhere, ["body.weight", "head.weight"])
    assert unused(everywhere) == {1}


@pytest.mark.parametrize("exact", [True, False])
def test_sums_are_sums(exact: bool) -> None:
    values = [torch.tensor([float(2**place)]) for place in range(7)]
    sums = Accumulator(exact)
    for place, value in enumerate(values):
        sums.push(place, [value.clone(), None if place != 3 else torch.ones(1)])
    first, second = sums.total()
    assert first is not None
    assert second is not None
    assert first.item() == 127.0
    assert second.item() == 1.0


def test_a_scalar_is_a_mean_and_a_pair_is_a_sum() -> None:
    total, count = sum_and_count(torch.tensor(0.5), 8)
    assert (total.item(), count) == (4.0, 8)
    total, count = sum_and_count((torch.tensor(0.5), 3), 8)
    assert (total.item(), count) == (0.5, 3)


@pytest.mark.parametrize("value", [torch.zeros(3), 1.0, None, (torch.zeros(2), 1), [torch.tensor(0.0)]])
def test_anything_else_is_no_loss(value: object) -> None:
    with pytest.raises(InputError, match="must be a scalar tensor"):
        sum_and_count(value, 8)
