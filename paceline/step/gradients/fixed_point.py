"""Gradients as integers: their sum has the same bits in any order, so any all-reduce is exact.

Each microbatch's gradient is rounded to multiples of a unit, a power of two for each parameter, and these integers are
added up. The unit is chosen before the step, from the largest gradient of earlier steps::

    bound            2**bound is above every |gradient| of the last step; it falls by 1/8 a step at most
    a step allows    |gradient| < 2**(bound + 2): at least four times as much
    unit             2**(bound + 2 - bits), with V * 2**bits < 2**31 for V microbatches

So the sum of V microbatches fits into 32 bits (64 for float64), in any order of additions. All workers learn the
largest gradient of all microbatches by a maximum, which does not depend on order either. If a gradient is larger than
allowed, as in the first step, before any bound is known, all workers compute the step again with units that fit. The
bounds are part of the training state: they are saved in checkpoints and sent to workers that join.

Rounding to a common unit before adding follows Demmel and Nguyen 2013 (Fast reproducible floating-point summation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.comm.collectives.all_gather import AllGather, PendingGather
from paceline.comm.collectives.step_header import LARGEST_TAG
from paceline.comm.transport.host_copy import HostCopy
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Values
from paceline.system.torch_internals import foreach_div_, foreach_mul_, foreach_norm, foreach_round_

_STATE = "fixed_point"
_HEADROOM = 2
_FALL = 0.125
_WHOLE = {torch.float64: torch.int64}
"""dtype of the sums if it is not int32."""
_FINEST = {torch.int32: 126, torch.int64: 1022}
"""No unit is below 2 to the negative of this, the smallest normal number."""
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Parameter dtypes whose gradients can be encoded as integers."""


