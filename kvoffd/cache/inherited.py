"""Blocks inherited from an earlier daemon and still to be taken over: which they are, as arrays, and in what order.

``adopt.c`` puts the slots of each block together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.errors import KvoffdError
from kvoffd.pool.records import InheritedSlots, Ints, Kind, NamespaceRecord
from kvoffd.pool.table_format import MAX_KEY_BYTES
from kvoffd.system.native import native

Numbers: TypeAlias = npt.NDArray[np.intp]

LOOKED_AT_ONCE = 1 << 15
"""Blocks that are gone through in one step for those of some kind."""
NAMED_AT_ONCE = 1 << 12
"""Blocks whose keys are read in one step."""
LOOKS = 8
"""Such steps at once, for blocks to give up."""
SLOTS_AT_ONCE = 512
"""Slots whose blocks are taken over in one step."""
_MIN_KEY_BYTES = 8
"""As in ``OpenNamespace``."""
_GONE = -1


class Grouping(ctypes.Structure):
    """``struct grouping`` of adopt.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("slots", "blocks")),
        *((name, ctypes.c_void_p) for name in ("owners", "kind_of", "identities", "generations", "table")),
        ("mask", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("block_of", "firsts", "places", "served", "blocks_of")),
    )


class Owner(ctypes.Structure):
    """``struct owner`` of adopt.c."""

    _fields_ = (("group", ctypes.c_uint32), ("rank", ctypes.c_uint16), ("world_size", ctypes.c_uint16))


class InheritedGroup(NamedTuple):
    """A group of a namespace, of which an earlier daemon left blocks."""

    fingerprint: bytes
    group: int
    slot_bytes: tuple[int, ...]
    """By rank."""


class SomeBlocks(NamedTuple):
    number: int
    """The group's, in ``InheritedBlocks.groups``."""
    offsets: Ints
    """[blocks, ranks]: of their slots."""


