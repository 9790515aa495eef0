"""Objects that the cache gives out: leases, and the tickets of running stores, fills and loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_table import BlockIds, Offsets
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.pool.allocator import SlotIds


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on the blocks that the lookups of one request found, and on those promoted for it, until its end."""

    lease_id: int
    session: int
    namespace: Namespace
    deadline: float
    blocks: BlockIds
    nbytes: int = 0
    """Bytes of the blocks that no lease pinned before."""
    coming: int = 0
    """Keys that are, or may be, on their way up from a tier for this lease."""
    asking: int = 0
    """Keys among these that a store was being asked for at the last lookup."""
    asking_bytes: int = 0
    """Pool bytes that these may take."""
    wait_s: float = 0.0
    """Expected time until they are in the pool, as of the last lookup; 0 if unknown."""
    peer: str = ""
    """Name of the only peer that is asked, as of the last lookup; empty for all."""
    covers_at_end: bool = False
    """Whether its blocks count as covered (loaded or not needed) at its end, as no report will come."""
    siblings: SessionLeases = field(default_factory=lambda: SessionLeases())
    """The active leases of its session in its namespace, of which it is one until its end."""
    ranks_done: set[int] = field(default_factory=set, init=False)
    """Ranks whose last load under it has ended: it ends once all have."""
    _ranks_loaded: dict[tuple[int, bytes], set[int]] = field(default_factory=dict, init=False)
    """Ranks that have loaded the same keys, by group and first key."""
    _loaded_tokens: dict[int, int] = field(default_factory=dict, init=False)
    """Tokens that all ranks have loaded, by group."""

    def forget_unanswered(self) -> None:
        """Take off what stores have not answered: the lookup that begins asks them for it again, and adds it again."""
        self.coming -= self.asking
        self.asking = self.asking_bytes = 0

    @property
    def certain(self) -> int:
        """Keys that are on their way up, without those that a store may lack."""
        return self.coming - self.asking

    @property
    def active(self) -> bool:
        """Whether it is in use: not ended, its namespace not reset. A prefetch never is."""
        return self in self.siblings.leases

    def count_load(self, load: LoadTicket) -> None:
        """Count a rank's load that succeeded, once all ranks have loaded the same.

        Its tokens are those of its largest group: with a sliding window, fewer blocks stand for as many tokens.
        """
        group, counters = load.group.index, self.namespace.counters
        ranks = self._ranks_loaded.setdefault((group, load.first_key), set())
        if load.rank in ranks:  # loaded again
            return
        ranks.add(load.rank)
        if len(ranks) == self.namespace.world_size:
            counted = max(self._loaded_tokens.values(), default=0)
            self._loaded_tokens[group] = self._loaded_tokens.get(group, 0) + load.tokens
            counters.loaded_keys += len(load.blocks)
            counters.count_loaded(max(0, self._loaded_tokens[group] - counted))


@dataclass(slots=True, eq=False)
class SessionLeases:
    """Active leases of one session in one namespace. A block counts once for each lease."""

    leases: dict[Lease, None] = field(default_factory=dict)
    keys: int = 0
    nbytes: int = 0
    """Sum of the leases' ``nbytes``."""

    def end(self) -> dict[Lease, None]:
        """End all of them. Returns which."""
        ended, self.leases = self.leases, {}
        self.keys = self.nbytes = 0
        return ended


class LeaseTotals(NamedTuple):
    """Sums over a session: number of leases, their keys, and their bytes."""

    leases: int
    keys: int
    nbytes: int


class StorePart(NamedTuple):
    """Keys of one group that a store offers."""

    group: int
    keys: bytes
    first_blocks: Mapping[int, int] = MappingProxyType({})
    """First engine block that is written, by key index, if it is not the key's first."""
    starts: Sequence[int] = (0,)
    """Indices of the keys at which chains begin, the first at 0; empty if there are no keys."""
    before: Mapping[int, bytes] = MappingProxyType({})
    """Key before a chain's first in its prompt, by the first one's index; none if it begins the prompt, or if that is
    unknown."""
    prompts: Sequence[int] = ()
    """Label of each chain's prompt, the same in all groups of this store. By default it is the chain's index, so that
    the first chains of all groups are one prompt's."""


@dataclass(slots=True, eq=False)
class StoreTicket:
    """One part of a rank's store, until its end. Indices are those of the part's keys, and ascending in each list once
    the store has begun; keys in no list are present, or their block belongs to another store."""

    group: Group
    part: StorePart
    blocks: BlockIds
    """Block of each key to copy. Until slots are allocated, only of keys that had one."""
    slots: SlotIds
    """This rank's slot of each block; it belongs to the store until its end."""
    copy: list[int] = field(default_factory=list)
    """Indices of the keys to copy."""
    first_blocks: Iterable[int] | None = None
    """First engine block that is written, for each key to copy; None if all begin at 0."""
    offsets: Offsets = field(default_factory=lambda: np.empty(0, np.uint64))
    """Pool offsets of the slots."""
    duplicates: list[int] = field(default_factory=list)
    """Indices of keys that repeat an earlier one, which is copied or in one of the next lists."""
    no_space: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FillTicket:
    """A block that is being read from a tier, for all ranks."""

    group: Group
    blocks: BlockIds
    """The block alone."""
    slots: SlotIds
    """Its slots by rank."""
    offsets: list[int]
    """Pool offsets of the slots in bytes."""


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A running load of one rank: its blocks stay until its end, even if the lease ends."""

    rank: int
    lease: Lease
    """The lease may have ended since, and another may have its id."""
    group: Group
    first_key: bytes
    blocks: BlockIds
    slots: SlotIds
    offsets: Offsets
    """Pool offsets of the slots."""
    tokens: int
    """Tokens of its group that it loads."""


class Check(NamedTuple):
    """A shard to compare with its checksum; if that is 0, compute it."""

    slot: int
    sequence: int
    """Sequence number of its record: the slot may have been rewritten by the time the bytes are hashed."""
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of the pool by use. The first five add up to the pool."""

    free: int
    writing: int
    ready: int
    dropped: int
    quarantined: int
    pinned: int
    """Ready and dropped bytes that a lease or a running copy needs."""
    pinned_blocks: int
