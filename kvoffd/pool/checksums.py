"""The checksum of a slot's bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

from kvoffd.system.native import NUMBER, VOID_P, declare, native

declare(keep_gil=False, digests=(None, VOID_P, VOID_P, VOID_P, NUMBER))

# 0 in a record means no checksum; the one content in 2^64 that hashes to 0 gets this value.
_INSTEAD_OF_ZERO = 1


def digest(data: memoryview) -> int:
    """Return the checksum of a slot's bytes, 64 bits of XXH3: never 0. Releases the GIL for 64 KiB or more.

    XXH3 is faster than a memory copy. Measured on one core of an EPYC: 39 GB/s from 1 MiB on, 30 at 64 KiB, 16 at
    16 KiB. A copy reaches 10 to 24 GB/s; zlib's CRC-32, the fastest in Python's library, 1 to 3.
    """
    return xxhash.xxh3_64_intdigest(data) or _INSTEAD_OF_ZERO


def digests(data: memoryview, parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ``digest`` of each part of ``data``, given by its offset and length.

    One call of C without the GIL, even for small parts, so that other threads do not wait for each of them.
    """
    memory = np.frombuffer(data, np.uint8)
    assert max((offset + length for offset, length in parts), default=0) <= len(memory)
    address = memory.ctypes.data  # for a few parts, numpy arrays would take longer
    addresses = array("Q", [address + offset for offset, _ in parts])
    lengths, sums = array("Q", [length for _, length in parts]), array("Q", bytes(8 * len(parts)))
    native().digests(*(column.buffer_info()[0] for column in (addresses, lengths, sums)), len(sums))
    if 0 in sums:  # the one content in 2^64
        for at, (offset, length) in enumerate(parts):
            sums[at] = sums[at] or digest(data[offset : offset + length])
    return sums.tolist()
