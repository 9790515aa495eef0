"""The files of a disk tier: whose they are, how large they become, and what is wrong with them is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.tiers import DISK_NAME
from kvoffd.tiers.disk_file import (
    INDEX_NAME,
    RECORD,
    DiskError,
    DiskFile,
    OpeningStopped,
    default_region_bytes,
)
from kvoffd.tiers.header import (
    HEADER_BYTES,
    MAX_FIRST_BLOCK,
    MAX_GENERATION,
    Block,
    decode_header,
    encode_header,
    make_block_group,
)
from kvoffd_proto.stats import DiskFault
from tests.kit.memory_disk import Killed, MemoryDisk, no_fault
from tests.tiers.disk_rig import GROUP, REGION_BYTES, SIZE_BYTES, DiskRig, block_of, key_of

SIZE = 4 << 20


def open_file(directory: Path, size: int = SIZE, **options: object) -> DiskFile:
    return DiskFile(directory, size, REGION_BYTES, **options)  # type: ignore[arg-type]


def test_new_files_are_the_users_own_and_all_allocated(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    found = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert set(found) == {DISK_NAME, INDEX_NAME}
    assert {status.st_mode & 0o777 for status in found.values()} == {0o600}
    assert found[DISK_NAME].st_blocks * 512 >= found[DISK_NAME].st_size
    assert SIZE * 9 // 10 < file.physical_bytes() <= SIZE
    file.close()
    file.close()


def test_records_are_allocated_before_a_file_system_fills(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 64 << 20, 16 << 20)
    for pages, slot_bytes in ((16, 64 << 10), (2, 8 << 10)):
        records = [(16 << 20) // slot_bytes * RECORD.itemsize] + [24 << 10] * (file.head.regions - 1)
        file.write_slot_pages(0, pages)
        assert os.fstat(file.index_fd).st_blocks * 512 >= sum(records)
    file.close()


@pytest.mark.parametrize("pages", [2, 3])
def test_files_with_the_smallest_slots_have_the_tiers_size_and_all_regions_later(tmp_path: Path, pages: int) -> None:
    found = []
    for _ in range(2):
        file = DiskFile(tmp_path, 64 << 20)
        found.append(file.head.regions)
        for region in range(file.head.regions):
            file.write_slot_pages(region, pages)
        assert 63 << 20 < file.physical_bytes() <= 64 << 20
        file.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [1 << 20, 64 << 20, 10 << 30, 1 << 40, 20 << 40])
def test_regions_fill_a_disk_of_any_size(size: int) -> None:
    region = default_region_bytes(size)
    assert region % PAGE_BYTES == 0
    assert size // region >= 2
    assert size * 985 // 1000 < size // region * region <= size or size < 2 << 20


@pytest.mark.parametrize("name", [DISK_NAME, INDEX_NAME])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.symlink_to("elsewhere"), "is a symbolic link"),
        (lambda path: os.mkfifo(path), "not a disk tier's file"),
        (lambda path: (path.touch(), os.link(path, path.with_name("twin"))), "not a disk tier's file"),
        (lambda path: (path.touch(), path.chmod(0o644)), "has mode 0644"),
        (lambda path: path.mkdir(), "cannot be opened"),
    ],
)
def test_a_file_not_the_daemons_own_is_refused(
    name: str, spoil: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    spoil(tmp_path / name)
    with pytest.raises(DiskError, match=why):
        open_file(tmp_path)


def test_a_foreign_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / DISK_NAME
    path.write_bytes(b"somebody's data" * 1000)
    path.chmod(0o600)
    with pytest.raises(DiskError, match="left unchanged"):
        open_file(tmp_path)
    assert path.read_bytes() == b"somebody's data" * 1000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda disk, index: index.unlink(),
        lambda disk, index: index.write_bytes(bytes(1 << 20)),
        lambda disk, index: disk.write_bytes(b"kvoffdD4".ljust(1 << 20, b"x")),
        lambda disk, index: disk.write_bytes(b"kvOffdD4" + disk.read_bytes()[8:]),
    ],
)
def test_files_of_no_use_are_emptied_and_that_is_said(spoil: Callable[[Path, Path], object], tmp_path: Path) -> None:
    first = open_file(tmp_path)
    first.close()
    spoil(tmp_path / DISK_NAME, tmp_path / INDEX_NAME)
    second = open_file(tmp_path)
    assert [kind for kind, _ in second.errors if kind is not DiskFault.NOT_DIRECT] == [DiskFault.STARTED_ANEW]
    assert second.head.file_id != first.head.file_id
    second.close()


def test_of_two_heads_the_newer_whole_one_counts(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.write_head(is_open=False, written_bytes=5)
    file.write_head(is_open=False, written_bytes=6)
    number = file.head.number
    file.close()
    index = tmp_path / INDEX_NAME
    data = bytearray(index.read_bytes())
    data[number % 2 * PAGE_BYTES + 20] ^= 1
    index.write_bytes(data)
    again = open_file(tmp_path)
    assert again.head.written_bytes == 5
    again.close()


def test_without_o_direct_it_uses_the_page_cache() -> None:
    rig = DiskRig(MemoryDisk(direct=False))
    assert not rig.tier.direct
    assert rig.listener.kinds == {"not_direct": 1}
    assert rig.write(block_of(1)) is not None
    assert rig.there([1]) == [1]


def test_a_file_system_without_room_is_an_error(tmp_path: Path) -> None:
    files = MemoryDisk()
    files.room = SIZE // 2
    with pytest.raises(DiskError, match="cannot have"):
        open_file(tmp_path, calls=files)
    assert len(files.data) == 0


def test_opening_can_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(OpeningStopped):
        open_file(tmp_path, should_stop=lambda: True)
    open_file(tmp_path).close()


@pytest.mark.parametrize("size", [2 * SIZE_BYTES, SIZE_BYTES // 2])
def test_a_disk_of_another_size_keeps_what_fits(size: int) -> None:
    rig = DiskRig()
    rig.write(*map(block_of, range(32)))
    assert rig.tier.close(1.0)
    before, rig.size_bytes = len(rig.files.data), size
    rig.open()
    assert (len(rig.files.data) > before) == (size > SIZE_BYTES)
    there = rig.there(range(32))
    assert len(there) == 32 if size > SIZE_BYTES else 0 < len(there) < 32
    for number in there:
        assert rig.read(block_of(number)) == "done"
    rig.check()
    assert rig.tier.close(1.0)
    rig.size_bytes = SIZE_BYTES
    rig.open()
    assert rig.there(range(32)) == there, "what was cut off is not there again"


class TakesMore(MemoryDisk):
    """A file system that takes two regions more for its metadata than was reserved."""

    def stat(self, fd: int) -> os.stat_result:
        found = super().stat(fd)
        if fd == 1_000_000 and found.st_size > SIZE // 2:
            found.st_blocks += 2 * REGION_BYTES // 512  # type: ignore[misc]
        return found


def test_regions_that_the_file_system_has_no_space_for_go_after_the_head_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a daemon that is killed in between leaves a head that names regions which the file does not have."""
    disk = MemoryDisk()
    file = open_file(tmp_path, calls=disk)
    regions = file.head.regions
    file.close()
    takes_more = TakesMore()
    takes_more.files = disk.files

    def fault(name: str, number: int) -> None:
        if takes_more.counts["truncate"] and name != "truncate":
            raise Killed(0)

    takes_more.fault = fault
    caplog.set_level("INFO")
    with pytest.raises(Killed):
        open_file(tmp_path, calls=takes_more)
    assert f"2 of its {regions} regions are removed" in caplog.text
    disk.locked = False
    assert open_file(tmp_path, calls=disk).errors == []


