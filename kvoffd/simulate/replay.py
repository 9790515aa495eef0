"""One trace through the daemon's cache, over a slot table in memory and a pool without any."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned
from kvoffd.cache.lru_fallback import LruFallback
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import make_policy
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd.simulate.trace import KEY_BYTES, Trace
from kvoffd_proto.messages import READY, GroupSpec

BLOCK_BYTES = 1 << 20
"""Of a simulated block, so that what is bounded by parts of the pool is bounded as in a daemon's."""
REGIONS, MAX_REGION_BLOCKS = 64, 256
"""As a pool is cut, but that no region has a rest in which there is no room for a block."""
SESSION = LEASE = 1


class Replayed(NamedTuple):
    policy: str
    blocks: int
    accesses: int
    hits: int
    """Keys found before the first that was not."""
    written: int

    @property
    def hit_percent(self) -> float:
        return 100 * self.hits / max(1, self.accesses)

    @property
    def written_percent(self) -> float:
        return 100 * self.written / max(1, self.accesses)


class Silence:
    """A listener that does nothing."""

    def stored(self, *args: object, **kwargs: object) -> None:
        """Nothing is done."""

    removed = cleared = stored


class Offered(NamedTuple):
    """The store of one request."""

    keys: bytes
    group: int = 0
    first_blocks: Mapping[int, int] = MappingProxyType({})
    starts: tuple[int, ...] = (0,)


def open_cache(policy: str, blocks: int, clock: Callable[[], float] = lambda: 0.0) -> Cache:
    """A cache with room for so many blocks, all of which leases may pin."""
    region_blocks = max(1, min(MAX_REGION_BLOCKS, blocks // REGIONS))
    slots = SlotAllocator(blocks * BLOCK_BYTES, region_blocks * BLOCK_BYTES)
    geometry = TableGeometry(slots.pool_bytes, slots.region_bytes)
    table = SlotTable(memoryview(mmap.mmap(-1, geometry.size_bytes)), geometry, new=True)
    made = make_policy(policy, slots.pool_bytes, geometry.slots)
    cache = Cache(slots, table, made, Silence(), clock, leased_share=1.0)
    if isinstance(made, Learned):
        curve = HitRatioCurve(slots.pool_bytes, clock)
        fallback = LruFallback(curve, made)
        cache.watchers += [curve.requested, lambda _: fallback.judge()]
    return cache


def open_namespace(cache: Cache, trace: Trace, fingerprint: bytes = bytes(32)) -> Namespace:
    groups = [GroupSpec("full", trace.tokens_per_block)]
    namespace, _ = cache.open_namespace(Namespace(fingerprint, trace.name, 1, KEY_BYTES, groups, "{}"))
    cache.register_rank(namespace, 0, [BLOCK_BYTES], None)
    return namespace


def replay(trace: Trace, policy: str, blocks: int) -> Replayed:
    """Replay a trace as an engine would ask: a request's lookup, then the store of what is not there."""
    cache = open_cache(policy, max(1, min(blocks, trace.accesses)))
    namespace = open_namespace(cache, trace)
    for keys in trace.requests:
        request(cache, namespace, keys)
    counters = namespace.counters
    return Replayed(policy, blocks, trace.accesses, counters.prefix_keys_ready, counters.stored_blocks)


def request(cache: Cache, namespace: Namespace, keys: bytes) -> None:
    """A lookup, and the store of what is not there."""
    (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)])
    cache.note_requests()
    if (ready := states.count(READY)) < len(states):
        lacking = keys[ready * KEY_BYTES :]
        if not states.startswith(bytes([READY]) * ready):
            lacking = np.frombuffer(keys, np.uint64)[np.frombuffer(states, np.uint8) != READY].tobytes()
        ticket = cache.begin_store(namespace, 0, [Offered(lacking)])
        cache.commit_store(ticket, [[1] * len(part.copy) for part in ticket.parts])
    cache.release(SESSION, [LEASE])
