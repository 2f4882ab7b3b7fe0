"""How far workers are: their order, what was done before a state was received, and what a checkpoint keeps."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from paceline.comm.world import LEAVING, PENDING
from paceline.step.context import StepResult
from paceline.training.progress import (
    BEFORE_TRAINING,
    EVALUATE,
    MAP,
    ONCE,
    PREDICT,
    WEIGHTS,
    Action,
    CatchUp,
    Progress,
    decide,
    gone_back,
    lacks_script,
    maps_since,
    plan_catch_up,
)


def test_the_furthest_worker_has_the_largest_key() -> None:
    asked = {(3, -1, 0): [1.0]}
    in_order = [
        Progress(),
        Progress(tie_break=1),
        Progress(results_of={WEIGHTS: {(0, -1, 0): [None]}}),
        Progress(results_of={WEIGHTS: {(0, -1, 0): [None], (1, -1, 0): [None]}}),
        Progress(3),
        Progress(3, tie_break=5),
        Progress(3, {EVALUATE: asked}),
        Progress(3, {ONCE: asked}, tie_break=1),
        Progress(3, {ONCE: asked}, tie_break=2),
        Progress(3, {EVALUATE: asked, ONCE: asked}),
        Progress(3, {EVALUATE: {(3, -1, 0): [1.0, 2.0, 3.0]}}),
        Progress(3, {EVALUATE: asked, WEIGHTS: {(3, -1, 0): [None, None]}, PREDICT: {(3, -1, 0): [None]}}),
        Progress(3, turns=1),
        Progress(3, {EVALUATE: asked}, turns=1),
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
    assert (progress.steps, progress.result, progress.turns, progress.phases) == (5, first, 0, [])
    assert progress.result_of(0) is first
    progress.take(5, first, turn=0)
    progress.take(5, second, turn=1)
    assert (progress.steps, progress.result, progress.turns, progress.phases) == (6, second, 2, [first, second])
    assert [progress.result_of(turn) for turn in (0, 1, 2)] == [first, second, second]
    progress.take(6, again, turn=0)
    assert (progress.turns, progress.phases) == (1, [again])


def test_a_checkpoint_keeps_what_the_script_was_told() -> None:
    made = {(6, -1, 1): [0.5]}
    result = StepResult(1.0, torch.tensor(2.0), 0.1, applied=False, notice=3, metrics={"accuracy": 0.5})
    stale = StepResult(9.0, 9.0, 0.1)
    results_of = {EVALUATE: made, ONCE: {BEFORE_TRAINING: [1], (2, 0, 0): [7]}}
    progress = Progress(6, results_of, result=result, tie_break=4)
    progress.phases, progress.turns = [result, stale], 1
    kept = progress.history()
    assert kept["once"] == {(2, 0, 0): [7]} and kept["evaluations"] == made
    assert [one["norm"] for one in kept["results"]] == [2.0, 2.0] and type(kept["results"][0]["norm"]) is float
    kept["results"][0]["of a newer version"] = 1
    resumed = Progress.resumed(6, kept)
    again = StepResult(1.0, 2.0, 0.1, applied=False, notice=0, metrics={"accuracy": 0.5})
    assert resumed == Progress(
        6, {**results_of, ONCE: {(2, 0, 0): [7]}}, result=again, phases=[again], received=6, turns=1, received_turns=1
    )


def test_a_checkpoint_from_before_the_first_step_keeps_no_result() -> None:
    assert Progress().history() == {"evaluations": {}, "once": {}, "maps": {}, "results": []}
    assert Progress.resumed(0, Progress().history()) == Progress()
    assert Progress.resumed(7, {}) == Progress(7)
    kept = Progress(2, result=StepResult(1.0, 2.0, 0.1)).history()
    resumed = Progress.resumed(2, kept)
    assert (resumed.phases, resumed.turns, resumed.received) == ([], 0, 2)


def test_the_results_of_calls_are_those_of_their_place() -> None:
    progress = Progress()
    progress.add_result(EVALUATE, (3, -1, 0), 0.5)
    assert progress.results(EVALUATE, (3, -1, 0)) == [0.5]
    assert progress.results(ONCE, (3, -1, 0)) == progress.results(EVALUATE, (3, -1, 1)) == []
    assert progress.results_of == {EVALUATE: {(3, -1, 0): [0.5]}}


def mapped(*epochs: int) -> Progress:
    """Progress with a result of ``session.map`` in each epoch of two steps."""
    progress = Progress(2 * len(epochs), result=StepResult(2.0, 1.0, 0.1))
    for epoch in epochs:
        progress.add_result(MAP, (2 * max(epoch, 0), epoch, 0), [torch.tensor(epoch), "played"])
    return progress


def test_rollouts_of_earlier_epochs_are_forgotten() -> None:
    progress, whole = mapped(-1, 0, 1, 2), mapped(-1, 0, 1, 2)
    progress.forget_maps(1)
    kept = {call: results[0] is not None for call, results in progress.results_of[MAP].items()}
    assert kept == {(0, -1, 0): True, (0, 0, 0): False, (2, 1, 0): True, (4, 2, 0): True}
    assert progress.key == whole.key, "who has called it once more is further, whatever it has forgotten"


def test_a_checkpoint_keeps_rollouts_and_messages_do_not() -> None:
    progress = mapped(0, 1)
    small = progress.without_maps()
    assert small.results_of[MAP] == {(0, 0, 0): [None], (2, 1, 0): [None]} and small.key == progress.key
    resumed = Progress.resumed(4, progress.history())
    for one in (resumed, small.with_maps(progress.history())):
        assert one.results(MAP, (2, 1, 0)) == [[torch.tensor(1), "played"]]
    assert resumed.results(MAP, (2, 1, 0))[0][0] is not progress.results(MAP, (2, 1, 0))[0][0]
    assert Progress(4).without_maps() == Progress(4).with_maps({}) == Progress(4)


def test_who_goes_back_has_the_rollouts_of_the_checkpoint() -> None:
    history, everyone = mapped(0, 1).history(), [mapped(0, 1).without_maps(), None]
    assert not maps_since(everyone, history)
    for rank in range(2):
        assert gone_back(everyone, rank, 4, history).results(MAP, (2, 1, 0)) == [[torch.tensor(1), "played"]]
    assert maps_since([None, mapped(0, 1, 2)], history) and maps_since(everyone, {})
    again = mapped(0, 1)
    again.add_result(MAP, (2, 1, 0), [])
    assert maps_since([again], history)


@pytest.mark.parametrize(
    ("notice", "elastic", "joiners_wait", "action"),
    [
        (0, True, True, Action.GO_ON),
        (PENDING, True, False, Action.RE_FORM),
        (PENDING, True, True, Action.GO_ON),
        (PENDING, False, False, Action.GO_ON),
        (LEAVING, True, True, Action.RE_FORM),
        (LEAVING, False, False, Action.SAVE_AND_STOP),
        (LEAVING, False, True, Action.SAVE_AND_STOP),
    ],
)
def test_what_follows_from_a_notice(notice: int, elastic: bool, joiners_wait: bool, action: Action) -> None:
    assert decide(notice, elastic=elastic, joiners_wait=joiners_wait) is action


def test_the_furthest_send_their_state() -> None:
    behind, done, begun = Progress(3), Progress(4, entered=3), Progress(4, entered=4)
    assert plan_catch_up([behind, done, None, begun]) == CatchUp([1, 3], False)
    assert plan_catch_up([begun, None, begun]) == CatchUp([0, 2], True)
    assert plan_catch_up([begun, done, None]) == CatchUp([0, 1], False), "one may have lines of the loop body before it"
    assert plan_catch_up([begun, behind]) == CatchUp([0], False), "who has a state takes the step with it"


def test_who_joined_in_a_step_sends_its_state_as_that_of_the_step() -> None:
    """It has no state of before, with which the script could run the code after the last step."""
    joined, begun, behind = Progress(4, received=4, again=False), Progress(4, entered=4), Progress(3, entered=3)
    assert plan_catch_up([joined, None]) == plan_catch_up([joined, behind]) == CatchUp([0], True)
    assert plan_catch_up([begun, joined, None]) == CatchUp([0, 1], True)
    assert plan_catch_up([begun, joined, behind]) == CatchUp([0], False)
    later = Progress(5, received=4, again=False, entered=4)
    assert plan_catch_up([later, None]) == CatchUp([0], False)


def test_a_checkpoint_of_who_joined_in_a_step_begins_with_that_step() -> None:
    result = StepResult(3.0, 1.0, 0.1)
    joined = Progress(4, received=4, again=False, result=result)
    resumed = Progress.resumed(4, joined.history())
    assert (resumed.received, resumed.again, resumed.gives_again(-1)) == (4, False, False)
    assert not gone_back([Progress(5, entered=5), None], 1, 4, joined.history()).gives_again(-1)
    for other in (Progress(4, received=4, result=result), Progress(5, received=4, again=False, result=result)):
        assert "again" not in other.history() and Progress.resumed(4, other.history()).gives_again(-1)


def test_a_step_is_repeated_up_to_where_the_workers_were() -> None:
    progress = Progress(2, repeat_until=5)
    assert progress.to_repeat(9) and progress.to_repeat(3) and not progress.to_repeat(2)
    progress.steps = 5
    assert not progress.to_repeat(9)


def test_who_repeats_lost_steps_lacks_the_values_of_a_script_that_joins() -> None:
    repeats = Progress(4, repeat_until=6, entered=5)
    assert lacks_script([repeats, None]) and lacks_script([Progress(3, entered=1), repeats])
    assert not lacks_script([repeats, replace(repeats, entered=-1)]), "all have gone back to the same checkpoint"
    assert not lacks_script([repeats, Progress(3, entered=3)]), "its script waits for step 3, and has its values"
    assert not lacks_script([Progress(6, repeat_until=6, entered=5), None])


def test_who_goes_back_knows_all_calls_and_how_far_anybody_was() -> None:
    """Rank 0 has gone back before, when the others were lost, and rank 1 has not."""
    call = 5, -1, 1
    everyone = [
        Progress(4, {EVALUATE: {call: [1.0, 2.0]}}, repeat_until=6, entered=5),
        Progress(5, {EVALUATE: {call: [1.0]}}, entered=4),
        None,
    ]
    history = Progress(3, result=StepResult(2.0, 1.0, 0.1)).history()
    for rank in range(3):
        back = gone_back(everyone, rank, 3, history)
        assert (back.steps, back.repeat_until) == (3, 6)
        assert back.results(EVALUATE, call) == [1.0, 2.0]
        assert back.received == (3 if rank == 2 else 0)


def test_who_goes_back_after_an_update_that_others_lost_is_not_ahead() -> None:
    """The worker that had done the step to its end was lost, too. The next loss must find all shards at one step."""
    history = Progress(4, result=StepResult(3.0, 1.0, 0.1)).history()
    everyone = [Progress(6, owned=frozenset({"weight"}), ahead=True), Progress(6, owned=frozenset())]
    assert not any(gone_back(everyone, rank, 4, history).ahead for rank in range(2))


def test_who_was_dropped_before_the_checkpoint_takes_it_as_received() -> None:
    """Its script is in a step that others did before the checkpoint, and must not do it again."""
    history = Progress(4, result=StepResult(3.0, 1.0, 0.1)).history()
    back = gone_back([Progress(5), Progress(2)], 1, 4, history)
    assert (back.steps, back.received) == (4, 4)
    assert back.has_received(2) and back.has_received(3) and not back.has_received(4)
    assert back.result is not None and back.result.loss == 3.0


def test_who_waits_for_the_step_before_the_checkpoint_takes_it_as_received() -> None:
    """Its script is in step 3, which the others completed and saved without it."""
    history = Progress(4, result=StepResult(3.0, 1.0, 0.1)).history()
    everyone = [Progress(6, entered=5, result=StepResult(5.0, 1.0, 0.1)), Progress(3, entered=3)]
    back = gone_back(everyone, 1, 4, history)
    assert back.has_received(3) and not back.has_received(4) and not back.gives_again(3)
    assert back.result is not None and back.result.loss == 3.0
    assert gone_back(everyone, 0, 4, history).received == 0


def test_a_step_that_was_left_out_is_done_unless_others_are_further() -> None:
    progress = Progress(2)
    progress.leave_out(2)
    assert (progress.steps, progress.left_out) == (3, {2})
    progress.leave_out(1)
    assert (progress.steps, progress.left_out) == (3, {1, 2})
