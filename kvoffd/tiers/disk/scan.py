"""What an earlier daemon left in the file: the index, made from the records."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from kvoffd.pool.slots import PAGE_BYTES, page_up
from kvoffd.tiers.disk.errors import OpeningStopped
from kvoffd.tiers.disk.file import DiskFile, OnProgress
from kvoffd.tiers.disk.format import RegionHead, read_record, read_region, region_seed
from kvoffd.tiers.disk.index import DiskIndex
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions, Entry
from kvoffd.tiers.tier import TierKey


def rebuild(file: DiskFile, on_progress: OnProgress, should_stop: Callable[[], bool]) -> DiskIndex:
    """Reads heads and records of all regions. What cannot be read is noted, and empty.

    Blocks count as used in the order of their writing. What does not count any more is dirty.
    """
    head = file.head
    regions = DiskRegions(head.region_bytes, head.regions)
    regions.generation = max([head.generation, *head.floors.values()])
    found: dict[TierKey, Entry] = {}
    size = head.regions * head.region_bytes
    for region in regions:
        if should_stop():
            raise OpeningStopped(f"{file.path} was not opened: told to stop.")
        try:
            _read_region(file, regions, region, found)
        except OSError as error:
            _note_loss(file, regions, region, "read_failed", f"cannot be read ({error.strerror or error})")
        on_progress("reading the index", (region.number + 1) * head.region_bytes, size)
    regions.restore()
    if file.was_open:
        head.doubtful = regions.generation
    book = DiskIndex(regions)
    for entry in sorted(found.values(), key=attrgetter("generation")):
        entry.suspect = entry.generation <= head.doubtful
        book.add(entry)
    return book


def _read_region(file: DiskFile, regions: DiskRegions, region: DiskRegion, found: dict[TierKey, Entry]) -> None:
    page = file.read_pages(region.base, PAGE_BYTES)
    head = read_region(page, file.head.file_id, region.number, file.head.region_bytes)
    if head is None:
        if any(page):
            _note_loss(file, regions, region, "damaged", "are damaged")
        return
    nbytes = page_up(head.slots * head.shape.record_bytes)
    records = bytes(file.read_pages(region.base + PAGE_BYTES, nbytes))
    region.cut_at(head.shape, head.slots, head.generation)
    regions.generation = max(regions.generation, head.generation)
    _take_up(file, regions, region, head, records, found)


def _note_loss(file: DiskFile, regions: DiskRegions, region: DiskRegion, kind: str, what: str) -> None:
    # Written over rather than left: what is in them might be forgotten before they can be read again.
    regions.dirty.mark_head(region)
    sentence = f"The records of region {region.number} of {file.path} {what}; the blocks in it are lost."
    file.notes.errors.append((kind, sentence))


def _take_up(
    file: DiskFile,
    regions: DiskRegions,
    region: DiskRegion,
    head: RegionHead,
    records: bytes,
    found: dict[TierKey, Entry],
) -> None:
    floors = file.head.floors
    seed = region_seed(file.head.file_id, head)
    for slot in range(head.slots):
        record = read_record(records, slot * head.shape.record_bytes, head.shape, seed + slot)
        if record is None:
            if any(records[slot * head.shape.record_bytes : (slot + 1) * head.shape.record_bytes]):
                regions.dirty.mark(region, slot)
            continue
        block_id = record.block.id
        regions.generation = max(regions.generation, record.generation)
        twin = found.get(block_id)
        forgotten = record.generation <= floors.get(block_id.fingerprint, 0)
        if forgotten or (twin is not None and twin.generation > record.generation):
            regions.dirty.mark(region, slot)
            continue
        if twin is not None:
            del twin.region.entries[twin.slot]
            regions.dirty.mark(twin.region, twin.slot)
        found[block_id] = entry = Entry(record.block, region, slot, record.generation, record.written_at)
        region.entries[slot] = entry
