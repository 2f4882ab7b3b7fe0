"""A permutation of which any part can be computed: that it is one, and as even as a shuffle."""

import doctest
import itertools
import math
import tracemalloc
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.data import order as order_module
from paceline.data.order import LARGEST_SHUFFLE, Order
from paceline.errors import CheckpointError
from paceline.schedule import feistel
from paceline.schedule.feistel import permute


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square of equally likely cells is above its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def table(rows: np.ndarray, columns: np.ndarray, length: int, cells: int = 16) -> np.ndarray:
    """How often a value of ``rows`` in one part of the range meets one of ``columns`` in another part."""
    pairs = (rows * cells // length) * cells + columns * cells // length
    return np.bincount(pairs, minlength=cells * cells)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_it_has_every_number_once_for_every_small_length(seed: int) -> None:
    for length in range(1, 501):
        assert sorted(permute(0, length, length, seed)) == list(range(length))


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 262_145, 1_000_003])
def test_it_has_every_number_once_for_large_lengths(length: int) -> None:
    assert (np.sort(permute(0, length, length, 5)) == np.arange(length)).all()


def test_a_part_is_that_of_the_whole() -> None:
    whole = permute(0, 10_007, 10_007, 3)
    assert [
        number for start in range(0, 10_007, 64) for number in permute(start, min(start + 64, 10_007), 10_007, 3)
    ] == (whole)


def test_the_order_never_changes() -> None:
    assert permute(0, 6, 10**6, 7) == [749208, 840400, 955562, 100386, 395473, 363484]
    assert permute(2**62 - 3, 2**62, 2**62, 7) == [1399505683472012517, 607056394970497444, 3985191267260542506]


@pytest.mark.parametrize("length", [65_536, 100_003])
@pytest.mark.parametrize("how", ["feistel", "numpy"])
def test_positions_neighbours_epochs_and_seeds_are_independent(length: int, how: str) -> None:
    """Fixed seeds, so the result is always the same; NumPy's shuffle meets the same bounds."""

    def one(seed: int) -> np.ndarray:
        return (
            np.array(permute(0, length, length, seed))
            if how == "feistel"
            else (np.random.default_rng(seed).permutation(length))
        )

    places = np.arange(length)
    drawn = [one(seed) for seed in range(8)]
    for values in drawn:
        assert abs(chi_square(table(places, values, length))) < 5
        assert abs(chi_square(table(values[:-1], values[1:], length))) < 5
        differences = (values[1:] - values[:-1]) % length
        assert abs(chi_square(np.bincount(differences * 256 // length, minlength=256))) < 5
        assert abs(chi_square(np.bincount((places ^ values) & 63, minlength=64))) < 5
        assert (places == values).sum() < 10  # fixed points: 1 on average
    for earlier, later in itertools.pairwise(drawn):
        assert abs(chi_square(table(earlier, later, length))) < 5
        assert (earlier == later).sum() < 10


@pytest.mark.slow
def test_each_sample_comes_at_each_place_over_many_seeds() -> None:
    counts = np.zeros((37, 37))
    for seed in range(4000):
        counts[np.arange(37), permute(0, 37, 37, seed)] += 1
    assert abs(chi_square(counts.ravel())) < 5


def test_a_billion_samples_take_no_memory() -> None:
    order = Order(10**9, 256, 8, seed=1)
    order.microbatches_of(0)
    tracemalloc.start()
    try:
        steps = [order.microbatches_of(step) for step in (1, order.steps_per_epoch - 1, 7 * order.steps_per_epoch)]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    seen = [sample for step in steps for part in step for sample in part]
    assert len(set(seen)) == len(seen) == 768
    assert 0 <= min(seen) <= max(seen) < 10**9


def test_an_epoch_of_a_long_data_set_has_every_sample_once() -> None:
    order = Order(LARGEST_SHUFFLE + 5, 4096, 8, seed=1)
    seen = [sample for step in range(order.steps_per_epoch) for part in order.microbatches_of(step) for sample in part]
    assert (np.sort(seen) == np.arange(order.length)).all()


def test_a_checkpoint_says_which_order_a_long_data_set_has() -> None:
    short, long = Order(LARGEST_SHUFFLE, 256, 8, 0), Order(LARGEST_SHUFFLE + 1, 256, 8, 0)
    assert "feistel_rounds" not in short.facts()
    assert long.facts()["feistel_rounds"] == 8
    assert LARGEST_SHUFFLE == 2**20  # part of the order: another bound needs another fact


class Many(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """More samples than are shuffled."""

    def __len__(self) -> int:
        return LARGEST_SHUFFLE + 1

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([number / len(self)]), torch.tensor([1.0])


def session_in(folder: Path, resume: str | None = None) -> paceline.Session:
    torch.manual_seed(0)
    return paceline.start(
        model=torch.nn.Linear(1, 1),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=Many(),
        batch=8,
        audit="off",
        checkpoint={"directory": folder},
        resume=resume,
    )


def test_a_checkpoint_of_a_long_data_set_resumes(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    seen = []
    for batch in session.batches(steps=2):
        seen.append(session.step(batch).loss)
    session.save()
    for batch in session.batches(steps=4):
        seen.append(session.step(batch).loss)
    again = session_in(tmp_path, "auto")
    assert [again.step(batch).loss for batch in again.batches(steps=6)] == seen[1:]  # the last one before, once more


def test_a_checkpoint_with_the_earlier_order_of_a_long_data_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Order, "facts", asdict)
        session_in(tmp_path).save()
    with pytest.raises(CheckpointError, match=r"another order.*1,048,577.*feistel_rounds was None and is now 8"):
        session_in(tmp_path, "auto")


def test_the_examples_are_true() -> None:
    assert doctest.testmod(feistel).failed == 0
    assert doctest.testmod(order_module).failed == 0
