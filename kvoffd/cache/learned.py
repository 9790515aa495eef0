"""Eviction policy that keeps the blocks with the most expected hits, learned from how keys returned so far.

LEARNED.md states its rules and formulas; they are implemented in ``learned.c``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
import zlib
from array import array
from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.curve import OWN_SIZE, HitRatioCurve
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import REJECTED, Admission, BufferedOrder, Chain
from kvoffd.system.native import CHAR_P, COUNT, DOUBLE, ITEMS, KEYS, NUMBER, VOID_P, declare, native
from kvoffd.system.structures import COUNTS, KNOWN
from kvoffd_proto.stats import LearnedStats, PolicyClass

declare(
    learned_new=(VOID_P, NUMBER, CHAR_P),
    learned_free=(None, VOID_P),
    learned_record=(None, VOID_P, *KEYS, NUMBER, NUMBER, NUMBER),
    learned_insert=(COUNT, VOID_P, *KEYS, NUMBER, CHAR_P),
    learned_remove=(COUNT, VOID_P, *KEYS),
    learned_forget=(COUNT, VOID_P, *KEYS),
    learned_candidates=(COUNT, VOID_P, DOUBLE, *ITEMS),
    learned_admit=(COUNT, VOID_P, *KEYS, NUMBER, CHAR_P, NUMBER, VOID_P),
    learned_rejected=(None, VOID_P, *KEYS),
    learned_chances=(None, VOID_P, *KEYS, NUMBER, VOID_P),
    learned_resume=(None, VOID_P),
)

MIN_LEAD = 0.02
"""Least lead of an LRU, as a part of requested tokens: the curve is an estimate, and a switch costs hits."""
JUDGED_AFTER = 8
"""Pool lifetimes after each switch: learned values are worst just after the pool has filled."""
FIRST_STAY, MAX_STAY = 32, 1024
"""Pool lifetimes for which LRU stays on; doubled each time."""
KEPT = 1 - 1 / 16
"""Factor for older counts after each pool lifetime."""

FORMAT = 6
"""Version of the state that is kept for the next daemon."""
_OFFER = struct.Struct("=dQ")  # score, and number of keys
_HEAD = struct.Struct("=II")
_TIME = struct.Struct("=3Q")
_MAX_COUNT, _MAX_SUM = 1 << 62, 1e30
"""Limits for the counters of restored state, and for its sums of bytes."""

_SIGHTINGS = "never", "once", "2 times", "3 times", "4 to 7 times", "8 times or more"
_PAUSES = "a short pause", "about a lifetime", "2 to 8 lifetimes", "a longer pause"
_TURNS = "turn 2 or 3", "a later turn"
_KNOWN_TEXT = "up to 512", "up to 1,536", "over 1,536"
_APPENDED_TEXT = *_KNOWN_TEXT[:2], "up to 7,680", "over 7,680"
_NEW_TEXT = "up to 512", "up to 1,536", "up to 3,584", "up to 7,680", "up to 15,872", "over 15,872"
CLASSES = (
    "of an earlier daemon",
    "stored without a lookup",
    "the end of a prompt",
    *(f"shared, seen {seen} before" for seen in _SIGHTINGS),
    *(
        f"{kind} text of {turn}, after {pause}, {tokens}{unit} tokens"
        for kind, unit, texts in (("old", " new", _KNOWN_TEXT), ("new", "", _APPENDED_TEXT))
        for pause in _PAUSES
        for turn in _TURNS
        for tokens in texts
    ),
    *(f"new text behind a shared prefix, {tokens} tokens" for tokens in _NEW_TEXT),
    *(f"first turn, {tokens} tokens" for tokens in _NEW_TEXT),
)
"""Description of each class, by its number."""
BINS = 17
"""Age bins of each class."""


class Known(ctypes.Structure):
    """``struct known`` of learned.c."""

    __slots__ = ()
    _fields_ = KNOWN


class Counts(ctypes.Structure):
    """``struct counts`` of learned.c, which follows ``struct known``: arrays [class][age bin]."""

    __slots__ = ()
    _fields_ = COUNTS


_KEPT_BYTES = Counts.hazard.offset
"""Size of the arrays that are kept for the next daemon."""


class Learned(BufferedOrder):
    """The policy, ``struct learned``, which identifies blocks by their numbers."""

    def __init__(self, pool_bytes: int) -> None:
        self._native = native()
        self._pool_bytes = pool_bytes
        self._at = self._native.learned_new(pool_bytes, os.urandom(16))
        if not self._at:
            raise MemoryError
        self._close = weakref.finalize(self, self._native.learned_free, self._at)
        super().__init__(partial(self._native.learned_candidates, self._at))
        self.known = Known.from_address(self._at)
        self._counts = Counts.from_address(self._at + ctypes.sizeof(Known))

    # --- Requests and stores ---

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            group, keys, size = chain.group, chain.keys, chain.group.key_bytes
            which, is_last = (group.number, keys, len(keys) // size, size), chain is chains[-1]  # it ends the request
            self._native.learned_record(self._at, *which, group.block_bytes, group.weight, is_last)

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        size = group.key_bytes
        count, words = len(keys) // size, _OFFER.size // 4
        if words * count > len(self._buffer):
            self._make_buffer(words * count)
        begins = array("Q", starts).tobytes()
        made = self._native.learned_admit(
            self._at, group.number, keys, count, size, group.block_bytes, begins, len(starts), self._buffer_at
        )
        applies = self._applies_to(group)
        offers = _OFFER.iter_unpack(self._buffer[: made * words].tobytes())
        runs = [(length, score if applies or score == REJECTED else inf) for score, length in offers]
        return Admission(runs, float(self.known.lowest))

    def _applies_to(self, group: Group) -> bool:
        """Return whether the namespace's requested keys, at this size, fill the pool. Before, only other namespaces'
        returns are known, which say nothing of it."""
        return group.namespace.counters.keys_asked * group.block_bytes >= self._pool_bytes

    def rejected(self, group: Group, keys: bytes) -> None:
        self._native.learned_rejected(self._at, group.number, keys, len(keys) // group.key_bytes, group.key_bytes)

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        twice = self._native.learned_insert(
            self._at, group.number, keys, len(blocks), group.key_bytes, group.block_bytes, packed(blocks)
        )
        assert not twice, "inserted twice"

    def follow(self, before: int, blocks: BlockIds) -> None:
        """Do nothing: a request's blocks have this order, whenever they come."""

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        if group.namespace.of_bench:  # its keys teach nothing, and are not remembered without a block
            forgotten = self._native.learned_forget(self._at, group.number, keys, len(blocks), group.key_bytes)
            assert forgotten == len(blocks), "removed a block that is not in the policy"
            return
        has_unknown = self._native.learned_remove(self._at, group.number, keys, len(blocks), group.key_bytes)
        assert not has_unknown, "removed a block that is not in the policy"

    # --- Chance of reuse ---

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        size, chances = group.key_bytes, np.ones(len(keys) // group.key_bytes)
        if self._applies_to(group):
            of = group.number, keys, len(chances), size
            self._native.learned_chances(self._at, *of, within_bytes, chances.ctypes.data)
        return chances

    def remember(self, nbytes: int) -> None:
        self.known.tier_lifetime = min(nbytes, _MAX_COUNT)

    # --- Statistics ---

    @property
    def accessed_bytes(self) -> int:
        return int(self.known.now)

    @property
    def ghosts(self) -> int:
        return int(self.known.known_keys - self.known.blocks)

    @property
    def nbytes(self) -> int:
        return int(self.known.nbytes)

    def describe(self) -> LearnedStats:
        known, lifetime = self.known, float(self.known.lifetime)
        accessed, edges = np.array(self._counts.accessed), np.array(self._counts.edges)
        alive = np.cumprod(1 - np.array(self._counts.hazard)[:, : BINS - 1], axis=1)
        chances = 1 - alive[:, -1]
        median = np.argmax(1 - alive >= chances[:, None] / 2, axis=1)  # bin by whose end half of the returns have come
        ages = np.where(chances > 0, edges[median + 1] / lifetime, 0.0)
        scores = np.maximum(0, np.array(self._counts.score).max(axis=1)) * lifetime
        kept = np.array(self._counts.cell_bytes).reshape(len(CLASSES), BINS).sum(axis=1)
        shares = accessed / max(1.0, accessed.sum())
        columns = (one.tolist() for one in (shares, chances, ages, kept, scores))
        classes = [
            PolicyClass(name, share, chance, age, nbytes, score)
            for name, share, chance, age, nbytes, score in zip(CLASSES, *columns, strict=True)
            if share or nbytes
        ]
        classes.sort(key=lambda one: one.accessed_share, reverse=True)
        return LearnedStats(known.requests, known.known_keys, bool(known.as_lru), classes)

    # --- Restart ---

    def state(self) -> bytes:
        known = self.known
        body = _TIME.pack(known.lifetime, known.now, known.requests) + bytes(self._counts)[:_KEPT_BYTES]
        return _HEAD.pack(FORMAT, zlib.crc32(body)) + body

    def restore(self, state: bytes) -> None:
        if len(state) != _HEAD.size + _TIME.size + _KEPT_BYTES or _HEAD.unpack_from(state)[0] != FORMAT:
            raise ValueError("another release wrote it, or it is cut off")
        (_, checksum), body = _HEAD.unpack_from(state), state[_HEAD.size :]
        if zlib.crc32(body) != checksum:
            raise ValueError("its checksum is wrong")
        (lifetime, *time), sums = _TIME.unpack_from(body), np.frombuffer(body, np.float64, offset=_TIME.size)
        if not lifetime or max(time) > _MAX_COUNT or not ((sums >= 0) & (sums <= _MAX_SUM)).all():
            raise ValueError("invalid counters")
        self.known.now, self.known.requests = time
        if lifetime != self.known.lifetime:  # of a pool of another size: the bins have other ages
            edges = np.array(self._counts.edges)
            # ``returned`` and ``forgotten``; behind them is only ``accessed``, which has no ages.
            by_age = sums[: 2 * len(CLASSES) * BINS].reshape(-1, BINS)
            moved = by_age @ _shares(edges * lifetime / self.known.lifetime, edges)
            sums = np.concatenate((moved.ravel(), sums[by_age.size :]))
        ctypes.memmove(ctypes.addressof(self._counts), sums.tobytes(), _KEPT_BYTES)
        self._native.learned_resume(self._at)


class LruFallback:
    """Switches `learned` to LRU for a while when the curve predicts that LRU would hit more: LEARNED.md, "As an LRU".

    It judges once per pool lifetime.
    """

    def __init__(self, curve: HitRatioCurve, policy: Learned) -> None:
        self._curve, self._known = curve, policy.known
        self._last = curve.in_all()
        self._asked = self._lead = 0.0
        """Requested tokens, and those of them that an LRU would have found and the pool did not."""
        self._excess = 0.0
        """Predicted lead while LRU was on, as a part: concurrent requests do not find what the curve expects."""
        self._stay = FIRST_STAY
        """Pool lifetimes for which LRU stays on the next time."""
        self._next_at = self._known.now + self._known.lifetime
        self._change_at = self._known.now + JUDGED_AFTER * self._known.lifetime

    def judge(self) -> None:
        """Judge, if it is time. The curve and the policy must have counted the same requests."""
        known = self._known
        if known.now < self._next_at:
            return
        self._next_at = known.now + known.lifetime
        last, now = self._last, self._curve.in_all()
        self._last = now
        if now.asked_tokens > last.asked_tokens:  # else the curve halved its counts
            by_lru_before, by_lru_now = (one.lru_hit_ratio[OWN_SIZE] * one.asked_tokens for one in (last, now))
            self._asked = KEPT * self._asked + now.asked_tokens - last.asked_tokens
            found_more = by_lru_now - by_lru_before - (now.found_tokens - last.found_tokens)
            self._lead = KEPT * self._lead + found_more
        if known.now < self._change_at or not self._asked:
            return
        lead = self._lead / self._asked
        if known.as_lru:  # not even LRU finds what the curve expects: by this share it is wrong here
            self._excess = max(0.0, lead)
            self._change(as_lru=False, lifetimes=JUDGED_AFTER)
        elif lead > MIN_LEAD + self._excess:
            self._change(as_lru=True, lifetimes=self._stay)
            self._stay = min(2 * self._stay, MAX_STAY)

    def _change(self, *, as_lru: bool, lifetimes: int) -> None:
        self._known.as_lru, self._asked, self._lead = as_lru, 0.0, 0.0
        self._change_at = self._known.now + lifetimes * self._known.lifetime


def _shares(edges: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the part of each bin within each of the other bins, if spread evenly over the bin's ages."""
    ends = np.append(edges[1:], 2 * edges[-1])
    overlaps = np.minimum.outer(ends, np.append(others[1:], inf)) - np.maximum.outer(edges, others)
    shares: npt.NDArray[np.float64] = np.clip(overlaps, 0, None) / (ends - edges)[:, None]
    return shares
