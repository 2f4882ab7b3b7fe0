"""Groups for more workers than a step waits for: whoever is late, an epoch uses each microbatch exactly once."""

import random
from itertools import pairwise

import pytest

from paceline.schedule.backup import EpochLength, EpochProgress, resume_epoch, step_shares

LENGTHS = [
    EpochLength(4, 8, 32),
    EpochLength(4, 8, 25),
    EpochLength(3, 11, 29),
    EpochLength(1, 8, 8),
    EpochLength(1, 5, 1),
    EpochLength(7, 64, 390),
]
CREWS = [(2, 1), (3, 1), (3, 2), (4, 1), (5, 2), (5, 0), (1, 0)]


def used_by(progress: EpochProgress, length: EpochLength, workers: int, spare: int, chance: random.Random) -> list[int]:
    """What a step uses when any of the workers are late."""
    groups = step_shares(progress, length, workers, spare)
    counted = chance.sample(range(len(groups.members)), groups.needed)
    return [one for group in counted for one in groups.members[group]]


@pytest.mark.parametrize("crew", CREWS, ids=str)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_an_epoch_uses_each_microbatch_once_in_its_steps(length: EpochLength, crew: tuple[int, int]) -> None:
    workers, spare = crew
    for seed in range(40):
        chance, progress = random.Random(seed), EpochProgress()
        seen: list[int] = []
        for step in range(length.steps):
            used = used_by(progress, length, workers, spare, chance)
            assert used, f"step {step} has nothing to do"
            seen += used
            should = min((step + 1) * length.batch, length.total)
            assert abs(len(seen) - should) < max(1, workers - spare)
            progress = progress.after(used)
        assert sorted(seen) == list(range(length.total))


def test_any_workers_may_come_and_go_between_steps() -> None:
    length = EpochLength(6, 8, 46)
    for seed in range(100):
        chance, progress = random.Random(seed), EpochProgress()
        seen: list[int] = []
        for _ in range(length.steps):
            workers, spare = chance.choice(CREWS)
            used = used_by(progress, length, workers, spare, chance)
            assert used
            seen += used
            progress = progress.after(used)
        assert sorted(seen) == list(range(length.total))


def test_what_was_too_late_comes_first_in_the_next_step() -> None:
    length = EpochLength(4, 6, 24)
    first = step_shares(EpochProgress(), length, 4, 1)
    assert first.members == ((0, 1), (2, 3), (4, 5), (6, 7))
    progress = EpochProgress().after([0, 1, 4, 5, 6, 7])
    assert (progress.before, progress.beyond) == (2, (4, 5, 6, 7))
    assert step_shares(progress, length, 4, 1).members == ((2, 3), (8, 9), (10, 11), (12, 13))


def test_the_last_step_of_an_epoch_copies_groups_for_the_workers_it_could_spare() -> None:
    length = EpochLength(2, 6, 12)
    groups = step_shares(EpochProgress().after([0, 1, 2, 3, 4, 5]), length, 4, 1)
    assert groups.members == ((6, 7), (8, 9), (10, 11)) and groups.needed == 3 and groups.copied
    assert [groups.of(rank, 1, 4) for rank in range(4)] == [1, 2, 0, 0]
    assert [groups.of(rank, 1, 6) for rank in range(6)] == [1, 2, 0, 1, 2, 0]


def test_a_worker_does_not_keep_the_first_group() -> None:
    groups = step_shares(EpochProgress(), EpochLength(4, 6, 24), 4, 1)
    for rank in range(4):
        begun = [groups.of(rank, step, 4) for step in range(8)]
        assert all(now != then for now, then in pairwise(begun))
        assert set(begun) == {0, 1, 2, 3}


def test_without_backup_workers_a_step_uses_its_own_batch() -> None:
    length, progress = EpochLength(3, 8, 20), EpochProgress()
    for step in range(3):
        groups = step_shares(progress, length, 3, 0)
        used = [one for group in groups.members for one in group]
        assert used == list(range(8 * step, min(8 * step + 8, 20)))
        progress = progress.after(used)


def test_a_step_that_is_left_out_leaves_its_samples_out() -> None:
    length = EpochLength(3, 4, 12)
    progress = EpochProgress().after([0, 1, 4, 5]).skipped(length)
    assert [one for one in range(12) if one not in progress.unused(length)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert progress.target(length) == 4


def test_an_epoch_that_others_began() -> None:
    length = EpochLength(3, 8, 20)
    assert resume_epoch(2, length).unused(length) == [16, 17, 18, 19]
    assert resume_epoch(0, length) == EpochProgress()
