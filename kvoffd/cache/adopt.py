"""Takes over the blocks that an earlier daemon left whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import NamespaceRecord, SlotRecord
from kvoffd_proto.blocks import shard_bytes_of

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


def plan_adoption(
    namespaces: Iterable[NamespaceRecord], slots: Iterable[SlotRecord], slot_bytes: Callable[[int], int]
) -> tuple[list[NamespaceRecord], list[list[SlotRecord]], list[SlotRecord]]:
    """Sort out what may be served: the namespaces that have blocks, the slots of each block, and the slots to free.

    A block's slots are one for every rank, and the block that became ready first comes first. Whatever is doubtful is
    refused.

    A block is whole when each rank of its namespace has one slot for it, of the size and length that the rank's shards
    have, with a checksum of its bytes. Of two slots for one shard neither is believed.

    Args:
        slot_bytes: size of the slot for so many bytes; raises ShardTooLarge.
    """
    known = {namespace.fingerprint: namespace for namespace in namespaces if _is_sound(namespace, slot_bytes)}
    fitting: dict[tuple[object, ...], bool] = {}
    found: dict[tuple[bytes, int, bytes], list[SlotRecord]] = {}
    refused: list[SlotRecord] = []
    for slot in slots:
        owner = slot.fingerprint, slot.group, slot.rank, slot.world_size, len(slot.key)
        kind = (*owner, slot.slot_bytes, slot.length)  # many slots, few kinds
        fits = fitting.get(kind)
        if fits is None:
            fits = fitting[kind] = _fits(slot, known.get(slot.fingerprint), slot_bytes)
        if fits and slot.checksum:
            found.setdefault((slot.fingerprint, slot.group, slot.key), []).append(slot)
        else:
            refused.append(slot)
    blocks: list[list[SlotRecord]] = []
    for (fingerprint, _, _), shards in found.items():
        world_size = known[fingerprint].world_size
        if len(shards) == world_size and (world_size == 1 or len({shard.rank for shard in shards}) == world_size):
            blocks.append(shards)
        else:
            refused += shards
    blocks.sort(key=lambda shards: max([shard.generation for shard in shards]))
    served = {shards[0].fingerprint for shards in blocks}
    return [known[name] for name in known if name in served], blocks, refused


def adopt(
    blocks: Blocks, store: Pool, namespaces: Iterable[NamespaceRecord], slots: Iterable[SlotRecord]
) -> tuple[dict[bytes, Namespace], Adoption]:
    """Enter what may be served and free the other slots. Returns the namespaces that have blocks, by fingerprint."""
    served, found, refused = plan_adoption(namespaces, slots, store.slot_bytes)
    store.free([slot.offset for slot in refused])
    opened = {record.fingerprint: _open(record, store) for record in served}
    blocks.adopt(opened.values(), [(opened[shards[0].fingerprint], shards) for shards in found])
    nbytes = sum(namespace.ready_bytes for namespace in opened.values())
    return opened, Adoption(len(found), nbytes, len(opened), len(refused))


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


def _fits(slot: SlotRecord, namespace: NamespaceRecord | None, slot_bytes: Callable[[int], int]) -> bool:
    """Whether a slot can hold a shard of that namespace."""
    if namespace is None or slot.world_size != namespace.world_size or slot.rank >= namespace.world_size:
        return False
    sizes = namespace.shard_bytes[slot.rank]
    if sizes is None or slot.group >= len(sizes) or len(slot.key) != namespace.key_bytes:
        return False
    nbytes = sizes[slot.group]
    return slot.length == nbytes and slot.slot_bytes == slot_bytes(max(nbytes, 1))
