"""Adapter of Keras losses, which take the target first."""

from __future__ import annotations

from typing import Any

from paceline.adapters.keras.kinds import is_keras


def adapted(loss: Any) -> Any:
    """Return a ``keras.losses.Loss`` as ``loss(output, target)``. Return other losses unchanged."""
    if not is_keras(loss, "Loss"):
        return loss

    def swapped(output: Any, target: Any) -> Any:
        return loss(target, output)

    return swapped
