"""Return of freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys

_LEAST = 32 << 20  # freed bytes that justify a call to ``malloc_trim``, which takes about a millisecond


class FreedMemory:
    """Counter of freed bytes that trims the heap each time the count reaches 32 MiB.

    glibc keeps freed tensors of up to 32 MiB in its heap. A new tensor rarely fits into a gap, because it is aligned.
    Without trimming, parameters that are allocated and freed in turn need as much memory as if all were kept.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, freed: int) -> None:
        self._bytes += freed
        if self._bytes >= _LEAST:
            self.trim()

    def trim(self) -> None:
        self._bytes = 0
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
