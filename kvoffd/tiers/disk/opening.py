"""Opens a disk tier: makes its file, or rebuilds the index from the records that an earlier daemon left in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvoffd.pool.allocator import PAGE_BYTES, page_up
from kvoffd.system.files import FileCalls, OnError
from kvoffd.tiers.disk.disk_tier import DiskOptions, DiskTier, NamespaceGeneration, no_generation
from kvoffd.tiers.disk.file import DiskFile, OpeningStopped
from kvoffd.tiers.disk.file_format import read_record, read_region, region_seed
from kvoffd.tiers.disk.index import DiskIndex, index_bytes
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions, Entry
from kvoffd.tiers.disk.workers import Workers
from kvoffd.tiers.tier import Digest, TierKey, TierListener
from kvoffd_proto.stats import DiskFault


def open_disk_tier(
    directory: Path,
    size_bytes: int,
    *,
    pool: memoryview,
    digest: Digest,
    clock: Callable[[], float],
    post: Callable[[Callable[[], None]], None],
    listener: TierListener,
    options: DiskOptions = DiskOptions(),  # noqa: B008 - immutable
    calls: FileCalls | None = None,
    wall_clock: Callable[[], float] = time.time,
    make_workers: Callable[..., Workers] = Workers,
    known_generation: NamespaceGeneration = no_generation,
    stored_generation: NamespaceGeneration = no_generation,
    should_stop: Callable[[], bool] = lambda: False,
) -> DiskTier:
    """Makes the tier's file or reads the index of the one that is there. For any thread, since that takes a while.

    The listener is not told of blocks that are found: see ``DiskTier.groups``.

    Args:
        size_bytes: the most that the file may take of the device.
        pool: the pool's bytes, writable, mapped until ``close`` returned True.
        digest: the checksum of a shard, as the pool takes it.
        clock: of deadlines, in seconds. For any thread.
        post: calls a function in the daemon's thread, in the order of the calls to it. For any thread.
        calls: the system calls on the file, for tests.
        wall_clock: seconds since 1970, for the age of blocks.
        make_workers: what reads and writes.
        known_generation: the generation of a namespace, by its fingerprint; records of lower ones do not count. For any
            thread.
        stored_generation: the generation of what is written now.
        should_stop: asked in this thread now and then.

    Raises:
        DiskError: the directory cannot be used; the sentence says what to do.
        OpeningStopped: ``should_stop`` returned True.
    """
    begun = time.monotonic()
    file = DiskFile(directory, size_bytes, options.region_bytes, calls or FileCalls(), wall_clock, should_stop)
    with OnError(file.close):
        index = rebuild_index(file, index_bytes(size_bytes), should_stop, known_generation)
        return DiskTier(
            file,
            index,
            pool=pool,
            digest=digest,
            clock=clock,
            post=post,
            listener=listener,
            options=options,
            wall_clock=wall_clock,
            make_workers=make_workers,
            stored_generation=stored_generation,
            open_seconds=time.monotonic() - begun,
        )


def rebuild_index(
    file: DiskFile,
    max_bytes: int,
    should_stop: Callable[[], bool],
    known_generation: NamespaceGeneration = no_generation,
) -> DiskIndex:
    """Reads heads and records of all regions. A region that cannot be read is noted, and empty.

    Blocks count as used in the order in which they were written. Records that do not count any more are dirty.
    """
    head = file.head
    regions = DiskRegions(head.region_bytes, head.regions)
    regions.generation = max([head.generation, *head.floors.values()])
    found: dict[TierKey, Entry] = {}
    for region in regions:
        if should_stop():
            raise OpeningStopped(f"{file.path} was not opened: its opening was stopped.")
        try:
            _read_region(file, regions, region, found)
        except OSError as error:
            _note_loss(file, regions, region, DiskFault.READ_FAILED, f"cannot be read ({error.strerror or error})")
    newest = _drop_void(regions, found, known_generation)
    regions.restore()
    if file.may_be_torn:
        head.suspect_generation = regions.generation
    head.boot_id = file.boot_id
    index = DiskIndex(regions, max_bytes)
    index.found_generations = newest
    entries = list(found.values())
    # Not sorted(), which keeps all other threads waiting: for 0.1 s with 300,000 blocks.
    for number in np.argsort(np.fromiter((one.generation for one in entries), np.uint64, len(entries))).tolist():
        entry = entries[number]
        entry.suspect = entry.generation <= head.suspect_generation
        index.add(entry)
    return index


def _read_region(file: DiskFile, regions: DiskRegions, region: DiskRegion, found: dict[TierKey, Entry]) -> None:
    page = file.read_pages(region.base, PAGE_BYTES)
    head = read_region(page, file.head.file_id, region.number, file.head.region_bytes)
    if head is None:
        if any(page):
            _note_loss(file, regions, region, DiskFault.DAMAGED, "are damaged")
        return
    records = bytes(file.read_pages(region.base + PAGE_BYTES, page_up(head.slots * head.shape.record_bytes)))
    region.cut_at(head.shape, head.slots, head.generation)
    regions.generation = max(regions.generation, head.generation)
    seed = region_seed(file.head.file_id, head)
    for slot in range(head.slots):
        at = slot * head.shape.record_bytes
        record = read_record(records, at, head.shape, seed + slot)
        if record is None:
            if any(records[at : at + head.shape.record_bytes]):
                regions.mark_stale(region, slot)
            continue
        block_id = record.block.id
        regions.generation = max(regions.generation, record.generation)
        twin = found.get(block_id)
        forgotten = record.generation <= file.head.floors.get(block_id.fingerprint, 0)
        if forgotten or (twin is not None and twin.generation > record.generation):
            regions.mark_stale(region, slot)
            continue
        if twin is not None:
            del twin.region.entries[twin.slot]
            regions.mark_stale(twin.region, twin.slot)
        found[block_id] = entry = Entry(
            record.block, region, slot, record.generation, record.written_at, record.namespace_generation
        )
        region.entries[slot] = entry


def _drop_void(
    regions: DiskRegions, found: dict[TierKey, Entry], known_generation: NamespaceGeneration
) -> dict[bytes, int]:
    """Drop entries of namespaces' earlier generations. Returns, by fingerprint, the generation of the others."""
    newest: dict[bytes, int] = {}
    for (fingerprint, _, _), entry in found.items():
        if entry.namespace_generation > newest.get(fingerprint, -1):
            newest[fingerprint] = max(entry.namespace_generation, known_generation(fingerprint))
    for block_id, entry in list(found.items()):
        if entry.namespace_generation < newest[block_id.fingerprint]:
            del found[block_id], entry.region.entries[entry.slot]
            regions.mark_stale(entry.region, entry.slot)
    return newest


def _note_loss(file: DiskFile, regions: DiskRegions, region: DiskRegion, kind: DiskFault, what: str) -> None:
    # The region is written over: its blocks might be removed before its records can be read again.
    regions.mark_all_stale(region)
    sentence = f"The records of region {region.number} of {file.path} {what}; the blocks in it are lost."
    file.notes.errors.append((kind, sentence))
