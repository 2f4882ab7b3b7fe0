"""A backward pass sees the weights of its forward pass, and no memory is kept that nobody needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.strategies.pipeline.weight_stash import WeightStash


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3, bias=False)


def change(layer: nn.Linear) -> None:
    """As an optimizer does: in place."""
    with torch.no_grad():
        layer.weight.mul_(2)


def test_the_backward_pass_sees_the_weights_of_its_forward_pass(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    values = torch.randn(2, 3, requires_grad=True)
    layer(values.sin()).sum().backward()
    expected = values.grad
    values.grad = None
    before = layer.weight.detach().clone()
    made = layer(values.sin()).sum()
    for _ in range(3):
        with stash.update(0):
            change(layer)
    assert torch.equal(layer.weight, 8 * before)
    with stash.use(0):
        assert torch.equal(layer.weight, before)
        made.backward()
    assert expected is not None and values.grad is not None
    assert torch.equal(values.grad, expected)
    assert torch.equal(layer.weight, 8 * before)


def test_a_forward_pass_can_use_an_older_version(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    values, before = torch.randn(2, 3), layer.weight.detach().clone()
    with stash.update(0):
        change(layer)
    with stash.use(0):
        made = layer(values)
    assert torch.equal(made, values @ before.T)
    made.sum().backward()
    assert layer.weight.grad is not None
    assert stash.newest == 1


def test_versions_are_kept_from_the_oldest_one_that_is_needed(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    counts = []
    for oldest in (0, 0, 0, 1, 2, 2, 6, 7):
        with stash.update(oldest):
            change(layer)
        counts.append(len(stash))
    assert counts == [2, 3, 4, 4, 4, 5, 2, 2]
    with pytest.raises(KeyError), stash.use(3):
        pass


def test_weights_that_no_microbatch_needs_are_changed_where_they_are(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    place = layer.weight.data_ptr()
    with stash.update(1):
        change(layer)
    assert (layer.weight.data_ptr() == place, len(stash)) == (True, 1)
    with stash.update(1):
        change(layer)
    assert (layer.weight.data_ptr() == place, len(stash)) == (False, 2)


def test_after_an_error_the_newest_weights_are_back(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    with stash.update(0):
        change(layer)
    newest = layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), stash.use(0):
        raise ZeroDivisionError
    assert torch.equal(layer.weight, newest)


def test_when_nothing_is_under_way_it_counts_from_the_start(layer: nn.Linear) -> None:
    stash = WeightStash([layer.weight])
    with stash.update(0):
        change(layer)
    newest = layer.weight.detach().clone()
    stash.reset()
    assert (stash.newest, len(stash)) == (0, 1)
    with stash.use(0):
        assert torch.equal(layer.weight, newest)
