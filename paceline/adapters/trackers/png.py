"""Encoder of PNG files (W3C Portable Network Graphics, 3rd edition): 8 bits, gray or RGB, with or without alpha."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an array [height, width, channels] of 1 to 4 channels."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with filter type 0: no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def size_of(png: bytes) -> tuple[int, int, int]:
    """Return width, height and number of channels of a file from :func:`encode`."""
    width, height, _, color = struct.unpack_from(">IIBB", png, 16)
    return width, height, next(channels for channels, kind in _COLOR_TYPES.items() if kind == color)
