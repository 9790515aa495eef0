"""The disk tier in virtual time, over a file in memory that may be slow, fail, hang, go bad, or lose what it was given.

What one life of the daemon wrote another one finds: the file outlives them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffd.cache.block_table import READY
from kvoffd.config import Config, DiskSize
from kvoffd.pool.checksums import digest
from kvoffd.server.memory import Post
from kvoffd.server.service import Service
from kvoffd.server.tiers import Disk, Tiers, stored_generation
from kvoffd.tiers.disk.disk_tier import DiskOptions, DiskTier
from kvoffd.tiers.disk.file import DiskFile
from kvoffd.tiers.disk.opening import open_disk_tier, rebuild_index
from kvoffd.tiers.disk.queue import Batch, Kind
from kvoffd.tiers.tier import CompositeTier, OnDone, TierBlock, TierKey, TierListener, TierResult
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.kit.memory_disk import MemoryDisk, WorkersWithoutThreads
from tests.sim.clock import Broken, Clock, Process
from tests.sim.parts import no_disk
from tests.sim.pool import PAGE, WatchedPool
from tests.sim.scenario import Faults
from tests.sim.shared import SimShared

if TYPE_CHECKING:
    from tests.sim.audit import Readable

REGIONS = 6
"""About so many regions of slots of one size; they hold what a pool holds, or several times that."""


class Device(MemoryDisk):
    """The file, and what may be in it by what the daemons were asked for."""

    def __init__(self, largest_block_bytes: int, pool_bytes: int) -> None:
        super().__init__()
        self.region_bytes = -(-max(largest_block_bytes + 3 * PAGE, pool_bytes // REGIONS) // PAGE) * PAGE
        self.written: dict[TierKey, int] = {}
        """Blocks of which a write was begun since they were dropped for good, and when that was, as a number."""
        self.begun = 0
        """Writes that were begun."""


class SimWorkers(WorkersWithoutThreads):
    """Does what the threads do, each call some time after it was begun."""

    def __init__(self, tier: SimTier, *given: Any) -> None:
        self._tier = tier
        super().__init__(*given)

    def submit(self, job: Any) -> None:
        super().submit(job)
        self._begin()

    def _begin(self) -> None:
        while (batch := self._queue.next(self._clock())) is not None:
            self._tier.process.after(self._tier.seconds_of(batch), partial(self._end, batch))

    def _end(self, batch: Batch) -> None:
        if batch in self._queue.running[batch.kind]:
            self._tier.spoil_some(batch)
            self._do(batch)
            self._begin()

    def running(self) -> Iterator[Batch]:
        for batches in self._queue.running.values():
            yield from sorted(batches, key=lambda batch: batch.begun_at)

    def wait_idle(self, until: float) -> bool:
        while self._queue.jobs:
            for batch in list(self.running()):
                self._end(batch)
        return True


class SimTier(CompositeTier):
    """What one life of the daemon has of the disk: the tier itself, and who uses which slot meanwhile is watched."""

    def __init__(
        self, file: Device, pool: WatchedPool, clock: Clock, process: Process, faults: Faults, rng: random.Random
    ) -> None:
        super().__init__()
        self.file, self.process = file, process
        self._pool = pool
        self._clock = clock
        self._faults = faults
        self._rng = rng
        self._fails_next = False
        self._reads: dict[object, tuple[TierKey, int]] = {}
        """Those under way, with the offset of the first shard."""
        self._stale: set[object] = set()
        """Those of them whose block was dropped since they began."""
        self.on_turn: Callable[[], None] = lambda: None
        self._most_s = rng.choice((0.003, 0.003, 0.05))
        """The longest that a call takes if nothing is wrong."""
        self.disk: DiskTier
        self.takes_writes = True

    def open(self, listener: TierListener, service: Service) -> DiskTier:
        """Find what the life before has left."""
        self._service = service
        file, rng = self.file, self._rng
        file.fault = lambda name, number: None
        self.disk = open_disk_tier(
            Path("/"),
            self._pool.pool_bytes * rng.choice((1, 4)) + 3 * file.region_bytes,
            pool=memoryview(self._pool.data),
            digest=digest,
            clock=self._clock,
            post=self._post,
            listener=listener,
            options=DiskOptions(
                reads_in_flight=rng.choice((1, 4, 16)),
                merge_bytes=rng.choice((1, 1 << 20)),
                region_bytes=file.region_bytes,
                most_reads=(most := rng.choice((1, 3, 64))),
                most_writes=most,
            ),
            calls=file,
            wall_clock=self._clock,
            make_workers=partial(SimWorkers, self),
            known_generation=service.state.generation,
            stored_generation=partial(stored_generation, service.cache, service.state),
        )
        file.fault = self._fault
        return self.disk

    def blocks(self) -> Iterator[TierKey]:
        """What is there."""
        for fingerprint, group in self.groups():
            for key in self.index(fingerprint, group):
                yield TierKey(fingerprint, group, key)

    # --- who uses which slot ---------------------------------------------------------------------------

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        begin = partial(super().write, block, offsets)
        if not self.takes_writes or not self._pool.lend(offsets, "ready", "the disk writes", begin, on_done):
            return False
        self._clock.note(f"disk writes {block.id.key.hex()[:8]}")
        self.file.begun += 1
        self.file.written[block.id] = self.file.begun
        return True

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        def ended(result: TierResult) -> None:
            self._faults.counts["disk_read"] += result is TierResult.DONE
            on_done(result)
            del self._reads[ended]
            self._check_stale(ended, block_id, offsets[0])

        begin = partial(super().read, block_id, offsets, deadline)
        if not self._pool.lend(offsets, "writing", "the disk reads", begin, ended):
            return False
        self._clock.note(f"disk reads {block_id.key.hex()[:8]}")
        self._reads[ended] = block_id, offsets[0]
        return True

    # --- time and faults -------------------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> None:
        def turn() -> None:
            call()
            self.on_turn()

        self.process.after(0.0, turn)

    def seconds_of(self, batch: Batch) -> float:
        seconds = self._rng.uniform(0.0002, self._most_s)
        if self._faults.hit("disk_slow"):
            seconds = self._rng.uniform(0.02, 0.3)
        if self._faults.hit("disk_hang"):
            seconds = self._rng.uniform(1.0, 4.0)
        return seconds

    def spoil_some(self, batch: Batch) -> None:
        """Before a read: flip a bit of what it is about to read."""
        for job in batch.jobs if batch.kind is Kind.READ else ():
            assert job.entry is not None
            at = job.offset
            for shard in job.entry.block.shards:
                if shard.length and self._faults.hit("disk_corrupt"):
                    self.file.flip(at + self._rng.randrange(shard.length), self._rng.randrange(8))
                    break
                at += -(-shard.length // PAGE) * PAGE

    def _fault(self, name: str, number: int) -> int | None:
        if self._fails_next:
            self._fails_next = False
            raise OSError(errno.EIO, "Input/output error")
        if name in ("read", "write") and self._faults.hit("disk_fail"):
            self._fails_next = True  # in the middle
            return PAGE
        return None

    def crash(self) -> None:
        """The daemon is dead: of what it was writing a part may be there. If the machine is too, so it is of more."""
        workers = self.disk.workers
        assert isinstance(workers, SimWorkers)
        for batch in workers.running():
            if batch.kind is not Kind.READ and self._faults.hit("disk_torn"):
                self.file.fault = lambda name, number: None if self._rng.random() < 0.5 else self._die()
                workers._executor.run(batch, batch.begun_at)
        if self._faults.hit("disk_torn"):
            self.file.lose_power(self._rng)
        self.file.locked = False

    def _die(self) -> int | None:
        raise OSError(errno.EIO, "Input/output error")

    # --- what must hold ----------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether there is news that the listener has not been given yet."""
        return bool(self.disk._events._events)

    @property
    def busy(self) -> bool:
        figures = self.disk.stats()
        return any((figures.queued_reads, figures.queued_writes, figures.running_reads, figures.running_writes))

    def dropped(self, gone: Callable[[TierKey], bool], before: int) -> Callable[[], None]:
        """These were dropped just now: none may be there. Returns what says that they stay away in every later life.

        But for those of which a write was begun after the one of number ``before``: where all namespaces are cleared,
        the first may store again before the last is cleared.
        """
        if any(gone(name) and self.file.written.get(name, 0) <= before for name in self.blocks()):
            raise Broken("what was dropped is still on disk")
        self._stale |= {read for read, (block_id, _) in self._reads.items() if gone(block_id)}

        def for_good() -> None:
            written = self.file.written
            names = [name for name, number in written.items() if gone(name) and number <= before]
            for name in names:
                del written[name]
            if names:
                self.check_dropped(self._after_power_cut())

        return for_good

    def check_dropped(self, there: Iterable[TierKey]) -> None:
        """What was dropped for good is not there again, unless it was written again."""
        if not self.file.written.keys() >= set(there):
            raise Broken("what was dropped is on disk again")

    def _after_power_cut(self) -> Iterator[TierKey]:
        """What the next life would find if the machine failed now."""
        rest = self.file.copy()
        rest.lose_power(self._rng)
        file = DiskFile(Path("/"), self.disk.stats().size_bytes, None, rest, self._clock, lambda: False)
        index = rebuild_index(file, 2**40, lambda: False)
        for fingerprint, group in index.groups():
            for key in index.index(fingerprint, group):
                yield TierKey(fingerprint, group, key)

    def _check_stale(self, read: object, name: TierKey, offset: int) -> None:
        """Nothing that was dropped while it was read may be served by it."""
        if read not in self._stale:
            return
        self._stale.discard(read)
        cache = self._service.cache
        namespace = cache.find(name.fingerprint)
        group = namespace and cache._group(namespace, name.group)
        if not group:
            return
        (state,), blocks = cache.blocks.find(group.number, name.key, group.key_bytes)
        if state == READY and cache.slots.offsets(blocks)[0] == offset:
            raise Broken("a block that was dropped while it came up is served")


