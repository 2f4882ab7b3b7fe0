"""``DistributedOptimizer(op=hvd.Adasum)``: local updates of the workers, which are then combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from paceline.horovod.torch.allreduce import allreduce_async
from paceline.horovod.torch.compression import Compressor
from paceline.horovod.torch.requests import Adasum


class AdasumReducing(Optimizer):
    """Methods added to the class of the optimizer."""

    _base: type[Optimizer]
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]

    def synchronize(self) -> None:
        """Do nothing, because gradients stay local to this worker."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, because there is no synchronization to skip.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("skip_synchronize is not for op=hvd.Adasum: it combines the updates in step().")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of this worker, then combine the parameter changes of all workers."""
        before = {one: one.detach().clone() for one in self._parameter_names if one.requires_grad}
        loss = self._base.step(self, closure)
        handles = []
        with torch.no_grad():
            for one, old in before.items():
                small, context = self._compression.compress(one.detach() - old)
                handles.append((allreduce_async(small, name=self._parameter_names[one], op=Adasum), context))
            for (one, old), (handle, context) in zip(before.items(), handles, strict=True):
                one.copy_(old + self._compression.decompress(handle.results(), context))
        return loss

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing, because gradients add up until ``step``."""
