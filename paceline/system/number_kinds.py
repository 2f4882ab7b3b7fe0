"""The kinds of numbers that settings take: pydantic's, without what it takes for them."""

from __future__ import annotations

from numbers import Integral
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError


def whole(value: object) -> object:
    """Pydantic accepts True and 1.0 for 1; a string may be that of a number."""
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise PydanticKnownError("int_type")
    return value


def number(value: object) -> object:
    """Pydantic accepts True for 1.0."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


_COUNT = 2**31 - 1
"""What a step counter, a number of samples or of workers can be at most."""
LONGEST_SECONDS = 1_000_000
"""The longest wait, about 11 days: sockets, locks and torch all can count it in milliseconds."""

PositiveInt = Annotated[int, Field(ge=1, le=_COUNT), BeforeValidator(whole)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_COUNT), BeforeValidator(whole)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(number)]
Seconds = Annotated[float, Field(ge=0.1, le=LONGEST_SECONDS, allow_inf_nan=False), BeforeValidator(number)]
