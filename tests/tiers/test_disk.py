"""The disk tier: what is written is read byte for byte or not at all, whatever fails, and what goes stays away."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from itertools import count, pairwise
from random import Random

import pytest

from kvoffd.pool.checksums import digest
from kvoffd.system.threads import ENDED_AT_ONCE
from kvoffd.tiers.disk import HANG_TIMEOUT_S
from kvoffd.tiers.disk_file import INDEX_NAME, default_region_bytes
from kvoffd.tiers.disk_map import Region
from kvoffd.tiers.header import Block, make_block_group
from kvoffd.tiers.tier import Result
from tests.kit.amount import TIMES
from tests.kit.cases import case
from tests.kit.memory_disk import PAGE, MemoryDisk, names_of, no_fault
from tests.tiers.disk_rig import GROUP, ONE, OTHER, REGION_BYTES, SLOT_BYTES, DiskRig, block_of, key_of

DONE = Result.DONE
CAPACITY = 32
"""Blocks of ``SPACE`` that the rig's disk holds."""


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig()


# --- reading what was written ------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(4096,), (1,), (60_000,), (1, 9999, 4096, 12_345), (0, 5000, 0), (300, 7)])
def test_a_block_is_read_as_it_was_written(rig: DiskRig, lengths: tuple[int, ...]) -> None:
    block = block_of(1, make_block_group(ONE, 3, 1, lengths), first=7)
    rig.generations[ONE] = 3
    found: list[Block | None] = []
    for begin in (lambda: rig.write(block), rig.restart, rig.kill):
        begin()
        rig.tier.read(
            block.group,
            block.key,
            [(16 + rank) * SLOT_BYTES for rank in range(len(lengths))],
            rig.clock() + 1,
            lambda _, one: found.append(one),
        )
        rig.work()
        assert rig.read(block) is DONE
    assert found == [block] * 3
    rig.check()


def test_what_nobody_waits_for_when_its_turn_comes_is_not_read() -> None:
    """Nor does the daemon's thread end all of it in one turn."""
    rig, ends, awaited = DiskRig(most_reads=2), list[Result](), True
    blocks = [block_of(number) for number in range(2 + 3 * ENDED_AT_ONCE)]
    assert rig.write(*blocks) == [DONE] * len(blocks)
    for block in blocks:
        assert rig.tier.read(
            block.group, block.key, [16 * SLOT_BYTES], 5.0, lambda end, _: ends.append(end), lambda: awaited
        )
    awaited = False
    assert len(rig.reads.added) == 2
    rig.reads.work()
    while rig.posted:
        before = len(ends)
        rig.posted.popleft()()
        assert len(ends) - before <= 2 + ENDED_AT_ONCE
    assert ends == [DONE] * 2 + [Result.UNWANTED] * 3 * ENDED_AT_ONCE
    assert rig.tier.counters.read_blocks == 2
    assert [rig.read(block) for block in blocks] == [DONE] * len(blocks), "nothing is wrong with them"
    rig.check()


def test_of_several_whose_turn_comes_at_once_only_those_are_read_that_somebody_waits_for() -> None:
    rig, ends = DiskRig(most_reads=4), dict[int, Result]()
    blocks = [block_of(number) for number in range(12)]
    assert rig.write(*blocks) == [DONE] * len(blocks)
    awaited = set(range(12))
    for number, block in enumerate(blocks):
        rig.tier.read(
            block.group,
            block.key,
            [(16 + number) * SLOT_BYTES],
            5.0,
            lambda end, _, number=number: ends.setdefault(number, end),
            lambda number=number: number in awaited,
        )
    awaited -= set(range(5, 12, 2))
    rig.work()
    assert ends == {number: DONE if number in awaited else Result.UNWANTED for number in range(12)}
    assert rig.tier.counters.read_blocks == len(awaited)
    rig.check()


def test_spaces_are_kept_apart(rig: DiskRig) -> None:
    names = [(name, generation, group) for name in (ONE, OTHER) for generation in (0, 1) for group in (0, 1)]
    groups = [make_block_group(*one, (5000,)) for one in names]
    for number, group in enumerate(groups):
        assert rig.write(block_of(number, group)) == [DONE]
    for number, group in enumerate(groups):
        assert rig.there(range(len(groups)), group) == [number]
    assert rig.there([0], make_block_group(ONE, 0, 0, (5001,))) == [], "another geometry"
    assert rig.write(block_of(0, groups[0])) == [None], "it is there"


def test_another_geometry_takes_the_place_of_the_one_before(rig: DiskRig) -> None:
    rig.write(block_of(1), block_of(2))
    other = make_block_group(ONE, 0, 0, (9000, 30_000))
    assert rig.write(block_of(1, other)) == [DONE]
    assert rig.read(block_of(1, other)) is DONE
    assert rig.there([1, 2]) == []
    rig.check()


