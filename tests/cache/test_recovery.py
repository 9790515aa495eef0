"""What a successor recovers from a slot table, wherever its writer was killed and whatever was damaged."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import weakref
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.cache.block_table import BlockTable
from kvoffd.cache.namespace import Group, Namespace, NamespaceSnapshot, Shards
from kvoffd.cache.recovery import RecoveredBlocks, recover
from kvoffd.cache.states import CORRUPT, READY, UNVERIFIED, WRITTEN
from kvoffd.cache.tickets import StorePart
from kvoffd.pool.allocator import SlotAllocator, page_up
from kvoffd.pool.slot_table import (
    BAD_RECORD,
    READY_RECORD,
    RECORD,
    RECORD_BYTES,
    BadTable,
    SlotTable,
    TableGeometry,
    check_table,
)
from kvoffd.system.native import native
from kvoffd_proto.messages import GroupSpec
from tests.kit.amount import TIMES
from tests.kit.slot_cache import CacheRig

MIB = 1 << 20
PTRACE_TRACEME, PTRACE_SINGLESTEP = 0, 9
POOL, REGION = 4 * MIB, MIB // 4
GEOMETRY = TableGeometry(POOL, REGION)
NEXT_NUMBER = 100
"""The first number of which no namespace was written down."""


def groups_of(number: int, key_bytes: int, *groups: Sequence[int]) -> list[Group]:
    """Of one namespace, each with the lengths of its ranks' shards."""
    namespace = Namespace(bytes(32), "a", len(groups[0]), key_bytes, [GroupSpec("full", 16)] * len(groups), "{}")
    namespace.number = number
    found = [Group(10 * number + 1 + index, namespace, index) for index in range(len(groups))]
    for group, lengths in zip(found, groups, strict=True):
        group.set_sizes(lengths, [max(8192, page_up(length)) for length in lengths])
    return found


NAMESPACES = {
    3: groups_of(3, 8, (8192, 12288), (5000, 5000)),
    9: groups_of(9, 32, (20000,)),
    10: groups_of(10, 8, (8192, 0)),
}
"""Of two ranks, one, and two of which one did not register."""
GROUPS = [group for groups in NAMESPACES.values() for group in groups]


class Snapshot(msgspec.Struct):
    """Of namespaces."""

    label: str


class Pool:
    """A table in memory, and what it takes to use it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("table") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, GEOMETRY.size_bytes)
        weakref.finalize(self, os.close, self.fd)
        self.memory = memoryview(mmap.mmap(self.fd, GEOMETRY.size_bytes))
        self.table = SlotTable(self.memory, GEOMETRY, new=fd is None)
        self.slots = SlotAllocator(POOL, REGION)
        self.slots.save_sizes_in(self.table.region_sizes)
        self.blocks = BlockTable(self.table.records)

    def successor(self, damage: Callable[[int], None] = lambda fd: None) -> tuple[Pool, RecoveredBlocks]:
        """As a process finds it that comes after the writer's death."""
        fd = os.memfd_create("copy")
        os.ftruncate(fd, GEOMETRY.size_bytes)
        os.pwrite(fd, os.pread(self.fd, GEOMETRY.size_bytes, 0), 0)
        damage(fd)
        check_table(fd, GEOMETRY)
        found = Pool(fd)
        return found, recover(fd, found.table, found.slots, found.blocks, GROUPS, NEXT_NUMBER)

    def take(self, namespace: int, group: int, keys: list[bytes]) -> np.ndarray:
        """[keys, ranks] slots, claimed."""
        # A key may be there: it was stored twice, as no cache does.
        self.blocks = BlockTable(self.table.records)
        self.blocks.sequence = int(self.table.records["sequence"].max())
        return self.blocks.make(self.slots, NAMESPACES[namespace][group], b"".join(keys), len(keys))

    def publish(self, namespace: int, group: int, slots: np.ndarray) -> None:
        for column in slots.T:
            self.blocks.publish(NAMESPACES[namespace][group], slots[:, 0], column, None, array("Q", [7] * len(slots)))

    def store(self, namespace: int, group: int, keys: list[bytes]) -> np.ndarray:
        slots = self.take(namespace, group, keys)
        self.publish(namespace, group, slots)
        return slots

    def found(self) -> dict[tuple[int, bytes], list[int]]:
        """By group's number and key: the slots of the READY blocks."""
        every = {}
        for groups in NAMESPACES.values():
            for group in groups:
                ready = (self.blocks.state == READY) & (self.blocks.group == group.number)
                heads = np.flatnonzero(ready).astype(np.uint32)
                keys = self.blocks.keys(heads, group.key_bytes)
                states, blocks = self.blocks.find(group, keys)
                assert states == bytes([READY]) * len(heads)
                assert blocks.tolist() == heads.tolist()
                for at, row in enumerate(self.blocks.slots(heads, len(group.lengths)).tolist()):
                    every[group.number, keys[at * group.key_bytes : (at + 1) * group.key_bytes]] = row
        return every


