"""One trace through the daemon's cache, over slots without memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import compress
from typing import NamedTuple, cast

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.pool.pool import Pool
from kvoffd.simulate.trace import KEY_BYTES, Trace
from kvoffd_proto.messages import READY, GroupSpec

BLOCK_BYTES = 1 << 20
"""Of a simulated block, so that what is bounded by parts of the pool is bounded as in a daemon's."""
SESSION = LEASE = 1
NOTED_REQUESTS = 500
_LACKING = bytes(state != READY for state in range(256))
"""By state of a key, whether it is to be stored."""


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


class CountedSlots:
    """A pool whose slots have one size and no memory."""

    region_bytes = 256 * BLOCK_BYTES

    def __init__(self, count: int) -> None:
        self.pool_bytes = count * BLOCK_BYTES
        self._unused = range(0, self.pool_bytes, BLOCK_BYTES)
        self._free: list[int] = []

    @property
    def free_bytes(self) -> int:
        return (len(self._free) + len(self._unused)) * BLOCK_BYTES

    def slot_bytes(self, nbytes: int) -> int:
        return BLOCK_BYTES

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        keep = max(0, len(self._free) - count)
        taken = self._free[keep:]
        del self._free[keep:]
        lacking = count - len(taken)
        taken += self._unused[:lacking]
        self._unused = self._unused[lacking:]
        return taken

    def neighbours(self, offset: int) -> list[int]:
        return [offset]

    def free(self, offsets: Collection[int]) -> None:
        self._free += offsets

    def mark_all_writing(self, *owner: object) -> None:
        """Nothing is kept for a successor."""

    mark_all_ready = note_namespace = mark_all_writing


class Silence:
    """A listener to which nothing is worth a word."""

    def stored(self, *told: object, **named: object) -> None:
        """Nobody is told."""

    removed = cleared = stored


def replay(trace: Trace, policy: str, blocks: int, note: Callable[[int], None] = lambda accesses: None) -> Replayed:
    """Replay a trace as an engine would ask: a request's lookup, then the store of what is not there.

    ``note`` is told now and then how many accesses more are done.
    """
    slots = cast(Pool, CountedSlots(blocks))
    cache = BlockCache(slots, make_policy(policy, slots.pool_bytes), Silence(), lambda: 0.0)
    groups = [GroupSpec("full", trace.tokens_per_block)]
    namespace, _ = cache.open_namespace(bytes(32), trace.name, 1, KEY_BYTES, groups, "{}")
    cache.set_shard_bytes(namespace, 0, [BLOCK_BYTES])
    for first in range(0, len(trace.requests), NOTED_REQUESTS):
        some = trace.requests[first : first + NOTED_REQUESTS]
        for keys in some:
            _request(cache, namespace, keys)
        note(sum(map(len, some)) // KEY_BYTES)
    counters = namespace.counters
    return Replayed(policy, blocks, trace.accesses, counters.prefix_keys_ready, counters.stored_blocks)


def _request(cache: BlockCache, namespace: Namespace, keys: bytes) -> None:
    answer = cache.lookup(namespace, LEASE, SESSION, [(0, keys)])
    cache.touch(LEASE)
    states = answer.states[0]
    if states.count(READY) < len(states):
        lacking = list(compress(namespace.split(0, keys), states.translate(_LACKING)))
        cache.commit_store(cache.begin_stores(namespace, 0, 0, lacking, {}))
    cache.release(SESSION, [LEASE])
