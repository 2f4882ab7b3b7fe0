"""What follows from the losses and gradients of a step."""

import pytest
import torch

from paceline.errors import InputError
from paceline.step.checks import MicrobatchResult, check_gradients, mean_loss, mean_metrics, not_finite, unused
from paceline.step.gradients.accumulate import Accumulator
from paceline.step.loss import check_names, loss_of_result, pair_of, sum_and_count


def part(
    microbatch: int, loss: float = 1.0, count: float = 2.0, missing: frozenset[int] = frozenset()
) -> MicrobatchResult:
    return MicrobatchResult(range(microbatch, microbatch + 1), 0, loss, count, missing)


def test_the_mean_is_over_what_is_counted() -> None:
    parts = [part(0, 10.0, 1.0), part(1, 2.0, 5.0)]
    assert mean_loss(parts, exact=True) == mean_loss(parts, exact=False) == 2.0
    with pytest.raises(InputError, match="count of 0"):
        mean_loss([part(0, 1.0, 0.0)], exact=True)


def test_metrics_are_means_over_what_they_count() -> None:
    parts = [part(0)._replace(metrics=(1.0, 1.0, 5.0, 0.0)), part(1)._replace(metrics=(2.0, 5.0, 0.0, 0.0))]
    for exact in (True, False):
        found = mean_metrics(parts, ["accuracy", "none"], exact)
        assert found["accuracy"] == 0.5 and found["none"] != found["none"]
        assert mean_metrics(parts, None, exact) == {}


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


class Output:
    loss = torch.tensor(0.5)
    logits = torch.zeros(8, 2)


@pytest.mark.parametrize("value", [Output(), {"loss": torch.tensor(0.5), "logits": torch.zeros(8, 2)}])
def test_the_loss_of_a_model_output_is_taken_and_nothing_else(value: object) -> None:
    found = loss_of_result(value, 8)
    assert (found.total.item(), found.counted, found.metrics) == (4.0, 8, {})
    assert loss_of_result((value, {"hits": 3}), 8).pair().tolist() == [4.0, 8.0, 24.0, 8.0]


def test_metrics_are_sums_and_counts_in_the_order_of_their_names() -> None:
    given = {"words": (torch.tensor(6), 4), "hits": torch.tensor(0.25), "all": True}
    found = loss_of_result(((torch.tensor(2.0), torch.tensor(5)), given), 8)
    assert list(found.metrics) == ["all", "hits", "words"]
    assert found.pair().tolist() == [2.0, 5.0, 8.0, 8.0, 2.0, 8.0, 6.0, 4.0]
    assert mean_metrics([MicrobatchResult(range(1), 0, 1.0, 1.0, metrics=(6.0, 4.0))], ["words"], exact=True) == {
        "words": 1.5
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((torch.tensor(1.0), {"hits": torch.zeros(3)}), "The metric 'hits' .* it is a tensor of shape \\[3\\]"),
        ((torch.tensor(1.0), {"hits": None}), "The metric 'hits' .* it is a NoneType"),
        ((torch.tensor(1.0), {3: 0.5}), "must be a text, but it is 3"),
        ((torch.tensor(1.0), torch.zeros(8, 2)), "it is a tuple of a tensor of type .*, a tensor of shape \\[8, 2\\]"),
        ({"loss": None}, "has no loss .* 'labels'"),
        ({"logits": torch.zeros(8, 2)}, "a dict with the keys 'logits'"),
        ((torch.tensor(1.0), 8, {"hits": 1.0}), "must be a scalar tensor"),
    ],
)
def test_what_is_no_loss_and_no_metric_is_named(value: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        loss_of_result(value, 8)


def test_other_names_than_before_are_named() -> None:
    with pytest.raises(InputError, match="without 'hits' and with 'misses', unlike"):
        check_names(("all", "hits"), ("all", "misses"))


def test_data_without_a_target_are_named() -> None:
    with pytest.raises(InputError, match=r"dictionaries with the keys 'ids', 'labels'.*forward="):
        pair_of({"ids": torch.zeros(2), "labels": torch.zeros(2)})
    with pytest.raises(InputError, match="a tensor of shape \\[2, 3\\]"):
        pair_of(torch.zeros(2, 3))