def keys_of(*numbers: int, key_bytes: int = 8) -> list[bytes]:
    return [number.to_bytes(key_bytes, "big") for number in numbers]


def plainly(fd: int) -> dict[tuple[int, bytes], list[int]]:
    """What is whole in a table, record by record: the oracle."""
    sizes = np.frombuffer(os.pread(fd, 8 * GEOMETRY.regions, GEOMETRY.regions_at), np.uint64).tolist()
    shards: dict[tuple[int, bytes], dict[int, tuple[int, int]]] = {}
    ranks_of: dict[int, int] = {}
    for slot in range(GEOMETRY.slots):
        data = os.pread(fd, RECORD_BYTES, GEOMETRY.records_at + slot * RECORD_BYTES)
        (record,) = np.frombuffer(data, RECORD)
        region, index = divmod(slot, REGION // 8192)
        size = sizes[region]
        if record["state"] != READY_RECORD or zlib.crc32(data[8:104]) != record["crc"]:
            continue
        if size < 8192 or size > REGION or size % 4096 or (index + 1) * size > REGION:
            continue
        if not record["checksum"] or record["sequence"] >= 2**62:
            continue
        groups = NAMESPACES.get(int(record["namespace"]), [])
        if record["group"] >= len(groups):
            continue
        group, rank, length = groups[record["group"]], int(record["rank"]), int(record["length"])
        if rank >= len(group.lengths) or record["key_bytes"] != group.key_bytes:
            continue
        if not length or length != group.lengths[rank] or max(8192, -(-length // 4096) * 4096) != size:
            continue
        ranks_of[group.number] = len(group.lengths)
        name = group.number, record["key"].tobytes()[: group.key_bytes]
        kept = shards.setdefault(name, {}).get(rank)
        if kept is None or kept[0] < record["sequence"]:
            shards[name][rank] = int(record["sequence"]), slot
    return {
        name: [found[rank][1] for rank in range(ranks_of[name[0]])]
        for name, found in shards.items()
        if len(found) == ranks_of[name[0]]
    }


def check(pool: Pool, damage: Callable[[int], None] = lambda fd: None) -> tuple[Pool, RecoveredBlocks]:
    """A successor finds exactly what is whole, in order of use, and the successor's successor the same."""
    successor, recovered = pool.successor(damage)
    found = successor.found()
    assert found == plainly(successor.fd)
    assert sorted(recovered.blocks.tolist()) == sorted(row[0] for row in found.values())
    newest = [max(int(successor.table.records["sequence"][slot]) for slot in row) for row in found.values()]
    assert len(newest) == len(set(newest))
    by_block = {row[0]: at for row, at in zip(found.values(), newest, strict=True)}
    assert [by_block[block] for block in recovered.blocks.tolist()] == sorted(newest)
    slots = [slot for row in found.values() for slot in row]
    assert set(np.flatnonzero(successor.slots.in_use).tolist()) == {*slots, *recovered.quarantined.tolist()}
    assert (successor.blocks.shard[slots] == WRITTEN | UNVERIFIED).all()
    assert successor.blocks.sequence >= max(newest, default=0)
    again, twice = successor.successor()
    assert again.found() == found
    assert twice[2:] == (0, 0, 0, 0)
    assert twice.blocks.tolist() == recovered.blocks.tolist()
    return successor, recovered


def test_whole_blocks_come_back_in_order_of_use_and_nothing_else() -> None:
    pool = Pool()
    first, second = pool.store(3, 0, keys_of(1, 2, 3)), pool.store(9, 0, keys_of(4, 5, key_bytes=32))
    pool.take(3, 1, keys_of(6))  # being written
    part = pool.take(3, 0, keys_of(7))
    pool.blocks.publish(NAMESPACES[3][0], part[:, 0], part[:, 0], None, array("Q", [7]))  # of one rank only
    unchecked = pool.take(9, 0, keys_of(8, key_bytes=32))[0]
    pool.blocks.publish(NAMESPACES[9][0], unchecked, unchecked, None, array("Q", [0]))
    successor, recovered = check(pool)
    assert recovered.blocks.tolist() == [*first[::-1, 0].tolist(), *second[::-1, 0].tolist()]
    assert recovered[2:] == (0, 0, 1, 1)  # what was claimed only is free
    freed = successor.slots.used_bytes
    assert successor.store(3, 0, keys_of(9)).size == 2
    assert successor.slots.used_bytes > freed
    assert len(check(successor)[1].blocks) == 6


# --- the order of prompts that were stored in steps ------------------------------------------------


def store_step(
    rig: CacheRig, namespace: Namespace, numbers: Sequence[int], before: Mapping[int, int], starts: Sequence[int] = (0,)
) -> None:
    """Store keys on all ranks, the last one first. ``before``: number of the key before a chain, by its start."""
    named = {start: b"".join(keys_of(number)) for start, number in before.items()}
    part = StorePart(0, b"".join(keys_of(*numbers)), starts=starts, before=named)
    for rank in reversed(range(namespace.world_size)):
        rig.commit(rig.cache.stores.begin(namespace, rank, [part]))


def oldest_first(rig: CacheRig) -> list[int]:
    """Numbers of the blocks that a successor finds, in the order in which it evicts them."""
    finder, recovered = rig.successor()
    packed = finder.cache.blocks.keys(recovered.blocks, 8)
    return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prompt_that_was_stored_in_steps_loses_its_tail_first(world_size: int) -> None:
    rig = CacheRig(64, 8)
    namespace = rig.open(world_size=world_size)
    for begin in (0, 3, 6):  # two prompts by turns
        for first in (begin, 100 + begin):
            store_step(rig, namespace, range(first, first + 3), {0: first - 1} if begin else {})
    assert oldest_first(rig) == [*range(8, -1, -1), *range(108, 99, -1)]
    store_step(rig, namespace, [9, 50, 51, 109], {0: 8, 3: 108}, starts=(0, 1, 3))  # three in one message
    assert oldest_first(rig) == [*range(109, 99, -1), 51, 50, *range(9, -1, -1)]
    store_step(rig, namespace, [*range(100, 112)], {})  # all of it again, of which most is there
    assert oldest_first(rig) == [51, 50, *range(9, -1, -1), *range(111, 99, -1)]


def test_what_came_up_from_a_tier_loses_its_tail_first() -> None:
    rig = CacheRig(64, 8)
    namespace = rig.open()
    for number in (1, 50, 2, 3):  # one at a time, the root first
        store_step(rig, namespace, [number], {})
    rig.cache.stores.order_chain(namespace.group(0), b"".join(keys_of(1, 2, 3)))
    assert oldest_first(rig) == [50, 3, 2, 1]


def test_a_block_before_that_is_not_there_any_more_is_ignored() -> None:
    rig = CacheRig(8, 8)
    namespace = rig.open()
    store_step(rig, namespace, [1], {})
    store_step(rig, namespace, [2, 3], {0: 1})
    rig.cache.invalidate(namespace, [(0, b"".join(keys_of(1)))])
    assert oldest_first(rig) == [3, 2]
    store_step(rig, namespace, range(100, 106), {})  # one of them is where 1 was
    assert oldest_first(rig) == [3, 2, *range(105, 99, -1)]


def test_a_block_before_is_believed_only_in_the_record_that_it_was_written_to() -> None:
    """An earlier release writes records without one over others, and leaves those bytes."""
    rig = CacheRig(8, 8)
    namespace = rig.open()
    store_step(rig, namespace, [1], {})
    store_step(rig, namespace, [2], {0: 1})
    records = rig.table.records
    (slot,) = rig.blocks(namespace, b"".join(keys_of(2))).tolist()
    assert oldest_first(rig) == [2, 1]
    for field, value in (("before", 10**6), ("before_key", 0), ("before_sum", 0), ("sequence", 99)):
        kept = records[slot].copy()
        records[field][slot] = value
        records["crc"][slot] = zlib.crc32(records[slot].tobytes()[8:104])
        assert oldest_first(rig) == [1, 2], field
        records[slot] = kept


def test_chains_in_a_circle_come_back_once() -> None:
    """A client may name any key."""
    rig = CacheRig(16, 8)
    namespace = rig.open()
    store_step(rig, namespace, [1, 2, 3], {0: 3})
    store_step(rig, namespace, [4, 5], {0: 4})
    store_step(rig, namespace, [6], {0: 5})
    rig.cache.stores.order_chain(namespace.group(0), b"".join(keys_of(6, 1)))
    assert sorted(oldest_first(rig)) == [1, 2, 3, 4, 5, 6]


def test_a_rank_that_is_there_twice_keeps_what_is_newer() -> None:
    pool = Pool()
    older, newer = pool.store(3, 0, keys_of(1)), pool.store(3, 0, keys_of(1))
    assert check(pool)[0].found() == {(31, keys_of(1)[0]): newer[0].tolist()}
    pool.table.records["state"][newer[0, 1:]] = 0  # it lacks a rank: the two are one block, of the newest of each
    assert check(pool)[0].found() == {(31, keys_of(1)[0]): [int(newer[0, 0]), int(older[0, 1])]}


def test_quarantined_slots_stay_so() -> None:
    pool = Pool()
    slots = pool.store(9, 0, keys_of(1, 2, 3, key_bytes=32))
    pool.table.records["state"][slots[1]] = BAD_RECORD
    successor, recovered = check(pool)
    assert recovered.quarantined.tolist() == slots[1].tolist()
    assert successor.blocks.shard[slots[1]] == CORRUPT
    assert successor.table.records["state"][slots[1]] == BAD_RECORD
    successor.slots.take(20480, 1000)
    assert len(successor.found()) == 2


@pytest.mark.parametrize("size", [50, 200, 4096, 5000, 20000])
def test_a_table_that_is_cut_off_is_refused(size: int) -> None:
    pool = Pool()
    with pytest.raises(BadTable, match=f"cut off: {size} of" if size > 64 else "damaged or cut off"):
        pool.successor(lambda fd: os.ftruncate(fd, size))


class Killed(BaseException):
    """The process is gone."""


def killed_at(line: int, act: Callable[[], object], files: tuple[str, ...]) -> bool:
    """Run ``act``, and end it before the given line that it runs in these files; False where it has fewer."""
    left = line

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Killed
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        act()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def states_of(pool: Pool, work: Callable[[], object]) -> list[bytes]:
    """All states of the table's first records while a child process does some work, instruction by instruction."""
    libc = ctypes.CDLL(None, use_errno=True)
    watched = slice(GEOMETRY.records_at, GEOMETRY.records_at + 128 * RECORD_BYTES)
    child = os.fork()
    if not child:
        try:
            libc.ptrace(PTRACE_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    found = [bytes(pool.memory[watched])]
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        pytest.skip("processes may not be traced here")
    while os.WIFSTOPPED(status):
        if libc.ptrace(PTRACE_SINGLESTEP, child, None, None):
            os.kill(child, signal.SIGKILL)
            raise OSError(ctypes.get_errno(), "ptrace")
        _, status = os.waitpid(child, 0)
        if pool.memory[watched] != found[-1]:
            found.append(bytes(pool.memory[watched]))
    assert os.WEXITSTATUS(status) == 0
    return found


def recover_in_place(pool: Pool) -> BlockTable:
    """A table of blocks that knows all that is in the pool, which goes on to be its own."""
    blocks, pool.slots = BlockTable(pool.table.records), SlotAllocator(POOL, REGION)
    recover(pool.fd, pool.table, pool.slots, blocks, GROUPS, NEXT_NUMBER)
    pool.slots.save_sizes_in(pool.table.region_sizes)
    return blocks


def test_a_writer_may_be_killed_at_any_instruction() -> None:
    pool = Pool()
    before = pool.store(3, 0, keys_of(1, 2))
    held = pool.store(9, 0, keys_of(3, key_bytes=32))
    geometry, blocks = NAMESPACES[3][0], recover_in_place(pool)
    columns = [pool.slots.take(size, 2) for size in geometry.lengths]  # as they will be taken once more
    for column in columns:
        pool.slots.free(column)

    # The library's functions themselves: each instruction of Python between them costs a step.
    lib, at, gone = native(), blocks.address, before[:1, 0].copy()
    keys, heads, sums = b"".join(keys_of(4, 5)), columns[0].ctypes.data, np.full(2, 7, np.uint64)
    chain = array("I", [0, 2**32 - 1]).tobytes()  # nothing is before the first of them
    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (lib.blocks_drop, (at, geometry.packed, gone.ctypes.data, 1, 0)),
        (lib.blocks_make, (at, pool.slots.address, geometry.packed, keys, 2)),
        *(
            (lib.blocks_publish, (at, geometry.packed, heads, slots.ctypes.data, 2, None, sums.ctypes.data, chain, 1))
            for slots in columns
        ),
        (lib.blocks_set_checksum, (at, int(held[0, 0]), 9)),
    ]

    def work() -> None:
        for call, values in calls:
            call(*values)

    def put(state: bytes) -> Callable[[int], None]:
        return lambda fd: os.pwrite(fd, state, GEOMETRY.records_at) and None

    states = states_of(pool, work)
    known = {(31, key) for key in keys_of(1, 2, 4, 5)}
    last: dict[tuple[int, bytes], list[int]] = {}
    for state in states:
        last = check(pool, put(state))[0].found()
        assert last[31, keys_of(2)[0]] == before[1].tolist()
        assert set(last) <= known | {(91, keys_of(3, key_bytes=32)[0])}
    assert set(last) == known - {(31, keys_of(1)[0])} | {(91, keys_of(3, key_bytes=32)[0])}
    assert len(states) > 30


def test_a_successor_may_be_killed_while_it_recovers() -> None:
    pool = Pool()
    pool.store(3, 0, keys_of(1, 2))
    part = pool.take(3, 0, keys_of(7))
    pool.blocks.publish(NAMESPACES[3][0], part[:, 0], part[:, 0], None, array("Q", [7]))
    wanted = check(pool)[0].found()
    line, killed = 0, True
    while killed:
        successor = Pool(os.dup(pool.fd))
        killed = killed_at(
            line,
            lambda successor=successor: recover(
                successor.fd, successor.table, successor.slots, successor.blocks, GROUPS, NEXT_NUMBER
            ),
            ("cache/recovery.py", "pool/slot_table.py"),
        )
        assert check(pool)[0].found() == wanted
        line += 1


@settings(max_examples=40 * TIMES**2)
@given(st.binary(min_size=1, max_size=4000), st.integers(0, 2**31), st.booleans())
def test_any_bytes_in_the_records_and_regions_are_survived(junk: bytes, seed: int, in_a_record: bool) -> None:
    """In a record of a block only that block is lost."""
    pool = Pool()
    slots = pool.store(3, 0, keys_of(*range(20))).ravel()
    at = GEOMETRY.regions_at + seed % (GEOMETRY.size_bytes - GEOMETRY.regions_at - len(junk))
    if in_a_record:
        junk, at = junk[:8], GEOMETRY.records_at + int(slots[seed % 40]) * RECORD_BYTES + seed // 40 % 120
    check(pool, lambda fd: os.pwrite(fd, junk, at) and None)


@settings(max_examples=25 * TIMES**2)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(8, 103), st.binary(min_size=1, max_size=8)), max_size=6))
def test_wrong_records_with_right_checksums_are_survived(changes: list[tuple[int, int, bytes]]) -> None:
    """All but their generations, which distinguish a block from an earlier one with its key."""
    pool = Pool()
    slots = [
        *pool.store(3, 0, keys_of(*range(20))).ravel(),
        *pool.store(9, 0, keys_of(*range(6), key_bytes=32)).ravel(),
    ]
    records = pool.table.records
    for number, at, piece in changes:
        slot = slots[number % len(slots)]
        generation, changed = records["sequence"][slot], bytearray(records[slot].tobytes())
        changed[at:104] = (bytes(changed[:at]) + piece + bytes(changed[at + len(piece) :]))[at:104]
        records[slot] = np.frombuffer(changed, RECORD)[0]
        records["sequence"][slot] = generation
        records["crc"][slot] = zlib.crc32(records[slot].tobytes()[8:104])
    check(pool)


