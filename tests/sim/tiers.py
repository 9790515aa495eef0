"""The tiers of one life of the simulated daemon: a disk that is open from the start, and one shared store at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config, DiskSize
from kvoffd.observe.meters import CounterWindows
from kvoffd.server.memory import Post
from kvoffd.server.service import Service
from kvoffd.server.tiers import Disk, Tiers
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.sim.disk import SimDisk
from tests.sim.pool import BlockName

if TYPE_CHECKING:
    from tests.sim.audit import Readable


class SimTiers(Tiers):
    def __init__(self, config: Config, service: Service, disk: SimDisk, post: Post) -> None:
        parts = service.cache, service.pool, service.events, service.clock, post, lambda: False, service.state
        super().__init__(config, *parts)
        self.disk = disk
        self.waited_for: Callable[[], list[str]] | None = None
        """What the request that is served waits for, once all that it drops is dropped."""
        tiering = self.use()
        self._disks.append(entry := Disk(DiskSize("/", 1), CounterWindows(service.clock)))
        self._opened(entry, disk.open(tiering, service), tiering)
        disk.check_dropped(disk.blocks())

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool = False) -> None:
        super().namespace_reset(fingerprint, everywhere=everywhere)
        for tier in self.shared:
            (tier.left.discard if everywhere else tier.left.add)(fingerprint)

    def unsaved_removals(self) -> Callable[[], list[str]]:
        self.waited_for = super().unsaved_removals()
        return self.waited_for

    @property
    def busy(self) -> bool:
        return self.disk.busy or any(
            one.queued_reads + one.queued_writes for one in (tier.stats() for tier in self.shared)
        )

    def dropped(self, request: m.Invalidate | m.Reset | a.Clear, before: int) -> Callable[[], None]:
        """Check what a request has dropped, before anybody else is served: as ``SimDisk.dropped``."""
        if isinstance(request, m.Invalidate):
            namespace = self._cache.namespace(request.namespace)
            names = {
                BlockName(request.namespace, part.group, key)
                for part in request.groups
                for key in namespace.split(part.group, part.keys)
            }
            return self.disk.dropped(names.__contains__, before)
        return self.disk.dropped(lambda name: request.namespace in (None, name.fingerprint), before)

    def readable(self, namespace: Namespace) -> Readable:
        """What is on disk of a namespace."""
        self.disk.check_dropped(self.disk.blocks())
        return {(name.group, name.key) for name in self.disk.blocks() if name.fingerprint == namespace.fingerprint}
