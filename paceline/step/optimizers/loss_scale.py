"""Dynamic loss scaling: keeps small gradients of a float16 forward pass from becoming zero.

::

    loss * scale ─ backward, reduce ─ gradients / scale ─ norm, clip, update
                                      not finite: no update, scale / 2; 2000 steps without that: scale * 2

Micikevicius et al. 2018 (arXiv 1710.03740); the numbers are those of torch.amp.GradScaler. A scale is a power of two,
so it changes no bits of a gradient that float16 can hold. All workers see the same mean gradients and decide alike.
"""

from __future__ import annotations

import math
from typing import Any

_STATE = "loss scale"
_FIRST, _LARGEST = 2.0**16, 2.0**24
_GOOD_STEPS = 2000  # number of consecutive steps without an overflow after which the scale grows


class LossScale:
    """Loss scale of a run, kept in the strategy's state, which is saved in checkpoints and sent to joiners.

    Args:
        samples: number of samples in a batch. A loss is their sum, so the next power of two divides its multiplier.
    """

    def __init__(self, state: dict[str, Any], samples: int = 1) -> None:
        self._state = state
        self.unit = 2.0 ** -(samples - 1).bit_length()  # inverse of that power of two
        self.overflowed = False

    @property
    def value(self) -> float:
        """Factor by which losses are multiplied and their gradients divided."""
        return float(self._state.get(_STATE, (_FIRST, 0))[0]) * self.unit

    def observe(self, norm: float) -> bool:
        """Adjust the scale to the gradient norm of a step. Returns whether to make the update."""
        scale, good = self._state.get(_STATE, (_FIRST, 0))
        self.overflowed = not math.isfinite(norm)
        if self.overflowed:
            scale, good = max(scale / 2, 1.0), 0
        elif good + 1 == _GOOD_STEPS:
            scale, good = min(2 * scale, _LARGEST), 0
        else:
            good += 1
        self._state[_STATE] = [scale, good]
        return not self.overflowed
