"""Gradients in the format in which they are added up and sent: whole numbers, narrower floats, or as they are.

Every parameter has a :class:`Format`. A format with a limited range takes its scale from the largest gradients of
earlier steps, so that no worker waits for others before it encodes::

    step s     encode with the scale of earlier steps, add up, and gather the largest |gradient| of all microbatches
               all of them fit       decode the sums, update the model, accept the largest values
               one does not fit      all workers compute step s again, with scales that fit

All workers learn the largest gradient by a maximum over microbatches, which does not depend on order or shares, so all
take the same decision. The bounds are part of the training state: they are saved in checkpoints and sent to workers
that join. They are bounds of the unscaled loss's gradients, so a new loss scale does not change them. A scale for
integers from a running norm, without a round of its own, is that of IntSGD (Mishchenko et al. 2021, arXiv 2102.08374);
here the norm is the maximum, over microbatches instead of workers.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from paceline.comm.collectives.all_gather import AllGather, PendingGather
from paceline.comm.collectives.step_header import LARGEST_TAG
from paceline.comm.reduction.narrow import FLOAT8, wide
from paceline.comm.transport.host_copy import HostCopy
from paceline.data.keys import ROUNDING
from paceline.schedule.slices import Slice
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Values
from paceline.step.gradients.lane_memory import LaneMemory
from paceline.step.gradients.thermostat import Thermostat
from paceline.system.torch_internals import foreach_div_, foreach_mul_, foreach_norm, foreach_round_


class Turn(NamedTuple):
    """Microbatch whose gradient is encoded."""

    step: int
    microbatch: int
    bound: Any  # bound of the parameter, None if unknown
    # function that returns the generator of random numbers, seeded by the key of this gradient
    chance: Callable[[], torch.Generator]


class Format:
    """Representation of one parameter's gradient while it is added up and sent. By default it is sent as it is.

    A bound is known to all workers from earlier steps. It may be a container of tensors, which may be on the host.
    """

    state = ""  # name of the bounds of such parameters in ``strategy_state``. Empty if they have none.
    whole = False  # whether scaled gradients are rounded to whole numbers before :meth:`pack`

    def example(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the dtype and shape of a sum. The values are undefined."""
        return parameter.detach()

    def encoded(self, parts: Sequence[slice]) -> list[slice]:
        """Return the elements of a sum that stand for these parts of the flattened gradient, in ascending order."""
        return [*parts]

    def fits(self, largest: float, bound: Any) -> bool:
        """Return whether a gradient that is at most ``largest`` fits into the scale for this bound."""
        return True

    def bound(self, largest: float, before: Any) -> Any:
        """Return the bound after a step with this largest gradient, given the bound before it."""
        return 0.0

    def scale(self, bound: Any) -> float:
        """Return the factor of the gradients before :meth:`pack`."""
        return 1.0

    def unit(self, bound: Any) -> float:
        """Return the factor of the numbers after :meth:`unpack`."""
        return 1.0

    def pack(self, value: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return the scaled gradient of a microbatch as it is added up. It may be overwritten."""
        return value

    def unpack(self, value: torch.Tensor, parameter: torch.Tensor, bound: Any) -> torch.Tensor:
        """Return a sum as a new tensor of the parameter's shape, in float32 or a wider type of the parameter."""
        kind = torch.promote_types(parameter.dtype, torch.float32)
        return wide(value).to(kind) if value.dtype in FLOAT8 else value.to(kind, copy=True)


class Codec:
    """Encoder and decoder of the gradients of a run."""

    def __init__(
        self,
        context: TrainingContext,  # training context
        parameters: Mapping[str, torch.Tensor],  # parameters whose gradients are encoded, by name
        formats: Sequence[Format],  # format of each parameter
        memory: LaneMemory | None = None,  # parts of gradients that were not sent, if formats leave any
        thermostat: Thermostat | None = None,  # choice of the bits of parameters, if they are chosen
    ) -> None:
        self.memory, self._thermostat = memory, thermostat
        self._context, self._formats = context, formats
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._keys = [number_of(name) for name in self._names]
        self._generator: torch.Generator | None = None
        self.bounded = any(one.state for one in formats)
        self._norms: list[list[torch.Tensor]] = [[] for _ in formats]
        self._scales: list[float] = []
        self._raised: dict[str, Any] = {}
        self._gather: AllGather | None = None
        self._pending: PendingGather | None = None
        self._largest: list[float] = [0.0] * len(formats)
        self._noise = torch.zeros(2, len(formats), dtype=torch.float64)  # see :class:`Thermostat`

    def examples(self) -> list[torch.Tensor]:
        """Return a tensor with the dtype and shape of each sum. The values are undefined."""
        return [form.example(value) for form, value in zip(self._formats, self._parameters, strict=True)]

    def slices(self, slices: Sequence[Slice]) -> list[Slice]:
        """Return the elements of the sums that stand for slices of the parameters, in the same order."""
        of_parameter: dict[int, list[Slice]] = defaultdict(list)
        for one in sorted(slices):
            of_parameter[one.parameter].append(one)
        found: dict[Slice, Slice] = {}
        for place, every in of_parameter.items():
            parts = self._formats[place].encoded([slice(one.start, one.stop) for one in every])
            found |= {
                one: one._replace(start=part.start, stop=part.stop) for one, part in zip(every, parts, strict=True)
            }
        return [found[one] for one in slices]

    def encode(self, gradients: Values, step: int, microbatch: int, places: Sequence[int] | None = None) -> Values:
        """Encode the gradients of a microbatch. The gradients are overwritten.

        Args:
            gradients: gradients of some parameters.
            microbatch: number of the microbatch, or the first microbatch of a fused group.
            places: indices of these parameters. Defaults to all parameters.
        """
        every = range(len(gradients)) if places is None else places
        given = [(place, value) for place, value in zip(every, gradients, strict=True) if value is not None]
        if not given:
            return gradients
        at, values = [place for place, _ in given], [value for _, value in given]
        packed = iter(self._encode_given(at, values, step, microbatch))
        return [None if value is None else next(packed) for value in gradients]

    def _encode_given(
        self, places: list[int], gradients: list[torch.Tensor], step: int, microbatch: int
    ) -> list[torch.Tensor]:
        wide = [
            value.to(torch.promote_types(value.dtype, torch.float32)) if self._formats[place].state else value
            for place, value in zip(places, gradients, strict=True)
        ]
        scaled = [(place, value) for place, value in zip(places, wide, strict=True) if self._formats[place].state]
        if scaled:
            values = [value for _, value in scaled]
            for (place, _), largest in zip(scaled, largest_of(values), strict=True):
                self._norms[place].append(largest)
            scales = self._scales_now()
            foreach_mul_(values, [scales[place] for place, _ in scaled])
            whole = [value for place, value in scaled if self._formats[place].whole]
            if whole:
                foreach_round_(whole)
            if self._thermostat is not None:
                for place, value in scaled:
                    self._thermostat.measure(step, place, value)
        bounds = self._bounds()
        return [
            self._formats[place].pack(
                value, Turn(step, microbatch, bounds[place], partial(self._seeded, step, microbatch, place))
            )
            for place, value in zip(places, wide, strict=True)
        ]

    def _seeded(self, step: int, microbatch: int, place: int) -> torch.Generator:
        self._generator = self._generator or torch.Generator(self._context.world.device)
        return self._generator.manual_seed(self._context.compute.seed(ROUNDING, step, microbatch, self._keys[place]))

    def expect(self, largest: Sequence[float]) -> None:
        """Set bounds that fit the next gradients, given the largest absolute gradient of each parameter."""
        known = [(at, value) for at, value in enumerate(largest) if self._formats[at].state and _is_known(value)]
        self._raised |= {self._names[at]: self._formats[at].bound(value, None) for at, value in known}
        self._scales = []

    def send(self) -> None:
        """Start sending this worker's largest gradients to the other workers. All gradients must be encoded."""
        if not self.bounded:
            return
        if self._gather is None:
            self._gather = AllGather(self._context.world, LARGEST_TAG, self._measured_here().nbytes)
        self._pending = self._gather.start(self._measured_here())

    def fits(self) -> bool:
        """Return whether every gradient was within its bound. If not, set bounds that fit for the repeated step."""
        if not self.bounded:
            return True
        everyone = self._measured_here().unsqueeze(0) if self._pending is None else self._pending.wait()
        here = HostCopy(torch.cat([everyone[:, :1].amax(0), everyone[:, 1:].sum(0)])).wait()
        self._largest, self._noise = (here[0] / self._context.compute.scale).tolist(), here[1:]
        self._norms, self._pending = [[] for _ in self._parameters], None
        if self._thermostat is not None:
            self._thermostat.clear()
        larger = {
            name: form.bound(largest, None)
            for name, form, largest, bound in zip(
                self._names, self._formats, self._largest, self._bounds(), strict=True
            )
            if form.state and _is_known(largest) and not form.fits(largest, bound)
        }
        if larger:
            self._raised |= larger
            self._scales = []
            self._context.events.mark("repeated", reason="gradients are larger than foreseen", parameters=list(larger))
        return not larger

    def decode(
        self,
        sums: Values,
        divisor: torch.Tensor | float,
        like: Sequence[torch.Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> Values:
        """Return the means from the sums, NaN where a microbatch's gradient of a limited format was not finite.

        Args:
            like: slice of a parameter that each sum belongs to. Defaults to all parameters.
            places: index of the parameter of each slice.
        """
        like = self._parameters if like is None else like  # a worker may have no slice
        every = range(len(sums)) if places is None else places
        means: Values = [None] * len(sums)
        bounds = self._bounds()
        for at, (place, value, one) in enumerate(zip(every, sums, like, strict=True)):
            if value is not None:
                mean = self._formats[place].unpack(value, one, bounds[place])
                means[at] = mean if math.isfinite(self._largest[place]) else mean.fill_(math.nan)
        given = [(place, mean) for place, mean in zip(every, means, strict=True) if mean is not None]
        limited = [(place, mean) for place, mean in given if self._formats[place].state]
        if limited:
            scale = self._context.compute.scale
            units = [self._formats[place].unit(bounds[place]) * scale for place, _ in limited]
            foreach_mul_([mean for _, mean in limited], units)
        if given:
            foreach_div_([mean for _, mean in given], divisor)
        return [None if mean is None else mean.to(one.dtype) for mean, one in zip(means, like, strict=True)]

    def accept(self, applied: bool = True) -> None:
        """Update the bounds from the gradients of the completed step.

        Args:
            applied: whether the model was updated.
        """
        if self.memory is not None:
            self.memory.accept(
                dict(zip(self._names, map(math.isfinite, self._largest), strict=True)) if applied else {}
            )
        states = self._context.strategy_state
        states |= {one.state: dict(states.get(one.state, {})) for one in self._formats if one.state}
        for name, form, largest in zip(self._names, self._formats, self._largest, strict=True):
            if form.state and _is_known(largest):
                bounds = states[form.state]
                bounds[name] = form.bound(largest, bounds.get(name))
        self._scales, self._raised = [], {}
        if self._thermostat is not None and applied:
            known = torch.tensor([math.isfinite(one) for one in self._largest])
            self._thermostat.decide(self._noise * known, states)

    def _bounds(self) -> list[Any]:
        """Return the bound of each parameter, None if unknown."""
        states = self._context.strategy_state
        return [
            self._raised.get(name, states.get(form.state, {}).get(name))
            for name, form in zip(self._names, self._formats, strict=True)
        ]

    def _scales_now(self) -> list[float]:
        if not self._scales:
            scale = self._context.compute.scale
            self._scales = [
                form.scale(bound) / scale for form, bound in zip(self._formats, self._bounds(), strict=True)
            ]
        return self._scales

    def _measured_here(self) -> torch.Tensor:
        """Return a row with the largest absolute gradients on this worker, and those of the thermostat, if any."""
        largest = self._largest_here().unsqueeze(0)
        return largest if self._thermostat is None else torch.cat([largest, self._thermostat.here])

    def _largest_here(self) -> torch.Tensor:
        """Return the largest absolute gradient of each parameter on this worker in float64, NaN if any is NaN."""
        device = self._context.world.device
        rows = max(map(len, self._norms))
        if not rows:
            return torch.zeros(len(self._norms), dtype=torch.float64, device=device)
        nothing = torch.zeros((), device=device)
        norms = [norm for own in self._norms for norm in (*own, *[nothing] * (rows - len(own)))]
        return torch.stack(norms).view(-1, rows).amax(1).double()


def largest_of(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the largest absolute value of each tensor, NaN if any element is NaN."""
    if values[0].device.type == "cpu":  # the maximum norm takes 20 times as long on a CPU
        ends = [torch.aminmax(value) if value.numel() else (value.sum(), value.sum()) for value in values]
        return [torch.maximum(-low, high) for low, high in ends]
    return foreach_norm([*values], math.inf)


def _is_known(largest: float) -> bool:
    """Return whether a largest gradient is informative about the next steps: it is neither zero, NaN nor infinite."""
    return bool(largest) and math.isfinite(largest)


def number_of(name: str) -> int:
    """Return a number for a parameter's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
