"""How a batch is cut."""

import pytest

from paceline.schedule.shares import default_microbatches, even, microbatches


@pytest.mark.parametrize("total", [1, 7, 8, 50, 203])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_even_parts_cover_everything_once(total: int, parts: int) -> None:
    cut = even(total, parts)
    assert [place for part in cut for place in part] == list(range(total))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_full_batch_has_all_its_microbatches() -> None:
    assert [len(part) for part in microbatches(50, 50, 8)] == [7, 7, 6, 6, 6, 6, 6, 6]


def test_a_short_batch_has_fewer_of_about_the_same_size() -> None:
    assert [len(part) for part in microbatches(33, 256, 8)] == [17, 16]
    assert [len(part) for part in microbatches(1, 256, 8)] == [1]


@pytest.mark.parametrize(("batch", "expected"), [(1, 1), (2, 2), (5, 4), (8, 8), (256, 8)])
def test_the_default_leaves_each_microbatch_a_sample(batch: int, expected: int) -> None:
    assert default_microbatches(batch) == expected
