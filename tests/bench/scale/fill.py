"""What blocks cost the process that keeps their books: `python -m tests.bench.scale.fill --help`. Prints JSON.

Large cases get processes of their own. What an earlier case of the process has stays: none is built of its leavings.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections.abc import Sequence

from kvoffd.cache.index_memory import index_memory
from kvoffd.cache.misses import ENTRIES
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.policies import DEFAULT_POLICY, make_policy
from kvoffd.pool.pool import Pool
from kvoffd.server.daemon import GC_THRESHOLDS
from kvoffd.simulate.replay import Silence
from kvoffd.system.limits import MemoryLimit
from kvoffd_proto.messages import READY, GroupSpec
from tests.bench.scale.load import KEY_BYTES, SLOT_BYTES, TOKENS, Part, Requests, keys_of

SESSION = LEASE = 1
LOOKUP_KEYS, STORE_KEYS = 1000, 64
SAMPLES = 300
"""Lookups, and stores."""
FILLED_HOLES = 2000
"""Objects of each size that fill what others left free, so that no block is found there."""


class Books:
    """The daemon's own cache over a pool whose pages are never touched."""

    def __init__(self, blocks: int, shards: int, policy: str) -> None:
        self.blocks, self.shards = blocks, shards
        limit = MemoryLimit(2**62, "nothing: no page is touched")
        self.pool = Pool(pool_bytes_of(blocks, shards), limit=limit)
        self.cache = BlockCache(self.pool, make_policy(policy, self.pool.pool_bytes), Silence(), time.monotonic)
        self._checksums = random.Random(2)
        self._forget_nothing()
        self.namespace = self._open(b"scale")

    def _open(self, name: bytes) -> Namespace:
        groups = [GroupSpec("full_attention", TOKENS)]
        namespace, _ = self.cache.open_namespace(name.ljust(32), name.decode(), self.shards, KEY_BYTES, groups, "{}")
        for rank in range(self.shards):
            self.cache.set_shard_bytes(namespace, rank, [SLOT_BYTES])
        return namespace

    def _forget_nothing(self) -> None:
        """Write all of what has the same size however many blocks there are, so that it is no part of their cost."""
        namespace, some = self._open(b"before"), 4096
        misses = self.cache.blocks.misses
        for first in range(0, ENTRIES // 16, some):
            split = namespace.split(0, keys_of(2**40 + first, some))
            misses.note(namespace, 0, split, MissReason.EVICTED)
        self.request(namespace, keys_of(2**41, 16), Part(2**41, 16))
        for _ in self.cache.clear(namespace) or ():
            pass
        self.cache.forget_namespace(namespace)

    def request(self, namespace: Namespace, keys: bytes, new: Part) -> float:
        """Look keys up, store those that are new as each rank does. Returns the seconds that the stores took."""
        self.cache.lookup(namespace, LEASE, SESSION, [(0, keys)])
        self.cache.touch(LEASE)
        self.cache.count_misses()
        self.cache.release(SESSION, [LEASE])
        offered = [namespace.split(0, keys_of(*new)) for _ in range(self.shards)]
        sums = [[self._checksums.getrandbits(64) | 1 for _ in range(new.count)] for _ in range(self.shards)]
        started = time.perf_counter()
        for rank, (split, checksums) in enumerate(zip(offered, sums, strict=True)):
            ticket = self.cache.begin_stores(namespace, rank, 0, split, {})
            ticket.checksums = checksums[: len(ticket.copy)]
            self.cache.commit_store(ticket)
        return time.perf_counter() - started

    def fill(self, requests: Requests, keys: int) -> None:
        """Store so many keys more."""
        until = requests.next_key + keys
        while (left := until - requests.next_key) > 0:
            self.request(self.namespace, *requests.request(left if left < 64 else 0))

    def ghost_bytes(self) -> int:
        """Of the policy's memory the part of the keys without blocks, each key counted alike."""
        policy = self.cache.policy
        return policy.nbytes * policy.ghosts // max(1, policy.ghosts + len(policy))


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
        states = cache.lookup(books.namespace, LEASE, SESSION, [(0, keys)]).states[0]
        answered = time.perf_counter()
        cache.touch(LEASE)
        cache.release(SESSION, [LEASE])
        while cache.unpin_some():
            pass
        ends.append(time.perf_counter() - started)
        answers.append(answered - started)
        assert states.count(READY) == count
    return answers, ends


def stores(books: Books, requests: Requests, samples: int) -> list[float]:
    """Seconds of one rank's store of 64 new keys into a full pool, where all of them are admitted."""
    found = []
    for _ in range(samples):
        before = books.namespace.counters.stored_blocks
        seconds = books.request(books.namespace, *requests.request(STORE_KEYS))
        if books.namespace.counters.stored_blocks == before + STORE_KEYS:
            found.append(seconds / books.shards)
    return found


def measure(books: Books, policy: str, samples: int) -> dict[str, object]:
    """Fill a pool, measure so many lookups and stores, and store as much again."""
    blocks, shards, requests = books.blocks, books.shards, Requests()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    holes = [bytes(size) for size in range(1, 512, 16) for _ in range(FILLED_HOLES)]
    base = private_bytes()

    def block_bytes() -> dict[str, float]:
        held, ghosts = max(1, books.namespace.held_blocks), books.ghost_bytes()
        used = private_bytes() - base
        return {
            "held_blocks": held,
            "all": used / held,
            "without_ghosts": (used - ghosts) / held,
            "policy": (books.cache.policy.nbytes - ghosts) / held,
            "ghosts": books.cache.policy.ghosts,
            "ghost_bytes": ghosts,
            "told": index_memory(books.cache.blocks, books.cache.policy) / held,
            "counted": books.cache.blocks.index_bytes / held,
        }

    started = time.perf_counter()
    books.fill(requests, blocks)
    result: dict[str, object] = {
        "blocks": blocks,
        "shards": shards,
        "policy": policy,
        "fill_seconds": time.perf_counter() - started,
        "base_bytes": base,
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
    assert holes
    return result | {
        "churned": block_bytes(),
        "evicted": counters.evicted_blocks,
        "declined": counters.declined_keys,
    }


def allocations(books: Books) -> dict[str, float]:
    """Bytes of a block that Python knows of, by the line that takes them; the policy's C keeps its own count."""
    blocks = books.blocks
    gc.collect()
    tracemalloc.start(1)
    books.fill(Requests(), blocks)
    snapshot = tracemalloc.take_snapshot()
    tracemalloc.stop()
    found: dict[str, float] = {"cache/learned (C)": (books.cache.policy.nbytes - books.ghost_bytes()) / blocks}
    for one in snapshot.statistics("lineno"):
        frame = one.traceback[0]
        if one.size >= blocks:
            place = "/".join(frame.filename.split("/")[-2:])
            found[f"{place}:{frame.lineno}"] = one.size / blocks
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale.fill", description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="BLOCKSxSHARDS")
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"lookups, and stores (default {SAMPLES})")
    parser.add_argument("--allocations", action="store_true", help="say instead which lines take the memory")
    given = parser.parse_args(arguments)
    kept, found = [], []
    for case in given.cases:
        blocks, _, shards = case.partition("x")
        books = Books(int(blocks), int(shards), given.policy)
        kept.append(books)
        found.append(allocations(books) if given.allocations else measure(books, given.policy, given.samples))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
