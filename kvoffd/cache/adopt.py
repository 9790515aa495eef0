"""Takes over the blocks that an earlier daemon left whole."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import Ints, Kind, LeftSlots, NamespaceRecord, SlotRecord
from kvoffd.pool.table_format import keys_of
from kvoffd.system.native import native
from kvoffd_proto.blocks import shard_bytes_of

Numbers: TypeAlias = npt.NDArray[np.intp]

_MIN_KEY_BYTES = 8
_MAX_KEY_BYTES = 64


class Adoption(NamedTuple):
    """What became of the slots that an earlier daemon left."""

    blocks: int
    """Blocks that are ready again."""
    slot_bytes: int
    """Pool bytes of these blocks."""
    namespaces: int
    """Namespaces they are in."""
    refused_slots: int
    """Slots that were freed: of blocks that lack a shard, or at odds with their namespace or with another slot."""


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


class BlockSlots(NamedTuple):
    """Blocks, and the slots of each: one for each rank, by rank."""

    owner_of: Numbers
    """By block, the number of its namespace and group."""
    offsets: Ints
    """Of the slots, end to end."""


class Plan:
    """Sorts out what may be served: whatever is doubtful is refused.

    A block is whole when each rank of its namespace has one slot for it, of the size and length that the rank's shards
    have, with a checksum of its bytes. Of two slots for one shard neither is believed.

    Args:
        left: owned from here on.
        slot_bytes: size of the slot for so many bytes; raises ShardTooLarge.
    """

    def __init__(
        self, namespaces: Iterable[NamespaceRecord], left: LeftSlots, slot_bytes: Callable[[int], int]
    ) -> None:
        sound = {record.fingerprint: record for record in namespaces if _is_sound(record, slot_bytes)}
        numbers: dict[tuple[bytes, int], int] = {}
        owners = (Owner * len(left.kinds))()
        for owner, kind in zip(owners, left.kinds, strict=True):
            name = left.names[kind.name]
            if _fits(kind, sound.get(name), slot_bytes):
                owner.group = numbers.setdefault((name, kind.group), len(numbers))
                owner.rank, owner.world_size = kind.rank, kind.world_size
        self._owner_of_kind = np.array([owner.group for owner in owners], np.intp)
        world_sizes = {owner.group: owner.world_size for owner in owners if owner.world_size}
        self._world_sizes = np.array([world_sizes[number] for number in range(len(numbers))], np.intp)
        self._offsets = left.offsets
        self.owners = list(numbers)
        """Fingerprint of the namespace, and group, by number."""
        counts = np.bincount(self._owner_of_kind, self._group(owners, left), len(numbers)).astype(int)
        having = {name for number, (name, _) in enumerate(numbers) if counts[number]}
        self.namespaces = [record for name, record in sound.items() if name in having]
        """Those that have blocks."""

    def _group(self, owners: ctypes.Array[Owner], left: LeftSlots) -> Numbers:
        """Finds the whole blocks; returns how many there are by the kind of one of their slots."""
        slots = len(left.offsets)
        table = np.zeros(1 << (slots + slots // 2).bit_length(), np.uint32)
        block_of, places = np.zeros(slots, np.uint32), np.zeros(slots, np.uint32)
        firsts, served = np.empty(slots, np.uint64), np.zeros(slots, np.uint8)
        blocks_of = np.zeros(len(owners), np.intp)
        arrays = (left.kind_of, left.identities, left.generations, table)
        grouping = Grouping(
            slots, 0, ctypes.addressof(owners), *(array.ctypes.data for array in arrays), len(table) - 1,
            *(array.ctypes.data for array in (block_of, firsts, places, served, blocks_of)),
        )  # fmt: skip
        native().group_slots(ctypes.byref(grouping))
        self._places, self._firsts, self._kind_of = places, firsts, left.kind_of
        self._newest = np.argsort(left.generations[: grouping.blocks])[::-1]
        """Numbers of the blocks that are left, the one that became ready last first."""
        self.refused = left.offsets[served == 0]
        """Offsets of the slots to free."""
        return blocks_of

    def __len__(self) -> int:
        """Blocks that are left."""
        return len(self._newest)

    def take(self, count: int) -> BlockSlots:
        """The next ``count`` blocks, those that became ready last."""
        chosen, self._newest = self._newest[:count], self._newest[count:]
        owner_of = self._owners(chosen)
        counts = self._world_sizes[owner_of]
        begins = np.cumsum(counts) - counts
        places = np.repeat(self._firsts[chosen].astype(np.intp) - begins, counts) + np.arange(counts.sum())
        return BlockSlots(owner_of, self._offsets[self._places[places]])

    def _owners(self, blocks: Numbers) -> Numbers:
        return self._owner_of_kind[self._kind_of[blocks]]


def adopt(
    blocks: Blocks, store: Pool, namespaces: Iterable[NamespaceRecord], left: LeftSlots
) -> tuple[dict[bytes, Namespace], Adoption]:
    """Enter what may be served and free the other slots. Returns the namespaces that have blocks, by fingerprint."""
    plan = Plan(namespaces, left, store.slot_bytes)
    store.free(plan.refused.tolist())
    opened = {record.fingerprint: _open(record, store) for record in plan.namespaces}
    found = list(_read(plan, store, opened))
    blocks.adopt(opened.values(), found[::-1])
    nbytes = sum(namespace.ready_bytes for namespace in opened.values())
    return opened, Adoption(len(found), nbytes, len(opened), len(plan.refused))


def _read(plan: Plan, store: Pool, opened: Mapping[bytes, Namespace]) -> Iterator[tuple[Namespace, list[SlotRecord]]]:
    """The blocks of a plan, each with the records of its slots."""
    while plan:
        owners, offsets = plan.take(1)
        name, group = plan.owners[owners[0]]
        namespace, rows = opened[name], store.rows(offsets)
        keys = keys_of(rows, namespace.key_bytes)
        columns = [rows[name].tolist() for name in ("first_block", "length", "checksum", "generation")]
        yield (
            namespace,
            [
                SlotRecord(
                    *(offset, namespace.slot_bytes(rank, group), name, group, keys[rank], rank, namespace.world_size),
                    *content,
                )
                for rank, (offset, *content) in enumerate(zip(offsets.tolist(), *columns, strict=True))
            ],
        )


def _open(record: NamespaceRecord, store: Pool) -> Namespace:
    namespace = Namespace(
        record.fingerprint, record.label, record.world_size, record.key_bytes, record.groups, record.description
    )
    for rank, shard_bytes in enumerate(record.shard_bytes):
        if shard_bytes is not None:
            slot_bytes = [store.slot_bytes(max(nbytes, 1)) for nbytes in shard_bytes]
            namespace.fix_shard_bytes(rank, shard_bytes, slot_bytes)
    for rank, shards in enumerate(record.shards[: record.world_size]):
        if shards is not None and tuple(map(shard_bytes_of, shards)) == record.shard_bytes[rank]:
            namespace.describe_shards(rank, shards)
    return namespace


def _is_sound(namespace: NamespaceRecord, slot_bytes: Callable[[int], int]) -> bool:
    """Whether this pool could have such a namespace."""
    if not (
        namespace.world_size == len(namespace.shard_bytes) >= 1
        and _MIN_KEY_BYTES <= namespace.key_bytes <= _MAX_KEY_BYTES
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
    return kind.length == nbytes and kind.slot_bytes == slot_bytes(max(nbytes, 1))