def test_neighbours_are_written_in_one_call() -> None:
    rig = DiskRig(merge_bytes=1 << 20, most_writes=8)
    blocks = [block_of(number) for number in range(8)]
    calls = rig.files.counts["write"]
    for block in blocks:  # all from the same slots, so that only the last one's bytes are right
        assert rig.begin_write(block) is not None
    rig.work()
    assert rig.files.counts["write"] == calls + 1
    ends = [rig.begin_read(block) for block in blocks]
    rig.work()
    assert [end[0] for end in ends if end] == [Result.CORRUPT] * 7 + [DONE]


def test_no_more_is_taken_than_the_bounds_allow() -> None:
    rig = DiskRig(most_writes=2)
    assert [rig.begin_write(block_of(number)) is not None for number in range(3)] == [True, True, False]
    rig.work()
    rig.check()


def test_no_more_bytes_are_read_at_once_than_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DiskRig()
    monkeypatch.setattr("kvoffd.tiers.disk_io.MAX_READ_BYTES", 1)
    rig.write(block_of(1))
    ends = [rig.begin_read(block_of(1), slot=slot) for slot in (16, 17, 18)]
    assert (len(rig.reads.added), rig.reads.waiting) == (1, 2)
    rig.work()
    assert ends == [[DONE]] * 3


# --- the hand --------------------------------------------------------------------------------------


def test_a_full_disk_takes_the_place_of_what_was_not_used(rig: DiskRig) -> None:
    assert rig.tier.lifetime_bytes == 0
    assert rig.write(*map(block_of, range(CAPACITY))) == [DONE] * CAPACITY
    assert rig.there(range(CAPACITY)) == list(range(CAPACITY))
    rig.tier.spare(GROUP, [key_of(0), key_of(2), key_of(99)])
    assert rig.write(block_of(100)) == [DONE]
    assert rig.there(range(CAPACITY)) == [0, *range(2, CAPACITY)], "one at a time of so few"
    assert rig.tier.lifetime_bytes > 0
    assert rig.write(*map(block_of, range(101, 107))) == [DONE] * 6
    assert rig.there([0, 2]) == [0, 2]
    for number in range(200, 200 + CAPACITY):
        rig.write(block_of(number))
    assert rig.there([0, 2]) == [], "they were not used again"
    assert rig.tier.stats().evicted_blocks == CAPACITY + 7
    for number in range(200, 200 + CAPACITY):
        assert rig.read(block_of(number)) is DONE
    rig.check()
    rig.restart()
    assert rig.there(range(200, 300)) == list(range(200, 200 + CAPACITY))
    rig.check()


@pytest.mark.parametrize("ends", ["killed", "closed"])
@pytest.mark.parametrize("more", [0, 3, 8, 11, CAPACITY])
def test_the_next_daemon_evicts_first_what_was_written_first(rig: DiskRig, more: int, ends: str) -> None:
    """Wherever the hand was. It would evict what was written last from the first slots on."""
    for number in range(CAPACITY + more):
        rig.write(block_of(number))
        rig.clock.now += 1
    (rig.kill if ends == "killed" else rig.restart)()
    rig.check()
    for number in range(CAPACITY + more, CAPACITY + more + 6):
        assert rig.write(block_of(number)) == [DONE]
    assert rig.there(range(CAPACITY + more + 6)) == [*range(more + 6, CAPACITY + more + 6)]
    rig.check()


def test_what_is_read_or_written_is_not_taken(rig: DiskRig) -> None:
    rig.write(*map(block_of, range(CAPACITY)))
    reads = [rig.begin_read(block_of(number), slot=16 + number) for number in range(CAPACITY)]
    assert rig.begin_write(block_of(100)) is None
    rig.work()
    assert reads == [[DONE]] * CAPACITY
    assert rig.write(block_of(100)) == [DONE]
    rig.check()


def test_sizes_share_the_disk_and_none_starves(rig: DiskRig) -> None:
    small, large = make_block_group(ONE, 0, 1, (4000,)), make_block_group(ONE, 0, 2, (50_000,))
    numbers = count()
    for group in (small, large, GROUP, small, large):
        taken = 0
        for _ in range(200):
            rig.tier.tick()
            (result,) = rig.write(block_of(number := next(numbers), group))
            taken += result is DONE
            if result is DONE:
                assert rig.read(block_of(number, group)) is DONE
        assert taken > 150
        rig.check()
    rig.restart()
    rig.check()


