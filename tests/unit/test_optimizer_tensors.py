"""Loading the tensors of an optimizer: into those it has where they fit, else into new ones."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.tensors import load_optimizer_state, optimizer_state
from paceline.errors import CheckpointError


@pytest.mark.parametrize(
    ("existing", "kept"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(2, 3, 4), False),
        (torch.ones(3, 4, dtype=torch.float64), False),
        (torch.ones(4, 3).t(), False),
        (None, False),
    ],
    ids=["the same", "another shape", "another type", "other strides", "none"],
)
def test_a_value_goes_where_it_fits(existing: torch.Tensor | None, kept: bool) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if existing is not None:
        optimizer.state[model.weight]["momentum_buffer"] = existing
    value = torch.arange(12.0).view(3, 4)
    load_optimizer_state(model, optimizer, {"optimizer/weight/momentum_buffer": value})
    loaded = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(loaded, value) and loaded.dtype == value.dtype and loaded.shape == value.shape
    assert (loaded is existing) == kept and loaded is not value


def test_a_count_is_a_number_again() -> None:
    """A power of a tensor is computed in float32, so a resumed SparseAdam would have other bits."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] |= {"step": 3, "skipped": True, "size": torch.tensor(3.0)}
    state = dict(optimizer_state(model, optimizer))
    load_optimizer_state(model, optimizer, state)
    loaded = optimizer.state[model.weight]
    assert [type(loaded[key]) for key in ("step", "skipped", "size")] == [int, bool, torch.Tensor]
    assert (loaded["step"], loaded["skipped"], loaded["size"]) == (3, True, 3.0)


def test_a_parameter_that_the_model_does_not_have() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer state for 'other', which the model does not have"):
        load_optimizer_state(model, optimizer, {"optimizer/other/momentum_buffer": torch.ones(1)})
