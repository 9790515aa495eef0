"""Replays a trace through the daemon's cache, with a slot table in memory, and a pool and disk without bytes."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned, LruFallback
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import make_policy
from kvoffd.cache.tickets import StorePart
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd.simulate.disk import MAX_REGION_BLOCKS, REGIONS, SimulatedDisk
from kvoffd.simulate.trace import KEY_BYTES, RequestTrace
from kvoffd.tiering import WriteMode
from kvoffd_proto.messages import PENDING, READY, GroupSpec

BLOCK_BYTES = 1 << 20
"""Size of a simulated block, large enough for limits relative to the pool to act as in a daemon."""
STEP_TOKENS = 8192
"""Tokens that an engine computes before it stores them."""
MAX_LOOKUPS = 64
"""Lookups that an engine repeats for pending blocks before it computes them."""
SESSION = LEASE = 1
GIVER = 1
"""The owner of all hints: a trace does not say whose its prompts are."""
WITH_HINTS = "+hints"
"""Suffix of a policy's name in results with the trace's hints."""


class DiskPlan(NamedTuple):
    """A disk below the pool."""

    blocks: int
    mode: WriteMode = WriteMode.AUTO
    per_day_blocks: int = 0
    """Blocks that may be written per day once the disk was filled; 0 for no limit."""


class Replayed(NamedTuple):
    policy: str
    blocks: int
    accesses: int
    hits: int
    """Keys found before the first that was not, in the pool or on the disk."""
    written: int
    """Blocks written to the pool."""
    disk: DiskPlan | None = None
    disk_hits: int = 0
    """Hits that only the disk had."""
    disk_written: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Blocks of the pool and of the disk."""
        return self.blocks, self.disk.blocks if self.disk is not None else 0

    def percent(self, count: int) -> float:
        return 100 * count / max(1, self.accesses)

    @property
    def hit_percent(self) -> float:
        return self.percent(self.hits)


class Silence:
    """A listener that does nothing."""

    def stored(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    removed = cleared = stored


def open_cache(policy: str, blocks: int, clock: Callable[[], float] = lambda: 0.0) -> Cache:
    """Make a cache with space for this many blocks, all of which leases may pin."""
    region_blocks = max(1, min(MAX_REGION_BLOCKS, blocks // REGIONS))
    slots = SlotAllocator(blocks * BLOCK_BYTES, region_blocks * BLOCK_BYTES)
    geometry = TableGeometry(slots.pool_bytes, slots.region_bytes)
    table = SlotTable(memoryview(mmap.mmap(-1, geometry.size_bytes)), geometry, new=True)
    made = make_policy(policy, slots.pool_bytes, geometry.slots)
    cache = Cache(slots, table, made, Silence(), clock, leased_share=1.0)
    if isinstance(made, Learned):
        curve = HitRatioCurve(slots.pool_bytes, clock)
        fallback = LruFallback(curve, made)
        cache.prompts.on_counted, cache.prompts.on_offered = curve.requested, curve.stored
        cache.prompts.watchers.append(lambda _: fallback.judge())
    return cache


def open_namespace(cache: Cache, trace: RequestTrace, fingerprint: bytes = bytes(32)) -> Namespace:
    groups = [GroupSpec("full", trace.tokens_per_block)]
    namespace, _ = cache.namespaces.open(Namespace(fingerprint, trace.name, 1, KEY_BYTES, groups, "{}"))
    cache.namespaces.register_rank(namespace, 0, [BLOCK_BYTES], None)
    return namespace


def replay(
    trace: RequestTrace, policy: str, blocks: int, disk: DiskPlan | None = None, *, hints: bool = False
) -> Replayed:
    """Replay a trace like an engine: for each request a lookup, then the store of the missing blocks. ``hints``: obey
    the trace's."""
    now = 0.0
    cache = open_cache(policy, max(1, min(blocks, trace.accesses)), lambda: now)
    namespace = open_namespace(cache, trace)
    below = None if disk is None else SimulatedDisk(cache, Silence(), lambda: now, BLOCK_BYTES, *disk)
    step_blocks = max(1, STEP_TOKENS // max(1, trace.tokens_per_block))
    hits, name = 0, policy + WITH_HINTS * hints
    given = deque(trace.hints if hints else ())
    for number, keys in enumerate(trace.requests):
        while given and given[0].before <= number:
            one = given.popleft()
            now = max(now, one.seconds) if trace.seconds else 0.0
            cache.hint(namespace, one.action, [(0, one.keys)], one.priority, one.ttl_s, giver=GIVER)
        now = max(now, trace.seconds[number]) if trace.seconds else 0.0
        cache.order.tick()
        hits += request(cache, namespace, keys, below, step_blocks)
    in_pool, written = namespace.counters.prefix_keys_ready, namespace.counters.stored_blocks
    if below is None:
        return Replayed(name, blocks, trace.accesses, hits, written)
    below.close()
    written -= below.promoted
    return Replayed(name, blocks, trace.accesses, hits, written, disk, hits - in_pool, below.written)


def request(
    cache: Cache, namespace: Namespace, keys: bytes, disk: SimulatedDisk | None = None, step_blocks: int = 2**30
) -> int:
    """Look up, then store the missing blocks in steps between which a disk works. Returns the length of the hit run."""
    (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], giver=GIVER)
    cache.prompts.report()
    for _ in range(MAX_LOOKUPS):
        if disk is None or PENDING not in states:
            break
        disk.settle()
        (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], again=True, giver=GIVER)
    if (ready := states.count(READY)) < len(states):
        lacking, before = keys[ready * KEY_BYTES :], keys[: ready * KEY_BYTES][-KEY_BYTES:]
        if not states.startswith(bytes([READY]) * ready):
            lacking = np.frombuffer(keys, np.uint64)[np.frombuffer(states, np.uint8) != READY].tobytes()
        for begin in range(0, len(lacking), step_blocks * KEY_BYTES):
            offered = lacking[begin : begin + step_blocks * KEY_BYTES]
            part = StorePart(0, offered, before={0: before} if before else {})
            stored, before = cache.stores.begin(namespace, 0, [part]), offered[-KEY_BYTES:]
            cache.stores.commit(stored, [[1] * len(part.copy) for part in stored])
            if disk is not None:
                disk.tick()
    cache.leases.end(SESSION, [LEASE])
    return len(states) - len(states.lstrip(bytes([READY])))