def test_a_region_is_taken_for_another_size_some_blocks_at_a_time(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd.tiers.disk_map.CLEARED_AT_ONCE", 2)
    rig.write(*map(block_of, range(CAPACITY)))
    there, large = [rig.tier.stats().blocks], make_block_group(OTHER, 0, 0, (60_000,))
    assert not rig.tier.write(block_of(99, large), rig.fill(block_of(99, large)), lambda result: None)
    assert rig.tier.takes(large, block_of(99, large).key), "later"
    there.append(rig.tier.stats().blocks)
    while rig.posted or rig.notes.waiting:
        rig.notes.work()
        rig.posted.popleft()()
        there.append(rig.tier.stats().blocks)
    assert CAPACITY - there[-1] >= 8, "a region is free"
    assert all(before - after <= 2 for before, after in pairwise(there))
    rig.check()
    assert rig.write(block_of(99, large)) == [DONE]


def test_a_small_disk_holds_what_fits_of_several_block_sizes() -> None:
    size = 48 << 20
    rig = DiskRig(size_bytes=size, region_bytes=default_region_bytes(size))
    groups = [make_block_group(bytes([kib]) * 32, 0, 0, (kib << 10,)) for kib in (40, 44, 52, 60)]
    for number in range(200):
        for group in groups:
            sums = (digest(rig.pool[: group.nbytes]),)
            assert rig.tier.write(Block(group, key_of(number), (0,), sums), [0], lambda _: None)
            rig.work()
    assert rig.tier.stats().blocks == 800
    assert rig.tier.stats().used_bytes == 200 * sum(group.nbytes for group in groups)


def test_a_block_that_fits_no_region_is_reported_once(rig: DiskRig) -> None:
    large = make_block_group(ONE, 0, 0, (60_000,) * 3)
    assert rig.write(block_of(1, large), block_of(2, large)) == [None, None]
    assert not rig.tier.takes(large, block_of(1, large).key)
    assert rig.listener.kinds == {"too_large": 1}


# --- what is removed ---------------------------------------------------------------------------------


def test_what_is_removed_is_gone_and_not_there_after_a_restart(rig: DiskRig) -> None:
    rig.write(block_of(1), block_of(2))
    rig.remove(1, 77)
    assert rig.there([1, 2]) == [2]
    rig.restart()
    assert rig.there([1, 2]) == [2]
    rig.check()


def test_what_is_removed_before_its_geometry_is_known_is_gone(rig: DiskRig) -> None:
    """As after a restart, by an engine whose workers have not registered yet."""
    rig.write(block_of(1), block_of(2))
    rig.restart()
    rig.remove(1, group=make_block_group(GROUP.fingerprint, GROUP.generation, GROUP.group_index, ()))
    assert rig.there([1, 2]) == [2]
    rig.work()
    rig.kill()
    assert rig.there([1, 2]) == [2]


def test_keys_of_several_lengths_are_found_and_removed() -> None:
    rig, keys = DiskRig(), [bytes([number] * number) for number in (1, 16, 32, 64)]
    blocks = [block_of(number)._replace(key=key) for number, key in enumerate(keys)]
    for block in blocks:
        ends = rig.begin_write(block)
        rig.work()
        assert ends == [Result.DONE]
    rig.restart()
    asked = [*keys, bytes(32)]
    assert list(rig.tier.find(GROUP, asked, prefix=False).states) == [1, 1, 1, 1, 0]
    rig.tier.remove(GROUP, keys[1:])
    assert list(rig.tier.find(GROUP, asked, prefix=False).states) == [1, 0, 0, 0, 0]
    rig.work()
    rig.check()


def test_written_again_after_a_reset_a_block_is_never_its_old_bytes() -> None:
    """The new record may be on the device and the new bytes not."""
    places = set()
    for seed in range(40):
        rig = DiskRig()
        rig.write(*map(block_of, range(CAPACITY)))
        before = rig.tier._map.slots_of(GROUP, [key_of(0)])[0]
        new = GROUP._replace(generation=rig.reset(ONE))
        new = make_block_group(*new[:4])
        rig.work()
        assert rig.write(block_of(0, new, version=1), version=1) == [Result.DONE]
        places.add(rig.tier._map.slots_of(new, [key_of(0)])[0] == before)
        rig.cut_power(Random(seed))
        rig.read(block_of(0, new, version=1), version=1)  # which compares what it finds
        assert {group for group, _ in names_of(rig.tier)} <= {new}
    assert True in places


def test_records_of_a_region_whose_size_was_lost_are_gone(rig: DiskRig) -> None:
    for number in (1, 2):  # the thread that notes sizes is busy
        rig.begin_write(block_of(number))
        rig.writes.work()
        rig.deliver()
    rig.kill()
    assert rig.there([1, 2]) == []
    rig.write(block_of(3))
    rig.restart()
    assert rig.there([1, 2, 3]) == [3]


def test_sizes_that_nobody_writes_give_their_regions_back() -> None:
    rig = DiskRig(size_bytes=3 * REGION_BYTES + (64 << 10))
    for number, pages in enumerate((3, 4, 5, 6, 7, 8)):
        group = make_block_group(bytes([number]) * 32, 0, 0, (pages * 4096,))
        written = 0
        for block in range(60):
            written += any(rig.write(block_of(block, group)) == [Result.DONE] for _ in range(4))
        assert written == 60
    rig.check()


@pytest.mark.parametrize("ok", [True, False])
def test_removed_while_it_is_written_it_is_not_there(ok: bool) -> None:
    rig = DiskRig(merge_bytes=1)
    ends = rig.begin_write(block_of(1))
    rig.remove(1)
    assert rig.tier.wants(GROUP, [key_of(1)]) == [True]
    again = rig.begin_write(block_of(1, version=1), version=1)
    if not ok:
        rig.files.fault = fails_first("write")
    rig.work()
    assert ends == [Result.GONE if ok else Result.FAILED]
    rig.files.fault = no_fault
    assert again == [DONE]
    assert rig.read(block_of(1, version=1), version=1) is DONE
    rig.kill()
    assert rig.read(block_of(1, version=1), version=1) in (DONE, None)
    rig.check()


def test_removed_while_it_is_read_it_is_gone(rig: DiskRig) -> None:
    rig.write(block_of(1))
    ends = rig.begin_read(block_of(1))
    rig.remove(1)
    rig.work()
    assert ends == [Result.GONE]
    assert not rig.listener.kinds, "a disk is no worse for it"
    rig.check()


def test_the_size_of_a_region_that_cannot_be_noted_is_noted_later(rig: DiskRig) -> None:
    rig.files.fault = fails_first("note")
    rig.begin_write(block_of(1))
    rig.notes.work()
    rig.work()
    assert rig.listener.kinds == {"record_failed": 1}
    rig.tier.tick()
    rig.work()
    rig.kill()
    assert rig.there([1]) == [1]


def test_slots_whose_records_cannot_be_cleared_are_written_to_all_the_same(rig: DiskRig) -> None:
    rig.write(*map(block_of, range(CAPACITY)))
    rig.files.fault = fails_always("note")
    rig.remove(*range(CAPACITY))
    rig.work()
    rig.files.fault = no_fault
    rig.check()
    assert rig.write(*map(block_of, range(100, 100 + CAPACITY))) == [DONE] * CAPACITY
    rig.restart()
    assert rig.there(range(CAPACITY)) == []
    rig.check()


@pytest.mark.parametrize("then", ["restart", "another removal and a kill", "a read ends, and a restart"])
def test_a_record_that_could_not_be_cleared_is_cleared_later(rig: DiskRig, then: str) -> None:
    rig.write(*map(block_of, range(3)))
    reading = rig.begin_read(block_of(1)) if then == "a read ends, and a restart" else []
    rig.files.fault = fails_first("note")
    rig.remove(1)
    rig.notes.work()
    rig.work()
    assert rig.listener.kinds == {"record_failed": 1}
    assert reading in ([], [Result.GONE])
    rig.check()
    if then == "another removal and a kill":
        rig.remove(2)
        rig.work()
        rig.kill()
    else:
        rig.restart()
    assert 1 not in rig.there(range(3))
    rig.check()


def test_a_record_that_could_not_be_cleared_is_cleared_while_a_read_has_its_slot(rig: DiskRig) -> None:
    rig.write(*map(block_of, range(3)))
    rig.begin_read(block_of(1))
    rig.files.fault = fails_first("note")
    for number in (1, 2):
        rig.remove(number)
        while rig.notes.waiting:
            rig.notes.work()
            rig.deliver()
    rig.kill()
    assert rig.there(range(3)) == [0]
    rig.check()


@pytest.mark.parametrize("ends", ["restart", "kill"])
def test_a_region_whose_records_cannot_be_cleared_keeps_its_size_until_they_are(rig: DiskRig, ends: str) -> None:
    """Else removed blocks would be found again where the records say."""
    rig.write(*map(block_of, range(CAPACITY)))
    large = make_block_group(OTHER, 0, 0, (60_000,))
    rig.files.fault = fails_always("note")
    assert rig.write(block_of(99, large)) == [None]
    evicted = sorted({*range(CAPACITY)} - {*rig.there(range(CAPACITY))})
    assert evicted, "a region goes"
    rig.check()
    rig.files.fault = no_fault
    rig.remove(*evicted)
    rig.work()
    (rig.restart if ends == "restart" else rig.kill)()
    assert rig.there(evicted) == []
    rig.check()
    assert any(rig.write(block_of(99, large)) == [DONE] for _ in range(4)), "now it has the other size"


def test_a_region_of_another_size_is_judged_by_the_blocks_that_are_there(rig: DiskRig) -> None:
    """Those that were used and removed since do not keep it, and another one with more blocks would go."""
    rig.write(*map(block_of, range(CAPACITY)))
    first = [number for number in range(CAPACITY) if rig.tier._map.at(slot_of(rig, number))[0] is region_at_hand(rig)]
    assert len(first) == 8
    for number in first[:5]:
        assert rig.read(block_of(number)) is DONE
    rig.remove(*first[:5])
    rig.work()
    large = make_block_group(OTHER, 0, 0, (60_000,))
    assert any(rig.write(block_of(99, large)) == [DONE] for _ in range(4))
    assert sorted({*range(CAPACITY)} - {*rig.there(range(CAPACITY))}) == first
    rig.check()


def slot_of(rig: DiskRig, number: int) -> int:
    (slot,) = rig.tier._map.slots_of(GROUP, [key_of(number)])
    return slot


def region_at_hand(rig: DiskRig) -> Region:
    return next(iter(rig.tier._map.regions.values()))


@pytest.mark.parametrize(("fingerprint", "left"), [(ONE, [3]), (None, []), (b"nobody".ljust(32), [1, 2, 3])])
def test_all_of_a_namespace_is_removed(rig: DiskRig, fingerprint: bytes | None, left: list[int]) -> None:
    groups = [GROUP, make_block_group(ONE, 0, 3, (4000,)), make_block_group(OTHER, 0, 0, (4000,))]
    for number, group in enumerate(groups, 1):
        rig.write(block_of(number, group))
    writing = rig.begin_write(block_of(9))
    count = rig.tier.remove_all(fingerprint)
    assert count == 3 - len(left)
    rig.work()
    found = [number for number, group in enumerate(groups, 1) if rig.there([number], group)]
    assert found == left
    assert writing == [DONE if fingerprint and fingerprint != ONE else Result.GONE]
    rig.listener.blocks = {(group.tag, key) for group, key in names_of(rig.tier)}  # of these nobody hears one by one
    rig.check()
    rig.kill()
    assert rig.tier.found_blocks == len(left) + (writing == [DONE])


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_all_of_a_large_namespace_is_removed_in_parts(rig: DiskRig, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("kvoffd.tiers.disk_map.CLEARED_AT_ONCE", 2)
    rig.write(*map(block_of, range(9)))
    assert rig.tier.remove_all(ONE) == 9
    assert rig.tier.stats().blocks == 0
    rig.listener.blocks.clear()
    rig.posted.popleft()()
    if end == "restart":
        rig.restart()
        assert rig.tier.found_blocks == 0
        return
    rig.begin_write(block_of(3))  # again, and it stays
    rig.work()
    rig.check()
    rig.kill()
    assert rig.there(range(9)) == [3]
    assert rig.read(block_of(3)) is DONE


def test_the_time_that_opening_took_has_that_of_the_files(rig: DiskRig) -> None:
    """Most of it is the allocation of new ones."""

    def slow(name: str, number: int) -> None:
        rig.clock.now += name == "allocate"

    assert rig.tier.close(1.0)
    rig.files = MemoryDisk()
    rig.files.fault = slow
    rig.open()
    assert rig.tier.open_seconds == rig.files.counts["allocate"] > 0


# --- what another daemon, or an older copy, has left -----------------------------------------------------


def test_an_earlier_generation_does_not_come_back(rig: DiskRig) -> None:
    new = make_block_group(ONE, 4, 0, (12_000,))
    rig.write(block_of(1), block_of(2, make_block_group(OTHER, 0, 0, (12_000,))))
    assert rig.tier.close(1.0)
    rig.generations[ONE] = 4
    rig.open()
    assert rig.tier.found_blocks == 1
    rig.write(block_of(1, new))
    assert rig.tier.close(1.0)
    rig.generations.clear()  # the daemon's file is lost
    rig.open()
    assert rig.tier.found_generations == {ONE: 4, OTHER: 0}
    assert rig.there([1]) == []
    assert rig.there([1], new) == [1]
    rig.check()


def test_of_two_generations_the_higher_one_is_found(rig: DiskRig) -> None:
    for generation in (2, 7, 3):
        rig.write(block_of(generation, make_block_group(ONE, generation, 0, (5000,))))
    rig.kill()
    assert rig.tier.found_generations == {ONE: 7}
    assert [group.generation for group, _ in names_of(rig.tier)] == [7]


@pytest.mark.parametrize("old", ["kvoffd.disk", INDEX_NAME])
def test_with_one_file_older_nothing_wrong_is_read(rig: DiskRig, old: str) -> None:
    rig.write(*map(block_of, range(CAPACITY)))
    rig.restart()
    copy = rig.files.copy()
    rig.write(*map(block_of, range(100, 100 + CAPACITY)))
    assert rig.tier.close(1.0)
    rig.files.files[old] = copy.files[old]
    rig.open()
    numbers = [*range(CAPACITY), *range(100, 100 + CAPACITY)]
    assert {rig.read(block_of(number)) for number in numbers} <= {DONE, Result.GONE, None}
    rig.check()


@pytest.mark.parametrize("where", ["header", "shard", "last shard"])
@pytest.mark.parametrize("clean", [True, False])
def test_wrong_bytes_are_reported_and_gone_for_good(rig: DiskRig, where: str, clean: bool) -> None:
    group = make_block_group(ONE, 0, 0, (5000, 300))
    rig.write(block_of(1, group), block_of(2, group))
    rig.restart() if clean else rig.kill()
    at = rig.tier._map.offset(rig.tier._map.slots_of(group, [key_of(1)])[0])
    rig.files.flip(at + {"header": 50, "shard": PAGE + 4999, "last shard": 3 * PAGE + 299}[where], 3)
    assert rig.read(block_of(1, group)) is Result.CORRUPT
    assert rig.listener.kinds == {"corrupt" if clean else "torn": 1}
    assert rig.there([1, 2], group) == [2]
    rig.work()
    rig.kill()
    assert rig.there([1, 2], group) == [2]
    assert rig.read(block_of(2, group)) is DONE
    rig.check()


# --- a device that fails -------------------------------------------------------------------------------


def fails_first(name: str, number: int = errno.EIO) -> Callable[[str, int], None]:
    done: list[int] = []

    def fault(called: str, _: int) -> None:
        if called == name and not done:
            done.append(1)
            raise OSError(number, "it fails")

    return fault


def fails_always(name: str, number: int = errno.EIO) -> Callable[[str, int], None]:
    def fault(called: str, _: int) -> None:
        if called == name:
            raise OSError(number, "it fails")

    return fault


def test_a_call_that_fails_costs_one_block(rig: DiskRig) -> None:
    """Of a write of several blocks each is tried alone."""
    ends = [rig.begin_write(block_of(number)) for number in range(4)]
    rig.files.fault = fails_first("write")
    rig.work()
    assert ends == [[DONE]] * 4
    assert rig.listener.kinds == {}
    ends = [rig.begin_read(block_of(number)) for number in range(4)]
    rig.files.fault = fails_first("read")
    rig.work()
    assert ends == [[Result.FAILED], [Result.CORRUPT], [Result.CORRUPT], [DONE]]


def test_a_read_that_fails_or_is_short_is_a_miss_and_reported(rig: DiskRig) -> None:
    rig.write(block_of(1), block_of(2), block_of(3))
    rig.files.fault = fails_always("read")
    assert rig.read(block_of(1)) is Result.FAILED
    rig.files.fault = no_fault
    assert rig.there([1, 2, 3]) == [2, 3]
    del rig.files.data[PAGE:]
    assert rig.read(block_of(2)) is Result.FAILED
    assert rig.listener.kinds == {"read_failed": 1, "short_read": 1}


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, "write_failed"), (errno.ENOSPC, "no_space")])
def test_after_a_write_that_fails_none_is_taken_for_a_while(rig: DiskRig, number: int, kind: str) -> None:
    pauses = []
    for at in range(8):
        rig.files.fault = fails_always("write", number)
        assert rig.write(block_of(at)) == [Result.FAILED]
        rig.files.fault = no_fault
        began = rig.clock.now
        while rig.begin_write(block_of(100 + at)) is None:
            rig.clock.now += 0.5
        assert rig.begin_write(block_of(200 + at)) is None, "one is tried"
        assert rig.tier.refuses_writes()
        rig.files.fault = fails_always("write", number)
        rig.work()
        pauses.append(rig.clock.now - began)
        rig.clock.now += 100.0
    assert pauses[0] == 1.0
    assert pauses[-1] == 60.0
    assert set(rig.listener.kinds) == {kind}
    rig.files.fault = no_fault
    assert rig.write(block_of(1)) == [DONE]
    rig.check()


