"""How far workers are: their order, what was done before a state was received, and what a checkpoint keeps."""

from itertools import pairwise

import torch

from paceline.recovery.progress import BEFORE_TRAINING, Progress
from paceline.step.job import StepResult


def test_the_furthest_worker_has_the_largest_key() -> None:
    asked = {(3, -1, 0): [1.0]}
    in_order = [
        Progress(),
        Progress(tie_break=1),
        Progress(exports={0: 1}),
        Progress(exports={0: 1, 1: 1}),
        Progress(3),
        Progress(3, tie_break=5),
        Progress(3, evaluations=asked),
        Progress(3, once=asked, tie_break=1),
        Progress(3, once=asked, tie_break=2),
        Progress(3, evaluations=asked, once=asked),
        Progress(3, evaluations={(3, -1, 0): [1.0, 2.0, 3.0]}),
        Progress(3, evaluations=asked, exports={3: 2}, predictions={(3, -1, 0): 1}),
        Progress(3, turns=1),
        Progress(3, turns=1, evaluations=asked),
        Progress(3, turns=2),
        Progress(4),
    ]
    assert all(one.key < other.key for one, other in pairwise(in_order))


def test_what_others_did_before_a_state_was_received() -> None:
    assert not Progress(5).has_received(0)
    taken = Progress(5, received=5)
    assert [taken.has_received(step) for step in (0, 3, 4, 5)] == [True, True, True, False]
    assert not taken.has_received(4, turn=1)
    phases = Progress(5, received=5, received_turns=2)
    assert [phases.has_received(4, turn) for turn in (0, 1, 2)] == [True, True, False]
    assert phases.has_received(3, turn=2) and not phases.has_received(5)


def test_steps_and_their_phases_that_are_done() -> None:
    progress = Progress()
    first, second, again = (StepResult(loss, 1.0, 0.1) for loss in (1.0, 2.0, 3.0))
    progress.take(4, first)
    assert (progress.steps, progress.result, progress.turns, progress.results) == (5, first, 0, [])
    assert progress.result_of(0) is first
    progress.take(5, first, turn=0)
    progress.take(5, second, turn=1)
    assert (progress.steps, progress.result, progress.turns, progress.results) == (6, second, 2, [first, second])
    assert [progress.result_of(turn) for turn in (0, 1, 2)] == [first, second, second]
    progress.take(6, again, turn=0)
    assert (progress.turns, progress.results) == (1, [again])


def test_a_checkpoint_keeps_what_the_script_was_told() -> None:
    made = {(6, -1, 1): [0.5]}
    result = StepResult(1.0, torch.tensor(2.0), 0.1, applied=False, notice=3, metrics={"accuracy": 0.5})
    stale = StepResult(9.0, 9.0, 0.1)
    progress = Progress(6, made, {BEFORE_TRAINING: [1], (2, 0, 0): [7]}, result=result, tie_break=4)
    progress.results, progress.turns = [result, stale], 1
    kept = progress.history()
    assert kept["once"] == {(2, 0, 0): [7]} and kept["evaluations"] == made
    assert [one["norm"] for one in kept["results"]] == [2.0, 2.0] and type(kept["results"][0]["norm"]) is float
    kept["results"][0]["of a newer version"] = 1
    resumed = Progress.resumed(6, kept)
    again = StepResult(1.0, 2.0, 0.1, applied=False, notice=0, metrics={"accuracy": 0.5})
    assert resumed == Progress(
        6, made, {(2, 0, 0): [7]}, result=again, results=[again], received=6, turns=1, received_turns=1
    )


def test_a_checkpoint_from_before_the_first_step_keeps_no_result() -> None:
    assert Progress().history() == {"evaluations": {}, "once": {}, "results": []}
    assert Progress.resumed(0, Progress().history()) == Progress()
    assert Progress.resumed(7, {}) == Progress(7)
    kept = Progress(2, result=StepResult(1.0, 2.0, 0.1)).history()
    resumed = Progress.resumed(2, kept)
    assert (resumed.results, resumed.turns, resumed.received) == ([], 0, 2)
