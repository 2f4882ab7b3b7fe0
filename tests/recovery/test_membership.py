"""The decisions of the membership, driven by hand."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from scripted_membership import ScriptedMembership

from paceline.coordinator.agent import CoordinatorAgent, RemoteAgent
from paceline.coordinator.types import Bounds
from paceline.launchers.base import WorkerExit


@pytest.fixture
def three() -> ScriptedMembership:
    """Three workers that train."""
    hand = ScriptedMembership()
    hand.come(0, 1, 2)
    return hand


def test_the_first_generation(three: ScriptedMembership) -> None:
    for number in range(3):
        (members,) = three.told[number]
        assert members["type"] == "membership" and members["generation"] == 0
        assert [member.worker for member in three.known[number]] == [0, 1, 2]
        assert members["fresh"]
        assert members["joined"] == [0, 1, 2] and members["lost"] == []


def test_a_fixed_number_of_workers_does_not_wait_for_its_launcher() -> None:
    hand = ScriptedMembership(least=2, most=2, wanted=2, patience=0.0)
    hand.come(0, 1)
    hand.of.lose(1, "rank 1 ended", hand.now, confirmed=False)
    hand.ready(0)
    assert hand.of.over is not None
    assert hand.of.over["reason"] == "rank 1 ended; 1 of at least 2 workers are left"


def test_the_first_generation_waits_for_all_and_not_without_end() -> None:
    hand = ScriptedMembership(least=2)
    hand.of.started(2)
    hand.come(0, 1)
    assert hand.of.members == []
    hand.now = 29.0
    hand.of.advance(hand.now)
    assert hand.of.members == []
    hand.now = 31.0
    hand.of.advance(hand.now)
    assert hand.of.members == [0, 1]
    hand.come(2)
    assert hand.of.changing and not hand.last(0)["urgent"]


def test_a_standby_is_not_in_the_first_generation() -> None:
    hand = ScriptedMembership()
    hand.come(0, 1, 2, 3)
    assert hand.of.members == [0, 1, 2]
    assert 3 not in hand.told
    assert not hand.of.changing


def test_a_loss(three: ScriptedMembership) -> None:
    three.lose(1)
    assert three.of.changing
    for number in (0, 2):
        change = three.last(number)
        assert change["type"] == "change" and change["urgent"]
        assert change["generation"] == 1 and change["lost"] == [1]
    assert three.kinds(1) == ["membership"]
    three.ready(0)
    assert three.of.generation == 0
    three.ready(2, steps=6)
    assert three.of.members == [0, 2]
    members = three.last(0)
    assert members["generation"] == 1 and members["lost"] == [1] and members["joined"] == []
    assert [member.worker for member in three.known[0]] == [0, 2] and not members["fresh"]
    assert not three.of.changing
    assert three.notes == ["membership", "lost", "membership"]


def test_a_lost_worker_keeps_the_name_that_it_had(three: ScriptedMembership) -> None:
    three.lose(1)
    three.ready(0, 2)
    assert three.of.members == [0, 2]
    assert three.of.name(1).startswith("rank 1")


def test_a_spare_takes_the_place_at_once(three: ScriptedMembership) -> None:
    three.come(3)
    three.lose(0)
    three.ready(1, 2)
    assert three.of.members == [1, 2, 3]
    assert three.last(3)["joined"] == [3] and three.last(3)["lost"] == [0]


def test_a_join_is_planned(three: ScriptedMembership) -> None:
    three.lose(1)
    three.ready(0, 2)
    three.come(3)
    assert three.of.changing
    assert three.last(0) | {"urgent": False, "generation": 2, "lost": []} == three.last(0)
    three.ready(0, planned=True, steps=9)
    assert "membership" not in three.kinds(3)
    three.ready(2, planned=True, steps=9)
    assert three.of.members == [0, 2, 3]


def test_no_more_join_than_are_wanted(three: ScriptedMembership) -> None:
    three.come(3, 4)
    assert not three.of.changing
    three.lose(2)
    three.ready(0, 1)
    assert three.of.members == [0, 1, 3]
    three.of.resize(Bounds(1, 4, 4), three.now)
    assert three.of.changing
    three.ready(0, 1, 3)
    assert three.of.members == [0, 1, 3, 4]


def test_two_are_lost_at_once(three: ScriptedMembership) -> None:
    three.lose(0)
    three.lose(1)
    assert three.last(2)["lost"] == [0, 1]
    three.ready(2)
    assert three.of.members == [2]


def test_one_is_lost_while_the_others_gather(three: ScriptedMembership) -> None:
    three.lose(0)
    three.ready(1)
    three.lose(1)
    assert three.of.generation == 0
    three.ready(2)
    assert three.of.members == [2]
    assert three.last(2)["lost"] == [0, 1]


def test_a_join_becomes_urgent_when_somebody_is_lost_on_the_way(three: ScriptedMembership) -> None:
    three.lose(2)
    three.ready(0, 1)
    three.come(3)
    three.ready(0, planned=True)
    three.lose(1)
    change, members = three.told[0][-2:]
    assert change["urgent"] and change["generation"] == members["generation"] == 2
    assert three.of.members == [0, 3]


def test_a_joiner_is_lost_before_it_is_in_a_generation(three: ScriptedMembership) -> None:
    three.lose(2)
    three.ready(0, 1)
    three.come(3)
    three.lose(3)
    assert three.of.changing  # the members were told already, and come
    three.ready(0, 1, planned=True)
    assert three.of.members == [0, 1]
    assert three.notes.count("lost") == 1


def test_out_of_the_view_without_a_loss(three: ScriptedMembership) -> None:
    """A worker could not reach another one, though nobody is lost."""
    three.ready(1)
    assert three.last(0)["urgent"]
    three.ready(0, 2)
    assert three.of.members == [0, 1, 2] and three.of.generation == 1


def test_below_the_least_the_others_wait() -> None:
    hand = ScriptedMembership(least=3)
    hand.come(0, 1, 2)
    hand.of.announce_start()  # one is being started
    hand.lose(1)
    hand.ready(0, 2)
    assert hand.of.over is None and hand.of.generation == 0
    hand.now = 50.0
    hand.come(3)
    assert hand.of.members == [0, 2, 3]


@pytest.mark.promise(
    "docs/survive.md",
    "training waits for the new processes, `--patience` seconds (600).",
    "and the run ends with exit code 5.",
)
def test_below_the_least_for_too_long() -> None:
    hand = ScriptedMembership(least=3)
    hand.come(0, 1, 2)
    hand.of.started(3)
    hand.lose(1)
    hand.ready(0, steps=6)
    hand.ready(2)
    hand.now = 59.0
    hand.of.advance(hand.now)
    assert hand.of.over is None and hand.of.changing
    hand.now = 61.0
    hand.of.advance(hand.now)
    assert hand.of.over is not None
    assert hand.of.over["code"] == 5
    assert hand.of.over["reason"] == "rank 1 was killed; 2 of at least 3 workers are left within 60 s"
    assert hand.last(0)["saver"] == 0 and hand.last(2)["type"] == "end"


def test_below_the_least_and_nobody_may_come() -> None:
    hand = ScriptedMembership(least=3)
    hand.come(0, 1, 2)
    hand.lose(1)
    hand.ready(0)
    assert hand.of.over is None
    hand.ready(2, steps=6)
    assert hand.of.over is not None
    assert hand.last(0) == hand.last(2) and hand.last(2)["saver"] == 2  # it is further


def test_one_leaves(three: ScriptedMembership) -> None:
    three.ready(1, leaving=True, planned=True)
    assert not three.last(0)["urgent"]
    three.ready(0, 2, planned=True)
    assert three.of.members == [0, 2]
    assert three.last(1) == {"type": "dismissed"}
    three.of.leave(1, three.now)
    assert "lost" not in three.notes


def test_nobody_leaves_while_another_is_lost(three: ScriptedMembership) -> None:
    """The lost one may have had what the other has handed on, so that leaves after the next step."""
    three.ready(1, leaving=True, planned=True)
    three.lose(2)
    three.ready(0)
    assert three.of.members == [0, 1] and "dismissed" not in three.kinds(1)
    three.ready(1, steps=8, leaving=True, planned=True)
    three.ready(0, steps=8, planned=True)
    assert three.of.members == [0]


def test_one_leaves_and_a_spare_takes_its_place(three: ScriptedMembership) -> None:
    three.come(3)
    three.ready(1, leaving=True, planned=True)
    three.ready(0, 2, planned=True)
    assert three.of.members == [0, 2, 3]


def test_all_leave(three: ScriptedMembership) -> None:
    for number in range(3):
        three.ready(number, steps=7, leaving=True, planned=True)
    assert three.of.over is not None
    assert (three.of.over["code"], three.of.over["save"], three.of.over["saver"]) == (75, True, 0)
    assert [three.last(number)["type"] for number in range(3)] == ["end"] * 3


def test_one_that_leaves_without_a_word_is_lost(three: ScriptedMembership) -> None:
    three.of.leave(1, three.now)
    assert three.last(0)["urgent"]
    assert three.notes[-1] == "lost"


def test_all_finish(three: ScriptedMembership) -> None:
    three.of.finish(0, three.now)
    three.of.finish(2, three.now)
    assert three.of.over is None
    three.of.finish(1, three.now)
    assert three.of.over is not None and three.of.over["code"] == 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("lost", "drops", "code"), [(0, True, 5), (2, True, 0), (2, False, 5)])
def test_one_is_lost_at_the_very_end(lost: int, drops: bool, code: int, before: bool) -> None:
    """Where lost workers are replaced, all but the first one may be missing at the end: it may write the results."""
    three = ScriptedMembership(drops=drops)
    three.come(0, 1, 2)
    if before:
        three.lose(lost)
    for number in {0, 1, 2} - {lost}:
        three.of.finish(number, three.now)
    if not before:
        three.lose(lost)
    assert three.of.over is not None and three.of.over["code"] == code


def test_a_spare_hears_that_training_is_over(three: ScriptedMembership) -> None:
    three.come(3)
    for number in range(3):
        three.of.finish(number, three.now)
    assert three.last(3)["type"] == "end" and three.last(3)["code"] == 0


def test_a_script_that_ends_early(three: ScriptedMembership) -> None:
    three.of.finish(1, three.now)
    three.ready(0, 2)  # they lost it
    assert three.of.over is not None
    assert three.of.over["code"] == 1
    assert "rank 1 ended while the other workers were still training" in three.of.over["reason"]
    assert three.last(0)["saver"] == 0


@pytest.mark.parametrize("least", [1, 3])
def test_the_last_one_goes_on_when_others_have_finished_and_one_is_lost(least: int) -> None:
    """It does the last step alone, whatever the least number is."""
    three = ScriptedMembership(least=least, drops=True)
    three.come(0, 1, 2)
    three.of.finish(1, three.now)
    three.lose(2)
    three.ready(0)
    assert three.of.over is None and three.of.members == [0]
    three.of.finish(0, three.now)
    assert three.of.over is not None and three.of.over["code"] == 0


def test_nobody_joins_the_last_one_when_others_have_finished() -> None:
    """It does the last step alone, although a lost worker was replaced: with that one there would be too few."""
    three = ScriptedMembership(least=3)
    three.come(0, 1, 2)
    three.of.finish(1, three.now)
    three.lose(2)
    three.ready(0)
    assert three.of.members == [0]
    three.come(3)
    assert not three.of.changing
    three.of.finish(0, three.now)
    assert three.of.over is not None and three.of.over["code"] == 0
    assert three.last(3)["type"] == "end" and three.last(3)["code"] == 0


def test_a_script_without_training_that_ends_keeps_nobody_from_joining() -> None:
    three = ScriptedMembership()
    three.come(0, 1)
    three.of.started(2)
    three.of.finish(2, three.now)
    three.come(3)
    assert three.of.changing


def test_one_that_was_dropped_comes_back(three: ScriptedMembership) -> None:
    three.of.lose(1, "rank 1 was late", three.now, may_run=True)
    three.ready(0, 2)
    assert three.of.members == [0, 2]
    assert three.last(0)["fenced"]
    three.ready(1, steps=4)
    assert three.of.changing and not three.last(0)["urgent"]
    three.ready(0, 2, steps=8, planned=True)
    assert three.of.members == [0, 2, 1]
    assert three.last(1)["fenced"]  # others that were dropped with it may still run
    assert [member.worker for member in three.known[1]] == [0, 2, 1] == [one.worker for one in three.known[0]]


def test_one_that_was_dropped_comes_back_before_the_others_have_gathered(three: ScriptedMembership) -> None:
    three.of.lose(1, "rank 1 was late", three.now, may_run=True)
    three.ready(0)
    three.ready(1)
    assert three.of.generation == 0
    three.ready(2)
    assert three.of.members == [0, 1, 2]


def test_one_that_does_not_fit_is_refused(three: ScriptedMembership) -> None:
    three.of.started(3)
    three.of.register(3, {"pid": 3}, {"version torch": "1"})
    assert three.last(3) == {"type": "refused", "key": "version torch", "here": "1", "there": "nothing"}
    three.of.ready(3, None, three.now)
    assert not three.of.changing
    three.lose(2)
    three.ready(0, 1)
    assert three.of.members == [0, 1]
    assert three.of.needs(1) and not three.of.needs(3)


@pytest.mark.parametrize("seen", [False, True], ids=["", "reported by another one first"])
def test_one_that_cannot_take_part_has_not_finished(three: ScriptedMembership, seen: bool) -> None:
    three.lose(2)
    three.ready(0, 1)
    three.come(3)
    three.ready(0, 1, planned=True)
    assert three.of.members == [0, 1, 3]
    three.of.workers[3].unfit = True
    if seen:
        three.of.lose(3, "rank 2 ended", three.now, confirmed=False)
    three.ready(0)
    three.of.finish(3, three.now)
    three.ready(1)
    assert three.of.over is None and three.of.members == [0, 1]
    assert not three.of.needs(3) and three.of.workers[3].joined
    three.of.finish(0, three.now)
    three.of.finish(1, three.now)
    assert three.of.over is not None and three.of.over["code"] == 0


@pytest.mark.promise(
    "docs/survive.md",
    "More than 10 losses (or 2 × MAX, if that is more) without a step in between end the run: they are not accidental.",
)
def test_losses_without_a_step_in_between() -> None:
    hand = ScriptedMembership(most=2, wanted=2)
    hand.come(0, 1)
    for number in range(2, 14):
        if hand.of.over is not None:
            break
        hand.come(number)
        hand.lose(number - 1)
        hand.ready(0)
    assert hand.of.over is not None
    assert hand.of.over["reason"].startswith("11 workers were lost without a step in between")


def test_losses_with_steps_in_between() -> None:
    hand = ScriptedMembership(most=2, wanted=2)
    hand.come(0, 1)
    for number in range(2, 40):
        hand.come(number)
        hand.lose(number - 1)
        hand.ready(0, steps=number)
    assert hand.of.over is None
    assert hand.of.members == [0, 39]


def test_the_end_waits_for_those_that_can_come(three: ScriptedMembership) -> None:
    three.of.end(5, "rank 1 failed", three.now, save=True)
    assert three.last(0)["type"] == "change"
    three.lose(1)
    three.ready(0)
    assert three.last(0)["type"] == "change"
    three.now = 11.0
    three.of.advance(three.now)
    assert three.last(0)["type"] == "end" and three.last(0)["saver"] == 0
    three.ready(2, steps=6)  # too late to save
    assert three.last(2)["saver"] == 0


def test_the_first_reason_to_end_stays(three: ScriptedMembership) -> None:
    three.of.end(5, "one", three.now)
    three.of.end(1, "two", three.now)
    assert three.of.over is not None and three.of.over["reason"] == "one"
    assert all(three.kinds(number) == ["membership", "end"] for number in range(3))


def test_a_loss_that_the_launcher_has_not_seen_yet(three: ScriptedMembership) -> None:
    """It may start a new process when it sees it: too few workers wait until then."""
    three.of.bounds = Bounds(3, 3, 3)
    three.of.lose(1, "rank 1 ended", three.now, confirmed=False)
    three.ready(0, 2)
    assert three.of.over is None and three.of.changing
    three.of.announce_start()
    three.lose(1)
    three.come(3)
    assert three.of.members == [0, 2, 3]


@pytest.mark.parametrize("how", ["lost", "left"])
def test_a_loss_after_which_nobody_comes(three: ScriptedMembership, how: str) -> None:
    three.of.bounds = Bounds(3, 3, 3)
    three.of.lose(1, "rank 1 ended", three.now, confirmed=False)
    three.ready(0, 2)
    if how == "lost":
        three.lose(1)
    else:
        three.of.leave(1, three.now)
    assert three.of.over is not None
    assert three.of.over["reason"] == "rank 1 ended; 2 of at least 3 workers are left"


def test_the_first_generation_waits_for_those_that_are_to_be_started() -> None:
    """The first process may be ready before the launcher has started the second one."""
    hand = ScriptedMembership()
    for _ in range(3):
        hand.of.announce_start()
    hand.come(0)
    assert hand.of.members == []
    hand.come(1)
    assert hand.of.members == []
    hand.come(2)
    assert hand.of.members == [0, 1, 2]


def test_one_is_lost_before_the_first_generation_and_replaced() -> None:
    hand = ScriptedMembership(least=1, wanted=2, most=2)
    hand.of.started(0)
    hand.come(1)
    hand.of.announce_start()
    hand.lose(0)
    assert hand.of.over is None and hand.of.generation == -1
    hand.come(2)
    assert hand.of.members == [1, 2]
    assert hand.notes == ["lost", "membership"]


def test_one_is_lost_before_the_first_generation_of_a_fixed_number() -> None:
    hand = ScriptedMembership(least=2, wanted=2, most=2, patience=0.0, drops=False)
    hand.of.started(0)
    hand.lose(0)
    assert hand.of.over is not None and hand.of.over["code"] == 5


def test_losses_before_the_first_generation_come_to_an_end() -> None:
    hand = ScriptedMembership(least=1, wanted=1, most=1)
    for number in range(11):
        assert hand.of.over is None
        hand.of.started(number)
        hand.of.announce_start()
        hand.lose(number)
    assert hand.of.over is not None and hand.of.over["code"] == 5


def test_who_ended_with_0_while_others_waited_for_it_ended_early(three: ScriptedMembership) -> None:
    """Others noticed before its launcher knew the exit code."""
    three.of.lose(1, "rank 1 ended", three.now, confirmed=False)
    three.ready(0, 2)
    assert three.of.members == [0, 2]
    three.of.finish(1, three.now)
    assert three.of.over is not None
    assert (three.of.over["code"], three.of.over["kind"], three.of.over["workers"]) == (1, "ended-early", [1])


def test_the_last_save_does_not_wait_for_a_script_that_has_ended(three: ScriptedMembership) -> None:
    three.of.workers[1].ending = True
    three.of.end(3, "worker 0 ended with exit code 3", three.now, save=True)
    three.ready(0, 2)
    assert three.last(0)["type"] == "end"


def test_workers_of_a_machine_have_neighbouring_ranks() -> None:
    hand = ScriptedMembership(most=5, wanted=5)
    for number, host in enumerate(["a", "b", "a", "b"]):
        hand.of.started(number)
        hand.of.register(number, {"host": host, "address": "10.0.0.1"}, {})
    hand.of.started(4)
    for number in range(4):
        hand.ready(number)
    hand.now = 31.0
    hand.of.advance(hand.now)
    assert hand.of.members == [0, 2, 1, 3]
    hand.of.register(4, {"host": "a", "address": "10.0.0.1"}, {})
    hand.ready(4)
    hand.ready(0, 1, 2, 3)
    assert hand.of.members == [0, 2, 4, 1, 3]


@pytest.mark.parametrize("standby", ["ready", "starting", ""])
def test_a_lost_worker_is_replaced_at_once_unless_a_standby_takes_its_place(
    three: ScriptedMembership, standby: str
) -> None:
    """The start of the next standby would take processor time from the step that all wait for."""
    coordinator: Any = MagicMock(over=None, waiting=False)
    coordinator.ended = lambda *about: about[-1]()
    request: Any = MagicMock(workers=3, standby=0, nodes=None, smallest=1, elastic=True)
    agent = CoordinatorAgent(MagicMock(), request, coordinator, clock=lambda: three.now)
    if standby == "ready":
        three.come(3)
    elif standby:
        three.of.started(3)
    three.lose(1)
    agent.ended(WorkerExit(1, -9, 0.0, True))
    coordinator.is_short = three.of.is_short
    assert agent.to_start(at_once=True) == (0 if standby else 1)
    three.ready(0, 2)
    assert three.of.members == ([0, 2, 3] if standby == "ready" else [0, 2])
    three.now += 0.9
    assert agent.to_start(at_once=True) == 0
    three.now += 0.1
    assert agent.to_start(at_once=True) == (1 if standby else 0)


@pytest.mark.parametrize(("code", "grace"), [(0, (3.0, 10.0)), (1, (25.0, 30.0))])
def test_a_worker_that_hangs_after_all_members_have_finished_is_ended_soon(
    code: int, grace: tuple[float, float]
) -> None:
    coordinator: Any = SimpleNamespace(members=[0], over={"code": code})
    request: Any = MagicMock(workers=2, standby=0, nodes=None, smallest=1, elastic=True)
    launch: Any = SimpleNamespace(workers=2, grace_seconds=25.0)
    assert CoordinatorAgent(launch, request, coordinator).grace() == grace
    client: Any = SimpleNamespace(broken=False, over={"code": code})
    assert RemoteAgent(launch, request, client).grace() == grace
