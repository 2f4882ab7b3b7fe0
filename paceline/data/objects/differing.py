"""Attributes that the loops of several workers have set to different values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.data.objects.attributes import same
from paceline.data.objects.outside import OutsideParameters

_ALIKE = (
    "Set it alike on all workers: by session.position, not by the rank or a counter of the loop, which begins at 0 on "
    "a worker that joins."
)


def differing_attribute(everyone: Sequence[dict[str, dict[Any, Any]]], outside: OutsideParameters | None = None) -> str:
    """Describe an attribute that the loop has set to different values on different ranks. Empty if there is none."""
    set_anywhere = {
        (owner, key): rank for rank, one in [*enumerate(everyone)][::-1] for owner in one for key in one[owner]
    }
    for (owner, key), setter in set_anywhere.items():
        value = everyone[setter][owner][key]
        for rank, others in enumerate(everyone):
            if key not in others.get(owner, {}):
                return (
                    f"The loop has set {owner}.{key} to {value!r} on rank {setter}, and not on rank {rank}, so the "
                    f"workers compute different things. {_ALIKE}"
                )
            if not same(other := others[owner][key], value):
                if outside is not None and f"{owner}.{key}" in outside.parameters:
                    return outside.text(f"{owner}.{key}")
                return (
                    f"The loop has set {owner}.{key} to {value!r} on rank {setter} and to {other!r} on rank {rank}, so "
                    f"the workers compute different things. {_ALIKE}"
                )
    return ""
