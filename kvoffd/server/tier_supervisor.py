"""Opens, monitors and closes the tiers below the pool: disks, each in a thread, and stores that nodes share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.config import Config, DiskSize
from kvoffd.errors import KvoffdError
from kvoffd.observe.meters import HOUR_S, CounterWindows
from kvoffd.pool.pool import Pool
from kvoffd.server.host import Post
from kvoffd.server.peers import Peers
from kvoffd.server.persistence import State
from kvoffd.system.calls import call_each
from kvoffd.system.numa import usable_cpus
from kvoffd.system.threads import start
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.disk import DiskTier
from kvoffd.tiers.disk_file import OpeningStopped
from kvoffd.tiers.fleet_clears import Raise
from kvoffd.tiers.peer_caller import Calls
from kvoffd.tiers.peer_process import check_installed, read_secret
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, Store, open_store, warn_of_readers
from kvoffd.tiers.tier import TierListener
from kvoffd_proto.stats import DiskFault, DiskState
from kvoffd_proto.units import format_count, format_duration, format_size

logger = logging.getLogger(__name__)

CLOSE_STEP_S = 0.02
"""Least time for each shared store to close."""
STOP_OPENING_S = 1.0
"""Time for a disk that is being opened to stop, when the daemon ends."""
FOLLOW_S = 5.0
"""Time after which disks serve a namespace that was opened although some store or peer has not answered about it."""
TRICKLE_BYTES = 4 * 2**20
"""Bytes written per tick and CPU while engines copy: with more CPUs writes slow down copies less."""
HARMLESS_ERRORS = {DiskFault.NOT_DIRECT, DiskFault.STARTED_ANEW, DiskFault.TOO_LARGE, DiskFault.TRUNCATED}
"""Faults that do not mean that the drive is failing."""
OpenStores = Sequence[Callable[[], Store]]
"""Functions that connect to each of the configured stores."""


@dataclass(eq=False)
class Disk:
    """A configured disk. It has a tier once it is open, or a problem if it cannot be opened."""

    size: DiskSize
    errors: CounterWindows
    problem: str = ""
    """Error of opening it."""
    tier: DiskTier | None = None
    opener: threading.Thread | None = None
    """The thread that opens it."""

    @property
    def state(self) -> DiskState:
        return DiskState.FAILED if self.problem else DiskState.SERVING if self.tier else DiskState.OPENING

    def sample_errors(self) -> None:
        if self.tier is not None:
            self.errors.sample(self.tier.stats().errors)


def make_tiering(
    config: Config,
    cache: Cache,
    events: CacheListener,
    clock: Callable[[], float],
    engines_busy: Callable[[], bool],
    state: State,
) -> Tiering:
    """Create the tiering between the pool and the tiers, which are added later, and connect it to the cache."""
    mode, per_day = WriteMode(config.disk_write), config.disk_write_bytes_per_day
    if per_day is None:
        per_day = sum(disk.size_bytes for disk in config.disk) if mode is WriteMode.AUTO else 0
    settings = TieringSettings(mode, per_day, config.disk_deadline_s, _trickle_bytes())
    cache.life.tiers = tiering = Tiering(cache, events, clock, settings, engines_busy, state.generations.is_unshared)
    spent, at = state.counted.disk_spent
    tiering.disk_writer.budget.restore(spent, time.time() - at)
    return tiering


def _trickle_bytes() -> int:
    return TRICKLE_BYTES * len(usable_cpus())


class TierSupervisor:
    """Opens, monitors and closes the tiers. For the service's thread, except ``_open``.

    Args:
        tiering: uses the open tiers; None if none is configured.

    Attributes:
        peers: the other nodes whose pools are read, or that read this one's.
    """

    def __init__(
        self,
        config: Config,
        tiering: Tiering | None,
        cache: Cache,
        pool: Pool,
        clock: Callable[[], float],
        post: Post,
        state: State,
    ) -> None:
        self._config, self._cache, self._pool = config, cache, pool
        self.tiering = tiering
        self._clock, self._post, self._state = clock, post, state
        self.disks: list[Disk] = []
        """The configured disks, open or not."""
        self._stopping = False
        self._stores: list[SharedTier] = []
        """The configured stores that nodes share."""
        self._generations = state.generations
        self.peers = Peers(config, cache, pool, clock, post, state)
        self._asked_at: dict[bytes, float] = {}
        """Time of an open namespace's first lookup, when stores and peers were asked whether it was cleared."""
        self._answered: set[bytes] = set()
        """Those of these namespaces about which all have answered, or were asked FOLLOW_S ago."""

    def start(self, stores: OpenStores) -> None:
        """Start to open the configured tiers; ``stores`` are those of ``shared_stores``. Raises NoMoreThreads."""
        self.peers.start()
        if (tiering := self.tiering) is None:
            return
        for size in self._config.disk:
            self._begin_to_open(size, tiering)
        for url, open_one in zip(self._config.shared, stores, strict=True):
            self._stores.append(tier := self._shared_tier(url, open_one, tiering))
            tiering.add_store(tier, self._settings(WriteMode(self._config.shared_write)))
        self.peers.open(tiering, self._shared_tier, self._settings(WriteMode.NEVER))
        if self.shares:  # else no other node can clear what the disks have
            tiering.lookups.ask_if_behind = self.ask_if_behind

    # --- disks -----------------------------------------------------------------------------------

    def _begin_to_open(self, size: DiskSize, tiering: Tiering) -> None:
        disk = Disk(size, CounterWindows(self._clock))
        self.disks.append(disk)
        # Not a thread of the executor: the process would wait for it at exit, and a disk may hang.
        name, arguments = f"kvoffd-open-{Path(size.directory).name}", (disk, tiering)
        start(opener := threading.Thread(target=self._open, args=arguments, name=name, daemon=True))
        disk.opener = opener

    def open_disk(self, size: DiskSize, listener: TierListener) -> DiskTier:
        """Open a directory, or stop when the daemon does. For any thread; tests open another. Raises KvoffdError."""
        return DiskTier(
            Path(size.directory),
            size.size_bytes,
            pool=self._pool.buffer,
            clock=self._clock,
            post=self._post,
            listener=listener,
            generation=self._generations.of,
            should_stop=lambda: self._stopping,
        )

    def _open(self, disk: Disk, tiering: Tiering) -> None:
        """Open a disk. Runs in a thread of its own."""
        try:
            tier = self.open_disk(disk.size, tiering)
        except OpeningStopped:
            return
        except KvoffdError as error:
            problem = error.message
            self._post(lambda: self._failed(disk, problem))
        except Exception as error:
            logger.exception("The disk at %s could not be opened.", disk.size.directory)
            problem = f"Opening failed inside the daemon: {error!r}."
            self._post(lambda: self._failed(disk, problem))
        else:
            self._post(lambda: self._opened(disk, tier, tiering))

    def _failed(self, disk: Disk, problem: str) -> None:
        disk.problem = problem
        logger.error("The disk at %s is not used. %s", disk.size.directory, problem)

    def _opened(self, disk: Disk, tier: DiskTier, tiering: Tiering) -> None:
        disk.tier = tier
        if self._stopping:
            tier.close(0.0)
            return
        logger.info(
            "The disk at %s is open after %s, with %s blocks and a size of %s%s.",
            disk.size.directory,
            format_duration(tier.open_seconds),
            format_count(tier.found_blocks),
            format_size(disk.size.size_bytes),
            "" if tier.direct else "; it uses the page cache, because it refuses O_DIRECT",
        )
        for fingerprint, generation in tier.found_generations.items():
            known = self._generations.of(fingerprint)
            are_valid = self._generations.accept(fingerprint, generation)  # a higher one becomes the known one
            if not are_valid:  # it was reset while the disk was opened, or the clock was set back
                tier.remove_all(fingerprint)
            if self._generations.of(fingerprint) > known:
                self._drop_older(fingerprint)
        # The budget of a day does not delay the first filling of the disk.
        tiering.disk_writer.budget.first_filling_bytes += max(0, disk.size.size_bytes - tier.lifetime_written_bytes)
        tiering.add_disk(tier)

    def _drop_older(self, fingerprint: bytes) -> None:
        """Drop a namespace's blocks of lower generations from the pool and other disks, after a disk revealed a reset
        that the state file had lost."""
        generation = self._generations.of(fingerprint)
        for disk in self.disks:
            # One that had none when it was opened got its blocks since.
            if disk.tier is not None and disk.tier.found_generations.get(fingerprint, 0) < generation:
                disk.tier.remove_all(fingerprint)
        if (namespace := self._cache.namespaces.get(fingerprint)) is not None:
            self._cache.reset(namespace, generation=generation)

    # --- peers and stores ------------------------------------------------------------------------

    def _settings(self, mode: WriteMode) -> TieringSettings:
        return TieringSettings(mode, deadline_s=self._config.shared_deadline_s, trickle_bytes=_trickle_bytes())

    def _shared_tier(self, name: str, open_one: Callable[[], Store], tiering: Tiering) -> SharedTier:
        return SharedTier(
            name,
            open_one,
            pool=self._pool.buffer,
            clock=self._clock,
            post=self._post,
            listener=tiering,
            ask_deadline_s=self._config.shared_ask_deadline_s,
            generations=self._generations,
        )

    @property
    def _every_shared(self) -> list[SharedTier]:
        """The shared stores and peers, with all places for nodes behind names."""
        places = self.peers.places
        return [*self._stores, *self.peers.tiers, *(places.tiers if places is not None else ())]

    @property
    def _always_asked(self) -> list[SharedTier]:
        """The shared stores and peers that are asked for whatever is missing."""
        places = self.peers.places
        return [*self._stores, *self.peers.tiers, *(places.always_asked if places is not None else ())]

    @property
    def shares(self) -> bool:
        """Whether blocks are exchanged with other nodes."""
        return bool(self._stores) or self.peers.helper is not None

    def void_everywhere(self, fingerprint: bytes) -> tuple[dict[str, Raise], Calls]:
        """Begin to void a namespace's blocks for all nodes; return what was begun, by the name of a store or peer, and
        the calls of all nodes behind names, connected or not.

        Here they are void at once: from a store or peer that cannot be reached nothing is taken until it has followed.
        """
        generation, cleared_at = self._generations.next_of_all(fingerprint), self._generations.now()
        self._generations.hear(fingerprint, generation)  # which voids them here
        raises = {
            tier.name: tier.clears.raise_generation(fingerprint, generation, cleared_at) for tier in self._always_asked
        }
        return raises, self.peers.call(fingerprint, generation, cleared_at)

    def tell_peers(self, fingerprints: Sequence[bytes]) -> None:
        """Have the peers hear now that namespaces were voided on all nodes, not only when they are polled: in a large
        fleet each node knows few others."""
        for tier in self._every_shared:
            tier.clears.tell(fingerprints)

    # --- all of them -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Do periodic work. A part that raises does not keep the others from it."""
        parts: list[Callable[[], object]] = []
        if self.peers.server is not None:
            parts.append(self.peers.server.tick)
        if self.tiering is not None:
            parts += [partial(tier.clears.poll, self._cache.namespaces) for tier in self._every_shared]
            if self.peers.places is not None:
                parts.append(self.peers.places.tick)
            parts += [self._forget_closed, self.tiering.tick]
            parts += [*(disk.sample_errors for disk in self.disks), self._save_spent]
        call_each(parts)

    def _forget_closed(self) -> None:
        for closed in self._asked_at.keys() - self._cache.namespaces.keys():
            del self._asked_at[closed]
            self._answered.discard(closed)

    def _save_spent(self) -> None:
        assert self.tiering is not None
        if (spent := self.tiering.disk_writer.budget.amount_to_persist()) is not None:
            self._state.save_disk_spent(spent)

    def ask_if_behind(self, fingerprint: bytes) -> bool:
        """Return whether a namespace's blocks in tiers may be void: others may have cleared it before it was opened.

        Its first lookup asks the stores and peers. They may be void until all have answered, or for ``FOLLOW_S``, and
        while a clear that was heard of is not carried out.
        """
        if fingerprint not in self._answered and (tiers := self._always_asked):
            now = self._clock()
            if (asked_at := self._asked_at.get(fingerprint)) is None:
                asked_at = self._asked_at[fingerprint] = now
                for tier in tiers:
                    tier.clears.poll([fingerprint])
            # Each of them may be the only one that knows of a clear.
            if now < asked_at + FOLLOW_S and any(tier.clears.answered_about(fingerprint) < asked_at for tier in tiers):
                return True
            self._answered.add(fingerprint)
        return fingerprint in self._generations.voided

    @property
    def problems(self) -> Iterator[tuple[str, str]]:
        """Problems: a word for the kind, and a sentence."""
        for disk in self.disks:
            name = disk.size.directory
            if disk.problem:
                yield "disk_failed", f"{disk.problem} Restart the daemon to try it again."
            if disk.tier is None:
                continue
            if disk.tier.is_unlinked:
                yield (
                    "disk_file_removed",
                    f"A file of the disk at {name} was removed. Blocks are served until the daemon stops; the next one "
                    "starts with an empty disk. Keep cleaners of temporary files away from it.",
                )
            if disk.tier.hangs:
                yield "disk_hangs", f"A call to the disk at {name} does not return; see dmesg."
            _, gained = disk.errors.gained(HOUR_S, disk.tier.stats().errors)
            if errors := {kind: int(n) for kind, n in sorted(gained.items()) if n and kind not in HARMLESS_ERRORS}:
                counts = ", ".join(f"{format_count(count)} {kind}" for kind, count in errors.items())
                yield (
                    "disk_errors",
                    f"The disk at {name} has had errors in the last hour ({counts}); blocks that could not be read "
                    "were recomputed. See dmesg and the drive's SMART data; if it is failing, restart the daemon "
                    "without the directory.",
                )
        yield from self.peers.problems
        for tier in (*self._stores, *self.peers.tiers):
            if not tier.available() and tier.health.problem:
                yield (
                    "shared_unreachable",
                    f"No blocks are shared over {tier.name}: {tier.health.problem} `kvoffd-cli stats tiers` shows what "
                    "failed, and what to check.",
                )
            if tier.available() and tier.health.refusal:
                yield "shared_refuses", f"Blocks are read from {tier.name}, but not written: {tier.health.refusal}"
            if len(tier.servers) > 1:
                for server in tier.servers:
                    if not server.answers:
                        what = f"{server.name}, a server of {tier.name}, cannot be used: {server.problem}"
                        yield "shared_server", what

    def close(self, deadline_s: float) -> bool:
        """Close all tiers within the deadline, also behind one whose closing raises. Returns False if one hangs that
        may still use the pool."""
        until = time.monotonic() + deadline_s
        self._stopping = True
        ended = call_each(
            (
                self._stop_tiering,
                partial(self._stop_opening, until),
                self.peers.stop,
                *(partial(self._close_disk, disk, until) for disk in self.disks),
                *(partial(self._close_shared, tier, until) for tier in self._every_shared),
                partial(self._close_helper, until),
            )
        )
        return False not in ended  # those that close nothing return None

    def _stop_tiering(self) -> None:
        if self.tiering is not None:
            self.tiering.stop()
            budget = self.tiering.disk_writer.budget
            if budget.left_bytes is not None:  # there is a limit
                self._state.save_disk_spent(budget.spent_bytes)  # exactly: nothing is written any more

    def _stop_opening(self, until: float) -> None:
        for disk in self.disks:
            if disk.opener is not None:
                disk.opener.join(min(STOP_OPENING_S, max(0.0, until - time.monotonic())))

    def _close_disk(self, disk: Disk, until: float) -> bool:
        left_s = max(0.0, until - time.monotonic())
        if disk.tier is None or disk.tier.close(0.0 if disk.tier.hangs else left_s):
            return True
        logger.warning("The disk at %s does not answer; it stays open.", disk.size.directory)
        return False

    def _close_shared(self, tier: SharedTier, until: float) -> bool:
        if tier.close(max(CLOSE_STEP_S, until - time.monotonic())):
            return True
        logger.warning("%s does not answer; it stays open.", tier.name)
        return False

    def _close_helper(self, until: float) -> bool:
        helper = self.peers.helper
        if helper is None or helper.close(max(CLOSE_STEP_S, until - time.monotonic())):
            return True
        logger.warning("The helper process for peers does not end.")
        return False


def shared_stores(config: Config) -> OpenStores:
    """Return the configured stores, unconnected. Raises KvoffdError for an invalid configuration."""
    if config.peers or config.peer_listen:
        check_installed()
        if not config.peer_secret_file:
            raise KvoffdError("peers and peer_listen need a secret; name its file as peer_secret_file.")
        read_secret(config.peer_secret_file)
        warn_of_readers(config.peer_secret_file, "the secret of peers")
    credentials = Credentials.read(config.shared_password_file, len(config.shared)) if config.shared else []
    return list(map(open_store, config.shared, credentials))
