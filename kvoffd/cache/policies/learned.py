"""What is kept is what is worth most: the hits to be expected for the room it takes, by how keys came back so far.

A request's keys are told apart by what says whether and when they are asked for again: whether the request continues a
conversation, which turn it is, how long the pause was, how much text is new, how many requests saw the key. Each such
class learns how long its keys take to come back. What is offered is stored where it is worth more than what would have
to go for it. Keys without blocks are watched too: hits alone teach nothing.

All thresholds are in tokens, or in pool lifetimes: the time in which as many bytes are accessed as the pool has.

The work is done in C, in ``cache/learned``: ``requests.c`` has the classes, ``lifetimes.c`` what they are worth,
``places.c`` and ``spans.c`` what is known of keys, ``cells.c`` and ``blocks.c`` the order in which blocks go,
``records.c`` what the next daemon gets.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from math import inf
from typing import cast

from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.numbered import Numbered
from kvoffd.cache.policies import DECLINED, Chain, Offer, PolicyState
from kvoffd.system.native import native
from kvoffd.system.newest import put_newest
from kvoffd_proto.admin import KeyWorth, PolicyClass

UNIT_TOKENS = 512
"""Tokens of a block whose group does not say."""
MEMORY_REQUESTS = 8000
"""Time in which what was seen loses its weight."""
FORMAT = 4
"""Of a record."""
MOST_OF_RECORD = 4096
"""Namespaces, the latest ones, that a record says it is of."""
PIECE_BYTES = 128 * 1024
"""Of a record, made in one step unless a request's keys take more."""
SEED_BYTES = 16
_COUNT = struct.Struct("=Q")
_END = struct.Struct("=II")
_OFFER = struct.Struct("=dQ")
_CLASS = struct.Struct("=4dQ")
_KEY = struct.Struct("=2d4Q")
_FEWEST_CANDIDATES, _MORE_CANDIDATES = 32, 2
_REFUSALS = (
    "",
    "it is cut off",
    "its layout is another",
    "it is of a pool of another size",
    "its counts are none",
    "it has a span that is none",
    "its keys are none",
)
"""By ``enum refusal`` of records.c."""


_SEEN = (
    *(("never", "0"), ("once", "1"), ("2 times", "2"), ("3 times", "3")),
    *(("4 to 7 times", "4-7"), ("8 times or more", "8+")),
)
_PAUSES = (
    *(("a short pause", "<0.5"), ("a pause of a pool lifetime", "0.5-2")),
    *(("a pause of 2 to 8 lifetimes", "2-8"), ("a longer pause", ">8")),
)
_TURNS = ("turn 2 or 3", "2-3"), ("a later turn", "4+")
_OLD = ("up to 512", "+512"), ("up to 1,536", "+1,536"), ("more", ">1,536")
_NEW = (*_OLD[:2], ("up to 7,680", "+7,680"), ("more", ">7,680"))
_TEXT = (
    *(("up to 512", "+512"), ("up to 1,536", "+1,536"), ("up to 3,584", "+3,584"), ("up to 7,680", "+7,680")),
    *(("up to 15,872", "+15,872"), ("more", ">15,872")),
)
_NAMES = (
    ("left by an earlier daemon", "adopted"),
    ("stored without a lookup", "stored unasked"),
    ("the end of a prompt", "prompt's end"),
    *((f"shared, seen {seen} before", f"shared, seen {short}") for seen, short in _SEEN),
    *(
        (f"{kind} conversation, {turn} after {pause}, {tokens}{unit} tokens", f"{age} turn {t} pause {p} {short}")
        for kind, age, unit, texts in (("of a", "old", " new", _OLD), ("new in a", "new", "", _NEW))
        for pause, p in _PAUSES
        for turn, t in _TURNS
        for tokens, short in texts
    ),
    *((f"new behind what others continued otherwise, {tokens} tokens", f"branch {short}") for tokens, short in _TEXT),
    *((f"new, {tokens} tokens", f"first {short}") for tokens, short in _TEXT),
)
CLASSES = tuple(name for name, _ in _NAMES)
"""What tells the keys of each class from others, by the class's number in learned.h."""
SHORT_NAMES = tuple(short for _, short in _NAMES)
"""The same for narrow screens."""


