"""Which keys of a store get a slot: those that the policy admits, as far as there is room."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import inf

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Block, MissReason, Namespace
from kvoffd.cache.policies import DECLINED, EvictionPolicy
from kvoffd.cache.quota import Allowance
from kvoffd.system.files import OnError


@dataclass(slots=True)
class Admission:
    """What becomes of the keys of a store that lack a shard, by their numbers, ascending."""

    admitted: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Slots for those that are admitted, ascending."""
    declined: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Admitter:
    """Takes slots for the keys of one store, of one rank and group."""

    blocks: Blocks
    policy: EvictionPolicy
    namespace: Namespace
    group: int
    slot_bytes: int
    node: int | None
    protected: Set[Block]
    """Not evicted for them."""
    allowance: Allowance | None

    def admit(
        self, keys: Sequence[bytes], lacking: Sequence[int], fresh: Sequence[int], starts: Sequence[int] | None
    ) -> Admission:
        """Take slots for the ``lacking`` ones of ``keys``, given by number. What other ranks store is admitted already.

        ``fresh``: those of them that have no block. ``starts``: numbers of the keys at which chains begin; None to
        admit all, whatever the policy says.
        """
        found = Admission()
        with OnError(lambda: self.blocks.return_slots(found.offsets)):
            self._admit(keys, lacking, fresh, starts, found)
        found.admitted.sort()
        found.offsets.sort()
        return found

    def _admit(
        self,
        keys: Sequence[bytes],
        lacking: Sequence[int],
        fresh: Sequence[int],
        starts: Sequence[int] | None,
        found: Admission,
    ) -> None:
        if len(fresh) < len(lacking):
            others = set(fresh)
            self._take([number for number in lacking if number not in others], inf, found, 0)
        block_bytes = self.namespace.block_bytes(self.group)
        if not fresh or starts is None:
            self._take(fresh, inf, found, block_bytes)
            return
        begins = sorted({bisect_left(fresh, start) for start in starts})
        at = 0
        offered = keys if len(fresh) == len(keys) else [keys[number] for number in fresh]
        for count, worth in self.policy.offers(self.namespace, self.group, offered, begins):
            self._take(fresh[at : at + count], self._limit(worth), found, block_bytes)
            at += count
        assert at == len(fresh)
        if found.declined:
            self.policy.declined(self.namespace, self.group, [keys[number] for number in found.declined])

    def _limit(self, worth: float) -> float:
        """What blocks may be worth that give way to keys of some worth.

        What the pool keeps for a moment only is on its way to the tiers below.
        """
        return inf if self.blocks.tiering is not None and worth != DECLINED else worth

    def _take(self, numbers: Sequence[int], worth: float, found: Admission, block_bytes: int) -> None:
        if worth == DECLINED:
            found.declined += numbers
            return
        blocks, count = self.blocks, len(numbers)
        offsets = blocks.take_slots(
            self.namespace, self.slot_bytes, count, self.protected, self.node, worth, self.allowance, block_bytes
        )
        found.offsets += offsets
        found.admitted += numbers[: len(offsets)]
        if left := numbers[len(offsets) :]:
            room_is_kept = worth != inf and blocks.evictable(self.protected)
            (found.declined if room_is_kept else found.dropped).extend(left)


def count_refused(blocks: Blocks, namespace: Namespace, group: int, keys: Sequence[bytes], found: Admission) -> None:
    namespace.counters.dropped_keys += len(found.dropped)
    namespace.counters.declined_keys += len(found.declined)
    for numbers, reason in ((found.dropped, MissReason.NO_SPACE), (found.declined, MissReason.REJECTED)):
        if numbers:
            blocks.misses.note(namespace, group, [keys[number] for number in numbers], reason)


def with_again(keys: Sequence[bytes], numbers: list[int], again: Sequence[int]) -> list[int]:
    """The numbers, ascending, with those under which one of these keys comes again."""
    if not numbers or not again:
        return sorted(numbers)
    names = {keys[number] for number in numbers}
    return sorted([*numbers, *(number for number in again if keys[number] in names)])
