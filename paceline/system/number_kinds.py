"""Number types for settings: pydantic's, but without its conversions from bool and float."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError


def whole(value: object) -> object:
    """Raise unless the value is an int or str, because pydantic accepts True and 1.0 for 1. It parses strings later."""
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise PydanticKnownError("int_type")
    return value


def number(value: object) -> object:
    """Raise if the value is a bool, because pydantic accepts True for 1.0."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def steps_of(text: str) -> range:
    """Return the steps that ``100`` or ``100:103`` names.

    >>> steps_of("100"), steps_of("100:103")
    (range(100, 101), range(100, 103))
    """
    first, _, stop = text.partition(":")
    return range(int(first), int(stop or int(first) + 1))


def _named_steps(value: object) -> str:
    if re.fullmatch(r"\d{1,9}(:\d{1,9})?", str(value)) is None or not steps_of(str(value)):
        raise ValueError(f"{value!r} names no steps; write 100, or 100:103 for the steps 100 to 102")
    return str(value)


_COUNT = 2**31 - 1  # largest number of steps, samples or workers
LONGEST_SECONDS = 1_000_000
"""Largest timeout, about 11 days, which sockets, locks and torch can all represent in milliseconds."""

PositiveInt = Annotated[int, Field(ge=1, le=_COUNT), BeforeValidator(whole)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_COUNT), BeforeValidator(whole)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(number)]
Seconds = Annotated[float, Field(ge=0.1, le=LONGEST_SECONDS, allow_inf_nan=False), BeforeValidator(number)]
Steps = Annotated[str, BeforeValidator(_named_steps)]
