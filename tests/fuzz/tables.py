"""Slot tables as a crash or a bad machine may leave them: what a daemon recovers from them, and what it serves."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from kvoffd.cache.block_table import READY
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace, NamespaceRecord, NamespaceSnapshot
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.pool.slot_table import READY_RECORD, RECORD_BYTES, SlotTable, TableGeometry
from kvoffd.server.events import EventLog
from kvoffd.server.persistence import State
from kvoffd.server.recovery import restore
from kvoffd_proto.messages import GroupSpec
from tests.fuzz.choices import Choices
from tests.fuzz.trees import bend
from tests.kit.slot_cache import Part, check_invariants
from tests.sim.parts import (
    REGION_BYTES,
    KeptPool,
    NoPolicyFile,
    NoStateFile,
    keep_copy,
    make_cache,
    make_config,
    make_pool,
)

POOL_BYTES, SLOT_BYTES, BLOCKS = 1 << 20, 8192, 24
GEOMETRY = TableGeometry(POOL_BYTES, REGION_BYTES)
WORLD = 2
CRC_AT = 104
"""Where a record's CRC lies: it is of the bytes from the 8th on to it."""
RECORD = NamespaceRecord(
    3, b"n" * 32, "label", 1, 32, (GroupSpec("full", 16),), "{}", ((SLOT_BYTES,),), (None,), generation=1
)


class Written(NamedTuple):
    """A slot table of two namespaces of two ranks."""

    data: bytes
    whole: frozenset[tuple[int, bytes]]
    """Every record that was ever whole in the table, with its slot."""


def make(pool: Pool) -> Cache:
    return make_cache(make_config(random.Random(0)), pool, EventLog(), lambda: 0.0)