def test_a_directory_whose_index_cannot_be_opened_can_be_used_once_that_is_mended(tmp_path: Path) -> None:
    """Its other file does not stay open and locked."""
    (tmp_path / INDEX_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskError, match="is a symbolic link"):
        open_file(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    open_file(tmp_path).close()


@pytest.mark.parametrize("number", [4, 5])
def test_an_index_that_cannot_be_read_is_a_disk_error_and_leaves_no_file_open(number: int) -> None:
    """Three reads are of the file's name and head, the next ones of slot sizes and records."""
    rig = DiskRig()
    rig.write(*map(block_of, range(4)))
    assert rig.tier.close(1.0)
    already = rig.files.counts["read"]

    def fault(name: str, count: int) -> None:
        if name == "read" and count == already + number:
            raise OSError(5, "Input/output error")

    rig.files.fault = fault
    with pytest.raises(DiskError, match=r"cannot be used \(Input/output error\); check the disk"):
        rig.open()
    assert not rig.files.locked
    rig.files.fault = no_fault
    rig.open()
    assert rig.there(range(4)) == [0, 1, 2, 3]


def test_a_file_that_was_cut_off_is_reported_and_whole_again() -> None:
    rig = DiskRig()
    rig.write(*map(block_of, range(32)))
    assert rig.tier.close(1.0)
    before = len(rig.files.data)
    del rig.files.data[PAGE_BYTES + REGION_BYTES :]
    rig.open()
    assert rig.listener.kinds == {"truncated": 1}
    assert len(rig.files.data) == before
    results = {rig.read(block_of(number)) for number in range(32)}
    assert results <= {"done", "corrupt", "gone"}
    rig.check()


# --- the header ----------------------------------------------------------------------------------------


def test_a_header_says_all_of_a_block() -> None:
    group = make_block_group(b"f" * 20, MAX_GENERATION, 65_535, (1, 0, 2**40))
    block = Block(group, b"k" * 64, (0, MAX_FIRST_BLOCK, 3), (1, 2**64 - 1, 5))
    header = encode_header(block)
    assert len(header) == HEADER_BYTES
    assert decode_header(header) == block
    beyond = make_block_group(b"f", MAX_GENERATION + 1, 0, (1,))
    assert decode_header(encode_header(Block(beyond, b"k", (0,), (1,)))) is None, "none could follow it"


@pytest.mark.parametrize(("first", "checksum"), [(MAX_FIRST_BLOCK + 1, 1), (0, 0)])
def test_a_block_that_no_cache_has_room_for_is_none(first: int, checksum: int) -> None:
    assert decode_header(encode_header(Block(GROUP, key_of(1), (first,), (checksum,)))) is None


def test_what_was_never_written_is_not_read_at_the_start() -> None:
    rig = DiskRig(size_bytes=20 * REGION_BYTES)
    rig.write(block_of(1))
    assert rig.tier.close(1.0)
    before = rig.files.counts["read"]
    rig.open()
    assert rig.there([1]) == [1]
    assert rig.files.counts["read"] - before < 10, "of 18 regions one was used"
