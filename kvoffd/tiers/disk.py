"""The disk tier: blocks in slots of one file, written in place; a clock hand evicts blocks that were not used."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffd.pool.allocator import MIN_SLOT_BYTES
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.files import FileCalls, OnError
from kvoffd.system.threads import Workers
from kvoffd.tiers.disk_clearing import Clearing
from kvoffd.tiers.disk_file import HOUR_S, DiskFile
from kvoffd.tiers.disk_io import BlockWriter, End, Reads, SlotJob
from kvoffd.tiers.disk_map import NO_SLOT, DiskMap, KnownGroup
from kvoffd.tiers.header import Block, BlockGroup, fits_header
from kvoffd.tiers.tier import (
    ABSENT,
    FULL_PART,
    PRESENT,
    Found,
    ReadEnd,
    Result,
    Tier,
    TierListener,
    TierStats,
    WriteEnd,
)
from kvoffd_proto.stats import DiskFault
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

BLOCK_MEMORY_BYTES = 128
"""Largest memory of a block's entry."""
_MIN_BLOCKS, _BLOCKS_SHIFT = 1 << 17, 16
"""Limits of a tier's blocks: one per 64 KiB (2^16 bytes), and at least ``_MIN_BLOCKS``."""
HANG_TIMEOUT_S = 10.0
"""A disk hangs if a write takes longer, or no read has ended for this long."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
"""Pause after a failed write, doubled up to the latter."""
_PUT_ASIDE_DIVISOR = 100
"""A slot to which a write failed stays unused for good, if the tier has this many blocks for each such slot."""


class DiskOptions(NamedTuple):
    """Settings that tests and benchmarks change."""

    most_reads: int = 128
    """Blocks that are read concurrently."""
    writers: int = 2
    """Threads that write. More would slow reads down."""
    merge_bytes: int = 2 << 20
    """Largest write call for neighbouring blocks."""
    region_bytes: int | None = None
    """Region size of new files; derived from the tier's size when None."""
    most_writes: int = 64


