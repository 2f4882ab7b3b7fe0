"""Choice of the format of each parameter's gradient by its module's class and the settings ``wire`` and ``exact``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from paceline.data.keys import ROUNDING, seed_of
from paceline.events import EventLog
from paceline.schedule.slices import Slice
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Values, add
from paceline.step.gradients.codec import Codec, Format, number_of
from paceline.step.gradients.compressions import OneBit, PowerSGD, RandomK, TopK
from paceline.step.gradients.fixed_point import TYPES, WholeNumbers
from paceline.step.gradients.floats import DTYPES, Rounded, Scaled
from paceline.step.gradients.lane_memory import LaneMemory
from paceline.step.gradients.lanes import LIMITS, Codes
from paceline.step.gradients.partial import Compression, Feedback
from paceline.step.gradients.thermostat import STATE, Thermostat
from paceline.system.wires import ADAPTIVE, PARTIAL_WIRES

_SAMPLE = 1 << 19
"""Number of elements of a gradient that is encoded to measure how long it takes."""

_OWN: dict[str, Callable[[tuple[int, ...], int], Compression]] = {}


def codec_for(
    context: TrainingContext,
    parameters: Mapping[str, torch.Tensor],
    sends: bool = True,
    slices: Sequence[Slice] = (),
) -> Codec | None:
    """Return the codec of the gradients of some parameters, or None if they are added up and sent as they are.

    Args:
        context: training context.
        parameters: parameters by name.
        sends: whether gradients are sent at all. A single process rounds only what is rounded with any number of
            workers.
        slices: slices of the parameters that are sent to different workers, if any are cut.
    """
    settings = context.settings
    plain = {"float32"} if sends or settings.along_tree else {"float32", *DTYPES}
    if not settings.fixed_point and plain.issuperset(settings.wires.values()):
        return None
    partial = {name: found for name, value in parameters.items() if (found := _compression_of(context, name, value))}
    memory = LaneMemory(context, {name: parameters[name].numel() for name in partial}) if partial else None
    formats = [
        Feedback(partial[name], memory, name, lambda step: step % len(context.order.parts_of(step)))
        if memory is not None and name in partial
        else _format_of(context, name, value, [slice(*one[1:3]) for one in sorted(slices) if one.parameter == place])
        for place, (name, value) in enumerate(parameters.items())
    ]
    watched = {
        name: _wire_of(context, name)
        for name, form in zip(parameters, formats, strict=True)
        if isinstance(form, Codes) and _given_wire(context, name) == ADAPTIVE
    }
    thermostat = Thermostat(watched, list(parameters), context.world.device) if watched else None
    return Codec(context, parameters, formats, memory, thermostat)


def coding_seconds(context: TrainingContext) -> tuple[float, float, float]:
    """Return the seconds for each byte of a float32 gradient to encode it, to add two sums, and to decode a sum.

    No other worker takes part. On a GPU only the launches are measured.
    """
    quiet = replace(context, strategy_state={}, events=EventLog(None, 0))
    parameter = torch.linspace(-1.0, 1.0, _SAMPLE, device=context.world.device).view(1024, -1)
    codec, found = codec_for(quiet, {"sample": parameter}), []
    for step in range(4):
        gradients: Values = [parameter.clone()]
        begin = perf_counter()
        sums = codec.encode(gradients, step, 0) if codec else gradients
        encoded = perf_counter()
        add(sums, [*sums])
        added = perf_counter()
        if codec is not None and codec.fits():
            codec.decode(sums, 1.0)
        found.append((encoded - begin, added - encoded, perf_counter() - added))
        if codec is not None:
            codec.accept()
    encode, summed, decode = (min(times[1:]) / parameter.nbytes for times in zip(*found, strict=True))
    return encode, summed, decode


def register(name: str, compression: Callable[[tuple[int, ...], int], Compression]) -> None:
    """Register a format of ``wire`` under a name. Call this before ``paceline.start`` in every worker.

    Args:
        name: name of the format.
        compression: function of a parameter's shape and of the number of microbatches.
    """
    _OWN[name] = compression
    PARTIAL_WIRES.append(name)


def _compression_of(context: TrainingContext, name: str, parameter: torch.Tensor) -> Compression | None:
    """Return the compression of a parameter. None if its format sends all of it, or it would save nothing."""
    wire, shape = _wire_of(context, name), tuple(parameter.shape)
    if wire not in PARTIAL_WIRES or len(shape) < 2 or not parameter.is_floating_point():
        return None
    settings, numel = context.settings, parameter.numel()
    seed = seed_of(ROUNDING, settings.seed, number_of(name))
    found: Compression
    if wire == "randomk":
        found = RandomK(numel, settings.wire_ratio, seed)
    elif wire == "topk":
        found = TopK(numel, settings.wire_ratio)
    elif wire == "onebit":
        found = OneBit(numel, context.order.microbatches)
    elif wire == "powersgd":
        found = PowerSGD(shape[0], math.prod(shape[1:]), settings.wire_rank, seed)
    else:
        found = _OWN[wire](shape, context.order.microbatches)
    return found if numel and found.example().nbytes < parameter.nbytes else None


def _wire_of(context: TrainingContext, name: str) -> str:
    """Return the current format of a parameter."""
    wire, bits = _given_wire(context, name), context.strategy_state.get(STATE, {})
    return str(bits.get(name, "int4")) if wire == ADAPTIVE else wire


def _given_wire(context: TrainingContext, name: str) -> str:
    """Return the format of a parameter in ``wire``: that of the innermost module around it whose class is listed."""
    wires, path = context.settings.wires, name.split(".")
    for depth in range(len(path) - 1, -1, -1) if len(wires) > 1 else ():
        kind = type(context.compute.model.get_submodule(".".join(path[:depth]))).__name__
        if kind in wires:
            return wires[kind]
    return wires["default"]


def _format_of(context: TrainingContext, name: str, parameter: torch.Tensor, parts: Sequence[slice]) -> Format:
    """Return the format of a parameter. Biases and norms, with fewer than two dimensions, keep their precision."""
    wire, microbatches = _wire_of(context, name), context.order.microbatches
    matrix = parameter.dim() > 1
    if wire in LIMITS and matrix and parameter.dtype in TYPES:
        return Codes(LIMITS[wire], microbatches, parts)
    if context.settings.fixed_point:
        return WholeNumbers(parameter.dtype, microbatches)
    if wire not in DTYPES or not (matrix and parameter.dtype in (torch.float32, torch.float64)):
        return Format()
    nodes = context.settings.along_tree
    if wire == "bfloat16":
        return Rounded(DTYPES[wire], nodes)
    return Scaled(DTYPES[wire], nodes, microbatches)
