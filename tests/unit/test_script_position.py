"""Where the script is in the data: what it gets next, alone, after a resume, and while the workers change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.data.growing.order import Additions, GrowingOrder
from paceline.data.growing.samples import Growing
from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.data.order import UNKNOWN, Order
from paceline.errors import ConfigError
from paceline.schedule.audits import AuditSchedule
from paceline.step.context import Batch, StepResult
from paceline.training.batches import Batches
from paceline.training.loop import TrainingLoop
from paceline.training.position import Position
from paceline.training.progress import Progress

RESULT = StepResult(1.0, 1.0, 0.1)
ORDER = Order(length=14, batch=4, microbatches=2, seed=3)  # an epoch has 4 steps, the last one half a batch


class Scene:
    """The batches that a script gets from a loop that does as the test says."""

    def __init__(self, progress: Progress | None = None, ahead: bool = False, order: Any = ORDER) -> None:
        self.loads: list[tuple[int, int]] = []
        self.ended = self.synchronized = 0
        self.doing: list[str] = []
        self.world = SimpleNamespace(generation=0)
        self.marks: list[dict[str, Any]] = []
        context: Any = SimpleNamespace(
            order=order,
            world=self.world,
            events=SimpleNamespace(mark=lambda _, **fields: self.marks.append(fields)),
            feed=SimpleNamespace(steps=self._load, sizes=None),
            probe_results=SimpleNamespace(warnings=[]),
            loop=SimpleNamespace(record_changes=lambda: None, refresh=lambda: None),
            audits=AuditSchedule(),
        )
        self.on_synchronize: Callable[[], None] = lambda: None
        self.loop: Any = SimpleNamespace(
            context=context,
            progress=progress or Progress(),
            loads_ahead=ahead,
            records=SimpleNamespace(last_step=UNKNOWN),
            activity=SimpleNamespace(begin=self.doing.append),
            strategy=SimpleNamespace(groups=lambda step: [range(1)]),
            synchronize=self._synchronize,
            end_batch=self._end_batch,
            leave_out=self._leave_out,
        )
        self.position = self.loop.position = Position(3, self.loop.progress.steps)
        self.of = Batches(self.loop)

    def _load(self, start: int, stop: int, groups: Callable[[int], Any]) -> Iterator[list[str]]:
        self.loads.append((start, stop))
        for step in range(start, stop):
            yield [f"groups of {step}"]

    def _synchronize(self) -> None:
        self.synchronized += 1
        self.on_synchronize()

    def _end_batch(self) -> None:
        self.ended += 1

    def _leave_out(self, step: int) -> None:
        TrainingLoop.leave_out(self.loop, step)

    def step(self, batch: Batch) -> None:
        """As ``TrainingLoop.step`` does."""
        if batch.step >= self.loop.progress.steps:
            self.loop.progress.take(batch.step, RESULT)
        self.position.move_to(batch.step + 1)

    def train(self, batches: Iterator[Batch]) -> list[int]:
        seen = []
        for batch in batches:
            seen.append(batch.step)
            self.step(batch)
        return seen


def drawn() -> float:
    return torch.rand(()).item()


def drawn_at(step: int, kind: int) -> float:
    seed_all(seed_of(LOOP, 3, step, kind))
    return drawn()


def test_batches_follow_each_other_with_random_numbers_of_their_own() -> None:
    scene = Scene()
    seen = []
    for batch in scene.of.batches(steps=6):
        before = drawn()
        assert scene.position.among_batches and scene.position.steps == batch.step
        scene.step(batch)
        assert (before, drawn()) == (drawn_at(batch.step, True), drawn_at(batch.step + 1, False))
        assert batch.groups == [f"groups of {batch.step}"] and batch.generation == 0 and batch.waited >= 0
        seen.append((batch.step, batch.epoch, batch.samples, batch.last))
    assert seen == [
        (0, 0, 4, False),
        (1, 0, 4, False),
        (2, 0, 4, False),
        (3, 0, 2, True),
        (4, 1, 4, False),
        (5, 1, 4, False),
    ]
    assert not scene.position.among_batches and scene.position.target == 6
    assert (scene.ended, scene.synchronized) == (6, 1)
    assert scene.loads == [(step, step + 1) for step in range(6)]
    assert scene.marks == [{"position": 0, "steps": 6}]
    assert scene.doing[:3] == ["in the data loader", "in the script", "in the data loader"]


def test_loops_go_on_where_the_one_before_ended() -> None:
    scene = Scene(ahead=True)
    assert scene.train(scene.of.batches(steps=3)) == [0, 1, 2]
    assert scene.train(scene.of.batches(steps=3)) == [3, 4, 5]
    assert scene.loads == [(0, 3), (3, 6)]
    assert scene.train(scene.of.batches()) == [6, 7], "to the end of the epoch"
    assert scene.train(scene.of.batches(epochs=2)) == list(range(8, 16))
    scene.loop.records.last_step = 18
    assert scene.train(scene.of.batches(steps=5)) == [16, 17]


def test_a_loop_that_is_left_early_is_over_when_the_next_begins() -> None:
    scene = Scene(ahead=True)
    first = scene.of.batches(steps=6)
    for batch in first:
        scene.step(batch)
        if batch.step == 1:
            break
    assert scene.position.among_batches
    assert scene.train(scene.of.batches(steps=2)) == [2, 3]
    assert list(first) == []


def test_epochs_set_the_target() -> None:
    scene = Scene()
    seen = []
    for epoch in scene.of.epochs(3):
        assert scene.position.epoch == epoch and not scene.position.among_batches and scene.position.target == 4 * epoch
        seen.append((epoch, scene.train(scene.of.batches())))
    assert seen == [(epoch, list(range(4 * epoch, 4 * epoch + 4))) for epoch in range(3)]
    assert scene.position.epoch is None
    assert [one["steps"] for one in scene.marks] == [12, 12, 12]


def test_an_epoch_that_is_left_early_ends_with_it() -> None:
    scene = Scene()
    steps = []
    for epoch in scene.of.epochs(2):
        for batch in scene.of.batches():
            scene.step(batch)
            steps.append(batch.step)
            if epoch == 0:
                break
    assert steps == [0, 4, 5, 6, 7]


def test_epochs_without_batches_move_on() -> None:
    scene = Scene()
    assert [(epoch, scene.position.steps) for epoch in scene.of.epochs(3)] == [(0, 0), (1, 4), (2, 8)]


def test_an_epoch_of_unknown_length_cannot_be_left() -> None:
    order = SimpleNamespace(epoch_of=lambda step: 0, first_of=lambda epoch: UNKNOWN if epoch else 0, grows=False)
    with pytest.raises(ConfigError, match="left the loop over the batches of a stream early"):
        list(Scene(order=order).of.epochs(2))


@pytest.mark.parametrize(("steps", "epochs", "first"), [(0, [0, 1], 0), (3, [0, 1], 3), (4, [0, 1], 4), (6, [1], 6)])
def test_a_resumed_script_goes_on_in_its_epoch(steps: int, epochs: list[int], first: int) -> None:
    """It gets the batch of the last step once more, as what follows a step may be yet to be done."""
    scene = Scene(Progress(steps, result=RESULT if steps else None, received=steps))
    seen, got = [], []
    for epoch in scene.of.epochs(2):
        seen.append(epoch)
        got += scene.train(scene.of.batches())
    again = [steps - 1] if steps else []
    assert seen == epochs and got == again + list(range(first, 8))
    assert scene.loop.progress.steps == 8


def test_a_received_step_has_no_groups() -> None:
    scene = Scene(Progress(3, result=RESULT, received=3))
    batches = scene.of.batches(steps=5)
    batch = next(batches)
    assert (batch.step, batch.groups, batch.generation, batch.waited) == (2, [], -1, 0.0)
    assert drawn() == drawn_at(2, True) and scene.position.steps == 2 and scene.loads == []
    scene.step(batch)
    assert next(batches).step == 3 and scene.ended == 1


def test_a_state_received_before_any_result_is_gone_on_from() -> None:
    scene = Scene(Progress(3, received=3))
    assert scene.train(scene.of.batches(steps=5)) == [3, 4]


def test_the_state_of_workers_that_are_further_is_followed() -> None:
    """Received in the middle of a loop: the batch of the last step that the others have done comes once more."""
    scene = Scene(ahead=True)
    seen = []
    for batch in scene.of.batches(steps=8):
        seen.append(batch.step)
        if batch.step == 1:
            scene.loop.progress = Progress(5, result=RESULT, received=5)
            scene.world.generation = 1
        scene.step(batch)
    assert seen == [0, 1, 4, 5, 6, 7]
    assert scene.loads == [(0, 8), (5, 8)]


def test_batches_are_loaded_anew_for_other_workers() -> None:
    scene = Scene(ahead=True)
    for batch in scene.of.batches(steps=4):
        if batch.step == 1:
            scene.world.generation = 1
        assert batch.generation == (0 if batch.step < 2 else 1)
        scene.step(batch)
    assert scene.loads == [(0, 4), (2, 4)]


def test_a_loop_goes_on_if_the_others_are_further_at_its_end() -> None:
    scene = Scene()

    def join() -> None:
        if scene.synchronized == 1:
            scene.loop.progress = Progress(7, result=RESULT, received=7)

    scene.on_synchronize = join
    assert scene.train(scene.of.batches(steps=8)) == [0, 1, 2, 3, 4, 5, 6, 7]
    scene = Scene()
    scene.on_synchronize = join
    assert scene.train(scene.of.batches(steps=4)) == [0, 1, 2, 3]
    assert scene.position.steps == 7 and scene.synchronized == 2


def test_a_batch_that_is_not_given_to_a_step_is_left_out() -> None:
    scene = Scene(ahead=True)
    for batch in scene.of.batches(steps=4):
        if batch.step in (1, 2):
            continue
        scene.step(batch)
    assert scene.loop.progress.left_out == {1, 2}
    assert scene.loop.progress.steps == 4 and scene.ended == 2
    scene = Scene(Progress(6, received=2, result=RESULT))
    scene.position.move_to(4)
    scene.loop.leave_out(4)
    assert (scene.loop.progress.steps, scene.position.steps) == (6, 5)


def test_calls_are_counted_at_each_position_of_the_script() -> None:
    scene = Scene()
    assert [scene.position.count("evaluate") for _ in range(2)] == [((0, -1, 0), 0), ((0, -1, 0), 1)]
    assert scene.position.count("predict") == ((0, -1, 0), 0)
    for epoch in scene.of.epochs(1):
        assert scene.position.count("evaluate") == ((0, epoch, 0), 0)
        for batch in scene.of.batches(steps=2):
            after_a_step = int(batch.step > 0)  # the call after the step before is at the same position
            assert scene.position.count("evaluate") == ((batch.step, epoch, 1), after_a_step)
            scene.step(batch)
            assert scene.position.count("evaluate") == ((batch.step + 1, epoch, 1), 0)
        assert scene.position.count("evaluate") == ((2, epoch, 0), 0)
        assert scene.position.count("predict") == ((2, epoch, 0), 0)


def test_a_call_that_raises_does_not_count() -> None:
    scene, found = Scene(), []
    for fails in (True, False, True, True, False):
        with suppress(LookupError), scene.position.counting("extend") as (_, number):
            found.append(number)
            if fails:
                raise LookupError
    assert found == [0, 0, 1, 1, 1] and scene.position.count("extend")[1] == 2


def test_an_epoch_that_may_become_longer_is_not_loaded_before_it_begins() -> None:
    order = GrowingOrder(Growing(range(8)), 4, 2, seed=3, drop_last=False)
    scene, seen = Scene(ahead=True, order=order), []
    for batch in scene.of.batches(epochs=3):
        if batch.step == 1:
            order.add_result("extend", (1, -1, 1), Additions([b"more"], steps=1, begun=2))
        scene.step(batch)
        seen.append((batch.step, batch.epoch, batch.samples))
    assert seen == [(0, 0, 4), (1, 0, 4), (2, 1, 4), (3, 1, 4), (4, 1, 1), (5, 2, 4), (6, 2, 4), (7, 2, 1)]
    assert scene.loads == [(0, 2), (2, 5), (5, 8)]
    assert scene.loop.context.audits.last is None, "a worker that joins would expect another last step"


def test_a_resumed_script_has_asked_for_nothing_beyond_its_loop() -> None:
    scene = Scene(Progress(6, received=6, result=RESULT))
    assert (scene.position.steps, scene.position.target, scene.position.asked) == (6, 0, 0)
    scene.train(scene.of.batches(steps=4))
    assert scene.position.asked == 4


def test_the_random_numbers_after_a_phase_are_its_own() -> None:
    scene = Scene()
    draws = []
    for turn in (0, 1, 2):
        scene.position.move_to(5, turn=turn)
        draws.append(drawn())
    assert draws == [drawn_at(5, 0), drawn_at(5, 2), drawn_at(5, 3)]
