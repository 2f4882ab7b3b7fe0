"""Choice of the format of each parameter's gradient by the settings ``wire`` and ``exact``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.step.context import TrainingContext
from paceline.step.gradients.codec import Codec, Format
from paceline.step.gradients.fixed_point import WholeNumbers
from paceline.step.gradients.floats import DTYPES, Plain, Rounded, Scaled
from paceline.step.gradients.lanes import LIMITS, Codes


def codec_for(context: TrainingContext, parameters: Mapping[str, torch.Tensor], sends: bool = True) -> Codec | None:
    """Return the codec of the gradients of some parameters, or None if they are added up and sent as they are.

    Args:
        context: training context.
        parameters: parameters by name.
        sends: whether gradients are sent at all. A single process rounds only what is rounded with any number of
            workers.
    """
    settings = context.settings
    if not settings.fixed_point and (settings.wire == "float32" or not (sends or settings.along_tree)):
        return None
    return Codec(context, parameters, [_format_of(context, value) for value in parameters.values()])


def _format_of(context: TrainingContext, parameter: torch.Tensor) -> Format:
    """Return the format of a parameter. Biases and norms, with fewer than two dimensions, keep their precision."""
    wire, microbatches = context.settings.wire, context.order.microbatches
    matrix = parameter.dim() > 1
    if wire in LIMITS and matrix:
        return Codes(LIMITS[wire], microbatches)
    if context.settings.fixed_point:
        return WholeNumbers(parameter.dtype, microbatches)
    if not (matrix and parameter.dtype in (torch.float32, torch.float64)):
        return Plain()
    nodes = context.settings.along_tree
    if wire == "bfloat16":
        return Rounded(DTYPES[wire], nodes)
    return Scaled(DTYPES[wire], nodes, microbatches)
