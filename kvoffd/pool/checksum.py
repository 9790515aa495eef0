"""The checksum that is kept with every slot: 64 bits of XXH3."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from kvoffd.pool.memory import PoolMemory

# 0 in a record says that there is no checksum; the one content in 2^64 that hashes to it gets another one.
_INSTEAD_OF_ZERO = 1


def digest(data: memoryview) -> int:
    """The checksum of ``data``: never 0. The GIL is let go while 64 KiB or more are read.

    XXH3, since it is faster than memory is. Measured on one core of an EPYC: 39 GB/s from 1 MiB on, 30 at 64 KiB, 16 at
    16 KiB, where a copy makes 10 to 24; zlib's CRC-32, the best of Python's own, makes 1 to 3.
    """
    return xxhash.xxh3_64_intdigest(data) or _INSTEAD_OF_ZERO


def digests(data: memoryview, parts: Sequence[tuple[int, int]]) -> list[int]:
    """The ``digest`` of each part of ``data``, given by its offset and length.

    In one expression: whoever holds the GIL between two parts keeps a copy thread waiting for it.
    """
    xxh3 = xxhash.xxh3_64_intdigest
    return [xxh3(data[offset : offset + length]) or _INSTEAD_OF_ZERO for offset, length in parts]


def as_buffer(memory: PoolMemory) -> memoryview:
    """All bytes of the memory, which must stay mapped until the view is released."""
    return memoryview((ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)).cast("B").toreadonly()
