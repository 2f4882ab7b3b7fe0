"""Mapping of shared memory into this process without a file descriptor per mapping.

Python's ``mmap`` keeps a copy of the descriptor for each mapping, so one for each worker and block. A worker on a
machine with many workers would have hundreds of copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


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


def _map(file: int, size: int, offset: int, flags: int) -> memoryview:
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{size} bytes of shared memory cannot be mapped: {os.strerror(number)}")
    block = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(block, _LIBC.munmap, address, size).atexit = False  # a thread may use it until the process ends
    return memoryview(block).cast("B")
