"""How many hits a pool of another size would have, had it the policy lru: learned from a sample of what is asked for.

A request's hits are the keys before the first that is not there, as everywhere; tokens are counted, not keys. The work
is done in ``curve.c``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import Chain
from kvoffd.system.native import native
from kvoffd_proto.stats import HitCurve

SIZES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Of pools, in parts of the pool that is there."""
HALVED_EVERY_S = 86400.0
"""What was counted weighs half a day later."""
UNKNOWN_TOKENS = 1
"""Tokens of a block whose group does not say."""
_KINDS = 3
_ROW = 2 * _KINDS + _KINDS * len(SIZES) + 1
"""Numbers in ``struct counts`` of curve.c."""
_NAMES = [f"{size:g}" for size in SIZES]
_Row = NDArray[np.float64]
_NOTHING = np.zeros(_ROW)


class HitRatioCurve:
    """Watches a cache; its memory is bounded. For the cache's thread."""

    def __init__(self, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._native = native()
        sizes = (ctypes.c_double * len(SIZES))(*(pool_bytes * size for size in SIZES))
        self._at = self._native.curve_new(sizes, os.urandom(16))
        if not self._at:
            raise MemoryError
        self._free = weakref.finalize(self, self._native.curve_free, self._at)
        self._clock = clock
        self._halved_at = clock()
        self._counts: dict[Namespace, tuple[_Row, int]] = {}
        """With their address."""
        self._gone = np.zeros(_ROW)
        """What those of namespaces that were forgotten had come to."""

    @property
    def nbytes(self) -> int:
        return ctypes.c_uint64.from_address(self._at).value

    @property
    def seen_bytes(self) -> int:
        """Bytes of the different blocks that were asked for lately, up to the largest size, about."""
        return int(ctypes.c_double.from_address(self._at + 8).value)

    def requested(self, chains: Sequence[Chain]) -> None:
        """Note a request."""
        for chain in chains:
            group, keys, size = chain.group, chain.keys, chain.group.key_bytes
            if (counted := self._counts.get(group.namespace)) is None:
                row = np.zeros(_ROW)
                counted = self._counts[group.namespace] = row, row.ctypes.data
            tokens = group.tokens or UNKNOWN_TOKENS
            self._native.curve_asked(
                self._at, counted[1], group.number, keys, len(keys) // size, size, group.block_bytes, tokens, chain.run
            )

    def tick(self) -> None:
        """Have what is old weigh less."""
        if self._clock() - self._halved_at >= HALVED_EVERY_S:
            self._halved_at = self._clock()
            for row in self._rows():
                row *= 0.5

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Go on to count what was asked for in it: it is a part of all."""
        if (counted := self._counts.pop(namespace, None)) is not None:
            self._gone += counted[0]

    def of_namespaces(self, namespaces: Sequence[Namespace]) -> list[HitCurve]:
        """What requests of each namespace had found, in pools of all namespaces."""
        return _curves([self._counts.get(namespace, (_NOTHING, 0))[0] for namespace in namespaces])

    def in_all(self) -> HitCurve:
        """All namespaces together, those that were forgotten among them."""
        return _curves([np.sum(self._rows(), axis=0)])[0]

    def _rows(self) -> list[_Row]:
        return [self._gone, *(row for row, _ in self._counts.values())]


def _curves(rows: Sequence[_Row]) -> list[HitCurve]:
    counts = np.reshape(rows, (-1, _ROW))
    total, sampled = counts[:, :_KINDS], counts[:, _KINDS : 2 * _KINDS]
    hits = counts[:, 2 * _KINDS : -1].reshape(-1, _KINDS, len(SIZES)).cumsum(axis=2)
    asked = total.sum(axis=1)
    # Of what was asked for, not of what a sample should have been: a sample that is too large or small does no harm.
    parts = hits / np.maximum(sampled, 1)[:, :, None] * total[:, :, None]
    ratios = np.minimum(1.0, parts.sum(axis=1) / np.maximum(asked, 1)[:, None])
    columns = zip(asked.tolist(), counts[:, -1].tolist(), ratios.tolist(), strict=True)
    return [HitCurve(round(all_), int(found), dict(zip(_NAMES, row, strict=True))) for all_, found, row in columns]