def test_a_slot_that_cannot_be_written_is_put_aside() -> None:
    rig = DiskRig(size_bytes=10 << 20, region_bytes=2 << 20)
    rig.write(*map(block_of, range(200)))
    rig.files.fault = fails_always("write")
    assert rig.write(block_of(300)) == [Result.FAILED]
    rig.files.fault = no_fault
    rig.clock.now += 100.0
    assert rig.write(block_of(301)) == [DONE]
    (bad,) = rig.tier._map.put_aside
    assert rig.tier._map.slots_of(GROUP, [key_of(301)])[0] != bad
    rig.check()


@pytest.mark.parametrize("removes", [True, False])
def test_the_record_in_a_slot_that_was_put_aside_is_cleared_later(removes: bool) -> None:
    """It is that of the evicted block which the write would have replaced."""
    rig, number = DiskRig(size_bytes=4 << 20, region_bytes=1 << 20), 0
    while not any(rig.tier._map.to_overwrite.values()):
        rig.write(block_of(number))
        number += 1
    evicted = sorted({*range(number)} - {*rig.there(range(number))})

    def fails(name: str, _: int) -> None:
        if name in ("write", "note"):
            raise OSError(errno.EIO, "it fails")

    rig.files.fault = fails
    assert rig.write(block_of(1000)) == [Result.FAILED]
    rig.files.fault = no_fault
    assert rig.tier._map.put_aside == rig.tier._map.uncleared != set()
    rig.check()
    if removes:
        rig.remove(*evicted)
        rig.work()
        assert not rig.tier._map.uncleared
        rig.check()
        rig.kill()
    else:
        rig.restart()
    assert rig.there(evicted) == []
    rig.check()


