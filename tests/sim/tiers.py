"""The tiers of one life of the simulated daemon: a disk that is open from the start, and one shared store at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config, DiskSize
from kvoffd.observe.meters import CounterWindows
from kvoffd.pool.pool import Pool
from kvoffd.server.events import EventLog
from kvoffd.server.host import Post
from kvoffd.server.persistence import State
from kvoffd.server.service import Service
from kvoffd.server.tier_supervisor import Disk, TierSupervisor, make_tiering
from kvoffd.tiering import WriteMode
from kvoffd.tiering.read_speed import ReadSpeed
from kvoffd.tiering.tiering import Tiering
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.sim.clock import Broken
from tests.sim.disk import SimDisk
from tests.sim.pool import BlockName

if TYPE_CHECKING:
    from tests.sim.audit import Readable
    from tests.sim.shared import SimShared


class BentSpeed(ReadSpeed):
    """A speed that is wrong by a factor."""

    bend = 1.0

    @property
    def measured(self) -> float:
        return self.bend * self._measured

    @measured.setter
    def measured(self, speed: float) -> None:
        self._measured = speed

    @property
    def current(self) -> float:
        return super().current if self._measured else self.bend * super().current


def followed_of(state: State) -> dict[bytes, int]:
    """The fleet generations that a daemon has followed, and the next one knows."""
    return state.generations.resets.followed


class SimTiers(TierSupervisor):
    tiering: Tiering
    _stores: list[SimShared]  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        disk: SimDisk,
        clock: Callable[[], float],
        post: Post,
        state: State,
        cache: Cache,
        events: EventLog,
        pool: Pool,
    ) -> None:
        tiering = make_tiering(config, cache, events, clock, lambda: False, state)
        super().__init__(config, tiering, cache, pool, clock, post, state)
        generations = state.generations
        self._stop_sharing, generations.stop_sharing = generations.stop_sharing, self.stop_sharing  # type: ignore[method-assign]
        self._followed, generations.followed = generations.followed, self.followed  # type: ignore[method-assign]
        self.disk = disk
        self.bend = 1.0

    def open(self, service: Service) -> None:
        """Open the disk."""
        self.disks.append(entry := Disk(DiskSize("/", 1), CounterWindows(self._clock)))
        self._opened(entry, self.disk.open(self.tiering, service), self.tiering)
        self.tiering.disks[0].reads.speed = BentSpeed(self._clock)
        self.disk.check_dropped(self.disk.blocks())

    def share_one(self, tier: SimShared) -> None:
        self._stores.append(tier)
        self.tiering.add_store(tier, self._settings(WriteMode(self._config.shared_write)))
        self.tiering.sources[-1].reads.speed = BentSpeed(self._clock)
        self.tiering.lookups.ask_if_behind = self.ask_if_behind  # as ``start`` has it

    def bend_speeds(self, factor: float) -> None:
        """Have what is known of all tiers' speed be wrong by a factor from now on."""
        self.bend = factor
        for source in self.tiering.sources:
            assert isinstance(source.reads.speed, BentSpeed)
            source.reads.speed.bend = factor

    def stop_sharing(self, fingerprint: bytes) -> int:
        for tier in self._stores:
            tier.left.add(fingerprint)
        return self._stop_sharing(fingerprint)

    def followed(self, fingerprint: bytes) -> None:
        self._followed(fingerprint)
        for tier in self._stores:
            tier.left.discard(fingerprint)
            tier.objects.left.discard(fingerprint)
        self._check_gone(fingerprint)

    def _check_gone(self, fingerprint: bytes) -> None:
        namespace = self._cache.namespaces.get(fingerprint)
        on_disk = {name.fingerprint for name in self.disk.blocks()}
        if fingerprint in on_disk or (namespace is not None and namespace.ready_blocks):
            raise Broken("of a namespace that is reset there are blocks")

    def check_followed(self) -> None:
        """After a tick: what other nodes reset is reset here."""
        followed = followed_of(self._state)
        if any(followed.get(fingerprint, 0) < number for fingerprint, number in self._state.generations):
            raise Broken("other nodes have reset a namespace, and this one has not")

    @property
    def busy(self) -> bool:
        return self.disk.busy or any(
            one.queued_reads + one.queued_writes for one in (tier.stats() for tier in self._stores)
        )

    def dropped(self, request: m.Invalidate | m.Reset | a.Clear, before: int) -> Callable[[], None]:
        """Check what a request has dropped, before anybody else is served: as ``SimDisk.dropped``. What was invalidated
        may come back after a kill."""
        if isinstance(request, m.Invalidate):
            namespace = self._cache.namespaces.required(request.namespace)
            names = {
                BlockName(request.namespace, part.group, key)
                for part in request.groups
                for key in namespace.split(part.group, part.keys)
            }
            self.disk.dropped(names.__contains__, before)
            return lambda: None
        if isinstance(request, m.Reset):
            self._check_gone(request.namespace)
        for_good = self.disk.dropped(lambda name: request.namespace in (None, name.fingerprint), before)

        def kept() -> None:
            for_good()
            for tier in self._stores if isinstance(request, m.Reset) else ():
                tier.objects.left |= tier.left & {request.namespace}

        return kept

    def readable(self, namespace: Namespace) -> Readable:
        """What is on disk of a namespace."""
        self.disk.check_blocks()
        return {(name.group, name.key) for name in self.disk.blocks() if name.fingerprint == namespace.fingerprint}
