"""A tensor that was sent lies in memory as it did before."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.links.strides import dense_strides_of, laid_out, one_after_another, strides_of


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


TENSORS = {
    "a number": numbers(),
    "contiguous": numbers(2, 3),
    "transposed": numbers(2, 3, 4).transpose(0, 2),
    "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel, channels last": numbers(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "every second": numbers(4, 6)[:, ::2],
    "the last of each": numbers(2, 3, 4)[:, -1],
    "expanded inside": numbers(4, 1).expand(4, 5),
    "expanded outside": numbers(1, 4).expand(5, 4),
    "expanded everywhere": numbers(1).expand(2, 3),
    "all at once": numbers(2, 3, 4).permute(1, 2, 0)[:, 1:, None].expand(-1, -1, 3, -1),
    "empty": numbers(0, 3),
    "no numbers": numbers(5, 0).expand(2, 5, 0),
    "whole numbers": torch.arange(6).view(2, 3).t(),
}


@pytest.mark.parametrize("value", TENSORS.values(), ids=TENSORS)
def test_strides_and_numbers_are_the_same(value: torch.Tensor) -> None:
    sent = one_after_another(value, strides_of(value))
    assert sent.shape == (value.numel(),)
    assert sent.is_contiguous()
    found = laid_out(sent.clone(), value.shape, strides_of(value))
    assert torch.equal(found, value)
    if value.numel():
        assert found.stride() == value.stride()


@pytest.mark.parametrize("value", TENSORS.values(), ids=TENSORS)
def test_dense_strides_take_no_room_but_for_the_numbers(value: torch.Tensor) -> None:
    strides = dense_strides_of(value)
    found = laid_out(one_after_another(value, strides), value.shape, strides)
    assert torch.equal(found, value)
    assert found.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_dense_strides_keep_the_order_of_the_axes() -> None:
    assert dense_strides_of(numbers(2, 3, 4).transpose(0, 2)) == (1, 4, 12)
    assert dense_strides_of(numbers(2, 5, 4)[:, ::2].transpose(0, 2)) == (1, 4, 12)


def test_windows_that_overlap_become_contiguous() -> None:
    value = numbers(10).unfold(0, 3, 1)
    found = laid_out(one_after_another(value, strides_of(value)), value.shape, strides_of(value))
    assert torch.equal(found, value)
    assert found.is_contiguous()


def test_a_tensor_can_be_laid_out_like_another_one() -> None:
    strides = strides_of(numbers(2, 3, 4).transpose(0, 2))
    found = laid_out(one_after_another(numbers(4, 3, 2), strides), (4, 3, 2), strides)
    assert torch.equal(found, numbers(4, 3, 2))
    assert found.stride() == strides


def test_what_is_not_alike_is_not_expanded() -> None:
    strides = strides_of(numbers(1, 4, 1).expand(5, 4, 2))
    found = laid_out(one_after_another(numbers(5, 4, 2), strides), (5, 4, 2), strides)
    assert torch.equal(found, numbers(5, 4, 2))
