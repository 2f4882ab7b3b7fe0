"""Elastic training, which continues when workers are lost or join: ``hvd.elastic``.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.horovod.common.elastic import ObjectState, State, run_fn
from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.runtime import re_form
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.elastic.state import TorchState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a :class:`State` so that it continues when workers are lost or join.

    Whenever the workers change, all take the state of rank 0 and call the function again, which must continue from
    that state. Joining workers run the same script up to this function, so the script must not call any Horovod
    operation before it except ``init``.

    Raises:
        HorovodInternalError: an operation failed, in a run that is not elastic or more than 10 times without a commit.

    Example:
        >>> import torch
        >>> import paceline.horovod.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.step in range(state.step, 3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).square().sum().backward()
        ...         optimizer.step()
        ...         state.commit()
        >>> train(hvd.elastic.TorchState(model, optimizer, step=0))
        >>> hvd.shutdown()
    """
    return run_fn(func, re_form)
