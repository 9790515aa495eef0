"""Namespaces: the geometry of their blocks, and counters of each; and their groups."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from struct import pack
from typing import Annotated, TypeAlias

import numpy as np
from msgspec import Meta, Struct, msgpack

from kvoffd.cache.states import NO_BLOCK, READY, WITH_SLOTS, WRITING
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError
from kvoffd.pool.allocator import NO_NODE, PAGE_BYTES
from kvoffd.system.structures import GROUP_BLOCKS, StateCounts
from kvoffd_proto import messages
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import kv_topic
from kvoffd_proto.messages import GroupSpec

UNKNOWN_TOKENS = 512
"""Tokens for which a block counts if its group does not give them."""


class MissReason(IntEnum):
    """Reason that a requested key was not found: ``MISS_REASONS`` of the statistics explains each.

    EVICTED to TIER_FAILED, REJECTED and QUOTA are remembered when a key leaves or fails to come; UNKNOWN and FORGOTTEN
    mean that nothing is. The others belong to one request.
    """

    UNKNOWN = 0
    EVICTED = 1
    NO_SPACE = 2
    PARTIAL = 3
    INVALIDATED = 4
    CORRUPT = 5
    TIER_LATE = 6
    TIER_FAILED = 7
    LEASE_LIMIT = 8
    REJECTED = 9
    LATE = 10
    SKIPPED = 11
    QUOTA = 12
    ENGINE_FULL = 13
    NOT_LOADED = 14
    LOAD_FAILED = 15
    FORGOTTEN = 16
    AFTER_GAP = 17
    COMPUTING = 18
    TIER_DOWN = 19
    UNANSWERED = 20
    EXCLUDED = 21


ABSENT_REASONS = frozenset(
    {
        MissReason.UNKNOWN,
        MissReason.FORGOTTEN,
        MissReason.EVICTED,
        MissReason.REJECTED,
        MissReason.NO_SPACE,
        MissReason.QUOTA,
        MissReason.INVALIDATED,
    }
)
"""Reasons of keys without a block that another one may replace: another prompt may be computing it, or a tier may have
it. Not PARTIAL, whose block is being written, nor what went wrong: CORRUPT, TIER_LATE and TIER_FAILED."""


Shards: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""A rank's shards by group: engine blocks of a key, and the bytes of a page of each layer."""


class NamespaceRecord(Struct, frozen=True, array_like=True):
    """A namespace without its blocks, as the slot table keeps it for the next daemon. Release 0.2 refuses one with more
    fields; later releases ignore them."""

    number: int
    fingerprint: bytes
    label: str
    world_size: Annotated[int, Meta(ge=1, le=messages.MAX_WORLD_SIZE)]
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str
    shard_bytes: tuple[tuple[int, ...] | None, ...]
    """Bytes of a shard by rank and group; None for a rank that no worker has registered."""
    shards: tuple[tuple[tuple[int, tuple[tuple[object, ...], ...]], ...] | None, ...] | None
    """Engine blocks of a key, and layers, by rank and group; None if unknown. The first element of a layer is the bytes
    of its page. Release 0.2 reads this too, and had descriptions of the layers behind them."""
    generation: int
    """Number that is raised whenever all blocks of the namespace become stale."""


class NamespaceSnapshot(Struct, frozen=True, array_like=True):
    """All namespaces, as the slot table keeps them. For further fields the same holds."""

    next_number: int
    namespaces: tuple[NamespaceRecord, ...]


