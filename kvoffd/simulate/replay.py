"""Replays a trace through the daemon's cache, with a slot table in memory, and a pool and tiers without bytes."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_table import select_keys
from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.learned import Learned, LruFallback
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.prompt_tokens import LoadedKeys
from kvoffd.cache.prompts import Offered
from kvoffd.cache.tickets import StorePart
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd.simulate.disk import region_blocks
from kvoffd.simulate.tiers import DiskPlan, SimulatedTiers
from kvoffd.simulate.trace import KEY_BYTES, RequestTrace, TracedHint
from kvoffd_proto.messages import COMING, READY, GroupSpec

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


class Replayed(NamedTuple):
    policy: str
    blocks: int
    accesses: int
    hits: int
    """Leading keys of the requests that were found, in the pool or on the disk: up to the first that was not."""
    written: int
    """Blocks written to the pool."""
    disk: DiskPlan | None = None
    disk_hits: int = 0
    """Hits that only the disk had."""
    disk_written: int = 0

    def percent(self, count: int) -> float:
        """Return a number of blocks in percent of all accesses."""
        return 100 * count / max(1, self.accesses)

    @property
    def hit_percent(self) -> float:
        return self.percent(self.hits)


class Silence:
    """A listener that does nothing."""

    def stored(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    removed = cleared = stored


SILENCE = Silence()


def open_cache(
    policy: str, blocks: int, clock: Callable[[], float] = lambda: 0.0, events: CacheListener = SILENCE
) -> Cache:
    """Make a cache with space for this many blocks, all of which leases may pin."""
    slots = SlotAllocator(blocks * BLOCK_BYTES, region_blocks(blocks) * BLOCK_BYTES)
    geometry = TableGeometry(slots.pool_bytes, slots.region_bytes)
    table = SlotTable(memoryview(mmap.mmap(-1, geometry.size_bytes)), geometry, new=True)
    made = make_policy(policy, slots.pool_bytes, geometry.slots)
    cache = Cache(slots, table, made, events, clock, leased_share=1.0)
    if isinstance(made, Learned):
        cache.prompts.curve = curve = HitRatioCurve(slots.pool_bytes, clock)
        fallback = LruFallback(curve, made)
        cache.prompts.watchers.append(lambda _: fallback.judge())
    return cache


def open_namespace(cache: Cache, trace: RequestTrace, fingerprint: bytes = bytes(32)) -> Namespace:
    groups = [GroupSpec("full", trace.tokens_per_block)]
    namespace, _ = cache.namespaces.open(Namespace(fingerprint, trace.name, 1, KEY_BYTES, groups, "{}"))
    cache.namespaces.register_rank(namespace, 0, [BLOCK_BYTES], None)
    return namespace


class FoundPrefix(NamedTuple):
    """The leading keys of a request that were found."""

    hits: int
    loaded: LoadedKeys | None = None
    """The sources of these keys; None if the pool had all."""


class Node:
    """A pool with its policy and the tiers below it, and the engine over it.

    Args:
        blocks: size of the pool. What exceeds the trace's accesses can never be used, and is left out.
        has_shared_tiers: whether the caller will add a store or peers to ``below``.

    Attributes:
        below: None without a disk, a store and peers.
    """

    def __init__(
        self,
        trace: RequestTrace,
        policy: str,
        blocks: int,
        clock: Callable[[], float],
        events: CacheListener = SILENCE,
        disk: DiskPlan | None = None,
        *,
        has_shared_tiers: bool = False,
    ) -> None:
        self.cache = open_cache(policy, max(1, min(blocks, trace.accesses)), clock, events)
        self.namespace = open_namespace(self.cache, trace)
        self.below: SimulatedTiers | None = None
        if disk is not None or has_shared_tiers:
            self.below = SimulatedTiers(self.cache, events, clock, disk, BLOCK_BYTES)
        self._step_blocks = max(1, STEP_TOKENS // max(1, trace.tokens_per_block))

    def serve(self, keys: bytes) -> FoundPrefix:
        """Serve a request like an engine: look up and load, then store what is missing."""
        self.cache.tick()
        return serve(self.cache, self.namespace, keys, self.below, self._step_blocks)

    def hint(self, hint: TracedHint) -> None:
        """Carry out a hint, and wait for what it has tiers bring up."""
        self.cache.hint(
            self.namespace, hint.action, [(0, hint.keys)], hint.priority, hint.ttl_s, session=SESSION, giver=GIVER
        )
        if self.below is not None:
            self.below.settle()
        self.cache.tick()
        finish_background(self.cache)

    @property
    def stored(self) -> int:
        """Blocks that the engine stored in the pool."""
        return self.namespace.counters.stored_blocks - (self.below.promoted if self.below is not None else 0)

    def close(self) -> None:
        if self.below is not None:
            self.below.close()


def replay(
    trace: RequestTrace, policy: str, blocks: int, disk: DiskPlan | None = None, *, hints: bool = False
) -> Replayed:
    """Replay a trace like an engine: for each request a lookup, then the store of the missing blocks. ``hints``: obey
    the trace's."""
    now = 0.0  # the clock of the node: of what comes next, and 0 if the trace has no times
    node = Node(trace, policy, blocks, lambda: now, disk=disk)
    hits, name = 0, f"{policy}{WITH_HINTS}" if hints else policy
    coming = deque(trace.hints if hints else ())
    for number, keys in enumerate(trace.requests):
        while coming and coming[0].before <= number:
            hint = coming.popleft()
            if trace.seconds:
                now = max(now, hint.seconds)
            node.hint(hint)
        if trace.seconds:
            now = max(now, trace.seconds[number])
        hits += node.serve(keys).hits
    node.close()
    if node.below is None:
        return Replayed(name, blocks, trace.accesses, hits, node.stored)
    in_pool = node.namespace.counters.prefix_keys_ready  # at the first lookup, before the disk brought any up
    return Replayed(name, blocks, trace.accesses, hits, node.stored, disk, hits - in_pool, node.below.written_to_disk)


