"""What is compared of the data of all workers."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.data.comparison import facts_of

INPUTS = torch.rand(100, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(100) % 7


def shuffled(values: torch.Tensor) -> torch.Tensor:
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]


class Unread(Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TensorDataset(INPUTS, LABELS), TensorDataset(shuffled(INPUTS), LABELS)),
        (TensorDataset(INPUTS, LABELS), TensorDataset(INPUTS, shuffled(LABELS))),
        (INPUTS, shuffled(INPUTS)),
        (
            TensorDataset(INPUTS[:, :1], INPUTS[:, 1:2]),
            TensorDataset(shuffled(INPUTS)[:, :1], shuffled(INPUTS)[:, 1:2]),
        ),
        (INPUTS[:, :2].tolist(), shuffled(INPUTS)[:, :2].tolist()),
        (["one/end", "a"], ["two/end", "a"]),
        (range(0, 50), range(50, 100)),
        (INPUTS.numpy(), shuffled(INPUTS).numpy()),
        (
            [{"text": str(row), "label": row} for row in range(9)],
            [{"text": str(row), "label": row} for row in range(1, 10)],
        ),
        (Subset(Unread(), range(0, 50)), Subset(Unread(), range(50, 100))),
        (Subset(list(range(99)), [3, 4]), Subset(list(range(1, 100)), [3, 4])),
    ],
)
def test_other_data_of_the_same_length_are_seen(one: Any, other: Any, exact: bool) -> None:
    assert facts_of(one, exact=exact) == facts_of(one, exact=exact)
    assert facts_of(one, exact=exact) != facts_of(other, exact=exact)


@pytest.mark.parametrize("kind", [torch.as_tensor, lambda values: values.numpy(), list])
def test_last_bits_count_with_exact(kind: Any) -> None:
    near = INPUTS * (1 + 2**-23)
    assert facts_of(kind(INPUTS), exact=False) == facts_of(kind(near), exact=False)
    assert facts_of(kind(INPUTS), exact=True) != facts_of(kind(near), exact=True)


def test_files_may_be_in_other_folders() -> None:
    def files(folder: str, shift: int = 0) -> list[Any]:
        return [(f"{folder}/{row + shift}.png", Path(folder) / f"{row}.txt", row) for row in range(9)]

    assert facts_of(files("/a"), exact=True) == facts_of(files("/b/c"), exact=True)
    assert facts_of(files("/a"), exact=True) != facts_of(files("/a", 1), exact=True)


def test_a_data_set_of_its_own_class_is_not_read() -> None:
    assert facts_of(Unread(), exact=True) == {}


@pytest.mark.parametrize(
    "data",
    [
        [numpy.float32(1.0), numpy.array(["a"]), None, b"a", object(), torch.empty(0), 1.5],
        Subset([1, 2], [0, 5]),
        [torch.eye(3).to_sparse()],
        numpy.frombuffer(bytes(80), ">f8"),
        [torch.ones(3, dtype=torch.complex64).conj().imag, torch.tensor([float("nan"), float("inf")])],
        [torch.empty(3, device="meta"), torch.empty(1, device="meta"), torch.tensor(2.0)],
        Subset({"a": 1, "b": 2}, ["a", "b"]),  # type: ignore[arg-type]
        [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.complex64).conj().imag],
    ],
)
def test_whatever_a_sample_is(data: Any) -> None:
    assert list(facts_of(data, exact=False)) == list(facts_of(data, exact=True))
