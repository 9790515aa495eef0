"""Blocks on their way from a tier to the pool, and for whom."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.namespace import Group
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.tickets import FillTicket, Lease
from kvoffd.tiers.header import BlockGroup

if TYPE_CHECKING:
    from kvoffd.tiering.promotions import Promotions


@dataclass(slots=True, eq=False)
class FillQueue:
    """Blocks of one group that one lookup has a source read: those that wait for it, in order, and those under way."""

    first_lease: Lease
    """Lease of the lookup that asked first; it may have ended."""
    last_lease: Lease
    """Lease of the last lookup that waited for it before it had space."""
    group: Group
    block_group: BlockGroup
    """The group, for tiers."""
    source: Promotions
    fills: OrderedDict[Fill, None] = field(default_factory=OrderedDict)
    """Fills that have not begun."""
    under_way: int = 0
    """Number of blocks that are being read."""
    together: list[FillQueue] = field(default_factory=list)
    """All queues that the last lease waits for, of all sources: space is reserved for all of them or none."""
    is_reserved: bool = False
    """Whether leases may pin all of these blocks: no other queue gets their space."""
    no_space_since: float | None = None
    """Time since which it has no space in the pool; None if it has some, or its turn has not come."""
    fails_as: str = ""
    """Reason for which its fills fail if that lasts too long: NO_SPACE, or OVERDUE if reads that hang have it."""

    @property
    def is_prefetch(self) -> bool:
        return self.first_lease.session == NO_SESSION

    @property
    def queued_bytes(self) -> int:
        return len(self.fills) * self.group.block_bytes


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup requested and a tier has. It is settled once: ``Promotions.settle`` counts its key for all
    lookups that asked for it, and none waits for it any more.

    | event                           | method              | counted as        | its slots             |
    |---------------------------------|---------------------|-------------------|-----------------------|
    | it was read                     | _end_read           | found             | READY, leases pin it  |
    | nobody waits for it             | drop_unawaited      | found, see below  | none, it was queued   |
    | the same at its turn (UNWANTED) | _end_read           | found, see below  | freed                 |
    | the pool has it by now          | _begin_reads        | found             | none                  |
    | no space; it has left the tier  | _fail               | miss, by reason   | none                  |
    | the read fails                  | _end_read, _fail    | miss, by Result   | freed                 |
    | the read is overdue             | _give_up_overdue    | miss, TIER_LATE   | freed when it ends    |
    | its key was removed             | settle              | miss, by reason   | freed when it ends    |

    What nobody waits for counts as found because the tier has it: the engine reports why it did not load it.
    A read that ends after its fill was settled changes nothing but its slots. One that ends as UNWANTED although a
    lookup has joined it since settles nothing: ``_queue_again``.
    """

    queue: FillQueue
    key: bytes
    ticket: FillTicket | None = None
    """Its block in the pool while the tier reads into it: the slots stay allocated until that has ended."""
    begun_at: float = 0.0
    is_settled: bool = False
    leases: dict[Lease, None] = field(default_factory=dict)
    """Leases of lookups that wait for it: they pin it once it is READY."""
    askers: list[Asker] = field(default_factory=list)
    """Positions in lookups at which it is counted as found, or as a miss, once the result is known."""

    def is_awaited(self) -> bool:
        """Return whether a lookup waits for it. For any thread."""
        return not self.is_settled and bool(self.leases)


Asker = tuple[AskedKeys, int]
"""Keys of a lookup, and a position among them."""
Coming = dict[int, dict[bytes, Fill]]
"""Fills that are not settled, from all tiers, by tag of the group and by key."""
