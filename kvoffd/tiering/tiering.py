"""The tiers below the pool as a whole: lookups find their blocks, blocks move up and down, invalid ones are removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.system.calls import call_each
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.block_origins import BlockOrigins
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.promotions import Promotions
from kvoffd.tiering.tier_lookups import TierLookups
from kvoffd.tiering.unanswered_keys import UnansweredKeys
from kvoffd.tiering.writer import Writer
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Tier
from kvoffd_proto.events import MEDIUM_STORAGE

logger = logging.getLogger(__name__)

FAILED_S = 10.0
"""Time for which prompts whose blocks could not be read name the tier: their reports come about a second later."""
LOGGED_S = 600.0
"""Interval after which a tier's error is logged again."""
MAX_LOGGED = 1024
"""Remembered kinds of tier errors, by server, with the time when they were logged."""


class Tiering:
    """Manages the sources below the pool of one cache: its ``TierHooks``, and the ``TierListener`` of all tiers.

    ``pump`` begins requested promotions once the replies are sent; ``tick`` is for deadlines and the cold end.

    | part                | has                                                                                    |
    |---------------------|----------------------------------------------------------------------------------------|
    | ``TierLookups``     | which keys are in a tier, and which of these are requested                             |
    | ``UnansweredKeys``  | keys that stores are being asked for, until they are counted                           |
    | ``Promotions``      | the requested blocks, until each has come or failed: the leases that await them, their |
    |                     | queues, and the space that is reserved for them                                        |
    | ``PromotionSource`` | one for each disk, store and peer: its reads into the pool                             |
    | ``BlockOrigins``    | where blocks that have come were, until they are loaded                                |
    | ``Writer``          | one for all disks, and one for each store: the blocks on their way down                |

    Attributes:
        is_unshared: whether a namespace, by its fingerprint, became stale here: other nodes' blocks of the same keys
            may be stale too, so stores are neither read nor written for it.
        lookups, promotions: two of these parts.
        find, lease_ended, cancel_promotions, loaded, answered: methods of parts, which cache and tiers call without a
            step between.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
        is_unshared: Callable[[bytes], bool] = lambda fingerprint: False,
    ) -> None:
        self._cache, self._clock = cache, clock
        self._engines_busy, self.is_unshared = engines_busy, is_unshared
        self.sources: list[PromotionSource] = []
        """The disks of this node, then shared stores in the order of asking. All parts have this list."""
        self._disk_settings = settings
        self._disk_tiers = list[Tier]()
        """The tiers of the first sources. The disks' writer has this list too, and so those that open later."""
        self.writers = [self._make_writer(self._disk_tiers, settings, shared=False)]
        """The writer of the disks, then those of the stores."""
        self._origins, self._unanswered = BlockOrigins(len(cache.blocks.state)), UnansweredKeys(cache)
        self.promotions = Promotions(cache, self.sources, clock)
        self.lookups = TierLookups(cache, self.sources, self.promotions, self._unanswered, is_unshared)
        self.find, self.lease_ended = self.lookups.find, self.promotions.lease_ended
        self.cancel_promotions = self.promotions.cancel
        self.loaded, self.answered = self._origins.loaded, self._unanswered.answered
        self._to_spare: list[tuple[BlockGroup, list[bytes]]] = []
        """Blocks that left the pool since the last tick, for the disks: see ``Tier.spare``."""
        self._events = events
        self._logged: dict[tuple[str, str], float] = {}
        """Logged errors by tier and kind, with the time; the tiers count them."""

    @property
    def disks(self) -> list[PromotionSource]:
        """The sources that are disks."""
        return self.sources[: len(self._disk_tiers)]

    @property
    def stores(self) -> list[PromotionSource]:
        """The sources that nodes share."""
        return self.sources[len(self._disk_tiers) :]

    @property
    def disk_writer(self) -> Writer:
        return self.writers[0]

    def add_store(self, tier: Tier, settings: TieringSettings) -> PromotionSource:
        """Add a store that nodes share, for blocks that neither the pool nor the earlier sources have."""
        writer = self._make_writer([tier], settings, shared=True)
        source = self._make_source(tier, settings, writer, shared=True)
        self._origins.add_source(source)
        self.sources.append(source)
        self.writers.append(writer)
        return source

    def add_disk(self, tier: Tier) -> PromotionSource:
        """Add a disk, before the stores. What reads may use of the pool is divided between all disks."""
        source = self._make_source(tier, self._disk_settings, self.disk_writer, shared=False)
        self._origins.add_source(source)
        self.sources.insert(len(self._disk_tiers), source)
        self._disk_tiers.append(tier)
        for_all_disks = source.reads.most_bytes  # a new source has what one that is alone may use
        for one in self.disks:
            one.reads.most_bytes = for_all_disks // len(self._disk_tiers)
        return source

    def _make_source(self, tier: Tier, settings: TieringSettings, writer: Writer, *, shared: bool) -> PromotionSource:
        parts = self._cache, self._clock, self.promotions, writer, self.writers, self._origins
        return PromotionSource(tier, settings, *parts, shared=shared)

    def _make_writer(self, tiers: list[Tier], settings: TieringSettings, *, shared: bool) -> Writer:
        leaves_out = self.is_unshared if shared else lambda fingerprint: False
        return Writer(self._cache, tiers, self._clock, settings, self.sources, self._engines_busy, leaves_out)

    def replace_source(self, source: PromotionSource, settings: TieringSettings) -> PromotionSource:
        """Replace an idle source whose tier serves another peer from now on, of which nothing is known yet."""
        new = self._make_source(source.tier, settings, source.writer, shared=source.shared)
        self._origins.replace_source(source, new)
        self.sources[self.sources.index(source)] = new
        return new

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def used(self, blocks: BlockIds) -> None:
        if writers := [writer for writer in self.writers if writer.available]:
            for group, members in self._cache.blocks.by_group(blocks):
                for writer in writers:
                    writer.used(group, members)

    def stored(self, blocks: BlockIds) -> None:
        self._origins.stored(blocks)
        for writer in self.writers:
            writer.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        self._origins.evicted(blocks)
        for group, members in self._cache.blocks.by_group(blocks):
            if group.retired:
                continue
            keys = self._cache.blocks.split_keys(members, group.key_bytes)
            for writer in self.writers:
                writer.evicted(group, members, keys)
            if self._disk_tiers:  # the next tick passes it on to them: an engine's store waits for this call
                self._to_spare.append((block_group_of(group), keys))

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        """Return which of these blocks wait to be written, and are written soon; None if none are."""
        writers = [writer for writer in self.writers if writer.waiting and writer.writes_soon]
        if not writers:
            return None
        found, numbers = np.zeros(len(blocks), np.bool_), blocks.tolist()
        for writer in writers:
            found |= np.fromiter(map(writer.waiting.__contains__, numbers), np.bool_, len(numbers))
        return found

    @property
    def are_written(self) -> bool:
        """Whether some tier is written now; peers, and tiers of the mode ``never``, are only read."""
        return any(writer.mode is not WriteMode.NEVER and writer.writes_soon for writer in self.writers)

    def safe_to_evict(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which of these READY blocks have been written, or left out as unlikely; none if no tier is written."""
        if not self.are_written:
            return np.zeros(len(blocks), np.bool_)
        waiting = self.waiting(blocks)
        return np.ones(len(blocks), np.bool_) if waiting is None else ~waiting

    def remove(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        single_keys, block_group = namespace.split(group, keys), block_group_of(namespace.group(group))
        self.promotions.remove(block_group.tag, single_keys, why)
        for source in self.sources:
            # Bytes that are wrong here are not wrong in a store, which other nodes use.
            if not source.shared or why is not MissReason.CORRUPT:
                is_incomplete = why is MissReason.PARTIAL  # in a store too, where all nodes would find it again
                source.tier.remove(block_group, single_keys, for_all_nodes=is_incomplete)

    # --- what the daemon calls -------------------------------------------------------------------

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove all blocks of a namespace, open or not, or of all, from the disks; return how many.

        The cache's event for a cleared namespace covers them.
        """
        return sum(tier.remove_all(fingerprint) for tier in self._disk_tiers)

    def pump(self) -> None:
        """Begin requested promotions, and continue writing. Call it after the replies are sent."""
        call_each([source.pump for source in self.sources if source.read_order.blocks])
        call_each([writer.pump for writer in self.writers if writer.waiting])

    @property
    def has_queued_promotions(self) -> bool:
        """Whether promotions are queued."""
        for source in self.sources:  # noqa: SIM110 - after each lookup, and a generator takes twice as long
            if source.read_order.blocks:
                return True
        return False

    def stop(self) -> None:
        """Begin nothing more."""
        for source in self.sources:
            source.stop()
        for writer in self.writers:
            writer.stop()

    def tick(self) -> None:
        """Handle deadlines and the cold end of the pool. Called a few times a second."""
        reads, writes = [source.tick for source in self.sources], [writer.tick for writer in self.writers]
        call_each((self._spare_evicted, *reads, *writes))

    def background(self) -> bool:
        """End some more of what is overdue, if a tick left any; return whether there is more."""
        more = False
        for source in self.sources:
            if source.has_overdue:
                source.end_overdue()
                more |= source.has_overdue
        return more

    def _spare_evicted(self) -> None:
        left_pool, self._to_spare = self._to_spare, []
        for block_group, keys in left_pool:
            for tier in self._disk_tiers:
                tier.spare(block_group, keys)

    @property
    def failing(self) -> list[str]:
        """Names of the tiers that failed to read a block within ``FAILED_S``."""
        since = self._clock() - FAILED_S
        return [one.tier.name for one in self.sources if one.failed_at >= since]

    def count_missed(self, names: Sequence[str], keys: int) -> None:
        """Count keys that a prompt missed, at each of the tiers of these names, which were down."""
        for source in self.sources:
            if source.tier.name in names:
                source.tier.counters.missed_keys += keys

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Cancel the promotions of a namespace that was forgotten. Its blocks on disks and in stores stay."""
        self.cancel_promotions(namespace)
        self._unanswered.forget(namespace)

    # --- what the tiers call: see TierListener ----------------------------------------------------

    def blocks_stored(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.stored(namespace, block_group.group_index, list(keys), MEDIUM_STORAGE)

    def blocks_removed(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.removed(namespace, block_group.group_index, list(keys), MEDIUM_STORAGE)

    def _namespace_of(self, block_group: BlockGroup) -> Namespace | None:
        """Return the namespace of a group if it is open and was not reset since."""
        namespace = self._cache.namespaces.get(block_group.fingerprint)
        return namespace if namespace is not None and namespace.generation == block_group.generation else None

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged, (tier.name, kind), now, MAX_LOGGED)
