"""Recognition of Keras objects without an import of Keras."""

from __future__ import annotations


def is_keras(value: object, kind: str) -> bool:
    """Return whether a value is an instance of the Keras class with this name, or of a subclass."""
    return any(one.__name__ == kind and one.__module__.partition(".")[0] == "keras" for one in type(value).__mro__)
