"""The disk tier's file: whose it is, how large it is, and what was done to it meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.files import FileCalls
from kvoffd.tiers.disk import index, record_updates
from kvoffd.tiers.disk.disk_tier import DiskTier
from kvoffd.tiers.disk.file import DiskError, OpeningStopped, default_region_bytes
from kvoffd.tiers.disk.file_format import FILE_NAME, FORMAT_VERSION, Head, Record, SlotShape, pack_record, read_record
from kvoffd.tiers.disk.index import AGE_STEP_S, DiskIndex
from kvoffd.tiers.disk.opening import open_disk_tier
from kvoffd.tiers.disk.record_updates import RecordUpdates
from kvoffd.tiers.disk.regions import DiskRegions, Entry
from kvoffd.tiers.tier import MOST_FIRST_BLOCK, TierKey, TierResult
from tests.kit.memory_disk import MemoryDisk
from tests.tiers.makers import REGION_BYTES, SIZE_BYTES, DiskMaker, SteppedMaker
from tests.tiers.rig import TierRig, block_of

NUMBERS = range(12)


def stored(directory: Path) -> Path:
    """A file with blocks in it, closed."""
    rig = TierRig(DiskMaker(directory))
    for number in NUMBERS:
        rig.write(block_of(number, (10_000 if number % 2 else 30_000,)))
    rig.settle()
    assert rig.close()
    return directory / FILE_NAME


def report(rig: TierRig) -> tuple[int, set[str]]:
    """How many blocks can be read of those that are there, and the errors."""
    ids = rig.ids()
    for block_id in ids:
        ending = rig.read(rig.tier.index(*block_id[:2])[block_id.key])
        rig.settle()
        assert ending.result is TierResult.DONE
    return len(ids), set(rig.fold.kinds) - {"not_direct"}


def test_small_blocks_take_no_more_memory_than_the_index_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LEAST_INDEX_BYTES", 5 * (index.ENTRY_BYTES + 2 * index.SHARD_BYTES))
    rig = TierRig(DiskMaker(tmp_path))
    for number in NUMBERS:
        rig.write(block_of(number, (10_000,) if number % 2 else (10_000, 10_000)))
        rig.settle()
    assert sorted(int.from_bytes(block_id.key, "big") for block_id in rig.ids()) == list(NUMBERS)[-5:]
    assert rig.tier.stats().evicted_blocks == len(NUMBERS) - 5
    assert rig.close()


def test_the_file_is_allocated_and_takes_no_more_than_it_may(tmp_path: Path) -> None:
    rig = TierRig(DiskMaker(tmp_path))
    path = tmp_path / FILE_NAME
    for number in range(60):
        rig.write(block_of(number))
        rig.settle()
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
        assert path.stat().st_size <= taken + 4096
        assert taken <= SIZE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert rig.tier.stats().evicted_blocks > 0
    assert rig.close()


@pytest.mark.parametrize("direct", [True, False])
def test_it_says_whether_it_goes_past_the_page_cache(tmp_path: Path, direct: bool) -> None:
    rig = TierRig(SteppedMaker(tmp_path, MemoryDisk(direct)))
    rig.settle()
    assert rig.tier.direct is direct
    assert rig.fold.kinds == ({} if direct else {"not_direct": 1})
    assert report(rig) == (0, set())


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    rig = TierRig(DiskMaker(tmp_path))
    with pytest.raises(DiskError, match="in use"):
        TierRig(DiskMaker(tmp_path))
    assert rig.close()
    TierRig(DiskMaker(tmp_path)).close()


@pytest.mark.parametrize("content", [b"my thesis", b"\0" * 100_000, b"x" * 100_000])
def test_a_foreign_file_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(DiskError, match="left as it is"):
        TierRig(DiskMaker(tmp_path))
    assert path.read_bytes() == content


def test_links_and_others_files_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "one")
    other = tmp_path / "two"
    other.mkdir()
    (other / FILE_NAME).symlink_to(path)
    with pytest.raises(DiskError):
        TierRig(DiskMaker(other))
    (other / FILE_NAME).unlink()
    os.link(path, other / FILE_NAME)
    with pytest.raises(DiskError, match="left as it is"):
        TierRig(DiskMaker(other))
    (other / FILE_NAME).unlink()
    path.chmod(0o640)
    with pytest.raises(DiskError, match="mode 0640"):
        TierRig(DiskMaker(tmp_path / "one"))


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    maker = SteppedMaker(tmp_path)
    rig = TierRig(maker)
    maker.directory = tmp_path / "gone"
    maker.directory.touch()
    with pytest.raises((DiskError, FileExistsError)):
        maker.open(rig)


def corrupt_heads(path: Path, content: bytes, at: int) -> None:
    with path.open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + at)
            file.write(content)


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1])
def test_a_file_of_another_format_is_started_anew(tmp_path: Path, version: int) -> None:
    corrupt_heads(stored(tmp_path), version.to_bytes(4, "little"), 8)
    rig = TierRig(DiskMaker(tmp_path))
    rig.settle()
    assert report(rig) == (0, {"started_anew"})
    assert f"format {version}" in rig.fold.errors[0][1]
    assert rig.close()


def test_one_damaged_head_costs_nothing_and_two_cost_all(tmp_path: Path) -> None:
    path = stored(tmp_path)
    for page in (0, 4096):
        content = path.read_bytes()
        path.write_bytes(content[: page + 60] + b"\xff" + content[page + 61 :])
        rig = TierRig(DiskMaker(tmp_path))
        rig.settle()
        # The newer one may be the damaged one: then the older says that the file was open.
        assert report(rig)[0] == len(NUMBERS)
        assert rig.close()
    corrupt_heads(path, b"\xff", 60)
    rig = TierRig(DiskMaker(tmp_path))
    rig.settle()
    assert report(rig) == (0, {"started_anew"})
    assert rig.close()


def test_a_file_that_was_cut_off_loses_what_is_behind(tmp_path: Path) -> None:
    path = stored(tmp_path)
    os.truncate(path, (64 << 10) + REGION_BYTES + 1000)
    rig = TierRig(DiskMaker(tmp_path))
    rig.settle()
    blocks, errors = report(rig)
    assert 0 < blocks < len(NUMBERS)
    assert "truncated" in errors
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert rig.close()


def test_the_file_grows_and_shrinks_with_what_is_given(tmp_path: Path) -> None:
    path = stored(tmp_path)
    rig = TierRig(DiskMaker(tmp_path, size_bytes=4 * SIZE_BYTES))
    rig.settle()
    assert report(rig) == (len(NUMBERS), set())
    assert len(rig.tier._index.regions) > 16
    for number in range(100, 180):
        rig.write(block_of(number))
        rig.settle()
    assert report(rig)[0] > 60
    assert rig.close()
    small = (64 << 10) + REGION_BYTES * 5 // 4
    rig = TierRig(DiskMaker(tmp_path, size_bytes=small))
    rig.settle()
    assert path.stat().st_blocks * 512 <= small
    blocks, errors = report(rig)
    assert 0 < blocks < 15
    assert not errors
    assert rig.close()
    with pytest.raises(DiskError, match="too few"):
        TierRig(DiskMaker(tmp_path, size_bytes=REGION_BYTES))


def test_no_room_on_the_device_is_said_when_it_is_opened(tmp_path: Path) -> None:
    disk = MemoryDisk()
    disk.room = SIZE_BYTES // 2
    with pytest.raises(DiskError, match="No space left") as refusal:
        TierRig(SteppedMaker(tmp_path, disk))
    assert refusal.value.message.endswith("give the tier less.")
    assert len(disk.data) < SIZE_BYTES // 4, "what could not be had in full is let go"
    disk.room = SIZE_BYTES
    rig = TierRig(SteppedMaker(tmp_path, disk))
    rig.settle()
    assert rig.fold.kinds == {}


def test_opening_can_be_stopped(tmp_path: Path) -> None:
    path = stored(tmp_path)

    def open_with(stop: Callable[[], bool]) -> DiskTier:
        return open_disk_tier(
            tmp_path,
            4 * SIZE_BYTES,
            pool=memoryview(bytearray(8192)),
            digest=len,
            clock=lambda: 0.0,
            post=lambda call: None,
            listener=rig.fold,
            should_stop=stop,
        )

    rig = TierRig(SteppedMaker(tmp_path / "memory"))
    size = path.stat().st_size
    with pytest.raises(OpeningStopped):
        open_with(lambda: True)
    assert path.stat().st_size == size
    tier = open_with(lambda: False)
    assert tier.stats().blocks == len(NUMBERS)
    assert tier.close(60)


def test_wear_and_age_outlive_the_daemon(tmp_path: Path) -> None:
    rig = TierRig(SteppedMaker(tmp_path))
    born = rig.wall
    for number in range(6):
        rig.write(block_of(number))
        rig.settle()
        rig.wall += 5 * 3600
    rig.restart()
    rig.wall += 7 * 86400
    assert rig.tier._file.head.created_at == born
    assert rig.tier._file.head.written_blocks == 6
    assert 6 * 12_288 <= rig.tier.lifetime_written_bytes < 6 * 12_288 + 20 * 32_768
    assert rig.tier.found_blocks == 6
    assert abs(rig.tier.oldest_seconds - (7 * 86400 + 30 * 3600)) <= 3600
    hours = [int((born + number * 5 * 3600) // AGE_STEP_S) for number in range(6)]
    assert rig.tier._index.ages == dict.fromkeys(hours, 1)
    assert [region.slot_bytes for region in rig.tier._index.regions if region.shape] == [12_288]
    rig.tier.remove([block_of(0).id])
    rig.settle()
    assert abs(rig.tier.oldest_seconds - (7 * 86400 + 25 * 3600)) <= 3600
    assert rig.tier._index.ages == dict.fromkeys(hours[1:], 1)


def test_a_block_that_no_region_holds_is_refused_and_said_once(tmp_path: Path) -> None:
    rig = TierRig(SteppedMaker(tmp_path))
    for _ in range(2):
        assert rig.write(block_of(1, (30_000,) * 5)) is None
    rig.settle()
    assert rig.fold.kinds == {"too_large": 1}
    assert rig.tier.stats().refused_writes == 2


def test_memory_that_is_no_slot_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    rig = TierRig(SteppedMaker(tmp_path))
    block = block_of(1)
    for offsets in ([-4096], [100], [len(rig.pool) - 4096], [0, 8192], []):
        with pytest.raises(ValueError, match=r"slot|zip"):
            rig.tier.write(block, offsets, lambda result: None)
    unsummed = block._replace(shards=(block.shards[0]._replace(checksum=0),))
    with pytest.raises(ValueError, match="checksum"):
        rig.tier.write(unsummed, [0], lambda result: None)


def test_a_record_with_a_first_block_that_no_cache_has_room_for_does_not_count() -> None:
    block = block_of(1)
    shape = SlotShape.of(block)
    for first_block in (MOST_FIRST_BLOCK, MOST_FIRST_BLOCK + 1):
        odd = block._replace(shards=tuple(shard._replace(first_block=first_block) for shard in block.shards))
        packed = pack_record(Record(odd, 1, 0.0), 7, shape.record_bytes)
        found = read_record(packed, 0, shape, 7)
        assert (found.block if found is not None else None) == (odd if first_block == MOST_FIRST_BLOCK else None)


def test_the_youngest_of_two_records_of_a_block_counts(tmp_path: Path) -> None:
    """A block that left a slot and came into another, and the first record could not be cleared before a crash."""
    disk = MemoryDisk()
    rig = TierRig(SteppedMaker(tmp_path, disk))
    old, new = block_of(1, seed=1), block_of(1, seed=2)
    for filler in (block_of(0), block_of(2)):
        rig.write(filler)
        rig.settle()
    rig.write(old, seed=1)
    rig.settle()
    rig.tier.tick()
    rig.settle()
    before = bytes(disk.data[(64 << 10) + 4096 : (64 << 10) + 8192])
    rig.tier.remove([block_of(0).id, old.id])
    rig.settle()
    rig.write(new, seed=2)
    rig.write(block_of(3))
    rig.settle()
    rig.tier.tick()
    rig.settle()
    # As if the old record were there still.
    at = (64 << 10) + 4096
    after = bytes(disk.data[at : at + 4096])
    (place,) = (slot for slot in range(16) if old.id.key in after[slot * 256 : slot * 256 + 256])
    (former,) = (slot for slot in range(16) if old.id.key in before[slot * 256 : slot * 256 + 256])
    assert place != former
    disk.data[at + former * 256 : at + former * 256 + 256] = before[former * 256 : former * 256 + 256]
    disk.locked = False
    heir = rig.after_death()
    assert heir.tier.index(*new.id[:2])[new.id.key] == new


def test_a_region_is_not_cut_anew_while_its_records_are_being_written() -> None:
    regions = DiskRegions(64 << 10, 1)
    small, large = SlotShape(4096, 256), SlotShape(16384, 256)
    place = regions.take(small)
    assert place is not None
    region, slot = place
    region.entries[slot] = None
    regions.hold({region.number: None})
    regions.give_back(region, slot)
    assert regions.take(large) is None
    regions.end_hold(done=True)
    assert regions.take(large) is not None


SMALL, LARGE = (4096,), (1 << 20,)


def put(known: DiskIndex, number: int, lengths: tuple[int, ...]) -> list[TierKey] | None:
    """What is evicted for one more block; None where it found no room."""
    entry, evicted = known.take(block_of(number, lengths), 0.0)
    if entry is not None:
        known.written(entry)
    return None if entry is None else evicted


def small_and_large(smalls: range, larges: range) -> tuple[DiskIndex, RecordUpdates]:
    """Of a file of two regions, one of which has thousands of small blocks."""
    regions = DiskRegions(16 << 20, 2)
    known = DiskIndex(regions, 1 << 30)
    for number in smalls:
        assert put(known, number, SMALL) == []
    for number in larges:
        assert put(known, number, LARGE) == []
    updates = RecordUpdates(Head(bytes(16), regions.region_bytes, len(regions), 0.0), regions)
    while updates.begin() is not None:
        updates.end(done=True)
    return known, updates


def test_what_was_not_written_of_the_records_is_written_again_and_no_more() -> None:
    known, updates = small_and_large(range(1000), range(0))
    for entry in known.regions[0].entries.values():
        assert entry is not None
    known.regions.dirty.mark(entry.region, entry.slot)
    first = updates.begin()
    updates.end(done=False)
    known.regions.dirty.mark(entry.region, 0)
    again = updates.begin()
    assert first is not None
    assert again is not None
    assert (first.nbytes, again.nbytes) == (2 * PAGE_BYTES, 3 * PAGE_BYTES)


def test_very_many_records_are_written_in_several_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_updates, "_MOST_UNITS", 8)
    known, updates = small_and_large(range(1000), range(0))
    region, written = known.regions[0], list[int]()
    for slot in list(region.entries):
        known.regions.mark_stale(region, slot)
    updates.note_removed()
    while (update := updates.begin()) is not None:
        assert updates.kept_removals == 0
        assert update.nbytes <= 9 * PAGE_BYTES
        written += [offset for offset, _ in update.writes[1:]]
        updates.end(done=True)
    assert updates.kept_removals == 1
    assert not region.stale
    assert len(set(written)) == len(written) >= 1000 // 16 // 8


def test_a_region_of_very_many_blocks_is_evicted_in_parts() -> None:
    known, _ = small_and_large(range(3000), range(5000, 5015))
    gone, refused = 0, 0
    while (evicted := put(known, 6000, LARGE)) is None:
        gone, refused = 3000 - sum(entry is not None for entry in known.regions[0].entries.values()), refused + 1
        assert gone == 500 * refused
    assert (gone, len(evicted)) == (2500, 500)
    assert known.blocks == 16


def test_a_region_whose_blocks_were_used_later_is_not_gone_through() -> None:
    class Untouched(dict[int, Entry | None]):
        def values(self) -> NoReturn:
            raise AssertionError("very many blocks are gone through")

    known, _ = small_and_large(range(3000), range(5000, 5015))
    known.touch([block_of(number, SMALL).id for number in range(3000)])
    known.regions[0].entries = Untouched(known.regions[0].entries)
    assert put(known, 6000, LARGE) == [block_of(5000, LARGE).id]


def test_slots_never_overlap_records_or_the_region_s_end() -> None:
    for slot_bytes in (4096, 8192, 12_288, 2 << 20):
        for record_bytes in (256, 1024, 4096, 12_288):
            shape = SlotShape(slot_bytes, record_bytes)
            for region_bytes in (8192, 128 << 10, 4 << 20, (4 << 20) + 4096):
                slots = shape.slots(region_bytes)
                assert shape.slots_at(slots) >= 4096 + slots * record_bytes
                assert slots == 0 or shape.slots_at(slots) + slots * slot_bytes <= region_bytes
                room_for_one_more = shape.slots_at(slots + 1) + (slots + 1) * slot_bytes <= region_bytes
                assert not room_for_one_more


def test_errors_of_the_lock_are_not_taken_for_another_owner(tmp_path: Path) -> None:
    class NoLocks(FileCalls):
        def lock(self, fd: int) -> bool:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.raises(DiskError, match="No locks available"):
        TierRig(DiskMaker(tmp_path, NoLocks()))


def test_blocks_of_usual_sizes_fill_a_region() -> None:
    for size_bytes in (1 << 30, 10 << 30, 100 << 30, 4 << 40):
        region_bytes = default_region_bytes(size_bytes)
        assert size_bytes // region_bytes >= 60 or region_bytes < 17 << 20
        for slot_bytes in (64 << 10, 256 << 10, 1 << 20, 2 << 20, 3 << 20):
            slots = SlotShape(slot_bytes, 256).slots(region_bytes)
            assert slots * slot_bytes > 0.9 * region_bytes, (size_bytes, slot_bytes)
