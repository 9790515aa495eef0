"""The disk tier in virtual time, over files in memory that may be slow, fail, hang, go bad, or lose what they got.

What one life of the daemon wrote another one finds: the files outlive them.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from kvoffd.cache.states import READY
from kvoffd.pool.allocator import page_up
from kvoffd.pool.checksums import digest
from kvoffd.server.persistence import State
from kvoffd.server.service import Service
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.disk_io import BlockRead
from kvoffd.tiers.header import Block, BlockGroup, decode_header
from kvoffd.tiers.tier import ReadEnd, Result, TierListener
from tests.kit.memory_disk import MemoryDisk, ReadsWithoutThreads, WorkersWithoutThreads, names_of
from tests.sim.clock import Broken, Clock, Stops
from tests.sim.pool import PAGE, BlockName

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon
    from tests.sim.shared import SimShared

REGIONS = 6
"""About so many regions of slots of one size; they hold what a pool holds, or several times that."""


class Device(MemoryDisk):
    """The files, and what may be in them by what the daemons were asked for."""

    def __init__(self, largest_block_bytes: int, pool_bytes: int, clock: Clock, counts: Counter[str]) -> None:
        super().__init__()
        self.stops = Stops(clock, counts)
        self.region_bytes = -(-max(largest_block_bytes + 3 * PAGE, pool_bytes // REGIONS) // PAGE) * PAGE
        self.written: dict[BlockName, int] = {}
        """Blocks of which a write was begun since they were dropped for good, and when that was, as a number."""
        self.begun = 0
        """Writes that were begun."""


class SimWorkers(WorkersWithoutThreads):
    """Does what a tier's threads do, each call some time after it was begun."""

    def __init__(self, tier: SimDisk | SimShared, *given: Any, **named: Any) -> None:
        self._tier = tier
        super().__init__(*given, **named)

    def put(self, task: Any) -> None:
        super().put(task)
        self._begin_all()

    def _begin_all(self) -> None:
        for number in range(len(self._works)):
            if tasks := self.begin(number):
                self._tier.process.after(self._tier.seconds_of(self), partial(self._end, number, tasks))

    def _end(self, number: int, tasks: list[Any]) -> None:
        if left_s := self._tier.stops.left_s:
            self._tier.process.after(left_s, partial(self._end, number, tasks))
        elif self._running.get(number, (0.0, None))[1] is tasks:
            self._do(number, tasks)
            self._begin_all()


class SimReads(ReadsWithoutThreads):
    """Each read ends some time after it was begun."""

    def __init__(self, tier: SimDisk, *given: Any) -> None:
        self._tier = tier
        super().__init__(*given)

    def _add(self, read: BlockRead) -> None:
        super()._add(read)
        self._tier.stops.read_begins()
        self._tier.process.after(self._tier.seconds_of(self), partial(self._end, read))

    def _end(self, read: BlockRead) -> None:
        if left_s := self._tier.stops.left_s:
            self._tier.process.after(left_s, partial(self._end, read))
        elif read in self.added:
            self.added.remove(read)
            self._tier.before_read(read)
            self.do(read)


