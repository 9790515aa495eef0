"""Tickets: what a running store or load holds of the cache, from its begin to its one end."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffd.cache.block import Block, Shard
from kvoffd.cache.namespace import Namespace


@dataclass(slots=True, eq=False)
class StoreTicket:
    """One group of a store. Indices count the keys of the request; those in neither list are present already."""

    namespace: Namespace
    rank: int
    group: int
    copy: list[int] = field(default_factory=list)
    """Indices of the keys to copy, ascending."""
    offsets: list[int] = field(default_factory=list)
    """Pool offset in bytes of the slot for each key to copy."""
    dropped: list[int] = field(default_factory=list)
    """Indices of the keys that found no room, ascending."""
    blocks: list[Block] = field(default_factory=list)
    """The block for each key to copy; this rank's shard of it belongs to the ticket until its end."""
    present: list[Block] = field(default_factory=list)
    """Blocks of the job that were there before, not to be evicted for its other keys."""
    checksums: list[int] = field(default_factory=list)
    """Of the shard for each key to copy, to be there when the ticket is committed; empty where none are taken."""


@dataclass(slots=True, eq=False)
class LoadTicket:
    """One group of a load. Its blocks stay until its end, whatever becomes of the lease."""

    namespace: Namespace
    rank: int
    lease_id: int
    blocks: list[Block]
    offsets: list[int]
    """Pool offset in bytes of the slot of each key."""
    shards: list[Shard]
    """The shard of each key."""
