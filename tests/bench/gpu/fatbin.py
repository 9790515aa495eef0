"""Makes CUDA libraries small: machine code of GPUs that are not meant becomes zeros, which pack to nothing.

A library keeps its code in fat binaries, each a header of 16 bytes (magic, version, its own size, size of the rest) and
entries with headers of their own, one for each architecture. Headers, sizes and places stay as they are. The driver
takes the entry of its GPU; a kernel that has none fails when it is launched first ("no kernel image").
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER_BYTES, ALIGNMENT = 16, 8
PTX, MACHINE_CODE = 1, 2
KINDS = (PTX, MACHINE_CODE, 4, 8, 16, 64)
MIN_ENTRY_BYTES, ARCHITECTURE_AT = 64, 28


class Entry(NamedTuple):
    """Code of one kind for one architecture (90 for compute capability 9.0): where its bytes begin, and how many."""

    kind: int
    architecture: int
    start: int
    size: int


def fat_binaries(data: bytes | bytearray) -> Iterator[list[Entry]]:
    """The entries of each fat binary of a library."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + len(MAGIC))
        if version == 1 and header == HEADER_BYTES and at % ALIGNMENT == 0 and at + header + size <= len(data):
            yield list(_entries(data, at + header, at + header + size))
            at += header + size
        else:
            at += len(MAGIC)


def _entries(data: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at + MIN_ENTRY_BYTES <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        if kind not in KINDS or header < ARCHITECTURE_AT + 4 or at + header + size > end:
            return
        (architecture,) = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
        yield Entry(kind, architecture, at + header, size)
        at += header + size


def slim(library: bytes, architectures: Collection[int], *, keep_ptx: bool = True) -> bytes:
    """The library with code for these architectures alone.

    A fat binary without machine code for any of them keeps its PTX, which the driver compiles, if ``keep_ptx`` says so.
    """
    data = bytearray(library)
    for entries in fat_binaries(library):
        is_served = any(one.kind == MACHINE_CODE and one.architecture in architectures for one in entries)
        for kind, architecture, start, size in entries:
            is_meant = kind == MACHINE_CODE and architecture in architectures
            if not is_meant and not (kind == PTX and keep_ptx and not is_served):
                data[start : start + size] = bytes(size)
    return bytes(data)
