"""Names of the formats of gradients on the wire, and texts: a format for each module class, the formats of a run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, get_args

Wire = Literal[
    "float32", "bfloat16", "float16", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "int-auto",
    "randomk", "topk", "onebit", "powersgd", "topk-2bit",
]  # fmt: skip
"""Formats of ``wire``."""
OUTER = "topk-2bit"
"""Format of outer gradients alone (``strategies.local.sparse``)."""
ADAPTIVE = "int-auto"
"""Format whose number of bits is that of ``step.gradients.thermostat``."""
INTEGERS = frozenset(["int8", "int4", ADAPTIVE])
"""Formats whose sums are those of integers, in any order."""
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


def spelled(formats: Mapping[int, str]) -> str:
    """Return the text of the formats of a run, by the step from which on it has them.

    >>> spelled({0: "float32", 12: "int8"})
    '0=float32,12=int8'
    """
    return ",".join(f"{step}={form}" for step, form in formats.items())


def formats_in(communication: str) -> dict[int, str]:
    """Return the formats of a run from their text. Empty if ``communication`` names no formats."""
    pairs = [part.partition("=") for part in communication.split(",") if "=" in part]
    return {int(step): form for step, _, form in pairs}


def checked(communication: str) -> str:
    """Return a valid value of ``communication``.

    Raises:
        ValueError: it is neither ``fixed`` nor ``auto`` nor formats with the steps from which on a run has them.
    """
    parts = communication.split(",")
    pairs = [part.strip().partition("=") for part in parts]
    steps = [int(step) if step.isdecimal() else -1 for step, _, _ in pairs]
    known = [form for form in get_args(Wire) if form not in (*PARTIAL_WIRES, OUTER)]
    rising = steps[0] == 0 and all(one < next for one, next in pairwise(steps))
    if communication not in ("fixed", "auto") and not (rising and all(form in known for _, _, form in pairs)):
        raise ValueError(
            f"write fixed, auto, or the formats that a run has chosen, each with its first step, such as "
            f"0=float32,12=int8; the formats are {', '.join(known)}"
        )
    return ",".join(part.strip() for part in parts)