class SimDisk:
    """What one life of the daemon has of the disk: the tier itself, with a watch on who uses which slot."""

    def __init__(self, file: Device, daemon: SimDaemon, rng: random.Random) -> None:
        self.file, self.process, self._daemon, self._rng = file, daemon.process, daemon, rng
        self.stops = file.stops
        self._pool, self._clock, self._faults = daemon.pool, daemon.clock, daemon.world.faults
        self._fails_next = False
        self._reads: dict[object, tuple[BlockName, int]] = {}
        """Those under way, with the offset of the first shard."""
        self._gone: dict[BlockName, int] = {}
        """Blocks that were dropped in this life, with the number of their last write before."""
        self._stale: set[object] = set()
        """Those of them whose block was dropped since they began."""
        self._most_s = rng.choice((0.003, 0.003, 0.05))
        """The longest that a call takes if nothing is wrong."""
        self.tier: DiskTier
        self.takes_writes = True

    def open(self, listener: TierListener, service: Service) -> DiskTier:
        """Find what the life before has left."""
        self._service = service
        file, rng = self.file, self._rng
        file.fault = lambda name, number: None
        most = rng.choice((1, 3, 64))
        size = self._pool.pool_bytes * rng.choice((1, 4)) + 3 * file.region_bytes
        options = DiskOptions(
            most_reads=rng.choice((1, 4, 16)),
            merge_bytes=rng.choice((1, 1 << 20)),
            region_bytes=file.region_bytes,
            most_writes=most,
        )
        self._size = size
        self.tier = self._open(
            file, options, self._daemon.post_of_tier, listener, partial(SimReads, self), partial(SimWorkers, self)
        )
        self._write, self._read = self.tier.write, self.tier.read
        self.tier.write, self.tier.read = self.write, self.read  # type: ignore[method-assign]
        file.fault = self._fault
        return self.tier

    def _open(
        self,
        file: MemoryDisk,
        options: DiskOptions,
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        make_reads: Callable[..., ReadsWithoutThreads],
        make_workers: Callable[..., WorkersWithoutThreads],
        state: State | None = None,
    ) -> DiskTier:
        return DiskTier(
            Path("/"),
            self._size,
            pool=memoryview(self._pool.data),
            clock=self._clock,
            post=post,
            listener=listener,
            generation=(state or self._service.state).generations.of,
            options=options,
            calls=file,
            wall_clock=self._clock,
            make_reads=make_reads,
            make_workers=make_workers,
        )

    def blocks(self) -> Iterator[BlockName]:
        """What can be read."""
        return (
            BlockName(block_group.fingerprint, block_group.group_index, key) for block_group, key in names_of(self.tier)
        )

    # --- who uses which slot ---------------------------------------------------------------------------

    def write(self, block: Block, offsets: Sequence[int], on_end: Callable[[Result], None]) -> bool:
        begin = partial(self._write, block, offsets)
        if not self.takes_writes or not self._pool.lend(offsets, "ready", "the disk writes", begin, on_end):
            return False
        self._clock.note(f"disk writes {block.key.hex()[:8]}")
        self.file.begun += 1
        self.file.written[BlockName(block.group.fingerprint, block.group.group_index, block.key)] = self.file.begun
        return True

    def read(
        self,
        block_group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool],
    ) -> bool:
        name = BlockName(block_group.fingerprint, block_group.group_index, key)

        def ended(result: Result, block: Block | None) -> None:
            self._faults.counts["disk_read"] += result is Result.DONE
            end(result, block)
            del self._reads[ended]
            self._check_stale(ended, name, offsets[0])

        end = self._daemon.promotions.watched(on_end)
        begin = partial(self._read, block_group, key, offsets, patience_s, is_awaited=is_awaited)
        if not self._pool.lend(offsets, "writing", "the disk reads", begin, ended):
            return False
        self._daemon.promotions.begun(on_end)
        self._clock.note(f"disk reads {key.hex()[:8]}")
        self._reads[ended] = name, offsets[0]
        return True

    # --- time and faults -------------------------------------------------------------------------------

    def seconds_of(self, workers: object) -> float:
        seconds = self._rng.uniform(0.0002, self._most_s)
        if self._faults.hit("disk_slow"):
            seconds = self._rng.uniform(0.02, 0.3)
        if self._faults.hit("disk_hang"):
            seconds = self._rng.uniform(1.0, 4.0)
        return seconds

    def before_read(self, read: BlockRead) -> None:
        """Flip a bit of what is about to be read."""
        if self._faults.hit("disk_corrupt"):
            lengths = [PAGE, *read.summed[1:]]
            places = [0, *accumulate(map(page_up, lengths))][: len(lengths)]
            at, length = self._rng.choice([one for one in zip(places, lengths, strict=True) if one[1]])
            self.file.flip(read.offset + at + self._rng.randrange(length), self._rng.randrange(8))

    def _fault(self, name: str, number: int) -> int | None:
        if self._fails_next:
            self._fails_next = False
            raise OSError(errno.EIO, "Input/output error")
        if name in ("read", "write", "note") and self._faults.hit("disk_fail"):
            self._fails_next = True  # in the middle
            return PAGE if name != "note" else 8
        return None

    def crash(self) -> None:
        """The daemon is dead: of what it was writing a part may be there. If the machine is too, so it is of more."""
        self.file.fault = lambda name, number: None if self._rng.random() < 0.5 else self._die()
        for workers in (self.tier._writes, self.tier._clearing.threads):
            for number, (_, tasks) in list(workers._running.items()):
                if self._faults.hit("disk_torn"):
                    workers._works[number](tasks)
        if self._faults.hit("disk_torn"):
            self.file.lose_power(self._rng)
        self.file.locked = False

    def _die(self) -> int | None:
        raise OSError(errno.EIO, "Input/output error")

    # --- what must hold ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        reads, writes = self.tier._reads, self.tier._writes
        return any((reads.waiting, reads._reading, writes.waiting, writes.running))

    def dropped(self, gone: Callable[[BlockName], bool], before: int) -> Callable[[], None]:
        """These were dropped just now: none may be there in this life. Returns what says that of every later one too.

        But for those of which a write was begun after the one of number ``before``: where all namespaces are cleared,
        the first may store again before the last is cleared.
        """
        if any(gone(name) and self.file.written.get(name, 0) <= before for name in self.blocks()):
            raise Broken("what was dropped is still on disk")
        self._gone |= {name: number for name, number in self.file.written.items() if gone(name) and number <= before}
        self._stale |= {read for read, (name, _) in self._reads.items() if gone(name)}

        def for_good() -> None:
            written = self.file.written
            names = [name for name, number in written.items() if gone(name) and number <= before]
            for name in names:
                del written[name]
            if names:
                self.check_dropped(self._after_power_cut())

        return for_good

    def check_dropped(self, there: Iterable[BlockName]) -> None:
        """What was dropped for good is not there again, unless it was written again."""
        if not self.file.written.keys() >= set(there):
            raise Broken("what was dropped is on disk again")

    def check_blocks(self) -> None:
        """Nor is what was dropped in this life."""
        there = set(self.blocks())
        self.check_dropped(there)
        if any(name in there and self.file.written[name] == number for name, number in self._gone.items()):
            raise Broken("what was dropped is on disk again")

    def _after_power_cut(self) -> list[BlockName]:
        """What the next life would find if the machine failed now, and could read, by what is written of the state."""
        rest, state = self.file.copy(), State(self._service.state.file)
        rest.lose_power(self._rng)
        state.restore()
        options = DiskOptions(region_bytes=self.file.region_bytes)
        tier = self._open(
            rest, options, lambda call: None, Mock(TierListener), ReadsWithoutThreads, WorkersWithoutThreads, state
        )
        return [
            BlockName(block_group.fingerprint, block_group.group_index, key)
            for block_group, key in names_of(tier)
            if _is_whole(rest, tier, block_group, key)
        ]

    def _check_stale(self, read: object, name: BlockName, offset: int) -> None:
        """Nothing that was dropped while it was read may be served by it."""
        if read not in self._stale:
            return
        self._stale.discard(read)
        cache = self._service.cache
        namespace = cache.namespaces.get(name.fingerprint)
        group = namespace and namespace.group(name.group)
        if not group or group.key_bytes != len(name.key):  # it was opened anew with another geometry
            return
        (state,), blocks = cache.blocks.find(group, name.key)
        if state == READY and cache.slots.offsets(blocks)[0] == offset:
            raise Broken("a block that was dropped while it came up is served")


def _is_whole(files: MemoryDisk, tier: DiskTier, block_group: BlockGroup, key: bytes) -> bool:
    """Whether what the index names is there."""
    at = tier._map.offset(tier._map.slots_of(block_group, [key])[0])
    block = decode_header(bytes(files.data[at : at + PAGE]))
    if block is not None and (block.group, block.key) != (block_group, key):
        return False
    for length, checksum in zip(block_group.lengths, block.checksums, strict=True) if block is not None else ():
        if digest(memoryview(files.data)[at + PAGE : at + PAGE + length]) != checksum:
            return False
        at += page_up(length)
    return block is not None
