"""A step that is done when a worker is lost: what followed from it in the former membership no longer counts."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import torch._dynamo  # noqa: F401 - an optimizer imports it, and it sets a variable of the environment

from paceline.errors import WorkerLost
from paceline.settings import Settings
from paceline.step.context import StepResult
from paceline.training.loop import TrainingLoop
from paceline.training.progress import Progress


def loop_at(steps: int, back_to: int) -> Any:
    """A loop whose strategy is interrupted in the first exchange of weights, which leads back to ``back_to`` steps."""
    loop: Any = TrainingLoop.__new__(TrainingLoop)
    loop.context, loop.activity, loop.records, loop.strategy = MagicMock(), Mock(), Mock(), Mock()
    loop.context.settings, loop.context.loop.parameter = Settings(strategy="sharded", batch=8), None
    loop.context.world.generation, loop.context.world.size = 1, 2
    loop.context.loop.not_restored.return_value = loop.context.loop.without_effect.return_value = None
    loop._closed = loop._strategy_ready = False
    loop.records.begin.return_value = 0.0
    loop._progress, loop._recovery, loop._script, loop._notice = Progress(steps, repeat_until=6), Mock(), Mock(), 0
    loop._run_step = lambda *_: StepResult(0.5, 1.0, 0.1, notice=2)
    loop.strategy.settle.side_effect = [WorkerLost("rank 1 was lost"), None, None, None, None]
    loop._follow = Mock()
    loop.saved = []
    loop._checkpointer, loop._script.is_ahead.return_value = Mock(), False
    loop._begin_save = lambda: loop.saved.append(loop.progress.steps)

    def re_form(lost: WorkerLost) -> None:
        loop._progress, loop._notice = Progress(back_to, repeat_until=6), 0
        loop.context.world.generation += 1

    loop._re_form = re_form
    return loop


def test_a_repeated_step_from_which_the_workers_go_back_is_not_saved() -> None:
    loop = loop_at(4, back_to=3)
    loop._together(lambda: loop._repeat_lost_steps(6))
    assert loop.progress.steps == 6
    assert loop.saved == [4, 5, 6], "others would not save step 3, and wait for another exchange"
    assert len(loop._follow.call_args_list) == 3


def test_the_notice_of_a_step_ends_with_its_membership() -> None:
    loop = loop_at(6, back_to=7)
    loop.position, loop._conclude = Mock(check=lambda *_: 0, steps=0), Mock()
    batch = SimpleNamespace(step=6, groups=[], generation=1, waited=0.0)
    loop.step(batch)
    assert loop._notice == 0, "the others have none, and would not re-form"
    loop.step(SimpleNamespace(step=7, groups=[], generation=2, waited=0.0))
    assert loop._notice == 2
