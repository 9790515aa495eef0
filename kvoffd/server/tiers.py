"""The tiers below the pool: the directories of the disk tier, opened in threads, and the stores that nodes share."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config, DiskSize
from kvoffd.errors import KvoffdError, NoMoreThreads
from kvoffd.pool.pool import Pool
from kvoffd.pool.table_format import digest
from kvoffd.server.memory import Post
from kvoffd.server.persistence import State
from kvoffd.system.threads import start
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.manager import TieringManager
from kvoffd.tiers.disk.disk_tier import DiskTier, NamespaceGeneration
from kvoffd.tiers.disk.file import OpeningStopped
from kvoffd.tiers.disk.opening import open_disk_tier
from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.shared.store import Credentials, Store, open_store
from kvoffd.tiers.tier import CompositeTier, TierKey, TierListener
from kvoffd_proto.messages import GroupKeys
from kvoffd_proto.stats import DiskFault, DiskState
from kvoffd_proto.units import format_count, format_duration, format_size

logger = logging.getLogger(__name__)

CLOSE_STEP_S = 0.02
"""Time that each shared store has at least to close."""
STOP_OPENING_S = 1.0
TRICKLE_BYTES = 4 * 2**20 * (os.cpu_count() or 1)
"""What is written in a tick while engines copy: the more cores there are, the less of it do copies feel."""
HARMLESS_ERRORS = {DiskFault.NOT_DIRECT, DiskFault.STARTED_ANEW, DiskFault.TOO_LARGE, DiskFault.TRUNCATED}
"""Kinds of what a disk tier reports that are no fault of the drive now."""
MOST_INVALIDATED = 65_536
"""Blocks that a directory is told of when it is open, of those that were invalidated before."""
OpenDisk = Callable[[DiskSize, TierListener, Callable[[], bool]], DiskTier]
"""Opens a directory, told when to stop; for any thread. Raises KvoffdError."""
OpenShared = Callable[[TierListener, State], list[SharedTier]]
OpenStores = Sequence[Callable[[], Store]]
"""What makes connections to each of the stores that a configuration names."""


@dataclass(eq=False)
class Disk:
    size: DiskSize
    state: DiskState = DiskState.OPENING
    problem: str = ""
    tier: DiskTier | None = None
    opener: threading.Thread | None = None
    invalidated: set[TierKey] = field(default_factory=set)
    """Blocks that were invalidated while it was being opened, up to ``MOST_INVALIDATED``."""
    invalidated_namespaces: set[bytes] = field(default_factory=set)
    """Namespaces with more of them."""


@dataclass(eq=False)
class Tiers:
    """All of them. For the service's thread, but for what ``_open_disk`` does.

    What is invalidated reaches directories that serve through the cache; here it is told for the others.
    """

    _config: Config
    _cache: BlockCache
    _events: CacheListener
    _clock: Callable[[], float]
    _open_disk: OpenDisk
    _post: Post
    _engines_busy: Callable[[], bool]
    _state: State
    _disks: dict[str, Disk] = field(default_factory=dict, init=False)
    _tiers: CompositeTier = field(default_factory=CompositeTier, init=False)
    _stopping: bool = field(default=False, init=False)
    shared: list[SharedTier] = field(default_factory=list, init=False)
    """The tiers that nodes share, where any are configured."""
    tiering: TieringManager | None = field(default=None, init=False)
    """None until the first directory or the shared tier is there: until then nothing knows of tiers."""

    def open(self, size: DiskSize) -> None:
        """Begin to open a directory."""
        disk = self._disks[size.directory] = Disk(size)
        # Not one of the executor's threads: those are waited for when the process ends, and a disk may hang.
        name, arguments = f"kvoffd-open-{Path(size.directory).name}", (disk, self._have_tiering())
        opener = threading.Thread(target=self._open, args=arguments, name=name, daemon=True)
        try:
            start(opener)
        except NoMoreThreads as error:
            self._failed(disk, error.message)
        else:
            disk.opener = opener

    def start(self, open_shared: OpenShared) -> None:
        """Begin to open what the configuration names. Raises KvoffdError."""
        for size in self._config.disk:
            self.open(size)
        if self._config.shared:
            self._share(open_shared)

    def _share(self, open_shared: OpenShared) -> None:
        config = self._config
        settings = TieringSettings(
            WriteMode(config.shared_write),
            deadline_s=config.shared_deadline_s,
            trickle_bytes=TRICKLE_BYTES,
        )
        tiering = self._have_tiering()
        self.shared = open_shared(tiering, self._state)
        for tier in self.shared:
            tiering.share(tier, settings, self._state.unshared)

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool = False) -> None:
        """A namespace's blocks are stale, as when its weights changed; ``everywhere``: on all nodes."""
        if self.tiering is not None:
            self.tiering.namespace_reset(fingerprint, everywhere=everywhere)
        if everywhere:
            self._state.followed(fingerprint, {tier.name: tier.generation(fingerprint) for tier in self.shared})
        else:
            self._state.unshare(fingerprint)

    def invalidated(self, namespace: Namespace, groups: Sequence[GroupKeys]) -> None:
        """Blocks were invalidated: also where a directory is being opened; of very many, the whole namespace there."""
        opening = [disk for disk in self._disks.values() if disk.state is DiskState.OPENING]
        if not opening:
            return
        count = sum(len(part.keys) for part in groups) // namespace.key_bytes
        ids = {
            TierKey(namespace.fingerprint, part.group, key)
            for part in (groups if count <= MOST_INVALIDATED else ())
            for key in namespace.split(part.group, part.keys)
        }
        for disk in opening:
            if len(disk.invalidated) + count > MOST_INVALIDATED:
                disk.invalidated_namespaces.add(namespace.fingerprint)
            else:
                disk.invalidated |= ids

    def removals_saved(self) -> Callable[[], bool]:
        """Returns what says whether all that was removed up to now stays away after a kill or a power cut too.

        What is removed from a directory that is being opened is so when it is open.
        """
        saved = self._tiers.removals_kept()
        opening = [one for one in self._disks.values() if one.state is DiskState.OPENING]
        opening = [one for one in opening if one.invalidated or one.invalidated_namespaces]
        return lambda: (
            saved()
            and self._state.file.is_saved
            and all(
                one.state is not DiskState.OPENING and (one.tier is None or one.tier.removals_kept()())
                for one in opening
            )
        )

    def tick(self) -> None:
        if self.tiering is not None:
            self.tiering.tick()

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with directories: a word for the kind, and a sentence."""
        again = "Restart the daemon to try it again."
        found = [("disk_failed", f"{disk.problem} {again}") for disk in self if disk.problem]
        for disk in self:
            if disk.tier is None:
                continue
            name = disk.size.directory
            if disk.tier.hangs:
                found.append(("disk_hangs", f"A call to the disk at {name} does not return; see dmesg."))
            errors = {kind: n for kind, n in sorted(disk.tier.stats().errors.items()) if kind not in HARMLESS_ERRORS}
            if errors:
                counts = ", ".join(f"{format_count(count)} {kind}" for kind, count in errors.items())
                found.append(
                    (
                        "disk_errors",
                        f"The disk at {name} has had errors since it was opened ({counts}); blocks that could not be "
                        "read were recomputed. See dmesg and the drive's own report; if it fails, restart the daemon "
                        "without the directory.",
                    )
                )
        found += [
            ("shared_unreachable", f"No blocks are shared over {tier.name}: {tier.problem}")
            for tier in self.shared
            if not tier.reachable and tier.problem
        ]
        found += [
            ("shared_refuses", f"Blocks are read from {tier.name}, and none are written: {tier.refusal}")
            for tier in self.shared
            if tier.reachable and tier.refusal
        ]
        found += [
            ("shared_server", f"{server.name}, a server of {tier.name}, cannot be used: {server.problem}")
            for tier in self.shared
            for server in tier.servers
            if not server.answers and len(tier.servers) > 1
        ]
        return found

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._disks.values())

    def close(self, deadline_s: float) -> bool:
        """Close all within the deadline. False where something hangs still, in pool memory. For the daemon's end."""
        until = time.monotonic() + deadline_s
        self._stopping = True
        if self.tiering is not None:
            self.tiering.stop()
        for disk in self._disks.values():
            if disk.opener is not None:
                disk.opener.join(min(STOP_OPENING_S, max(0.0, until - time.monotonic())))
        closed = True
        for disk in self._disks.values():
            if disk.tier is None:
                continue
            patience_s = 0.0 if disk.tier.hangs else max(0.0, until - time.monotonic())
            if not disk.tier.close(patience_s):
                logger.warning("The disk at %s does not answer; it is left open.", disk.size.directory)
                closed = False
        for tier in self.shared:
            if not tier.close(max(CLOSE_STEP_S, until - time.monotonic())):
                logger.warning("%s does not answer; it is left open.", tier.name)
                closed = False
        return closed

    def _have_tiering(self) -> TieringManager:
        if self.tiering is not None:
            return self.tiering
        config = self._config
        settings = TieringSettings(
            WriteMode(config.disk_write),
            config.disk_write_bytes_per_day,
            deadline_s=config.disk_deadline_s,
            trickle_bytes=TRICKLE_BYTES,
        )
        self.tiering = TieringManager(self._cache, self._tiers, self._events, self._clock, settings, self._engines_busy)
        self._cache.attach(self.tiering)
        return self.tiering

    def _open(self, disk: Disk, tiering: TieringManager) -> None:
        """In a thread of its own."""
        try:
            tier = self._open_disk(disk.size, tiering, lambda: self._stopping)
        except OpeningStopped:
            return
        except Exception as error:
            problem = (
                error.message if isinstance(error, KvoffdError) else f"Opening it failed inside the daemon: {error!r}."
            )
            if not isinstance(error, KvoffdError):
                logger.exception("The disk at %s could not be opened.", disk.size.directory)
            self._post(lambda: self._failed(disk, problem))
        else:
            self._post(lambda: self._opened(disk, tier))

    def _failed(self, disk: Disk, problem: str) -> None:
        disk.state, disk.problem = DiskState.FAILED, problem
        logger.error("The disk at %s is not used. %s", disk.size.directory, problem)

    def _opened(self, disk: Disk, tier: DiskTier) -> None:
        disk.tier = tier
        disk.state = DiskState.SERVING
        if self._stopping:
            tier.close(0.0)
            return
        logger.info(
            "The disk at %s serves after %s: %s blocks are there, %s may be taken%s.",
            disk.size.directory,
            format_duration(tier.open_seconds),
            format_count(tier.found_blocks),
            format_size(disk.size.size_bytes),
            "" if tier.direct else ", through the page cache, since it refuses O_DIRECT",
        )
        for fingerprint, generation in tier.found_generations.items():
            if generation < self._state.generation(fingerprint):  # it was raised since the file was read
                tier.remove_namespace(fingerprint)
            elif generation > self._state.generation(fingerprint):
                self._raised_elsewhere(fingerprint, generation)
        for fingerprint in disk.invalidated_namespaces:
            tier.remove_namespace(fingerprint)
        if disk.invalidated:  # to be told of none is work for the device too
            tier.remove(disk.invalidated)
        self._tiers.attach(tier)
        assert self.tiering is not None
        self.tiering.directory_attached()

    def _raised_elsewhere(self, fingerprint: bytes, generation: int) -> None:
        """A disk has blocks of a higher generation than is known: what was known was lost, as when the machine started.

        Other disks have what was there before. So may the pool have, if it is an earlier daemon's; what this daemon has
        stored itself is of now.
        """
        for disk in self:
            if disk.tier is not None and disk.tier.found_generations.get(fingerprint, generation) < generation:
                disk.tier.remove_namespace(fingerprint)
        self._state.found(fingerprint, generation)
        if (namespace := self._cache.find_namespace(fingerprint)) is not None and not namespace.clearing:
            if namespace.recovered:
                deque(self._cache.clear(namespace, keep_tiers=True), maxlen=0)
            self._cache.set_generation(namespace, generation)