def test_namespaces_are_kept_whole_wherever_the_writer_is_killed() -> None:
    def one(number: int) -> Snapshot:
        return Snapshot("x" * number)

    line, killed = 0, True
    while killed:
        pool = Pool()
        assert pool.table.load_namespaces(Snapshot) is None
        assert pool.table.save_namespaces(one(1))
        killed = killed_at(line, lambda pool=pool: pool.table.save_namespaces(one(200)), ("pool/slot_table.py",))
        found = pool.successor()[0].table.load_namespaces(Snapshot)
        assert found in (one(1), one(200))
        assert killed or found == one(200)
        line += 1
    successor = pool.successor()[0].table
    successor.load_namespaces(Snapshot)
    assert successor.save_namespaces(one(3))
    assert not successor.save_namespaces(Snapshot(os.urandom(100_000).hex()))
    assert pool.table.load_namespaces(Snapshot) is None, "nothing is newer than what was read"


def test_what_0_2_wrote_of_layers_is_passed_over() -> None:
    groups, layers = (GroupSpec("full_attention", 16),), ((8192, ("model.layers.0", "bfloat16", (16,), "tokens")),)
    record = 3, b"n" * 32, "label", 1, 32, groups, "{}", ((8192,),), (((1, layers),),), 7
    content = msgspec.msgpack.encode((4, (record,)))
    (found,) = msgspec.msgpack.decode(content, type=NamespaceSnapshot).namespaces
    assert (found.number, found.shard_bytes, found.generation) == (3, ((8192,),), 7)