@dataclass(slots=True)
class Counters:
    """Events in a namespace since it was opened. The code that copies bytes counts the bytes."""

    lookups: int = 0
    keys_asked: int = 0
    keys_ready: int = 0
    prefix_keys_ready: int = 0
    found_disk: int = 0
    found_shared: int = 0
    asked_tokens: int = 0
    loaded_keys: int = 0
    covered_keys: int = 0
    """Keys of tokens that engines did not compute: loaded ones, and those that were not needed."""
    loaded_tokens: int = 0
    saved_seconds: float = 0.0
    valued_tokens: int = 0
    """Loaded tokens that ``saved_seconds`` includes; the others wait for their engine to report its speed."""
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    partial_blocks: int = 0
    rejected_keys: int = 0
    skipped_loads: int = 0
    paused_stores: int = 0
    late_lookups: int = 0
    retained_blocks: int = 0
    unretained_blocks: int = 0
    retained_found_keys: int = 0
    released_blocks: int = 0
    prefetched_keys: int = 0
    unknown_hints: int = 0
    prefill_tokens_per_second: float = 0.0
    """Speed of the engine that reported last."""
    misses: Counter[MissReason] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts by source: PROMPT_SOURCES."""
    no_space: Counter[str] = field(default_factory=Counter)
    """Keys that were not stored, by the cause of the missing space: NO_SPACE_CAUSES."""

    def count_loaded(self, tokens: int) -> None:
        """Count tokens that an engine loaded instead of computing them, and the time that it saved."""
        self.loaded_tokens += tokens
        if self.prefill_tokens_per_second:
            self.saved_seconds += (self.loaded_tokens - self.valued_tokens) / self.prefill_tokens_per_second
            self.valued_tokens = self.loaded_tokens


class Namespace:
    """Geometry and counters of one fingerprint. Compared by identity."""

    def __init__(
        self,
        fingerprint: bytes,
        label: str,
        world_size: int,
        key_bytes: int,
        specs: Sequence[GroupSpec],
        description: str,
    ) -> None:
        self.fingerprint = fingerprint
        self.label = label
        self.world_size = world_size
        self.key_bytes = key_bytes
        self.specs = tuple(specs)
        """Specifications of its groups, by index; ``groups`` has those since the last reset."""
        self.description = description
        self.topic = kv_topic(fingerprint)
        """Topic of its KV events."""
        self.of_bench = label.startswith(messages.BENCH_LABEL)
        self.evicts_others = not self.of_bench or label.startswith(messages.EVICTING_LABEL)
        """Whether blocks are evicted for its blocks; those of most benches get only free slots."""
        self.idle_since: float | None = None
        """Time since which it is known to be empty and not open."""
        self.last_open_at = -inf
        """Time when a session was last seen to have it open; of an earlier daemon's it is unknown."""
        self.generation = 0
        """Number that is raised whenever all blocks of the namespace become stale."""
        self.number = 0
        """Number that identifies it in the slot table's records; each reset changes it."""
        self.counters = Counters()
        self.by_state = StateCounts()
        """Counts of its blocks, which C keeps: WRITING, READY, and DROPPED ones still in use."""
        self.retained_bytes = 0
        """Pool bytes of its blocks that hints retain."""
        self.groups: list[Group] = []
        """Groups of its blocks since the last reset, by index; none before it is opened and once it is forgotten."""
        self.nodes: dict[int, int | None] = {}
        """NUMA node of its slots, by rank."""
        self.shard_bytes: list[tuple[int, ...] | None] = [None] * world_size
        """Bytes of a shard by rank and group; None for a rank that no worker has registered yet."""
        self.shards: list[Shards | None] = [None] * world_size
        """Layers of its shards by rank; None for a rank whose worker an earlier daemon did not record."""
        self._encoded_record: tuple[tuple[object, ...], bytes] = (), b""
        """Last result of ``encoded_record``, behind the fields on which it depends."""
        self.key_type = np.dtype((np.void, key_bytes))
        """Data type of arrays of keys."""

    @property
    def ready_blocks(self) -> int:
        return int(self.by_state.blocks[READY])

    @property
    def ready_bytes(self) -> int:
        return int(self.by_state.bytes[READY])

    @property
    def writing_blocks(self) -> int:
        """Blocks that lack a shard."""
        return int(self.by_state.blocks[WRITING])

    @property
    def indexed_blocks(self) -> int:
        """READY and WRITING blocks: those that are found by their keys."""
        return int(self.by_state.blocks[READY] + self.by_state.blocks[WRITING])

    @property
    def held_bytes(self) -> int:
        """Pool bytes of all its blocks."""
        return sum(self.by_state.bytes[state] for state in WITH_SLOTS)

    def is_same(self, world_size: int, key_bytes: int, specs: Sequence[GroupSpec]) -> bool:
        return (world_size, key_bytes, tuple(specs)) == (self.world_size, self.key_bytes, self.specs)

    def check_same(self, world_size: int, key_bytes: int, specs: Sequence[GroupSpec]) -> None:
        """Raise KvoffdError (NAMESPACE_MISMATCH) if the geometry differs."""
        if not self.is_same(world_size, key_bytes, specs):
            raise KvoffdError(
                f"The namespace {self.label!r} is open with world size {self.world_size}, {self.key_bytes}-byte keys "
                f"and {len(self.specs)} groups, but was asked for with world size {world_size}, {key_bytes}-byte keys "
                f"and {len(specs)} groups, or groups of another kind; give different engines different fingerprints, "
                "or clear it with kvoffd-cli clear while nobody has it open.",
                ErrorCode.NAMESPACE_MISMATCH,
            )

    def group(self, index: int) -> Group:
        """Return the current group, valid until the next reset. Raises BadGeometry, also if it is not open."""
        self.check(index)
        if not self.groups:
            raise BadGeometry(f"The namespace {self.label!r} is not open; open it first.")
        return self.groups[index]

    def check(self, index: int, keys: bytes = b"") -> None:
        """Raise BadGeometry for an unknown group, and BadKeys if ``keys`` is not a whole number of keys."""
        if not 0 <= index < len(self.specs):
            last = len(self.specs) - 1
            raise BadGeometry(f"The namespace {self.label!r} has no group {index}; name one from 0 to {last}.")
        if len(keys) % self.key_bytes:
            raise BadKeys(
                f"The keys of group {index} are {len(keys)} bytes long, which is not a multiple of the namespace's "
                f"{self.key_bytes} bytes a key; send whole keys."
            )

    def split(self, index: int, keys: bytes) -> list[bytes]:
        """Split ``keys`` of a group into single keys. Raises like ``check``."""
        self.check(index, keys)
        # Six times faster than slicing.
        split: list[bytes] = np.frombuffer(keys, self.key_type).tolist()
        return split

    def shard_lengths(self, index: int) -> list[int]:
        """Return the bytes of a block's shards by rank; empty until all ranks have registered."""
        lengths = [sizes[index] for sizes in self.shard_bytes if sizes is not None]
        return lengths if len(lengths) == self.world_size else []

    def encoded_record(self) -> bytes:
        """Return what the next daemon must know of it, a NamespaceRecord; the same object as before if nothing has
        changed."""
        fields = self.number, self.generation, tuple(self.shard_bytes), tuple(self.shards)
        if fields == self._encoded_record[0]:
            return self._encoded_record[1]
        shards = [
            None if one is None else tuple((count, tuple((nbytes,) for nbytes in pages)) for count, pages in one)
            for one in self.shards
        ]
        record = NamespaceRecord(
            number=self.number,
            fingerprint=self.fingerprint,
            label=self.label,
            world_size=self.world_size,
            key_bytes=self.key_bytes,
            groups=self.specs,
            description=self.description,
            shard_bytes=tuple(self.shard_bytes),
            shards=tuple(shards),
            generation=self.generation,
        )
        self._encoded_record = fields, msgpack.encode(record)
        return self._encoded_record[1]

    def set_shards(self, rank: int, shards: Shards | None) -> bool:
        """Set the layers of a rank's shards unless they are known. Returns whether it did. They are for operators: no
        copy depends on them."""
        if shards is None or self.shards[rank] is not None:
            return False
        self.shards[rank] = shards
        return True

    def set_shard_bytes(self, rank: int, shard_bytes: Sequence[int]) -> bool:
        """Set the bytes of a rank's shards, by group. Returns False if they were set already.

        Raises BadGeometry if they were set to others, or do not fit the namespace.
        """
        if not 0 <= rank < self.world_size:
            raise BadGeometry(f"There is no rank {rank} in a world of {self.world_size}; register the right rank.")
        if len(shard_bytes) != len(self.specs):
            raise BadGeometry(
                f"The registration has {len(shard_bytes)} groups, the namespace {self.label!r} has {len(self.specs)}; "
                "register every group of the namespace in its order."
            )
        known = self.shard_bytes[rank]
        if known is not None and known != tuple(shard_bytes):
            raise BadGeometry(
                f"Rank {rank} of the namespace {self.label!r} was registered with shards of {list(known)} bytes by "
                f"group, not {list(shard_bytes)}; engines whose shards differ need different fingerprints."
            )
        self.shard_bytes[rank] = tuple(shard_bytes)
        return known is None


