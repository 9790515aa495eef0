"""Slot tables as a crash, a bad machine or an enemy may leave them: what a daemon finds in them, and what it serves."""

from __future__ import annotations

import os
import zlib
from functools import cache
from typing import NamedTuple

from tests.kit.plain_adoption import plain_scan

from kvoffd.cache.policies import make_policy
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.records import NamespaceRecord
from kvoffd.pool.scan import scan
from kvoffd.pool.table_format import CRC, CRC_AT, OWNER_AT, RECORD_BYTES, BadTable, Geometry, read_geometry
from kvoffd.server.events import EventLog
from kvoffd_proto.messages import GroupSpec
from tests.fuzz.choices import Choices
from tests.kit.cache_harness import made
from tests.kit.invariants import check_invariants
from tests.kit.slot_table import SlotRecord, make_table, mark_ready, mark_writing, records_of, scan_table
from tests.sim.parts import REGION_BYTES, make_pool

POOL_BYTES, SLOT_BYTES, SLOTS = 1 << 20, 8192, 48
WORLD = 2


class Written(NamedTuple):
    """A slot table of two namespaces of two ranks."""

    data: bytes
    whole: frozenset[SlotRecord]
    """Every record that was ever whole in the table."""
    blocks: int
    """The records that are whole at the end."""


@cache
def written() -> Written:
    """The table, made once."""
    table = make_table(POOL_BYTES, REGION_BYTES)
    whole: set[SlotRecord] = set()
    groups = (GroupSpec("full", 16), GroupSpec("sliding", 16, 64))
    for name in range(2):
        sizes = ((SLOT_BYTES, 5000),) * WORLD
        assert table.namespace_log.note(NamespaceRecord(_space(name), "l", WORLD, 8, groups, "{}", sizes))
    for number in range(SLOTS):
        offset, rank, key = number * SLOT_BYTES, number % WORLD, number // WORLD
        if offset % REGION_BYTES == 0:
            table.set_region(offset // REGION_BYTES, SLOT_BYTES)
        mark_writing(table, offset, _space(key % 2), key % 3 // 2, key.to_bytes(8, "big"), rank, WORLD)
        if number % 13 != 7:
            mark_ready(table, offset, 0, 5000 if key % 3 // 2 else SLOT_BYTES, 1 + number)
            whole |= set(scan_table(table.fd))
        if number % 11 == 4:
            table.free([offset])
    data = os.pread(table.fd, table.size_bytes, 0)
    table.close()
    return Written(data, frozenset(whole), _adopted_blocks(data))


def _space(number: int) -> bytes:
    return bytes([number + 1]) * 32


def _damaged(choices: Choices) -> bytearray:
    """The table with some bytes changed: where something lies, more often than where nothing does."""
    table = bytearray(written().data)
    for _ in range(1 + choices.byte() % 8):
        at = choices.of((0, 4096, 8192, 12288, len(table) // 2, 0)) + choices.number(8191)
        if at < len(table):
            kind = choices.byte() % 4
            length = 1 << kind * 2
            piece = choices.bytes(min(length, 8)) * (length // 8 or 1) if kind != 3 else bytes(length)
            table[at : at + length] = piece[: len(table) - at]
    return table


def slot_table(data: bytes) -> None:
    """A damaged slot table: unreadable as a whole, or without a record that nobody wrote."""
    choices = Choices(data)
    table = _damaged(choices)
    if choices.byte() % 8 == 0:
        del table[choices.number(len(table)) :]
    fd = os.memfd_create("kvoffd-fuzz", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, table, 0)
        try:
            found = scan_table(fd)
            assert found == plain_scan(fd)[0]
        except BadTable:
            return
        finally:
            assert os.pread(fd, len(table) + 1, 0) == table, "reading writes nothing"
    finally:
        os.close(fd)
    # A region's slot size is not a part of the record; that the slot holds its bytes is.
    known = {record._replace(slot_bytes=0) for record in written().whole}
    for record in found:
        assert record._replace(slot_bytes=0) in known, record
        assert record.length <= record.slot_bytes
        assert record.offset + record.slot_bytes <= POOL_BYTES


def adoption(data: bytes) -> None:
    """A table whose damage has right checksums: whatever it says, the daemon that adopts it has balanced books."""
    choices = Choices(data)
    table = _damaged(choices) if choices.byte() % 4 == 0 else bytearray(written().data)
    records_at = Geometry.of(POOL_BYTES, REGION_BYTES).records_at
    for _ in range(choices.byte() % 6):
        at = records_at + choices.byte() % SLOTS * RECORD_BYTES
        source = records_at + choices.byte() % SLOTS * RECORD_BYTES
        if choices.byte() % 3 == 0:
            table[at : at + RECORD_BYTES] = table[source : source + RECORD_BYTES]
        field, piece = at + choices.byte() % (CRC_AT - 8), choices.bytes(1 + choices.byte() % 8)
        table[field : field + len(piece)] = piece
        CRC.pack_into(table, at + CRC_AT, zlib.crc32(table[at + OWNER_AT : at + CRC_AT]))
    fd = os.memfd_create("kvoffd-fuzz", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, table, 0)
        geometry = read_geometry(fd)
        found = scan(fd, geometry)
        assert (records_of(fd, geometry, found.slots), found.discarded.tolist()) == plain_scan(fd)
    except BadTable:
        pass
    finally:
        os.close(fd)
    _adopted_blocks(bytes(table))


def _adopted_blocks(table: bytes) -> int:
    """Blocks that a daemon serves which is given this table; raises where its books do not balance."""
    memory, described = PoolMemory.create(POOL_BYTES, "kvoffd-fuzz"), PoolMemory.create(len(table), "kvoffd-fuzz")
    try:
        os.pwrite(described.fd, table, 0)
        kept = os.dup(memory.fd), os.dup(described.fd)
    finally:
        memory.close()
        described.close()
    pool = make_pool(POOL_BYTES, kept)
    try:
        events = EventLog()
        cache = BlockCache(
            pool,
            make_policy("lru", pool.pool_bytes),
            events,
            lambda: 0.0,
            half_stored_timeout_s=1.0,
            lease_ttl_s=1.0,
        )
        if pool.adopted:
            recovered = pool.take_recovered()
            cache.adopt(recovered.namespaces, recovered.slots, slots_at_once=20)
        check_invariants(cache)
        while cache.adopt_some():
            check_invariants(cache)
        usage = cache.pool_usage()
        assert usage.free_bytes + usage.ready_bytes == POOL_BYTES, usage
        blocks = sum(namespace.ready_blocks for namespace in cache.namespaces)
        made(cache.clear_all())
        check_invariants(cache)
        assert cache.pool_usage().free_bytes == POOL_BYTES
        assert scan_table(pool.memory_fds[1]) == []
        return blocks
    finally:
        pool.close()