@cache
def written() -> Written:
    """The table, made once."""
    pool, whole = make_pool(POOL_BYTES, None), set[tuple[int, bytes]]()
    try:
        cache, spaces = make(pool), []
        for name in range(2):
            groups = (GroupSpec("full", 16), GroupSpec("sliding", 16, 64))
            namespace = Namespace(bytes([name + 1]) * 32, "l", WORLD, 8, groups, "{}")
            spaces.append(cache.open_namespace(namespace)[0])
            for rank in range(WORLD):
                cache.register_rank(namespace, rank, (SLOT_BYTES, 12000), None)
        for number in range(BLOCKS):
            space, part = spaces[number % 2], Part(number % 3 // 2, number.to_bytes(8, "big"))
            for rank in range(WORLD - (number % 7 == 6)):  # the other one never comes
                ticket = cache.begin_store(space, rank, [part])
                cache.commit_store(ticket, [[1 + number]])
            whole |= records_of(cache)
            if number % 11 == 4:
                cache.invalidate(space, [(part.group, part.keys)])
        fd = pool.memory_fds[1]
        return Written(os.pread(fd, pool.table_bytes, 0), frozenset(whole))
    finally:
        pool.close()


def records_of(cache: Cache) -> set[tuple[int, bytes]]:
    """The records whose slots are whole, with their slots."""
    records = cache.table.records
    whole = np.flatnonzero(records["state"] == READY_RECORD).tolist()
    return {(slot, records[slot].tobytes()[: CRC_AT + 4]) for slot in whole}


def damaged(choices: Choices) -> bytearray:
    """The table with some bytes changed: where something lies, more often than where nothing does."""
    table = bytearray(written().data)
    for _ in range(1 + choices.byte() % 8):
        parts = 0, GEOMETRY.regions_at, GEOMETRY.namespaces_at, GEOMETRY.records_at, GEOMETRY.records_at
        at = choices.of((*parts, len(table) // 2)) + choices.number(8191)
        if at < len(table):
            kind = choices.byte() % 4
            length = 1 << kind * 2
            piece = choices.bytes(min(length, 8)) * (length // 8 or 1) if kind != 3 else bytes(length)
            table[at : at + length] = piece[: len(table) - at]
    return table


def slot_table(data: bytes) -> None:
    """A damaged slot table: unreadable as a whole, or nothing is served of it that nobody wrote."""
    choices = Choices(data)
    table = damaged(choices)
    if choices.byte() % 8 == 0:
        del table[choices.number(len(table)) :]
    with recovered(bytes(table)) as served:
        assert served <= written().whole, served - written().whole


def recovery(data: bytes) -> None:
    """A table whose damage has right checksums: whatever it says, the books of the daemon that recovers it balance."""
    choices = Choices(data)
    table = damaged(choices) if choices.byte() % 4 == 0 else bytearray(written().data)
    slots = [slot for slot, _ in sorted(written().whole)]
    for _ in range(choices.byte() % 6):
        at, source = (GEOMETRY.records_at + choices.of(slots) * RECORD_BYTES for _ in range(2))
        if choices.byte() % 3 == 0:
            table[at : at + RECORD_BYTES] = table[source : source + RECORD_BYTES]
        place, piece = at + choices.byte() % (CRC_AT - 8), choices.bytes(1 + choices.byte() % 8)
        table[place : place + len(piece)] = piece
        table[at + CRC_AT : at + CRC_AT + 4] = zlib.crc32(table[at + 8 : at + CRC_AT]).to_bytes(4, "little")
    with recovered(bytes(table)):
        pass


@contextmanager
def recovered(table: bytes) -> Iterator[set[tuple[int, bytes]]]:
    """The records of what a daemon serves that is given this table. Raises where its books do not balance."""
    pool = make_pool(POOL_BYTES, kept(table))
    try:
        cache = make(pool)
        restore(cache, pool, NoPolicyFile(), State(NoStateFile()))
        check_invariants(cache)
        found = records_of(cache)
        slots = {
            slot
            for group, blocks in cache.by_group(np.flatnonzero(cache.blocks.state == READY).astype(np.uint32))
            for slot in cache.blocks.slots(blocks, len(group.sizes)).ravel().tolist()
        }
        assert slots == {slot for slot, _ in found}, "what is whole in the table is what is served"
        yield found
        again = keep_copy(pool)
        for namespace in list(cache.namespaces.values()):
            cache.reset(namespace)
        while cache.background():
            check_invariants(cache)
        check_invariants(cache)
        usage = cache.usage
        assert usage.free + usage.quarantined == POOL_BYTES, usage
        assert not records_of(cache)
    finally:
        pool.close()
    pool = make_pool(POOL_BYTES, again)
    try:
        cache = make(pool)
        restore(cache, pool, NoPolicyFile(), State(NoStateFile()))
        assert records_of(cache) == found, "a successor recovers the same"
    finally:
        pool.close()


def kept(table: bytes) -> KeptPool:
    memory, described = PoolMemory.create(POOL_BYTES, "kvoffd-fuzz"), PoolMemory.create(len(table), "kvoffd-fuzz")
    try:
        os.pwrite(described.fd, table, 0)
        return os.dup(memory.fd), os.dup(described.fd)
    finally:
        memory.close()
        described.close()


def namespaces(data: bytes) -> None:
    """The namespaces' part of a slot table: read or given up, and written to by the next daemon."""
    area = data[: GEOMETRY.namespace_bytes]
    memory = bytearray(GEOMETRY.size_bytes)
    memory[GEOMETRY.namespaces_at : GEOMETRY.namespaces_at + len(area)] = area
    table = SlotTable(memoryview(memory), GEOMETRY, new=False)
    found = table.load_namespaces(NamespaceSnapshot)
    assert found is None or isinstance(found, NamespaceSnapshot)
    new = NamespaceSnapshot(4, (RECORD,))
    assert table.save_namespaces(new)
    assert SlotTable(memoryview(memory), GEOMETRY, new=False).load_namespaces(NamespaceSnapshot) == new


def bent_namespaces(data: bytes) -> None:
    """A snapshot that says something else than was ever written, and is whole."""
    content = zlib.compress(bend(Choices(data), msgspec.msgpack.encode(NamespaceSnapshot(4, (RECORD,)))), 1)
    number = 2  # of the first half
    head = number.to_bytes(8, "little") + len(content).to_bytes(4, "little")
    namespaces(head + zlib.crc32(content, number).to_bytes(4, "little") + content)


def snapshot() -> bytes:
    """The namespaces' part as it is written."""
    memory = bytearray(GEOMETRY.size_bytes)
    table = SlotTable(memoryview(memory), GEOMETRY, new=True)
    assert table.save_namespaces(NamespaceSnapshot(4, (RECORD,)))
    assert table.save_namespaces(NamespaceSnapshot(4, (RECORD,)))
    return bytes(memory[GEOMETRY.namespaces_at : GEOMETRY.namespaces_at + 4096])
