"""Averages of the weights over the steps: exponential, or stochastic weight averaging.

::

    every = 2, after = 3          ● update   A average

    step   0   1   2   3   4   5   6   7   8
           ●   ●   ●   ●   ●   ●   ●   ●   ●
                               A       A           ema: a <- decay a + (1 - decay) w; the first is a copy
                                                   swa: a <- a + (w - a) / n, n the number of averages

EMA: Polyak and Juditsky 1992; as in Tarvainen and Valpola 2017 (arXiv 1703.01780). SWA: Izmailov et al. 2018 (arXiv
1803.05407). The numbers are those of torch.optim.swa_utils with get_ema_multi_avg_fn or get_swa_multi_avg_fn, updated
after the same steps.

The optimizer's state holds the averages, next to the moments of each parameter. So the worker that updates a parameter
averages it, and checkpoints, joiners, servers and pipelines need no extra code. A parameter that was never updated has
no state and is its own average, because an optimizer may mistake a foreign entry for its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ConfigError, InputError
from paceline.settings import AverageSettings
from paceline.system.torch_internals import foreach_lerp_

KEY = "averaged"  # name of the average in the state of a parameter
_HALF = torch.float16, torch.bfloat16


class Averages:
    """Averages of the parameters that this worker updates.

    Args:
        optimizer: optimizer whose state holds the averages. It does not update a parameter without gradient and state.
    """

    def __init__(self, settings: AverageSettings, optimizer: Optimizer) -> None:
        self.settings = settings
        self.chosen = False  # whether the script currently evaluates and exports the averages
        # returns a context in which all workers put the averages of their shares into the weights. None if this worker
        # has all averages
        self.divided: Callable[[], AbstractContextManager[None] | None] = lambda: None
        self._optimizer = optimizer

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates now: slices of them during an update in parts."""
        return [value for group in self._optimizer.param_groups for value in group["params"]]

    def around(self, step: int, update: Callable[[], None]) -> None:
        """Make an update, and average its result if the step is due.

        Args:
            update: function that changes the parameters from their gradients.
        """
        if self.settings.kind is None:
            update()
            return
        number, rest = divmod(step + 1 - self.settings.after, self.settings.every)
        late = {}
        if number > 0 and (number, rest) != (1, 0):  # averages exist, so a new one begins with the old weights
            late = {value: _copy(value) for value in self._parameters if self._begins(value)}
        update()
        for value, average in late.items():
            self._optimizer.state.setdefault(value, {})[KEY] = average
        if number > 0 and rest == 0:
            self._average(number)

    def values(self) -> dict[nn.Parameter, torch.Tensor]:
        held = ((value, self._optimizer.state.get(value, {}).get(KEY)) for value in self._parameters)
        return {value: average for value, average in held if average is not None}

    @contextmanager
    def in_place(self, alone: bool = False) -> Iterator[None]:
        """Put the averages into the parameters if they are chosen, and restore the parameters afterwards.

        Args:
            alone: whether the other workers do not call this.
        """
        if self.chosen and (divided := self.divided()) is not None:
            if alone:
                raise InputError(
                    "Each worker has the averages of its share of the weights only, and the other workers have made "
                    "this call inside session.averaged() before this worker joined or resumed, so it cannot make it "
                    "alone. Use everywhere=False, which gives the result to rank 0, or session.export(path)."
                )
            with divided:
                yield
            return
        averages = self.values() if self.chosen else {}
        kept = {value: value.detach().clone() for value in averages}
        try:
            _put(averages)
            yield
        finally:
            _put(kept)

    @contextmanager
    def choose(self) -> Iterator[None]:
        """Choose the averages for evaluation and export in this context."""
        if self.settings.kind is None:
            raise ConfigError("session.averaged() needs an average of the weights: set average='ema', or 'swa'.")
        self.chosen = True
        try:
            yield
        finally:
            self.chosen = False

    def check_training(self) -> None:
        """Raise ConfigError if the averages are chosen during training."""
        if self.chosen:
            raise ConfigError(
                "session.step() inside session.averaged(): training continues from the weights themselves. Leave the "
                "block before the next step."
            )

    def _begins(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None and KEY not in self._optimizer.state.get(parameter, {})

    @torch.no_grad()
    def _average(self, number: int) -> None:
        settings, averages, values = self.settings, [], []
        for value in self._parameters:
            state = self._optimizer.state.get(value)
            if state and KEY in state:
                averages.append(state[KEY])
                values.append(value.to(state[KEY].dtype))
            elif state or value.grad is not None:
                self._optimizer.state.setdefault(value, {})[KEY] = _copy(value)
        if averages:
            weight = 1 - settings.decay if settings.kind == "ema" else 1 / number
            foreach_lerp_(averages, values, weight)


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    """Copy a parameter, in float32 if it has half precision, which would round the small changes of an average away."""
    dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
    return parameter.detach().to(dtype, copy=True)


@torch.no_grad()
def _put(values: Mapping[nn.Parameter, torch.Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)
