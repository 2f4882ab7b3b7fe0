"""Numbers, text and flags of a data set as they were when the batch of a step was handed out.

A script may change its data set in the loop, as ``train_set.strength = step / 1000``. Microbatches that are loaded
later in the step, because they were stolen, audited or left by a lost worker, must be read with the values that the
first ones were read with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from paceline.data.attributes import Attributes

_PLAIN = (bool, int, float, str)
_MOST_OWNERS = 200
Values: TypeAlias = list[dict[Any, Any]]


class PlainValues:
    """Sees the plain values of an object and of the objects that it holds, and brings earlier ones back for a while.

    Args:
        data: the object. What it holds is looked for once.

    >>> class Noisy:
    ...     strength = 0.0
    >>> noisy = Noisy()
    >>> noisy.strength = 0.5
    >>> values = PlainValues(noisy)
    >>> before = values.now()
    >>> noisy.strength = 0.75
    >>> with values.set_to(before):
    ...     print(noisy.strength)
    0.5
    >>> noisy.strength
    0.75
    """

    def __init__(self, data: Any) -> None:
        self._owners = Attributes({"data": data}, set(), copies=False).dictionaries()[:_MOST_OWNERS]

    def now(self) -> Values:
        """Return the present values."""
        return [{key: one for key, one in [*owner.items()] if type(one) in _PLAIN} for owner in self._owners]

    @contextmanager
    def set_to(self, values: Values) -> Iterator[None]:
        """Set what has changed since :meth:`now` returned these values to them, and afterwards back."""
        changed = []
        for owner, before in zip(self._owners, values, strict=True):
            for key, value in before.items():
                now = owner.get(key)
                if type(now) in _PLAIN and now != value:
                    changed.append((owner, key, now))
                    owner[key] = value
        try:
            yield
        finally:
            for owner, key, now in changed:
                owner[key] = now
