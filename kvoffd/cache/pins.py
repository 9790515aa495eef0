"""What keeps blocks where they are: leases of sessions, and tickets of running stores and loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.namespace import Block, Namespace


@dataclass(slots=True, eq=False)
class Lease:
    """Read pins on the ready blocks of one lookup, or of several that extend each other."""

    lease_id: int
    owner: int
    namespace: Namespace
    deadline: float = 0.0
    """Time of the clock, in seconds, from which the lease may be ended."""
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    """By group, in the order of the request: root first. Once for each time a key was asked for, normally once."""
    untouched: dict[int, list[Block]] = field(default_factory=dict)
    """By group: the blocks whose use is not noted yet."""
    keys: int = 0
    """Ready keys that its lookups were told of."""
    nbytes: int = 0
    """Pool bytes of these keys' blocks."""
    loaded_ranks: set[int] = field(default_factory=set)
    """Ranks that have loaded under the lease."""
    loaded: set[tuple[int, bytes]] = field(default_factory=set)
    """Group and first key of each load that was counted: other ranks load the same."""
    loaded_tokens: Counter[int] = field(default_factory=Counter)
    """By group, tokens that were loaded."""

    by_key: dict[int, dict[bytes, Block]] = field(default_factory=dict, init=False)
    """What ``LeaseTable.by_key`` has made, by group."""

    def add(self, group: int, blocks: list[Block]) -> None:
        self.blocks.setdefault(group, []).extend(blocks)
        self.by_key.pop(group, None)


@dataclass(frozen=True)
class LeaseBounds:
    """How much may be leased, so that others find room in the pool and what ends a session's leases is done soon."""

    max_keys: int
    """Of one session."""
    max_bytes: int
    """Pool bytes. The first half is for whoever comes; beyond it each session that holds leases has an equal share."""


@dataclass(slots=True, eq=False)
class Held:
    """What one session has leased."""

    leases: set[int] = field(default_factory=set)
    keys: int = 0
    nbytes: int = 0
    """A block counts once for each lease that it is under."""
    shared_bytes: int = 0
    """Of these, bytes that are known to be counted more than once."""
    counted_until: float = float("-inf")
    """Until then nobody looks again how much is counted more than once."""


class LeaseTable:
    """The live leases, by id and by owner. All have the same time to live, so the dict is in order of deadline."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[int, Held] = {}

    @property
    def owners(self) -> int:
        """Sessions that hold leases."""
        return len(self._by_owner)

    def held(self, owner: int) -> Held:
        """What the owner has leased; nothing where it has no lease."""
        return self._by_owner.get(owner) or Held()

    def count(self, lease: Lease, keys: int, nbytes: int) -> None:
        """Note that a live lease got more."""
        held = self._by_owner[lease.owner]
        lease.keys += keys
        lease.nbytes += nbytes
        held.keys += keys
        held.nbytes += nbytes

    def by_key(self, lease: Lease, group: int) -> dict[bytes, Block]:
        """A lease's blocks of one group. Made when it is first asked for, since the parts of a load ask each."""
        if (known := lease.by_key.get(group)) is None:
            known = lease.by_key[group] = {block.key: block for block in lease.blocks.get(group, ())}
        return known

    def add(self, lease: Lease, now: float) -> None:
        """Enter a new lease, alive until ``now`` plus the time to live."""
        assert lease.lease_id not in self._leases
        lease.deadline = now + self._ttl_s
        self._leases[lease.lease_id] = lease
        self._by_owner.setdefault(lease.owner, Held()).leases.add(lease.lease_id)

    def get(self, lease_id: int) -> Lease | None:
        """The lease, if it is alive."""
        return self._leases.get(lease_id)

    def owned(self, owner: int, lease_id: int) -> Lease | None:
        """The lease, if it is alive and belongs to ``owner``."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.owner == owner else None

    def remove(self, lease: Lease) -> None:
        """Remove a lease that ended."""
        del self._leases[lease.lease_id]
        held = self._by_owner[lease.owner]
        held.leases.remove(lease.lease_id)
        held.keys -= lease.keys
        held.nbytes -= lease.nbytes
        held.shared_bytes = 0
        if not held.leases:
            del self._by_owner[lease.owner]

    def overdue(self, now: float, most: int) -> list[Lease]:
        """Leases whose deadline has come, the first ``most`` of them."""
        return list(takewhile(lambda lease: lease.deadline <= now, islice(self._leases.values(), most)))

    def of_owner(self, owner: int) -> list[Lease]:
        return [self._leases[lease_id] for lease_id in self.held(owner).leases]

    def count_of(self, owner: int) -> int:
        return len(self.held(owner).leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)


@dataclass(slots=True, eq=False)
class StoreTicket:
    """One group of a running store. Indices count the keys that were given; keys in no list are present already."""

    namespace: Namespace
    rank: int
    group: int
    copy: list[int] = field(default_factory=list)
    """Indices of the keys to copy, ascending."""
    offsets: list[int] = field(default_factory=list)
    """Pool offset in bytes of the slot for each key to copy."""
    dropped: list[int] = field(default_factory=list)
    """Indices of the keys that found no room, ascending."""
    blocks: list[Block] = field(default_factory=list)
    """The block for each key to copy; this rank's shard of it belongs to the ticket until its end."""
    present: list[Block] = field(default_factory=list)
    """Blocks of the job that were there before, not to be evicted for its other keys."""
    checksums: list[int] = field(default_factory=list)
    """Checksum of the shard for each key to copy, set before the ticket is committed; empty where none are taken."""
    again: list[int] = field(default_factory=list)
    """Indices of the keys that are copied, declined, or found no room, under an earlier index."""
    declined: list[int] = field(default_factory=list)
    """Indices of the keys that the policy did not want stored, ascending."""
    tokens: Mapping[bytes, BlockTokens] = field(default_factory=lambda: NO_TOKENS)
    """Of its keys, where its store told them; set before the ticket is committed."""


@dataclass(slots=True, eq=False)
class LoadTicket:
    """One group of a running load. Its blocks stay until its end, whatever becomes of the lease."""

    rank: int
    lease_id: int
    blocks: list[Block]
    offsets: list[int]
    """Pool offset in bytes of the slot of each key."""
    first_block: int = 0
    """Engine block of the first key from which on it is read."""
    lease: Lease | None = None
    """It may have ended since."""
    tokens: int = 0
    """That it brings, of its group."""
