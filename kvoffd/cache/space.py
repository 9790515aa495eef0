"""Slots for new blocks: free ones, those of reset namespaces, and those of blocks that are evicted for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.namespace import Group, MissReason
from kvoffd.cache.victims import ANY_PROMPT, Victims

MAX_OVER_QUOTA = 512
"""Evictions per store while a namespace is over quota, if the store has fewer blocks itself."""
PARTIAL_GRACE_S = 2.0
"""Age from which partial blocks are dropped first when space is needed."""
MAX_WRITING_DIVISOR = 4
"""If WRITING blocks take more than 1/4 of the pool, partial ones are dropped as soon as space is needed."""
_NO_SLOTS: npt.NDArray[np.uint32] = np.empty((0, 1), np.uint32)


class Space:
    """Finds space, in this order: below the namespace's quota, in free slots, in those of reset namespaces, of partial
    blocks, and by eviction in the order of the policy and its hints.

    Args:
        quotas: limits of pool bytes by fingerprint.
    """

    def __init__(self, life: BlockLife, quotas: Mapping[bytes, int], clock: Callable[[], float]) -> None:
        self._life, self._slots, self._quotas, self._clock = life, life.slots, quotas, clock
        self.victims = Victims(life)

    def take(self, group: Group, keys: bytes, below: float, older_than: int) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks for the first of the keys, which have none, as far as there is space. Returns their
        slots, [blocks, ranks].

        ``below``, ``older_than``: blocks with a lower score, and of older prompts, may be evicted; see ``Victims``.
        """
        size, ranks = group.key_bytes, len(group.sizes)
        count, made, has_swept = len(keys) // size if ranks else 0, 0, False
        if self._quotas and count and group.namespace.fingerprint in self._quotas:
            count = self._within_quota(group, count, below, older_than)
        found: list[npt.NDArray[np.uint32]] = []
        try:
            while made < count:  # each round makes blocks, or frees slots for the next one, or is the last
                left, wanted = keys[made * size :] if made else keys, count - made
                slots = _NO_SLOTS
                if self._slots.free_bytes >= group.block_bytes:
                    slots = self._life.make(group, left, wanted)
                if not len(slots):  # free some and try again, or give the slots of other blocks to new ones at once
                    if self._life.unswept and not has_swept:  # not again until some were made: sizes may not fit
                        has_swept = True
                        self._sweep_for(group, wanted)
                        continue
                    if not group.namespace.evicts_others:
                        break
                    if self._life.partial and self._drop_partial(wanted):
                        continue
                    victims, same_group = self.victims.choose(group, wanted, below, older_than)
                    if not victims.size:
                        break
                    if not same_group:
                        self._life.evict(victims)
                        continue
                    count = min(count, made + len(victims))  # if they are fewer, nothing else can be evicted
                    slots = self._life.replace(group, victims, left)
                has_swept = False
                found.append(slots)  # fewer than wanted if slots ran out: the next round makes space
                made += len(slots)
        except BaseException:
            for slots in found:
                self._life.drop(slots[:, 0], MissReason.NO_SPACE)
            raise
        return found[0] if len(found) == 1 else np.concatenate([np.empty((0, max(1, ranks)), np.uint32), *found])

    def _sweep_for(self, group: Group, count: int) -> None:
        """Return the slots of up to ``count`` blocks of reset namespaces, of groups with the same sizes first."""
        unswept = sorted(self._life.unswept.values(), key=lambda each: group.sizes != each.sizes)
        self._life.sweep(unswept, count)

    def _drop_partial(self, count: int) -> bool:
        """Drop up to ``count`` unpinned blocks that have been partial for too long. Returns whether there are any."""
        # Blocks that only some ranks store must not crowd out readable blocks.
        crowded = self._life.usage.writing > self._slots.pool_bytes // MAX_WRITING_DIVISOR
        partial = self._life.partial_since(self._clock() - (0.0 if crowded else PARTIAL_GRACE_S))
        unpinned = list(islice((block for block in partial if not self._life.blocks.pins[block]), count))
        self._life.drop_partial(unpinned)
        return bool(unpinned)

    def _within_quota(self, group: Group, count: int, below: float, older_than: int) -> int:
        """Return how many of ``count`` blocks the quota allows, after evicting blocks of the namespace if needed."""
        namespace, block_bytes = group.namespace, group.block_bytes
        quota, most = self._quotas[namespace.fingerprint], max(count, MAX_OVER_QUOTA)
        excess = namespace.held_bytes + count * block_bytes - quota
        if excess > 0 and self._life.unswept:
            unswept = [known for known in self._life.unswept.values() if known.namespace is namespace]
            swept = self._life.sweep(unswept, min(most, -(-excess // block_bytes)))
            most -= swept
            excess -= swept * block_bytes
        if excess > 0:
            victims = self.victims.of_namespace(namespace.groups, excess, most, below, older_than)
            self._life.evict(victims, MissReason.QUOTA)
        return max(0, min(count, (quota - namespace.held_bytes) // block_bytes))

    def no_space_cause(self, group: Group, prompt: int = ANY_PROMPT) -> str:
        """Return why a block of a group, for the prompt of this number, gets no space now, one of NO_SPACE_CAUSES."""
        if not group.sizes:
            return "unregistered"
        usage, quota = self._life.usage, self._quotas.get(group.namespace.fingerprint)
        pinned_ready = usage.pinned - self._life.blocks.pinned_dropped_bytes
        if quota is not None and group.namespace.held_bytes + group.block_bytes > quota:
            return "quota"
        if group.block_bytes > self._slots.pool_bytes:
            return "too_large"
        if usage.free + usage.ready - pinned_ready >= group.block_bytes:
            return "prompt" if prompt < ANY_PROMPT and self.victims.spares(prompt) else "sizes"
        return "pinned" if usage.pinned >= usage.writing else "writing"