def serve(
    cache: Cache, namespace: Namespace, keys: bytes, below: SimulatedTiers | None = None, step_blocks: int = 2**30
) -> FoundPrefix:
    """Look up and load, then store the missing blocks in steps between which the tiers work."""
    (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], giver=GIVER)
    cache.prompts.report()
    finish_background(cache)
    for _ in range(MAX_LOOKUPS):
        if below is None or COMING.isdisjoint(states):
            break
        below.settle()
        (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], again=True, giver=GIVER)
    lacking = np.flatnonzero(np.frombuffer(states, np.uint8) != READY).tolist()
    hits = lacking[0] if lacking else len(states)
    found = FoundPrefix(hits, _load(cache, namespace, keys[: hits * KEY_BYTES], below) if below is not None else None)
    for begin in range(0, len(lacking), step_blocks):
        step = lacking[begin : begin + step_blocks]
        before = keys[(step[0] - 1) * KEY_BYTES : step[0] * KEY_BYTES] if step[0] else b""
        offered = select_keys(keys, step, KEY_BYTES)
        cache.prompts.offered(Offered(namespace, [(namespace.groups[0], offered)]))
        cache.prompts.report()
        (ticket,) = cache.stores.begin(namespace, 0, [StorePart(0, offered, before={0: before} if before else {})])
        cache.stores.commit([ticket], [[1] * len(ticket.copy)])  # any checksums: nothing reads the blocks
        if below is not None:
            below.tick()
        finish_background(cache)
    cache.leases.end(SESSION, [LEASE])
    finish_background(cache)
    return found


def finish_background(cache: Cache) -> None:
    """Do all background work. A daemon's loop begins it after each message, and continues until the next one."""
    while cache.background():
        pass


def _load(cache: Cache, namespace: Namespace, keys: bytes, below: SimulatedTiers) -> LoadedKeys | None:
    """Load READY blocks; return their sources, as for the daemon's statistics."""
    if not keys:
        return None
    ticket = cache.begin_load(namespace, 0, LEASE, 0, keys)
    loaded = below.loaded(ticket)
    cache.end_load([ticket])
    return loaded