def test_what_a_later_release_may_add_of_namespaces_is_passed_over() -> None:
    """Whoever goes back to this one keeps the blocks."""
    record = 3, b"n" * 32, "label", 1, 32, (GroupSpec("full", 16),), "{}", ((8192,),), (None,), 7, "of the record"
    found = msgspec.msgpack.decode(msgspec.msgpack.encode((4, (record,), "of all")), type=NamespaceSnapshot)
    assert (found.next_number, [one.number for one in found.namespaces]) == (4, [3])


class ShardOf02(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    blocks_per_key: int
    pages: list[tuple[int]]


class RecordOf02(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What release 0.2 reads of a namespace, and refuses if it has more."""

    number: int
    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str
    shard_bytes: tuple[tuple[int, ...] | None, ...]
    shards: tuple[tuple[ShardOf02, ...] | None, ...]
    generation: int


class SnapshotOf02(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    next_number: int
    namespaces: tuple[RecordOf02, ...]


@pytest.mark.parametrize("shards", [None, ((1, (4096, 4096)),)])
def test_0_2_reads_what_is_written_of_namespaces(shards: Shards | None) -> None:
    """An operator who goes back to it keeps the blocks."""
    rig = CacheRig(64, 8)
    namespace = Namespace(bytes(32), "label", 2, 8, [GroupSpec("full", 16)], "{}")
    rig.cache.namespaces.open(namespace)
    for rank in range(2):
        rig.cache.namespaces.register_rank(namespace, rank, [8192], None, shards)
    snapshot = rig.successor()[0].cache.table.load_namespaces(SnapshotOf02)
    (record,) = snapshot.namespaces
    assert (snapshot.next_number, record.shard_bytes) == (namespace.number + 1, ((8192,), (8192,)))
    known = None if shards is None else (ShardOf02(1, [(4096,), (4096,)]),)
    assert record.shards == (known, known)


def test_0_2_reads_also_what_a_very_small_pool_has_no_space_for() -> None:
    """A third element, the number of namespaces left out, had it start with an empty pool."""
    rig = CacheRig(64, 8)
    for number in range(64):
        name, description = os.urandom(32), os.urandom(100).hex()
        rig.cache.namespaces.open(namespace := Namespace(name, str(number), 1, 8, [GroupSpec("full", 16)], description))
        rig.cache.namespaces.register_rank(namespace, 0, [8192], None)
    snapshot = rig.successor()[0].cache.table.load_namespaces(SnapshotOf02)
    assert 10 < len(snapshot.namespaces) < 64


class Guarded:
    """The C library, which gets records at the end of memory behind which none may be read."""

    def __init__(self) -> None:
        self._first_byte = ctypes.c_char.from_buffer(mmap.mmap(-1, 2 * mmap.PAGESIZE))  # which keeps the memory
        self._end = ctypes.addressof(self._first_byte) + mmap.PAGESIZE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        if protect(ctypes.c_void_p(self._end), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.recover_blocks, self.recover_order = native().recover_blocks, native().recover_order

    def recover_records(self, recovery: object, address: int, count: int, first: int) -> None:
        at = self._end - count * RECORD_BYTES
        ctypes.memmove(at, address, count * RECORD_BYTES)
        native().recover_records(recovery, at, count, first)


@pytest.mark.parametrize("together", range(1, 9))
def test_no_record_behind_the_last_is_read(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process tries, as a fault would end it."""
    pool = Pool()
    pool.store(9, 0, keys_of(*range(20), key_bytes=32))
    wanted = check(pool)[0].found()
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr("kvoffd.cache.recovery._BATCH_BYTES", together * RECORD_BYTES)
            guarded = Guarded()
            monkeypatch.setattr("kvoffd.cache.recovery.native", lambda: guarded)
            os._exit(check(pool)[0].found() != wanted)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
