"""Samples of a TensorDataset are read together; what comes out is what torch's own collate gives."""

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from paceline.data.loading.samples import KeyedDataset, LoadRequest, TensorRows, collated

TENSORS = {
    "one tensor": [torch.randn(20, 3)],
    "pairs": [torch.randn(20, 2, 3), torch.arange(20)],
    "other types and strides": [torch.randn(5, 20, dtype=torch.float64).t(), torch.arange(20) % 2 == 0],
}


class Own(TensorDataset):
    """A data set that does something of its own with each sample."""

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(place))


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_the_same_as_one_after_the_other(tensors: list[torch.Tensor]) -> None:
    data, samples = TensorDataset(*tensors), [7, 0, 19, 7]
    together = KeyedDataset(data, 0, collates=False).__getitems__(LoadRequest(0, samples))
    assert isinstance(together, TensorRows)
    found, wanted = collated(together, default_collate), default_collate([data[sample] for sample in samples])
    assert type(found) is type(wanted) and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.is_contiguous()


@pytest.mark.parametrize(("data", "collates"), [(Own(torch.arange(9)), False), (TensorDataset(torch.arange(9)), True)])
def test_whatever_else_is_read_one_by_one(data: TensorDataset, collates: bool) -> None:
    items = KeyedDataset(data, 0, collates=collates).__getitems__(LoadRequest(0, [3, 1]))
    assert items == [data[3], data[1]]
