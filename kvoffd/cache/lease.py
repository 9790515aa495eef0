"""Leases: read pins with an owner and a time to live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvoffd.cache.block import Block
from kvoffd.cache.namespace import Namespace


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on the ready blocks of one lookup: one for each time a block was asked for, which is once as a rule."""

    lease_id: int
    owner: int
    """The session that asked."""
    namespace: Namespace
    deadline: float = 0.0
    """Time of the clock, in seconds, from which it may be ended."""
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    """By group, in the order of the request: root first."""
    loaded_ranks: set[int] = field(default_factory=set)
    """Ranks that have loaded under it."""

    @property
    def pinned(self) -> int:
        """Pins under the lease."""
        return sum(map(len, self.blocks.values()))

    def by_key(self, group: int) -> dict[bytes, Block]:
        """The lease's blocks of one group. Made when asked for: most leases are read once, by one load."""
        return {block.key: block for block in self.blocks.get(group, ())}


class LeaseBook:
    """The live leases, by id and by owner. All have the same time to live, so the dict is in order of deadline."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[int, set[int]] = {}

    def add(self, lease: Lease, now: float) -> None:
        """Enter a new lease, alive until ``now`` plus the time to live."""
        assert lease.lease_id not in self._leases
        lease.deadline = now + self._ttl_s
        self._leases[lease.lease_id] = lease
        self._by_owner.setdefault(lease.owner, set()).add(lease.lease_id)

    def get(self, lease_id: int) -> Lease | None:
        """The lease, if it is alive."""
        return self._leases.get(lease_id)

    def owned(self, owner: int, lease_id: int) -> Lease | None:
        """The lease, if it is alive and belongs to ``owner``."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.owner == owner else None

    def renew(self, lease: Lease, now: float) -> None:
        """Put the deadline off, and the lease to the end of the order."""
        lease.deadline = now + self._ttl_s
        self._leases[lease.lease_id] = self._leases.pop(lease.lease_id)

    def remove(self, lease: Lease) -> None:
        """Strike a lease out."""
        del self._leases[lease.lease_id]
        owned = self._by_owner[lease.owner]
        owned.remove(lease.lease_id)
        if not owned:
            del self._by_owner[lease.owner]

    def overdue(self, now: float) -> list[Lease]:
        """Leases whose deadline has come."""
        found: list[Lease] = []
        for lease in self._leases.values():
            if lease.deadline > now:
                break
            found.append(lease)
        return found

    def of_owner(self, owner: int) -> list[Lease]:
        """The owner's leases."""
        return [self._leases[lease_id] for lease_id in self._by_owner.get(owner, ())]

    def count_of(self, owner: int) -> int:
        """Number of the owner's leases."""
        return len(self._by_owner.get(owner, ()))

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