class DiskTier(Tier):
    """Keeps blocks in the slots of the files in a directory, including those that an earlier daemon left.

    The index only says where to look: a block's header and checksums decide whether it is valid. The constructor
    may take long, and can run in any thread.

    Args:
        pool: the pool's memory.
        clock: ``time.monotonic``, by which the threads measure deadlines too.
        post: runs a call in the daemon's thread.
        generation: returns a namespace's generation: blocks of lower ones are void. Thread-safe.

    Raises:
        DiskError: the directory cannot be used.
        OpeningStopped: ``should_stop`` returned True.
    """

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        *,
        pool: memoryview,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        generation: Callable[[bytes], int],
        should_stop: Callable[[], bool] = lambda: False,
        options: DiskOptions = DiskOptions(),  # noqa: B008
        calls: FileCalls | None = None,
        wall_clock: Callable[[], float] = time.time,
        make_reads: Callable[..., Reads] = Reads,
        make_workers: Callable[..., Workers[Any, Any]] = Workers,
    ) -> None:
        begun = clock()
        file = DiskFile(directory, size_bytes, options.region_bytes, calls, should_stop)
        super().__init__(f"disk:{directory}", listener)
        self.direct = file.direct
        self.hangs = False
        """Whether a call hangs: until it returns, the tier refuses work."""
        self._file, self._options = file, options
        self._clock, self._wall_clock, self._post = clock, wall_clock, post
        self._map = DiskMap(file)
        self._most_blocks = most_blocks(file.size_bytes)
        self._writing: dict[tuple[int, bytes], SlotJob] = {}
        """Writes that have not ended, by tag and key. If a block is removed while it is written, its write leaves this
        table: at its end nothing is entered into the index."""
        self._used_when_full = 0
        """Bytes of the used slots at the last eviction, which is what the disk can hold: with regions of several slot
        sizes, some never fill up."""
        self._pause_s = 0.0
        """Pause after the last write, which failed; 0 if it did not."""
        self._write_at = -inf
        """Time when that pause ends."""
        self._closed = False
        name = f"kvoffd-disk-{directory.name}"
        with file.closed_on_error():
            self.found_generations = self._map.open(generation, should_stop)
            """Highest generation of the blocks found, by fingerprint."""
            self._reads = make_reads(name, file, pool, options.most_reads, self._read_ended, post, clock)
            # If a thread does not start, those that run are ended.
            with OnError(lambda: self._reads.close(time.monotonic() + HANG_TIMEOUT_S)):
                writer = BlockWriter(file, pool, options.merge_bytes, wall_clock)
                works = [writer.write] * options.writers
                make_threads = partial(make_workers, failed=self._bug, post=post, clock=clock)
                self._writes = make_threads(f"{name}-w", works, on_end=self._write_ended, take=writer.next)
                with OnError(lambda: self._writes.close(time.monotonic() + HANG_TIMEOUT_S)):
                    self._clearing = Clearing(
                        file,
                        self._map,
                        self.counters,
                        partial(make_threads, f"{name}-n"),
                        post,
                        lambda group, keys: listener.blocks_removed(self, group, keys),
                        self._error,
                    )
        self.found_blocks = self._map.blocks
        self._opened_at = clock()
        self.open_seconds = self._opened_at - begun
        for kind, sentence in file.errors:
            post(partial(self._error, kind, sentence))

    # --- lookups ---------------------------------------------------------------------------------

    def available(self) -> bool:
        return not (self.hangs or self._closed)

    def refuses_writes(self) -> bool:
        return self._pause_s > 0

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        if self.hangs:
            return Found(bytes(len(keys)))
        slots = self._map.find(group, keys)
        return Found(np.where(slots == NO_SLOT, np.uint8(ABSENT), np.uint8(PRESENT)).tobytes())

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        pairs = zip(keys, self._map.find(group, keys).tolist(), strict=True)
        return [slot == NO_SLOT and (group.tag, key) not in self._writing for key, slot in pairs]

    def spare(self, group: BlockGroup, keys: Sequence[bytes]) -> None:
        self._map.spare(group, keys)

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        """See Tier. Begun reads cannot be cancelled. Waiting ones end when none has ended for their patience, or nobody
        waits for them in their turn."""
        (slot,) = self._map.find(group, [key]).tolist()
        if slot == NO_SLOT or not self.available():
            return False
        where = self._map.pin_for(self._map.readable_by_tag[group.tag], slot)
        self._reads.put(SlotJob(group, key, *where, offsets, on_end, patience_s, is_awaited))
        return True

    def _read_ended(self, job: SlotJob, end: End) -> None:
        is_current = self._map.end_read(job.slot, is_whole=end.result is Result.DONE)
        if not is_current and end.result in (Result.DONE, Result.CORRUPT):
            end = End(Result.GONE)  # removed during the read, which may have found its header cleared
        if end.fault is DiskFault.CORRUPT and self._file.may_be_torn and self._map.was_found(job.slot):
            end = end._replace(fault=DiskFault.TORN)
        if end.fault is not None:
            self._error(end.fault, end.sentence)
        if is_current and end.result in (Result.GONE, Result.CORRUPT, Result.FAILED):  # it would fail again
            self._clearing.free([job.slot])
        if end.result is Result.DONE:
            self.counters.read_blocks += 1
            self.counters.read_bytes += job.nbytes
        job.on_end(end.result, end.block)

    # --- writing ---------------------------------------------------------------------------------

    def write(self, block: Block, offsets: Sequence[int], on_end: WriteEnd) -> bool:
        group, key = block.group, block.key
        if not self.wants(group, [key])[0]:
            return False
        known = self._map.known(group) or KnownGroup(group)
        if not known.number and not self._fits(known):  # a group with a number has blocks here
            self._report_too_large(group)
            return False
        most = 1 if self.refuses_writes() else self._options.most_writes  # one tries whether it still fails
        if not self.available() or len(self._writing) >= most or self._clock() < self._write_at:
            return False
        if (slot := self._take(known.slot_bytes)) is None:
            return False
        assert all(block.checksums), "without checksums, a damaged block could not be detected"
        if not known.number:  # only now that there is a slot, since blocks of another geometry go
            self._add_group(known)
        where = self._map.pin_for(known, slot)
        self._writing[group.tag, key] = job = SlotJob(group, key, *where, offsets, on_end, block=block)
        self._writes.put(job)
        return True

    def takes(self, group: BlockGroup, key: bytes) -> bool:
        return self._fits(KnownGroup(group))

    def _add_group(self, known: KnownGroup) -> None:
        """Add a new group. It replaces one of another geometry, whose blocks are removed."""
        tag = known.group.tag
        if (before := self._map.readable_by_tag.get(tag)) is not None:
            written = [key for other, key in self._writing if other == tag]
            self.remove(before.group, [*self._map.keys_of(before), *written])
        self._map.add_group(known)

    def _fits(self, known: KnownGroup) -> bool:
        """Return whether the tier can have blocks of this group, with keys of any length."""
        fits = MIN_SLOT_BYTES <= known.slot_bytes <= self._map.slots.region_bytes
        fits = fits and known.group.nbytes < 1 << 32  # its record has 4 bytes for this number
        return fits and fits_header(known.group, MAX_KEY_BYTES)

    def _report_too_large(self, group: BlockGroup) -> None:
        """Report a block that does not fit, once: there will be many."""
        if not self.counters.errors[DiskFault.TOO_LARGE]:
            self._error(
                DiskFault.TOO_LARGE,
                f"Blocks of {group.nbytes} bytes are not written to {self.name}: a block has at most 4 GiB and the "
                f"{format_size(self._map.slots.region_bytes)} of a region; larger tiers have larger ones.",
            )

    def _take(self, size: int) -> int | None:
        """Take a slot of a size for a write, evicting if needed; None if there is none now."""
        if self._map.blocks + len(self._writing) < self._most_blocks and len(slots := self._map.slots.take(size, 1)):
            slot = int(slots[0])
            if (number := slot // self._map.slots.slots_per_region) not in self._map.regions:
                self._map.open_region(number, size)
                self._clearing.region_opened(number, size)
            return slot
        if not self._map.to_overwrite.get(size) and not self._evict_next(size):
            return None
        return self._map.to_overwrite[size].pop(0)

    def _evict_next(self, size: int) -> bool:
        """Evict blocks where the clock hand is; return whether the next write may overwrite one of this slot size.

        A region of another size that goes as a whole has free slots once the index is cleared; nothing else is evicted
        until then.
        """
        if self._clearing.is_freeing:  # slots are becoming free
            return False
        passed = self._map.advance_hand(size)
        self.counters.evicted_blocks += passed.blocks
        if passed.region is not None:
            self._clearing.free_in_steps(self._map.slots_of_region(passed.region), is_void=False)
        if passed.victims:
            self._used_when_full = self._map.slots.used_bytes
            self._clearing.drop(passed.victims)
            self._map.to_overwrite.setdefault(size, []).extend(passed.victims)
        if passed.is_round:  # evicted slots of other sizes would keep their regions from changing size
            self._clearing.clear_to_overwrite(but=size)
        return bool(passed.victims)

    def _write_ended(self, job: SlotJob, end: End) -> None:
        if end.fault is not None:
            self._error(end.fault, end.sentence)
        which, result = (job.group.tag, job.key), end.result
        was_removed = self._writing.get(which) is not job  # another write of the block may have begun since
        if not was_removed:
            del self._writing[which]
        if result is Result.DONE:
            self._pause_s = 0.0
            self.counters.written_blocks += 1
            self.counters.written_bytes += job.nbytes
        elif result is Result.FAILED:
            self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) or _MIN_PAUSE_S
            self._write_at = self._clock() + self._pause_s
            if (len(self._map.put_aside) + 1) * _PUT_ASIDE_DIVISOR <= self._map.blocks:
                self._map.put_aside.add(job.slot)
        if result is Result.DONE and not was_removed:
            known, hour = self._map.readable_by_tag[job.group.tag], int(self._wall_clock()) // HOUR_S
            self._map.add(known, job.key, job.slot, hour)
            self._listener.blocks_stored(self, job.group, [job.key])
        else:
            self._clearing.clear_slots([job.slot])
            self._map.unpin([job.slot])
        job.on_end(Result.GONE if result is Result.DONE and was_removed else result)

    # --- removing --------------------------------------------------------------------------------

    def remove(self, group: BlockGroup, keys: Sequence[bytes], *, for_all_nodes: bool = False) -> None:
        self._clearing.clear_to_overwrite()  # the block may be among the evicted ones whose records are still there
        # Of whatever geometry: after a restart no rank may have registered yet, and ``group`` has no lengths.
        known = self._map.readable_by_tag.get(group.tag)
        slots = [] if known is None else self._map.slots_of(known.group, list(dict.fromkeys(keys)))
        for key in keys:
            self._writing.pop((group.tag, key), None)  # the block is dropped at the end of the write
        self._clearing.free(slots)

    def remove_all(self, fingerprint: bytes | None) -> int:
        self._clearing.clear_to_overwrite()  # see ``remove``
        gone = [known for known in self._map.readable_by_tag.values() if fingerprint in (None, known.group.fingerprint)]
        tags = {known.group.tag for known in gone}
        for which in [which for which in self._writing if which[0] in tags]:
            del self._writing[which]
        if gone:
            self._clearing.free_in_steps(self._map.remove_whole(gone), is_void=True)
        return sum(known.blocks for known in gone)

    # --- the rest --------------------------------------------------------------------------------

    @property
    def lifetime_bytes(self) -> int:
        used = self._map.slots.used_bytes
        return used if self._used_when_full and used >= FULL_PART * self._used_when_full else 0

    @property
    def lifetime_written_bytes(self) -> int:
        return self._clearing.lifetime_written_bytes

    @property
    def is_unlinked(self) -> bool:
        return self._clearing.is_unlinked

    @property
    def oldest_seconds(self) -> float:
        """Upper limit of the oldest block's age; 0 without blocks. The index has only the hour of each write."""
        if (hour := self._map.oldest_hour) is None:
            return 0.0
        age_s = max(0.0, self._wall_clock() - hour * HOUR_S)
        # The hour may have begun before the opening. Without blocks found then, all were written since.
        return age_s if self.found_blocks else min(age_s, self._clock() - self._opened_at)

    def bytes_by_namespace(self) -> Counter[bytes]:
        """Bytes of readable blocks by fingerprint."""
        found = Counter[bytes]()
        for known in self._map.readable_by_tag.values():
            found[known.group.fingerprint] += known.blocks * known.group.nbytes
        return found

    def tick(self) -> None:
        self._reads.end_overdue()
        hangs = max(one.longest_s for one in (self._reads, self._writes, self._clearing.threads)) > HANG_TIMEOUT_S
        if hangs and not self.hangs:
            self._error(
                DiskFault.HUNG,
                f"A call to {self._file.path} has taken more than {HANG_TIMEOUT_S:.0f} s: reads and writes stop until "
                "it returns.",
            )
        self.hangs = hangs
        if hangs:
            self._reads.end(Result.DEADLINE)
            self._writes.end(End(Result.DEADLINE))
        else:
            self._clearing.tick()

    def stats(self) -> TierStats:
        return replace(
            self.counters,
            size_bytes=self._file.size_bytes,
            used_bytes=self._map.nbytes,
            physical_bytes=self._clearing.physical_bytes,
            blocks=self._map.blocks,
            queued_reads=self._reads.waiting,
            queued_writes=self._writes.waiting,
            errors=self.counters.errors.copy(),
        )

    def close(self, deadline_s: float) -> bool:
        """See Tier. If a call hangs, the files stay open and locked, and ``close`` may be called again later."""
        until = time.monotonic() + deadline_s
        self._closed = True
        if self._file.fd < 0:
            return True
        self._reads.end(Result.CANCELLED)
        self._writes.end(End(Result.CANCELLED))
        if not self._clearing.finish(until):
            return False
        ended = [one.close(until) for one in (self._reads, self._writes, self._clearing.threads)]
        if not all(ended):
            return False
        try:
            self._clearing.close_files()
        except OSError as error:
            logger.warning("Closing %s: %s.", self._file.path, error.strerror or error)
        self._file.close()
        return True

    def _bug(self, error: Exception) -> End:
        logger.error("A thread of %s failed.", self.name, exc_info=error)
        return End(Result.FAILED, None, DiskFault.BUG, f"A disk thread failed ({error!r}): a bug; the log has more.")


def most_blocks(size_bytes: int) -> int:
    """Return the most blocks of a tier of this size."""
    return max(_MIN_BLOCKS, size_bytes >> _BLOCKS_SHIFT)


def index_bytes(size_bytes: int) -> int:
    """Return the largest memory for the blocks of a disk of this size."""
    return most_blocks(size_bytes) * BLOCK_MEMORY_BYTES
