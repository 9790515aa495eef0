"""What the cache calls: a listener for blocks that become readable, and the tiers below the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import Lease, LoadTicket
from kvoffd_proto.events import MEDIUM_CPU


class BlockTokens(NamedTuple):
    """What a store sent with a block, as in ``GroupTransfer``: the key before it, and its token ids."""

    parent: bytes
    token_ids: bytes


NO_TOKENS: Mapping[bytes, BlockTokens] = MappingProxyType({})


class CacheListener(Protocol):
    """Hears of every change of what the pool and the tiers below it hold, in order: folding the calls from the start
    gives the index of each. ``medium``: CPU for the pool, STORAGE for the tiers, whatever they are, as in vLLM.

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
        """These keys are there from now on; none of them was before. ``tokens``: of those whose store sent them."""

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU) -> None:
        """These keys are not there any more; all of them were before. Of those that a disk had when it was opened
        ``stored`` did not tell."""

    def cleared(self, namespace: Namespace) -> None:
        """No key of the namespace is anywhere any more."""


class TierHooks(Protocol):
    """Looks after the tiers below the pool. Called in the middle of a change: it must not change the cache."""

    def find(
        self,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        states: list[bytes],
        asked: Sequence[AskedKeys] | None,
    ) -> list[bytes]:
        """Return the states that a lookup answers with: PENDING or SHARED for FREE keys that come from a tier, whose
        number is set in the lease. Return ``states`` itself if no tier can be asked.

        ``asked``: by group, where keys that do not come are counted as missed; None if they were counted before.
        """

    def lease_ended(self, lease: Lease) -> None:
        """What lookups under this lease waited for need not come up for it."""

    def loaded(self, tickets: Sequence[LoadTicket]) -> None:
        """These loads have ended."""

    def used(self, blocks: BlockIds) -> None:
        """A lookup found these blocks READY."""

    def stored(self, blocks: BlockIds) -> None:
        """These blocks became READY."""

    def evicted(self, blocks: BlockIds) -> None:
        """These READY blocks leave the pool because others need the space. Their keys and bytes are still there."""

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        """Which of the blocks wait to be written, to be evicted after others that do not; None where none waits."""

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        """Remove keys from the tiers for good, and stop bringing them up."""

    def forget_all(self, namespace: Namespace) -> int:
        """Remove the whole namespace from the tiers for good. Returns how many blocks the disks had."""
