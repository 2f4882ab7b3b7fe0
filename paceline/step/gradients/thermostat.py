"""Bits of each parameter with ``wire="int-auto"``: 4, and more when rounding adds too much noise to its gradients.

Rounding a gradient to multiples of a unit adds noise. If the norm of the gradient is less than about sqrt(3) times that
noise, training stalls (Chmiel et al. 2025, arXiv 2505.19115). So one of 16 steps measures both for each parameter::

    microbatch      x = gradient / unit       power = sum of x^2       noise = sum of f (1 - f), f the fraction of x
    batch           power < 3 * noise         the parameter has more bits from the next step on: int4, int8, 32 bits

The measures are whole numbers, and are added up over the microbatches of all workers. So they do not depend on the
number of workers, and all workers decide alike. The decisions are part of the training state.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

STATE = "bits"
"""Name in ``strategy_state`` of the formats of the parameters that have more than 4 bits."""
EVERY = 16
_NEXT = {"int4": "int8", "int8": "float32"}
_LEAST = 3  # least ratio of the squares of norm and noise
_STEPS = 16  # bits of the fraction of a scaled gradient, as in ``step.gradients.lanes``
_COARSE = 8  # bits of the fraction that its square keeps, so that sums of squares fit into 64 bits


class Thermostat:
    """Measure of the noise of some parameters, and the choice of their bits.

    Args:
        formats: present format of each parameter, by name. Those with 32 bits are not measured.
        parameters: names of all parameters of the codec, in its order.
    """

    def __init__(self, formats: Mapping[str, str], parameters: Sequence[str], device: torch.device) -> None:
        self._formats = formats
        self._measured = {place for place, name in enumerate(parameters) if formats.get(name) in _NEXT}
        self._parameters, self._device = parameters, device
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.here = torch.zeros(2, len(self._parameters), dtype=torch.float64, device=self._device)

    def measure(self, step: int, place: int, scaled: torch.Tensor) -> None:
        """Add the power and the noise of a microbatch's gradient, in 1/65,536 of a unit, to those of this worker."""
        if step % EVERY or place not in self._measured:
            return
        steps = scaled.reshape(-1).to(torch.int32)
        fractions = steps & ((1 << _STEPS) - 1)
        noise = (fractions * ((1 << _STEPS) - fractions)).sum(dtype=torch.int64) >> _STEPS
        power = steps.bitwise_right_shift_(_STEPS - _COARSE).long().square_().sum()
        self.here[:, place] += torch.stack([power, noise])

    def decide(self, sums: torch.Tensor, state: MutableMapping[str, Any]) -> None:
        """Give more bits to the parameters whose noise is too large.

        Args:
            sums: sums of :attr:`here` over all workers.
        """
        power, noise = sums
        noisy = (power < _LEAST * noise).tolist()
        raised = {name: _NEXT[self._formats[name]] for name, one in zip(self._parameters, noisy, strict=True) if one}
        if raised:
            state[STATE] = state.get(STATE, {}) | raised
