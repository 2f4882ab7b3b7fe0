"""Batches in the containers that data sets and tokenizers give: each comes out as one of its own type."""

from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from paceline.data.nested import concatenated, default_collate, leaves_in, map_tensors, rows, tensors_in


class Pair(NamedTuple):
    features: Any
    target: Any


@dataclass(frozen=True)
class Sample:
    features: Any
    target: Any


class Encoding(UserDict[str, Any]):
    """As the ``BatchEncoding`` of Hugging Face: values by key and by attribute, and something that is no value."""

    def __init__(self, data: Any = None) -> None:
        super().__init__(data)
        self.note = "kept"

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def values(length: int, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(begin, begin + length)
    return numbers.float().unsqueeze(1) * torch.ones(3), numbers


CONTAINERS = {
    "tuple": lambda features, target: (features, target),
    "named tuple": Pair,
    "dataclass": Sample,
    "dictionary": lambda features, target: {"features": features, "target": target},
    "encoding": lambda features, target: Encoding({"features": features, "target": target}),
    "nested": lambda features, target: Pair({"one": [Sample(features, None)]}, Encoding({"two": (target, "text")})),
}
made = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are of the same types and equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    found = leaves_in(one), leaves_in(other)
    if len(found[0]) == 1 and found[0][0] is one:
        return bool(one == other)
    return len(found[0]) == len(found[1]) and all(map(same, *found))


@made
def test_tensors_are_mapped_and_the_rest_stays(make: Any) -> None:
    batch = make(*values(4))
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert type(doubled) is type(batch)
    assert all(map(torch.equal, tensors_in(doubled), (value * 2 for value in values(4))))
    assert all(map(torch.equal, tensors_in(batch), values(4))), "the batch itself was changed"
    if isinstance(doubled, Encoding):
        assert doubled.note == "kept"
        assert torch.equal(doubled.target, 2 * values(4)[1])


@made
def test_rows_are_put_together_again(make: Any) -> None:
    batch = make(*values(6))
    parts = [rows(batch, 0, 2), rows(batch, 2, 6)]
    assert same(parts[0], make(*values(2)))
    joined = concatenated(parts)
    assert same(joined, batch) == (make is not CONTAINERS["nested"])  # text is no tensor: those stay apart
    assert concatenated([batch, make(torch.zeros(1, 4), torch.zeros(1))]) is None


@pytest.mark.parametrize("name", ["tuple", "named tuple", "dataclass", "dictionary", "encoding"])
def test_samples_are_collated(name: str) -> None:
    make: Any = CONTAINERS[name]
    features, target = values(4)
    collated = default_collate([make(features[row], target[row]) for row in range(4)])
    expected = list(values(4)) if name == "tuple" else make(*values(4))
    assert same(collated, expected)


def test_a_mapping_that_cannot_be_changed_becomes_a_dictionary() -> None:
    assert same(map_tensors(torch.clone, MappingProxyType({"one": values(2)[1]})), {"one": values(2)[1]})


def test_an_encoding_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": values(4)[1], "labels": values(4)[1] + 1})
    part = rows(batch, 1, 3)
    assert type(part) is type(batch)
    assert part.input_ids.tolist() == [1, 2]
    assert batch.input_ids.tolist() == [0, 1, 2, 3]
