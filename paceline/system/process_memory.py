"""Physical memory of this process that the system cannot take back, and whether the allocator keeps freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from pathlib import Path
from typing import NamedTuple

_HELD = "Pss_Anon", "Pss_Shmem"
_LARGE, _LARGEST = 1 << 19, 1 << 25
"""Number of bytes of a tensor that has its own mapping: if large tensors are not kept, and always."""
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None  # None: not glibc


class ProcessMemory(NamedTuple):
    """Bytes of this process."""

    held: int  # now
    peak: int  # the most since the process began, or since the system was told to forget it


def process_memory() -> ProcessMemory | None:
    """Return the memory of this process, or None if it is unknown.

    A page of several processes counts in part for each, so the sum over the workers of a machine is right.
    Pages of files do not count, because the system reads them again. The kernel keeps the peak of all pages, so
    the pages that count in part, or not at all, are taken to be those of now. Takes some milliseconds a GB.
    """
    with contextlib.suppress(OSError, KeyError):
        rollup, status = _kilobytes("smaps_rollup"), _kilobytes("status")
        held = sum(rollup[key] for key in _HELD)
        return ProcessMemory(held << 10, max(held, status["VmHWM"] - rollup["Rss"] + held) << 10)
    return None


def _kilobytes(name: str) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self", name).read_text(), re.MULTILINE)
    return {key: int(size) for key, size in found}


def keep_freed_pages(large: bool) -> None:
    """Configure glibc to keep freed memory.

    By default each large tensor has its own mapping, which is returned to the kernel when freed. Every gradient of
    every step then causes page faults again, which cost a tenth of a step on the CPU. But an aligned tensor rarely fits
    into a gap of the heap, so kept tensors need about twice the memory. The largest are therefore never kept.

    Args:
        large: whether to keep the memory of large tensors.
    """
    if _mallopt is None:
        return
    trim_threshold, mmap_threshold = -1, -3
    _mallopt(trim_threshold, 2**31 - 1)
    _mallopt(mmap_threshold, _LARGEST if large else _LARGE)
