"""The checksum of a slot's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

# 0 in a record says that there is no checksum; the one content in 2^64 that hashes to 0 gets this one.
_INSTEAD_OF_ZERO = 1


def digest(data: memoryview) -> int:
    """The checksum of a slot's bytes, 64 bits of XXH3: never 0. Releases the GIL for 64 KiB or more.

    XXH3, since it is faster than memory is. Measured on one core of an EPYC: 39 GB/s from 1 MiB on, 30 at 64 KiB, 16 at
    16 KiB, where a copy makes 10 to 24; zlib's CRC-32, the best of Python's own, makes 1 to 3.
    """
    return xxhash.xxh3_64_intdigest(data) or _INSTEAD_OF_ZERO


def digests(data: memoryview, parts: Sequence[tuple[int, int]]) -> list[int]:
    """The ``digest`` of each part of ``data``, given by its offset and length.

    In one expression: between two of them another thread could take the GIL and keep a copy thread waiting.
    """
    xxh3 = xxhash.xxh3_64_intdigest
    return [xxh3(data[offset : offset + length]) or _INSTEAD_OF_ZERO for offset, length in parts]
