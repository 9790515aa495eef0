"""Other nodes' pools and a store of a simulated fleet, as tiers without bytes, threads and time.

The daemon's tiering asks them as it asks a ``SharedTier``. They answer at once, and an index of all nodes replaces a
question to each.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.namespace import Namespace
from kvoffd.simulate.disk import whole_block
from kvoffd.tiers.fullness import Fullness
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.store import Store, StoreUsage
from kvoffd.tiers.store_health import LOOK_S
from kvoffd.tiers.tier import (
    ABSENT,
    PEER,
    PRESENT,
    Found,
    ReadEnd,
    Result,
    Tier,
    TierListener,
    TierStats,
    WriteEnd,
)
from kvoffd_proto.events import MEDIUM_CPU

Post = Callable[[Callable[[], None]], None]


class _Change(NamedTuple):
    at: float
    medium: str
    keys: Sequence[bytes]
    node: int
    is_there: bool


class BlockPlaces:
    """Nodes that have each block in their pool, and on their disks, by the nodes' KV events.

    A set of nodes is an int whose bit n stands for node n.

    Args:
        age_s: time after which a change is known here, once ``update`` is called.

    Attributes:
        pools: nodes that have a block in their pool, by key: one object, which changes.
    """

    def __init__(self, clock: Callable[[], float], age_s: float = 0.0) -> None:
        self._clock, self._age_s = clock, age_s
        self._places: dict[str, dict[bytes, int]] = defaultdict(dict)
        """Nodes by medium and key; no key without a node."""
        self.pools: Mapping[bytes, int] = self._places[MEDIUM_CPU]
        self._unknown: deque[_Change] = deque()
        """Changes that are not known yet."""

    def changed(self, medium: str, keys: Sequence[bytes], node: int, *, is_there: bool) -> None:
        """Record that a node has blocks on this medium from now on, or has them no more."""
        change = _Change(self._clock(), medium, keys, node, is_there)
        if self._age_s:
            self._unknown.append(change)
        else:
            self._apply(change)

    def _apply(self, change: _Change) -> None:
        nodes_of, bit = self._places[change.medium], 1 << change.node
        for key in change.keys:
            if change.is_there:
                nodes_of[key] = nodes_of.get(key, 0) | bit
            elif left := nodes_of.get(key, 0) & ~bit:
                nodes_of[key] = left
            else:
                nodes_of.pop(key, None)

    def update(self) -> None:
        """Take in the changes that are old enough."""
        known_until = self._clock() - self._age_s
        while self._unknown and self._unknown[0].at <= known_until:
            self._apply(self._unknown.popleft())

    def longest_prefix(self, keys: Sequence[bytes], nodes: int, least: float = 0.0, *, only_pools: bool = False) -> int:
        """Return those of ``nodes`` that have the most leading keys, each in their pool or, unless ``only_pools``, on
        their disk; all of ``nodes`` if that is less than ``least`` keys."""
        places = [self.pools] if only_pools else [*self._places.values()]
        lookups, best = [nodes_of.get for nodes_of in places], nodes
        for count, key in enumerate(keys):
            having = 0
            for nodes_of in lookups:
                having |= nodes_of(key, 0)
            if not (having := having & best):
                return best if count >= least else nodes
            best = having
        return best


class NodeEvents:
    """The KV events of one node: see ``CacheListener``."""

    def __init__(self, node: int, indexes: Sequence[BlockPlaces]) -> None:
        self._node, self._indexes = node, indexes

    def stored(
        self,
        namespace: Namespace,
        group: int,
        keys: list[bytes],
        medium: str = MEDIUM_CPU,
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> None:
        for places in self._indexes:
            places.changed(medium, keys, self._node, is_there=True)

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU) -> None:
        for places in self._indexes:
            places.changed(medium, keys, self._node, is_there=False)

    def cleared(self, namespace: Namespace) -> None:
        """Never called: a replay resets nothing."""


class _Instant(Tier):
    """A tier that is always available, and reads what it has at once."""

    def __init__(self, name: str, post: Post, listener: TierListener) -> None:
        super().__init__(name, listener)
        self._post = post

    def _has(self, key: bytes) -> bool:
        raise NotImplementedError

    def _use(self, key: bytes) -> bool:
        """Mark a block as used, if that counts there; return whether it exists."""
        return self._has(key)

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        states = bytearray([ABSENT]) * len(keys)
        self.counters.asked_keys += len(keys)
        for at, key in enumerate(keys):
            if self._has(key):
                states[at] = PRESENT
            elif prefix:
                break
        self.counters.found_keys += states.count(PRESENT)
        return Found(bytes(states))

    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        if not self._use(key):
            return False
        self.counters.read_blocks += 1
        self._post(lambda: on_end(Result.DONE, whole_block(group, key)))
        return True

    def remove(self, group: BlockGroup, keys: Sequence[bytes], *, for_all_nodes: bool = False) -> None:
        """Do nothing: a replay removes nothing."""

    def available(self) -> bool:
        return True

    def tick(self) -> None:
        """Do nothing: nothing is late."""

    def stats(self) -> TierStats:
        return replace(self.counters, errors=self.counters.errors.copy())

    def close(self, deadline_s: float) -> bool:
        return True


class SimulatedPeers(_Instant):
    """Pools of other nodes, all as one tier, which is only read. A read does not count as a use there, as in a daemon.

    Args:
        places: what each node's pool has now.

    Attributes:
        peers: nodes that are asked, as in ``BlockPlaces``.
    """

    def __init__(self, places: BlockPlaces, peers: int, post: Post, listener: TierListener) -> None:
        super().__init__(f"{PEER}others", post, listener)
        self._pools, self.peers = places.pools, peers

    def _has(self, key: bytes) -> bool:
        return bool(self._pools.get(key, 0) & self.peers)

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        return False


class StoreObjects:
    """Blocks in a store that all nodes share, which evicts the least recently used one when it is full.

    Args:
        max_blocks: number of blocks that it holds; 0 for no limit.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.evicted = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, key: bytes) -> bool:
        """Mark a block as used; return whether it exists."""
        if is_there := key in self._keys:
            self._keys.move_to_end(key)
        return is_there

    def put(self, key: bytes) -> None:
        self._keys[key] = None
        if self.max_blocks and len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)
            self.evicted += 1


