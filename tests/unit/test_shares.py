"""How a batch is cut."""

import re

import pytest

from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.schedule.shares import default_microbatches, even, microbatches
from paceline.settings import Settings
from paceline.strategies.base import check_shares


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


@pytest.mark.parametrize(
    ("batch", "workers", "largest", "says"),
    [
        (
            64,
            9,
            9,
            "9 workers are more than the 8 microbatches of a batch, so a worker would have nothing to compute. Use at "
            "most 8 workers, or set microbatches to 9 or more, in paceline.start or by --set microbatches=9.",
        ),
        (64, 2, 12, "12 workers (the run may grow from 2 to 12) are more than the 8 microbatches of a batch, so"),
        (8, 9, 9, "of a batch (batch = 8), so"),
        (8, 9, 9, "or set batch and microbatches to 9 or more"),
    ],
)
def test_more_workers_than_microbatches(batch: int, workers: int, largest: int, says: str) -> None:
    order = Order(length=100, batch=batch, microbatches=8, seed=0)
    check_shares(Settings(), order, 8, 8)
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_shares(Settings(), order, workers, largest)
