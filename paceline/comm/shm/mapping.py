"""Mapping of shared memory into this process without a file descriptor per mapping.

Python's ``mmap`` keeps a copy of the descriptor for each mapping, so one for each worker and block. A worker on a
machine with many workers would have hundreds of copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ = 22
_PAGEMAP = "/proc/self/pagemap"
_IN_USE, _OF_FILE = numpy.uint64(3 << 62), numpy.uint64(1 << 61)
"""Bits of a page in ``/proc/self/pagemap``: in memory or swapped out, and with content of the file."""


def map_shared(file: int, size: int, offset: int = 0) -> memoryview:
    """Map part of a file for reading and writing, as long as an object such as a tensor refers to these bytes.

    Args:
        file: file descriptor, which may be closed afterwards.
        offset: start of the mapping in the file, a multiple of the page size.

    Raises:
        OSError: the file cannot be mapped.
    """
    return _map(file, size, offset, mmap.MAP_SHARED)


def map_private(file: int, size: int) -> memoryview:
    """Map a file as :func:`map_shared` does, but keep what this process writes to itself.

    A page shows what others write into the file until this process writes to it, and again after :func:`drop_pages`.
    """
    return _map(file, size, 0, mmap.MAP_PRIVATE)


def drop_pages(block: memoryview) -> None:
    """Remove the pages of a block from this process until it uses them again.

    The file keeps what was written through :func:`map_shared`. A block of :func:`map_private` shows the file again.
    """
    _LIBC.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(block)), block.nbytes, mmap.MADV_DONTNEED)


def free_pages(block: memoryview) -> None:
    """Free the memory of a block of :func:`map_shared`, whose content is lost to all processes."""
    _LIBC.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(block)), block.nbytes, mmap.MADV_REMOVE)


def drop_changes(block: memoryview) -> None:
    """Show the file again where this process has written to a block of :func:`map_private`.

    Only the pages from the first to the last changed one are dropped, and mapped again. All other pages stay mapped,
    because a page counts in equal parts for the processes that have mapped it.
    """
    address, count = ctypes.addressof(ctypes.c_ubyte.from_buffer(block)), -(-block.nbytes // mmap.PAGESIZE)
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            file.seek(address // mmap.PAGESIZE * 8)
            entries = numpy.frombuffer(file.read(8 * count), numpy.uint64)
    except OSError:  # a kernel without this file
        entries = numpy.full(count, _IN_USE)
    changed = numpy.flatnonzero((entries & _IN_USE != 0) & (entries & _OF_FILE == 0))
    if len(changed):
        part = block[int(changed[0]) * mmap.PAGESIZE : (int(changed[-1]) + 1) * mmap.PAGESIZE]
        drop_pages(part)
        map_pages(part)


def map_pages(block: memoryview) -> None:
    """Map all pages of a block for reading now. Without effect before Linux 5.14, where reading a page maps it.

    A page of a file counts in equal parts for all processes that have mapped it, so a worker that is the first to read
    shared weights would count as if it had a copy of them.
    """
    _LIBC.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(block)), block.nbytes, _MADV_POPULATE_READ)


def _map(file: int, size: int, offset: int, flags: int) -> memoryview:
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        kind = "private" if flags & mmap.MAP_PRIVATE else "shared"
        raise OSError(number, f"a {kind} mapping of {size:,} bytes has failed: {os.strerror(number)}")
    block = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(block, _LIBC.munmap, address, size).atexit = False  # a thread may use it until the process ends
    return memoryview(block).cast("B")
