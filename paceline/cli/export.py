"""``paceline export``: write the weights in a checkpoint to a file for inference."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

CONTEXT: dict[str, object] = {}
MORE_HELP = """ Needs neither the script nor its workers.

The file equals the one that session.export() writes after the step of the checkpoint.

Exit code: 2 if the format of FILE is not available, 4 if no complete checkpoint can be read.
"""


class Dtype(StrEnum):
    """Types to which floating-point tensors can be converted."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, or a folder of which the newest is taken; a path or a URL.",
            metavar="CHECKPOINT",
            show_default=False,
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            help="A .safetensors file, or .pt, .pth or .bin for a state_dict by torch.save; a path or a URL.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Convert floating-point tensors.", show_default="as it is")
    ] = None,
    averaged: Annotated[bool, typer.Option("--averaged", help="Take the averaged weights (EMA, SWA).")] = False,
) -> None:
    """Write the weights in a checkpoint as a file for inference."""
    from paceline.checkpoint import load
    from paceline.checkpoint.weights.files import check_package, check_suffix, write
    from paceline.checkpoint.weights.read import converted, of_checkpoint

    check_suffix(output)
    check_package(output)
    source = load.find(checkpoint)
    weights = of_checkpoint(source, averaged=averaged)
    if dtype is not None:
        weights = converted(weights, dtype.value)
    print(f"{source}: {len(weights)} tensors written to {write(output, weights)}")