def test_a_device_that_hangs_has_nothing_until_it_answers() -> None:
    rig = DiskRig(most_reads=1)
    rig.write(block_of(1), block_of(2), block_of(3))
    first = rig.begin_read(block_of(1), 1000.0)
    later = rig.begin_read(block_of(3), 1000.0)
    rig.clock.now += HANG_TIMEOUT_S + 1
    rig.tier.tick()
    rig.deliver()
    assert rig.tier.hangs
    assert not rig.tier.available()
    assert rig.listener.kinds == {"hung": 1}
    assert (first, later) == ([], [Result.DEADLINE])
    assert rig.there([1, 2, 3]) == []
    assert rig.begin_write(block_of(4)) is None
    assert rig.tier.wants(GROUP, [key_of(1), key_of(4)]) == [False, True]
    rig.work()
    rig.tier.tick()
    rig.work()
    assert (rig.tier.hangs, first, rig.there([1, 2, 3])) == (False, [DONE], [1, 2, 3])
    rig.check()


def test_a_disk_that_is_slow_then_full_then_gone_serves_again_once_it_is_back() -> None:
    rig = DiskRig(most_reads=1)
    rig.write(*map(block_of, range(1, 7)))
    ends = [rig.begin_read(block_of(number), 1.0) for number in (1, 2)]
    rig.clock.now += 1.1
    rig.tier.tick()
    rig.work()
    assert ends == [[DONE], [Result.DEADLINE]]
    rig.files.fault = fails_always("write", errno.ENOSPC)
    assert rig.write(block_of(7)) == [Result.FAILED]
    assert (rig.tier.available(), rig.tier.refuses_writes()) == (True, True)
    assert rig.read(block_of(2)) is DONE

    def gone(name: str, _: int) -> None:
        raise OSError(errno.EIO, "it is gone")

    rig.files.fault = gone
    rig.clock.now += 100.0
    assert rig.read(block_of(2)) is Result.FAILED
    assert rig.write(block_of(8)) == [Result.FAILED]
    rig.remove(3)
    rig.tier.tick()
    rig.work()
    assert rig.there(range(1, 10)) == [1, 4, 5, 6]
    rig.check()
    rig.files.fault = no_fault
    rig.clock.now += 100.0
    assert rig.write(block_of(9)) == [DONE]
    rig.remove(4)
    rig.restart()
    assert rig.there(range(1, 10)) == [1, 5, 6, 9], "what was removed while it was gone stays away"
    rig.check()


