"""Slots for what is stored: free ones, or those of blocks that go for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from math import ceil, inf

from kvoffd.cache.eviction import choose_victims
from kvoffd.cache.half_stored import HalfStored
from kvoffd.cache.holders import SlotHolders
from kvoffd.cache.inherited import InheritedBlocks, SomeBlocks
from kvoffd.cache.namespace import SLOT_BYTES, Block, MissReason, Namespace
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.quota import Allowance, Quotas
from kvoffd.pool.pool import Pool
from kvoffd.system.files import OnError

GIVEN_UP_AT_ONCE = 2048
"""Blocks that one store evicts, besides one for each of its own, of a namespace that has more than its quota: where
an operator has lowered that by far, it is reached after some stores, which find no room, and others are served between.
"""
HALF_STORED_PART = 4
"""Blocks that lack a shard keep no more than one part in so many of the pool, and of the index, from others. An
engine's ranks store a block at about the same time; one of which a rank stores nothing would else have all until they
time out.
"""


class Room(ABC):
    """Takes slots, and chooses what goes where there are too few."""

    def __init__(self, slots: Pool, policy: EvictionPolicy, clock: Callable[[], float], max_index_bytes: int) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        """All namespaces by fingerprint, in the order in which they were opened."""
        self.holders = SlotHolders(slots.region_bytes)
        self.quotas = Quotas()
        self.half_stored = HalfStored(clock)
        self._slots = slots
        self._policy = policy
        self.pinned_blocks = 0
        self._max_index_bytes = max_index_bytes
        self._known_bytes = 0
        self.inherited: InheritedBlocks | None = None
        """Blocks that an earlier daemon left and that are still to be taken over; None where there are none."""
        self.inherited_owners: dict[int, tuple[Namespace, int]] = {}
        """Whose the blocks in ``inherited`` are: namespace and group, by the number of the group there."""

    @property
    def index_bytes(self) -> int:
        """Memory of what is known of all blocks."""
        return self._known_bytes + SLOT_BYTES * len(self.holders) + self.quotas.nbytes

    @property
    def index_is_full(self) -> bool:
        return self.index_bytes >= self._max_index_bytes

    @abstractmethod
    def let_go(self, some: SomeBlocks, reason: MissReason | None) -> list[bytes]:
        """Free the slots of inherited blocks. Returns their keys."""

    @abstractmethod
    def evict(self, blocks: Sequence[Block]) -> None:
        """Let ready blocks go that nothing pins, because others need the room."""

    @abstractmethod
    def drop_half_stored(self, blocks: Sequence[Block]) -> None:
        """Drop blocks that lack a shard which nobody is writing."""

    def allowance(self, namespace: Namespace) -> Allowance | None:
        """What a namespace that is about to take slots may take; None where it has no quota."""
        quota_bytes = self.quotas.of(namespace.fingerprint)
        return None if quota_bytes is None else Allowance(namespace, quota_bytes)

    def take_slots(
        self,
        namespace: Namespace,
        slot_bytes: int,
        count: int,
        protected: Set[Block],
        node: int | None = None,
        worth: float = inf,
        allowance: Allowance | None = None,
        block_bytes: int = 0,
    ) -> list[int]:
        """Take up to ``count`` slots, evicting what is neither pinned nor protected: their offsets, ascending.

        Only what the policy says is worth less than ``worth`` is evicted. A namespace that has its quota takes from
        itself. ``block_bytes``: what each counts as towards the quota, of which other ranks are to have their part; 0
        for the shards of blocks that are begun, which may pass it.
        """
        if allowance is not None:
            count = self._room_in_quota(allowance, slot_bytes, count, protected, worth, block_bytes)
        count = self._room_in_index(namespace, count, protected, worth)
        offsets = self._slots.take(slot_bytes, count, node)
        with OnError(lambda: self._slots.free(offsets)):
            while (lacking := count - len(offsets)) > 0:
                if not (
                    self._give_up_half_stored(slot_bytes * lacking, protected)
                    or self._give_up_inherited(slot_bytes, lacking)
                ):
                    victims = choose_victims(
                        self._policy.candidates(worth),
                        self._slots,
                        self.holders,
                        slot_bytes,
                        lacking,
                        protected,
                        once=self.inherited is not None,
                    )
                    if not victims:
                        break
                    self.evict(victims)
                # Nothing came free if it was the pool's last region, too short for this size: the next one will do.
                offsets.extend(self._slots.take(slot_bytes, lacking, node))
        if allowance is not None:
            allowance.taken_bytes += slot_bytes * len(offsets)
        return sorted(offsets)

    def _room_in_quota(
        self,
        allowance: Allowance,
        slot_bytes: int,
        count: int,
        protected: Set[Block],
        worth: float,
        block_bytes: int,
    ) -> int:
        """How many of ``count`` slots a namespace may take, evicting its own blocks where it has its quota."""
        each = max(slot_bytes, block_bytes)
        budget = count + GIVEN_UP_AT_ONCE
        own = [number for number, (owner, _) in self.inherited_owners.items() if owner is allowance.namespace]
        while (lacking := ceil((count * each - allowance.room) / each)) > 0 and budget > 0:
            if not (given := self._give_up(min(lacking, budget), own)):
                break  # inherited blocks are older than what is here
            budget -= given
        excess = count * each - allowance.room
        if excess > 0 and budget > 0:
            victims: list[Block] = []
            for block in _loose(self.quotas.own(allowance.namespace, self._policy.candidates(worth)), protected):
                victims.append(block)
                excess -= block.slot_bytes
                if excess <= 0 or len(victims) >= budget:
                    break
            self.evict(victims)
        return max(0, min(count, allowance.room // each)) if block_bytes else count

    def _give_up_half_stored(self, wanted_bytes: int, protected: Set[Block]) -> bool:
        """Free slots of half-stored blocks where these have more than their part; False where they have not."""
        blocks = self.half_stored.beyond(self._slots.pool_bytes // HALF_STORED_PART, wanted_bytes, protected)
        self.drop_half_stored(blocks)
        return bool(blocks)

    def _give_up_inherited(self, slot_bytes: int, count: int) -> bool:
        """Free about ``count`` slots of the oldest inherited blocks; False where there are none that may go."""
        if self.inherited is None:
            return False
        may_go = [number for number in self.inherited_owners if slot_bytes in self.inherited.groups[number].slot_bytes]
        each = min((self.inherited.groups[number].slot_bytes.count(slot_bytes) for number in may_go), default=1)
        return self._give_up(ceil(count / each), may_go) > 0

    def _give_up(self, most: int, groups: Collection[int]) -> int:
        """Free the slots of the oldest inherited blocks of groups, up to ``most``. Returns how many blocks went."""
        if self.inherited is None or not groups:
            return 0
        found = list(self.inherited.give_up(most, groups))
        for some in found:
            self.let_go(some, MissReason.EVICTED)
        return sum(len(some.offsets) for some in found)

    def return_slots(self, offsets: Sequence[int]) -> None:
        """Undo ``take_slots``."""
        self._slots.free(offsets)

    def evictable(self, protected: Set[Block]) -> bool:
        if len(self._policy) > self.pinned_blocks + len(protected):
            return True
        return any(True for _ in _loose(self._policy.candidates(inf), protected))

    def _room_in_index(self, namespace: Namespace, count: int, protected: Set[Block], worth: float) -> int:
        """How many of ``count`` more slots the index has memory for, evicting blocks where it has too little.

        Small blocks cost more memory to know than they hold, and would be the daemon's end before the pool is full.
        """
        each = namespace.index_bytes_per_block + SLOT_BYTES
        wanted = count * each
        # Where there is less memory than an earlier daemon had, more of its blocks go later.
        excess = min(self.index_bytes + wanted - self._max_index_bytes, 2 * wanted)
        if excess <= 0:
            return count
        stale = self.half_stored.beyond_in_index(self._max_index_bytes // HALF_STORED_PART, excess, protected)
        excess -= sum(block.index_bytes for block in stale)
        self.drop_half_stored(stale)
        victims: list[Block] = []
        for block in _loose(self._policy.candidates(worth), protected) if excess > 0 else ():
            victims.append(block)
            excess -= block.index_bytes
            if excess <= 0:
                break
        self.evict(victims)
        return max(0, min(count, (self._max_index_bytes - self.index_bytes) // each))


def _loose(blocks: Iterator[Block], protected: Set[Block]) -> Iterator[Block]:
    """Those that are neither pinned nor protected."""
    return (block for block in blocks if not block.pins and block not in protected)