class _GroupBlocks(ctypes.Structure):
    """``struct group_blocks`` of blocks.h."""

    __slots__ = ()
    _fields_ = GROUP_BLOCKS


class Group:
    """A group of a namespace between two resets.

    Args:
        number: unique within this daemon, and another one after each reset.
        index: its place in the namespace's groups, here and on the wire.
    """

    def __init__(self, number: int, namespace: Namespace, index: int) -> None:
        self.number, self.namespace, self.index, self.key_bytes = number, namespace, index, namespace.key_bytes
        self.tokens = namespace.specs[index].tokens_per_block
        """Tokens of a block; 0 if its group does not give them."""
        self.retired = False
        """Whether its namespace was reset or forgotten: its blocks are not found any more."""
        self.predecessors: tuple[Group, ...] = ()
        """The same group before the last resets, the latest first."""
        self.unswept_before: list[int] = []
        """Numbers of the groups before it, not only ``predecessors``, that were in ``BlockLife.unswept`` at the reset
        which made it."""
        at_of_namespace = ctypes.addressof(namespace.by_state)
        self._blocks = _GroupBlocks(at_of_namespace=at_of_namespace, oldest=NO_BLOCK, newest=NO_BLOCK)
        self.by_state: StateCounts = self._blocks.by_state
        """Counts of its blocks, which C keeps."""
        self.set_sizes([], [])

    @property
    def weight(self) -> int:
        """Tokens for which a block counts in the policy, and in the curve that judges it."""
        return self.tokens or UNKNOWN_TOKENS

    def set_sizes(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """Set the bytes of a block's shards (``lengths``) and of their slots (``sizes``), by rank.

        Both are empty until all ranks have registered: a group without ``sizes`` has no blocks. Then their length is
        the world size.
        """
        self.lengths, self.sizes, self.block_bytes = lengths, sizes, sum(sizes)
        whose = self.number, self.namespace.number, self.index, self.key_bytes
        nodes = [self.namespace.nodes.get(rank) for rank in range(len(sizes))]
        by_rank = [
            pack("=IiI", size, NO_NODE if node is None else node, length)
            for size, node, length in zip(sizes, nodes, lengths, strict=True)
        ]
        at = ctypes.addressof(self._blocks)
        self.packed = pack("=Q6I", at, *whose, len(sizes), self.block_bytes // PAGE_BYTES) + b"".join(by_rank)
        """``struct block_group`` of blocks.h."""
