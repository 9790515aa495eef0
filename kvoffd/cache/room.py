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
from kvoffd.cache.shares import Claim, Shares, Whose
from kvoffd.pool.pool import Pool
from kvoffd.system.files import OnError

GIVEN_UP_AT_ONCE = 2048
"""Blocks that one store evicts, besides one for each of its own, of a namespace that has more than its maximum: where
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
        self.shares = Shares(slots.pool_bytes, clock)
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
        return self._known_bytes + SLOT_BYTES * len(self.holders) + self.shares.nbytes

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

    def claim(self, namespace: Namespace) -> Claim | None:
        """What a namespace that is about to take slots may take from whom; None where nobody has limits."""
        if not self.shares:
            return None
        self.shares.note_use(namespace)
        return Claim(self.shares, namespace, self.namespaces.values())

    def take_slots(
        self,
        namespace: Namespace,
        slot_bytes: int,
        count: int,
        protected: Set[Block],
        node: int | None = None,
        worth: float = inf,
        claim: Claim | None = None,
        block_bytes: int = 0,
    ) -> list[int]:
        """Take up to ``count`` slots, evicting what is neither pinned nor protected: their offsets, ascending.

        Only what the policy says is worth less than ``worth`` is evicted, and only what the ``claim`` allows.
        ``block_bytes``: what each counts as towards the namespace's maximum, of which other ranks are to have their
        part; 0 for the shards of blocks that are begun, which may pass it.
        """
        if claim is not None and claim.room < inf:
            count = self._room_below_maximum(claim, slot_bytes, count, protected, worth, block_bytes)
        count = self._room_in_index(namespace, count, protected, worth, claim)
        offsets = self._slots.take(slot_bytes, count, node)
        with OnError(lambda: self._slots.free(offsets)):
            while (lacking := count - len(offsets)) > 0:
                if not (
                    self._give_up_half_stored(slot_bytes * lacking, protected)
                    or self._give_up_inherited(slot_bytes, lacking, claim)
                ):
                    victims = self._victims(slot_bytes, lacking, protected, worth, claim)
                    if not victims:
                        break
                    self.evict(victims)
                # Nothing came free if it was the pool's last region, too short for this size: the next one will do.
                offsets.extend(self._slots.take(slot_bytes, lacking, node))
        if claim is not None:
            claim.take(slot_bytes * len(offsets))
        return sorted(offsets)

    def _victims(
        self, slot_bytes: int, count: int, protected: Set[Block], worth: float, claim: Claim | None
    ) -> list[Block]:
        slots, holders, once = self._slots, self.holders, self.inherited is not None
        if claim is None:
            return choose_victims(self._ordered(worth), slots, holders, slot_bytes, count, protected, None, once=once)
        if owed := claim.owed:
            # Whatever that is worth: a share that the policy fills with others' blocks would be none.
            others, wanted = claim.candidates(self._ordered(inf), Whose.OTHERS), min(count, -(-owed // slot_bytes))
            if found := choose_victims(others, slots, holders, slot_bytes, wanted, protected, claim, once=once):
                return found
        both = claim.candidates(self._ordered(worth), Whose.BOTH)
        return choose_victims(both, slots, holders, slot_bytes, count, protected, claim, once=once)

    def _room_below_maximum(
        self, claim: Claim, slot_bytes: int, count: int, protected: Set[Block], worth: float, block_bytes: int
    ) -> int:
        """How many of ``count`` slots a namespace may take, evicting its own blocks where it has its maximum."""
        each = max(slot_bytes, block_bytes)
        budget = count + GIVEN_UP_AT_ONCE
        own = [number for number, (owner, _) in self.inherited_owners.items() if owner is claim.namespace]
        while (lacking := ceil((count * each - claim.room) / each)) > 0 and budget > 0:
            if not (given := self._give_up(min(lacking, budget), own, claim)):
                break  # inherited blocks are older than what is here
            budget -= given
        if claim.room < count * each and budget > 0:
            victims: list[Block] = []
            for block in _loose(claim.candidates(self._ordered(worth), Whose.OWN), protected):
                victims.append(block)
                claim.evict(block)
                if claim.room >= count * each or len(victims) >= budget:
                    break
            self.evict(victims)
        return max(0, min(count, int(claim.room // each))) if block_bytes else count

    def _give_up_half_stored(self, wanted_bytes: int, protected: Set[Block]) -> bool:
        """Free slots of half-stored blocks where these have more than their part; False where they have not."""
        blocks = self.half_stored.beyond(self._slots.pool_bytes // HALF_STORED_PART, wanted_bytes, protected)
        self.drop_half_stored(blocks)
        return bool(blocks)

    def _give_up_inherited(self, slot_bytes: int, count: int, claim: Claim | None) -> bool:
        """Free about ``count`` slots of the oldest inherited blocks; False where there are none that may go."""
        if self.inherited is None:
            return False
        may_go = [
            number
            for number, (owner, group) in self.inherited_owners.items()
            if slot_bytes in self.inherited.groups[number].slot_bytes
            and (claim is None or claim.may_take_from(owner, count * owner.block_bytes(group)))
        ]
        each = min((self.inherited.groups[number].slot_bytes.count(slot_bytes) for number in may_go), default=1)
        return self._give_up(ceil(count / each), may_go, claim) > 0

    def _give_up(self, most: int, groups: Collection[int], claim: Claim | None) -> int:
        """Free the slots of the oldest inherited blocks of groups, up to ``most``. Returns how many blocks went."""
        if self.inherited is None or not groups:
            return 0
        found = list(self.inherited.give_up(most, groups))
        for some in found:
            namespace, group = self.inherited_owners[some.number]
            if claim is not None:
                claim.give_up(namespace, len(some.offsets) * namespace.block_bytes(group))
            self.let_go(some, MissReason.EVICTED)
        return sum(len(some.offsets) for some in found)

    def return_slots(self, offsets: Sequence[int]) -> None:
        """Undo ``take_slots``."""
        self._slots.free(offsets)

    def evictable(self, protected: Set[Block], claim: Claim | None) -> bool:
        if claim is None and len(self._policy) > self.pinned_blocks + len(protected):
            return True
        return any(True for _ in _loose(self._candidates(inf, claim), protected))

    def _candidates(self, worth: float, claim: Claim | None) -> Iterator[Block]:
        ordered = self._ordered(worth)
        return ordered if claim is None else claim.candidates(ordered, Whose.BOTH)

    def _ordered(self, worth: float) -> Iterator[Block]:
        return self._policy.candidates(worth)

    def _room_in_index(
        self, namespace: Namespace, count: int, protected: Set[Block], worth: float, claim: Claim | None
    ) -> int:
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
        for block in _loose(self._candidates(worth, claim), protected) if excess > 0 else ():
            victims.append(block)
            if claim is not None:
                claim.evict(block)
            excess -= block.index_bytes
            if excess <= 0:
                break
        self.evict(victims)
        return max(0, min(count, (self._max_index_bytes - self.index_bytes) // each))


def _loose(blocks: Iterator[Block], protected: Set[Block]) -> Iterator[Block]:
    """Those that are neither pinned nor protected."""
    return (block for block in blocks if not block.pins and block not in protected)
