"""Takes over the blocks that an earlier daemon left whole: step by step while others are served, the newest first."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.inherited import InheritedBlocks, SomeBlocks
from kvoffd.cache.namespace import (
    FIRST_BLOCK_AT,
    HELD,
    OFFSET_AT,
    UNVERIFIED,
    WRITTEN,
    BlockState,
    MissReason,
    Namespace,
)
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import InheritedSlots, NamespaceRecord
from kvoffd.pool.table_format import keys_of
from kvoffd_proto.admin import shard_bytes_of

LOOKED_FOR_AT_ONCE = 10_000
"""Keys that are made ready in one step to be looked for among the inherited blocks."""


class Adoption(NamedTuple):
    """What became of the slots that an earlier daemon left."""

    blocks: int
    """Blocks that are ready again, or will be."""
    slot_bytes: int
    namespaces: int
    refused_slots: int
    """Slots that were freed: of blocks that lack a shard, or at odds with their namespace or with another slot."""


def begin_adoption(
    blocks: Blocks, store: Pool, namespaces: Iterable[NamespaceRecord], slots: InheritedSlots, slots_at_once: int
) -> Adoption:
    """Find out what may be served, free the other slots, and take the newest blocks over: those of one step."""
    found = InheritedBlocks(namespaces, slots, store.slot_bytes, slots_at_once)
    store.free(found.refused.tolist())
    opened = {record.fingerprint: _open(record, store) for record in found.namespaces}
    adoption = Adoption(len(found), blocks.expect(found, opened), len(opened), len(found.refused))
    adopt_some(blocks, store)
    return adoption


def adopt_some(blocks: Blocks, store: Pool) -> None:
    """Take more of the inherited blocks over, those of one step: the ones that became ready last."""
    inherited = blocks.inherited
    if inherited is None:
        return
    if blocks.index_is_full:
        for some in inherited.give_up(inherited.blocks_at_once, range(len(inherited.groups))):
            blocks.let_go(some, MissReason.EVICTED)
    else:
        for some in inherited.take():
            _adopt(blocks, store, some)
    blocks.inherited = inherited or None


def forget_inherited(blocks: Blocks, namespace: Namespace) -> Iterator[tuple[int, list[bytes]]]:
    """Let all inherited blocks of a namespace go, step by step. Yields group and keys of each step."""
    numbers = [number for number, (owner, _) in blocks.inherited_owners.items() if owner is namespace]
    for step in blocks.inherited.remove(numbers) if blocks.inherited is not None else ():
        yield from [
            (blocks.inherited_owners[some.number][1], blocks.let_go(some, MissReason.INVALIDATED)) for some in step
        ]


def forget_inherited_keys(
    blocks: Blocks, store: Pool, namespace: Namespace, groups: Iterable[tuple[int, bytes]]
) -> Iterator[list[tuple[int, list[bytes]]]]:
    """Let the inherited blocks of these keys, by group, go, step by step. Yields groups and keys of each step.

    Blocks that are taken over meanwhile are in the index then.
    """
    owners, wanted = blocks.inherited_owners, dict[int, set[bytes]]()
    size = LOOKED_FOR_AT_ONCE * namespace.key_bytes
    for group, keys in groups if namespace.inherited_blocks else ():
        for at in range(0, len(keys), size):
            wanted.setdefault(group, set()).update(namespace.split(group, keys[at : at + size]))
            yield []

    def choose(some: SomeBlocks) -> list[bool]:
        keys = wanted[owners[some.number][1]]
        return [key in keys for key in keys_of(store.rows(some.offsets[:, 0]), namespace.key_bytes)]

    numbers = [number for number, (owner, group) in owners.items() if owner is namespace and group in wanted]
    for step in blocks.inherited.remove_chosen(numbers, choose) if blocks.inherited is not None else ():
        yield [(owners[some.number][1], blocks.let_go(some, MissReason.INVALIDATED)) for some in step]


def _adopt(blocks: Blocks, store: Pool, some: SomeBlocks) -> None:
    """Make blocks of one group ready, but for those that were stored anew or that are to be forgotten."""
    namespace, group = blocks.inherited_owners[some.number]
    if namespace.clearing:
        blocks.let_go(some, MissReason.INVALIDATED)
        return
    ranks = some.offsets.shape[1]
    rows = store.rows(some.offsets.reshape(-1))
    keys = keys_of(rows, namespace.key_bytes)
    # Keys of one identity need not be one key.
    alike = [keys[at : at + ranks] == [keys[at]] * ranks for at in range(0, len(keys), ranks)] if ranks > 1 else []
    keys = keys[::ranks]
    states = namespace.index[group].states(b"".join(keys))
    if any(states) or not all(alike):
        stays = (np.frombuffer(states, np.uint8) == BlockState.ABSENT) & np.array(alike or True)
        blocks.let_go(SomeBlocks(some.number, some.offsets[~stays]), None)
        some = SomeBlocks(some.number, some.offsets[stays])
        rows, keys = rows[np.repeat(stays, ranks)], list(compress(keys, stays.tolist()))
    words = np.empty((len(rows), 2), np.uint64)
    words[:, 0] = some.offsets.reshape(-1) << OFFSET_AT | rows["first_block"].astype(np.int64) << FIRST_BLOCK_AT
    words[:, 0] |= HELD | WRITTEN | UNVERIFIED
    words[:, 1] = rows["checksum"]
    data, size = words.tobytes(), 16 * ranks
    its_words = [array("Q", data[at : at + size]) for at in range(0, len(data), size)]
    if keys:
        blocks.adopt(namespace, group, keys, its_words, some.offsets)


def _open(record: NamespaceRecord, store: Pool) -> Namespace:
    namespace = Namespace(
        record.fingerprint, record.label, record.world_size, record.key_bytes, record.groups, record.description
    )
    namespace.generation, namespace.recovered = record.generation, True
    for rank, shard_bytes in enumerate(record.shard_bytes):
        if shard_bytes is not None:
            namespace.fix_shard_bytes(rank, shard_bytes, list(map(store.slot_bytes, shard_bytes)))
    for rank, shards in enumerate(record.shards[: record.world_size]):
        if shards is not None and tuple(map(shard_bytes_of, shards)) == record.shard_bytes[rank]:
            namespace.describe_shards(rank, shards)
    return namespace