class InheritedBlocks:
    """Sorts out what may be served: whatever is doubtful is refused. A block is taken out once.

    A block is whole when each rank of its namespace has one slot for it, of the size and length that the rank's shards
    have, with a checksum of its bytes. Of two slots for one shard the one that was written last counts: a daemon may
    have died that had stored a block anew before it had taken it over.

    Args:
        inherited: owned from here on.
        slot_bytes: size of the slot for so many bytes; raises ShardTooLarge.
        slots_at_once: slots whose blocks are taken over in one step.
    """

    def __init__(
        self,
        namespaces: Iterable[NamespaceRecord],
        inherited: InheritedSlots,
        slot_bytes: Callable[[int], int],
        slots_at_once: int,
    ) -> None:
        sound = {record.fingerprint: record for record in namespaces if _is_sound(record, slot_bytes)}
        numbers: dict[tuple[bytes, int], int] = {}
        owners = (Owner * len(inherited.kinds))()
        for owner, kind in zip(owners, inherited.kinds, strict=True):
            name = inherited.names[kind.name]
            if _fits(kind, sound.get(name), slot_bytes):
                owner.group = numbers.setdefault((name, kind.group), len(numbers))
                owner.rank, owner.world_size = kind.rank, kind.world_size
        self.slots_at_once = slots_at_once
        self._group_of_kind = np.array([owner.group for owner in owners], np.intp)
        self._offsets = inherited.offsets
        self.counts: Numbers = np.bincount(self._group_of_kind, self._group(owners, inherited), len(numbers)).astype(
            np.intp
        )
        """Blocks that are still to be taken over, by group."""
        world_sizes = {owner.group: owner.world_size for owner in owners if owner.world_size}
        sizes = {
            (owner.group, owner.rank): kind.slot_bytes
            for owner, kind in zip(owners, inherited.kinds, strict=True)
            if owner.world_size
        }
        self.groups = [
            InheritedGroup(*group, tuple(sizes.get((number, rank), 0) for rank in range(world_sizes[number])))
            for number, group in enumerate(numbers)
        ]
        having = {name for number, (name, _) in enumerate(numbers) if self.counts[number]}
        self.namespaces = [record for name, record in sound.items() if name in having]
        """Those that have blocks."""

    def _group(self, owners: ctypes.Array[Owner], inherited: InheritedSlots) -> Numbers:
        """Finds the whole blocks; returns how many there are by the kind of one of their slots."""
        slots = len(inherited.offsets)
        table = np.zeros(1 << (slots + slots // 2).bit_length(), np.uint32)
        block_of, places = np.zeros(slots, np.uint32), np.zeros(slots, np.uint32)
        firsts, served = np.empty(slots, np.uint64), np.zeros(slots, np.uint8)
        blocks_of = np.zeros(len(owners), np.intp)
        arrays = (inherited.kind_of, inherited.identities, inherited.generations, table)
        grouping = Grouping(
            slots, 0, ctypes.addressof(owners), *(array.ctypes.data for array in arrays), len(table) - 1,
            *(array.ctypes.data for array in (block_of, firsts, places, served, blocks_of)),
        )  # fmt: skip
        native().group_slots(ctypes.byref(grouping))
        self._places, self._firsts, self._kind_of = places, firsts, inherited.kind_of
        self._order = np.argsort(inherited.identities[: grouping.blocks])
        """Numbers of the blocks, the one that became ready first first; _GONE for those that were taken out."""
        self._begin, self._end = 0, len(self._order)
        """The part of the order that is still to be gone through."""
        self._passed: dict[frozenset[int], int] = {}
        """By some groups, up to where in the order all of their blocks were taken out."""
        self.refused = inherited.offsets[served == 0]
        """Offsets of the slots to free."""
        return blocks_of

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __iter__(self) -> Iterator[SomeBlocks]:
        """All blocks that were not taken out, the oldest first."""
        order = self._order[self._begin : self._end]
        return self._some(order[order != _GONE])

    def take(self) -> Iterator[SomeBlocks]:
        """Takes out the blocks of one step: those that became ready last, the last one first."""
        chosen = self._order[max(self._begin, self._end - self.blocks_at_once) : self._end]
        self._end -= len(chosen)
        return self._out(chosen[chosen != _GONE][::-1])

    @property
    def blocks_at_once(self) -> int:
        """Blocks that are taken out in one step."""
        return max(1, self.slots_at_once // max((len(group.slot_bytes) for group in self.groups), default=1))

    def remove(self, groups: Collection[int]) -> Iterator[Iterator[SomeBlocks]]:
        """Takes out all blocks of groups, step by step. Others may be taken out meanwhile."""
        wanted = self._mask(groups)
        begin = self._begin
        while begin < self._end and self.counts[wanted].any():
            places = self._find(begin, min(begin + LOOKED_AT_ONCE, self._end), wanted)[: self.blocks_at_once]
            yield self._out_of_order(places)
            begin = int(places[-1]) + 1 if len(places) == self.blocks_at_once else begin + LOOKED_AT_ONCE

    def remove_chosen(
        self, groups: Collection[int], choose: Callable[[SomeBlocks], Sequence[bool]]
    ) -> Iterator[Iterator[SomeBlocks]]:
        """As ``remove``, but only the blocks that are chosen."""
        wanted = self._mask(groups)
        begin, most = self._begin, self.blocks_at_once
        while begin < self._end and self.counts[wanted].any():
            places = self._find(begin, min(begin + NAMED_AT_ONCE, self._end), wanted)
            # Few runs of one group each, however the groups lie in the order.
            places = places[np.argsort(self._group_of_kind[self._kind_of[self._order[places]]], kind="stable")]
            chosen = [is_chosen for some in self._some(self._order[places]) for is_chosen in choose(some)]
            places = places[np.array(chosen, bool)]
            for at in range(0, max(1, len(places)), most):
                part = places[at : at + most]
                part = part[part < self._end]  # others may have been taken out meanwhile
                yield self._out_of_order(part[self._order[part] != _GONE])
            begin += NAMED_AT_ONCE

    def give_up(self, most: int, groups: Collection[int]) -> Iterator[SomeBlocks]:
        """Takes out up to so many blocks of groups: the oldest that are found soon, so that there may be others."""
        wanted = self._mask(groups)
        passed = frozenset(groups)
        begin = max(self._begin, self._passed.get(passed, 0))
        for _ in range(LOOKS):
            places = self._find(begin, min(begin + LOOKED_AT_ONCE, self._end), wanted)[:most]
            if len(places) or begin >= self._end:
                break
            begin += LOOKED_AT_ONCE
        self._passed[passed] = begin  # nobody need look there again: no block is put back
        return self._out_of_order(places)

    def _mask(self, groups: Collection[int]) -> npt.NDArray[np.bool_]:
        """By number, whether a group is one of these."""
        wanted = np.zeros(len(self.groups), bool)
        wanted[list(groups)] = True
        return wanted

    def _find(self, begin: int, end: int, wanted: npt.NDArray[np.bool_]) -> Numbers:
        """Places in a part of the order that have blocks of some groups."""
        blocks = self._order[begin:end]
        return np.flatnonzero((blocks != _GONE) & wanted[self._group_of_kind[self._kind_of[blocks]]]) + begin

    def _out_of_order(self, places: Numbers) -> Iterator[SomeBlocks]:
        chosen = self._order[places]
        self._order[places] = _GONE
        while self._begin < self._end and self._order[self._begin] == _GONE:
            stays = self._order[self._begin : min(self._begin + LOOKED_AT_ONCE, self._end)] != _GONE
            self._begin += int(stays.argmax()) or len(stays)
        return self._out(chosen)

    def _out(self, chosen: Numbers) -> Iterator[SomeBlocks]:
        for some in (found := list(self._some(chosen))):
            self.counts[some.number] -= len(some.offsets)
        return iter(found)

    def _some(self, chosen: Numbers) -> Iterator[SomeBlocks]:
        group_of = self._group_of_kind[self._kind_of[chosen]]
        bounds = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(chosen)]
        for begin, end in pairwise(bounds):
            if begin < end:
                number = int(group_of[begin])
                ranks = np.arange(len(self.groups[number].slot_bytes))
                places = self._firsts[chosen[begin:end]].astype(np.intp)[:, None] + ranks
                yield SomeBlocks(number, self._offsets[self._places[places]])


def _is_sound(namespace: NamespaceRecord, slot_bytes: Callable[[int], int]) -> bool:
    """Whether this pool could have such a namespace."""
    if not (
        namespace.world_size == len(namespace.shard_bytes) >= 1
        and _MIN_KEY_BYTES <= namespace.key_bytes <= MAX_KEY_BYTES
        and len(namespace.groups) >= 1
    ):
        return False
    for sizes in namespace.shard_bytes:
        if sizes is not None and (len(sizes) != len(namespace.groups) or min(sizes) < 0):
            return False
        try:
            slot_bytes(max(sizes or (0,)))
        except KvoffdError:
            return False
    return True


def _fits(kind: Kind, namespace: NamespaceRecord | None, slot_bytes: Callable[[int], int]) -> bool:
    """Whether slots of a kind can hold shards of that namespace, and can be checked."""
    if namespace is None or kind.world_size != namespace.world_size or kind.rank >= namespace.world_size:
        return False
    sizes = namespace.shard_bytes[kind.rank]
    if sizes is None or kind.group >= len(sizes) or kind.key_bytes != namespace.key_bytes or not kind.has_checksum:
        return False
    nbytes = sizes[kind.group]
    return kind.length == nbytes and kind.slot_bytes == slot_bytes(nbytes)