class FixedPoint:
    """Encoder and decoder between the gradients of a run and integers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._names = list(context.update.parameters)
        self._parameters = list(context.update.parameters.values())
        self._types = [_WHOLE.get(value.dtype, torch.int32) for value in self._parameters]
        self._bits = [bits_of(kind, context.order.microbatches) for kind in self._types]
        self._norms: list[list[torch.Tensor]] = [[] for _ in self._parameters]
        self._exponents: list[int] = []
        self._raised: dict[str, float] = {}
        self._gather: AllGather | None = None
        self._pending: PendingGather | None = None
        self._largest: list[float] = []

    def examples(self) -> list[torch.Tensor]:
        """Return a tensor with the dtype and shape of each sum. The values are undefined."""
        return [
            value.detach().view(kind) if value.element_size() == kind.itemsize else torch.empty_like(value, dtype=kind)
            for value, kind in zip(self._parameters, self._types, strict=True)
        ]

    def encode(self, gradients: Values, places: Sequence[int] | None = None) -> Values:
        """Encode the gradients of a microbatch as integers. The gradients are overwritten.

        Args:
            gradients: gradients of some parameters.
            places: indices of these parameters. Defaults to all parameters.
        """
        every = range(len(gradients)) if places is None else places
        given = [(place, value) for place, value in zip(every, gradients, strict=True) if value is not None]
        whole = iter(self._encode_given([place for place, _ in given], [value for _, value in given]))
        return [None if value is None else next(whole) for value in gradients]

    def _encode_given(self, places: list[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if not places:
            return []
        wide = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in gradients]
        for place, largest in zip(places, _largest(wide), strict=True):
            self._norms[place].append(largest)
        exponents = self._units()
        foreach_mul_(wide, [2.0 ** -exponents[place] for place in places])
        foreach_round_(wide)
        return [value.to(self._types[place]) for place, value in zip(places, wide, strict=True)]

    def send(self) -> None:
        """Start sending this worker's largest gradients to the other workers. All gradients must be encoded."""
        if self._gather is None:
            self._gather = AllGather(self._context.world, LARGEST_TAG, 8 * len(self._parameters))
        self._pending = self._gather.start(self._largest_here())

    def fits(self) -> bool:
        """Return whether every gradient was within its bound. If not, set bounds that fit for the repeated step."""
        here = self._largest_here() if self._pending is None else self._pending.wait().amax(0)
        self._largest = HostCopy(here).wait().tolist()
        self._norms, self._pending = [[] for _ in self._parameters], None
        bounds = self._bounds()
        larger = {
            name: bound
            for name, bound in zip(self._names, map(_bound_of, self._largest), strict=True)
            if bound is not None and (name not in bounds or bound > _allowed(bounds[name]))
        }
        if larger:
            self._raised, self._exponents = bounds | larger, []
            self._context.events.mark("repeated", reason="gradients are larger than foreseen", parameters=list(larger))
        return not larger

    def decode(self, sums: Values, divisor: torch.Tensor | float) -> Values:
        """Return the means from integer sums, NaN where a microbatch's gradient was not finite."""
        exponents, given = self._units(), list[torch.Tensor]()
        means: Values = [None] * len(sums)
        for place, (value, parameter) in enumerate(zip(sums, self._parameters, strict=True)):
            if value is not None:
                mean = value.to(torch.promote_types(parameter.dtype, torch.float32))
                means[place] = mean if math.isfinite(self._largest[place]) else mean.fill_(math.nan)
                given.append(mean)
        if given:
            units = [2.0**exponent for exponent, mean in zip(exponents, means, strict=True) if mean is not None]
            foreach_mul_(given, units)
            foreach_div_(given, divisor)
        return [
            None if mean is None else mean.to(parameter.dtype)
            for mean, parameter in zip(means, self._parameters, strict=True)
        ]

    def accept(self) -> None:
        """Update the bounds from the gradients of the completed step."""
        bounds = dict(self._context.strategy_state.get(_STATE, {}))
        for name, bound in zip(self._names, map(_bound_of, self._largest), strict=True):
            if bound is not None:
                bounds[name] = max(bound, bounds.get(name, bound) - _FALL)
        self._context.strategy_state[_STATE] = bounds
        self._exponents, self._raised = [], {}

    def _bounds(self) -> dict[str, float]:
        return self._raised or self._context.strategy_state.get(_STATE, {})

    def _units(self) -> list[int]:
        """Return the exponent of each parameter's unit. Without a known bound the exponent does not matter."""
        if not self._exponents:
            bounds = self._bounds()
            self._exponents = [
                max(_allowed(bounds.get(name, 0.0)) - bits, -_FINEST[kind])
                for name, bits, kind in zip(self._names, self._bits, self._types, strict=True)
            ]
        return self._exponents

    def _largest_here(self) -> torch.Tensor:
        """Return the largest absolute gradient of each parameter on this worker in float64, NaN if any is NaN."""
        device = self._context.world.device
        rows = max(map(len, self._norms))
        if not rows:
            return torch.zeros(len(self._norms), dtype=torch.float64, device=device)
        nothing = torch.zeros((), device=device)
        norms = [norm for own in self._norms for norm in (*own, *[nothing] * (rows - len(own)))]
        return torch.stack(norms).view(-1, rows).amax(1).double()


def _largest(values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the largest absolute value of each tensor, NaN if any element is NaN."""
    if values[0].device.type == "cpu":  # the maximum norm takes 20 times as long on a CPU
        ends = [torch.aminmax(value) if value.numel() else (value.sum(), value.sum()) for value in values]
        return [torch.maximum(-low, high) for low, high in ends]
    return foreach_norm(values, math.inf)


def bits_of(kind: torch.dtype, microbatches: int) -> int:
    """Return the largest number of bits for an integer so that the sum over all microbatches fits into ``kind``.

    >>> bits_of(torch.int32, 8)
    27
    """
    return (torch.iinfo(kind).max // microbatches).bit_length() - 1


def _bound_of(largest: float) -> float | None:
    """Return the exponent of the next power of two, or None for zero, NaN and infinity."""
    return float(math.frexp(largest)[1]) if largest and math.isfinite(largest) else None


def _allowed(bound: float) -> int:
    """Return the exponent of the limit on gradients, given the bound from earlier steps."""
    return math.ceil(bound) + _HEADROOM