def test_a_slow_device_whose_reads_end_does_not_hang() -> None:
    rig = DiskRig(most_reads=4)
    blocks = [block_of(number) for number in range(1, 9)]
    rig.write(*blocks)
    ends = [rig.begin_read(block, HANG_TIMEOUT_S) for block in blocks]
    while rig.reads._reading:
        rig.clock.now += HANG_TIMEOUT_S - 1
        rig.tier.tick()
        assert not rig.tier.hangs
        rig.reads.do(rig.reads.added.popleft())
        rig.deliver()
    assert ends == [[DONE]] * 8, "however long the others took"


def test_reads_wait_no_longer_than_their_patience_for_one_to_end() -> None:
    rig = DiskRig(most_reads=1)
    rig.write(block_of(1), block_of(2), block_of(3))
    ends = [rig.begin_read(block_of(number), patience_s) for number, patience_s in ((1, 1.0), (2, 1.0), (3, 5.0))]
    rig.clock.now += 0.9
    rig.tier.tick()
    assert ends == [[], [], []]
    rig.clock.now += 0.2
    rig.tier.tick()
    assert ends == [[], [Result.DEADLINE], []]
    rig.work()
    assert ends == [[DONE], [Result.DEADLINE], [DONE]]


def test_a_call_that_does_not_end_keeps_the_files_open(rig: DiskRig) -> None:
    rig.write(block_of(1))
    ends = rig.begin_read(block_of(1), 1000.0)
    added, rig.reads.added = rig.reads.added, deque()
    assert not rig.tier.close(0.0)
    assert rig.files.locked
    rig.reads.added = added
    assert rig.tier.close(0.0)
    assert not rig.files.locked
    assert ends == [DONE]
    assert rig.tier.close(0.0), "it may be closed again"


