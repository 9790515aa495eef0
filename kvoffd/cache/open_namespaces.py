"""The open namespaces, by fingerprint: their groups and numbers, and what the next daemon must know of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from msgspec import Raw

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import Group, Namespace, NamespaceRecord, NamespaceSnapshot, Shards
from kvoffd.errors import KvoffdError
from kvoffd.pool.slot_table import SlotTable
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

KNOWN_RESETS = 4
"""Last resets of a namespace from before which it is known which keys it had."""


class OpenNamespaces(dict[bytes, Namespace]):
    """Namespaces by fingerprint, in the order in which they were opened. Only its methods change it.

    Each has a number, which names it in the slot table's records. A reset gives it a new one, and new groups: the
    blocks of the old ones are not found, and no later daemon recovers them.
    """

    def __init__(self, life: BlockLife, table: SlotTable, events: CacheListener) -> None:
        super().__init__()
        self._life, self._slots, self._table, self._events = life, life.slots, table, events
        self._next_number, self._next_group = 1, 1
        self._warned_of_no_space = False

    def required(self, fingerprint: bytes) -> Namespace:
        """Return the open namespace. Raises KvoffdError (UNKNOWN_NAMESPACE)."""
        if (found := self.get(fingerprint)) is None:
            why = f"No namespace with the fingerprint {fingerprint.hex()} is open; send OpenNamespace first."
            raise KvoffdError(why, ErrorCode.UNKNOWN_NAMESPACE)
        return found

    def open(self, namespace: Namespace) -> tuple[Namespace, bool]:
        """Open or join a namespace; return also whether it is new. Raises KvoffdError on another geometry."""
        if (known := self.get(namespace.fingerprint)) is not None:
            known.check_same(namespace.world_size, namespace.key_bytes, namespace.specs)
            return known, False
        self[namespace.fingerprint] = namespace
        self.renumber(namespace)
        self._events.cleared(namespace)
        return namespace, True

    def register_rank(
        self,
        namespace: Namespace,
        rank: int,
        shard_bytes: Sequence[int],
        node: int | None,
        shards: Shards | None = None,
    ) -> None:
        """Set the rank's NUMA node and, at its first registration, its shard sizes, by group, and their ``shards``.

        Raises BadGeometry if the bytes differ from earlier ones, do not fit the namespace, or no slot can hold a shard.
        """
        is_new = self._set_shard_bytes(namespace, rank, shard_bytes)
        namespace.nodes[rank] = node
        self._set_sizes(namespace)
        if namespace.set_shards(rank, shards) or is_new:
            self.save()

    def renumber(self, namespace: Namespace, number: int = 0) -> int:
        """Give a namespace new groups, and a number by which records name it: an unused one, or that of an earlier
        daemon. If it has groups, it is reset: they retire, and the new ones get their sizes. ``save`` afterwards.
        Returns how many blocks the old groups had in the index."""
        namespace.number = number or self._next_number
        self._next_number = max(self._next_number, namespace.number + 1)
        old, namespace.groups, dropped = namespace.groups, [], 0
        for index in range(len(namespace.specs)):
            group = Group(self._next_group, namespace, index)
            self._next_group += 1
            self._life.blocks.groups[group.number] = group
            namespace.groups.append(group)
        for before, group in zip(old, namespace.groups, strict=False):  # there are none before it is opened
            dropped += self._life.retire(before)
            group.set_sizes(before.lengths, before.sizes)
            numbers = (*before.unswept_before, before.number)
            group.unswept_before = [one for one in numbers if one in self._life.unswept]
            group.predecessors = (before, *before.predecessors)[:KNOWN_RESETS]
            before.predecessors = ()  # else every earlier group would live as long as the namespace
        return dropped

    def forget(self, namespace: Namespace) -> None:
        """Forget a namespace that has no blocks in the index and that no session has open.

        It stays in the slot table until the next save, as one without blocks.
        """
        assert not namespace.indexed_blocks
        for group in namespace.groups:
            self._life.retire(group)
        namespace.groups = []
        del self[namespace.fingerprint]

    def restore(self, record: NamespaceRecord) -> list[Group]:
        """Open a namespace with the number that an earlier daemon saved, before anything else. Returns its groups.

        Raises BadGeometry, and changes nothing, if this pool cannot hold its shards.
        """
        geometry = record.world_size, record.key_bytes, record.groups, record.description
        namespace = Namespace(record.fingerprint, record.label, *geometry)
        for rank, shard_bytes in enumerate(record.shard_bytes):
            if shard_bytes is not None:
                self._set_shard_bytes(namespace, rank, shard_bytes)
        for rank, shards in enumerate(record.shards or ()):
            if shards is not None and rank < record.world_size:
                sizes = [(count, tuple(layer[0] for layer in layers if layer)) for count, layers in shards]
                namespace.set_shards(rank, tuple(cast(Shards, sizes)))
        namespace.generation = record.generation
        self[namespace.fingerprint] = namespace
        self.renumber(namespace, record.number)
        self._set_sizes(namespace)
        return namespace.groups

    def save(self) -> None:
        """Save what the next daemon must know of the namespaces.

        In the table of a very small pool some may have no space: those with the fewest blocks, which it loses.
        """
        kept = [namespace for namespace in self.values() if any(namespace.shard_bytes)]
        count = len(kept)
        while True:
            encoded = tuple(Raw(namespace.encoded_record()) for namespace in kept)  # which are not encoded again
            snapshot = NamespaceSnapshot(self._next_number, cast(tuple[NamespaceRecord, ...], encoded))
            if self._table.save_namespaces(snapshot):
                break
            kept.remove(min(kept, key=lambda namespace: namespace.ready_blocks))
        if len(kept) < count and not self._warned_of_no_space:
            self._warned_of_no_space = True
            logger.warning("Too many namespaces (%d) to persist: %d are lost at a restart.", count, count - len(kept))

    def _set_sizes(self, namespace: Namespace) -> None:
        """Set the groups' sizes. Groups can have blocks once all ranks have registered."""
        for group in namespace.groups:
            lengths = namespace.shard_lengths(group.index)
            group.set_sizes(lengths, [self._slots.slot_size(length) for length in lengths])

    def _set_shard_bytes(self, namespace: Namespace, rank: int, shard_bytes: Sequence[int]) -> bool:
        """Set the namespace's shard bytes once. Raises BadGeometry."""
        for nbytes in shard_bytes:
            self._slots.slot_size(nbytes)  # which raises
        return namespace.set_shard_bytes(rank, shard_bytes)
