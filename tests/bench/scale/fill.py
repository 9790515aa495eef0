"""What blocks cost the process that keeps their books: memory, lookups, stores."""

from __future__ import annotations

import gc
import random
import time
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_table import BlockTable
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import make_policy
from kvoffd.pool.pool import Pool
from kvoffd.simulate.replay import Offered, Silence
from kvoffd.system.limits import MemoryLimit
from kvoffd_proto.messages import READY, GroupSpec

KEY_BYTES = 32
"""As vLLM's sha256 hashes."""
TOKENS = 16
SLOT_BYTES = 8192
LEAST_CHAIN, MOST_CHAIN = 16, 64
RECENT = 1024
CONTINUED = 0.3
"""Share of the requests that begin with all keys of a recent one."""
_GOLDEN, _FIRST, _SECOND = (np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SESSION = LEASE = 1
LOOKUP_KEYS, STORE_KEYS = 1000, 64
_NO_LIMIT = MemoryLimit(2**62, "nothing: no page is touched")


def keys_of(first: int, count: int) -> bytes:
    """The keys from number ``first`` on, end to end: four words each of splitmix64 (Steele and others, 2014)."""
    words = np.arange(first * KEY_BYTES // 8, (first + count) * KEY_BYTES // 8, dtype=np.uint64) * _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return (words ^ (words >> np.uint64(31))).tobytes()


class Part(NamedTuple):
    """Keys that follow each other."""

    first: int
    count: int


class Requests:
    """Requests of 16 to 64 new keys each; some continue one of the last thousand."""

    def __init__(self) -> None:
        self.next_key = 0
        self._random = random.Random(1)
        self._recent = [Part(0, 0)] * RECENT
        self._made = 0

    def request(self, count: int = 0) -> tuple[bytes, Part]:
        """All its keys, root first, and which of them are new: ``count``, or a number of its own."""
        count = count or self._random.randint(LEAST_CHAIN, MOST_CHAIN)
        new = Part(self.next_key, count)
        self.next_key += count
        before = Part(0, 0)
        if self._random.random() < CONTINUED:
            before = self._recent[self._random.randrange(RECENT)]
        self._recent[self._made % RECENT] = new
        self._made += 1
        return keys_of(*before) + keys_of(*new), new


class Books:
    """The daemon's own cache over a pool whose pages are never touched."""

    def __init__(self, blocks: int, shards: int, policy: str) -> None:
        self.blocks, self.shards = blocks, shards
        gc.collect()
        self.base_bytes = private_bytes()
        """Of the process without them, and with what is as large however many blocks there are."""
        self.pool = Pool(pool_bytes_of(blocks, shards), limit=_NO_LIMIT)
        known = BlockTable(self.pool.table.records)
        made = make_policy(policy, self.pool.pool_bytes, known)
        self.cache = Cache(self.pool.slots, self.pool.table, known, made, Silence(), time.monotonic)
        self._checksums = random.Random(2)
        groups = [GroupSpec("full_attention", TOKENS)]
        space = Namespace(b"scale".ljust(32), "scale", shards, KEY_BYTES, groups, "{}")
        self.namespace, _ = self.cache.open_namespace(space)
        for rank in range(shards):
            self.cache.register_rank(space, rank, [SLOT_BYTES], None)
        known._misses.fill(0)
        self.base_bytes += known._misses.nbytes

    def store(self, new: Part, checksum: int = 0) -> float:
        """Store keys as each rank does, with random checksums if none is given. Returns the seconds that it took."""
        keys = keys_of(*new)
        sums = [[checksum or self._checksums.getrandbits(64) | 1 for _ in range(new.count)] for _ in range(self.shards)]
        started = time.perf_counter()
        for rank, checksums in enumerate(sums):
            ticket = self.cache.begin_store(self.namespace, rank, [Offered(keys)])
            self.cache.commit_store(ticket, [checksums[: len(ticket.parts[0].copy)]])
        return time.perf_counter() - started

    def request(self, keys: bytes, new: Part) -> float:
        """Look keys up, store those that are new. Returns the seconds that the stores took."""
        self.cache.lookup(self.namespace, SESSION, LEASE, [(0, keys)])
        self.cache.note_requests()
        self.cache.release(SESSION, [LEASE])
        return self.store(new)

    def fill(self, requests: Requests, keys: int) -> None:
        """Store so many keys more."""
        until = requests.next_key + keys
        while (left := until - requests.next_key) > 0:
            self.request(*requests.request(left if left < 64 else 0))


def pool_bytes_of(blocks: int, shards: int) -> int:
    """A little more than so many blocks take: the last region may be too short for a slot."""
    return blocks * shards * SLOT_BYTES * 33 // 32 // SLOT_BYTES * SLOT_BYTES


def private_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is not shared: neither the pool nor its slot table."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))


def lookups(books: Books, samples: int) -> tuple[list[float], list[float]]:
    """Seconds of lookups of keys that are all ready, anywhere among all: until the answer, and until all is done."""
    answers, ends = [], []
    places, cache = random.Random(3), books.cache
    count = min(LOOKUP_KEYS, books.blocks)
    for _ in range(samples):
        keys = keys_of(places.randrange(books.blocks - count + 1), count)
        started = time.perf_counter()
        (states,), _ = cache.lookup(books.namespace, SESSION, LEASE, [(0, keys)])
        answers.append(time.perf_counter() - started)
        cache.note_requests()
        cache.release(SESSION, [LEASE])
        ends.append(time.perf_counter() - started)
        assert states.count(READY) == count
    return answers, ends


def stores(books: Books, requests: Requests, samples: int) -> list[float]:
    """Seconds of one rank's store of 64 new keys into a full pool, where all of them are admitted."""
    found = []
    for _ in range(samples):
        before = books.namespace.counters.stored_blocks
        seconds = books.request(*requests.request(STORE_KEYS))
        if books.namespace.counters.stored_blocks == before + STORE_KEYS:
            found.append(seconds / books.shards)
    return found


def fill(blocks: int, shards: int, policy: str, samples: int) -> dict[str, object]:
    """Fill a pool, measure so many lookups and stores, and store as much again."""
    books, requests = Books(blocks, shards, policy), Requests()

    def block_bytes() -> dict[str, float]:
        held, known = max(1, sum(books.namespace.blocks_in.values())), books.cache.policy
        ghosts = known.nbytes * known.ghosts // max(1, known.ghosts + held)
        used = private_bytes() - books.base_bytes
        return {
            "held_blocks": held,
            "all": used / held,
            "without_ghosts": (used - ghosts) / held,
            "policy": (known.nbytes - ghosts) / held,
            "ghosts": known.ghosts,
            "ghost_bytes": ghosts,
        }

    started = time.perf_counter()
    books.fill(requests, blocks)
    result: dict[str, object] = {
        "blocks": blocks,
        "shards": shards,
        "policy": policy,
        "fill_seconds": time.perf_counter() - started,
        "base_bytes": books.base_bytes,
        "filled": block_bytes(),
    }
    answers, ends = lookups(books, samples)
    while not books.namespace.counters.evicted_blocks:
        books.fill(requests, STORE_KEYS)
    result |= {
        "answer_seconds": answers,
        "lookup_seconds": ends,
        "store_seconds": stores(books, requests, samples),
    }
    books.fill(requests, blocks)
    counters = books.namespace.counters
    return result | {
        "churned": block_bytes(),
        "evicted": counters.evicted_blocks,
        "declined": counters.declined_keys,
    }
