"""What the cache calls: a listener for what becomes readable, and whoever looks after the tiers below the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvoffd.cache.namespace import Block, MissReason, Namespace
from kvoffd_proto.events import MEDIUM_CPU


class BlockTokens(NamedTuple):
    """What a store told of a block, as in ``GroupTransfer``: the key before it, and its token ids."""

    parent: bytes
    token_ids: bytes


NO_TOKENS: Mapping[bytes, BlockTokens] = MappingProxyType({})


class CacheListener(Protocol):
    """Told of every change of what the pool and the tiers below it hold, in order: folding the calls from the start
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
        """These keys are there from now on; none of them was before. ``tokens``: of those of which a store told it."""

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU) -> None:
        """These keys are not there any more; all of them were before."""

    def cleared(self, namespace: Namespace) -> None:
        """No key of the namespace is anywhere any more."""


class TieringHooks(Protocol):
    """Looks after the tiers below the pool.

    It is called in the middle of a change or an answer. It may take notes and remove blocks from the tiers, and read
    the cache's index, but it must not change the cache.
    """

    def may_have(self, namespace: Namespace) -> bool:
        """Whether ``find`` can find anything of a namespace now."""

    def find(
        self,
        namespace: Namespace,
        owner: int,
        groups: Sequence[tuple[int, list[bytes]]],
        states: Sequence[bytes],
        again: bool,
    ) -> list[bytes]:
        """The states that a lookup answers with: PENDING for absent keys that are brought up from a tier now, SHARED
        for those that come from a store that nodes share, or are being asked for there. Both are counted, as found or
        as misses, once it is known whether they come up, unless the lookup comes ``again``.

        ``owner`` is the session that asks; ``states`` are those of the pool, one byte a key, for each of ``groups``.
        """

    def used(self, blocks: Sequence[Block]) -> None:
        """A lookup found these blocks ready."""

    def stored(self, blocks: Sequence[Block]) -> None:
        """A store or a promotion made these blocks ready."""

    def evicted(self, blocks: Sequence[Block]) -> None:
        """These blocks left the pool because others needed the room."""

    def forget(self, namespace: Namespace, group: int, keys: Iterable[bytes], why: MissReason) -> None:
        """Remove these keys from the tiers for good, and stop bringing them up.

        A store that nodes share loses only what is PARTIAL; what is INVALIDATED is not taken from it for a while.
        """

    def forget_all(self, namespace: Namespace) -> int:
        """Remove the whole namespace from the tiers for good. Returns how many blocks they had."""

    def has(self, namespace: Namespace, group: int, key: bytes) -> bool:
        """Whether a tier has this key."""
