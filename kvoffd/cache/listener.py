"""Who hears what becomes readable and what does not any more."""

from __future__ import annotations

from typing import Protocol

from kvoffd.cache.namespace import Namespace


class CacheListener(Protocol):
    """Told of every change of the readable blocks, in order. Folding it from the start gives the index.

    It is called in the middle of a change and must not call the cache.
    """

    def stored(self, namespace: Namespace, group: int, keys: list[bytes]) -> None:
        """These keys can be read from now on; none of them could before."""

    def removed(self, namespace: Namespace, group: int, keys: list[bytes]) -> None:
        """These keys can not be read any more; all of them could before."""

    def cleared(self, namespace: Namespace) -> None:
        """No key of the namespace can be read any more."""


class TierEvents(Protocol):
    """Told of what a tier below the pool holds of open namespaces. Folding it gives the tier's index."""

    def stored_in_tier(self, namespace: Namespace, group: int, keys: list[bytes]) -> None:
        """These keys can be brought up from now on."""

    def removed_from_tier(self, namespace: Namespace, group: int, keys: list[bytes]) -> None:
        """These keys can not be brought up any more; all of them could before."""
