"""The tiers below the pool, as one: lookups find what they hold, blocks go up and down, what is invalidated goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from kvoffd.cache.block_table import WRITING, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.demotion import Demoter
from kvoffd.tiering.promotion import Promoter, prefix_run, whole_prefixes_first, window_run
from kvoffd.tiering.shared import SharedTiering
from kvoffd.tiers.tier import AskedTier, Tier, TierBlock, TierKey
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import PENDING

logger = logging.getLogger(__name__)

LOGGED_S = 600.0
"""An error of a tier is logged again after so long."""
MOST_LOGGED = 1024
"""Kinds of errors of tiers, each of every server, of which it is known when they were logged."""
MAX_KEYS_PER_TICK = 1000
"""Blocks of a namespace just opened that are published in one tick, and of a directory that is gone in one step."""


class TieringManager:
    """Looks after one tier, which may be made of several, for one cache: its ``TierHooks``.

    ``pump`` begins what lookups asked for, once their replies are out; ``tick`` is for deadlines and the cold end.
    """

    def __init__(
        self,
        cache: Cache,
        tier: Tier,
        events: CacheListener,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self.tier = tier
        self._events = events
        self.promoter = Promoter(cache, tier, clock, settings)
        self.demoter = Demoter(cache, tier, clock, settings, lambda: not self.promoter.busy, engines_busy)
        self._clock = clock
        self._engines_busy = engines_busy
        self.shared: list[SharedTiering] = []
        """The tiers that nodes share, in the order in which they are asked."""
        self._logged_errors: dict[tuple[str, str], float] = {}
        """Tiers and kinds of their errors that were logged, and when; the tiers count them."""
        self._published: dict[tuple[Namespace, int], set[bytes]] = {}
        """Keys that the tier has by the events so far."""
        self._unpublished: dict[tuple[Namespace, int], list[bytes]] = {}
        """Keys that the tier had before their namespace was opened, of which events may not have told yet."""
        self._evicted: list[TierKey] = []
        self.directory_attached()

    def share(self, tier: AskedTier, settings: TieringSettings, unshared: Iterable[bytes] = ()) -> None:
        """Use a tier that nodes share, for what the pool and the tiers before it do not have.

        ``unshared``: fingerprints of namespaces that an engine reset in an earlier life of the daemon.
        """
        shared = SharedTiering(self._cache, tier, self._clock, settings, self._engines_busy)
        for fingerprint in unshared:
            shared.stop_sharing(fingerprint)
        self.shared.append(shared)

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self,
        namespace: Namespace,
        session: int,
        groups: Sequence[tuple[int, bytes]],
        states: Sequence[bytes],
        again: bool,
    ) -> list[bytes]:
        answer = [bytearray(state) for state in states]
        for number, limit in whole_prefixes_first(namespace, groups, answer):
            group, keys = groups[number]
            self._request(namespace, session, group, keys, states[number], answer[number], limit, int(not again))
        for shared in self.shared:
            shared.find(namespace, session, groups, answer, again)
        return list(map(bytes, answer))

    def _request(
        self,
        namespace: Namespace,
        session: int,
        group: int,
        keys: bytes,
        pool: bytes,
        answer: bytearray,
        limit: int | None,
        askers: int,
    ) -> None:
        """Have what comes up from the tier marked in the answer, and queued if it is not yet."""
        requested = self.promoter.requested(namespace, group)
        index = self.tier.readable(namespace.fingerprint, group)
        if not index and not requested:
            return
        names = namespace.split(group, keys)

        def comes(place: int) -> bool:
            return names[place] in requested or (pool[place] != WRITING and names[place] in index)

        spec = namespace.groups[group]
        places = prefix_run(pool, comes) if limit is None else window_run(pool, spec, limit, comes)
        self.promoter.request(namespace, session, group, names, places, answer, PENDING, lambda _: askers)

    def used(self, blocks: BlockIds) -> None:
        for group, alike in self._cache.by_group(blocks):
            for demoter in self._demoters:
                demoter.used(group, alike)

    def stored(self, blocks: BlockIds) -> None:
        for demoter in self._demoters:
            demoter.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        # The tier's own order goes on where the pool's ends. That waits for the next tick: a store waits for this call.
        for group, alike in self._cache.by_group(blocks):
            fingerprint = group.namespace.fingerprint
            if self.tier.index(fingerprint, group.group):
                keys = group.namespace.split(group.group, self._cache.blocks.keys(alike, group.key_bytes))
                self._evicted += [TierKey(fingerprint, group.group, key) for key in keys]

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        names = namespace.split(group, keys)
        for key in names:
            self.promoter.forget(namespace, group, key)
        self.tier.remove([TierKey(namespace.fingerprint, group, key) for key in names])
        self._publish_removed(namespace, group, names)
        for shared in self.shared:
            shared.forget(namespace, group, names, why)

    def forget_all(self, namespace: Namespace) -> int:
        # The event of the cache that the namespace is cleared tells of the tier's blocks too.
        self.promoter.forget_all(namespace)
        for shared in self.shared:
            shared.forget_all(namespace)
        for group in range(len(namespace.groups)):
            self._published.pop((namespace, group), None)
            self._unpublished.pop((namespace, group), None)
        return self.tier.remove_namespace(namespace.fingerprint)

    def has(self, namespace: Namespace, group: int, keys: bytes) -> int:
        index = self.tier.index(namespace.fingerprint, group)
        return sum(key in index for key in namespace.split(group, keys)) if index else 0

    # --- what the daemon calls -------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """How long it will take until what lookups wait for is up, as far as that is known."""
        return max([self.promoter.wait_s, *(shared.wait_s for shared in self.shared)])

    def pump(self) -> None:
        """Begin what was requested, and go on writing. For when the replies are out."""
        for promoter in self._promoters:
            promoter.pump()
        for demoter in self._demoters:
            demoter.pump()

    def stop(self) -> None:
        """Begin nothing any more."""
        for promoter in self._promoters:
            promoter.stop()
        for demoter in self._demoters:
            demoter.stop()

    def tick(self) -> None:
        """A few times a second: deadlines, the cold end of the pool, events."""
        evicted, self._evicted = self._evicted, []
        self.tier.touch(evicted)
        self.tier.tick()
        for promoter in self._promoters:
            promoter.tick()
        for promoter, demoter in zip(self._promoters, self._demoters, strict=True):
            demoter.tick(promoter.promoted_bytes)
        for shared in self.shared:
            shared.tick()
        self.publish_some()

    def take_voided(self) -> set[bytes]:
        """Fingerprints of namespaces that were reset for all nodes since the last call.

        Of these nothing is shared until they are reset everywhere: what the pool has of them would be written as if it
        were new.
        """
        found = {fingerprint for shared in self.shared for fingerprint in shared.tier.take_voided()}
        for shared in self.shared:
            for fingerprint in found:
                shared.stop_sharing(fingerprint)
        return found

    def namespace_reset(self, fingerprint: bytes, *, everywhere: bool) -> None:
        """A namespace's blocks are stale; ``everywhere``: those of other nodes are gone too."""
        for shared in self.shared:
            shared.namespace_reset(fingerprint, everywhere=everywhere)

    def forget_unopened(self) -> int:
        """Forget what belongs to namespaces that nobody has opened since the start. Returns how many blocks."""
        names = {fingerprint for fingerprint, _ in self.tier.groups()}
        return sum(map(self.tier.remove_namespace, names - set(self._cache.namespaces)))

    def namespace_opened(self, namespace: Namespace) -> None:
        """A namespace was opened: what the tier has of it already is published by and by."""
        for group in range(len(namespace.groups)):
            if unpublished := list(self.tier.index(namespace.fingerprint, group)):  # a million in some 10 ms
                self._unpublished[namespace, group] = unpublished

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Nobody has the namespace open, and the pool nothing of it. What the tier has of it stays."""
        for promoter in self._promoters:
            promoter.namespace_forgotten(namespace)
        for group in range(len(namespace.groups)):
            self._published.pop((namespace, group), None)
            self._unpublished.pop((namespace, group), None)

    def directory_attached(self) -> None:
        """The tier has blocks that it was not told to write, as those of a directory that was opened."""
        for namespace in self._cache.namespaces.values():
            self.namespace_opened(namespace)

    def publish_some(self) -> None:
        """Publish some of what the tier had before the namespace was opened; of a new directory first."""
        for (namespace, group), unpublished in list(self._unpublished.items()):
            keys = unpublished[-MAX_KEYS_PER_TICK:]
            del unpublished[-MAX_KEYS_PER_TICK:]
            if not unpublished:
                del self._unpublished[namespace, group]
            index = self.tier.index(namespace.fingerprint, group)
            self._publish_stored(namespace, group, [key for key in keys if key in index])
            return

    # --- what the tier calls: see TierListener ---------------------------------------------------

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        namespace = self._cache.find(block.id.fingerprint)
        group, key = block.id.group, block.id.key
        if (
            namespace is not None
            and group < len(namespace.groups)
            and key in self.tier.index(block.id.fingerprint, group)
        ):
            self._publish_stored(namespace, group, [key])

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        # What was forgotten from here is published already, and a reset leaves nothing to publish.
        for (fingerprint, group), same in groupby(ids, itemgetter(0, 1)):
            namespace = self._cache.find(fingerprint)
            published = self._published.get((namespace, group)) if namespace is not None else None
            if namespace is not None and published:
                keys, index = [one.key for one in same if one.key in published], self.tier.index(fingerprint, group)
                self._publish_removed(namespace, group, [key for key in keys if key not in index])

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged_errors.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged_errors, (tier.name, kind), now, MOST_LOGGED)

    def tier_answered(
        self, tier: AskedTier, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]
    ) -> None:
        for shared in self.shared:
            if shared.tier is tier:
                shared.answered(fingerprint, group, keys, found)

    @property
    def _promoters(self) -> Sequence[Promoter]:
        return [self.promoter, *(shared.promoter for shared in self.shared)]

    @property
    def _demoters(self) -> Sequence[Demoter]:
        return [self.demoter, *(shared.demoter for shared in self.shared)]

    def _publish_stored(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        published = self._published.setdefault((namespace, group), set())
        fresh = [key for key in keys if key not in published]
        published.update(fresh)
        if fresh:
            self._events.stored(namespace, group, fresh, MEDIUM_STORAGE)

    def _publish_removed(self, namespace: Namespace, group: int, keys: Iterable[bytes]) -> None:
        published = self._published.get((namespace, group), set())
        gone = [key for key in dict.fromkeys(keys) if key in published]
        published.difference_update(gone)
        if gone:
            self._events.removed(namespace, group, gone, MEDIUM_STORAGE)