class Known(ctypes.Structure):
    """``struct known`` of learned.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "lifetime", "now", "keys", "requests", "known_keys", "blocks", "spans", "known_bytes", "nbytes",
            "hit_bytes", "lru_hit_bytes", "as_lru",
        )
    )  # fmt: skip


class BadRecord(ValueError):
    """A policy's record is damaged or of another kind. The message says how."""


class Policy:
    """``struct learned``, and the blocks that it knows by number."""

    def __init__(self, pool_bytes: int) -> None:
        self._native = native()
        self._pool_bytes = pool_bytes
        self._blocks: Numbered[Block] = Numbered()
        self._learned_of: dict[int, None] = {}
        """Namespaces that asked for as much as the pool holds, in this daemon or an earlier one."""
        self._begin()

    def _begin(self) -> None:
        self._at = self._native.learned_new(self._pool_bytes, os.urandom(SEED_BYTES))
        if not self._at:
            raise MemoryError
        self._free = weakref.finalize(self, self._native.learned_free, self._at)
        self.known = Known.from_address(self._at)

    def requested(self, chains: Sequence[Chain]) -> None:
        nbytes = keys = 0
        for namespace, group, joined, _ in chains:
            if weight := namespace.block_bytes(group):
                tokens = namespace.groups[group].tokens_per_block or UNIT_TOKENS
                count = self._native.learned_note(self._at, *_keys(namespace, group, joined), weight, tokens)
                keys += count
                nbytes += count * weight
        if keys and (requests := self._native.learned_pass(self._at, keys, nbytes)):
            self._native.learned_learn(self._at, math.exp(-requests / MEMORY_REQUESTS))

    def insert(self, blocks: Sequence[Block], older: bool = False) -> None:
        namespace, group = blocks[0].namespace, blocks[0].group
        chain = blocks[::-1]
        handles = self._blocks.next_numbers(len(chain))
        self._blocks.enter(handles, chain)
        keys = _keys(namespace, group, b"".join([block.key for block in chain]))
        twice = self._native.learned_insert(self._at, *keys, namespace.block_bytes(group), _address(handles), older)
        assert not twice, "inserted twice"

    def remove(self, blocks: Sequence[Block], evicted: bool) -> None:
        namespace, group = blocks[0].namespace, blocks[0].group
        keys = _keys(namespace, group, b"".join([block.key for block in reversed(blocks)]))
        handles = array("I", bytes(4 * len(blocks)))
        unknown = self._native.learned_remove(self._at, *keys, _address(handles))
        assert not unknown, "removed what is not there"
        self._blocks.remove(handles)

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        given, most = 0, _FEWEST_CANDIDATES
        while True:
            handles = array("I", bytes(4 * most))
            found = self._native.learned_candidates(self._at, worth, _address(handles), most)
            yield from cast("list[Block]", self._blocks.find(handles[given:found]))
            if found < most:
                return
            given, most = found, most * _MORE_CANDIDATES

    def __len__(self) -> int:
        return int(self.known.blocks)

    def offers(self, namespace: Namespace, group: int, keys: Sequence[bytes], starts: Sequence[int]) -> Sequence[Offer]:
        begins, weight = array("Q", starts), namespace.block_bytes(group)
        found = array("Q", bytes(len(keys) * _OFFER.size))
        made = self._native.learned_offers(
            self._at, *_keys(namespace, group, b"".join(keys)), weight, _address(begins), len(begins), _address(found)
        )
        offered = memoryview(found).cast("B")[: made * _OFFER.size]
        is_new = not self._is_learned_of(namespace, weight)
        return [
            Offer(count, inf if is_new and worth != DECLINED else worth) for worth, count in _OFFER.iter_unpack(offered)
        ]

    def _is_learned_of(self, namespace: Namespace, weight: int) -> bool:
        """Whether what was learned is of this namespace's keys, too: it has asked for as much as the pool holds."""
        name = _name(namespace)
        if name not in self._learned_of:
            if namespace.counters.keys_asked * weight < self._pool_bytes:
                return False
            put_newest(self._learned_of, name, None, MOST_OF_RECORD)
        return True

    def declined(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        self._native.learned_declined(self._at, *_keys(namespace, group, b"".join(keys)))

    @property
    def ghosts(self) -> int:
        return int(self.known.known_keys - self.known.blocks)

    @property
    def nbytes(self) -> int:
        return int(self.known.nbytes) + self._blocks.nbytes

    def describe(self) -> PolicyState:
        known, facts = self.known, ctypes.create_string_buffer(len(CLASSES) * _CLASS.size)
        self._native.learned_classes(self._at, facts)
        every = list(zip(_NAMES, _CLASS.iter_unpack(facts.raw), strict=True))
        asked = max(1.0, sum(accessed for _, (accessed, *_) in every))
        classes = [
            PolicyClass(name, accessed / asked, chance, age, kept, worth, short)
            for (name, short), (accessed, chance, age, worth, kept) in every
            if accessed or kept
        ]
        classes.sort(key=lambda one: one.accessed_share, reverse=True)
        counts = known.requests, known.known_keys, known.hit_bytes, known.lru_hit_bytes
        return PolicyState(*counts, bool(known.as_lru), classes)

    def worth_of(self, namespace: Namespace, group: int, key: bytes) -> KeyWorth | None:
        name, _, _, key_bytes = _keys(namespace, group, key)
        facts = ctypes.create_string_buffer(_KEY.size)
        if not self._native.learned_key(self._at, name, key, key_bytes, facts):
            return None
        age, worth, kind, sightings, turn, before = _KEY.unpack(facts.raw)
        return KeyWorth(CLASSES[kind], age, sightings, turn, worth, before)

    def return_chance(self, block: Block, within_bytes: int) -> float:
        namespace, group = block.namespace, block.group
        if not self._is_learned_of(namespace, namespace.block_bytes(group)):
            return 1.0
        name, _, _, key_bytes = _keys(namespace, group, block.key)
        return float(self._native.learned_chance(self._at, name, block.key, key_bytes, within_bytes))

    def record(self) -> Iterator[bytes]:
        self._native.learned_begin_record(self._at)
        content, checksum = ctypes.create_string_buffer(PIECE_BYTES), 0
        while made := self._native.learned_record(self._at, content, len(content)):
            if made > len(content):
                content = ctypes.create_string_buffer(made)
                continue
            piece = bytes(memoryview(content)[:made])
            checksum = zlib.crc32(piece, checksum)
            yield piece
        content = ctypes.create_string_buffer(self._native.learned_counts_bytes())
        self._native.learned_counts(self._at, content)
        names = array("Q", self._learned_of)
        last = content.raw + names.tobytes() + _COUNT.pack(len(names)) + FORMAT.to_bytes(4, sys.byteorder)
        yield last + zlib.crc32(last, checksum).to_bytes(4, sys.byteorder)

    def go_on(self, record: bytes) -> None:
        assert not self.known.known_keys
        if len(record) < _END.size:
            raise BadRecord("it is cut off")
        version, checksum = _END.unpack_from(record, len(record) - _END.size)
        if zlib.crc32(memoryview(record)[:-4]) != checksum:
            raise BadRecord("its checksum is wrong")
        if version != FORMAT:
            raise BadRecord(f"its format is {version}, not {FORMAT}")
        end, names = len(record) - _END.size - _COUNT.size, array("Q")
        count = _COUNT.unpack_from(record, end)[0] if end >= 0 else 0
        if count * names.itemsize > end:
            raise BadRecord("it is cut off")
        names.frombytes(record[end - count * names.itemsize : end])
        end -= count * names.itemsize
        if refusal := self._native.learned_go_on(self._at, record, end):
            self._free()
            self._begin()
            raise BadRecord(_REFUSALS[refusal])
        self._learned_of = dict.fromkeys(names[-MOST_OF_RECORD:])


def _keys(namespace: Namespace, group: int, keys: bytes) -> tuple[int, bytes, int, int]:
    """Keys of a group, end to end, as C takes them: the same in another group or namespace are others."""
    return _name(namespace) ^ group, keys, len(keys) // namespace.key_bytes, namespace.key_bytes


def _name(namespace: Namespace) -> int:
    return int.from_bytes(namespace.fingerprint[:8], "big")


def _address(items: array[int]) -> int:
    return items.buffer_info()[0]
