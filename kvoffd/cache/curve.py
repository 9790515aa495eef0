"""Estimates the LRU hit ratio at other pool sizes from a sample of lookups (SHARDS).

A request's hits are the keys before the first that is missing, as everywhere; tokens are counted, not keys. Implemented
in ``curve.c``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import Chain
from kvoffd.system.native import CHAR_P, KEYS, NUMBER, VOID_P, declare, native
from kvoffd_proto.stats import HitCurve

declare(
    curve_new=(VOID_P, VOID_P, CHAR_P),
    curve_free=(None, VOID_P),
    curve_asked=(None, VOID_P, VOID_P, *KEYS, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER),
    curve_stored=(None, VOID_P, *KEYS),
)

SIZES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Estimated pool sizes, as multiples of the pool's size."""
OWN_SIZE = "1"
"""Name of the pool's own size in ``HitCurve.lru_hit_ratio``."""
HALVED_EVERY_S = 86400.0
"""Interval after which older counts are halved."""
_KINDS = 3
"""Kinds of pieces of a prompt that are sampled apart: its first one, the next ones, and the rest."""
_COUNTS = np.dtype(
    [
        ("total", np.float64, (_KINDS,)),
        ("sampled", np.float64, (_KINDS,)),
        ("hits", np.float64, (_KINDS, len(SIZES))),
        ("found", np.float64),
    ]
)
"""``struct counts`` of curve.c."""
_ROW = _COUNTS.itemsize // np.float64().itemsize
"""Numbers in it."""
_NAMES = [f"{size:g}" for size in SIZES]
_Row = NDArray[np.float64]
_NOTHING = np.zeros(_ROW)


class _FirstFields(ctypes.Structure):
    """The first fields of ``struct curve`` of curve.c."""

    _fields_ = (("nbytes", ctypes.c_uint64), ("seen_bytes", ctypes.c_double))


class _Counts(NamedTuple):
    """Counts of a namespace, all numbers of ``_COUNTS`` as one row."""

    row: _Row
    address: int


class HitRatioCurve:
    """Watches a cache; its memory is bounded. Not thread-safe."""

    def __init__(self, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._native = native()
        sizes = (ctypes.c_double * len(SIZES))(*(pool_bytes * size for size in SIZES))
        self._at = self._native.curve_new(sizes, os.urandom(16))
        if not self._at:
            raise MemoryError
        self._free = weakref.finalize(self, self._native.curve_free, self._at)
        self._fields = _FirstFields.from_address(self._at)
        self._clock = clock
        self._halved_at = clock()
        self._forgotten = np.zeros(_ROW)
        """Counts of forgotten namespaces together."""
        self._counts: dict[Namespace, _Counts] = {}

    @property
    def nbytes(self) -> int:
        return int(self._fields.nbytes)

    @property
    def seen_bytes(self) -> int:
        """Estimated bytes of the different blocks that were recently requested, up to the largest size."""
        return int(self._fields.seen_bytes)

    def requested(self, chain: Chain, own: int = 0) -> None:
        """Record a chain that was looked up. The engine had the first ``own`` keys itself: these are not counted."""
        group, keys, size = chain.group, chain.keys, chain.group.key_bytes
        if (counts := self._counts.get(group.namespace)) is None:
            row = np.zeros(_ROW)
            counts = self._counts[group.namespace] = _Counts(row, row.ctypes.data)
        which = group.number, keys, len(keys) // size, size
        weights = group.block_bytes, group.weight
        self._native.curve_asked(self._at, counts.address, *which, *weights, chain.ready_prefix, own, chain.findable)

    def stored(self, group: Group, keys: bytes) -> None:
        """Record keys that an engine offers for storing: from now on a request can find them."""
        self._native.curve_stored(self._at, group.number, keys, len(keys) // group.key_bytes, group.key_bytes)

    def tick(self) -> None:
        """Halve old counts when it is time."""
        if self._clock() - self._halved_at >= HALVED_EVERY_S:
            self._halved_at = self._clock()
            for row in self._all_rows():
                row *= 0.5

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Keep the counts of a forgotten namespace as a part of the total."""
        if (counts := self._counts.pop(namespace, None)) is not None:
            self._forgotten += counts.row

    def of_namespaces(self, namespaces: Sequence[Namespace]) -> list[HitCurve]:
        """Return the curve of each namespace's requests; each pool size is shared by all namespaces."""
        found = [self._counts.get(namespace) for namespace in namespaces]
        return _curves([counts.row if counts is not None else _NOTHING for counts in found])

    def in_all(self) -> HitCurve:
        """Return the curve of all namespaces, including forgotten ones."""
        return _curves([np.sum(self._all_rows(), axis=0)])[0]

    def _all_rows(self) -> list[_Row]:
        return [self._forgotten, *(counts.row for counts in self._counts.values())]


def _curves(rows: Sequence[_Row]) -> list[HitCurve]:
    counts = np.reshape(rows, (-1, _ROW)).view(_COUNTS)[:, 0]
    total, sampled, hits = counts["total"], counts["sampled"], counts["hits"].cumsum(axis=2)
    asked = total.sum(axis=1)
    # Scaled by the sampled tokens, not by the expected size of the sample: its deviation does no harm then.
    parts = hits / np.maximum(sampled, 1)[:, :, None] * total[:, :, None]
    ratios = np.minimum(1.0, parts.sum(axis=1) / np.maximum(asked, 1)[:, None])
    columns = zip(asked.tolist(), counts["found"].tolist(), ratios.tolist(), strict=True)
    return [HitCurve(round(all_), int(found), dict(zip(_NAMES, row, strict=True))) for all_, found, row in columns]
