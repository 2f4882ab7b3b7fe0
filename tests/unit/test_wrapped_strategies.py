"""A strategy around another one hands on everything that the loop and a recovery ask of a strategy."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from paceline.errors import WorkerLost
from paceline.step.gradients.batch_loss import BatchLoss
from paceline.strategies.base import Strategy
from paceline.strategies.batch_losses import BatchLosses


def test_a_loss_over_the_whole_batch_leaves_interrupted_steps_to_the_strategy_within() -> None:
    inner = Mock(spec=Strategy, undecided=True)
    inner.settle.side_effect = WorkerLost("rank 1 was lost when the step was done")
    inner.decide.return_value = frozenset({"weight"})
    loss = BatchLoss(Mock(), Mock(), exact=True)
    around = BatchLosses(cast(Any, SimpleNamespace(compute=SimpleNamespace(batch_loss=loss))), lambda _: inner)
    assert around.undecided
    assert around.decide(2.0) == {"weight"}
    inner.decide.assert_called_once_with(2.0)
    with pytest.raises(WorkerLost):
        around.settle()