def stored_generation(cache: BlockCache, state: State) -> NamespaceGeneration:
    """Returns what says of which generation the pool's blocks of a namespace are."""

    def found(fingerprint: bytes) -> int:
        namespace = cache.find_namespace(fingerprint)
        return state.generation(fingerprint) if namespace is None else namespace.generation

    return found


def opener(pool: Pool, post: Post, cache: BlockCache, state: State) -> OpenDisk:
    return lambda size, listener, should_stop: open_disk_tier(
        Path(size.directory),
        size.size_bytes,
        pool=pool.buffer,
        digest=digest,
        clock=time.monotonic,
        post=post,
        listener=listener,
        known_generation=state.generation,
        stored_generation=stored_generation(cache, state),
        should_stop=should_stop,
    )


def shared_stores(config: Config) -> OpenStores:
    """Those of a configuration; none is connected to. Raises KvoffdError where one cannot be used as configured."""
    credentials = Credentials.read(config.shared_password_file, len(config.shared)) if config.shared else []
    return list(map(open_store, config.shared, credentials))


def shared_opener(config: Config, stores: OpenStores, pool: Pool, post: Post) -> OpenShared:
    """Opens the shared tiers of a configuration; raises KvoffdError where a store of others does not begin."""

    def opened(listener: TierListener, state: State) -> list[SharedTier]:
        return [
            SharedTier(
                url,
                open_one,
                pool=pool.buffer,
                digest=digest,
                clock=time.monotonic,
                post=post,
                listener=listener,
                ask_deadline_s=config.shared_ask_deadline_s,
                generations=state.fleet_generations(url),
            )
            for url, open_one in zip(config.shared, stores, strict=True)
        ]

    return opened
