"""Tell what is of Keras, without importing it."""

from __future__ import annotations


def is_keras(value: object, kind: str) -> bool:
    """Whether a value is of a class of Keras with this name, or of one derived from it."""
    return any(one.__name__ == kind and one.__module__.partition(".")[0] == "keras" for one in type(value).__mro__)
