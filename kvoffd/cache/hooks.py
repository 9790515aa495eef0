"""Interfaces that the cache calls: a listener for readable blocks, and the tiers below the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.prompt_tokens import LoadedKeys
from kvoffd.cache.tickets import Lease, LoadTicket
from kvoffd_proto.events import MEDIUM_CPU


class BlockTokens(NamedTuple):
    """Metadata that a store sent with a block, as in ``GroupTransfer``: the previous key, and the token ids."""

    parent: bytes
    token_ids: bytes


NO_TOKENS: Mapping[bytes, BlockTokens] = MappingProxyType({})


class CacheListener(Protocol):
    """Receives every change of the contents of pool and tiers, in order: replaying the calls from the start gives the
    contents of each. ``medium``: CPU for the pool, STORAGE for all tiers, as in vLLM.

    It is called in the middle of a change and must not call the cache.
    """

    def stored(
        self,
        namespace: Namespace,
        group: int,
        keys: list[bytes],
        medium: str = MEDIUM_CPU,
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
    ) -> None:
        """These keys are present from now on; none was before. ``tokens``: of the keys whose store sent them."""

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU) -> None:
        """These keys are gone; all were present, some without ``stored``: those that a disk had when it was opened."""

    def cleared(self, namespace: Namespace) -> None:
        """No key of the namespace is announced any more."""


class TierHooks(Protocol):
    """Manages the tiers below the pool. Called in the middle of a change: it must not change the cache, but that
    ``lease_ended`` may change the order of eviction."""

    @property
    def are_written(self) -> bool:
        """Whether blocks are written to a tier now; peers, and tiers of the mode ``never``, are only read."""

    def find(
        self,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        states: list[bytes],
        asked: Sequence[AskedKeys] | None,
    ) -> list[bytes]:
        """Return the states that a lookup reports: PENDING or SHARED for FREE keys that come from a tier; the lease
        records how many.

        ``asked``: by group, where keys that do not come are counted as missed; None if they were counted before.
        """

    def lease_ended(self, lease: Lease) -> None:
        """The lease ended: promotions for it alone can stop. What has come up for it gets its place in the order of
        eviction (``BlockStores.order_chain``)."""

    def loaded(self, ticket: LoadTicket) -> LoadedKeys | None:
        """A load succeeded. Return the sources of its keys; None if all were in the pool."""

    def used(self, blocks: BlockIds) -> None:
        """A lookup found these blocks READY."""

    def stored(self, blocks: BlockIds) -> None:
        """A store made these blocks READY. It is not called for a fill, which the tiers end themselves."""

    def evicted(self, blocks: BlockIds) -> None:
        """These READY blocks are about to be evicted. Their keys and bytes are still present."""

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        """Return which of the blocks wait to be written to a tier and are evicted after others; None if none waits."""

    def safe_to_evict(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which READY blocks were written to a tier, or are not worth it; none if no tier is written."""

    def remove(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        """Stop promoting keys, and remove them: see ``Tier.remove``."""

    def cancel_promotions(self, namespace: Namespace) -> None:
        """The namespace was reset: nothing comes up that was requested for it so far."""
