"""The identity that a group of the cache has in tiers."""

from __future__ import annotations

from kvoffd.cache.namespace import Group
from kvoffd.tiers.header import BlockGroup, make_block_group


def block_group_of(group: Group) -> BlockGroup:
    """Return the tiers' identity of a group now. It has no lengths until all ranks have registered."""
    namespace = group.namespace
    return make_block_group(namespace.fingerprint, namespace.generation, group.index, tuple(group.lengths))
