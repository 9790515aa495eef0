"""Blocks on their way from a tier to the pool, and for whom."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.namespace import Group
from kvoffd.cache.tickets import FillTicket, Lease
from kvoffd.tiers.header import BlockGroup

if TYPE_CHECKING:
    from kvoffd.tiering.promotion_source import PromotionSource


class NotRead(StrEnum):
    """Reasons for which a block that a tier has is not read to its end, besides the ``Result`` of a read."""

    NO_SPACE = "no_space"  # leases may not pin it, or the pool has no slots for it
    QUOTA = "quota"  # its namespace may not have more of the pool
    OVERDUE = "overdue"  # its read was given up, or reads that hang keep it from being begun
    SLOWER = "slower"  # the engine computes it in less time


class Blocked(NamedTuple):
    """Reason for which a queue cannot begin its next block, and the time since which it cannot."""

    reason: NotRead
    """NO_SPACE or OVERDUE: as this its fills fail if it is blocked for as long as a block may take to read."""
    since: float


@dataclass(slots=True, eq=False)
class JointQueues:
    """Queues whose blocks one lookup waits for, of all its groups and sources. Space is reserved for all or none: two
    prompts with a part each would wait for one another."""

    lease: Lease
    """The lookup's lease."""
    members: list[FillQueue] = field(default_factory=list)
    """Those of them that have blocks left, reserved ones included."""


@dataclass(slots=True, eq=False)
class FillQueue:
    """Blocks of one group that one lookup has a source read: those that wait for it, in order, and those under way."""

    session: int
    """Session of that lookup, NO_SESSION for a prefetch."""
    joint: JointQueues
    """The queues that get space together with this one: those of the last lookup that joined it before it had space.
    Engines repeat lookups under new leases."""
    group: Group
    block_group: BlockGroup
    """The group, for tiers."""
    source: PromotionSource
    fills: OrderedDict[Fill, None] = field(default_factory=OrderedDict)
    """Fills that have not begun."""
    under_way: int = 0
    """Number of blocks that are being read, without those that were given up."""
    is_reserved: bool = False
    """Whether leases may pin all of these blocks: no other queue gets their space. Never of a prefetch."""
    blocked: Blocked | None = None
    """None if it can begin, or its turn has not come."""

    @property
    def queued_bytes(self) -> int:
        return len(self.fills) * self.group.block_bytes


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup requested and a tier has. It is settled once: ``PromotionSource.settle`` counts its key for
    all lookups that asked for it, and none waits for it any more.

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
    """Time when its read began, if it has."""
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
UnsettledFills = dict[int, dict[bytes, Fill]]
"""Fills that are not settled, of all sources, by the group's tag and by key. No group has an empty dict."""
