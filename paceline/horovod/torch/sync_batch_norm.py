"""Batch norm with statistics over the batches of all workers."""

from __future__ import annotations

import torch

from paceline.horovod.runtime import size
from paceline.horovod.torch.allreduce import allreduce
from paceline.horovod.torch.requests import Sum
from paceline.system.torch_internals import AnyBatchNorm, called_by_torch


@called_by_torch
class SyncBatchNorm(AnyBatchNorm):
    """``torch.nn.BatchNorm`` over the batches of all workers, for inputs of 2 or more dimensions on CPU or GPU.

    Batches may differ in size. In evaluation mode and with a single worker this is plain batch norm.
    """

    def check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of 2 or more dimensions, not of shape {list(input.shape)}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input."""
        self.check_input_dim(input)
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        own = input.sum(axes)
        total = allreduce(torch.cat([own, own.new_tensor([input.numel() / input.shape[1]])]), op=Sum)
        mean, count = total[:-1] / total[-1], total[-1].detach()
        shape = [1, -1, *[1] * (input.dim() - 2)]
        centered = input - mean.view(shape)
        variance = allreduce(centered.square().sum(axes), op=Sum) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
        found = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance * (count / (count - 1).clamp_min(1)), weight)
