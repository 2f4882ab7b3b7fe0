"""A pipeline whose stages are given cannot be held by any number of workers: who waits, and who goes on."""

import pytest
from scripted_membership import ScriptedMembership

from paceline.coordinator.types import Bounds


@pytest.fixture
def four() -> ScriptedMembership:
    hand = ScriptedMembership(least=2, most=6, wanted=4)
    hand.fits = 1, 2, 4, 6
    hand.come(0, 1, 2, 3)
    return hand


@pytest.mark.promise(
    "docs/pipeline.md", "Then they wait for the process that replaces the lost one, as they do [below MIN]"
)
def test_the_others_wait_for_a_replacement(four: ScriptedMembership) -> None:
    four.of.started(4)
    four.lose(1)
    four.ready(0, 2, 3)
    assert four.of.changing and four.of.over is None
    assert four.notes.count("short") == 1
    four.come(4)
    assert four.of.members == [0, 2, 3, 4]


def test_without_a_replacement_they_say_what_is_missing(four: ScriptedMembership) -> None:
    four.lose(1)
    four.ready(0, 2, 3)
    assert four.of.over is not None
    assert four.of.over["reason"].endswith("; these settings are for 2 or 4 or 6 workers, and 3 are left")


def test_another_loss_makes_it_fit(four: ScriptedMembership) -> None:
    four.of.started(4)
    four.lose(1)
    four.ready(0, 2, 3)
    four.lose(0)
    assert four.of.members == [2, 3]


def test_a_joiner_waits_for_another_one(four: ScriptedMembership) -> None:
    four.of.resize(Bounds(2, 6, 6), four.now)
    four.come(4)
    assert not four.of.changing and four.kinds(0) == ["membership"]
    four.come(5)
    assert four.of.changing
    four.ready(0, 1, 2, 3, planned=True)
    assert four.of.members == [0, 1, 2, 3, 4, 5]


def test_too_many_joiners(four: ScriptedMembership) -> None:
    four.of.resize(Bounds(2, 6, 5), four.now)
    four.come(4)
    four.lose(0)
    four.ready(1, 2, 3)
    assert four.of.members == [1, 2, 3, 4]


def test_one_that_is_refused_says_nothing(four: ScriptedMembership) -> None:
    four.of.started(4)
    four.lose(1)
    four.ready(0, 2, 3)
    four.fits = 1, 3
    four.come(4, other="settings")
    assert four.last(4)["type"] == "refused"
    assert four.of.members == [0, 1, 2, 3] and four.of._fits == (1, 2, 4, 6)


def test_one_leaves(four: ScriptedMembership) -> None:
    """The others have its part of the state: so some go on, and the rest waits until it fits."""
    four.ready(2, leaving=True, planned=True)
    four.ready(0, 1, 3, planned=True)
    assert four.of.members == [0, 1]
    assert four.last(2)["type"] == "dismissed" and four.kinds(3)[0] == "membership"
    four.come(4)
    four.ready(0, 1, planned=True)
    assert four.of.members == [0, 1, 3, 4]


def test_more_at_the_start_than_fit() -> None:
    hand = ScriptedMembership(least=2, most=6, wanted=5)
    hand.fits = 1, 2, 4, 6
    for _ in range(5):
        hand.of.announce_start()
    hand.come(0, 1, 2, 3, 4)
    assert hand.of.members == [0, 1, 2, 3]


def test_the_first_generation() -> None:
    hand = ScriptedMembership(least=2, most=6, wanted=6)
    hand.fits = 1, 2, 4, 6
    hand.of.started(5)
    hand.come(0, 1, 2, 3, 4)
    hand.now = 31.0
    hand.of.advance(hand.now)
    assert hand.of.members == [0, 1, 2, 3]
