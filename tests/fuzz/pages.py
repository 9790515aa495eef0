"""What lies in a slot table or on a disk, damaged: with a wrong checksum nothing is read, with a right one nothing
impossible."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import msgspec

from kvoffd.cache.namespace import NamespaceRecord, NamespaceSnapshot
from kvoffd.pool.allocator import MIN_SLOT_BYTES, PAGE_BYTES
from kvoffd.pool.checksums import digest
from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd.tiers.disk_file import _HEAD, Head
from kvoffd.tiers.header import MAX_FIRST_BLOCK, Block, decode_header, encode_header, make_block_group
from kvoffd_proto.messages import GroupSpec
from tests.fuzz.bend import Choices, bend

GEOMETRY = TableGeometry(1 << 20, 96 * 1024)
RECORD = NamespaceRecord(3, b"n" * 32, "label", 1, 32, (GroupSpec("full", 16),), "{}", ((8192,),), None, generation=1)
SNAPSHOT = NamespaceSnapshot(4, (RECORD,))
HEAD = Head(b"f" * 16, 3, 1 << 20, 4, 12_345, is_open=True)
BLOCK = Block(make_block_group(b"n" * 32, 7, 1, (5000, 3)), b"k" * 32, (0, 4), (1, 2))


def disk_pages(data: bytes) -> None:
    """A head or a block's header, with some bytes changed; every other time its checksum is made right again."""
    choices = Choices(data)
    kind, sealed = choices.byte() % 2, choices.byte() % 2 == 1
    if kind == 0:
        head = Head.unpack(_changed(choices, HEAD.pack(), _HEAD.size if sealed else None))
        assert head is None or sealed or head == HEAD, head
        assert head is None or replace(head, number=0).region_bytes >= MIN_SLOT_BYTES
    else:
        header = encode_header(BLOCK)
        block = decode_header(_changed(choices, header, PAGE_BYTES - 8 if sealed else None))
        assert block is None or sealed or block == BLOCK, block
        if block is not None:
            assert len(block.group.lengths) == len(block.first_blocks) == len(block.checksums)
            assert all(block.checksums)
            assert max(block.first_blocks, default=0) <= MAX_FIRST_BLOCK


def _changed(choices: Choices, page: bytes, checksum_at: int | None) -> bytes:
    """``checksum_at``: of the checksum to be made right; None leaves it wrong, or as it is where nothing changed."""
    changed = bytearray(page)
    for _ in range(choices.byte() % 5):
        at, piece = choices.number(255), choices.bytes(1 + choices.byte() % 8)
        changed[at : at + len(piece)] = piece[: len(page) - at]
    if checksum_at is not None and bytes(changed) != page:
        changed[checksum_at : checksum_at + 8] = struct.pack("<Q", digest(memoryview(changed)[:checksum_at]))
    return bytes(changed)


def namespaces(data: bytes) -> None:
    """The namespaces' part of a slot table: read or refused, and written to by the next daemon."""
    area = data[: GEOMETRY.namespace_bytes]
    memory = bytearray(GEOMETRY.size_bytes)
    memory[GEOMETRY.namespaces_at : GEOMETRY.namespaces_at + len(area)] = area
    table = SlotTable(memoryview(memory), GEOMETRY, new=False)
    found = table.load_namespaces(NamespaceSnapshot)
    assert found is None or isinstance(found, NamespaceSnapshot)
    assert table.save_namespaces(SNAPSHOT)
    assert SlotTable(memoryview(memory), GEOMETRY, new=False).load_namespaces(NamespaceSnapshot) == SNAPSHOT


def bent_namespaces(data: bytes) -> None:
    """A snapshot that says something else than was ever written, and is whole."""
    content = zlib.compress(bend(Choices(data), msgspec.msgpack.encode(SNAPSHOT)), 1)
    number = 2  # of the first half
    head = number.to_bytes(8, "little") + len(content).to_bytes(4, "little")
    namespaces(head + zlib.crc32(content, number).to_bytes(4, "little") + content)


def snapshot() -> bytes:
    """The namespaces' part as it is written."""
    memory = bytearray(GEOMETRY.size_bytes)
    table = SlotTable(memoryview(memory), GEOMETRY, new=True)
    assert table.save_namespaces(SNAPSHOT)
    assert table.save_namespaces(SNAPSHOT)
    return bytes(memory[GEOMETRY.namespaces_at : GEOMETRY.namespaces_at + 4096])
