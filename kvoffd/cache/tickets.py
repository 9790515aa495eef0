"""What the cache hands out: leases, and the tickets of running stores, fills and loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from kvoffd.cache.block_table import BlockIds, Offsets
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import Group
from kvoffd.pool.allocator import SlotIds


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on what the lookups of one request found, and on what comes up for it, until it is released or its time is
    up."""

    lease_id: int
    session: int
    namespace: Namespace
    deadline: float
    blocks: BlockIds
    nbytes: int = 0
    """Of the blocks that nothing had pinned before."""
    loaded_ranks: set[int] = field(default_factory=set)
    loaded: set[tuple[int, bytes]] = field(default_factory=set)
    """Group and first key of each load that was counted: other ranks load the same."""
    loaded_tokens: dict[int, int] = field(default_factory=dict)
    """By group."""
    coming: int = 0
    """Keys of the last lookup that were on their way up, or may be."""
    asking: int = 0
    """Those of them of which a store has not said yet whether it has them."""
    wait_s: float = 0.0
    """The expected time until they are up, as of that lookup; 0 where it is not known."""
    counts: bool = False
    """Whether what it pins counts as loaded or not needed at its end: nobody reports the prompt's outcome."""


@dataclass(slots=True, eq=False)
class Held:
    """What one session has leased. A block counts once for each lease."""

    leases: dict[Lease, None] = field(default_factory=dict)
    keys: int = 0
    nbytes: int = 0
    """See ``Lease``."""


class StorePart(Protocol):
    """What a store offers of one group."""

    @property
    def group(self) -> int: ...

    @property
    def keys(self) -> bytes: ...

    @property
    def first_blocks(self) -> Mapping[int, int]:
        """By the number of a key: the engine block from which on it is written, where that is not the first."""

    @property
    def starts(self) -> Sequence[int] | None:
        """Numbers of the keys at which chains begin, the first at 0; None where the policy has no say."""


@dataclass(slots=True, eq=False)
class Stored:
    """What becomes of the keys of one part. Numbers count the keys that were given; keys in no list are present."""

    group: Group
    blocks: BlockIds
    """The block of each key to copy. Until slots are taken, of those that have one."""
    slots: SlotIds
    """This rank's slot of each; it belongs to the store until its end."""
    copy: list[int] = field(default_factory=list)
    """Keys to copy, ascending."""
    first_blocks: Iterable[int] | None = None
    """Of these keys, the engine block from which on each is written; None where it is the first of all."""
    offsets: Offsets = field(default_factory=lambda: np.empty(0, np.uint64))
    """Where the slots are."""
    again: list[int] = field(default_factory=list)
    """Keys that come under an earlier number too, which is copied, or in one of the next lists."""
    no_space: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StoreTicket:
    """A running store of one rank."""

    rank: int
    parts: list[Stored]


@dataclass(slots=True, eq=False)
class FillTicket:
    """A block that is brought up from a tier, all ranks of it."""

    group: Group
    slots: SlotIds
    """By rank."""
    offsets: list[int]
    """Their pool offsets in bytes."""

    @property
    def blocks(self) -> BlockIds:
        return self.slots[:1]


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A running load of one rank: its blocks stay until its end, whatever becomes of the lease."""

    rank: int
    lease: Lease
    """It may have ended since, and another one have its id."""
    group: Group
    first_key: bytes
    blocks: BlockIds
    slots: SlotIds
    offsets: Offsets
    """Where these are."""
    tokens: int = 0
    """That it brings, of its group. The job that begins the load sets it."""


class Check(NamedTuple):
    """A shard's bytes to compare with their checksum; to take it where that is 0."""

    slot: int
    generation: int
    """That its record had: the slot may have been written anew when the bytes are hashed."""
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of the pool by use; they add up to the pool."""

    free: int
    writing: int
    ready: int
    dropped: int
    quarantined: int
    pinned: int
    """Of the ready and dropped ones, those that a lease or a running copy needs."""
    pinned_blocks: int