def test_what_waits_when_it_is_closed_is_cancelled() -> None:
    rig = DiskRig(most_reads=1)
    rig.write(block_of(1))
    first = rig.begin_read(block_of(1), slot=17)
    read, written = rig.begin_read(block_of(1)), rig.begin_write(block_of(2))
    assert rig.tier.close(1.0)
    assert (first, read, written) == ([DONE], [Result.CANCELLED], [Result.CANCELLED])
    assert rig.begin_read(block_of(1)) is None
    assert rig.begin_write(block_of(3)) is None
    rig.open()
    assert rig.there([1, 2, 3]) == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_lifetime_bytes_and_age_outlive_a_kill(rig: DiskRig, fails: bool) -> None:
    rig.write(*map(block_of, range(3)))
    written = rig.tier.lifetime_written_bytes
    assert written >= 3 * 12_000
    if fails:
        rig.files.fault = fails_first("note")
    for _ in range(1 + fails):
        rig.tier.tick()
        rig.work()
    rig.clock.now += 7200
    rig.kill()
    assert rig.tier.lifetime_written_bytes == written
    assert 7200 <= rig.tier.oldest_seconds <= 3 * 3600
    rig.write(block_of(3))
    rig.remove(*range(3))
    assert rig.tier.oldest_seconds <= 3600
    rig.remove(3)
    assert rig.tier.oldest_seconds == 0