class SimDisks(Tiers):
    """The daemon's disks, of which there is one that is open from the start, and one shared tier at most."""

    def __init__(self, config: Config, service: Service, tier: SimTier, post: Post) -> None:
        parts = service.cache, service.events, service.clock, no_disk, post, lambda: False, service.state
        super().__init__(config, *parts)
        self.tier = self._tiers = tier
        self.waited_for: Callable[[], bool] | None = None
        """What the request that is served waits for, once all that it drops is dropped."""
        self._disks.append(disk := Disk(DiskSize("/", tier.file.region_bytes)))
        self._opened(disk, tier.open(self._have_tiering(), service))
        tier.check_dropped(tier.blocks())

    def share(self, tier: Callable[[TierListener], SimShared]) -> None:
        self._share(lambda listener, state: [tier(listener)])

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool = False) -> None:
        super().namespace_reset(fingerprint, everywhere=everywhere)
        for tier in self.shared:
            assert isinstance(tier, SimShared)
            (tier.left.discard if everywhere else tier.left.add)(fingerprint)

    def removals_saved(self) -> Callable[[], bool]:
        self.waited_for = super().removals_saved()
        return self.waited_for

    @property
    def busy(self) -> bool:
        """Whether anything is being read or written."""
        return self.tier.busy or any(tier.queued_reads + tier.queued_writes for tier in self.shared)

    def dropped(self, request: m.AnyRequest, before: int) -> Callable[[], None]:
        """Check what a request has dropped, before anybody else is served: as ``SimTier.dropped``."""
        if isinstance(request, m.Invalidate):
            namespace = self._cache.namespace(request.namespace)
            names = {
                TierKey(request.namespace, part.group, key)
                for part in request.groups
                for key in namespace.split(part.group, part.keys)
            }
            return self.tier.dropped(names.__contains__, before)
        if isinstance(request, m.Reset | a.Clear):
            return self.tier.dropped(lambda name: request.namespace in (None, name.fingerprint), before)
        return lambda: None

    def readable(self, fingerprint: bytes) -> Readable:
        """What events must have told of by now."""
        assert self.tiering is not None
        namespace, tiering = self._cache.namespace(fingerprint), self.tiering
        self.tier.check_dropped(self.tier.blocks())
        return {
            (name.group, name.key)
            for name in self.tier.blocks()
            if name.fingerprint == fingerprint
            and (
                name.key in tiering._published.get((namespace, name.group), ())
                or name.key not in tiering._unpublished.get((namespace, name.group), ())
            )
        }


__all__ = ["Device", "SimDisks", "SimTier"]