class SimulatedStore(_Instant):
    """One node's connection to a store. It believes answers for as long as a daemon: a block that exists is offered
    again, which counts as a use, after ``Store.believed_s`` or once a lookup did not find it.

    Args:
        block_bytes: bytes of a block.
        pool_bytes: see ``Fullness``.
    """

    def __init__(
        self,
        objects: StoreObjects,
        block_bytes: int,
        pool_bytes: int,
        clock: Callable[[], float],
        post: Post,
        listener: TierListener,
    ) -> None:
        super().__init__("store", post, listener)
        self._objects, self._block_bytes, self._clock = objects, block_bytes, clock
        self._fullness = Fullness(self.counters, pool_bytes, clock)
        self._look_at = 0.0
        """Time from which on the store is asked how full it is."""
        self._believed: dict[bytes, float] = {}
        """Keys that the store was seen to have, and until when that is believed."""

    def _has(self, key: bytes) -> bool:
        return key in self._objects

    def _use(self, key: bytes) -> bool:
        return self._objects.use(key)

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        for key in keys:  # a daemon hears of those behind the first that is absent too
            if self._has(key):
                self._believe(key)
            else:
                self._believed.pop(key, None)
        return super().find(group, keys, prefix=prefix)

    def _believe(self, key: bytes) -> None:
        self._believed[key] = self._clock() + Store.believed_s

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        now = self._clock()
        return [self._believed.get(key, now) <= now for key in keys]

    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        if self._objects.use(block.key):
            self.counters.already_stored += 1
            result = Result.EXISTED
        else:
            self._objects.put(block.key)
            self.counters.written_blocks += 1
            self.counters.written_bytes += self._block_bytes
            result = Result.DONE
        self._believe(block.key)
        self._post(lambda: on_end(result))
        return True

    @property
    def lifetime_bytes(self) -> int:
        return self._fullness.lifetime_bytes

    def tick(self) -> None:
        if self._clock() >= self._look_at or self._fullness.wrote_much():
            self._look_at = self._clock() + LOOK_S
            size, used = self._objects.max_blocks * self._block_bytes, len(self._objects) * self._block_bytes
            self._fullness.looked(StoreUsage(size, used, self._objects.evicted))
