"""Return of freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys

_LEAST = 32 << 20
"""Number of bytes for which a return, which costs about a millisecond, is worth it."""


class FreedMemory:
    """Count of freed bytes, which are returned to the operating system when they are many.

    glibc keeps freed tensors of up to 32 MiB in a heap. A new one rarely fits in between because it is aligned, so
    without this a model's parameters that are made and freed in turn need as much memory as if they all were kept.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, freed: int) -> None:
        """Count freed bytes."""
        self._bytes += freed
        if self._bytes >= _LEAST:
            self.trim()

    def trim(self) -> None:
        """Return the freed bytes now."""
        self._bytes = 0
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
