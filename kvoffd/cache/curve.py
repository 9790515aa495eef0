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
PIECE_TOKENS = 512
"""Of a piece, at most; curve.c says why the first ones have fewer."""
_KINDS = 3
_ROW = 2 * _KINDS + _KINDS * len(SIZES)
_NAMES = [f"{size:g}" for size in SIZES]
_Counts = NDArray[np.float64]
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
        self._counts: dict[Namespace, tuple[_Counts, int, list[int]]] = {}
        """Those of ``struct counts``, their address, and the tokens that requests found."""
        self._gone, self._gone_found = np.zeros(_ROW), [0]
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
        for group, keys, _, run in chains:
            namespace = group.namespace
            if not keys:
                continue
            if (counted := self._counts.get(namespace)) is None:
                counts = np.zeros(_ROW)
                counted = self._counts[namespace] = counts, counts.ctypes.data, [0]
            tokens = group.tokens or UNKNOWN_TOKENS
            per = max(1, PIECE_TOKENS // tokens) if tokens > UNKNOWN_TOKENS else 1
            whose, size = int.from_bytes(namespace.fingerprint[:8], "big") ^ group.index, group.key_bytes
            count = len(keys) // size
            self._native.curve_asked(self._at, counted[1], whose, keys, count, size, group.block_bytes, tokens, per)
            counted[2][0] += run * tokens

    def tick(self) -> None:
        """Have what is old weigh less."""
        if self._clock() - self._halved_at >= HALVED_EVERY_S:
            self._halved_at = self._clock()
            for counts, found in self._rows():
                counts *= 0.5
                found[0] //= 2

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Go on to count what was asked for in it: it is a part of all."""
        if (row := self._counts.pop(namespace, None)) is not None:
            self._gone += row[0]
            self._gone_found[0] += row[2][0]

    def of_namespaces(self, namespaces: Sequence[Namespace]) -> list[HitCurve]:
        """What requests of each namespace had found, in pools of all namespaces."""
        rows = [self._counts.get(namespace) for namespace in namespaces]
        counts = np.array([_NOTHING if row is None else row[0] for row in rows]).reshape(-1, _ROW)
        return _states(counts, [0 if row is None else row[2][0] for row in rows])

    def in_all(self) -> HitCurve:
        """All namespaces together, those that were forgotten among them."""
        rows = self._rows()
        counts = sum((counts for counts, _ in rows), np.zeros(_ROW))
        return _states(counts[None, :], [sum(found[0] for _, found in rows)])[0]

    def _rows(self) -> list[tuple[_Counts, list[int]]]:
        return [(self._gone, self._gone_found), *((counts, found) for counts, _, found in self._counts.values())]


def _states(counts: _Counts, found_tokens: Sequence[int]) -> list[HitCurve]:
    """``counts``: [curves, _ROW]."""
    total, sampled = counts[:, :_KINDS], counts[:, _KINDS : 2 * _KINDS]
    hits = counts[:, 2 * _KINDS :].reshape(-1, _KINDS, len(SIZES)).cumsum(axis=2)
    asked = total.sum(axis=1)
    # Of what was asked for, not of what a sample should have been: a sample that is too large or small does no harm.
    parts = hits / np.maximum(sampled, 1)[:, :, None] * total[:, :, None]
    ratios = np.minimum(1.0, parts.sum(axis=1) / np.maximum(asked, 1)[:, None])
    rows = zip(asked.tolist(), found_tokens, ratios.tolist(), strict=True)
    return [HitCurve(round(tokens), found, dict(zip(_NAMES, row, strict=True))) for tokens, found, row in rows]