# --- kills, power cuts and everything together ----------------------------------------------------------


def test_whatever_happens_bytes_are_right() -> None:
    for seed in range(6 * TIMES**2):
        with case(seed):
            live(Random(seed))


def live(random: Random) -> None:
    """Several lives of a disk: resets, kills in the middle of calls, power cuts, failures and flipped bits."""
    files, groups = MemoryDisk(), [GROUP, make_block_group(OTHER, 0, 1, (3000, 9000))]
    rig = DiskRig(files, most_writes=4, most_reads=random.choice((1, 4)))
    for _ in range(300):
        at, number = random.randrange(2), random.randrange(40)
        block = block_of(number, groups[at])
        match random.randrange(13):
            case 0 | 1 | 2 | 3:
                rig.begin_write(block)
                rig.work()
            case 4 | 5 | 6:
                assert rig.read(block) in (None, DONE, Result.GONE, Result.CORRUPT, Result.FAILED)
            case 7:
                rig.remove(number, group=groups[at])
                assert rig.there([number], groups[at]) == []
            case 8:
                files.fault = random.choice((fails_first("write"), fails_first("note"), fails_first("read")))
            case 9:
                files.fault = no_fault
                rig.clock.now += 100.0
                rig.tier.tick()
                rig.work()
            case 10 if len(files.data) > PAGE:
                files.flip(random.randrange(PAGE, len(files.data)), random.randrange(8))
            case 11:
                files.fault = no_fault
                rig.begin_write(block)
                if tasks := rig.writes.begin():
                    files.fault = fails_first("note") if random.random() < 0.5 else lambda name, number: PAGE
                    if random.random() < 0.5:
                        rig.tier._writes._works[0](tasks)
                    files.fault = no_fault
                rig.cut_power(random) if random.random() < 0.5 else rig.kill()
            case 12:
                fingerprint, _, group, lengths = groups[at][:4]
                rig.begin_write(block)
                groups[at] = make_block_group(fingerprint, rig.reset(fingerprint), group, lengths)
                rig.listener.blocks = {(group.tag, key) for group, key in names_of(rig.tier)}
                if random.random() < 0.5:
                    files.fault = no_fault
                    rig.cut_power(random) if random.random() < 0.5 else rig.kill()
        assert {group for group, _ in names_of(rig.tier)} <= {*groups}, "what was reset is back"
        rig.work()
        rig.check()


@pytest.mark.parametrize("removes", ["keys", "namespace", "nothing"])
@pytest.mark.parametrize("ends", ["restart", "kill"])
def test_evicted_blocks_whose_slots_wait_for_a_write_stay_away(removes: str, ends: str) -> None:
    """Several are evicted at once, and their records lie there until a write replaces them: no index has them."""
    rig, number = DiskRig(size_bytes=4 << 20, region_bytes=1 << 20), 0
    while not any(rig.tier._map.to_overwrite.values()):
        rig.write(block_of(number))
        number += 1
        assert number < 1000
    evicted = sorted({*range(number)} - {*rig.there(range(number))})
    assert len(evicted) > 1
    if removes == "keys":
        rig.remove(*evicted)
    elif removes == "namespace":
        rig.tier.remove_all(GROUP.fingerprint)
    rig.work()
    if ends == "restart":
        rig.restart()
    elif removes == "nothing":
        return  # blocks that may be served still
    else:
        rig.kill()
    assert rig.there(evicted) == []
    if removes != "namespace":
        rig.write(*map(block_of, evicted))
        assert rig.there(evicted)[-1:] == evicted[-1:], "their slots are used again"


def test_a_namespace_whose_first_blocks_were_written_over_keeps_the_others() -> None:
    """A power cut left an index that is older than the data: the hand had come to the beginning of the file again."""
    rig = DiskRig(size_bytes=4 << 20, region_bytes=1 << 20)
    first = [block_of(number) for number in range(60)]
    rig.write(*first)
    before = rig.files.copy()
    for block in first:
        rig.read(block)
    number = 1000
    while len(rig.there(range(60))) > 40:
        rig.write(block_of(number, make_block_group(OTHER, 0, 0, GROUP.lengths)))
        number += 1
    left = rig.there(range(60))
    assert left, "some are there still"
    rig.files.files[INDEX_NAME] = before.files[INDEX_NAME]
    rig.kill()
    assert {*left} <= {*rig.there(range(60))}
    assert all(rig.read(first[one]) is Result.DONE for one in left)
    for block in first:
        rig.read(block)  # compares what it gets
