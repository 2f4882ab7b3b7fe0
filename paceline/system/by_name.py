"""Functions whose arguments are given by name, with an error that shows how to write the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from paceline.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def by_name(call: str, cure: str, own: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that raises ConfigError in place of TypeError if an argument is given by position.

    Args:
        call: name of the function in the message.
        cure: call to write instead. ``{}`` stands for a number that was given by position.
        own: number of arguments that may be given by position, including ``self``.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if given := [_shown(value) for value in args[own:]]:
                raise ConfigError(
                    f"{call}({', '.join(given)}): arguments are given by name, not by position. Write "
                    f"{cure.replace('{}', given[0] if given[0].isdecimal() else '...')}."
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def _shown(value: object) -> str:
    return str(value) if type(value) is int and value.bit_length() < 64 else type(value).__name__
