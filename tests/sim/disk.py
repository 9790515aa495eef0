"""A disk tier in virtual time. It may be slow, fail, hang, return wrong bytes or be torn by a crash."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import BlockState, Namespace
from kvoffd.server.disks import Disk
from kvoffd.server.service import Service
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.manager import TieringManager
from kvoffd.tiers.tier import TierKey, TierListener, TierResult
from kvoffd_proto import messages as m
from tests.sim.clock import Broken, Clock, Process
from tests.sim.pool import Slot, WatchedPool
from tests.sim.scenario import Faults
from tests.sim.shared import SimShared
from tests.support.memory_tier import Device, Job, MemoryTier

if TYPE_CHECKING:
    from tests.sim.audit import Readable


class SimTier(MemoryTier):
    """A tier whose jobs take time. Reads go into slots that are being written, writes come out of ready ones."""

    def __init__(
        self,
        device: Device,
        pool: WatchedPool,
        clock: Clock,
        process: Process,
        faults: Faults,
        rng: random.Random,
        size_bytes: int,
    ) -> None:
        super().__init__(device, self, size_bytes, rng.choice((2, 6, 64)), self._begin)
        self._pool = pool
        self._clock = clock
        self._process = process
        self._faults = faults
        self._rng = rng
        self._claimed: dict[Job, list[Slot]] = {}
        self._stale: set[Job] = set()
        """Jobs whose block was dropped since they began."""
        self.on_turn: Callable[[], None] = lambda: None
        self.service: Service | None = None

    # --- the pool, as the tier uses it ---------------------------------------------------------------

    def peek(self, offset: int, length: int) -> bytes:
        self._check(offset, length, "ready")
        return self._pool.data[offset : offset + length].tobytes()

    def poke(self, offset: int, data: bytes) -> None:
        self._check(offset, len(data), "writing")
        self._pool.data[offset : offset + len(data)] = bytearray(data)

    def sum_of(self, offset: int, length: int) -> int:
        (found,) = self._pool.digests([(offset, length)])
        return int(found)

    def _check(self, offset: int, length: int, state: str) -> None:
        if length and any(slot.state != state for slot in self._pool.slots_at(offset, length)):
            raise Broken(f"the disk uses a slot that is not {state}")

    # --- time ------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        self._claimed[job] = [self._pool.slots[offset] for offset in job.offsets]
        for slot in self._claimed[job]:
            slot.transfers += 1
        delay = self._rng.uniform(0.0002, 0.003)
        if self._faults.hit("disk_slow"):
            delay = self._rng.uniform(0.02, 0.3)
        if self._faults.hit("disk_hang"):
            delay = self._rng.uniform(1.0, 4.0)
        self._clock.note(f"disk {'reads' if job.reading else 'writes'} {job.block.id.key.hex()[:8]}")
        self._process.after(delay, lambda: self._finish(job))

    def _finish(self, job: Job) -> None:
        if job not in self.jobs:
            return
        fault: TierResult | None = None
        if self._faults.hit("disk_fail"):
            fault = TierResult.FAILED
            if job.reading:  # it fails in the middle
                for offset, shard in zip(job.offsets, job.block.shards, strict=True):
                    self.poke(offset, self._rng.randbytes(shard.length // 2))
        elif job.reading and self._has_bytes(job) and self._faults.hit("disk_corrupt"):
            self.spoil(job.block.id)
        self.end(job, self._clock.now, fault)
        if self.service is not None:
            self.ended(job, self.service)
        self.on_turn()

    def _has_bytes(self, job: Job) -> bool:
        return any(self.device.blocks.get(job.block.id, (None, []))[1])

    def before_done(self, job: Job) -> None:
        for slot in self._claimed.pop(job):
            slot.transfers -= 1

    # --- what must hold ----------------------------------------------------------------------------------

    def dropped(self, names: set[TierKey] | None, fingerprint: bytes | None) -> None:
        """These keys, or a namespace, or all, were dropped just now: nothing of them may be there, or come again."""

        def gone(name: TierKey) -> bool:
            return name in names if names is not None else fingerprint in (None, name.fingerprint)

        if any(map(gone, self.device.blocks)):
            raise Broken("what was dropped is still on disk")
        self._stale |= {job for job in self.jobs if gone(job.block.id)}

    def ended(self, job: Job, service: Service) -> None:
        """Nothing that was dropped while the job ran may be there by it."""
        if job not in self._stale:
            return
        self._stale.discard(job)
        name = job.block.id
        if not job.reading:
            return
        namespace = service.context.cache.find_namespace(name.fingerprint)
        block = namespace.index[name.group].get(name.key) if namespace is not None else None
        if block is not None and block.state is BlockState.READY and block.shards[0].offset == job.offsets[0]:
            raise Broken("a block that was dropped while it came up is served")

    def crash(self) -> None:
        """The daemon is dead: what it was writing, or wrote last, may be there, and wrong."""
        torn = [job.block for job in self.jobs if not job.reading]
        torn += [block for block, _ in list(self.device.blocks.values())[-1:]]
        for block in torn:
            if self._faults.hit("disk_torn"):
                shards = [self._rng.randbytes(shard.length) for shard in block.shards]
                self.device.blocks[block.id] = (block, shards)


class SimDisk:
    """Stands in for the ``Disks`` of the service."""

    problems: tuple[str, ...] = ()

    def __init__(
        self,
        service: Service,
        tier: SimTier,
        clock: Clock,
        rng: random.Random,
        open_shared: Callable[[TierListener], SimShared] | None,
    ) -> None:
        self.tier = tier
        settings = TieringSettings(
            rng.choice(list(WriteMode)[:3]),
            deadline_s=rng.choice((0.4, 1.5)),
            per_second_bytes=rng.choice((0, 2**20)),
        )
        self.tiering = TieringManager(service.context.cache, tier, service.context.publisher, clock, settings)
        tier.listener = self.tiering
        tier.service = service
        service.context.cache.attach(self.tiering)
        self._service = service
        self._shared = None if open_shared is None else open_shared(self.tiering)
        self.shared: tuple[()] = ()  # what stats tell of it is not simulated
        if self._shared is not None:
            mode = rng.choice((WriteMode.ALWAYS, WriteMode.ALWAYS, *list(WriteMode)[:3]))
            self.tiering.share(self._shared, TieringSettings(mode, deadline_s=rng.choice((0.3, 1.0))))

    def tick(self) -> None:
        self.tiering.tick()

    def __iter__(self) -> Iterator[Disk]:
        return iter(())

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool = False) -> None:
        """As ``Disks`` does it; no directory comes or goes here."""
        self.tiering.namespace_reset(fingerprint, everywhere=everywhere)
        if self._shared is not None and everywhere:
            self._shared.left.discard(fingerprint)
        elif self._shared is not None:
            self._shared.left.add(fingerprint)

    @property
    def busy(self) -> bool:
        """Whether anything is being read or written."""
        shared = self._shared
        return bool(self.tier.jobs) or (shared is not None and shared.queued_reads + shared.queued_writes > 0)

    def cleared(self, fingerprint: bytes | None) -> None:
        """Nothing is to do, as for ``namespace_reset``."""

    def invalidated(self, namespace: Namespace, groups: Sequence[m.GroupKeys]) -> None:
        """Nothing is to do either."""

    def removals_kept(self) -> Callable[[], bool]:
        return self.tier.removals_kept()

    def handled(self, request: m.AnyRequest) -> None:
        """Note what a request that succeeded has dropped."""
        if isinstance(request, m.Invalidate):
            size = self._service.context.cache.namespace(request.namespace).key_bytes
            names = {
                TierKey(request.namespace, part.group, part.keys[at : at + size])
                for part in request.groups
                for at in range(0, len(part.keys), size)
            }
            self.tier.dropped(names, None)
        elif isinstance(request, m.Reset | m.Clear):
            self.tier.dropped(None, request.namespace)

    def readable(self, fingerprint: bytes) -> Readable:
        """What events must have told of by now."""
        namespace, unpublished = self._service.context.cache.namespace(fingerprint), self.tiering._unpublished
        return {
            (name.group, name.key)
            for name in self.tier.device.blocks
            if name.fingerprint == fingerprint and name.key not in unpublished.get((namespace, name.group), ())
        }


__all__ = ["Device", "SimDisk", "SimTier"]
