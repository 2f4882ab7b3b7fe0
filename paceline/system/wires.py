"""Names of the formats of gradients on the wire, and the text of a format for each module class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Wire = Literal[
    "float32", "bfloat16", "float16", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "randomk", "topk", "onebit", "powersgd"
]
"""Formats of ``wire``. The sums of int8 and int4 are those of integers, in any order."""
PARTIAL_WIRES = ["randomk", "topk", "onebit", "powersgd"]
"""Formats that send a part of the gradient and keep the rest. A script adds its own (``step.gradients.formats``)."""


def parsed(text: str) -> dict[str, str]:
    """Return the format of each module class, and that of all other parameters as ``default``.

    >>> parsed("Embedding=bfloat16,default=int8")
    {'default': 'int8', 'Embedding': 'bfloat16'}
    """
    pairs = [part.rpartition("=") for part in text.split(",")]
    return {"default": "float32"} | {kind or "default": form for kind, _, form in pairs}


def text_of(value: object) -> object:
    """Return the text of a mapping from module classes to formats. Other values are returned as they are.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(value, Mapping):
        pairs = [(kind.__name__ if isinstance(kind, type) else kind, form) for kind, form in value.items()]
        value = ",".join(f"{kind}={form}" for kind, form in pairs)
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    known = dict.fromkeys((*get_args(Wire), *PARTIAL_WIRES))
    for kind, _, form in [part.rpartition("=") for part in parts]:
        if form not in known:
            raise ValueError(
                f"there is no format {form!r}; the formats are {', '.join(known)}. Give a format that the script "
                f"registers in the script, because only its workers know it"
            )
        if not kind and len(parts) > 1:
            raise ValueError(f"{form!r} has no module class: write Embedding={form}, or default={form}")
    return ",".join(parts) if len(parts) > 1 else parts[0].removeprefix("default=")
