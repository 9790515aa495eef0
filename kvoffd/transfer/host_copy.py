"""The copy loop of host memory: ``host_copy.c``, compiled when kvoffd is installed, called without the GIL.

In C, since checksums cost nothing when they are taken of bytes that are in registers anyway. Measured on one core of
an EPYC in pieces of 16, 64 and 256 KiB, memcpy of one large buffer being 1: loops of numpy made 0.7, 0.95 and 1.1, or
0.65, 0.75 and 0.8 with checksums by a library right behind the copy; this makes 0.9, 1.15 and 1.2 with checksums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash

from kvoffd.system.native import Native, NotCompiled, native
from kvoffd.transfer.plan import Plan

_STRIPE_BYTES = 64


class _Copying(ctypes.Structure):
    """``struct copying`` of host_copy.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("destination", "source", "size")),
        ("pieces", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("slot", "slot_bytes", "sum")),
        ("slots", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("piece", "piece_done", "at_slot", "filled")),
        ("sums", ctypes.c_uint64 * 8),
    )


class HostCopy:
    """One plan, copied step by step. The addresses must be mapped: a wrong one kills the process.

    Args:
        slots: address and length in bytes of the slots that a store fills, in the plan's order; their checksums are
            taken along the way.
        library: whose loop it is; this installation's when None.

    Raises:
        NotCompiled: kvoffd was installed without it.
    """

    def __init__(self, plan: Plan, slots: Sequence[tuple[int, int]] = (), library: Native | None = None) -> None:
        self.plan = plan
        self._step = (library or native()).copy
        self._columns = (
            *(np.ascontiguousarray(column, dtype=np.uint64) for column in (plan.destination, plan.source, plan.size)),
            *(np.array(column, dtype=np.uint64) for column in (zip(*slots, strict=True) if slots else ((), ()))),
        )
        self._sums = np.zeros(len(slots), dtype=np.uint64)
        destination, source, size, slot, slot_bytes = (column.ctypes.data for column in self._columns)
        self._copying = _Copying(
            *(destination, source, size, plan.pieces, slot, slot_bytes, self._sums.ctypes.data, len(slots))
        )
        self._reference = ctypes.byref(self._copying)

    def step(self, limit_bytes: int) -> int:
        """Copy the next ``limit_bytes``, up to twice that, or all that are left; return how many: 0 at the end."""
        return int(self._step(self._reference, limit_bytes))

    def sums(self) -> list[int]:
        """XXH3 (64 bits) of each slot that is full; 0 of one that is not, and where others must take it.

        That is where a slot has less than 241 bytes, is not filled from its first byte on, or where it hashes to 0.
        """
        return self._sums.tolist()


def try_out(library: Native) -> None:
    """Copy a little in pieces of odd sizes: a compiler that got it wrong must not write a byte of anybody's.

    Raises:
        NotCompiled: it did.
    """
    source = np.arange(4096, dtype=np.uint8) * np.uint8(7)
    pool = np.zeros(4096 + _STRIPE_BYTES, dtype=np.uint8)
    begin = -pool.ctypes.data % _STRIPE_BYTES
    cuts = np.array([0, 1, 65, 1089, 3000, 4096], dtype=np.uint64)
    size = np.diff(cuts)
    plan = Plan(cuts[:-1] + np.uint64(pool.ctypes.data + begin), cuts[:-1] + np.uint64(source.ctypes.data), size, 4096)
    copy = HostCopy(plan, [(pool.ctypes.data + begin, 4096)], library)
    while copy.step(1000):
        pass
    copied = pool[begin : begin + 4096]
    if not np.array_equal(copied, source) or copy.sums() != [xxhash.xxh3_64_intdigest(source.data)]:
        raise NotCompiled("The daemon's copy loop was compiled wrongly; install kvoffd again with another C compiler.")
