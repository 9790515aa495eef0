"""A namespace: engines whose bytes are interchangeable, with its own index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.key_states import KeyStates
from kvoffd.errors import BadGeometry, BadKeys, NamespaceMismatch
from kvoffd.pool.records import NamespaceRecord
from kvoffd_proto.blocks import ShardSpec
from kvoffd_proto.messages import GroupSpec

_INDEXED = (BlockState.WRITING, BlockState.READY)


@dataclass(slots=True)
class Counters:
    """What happened in a namespace since it was opened. The bytes are counted by who copies them."""

    lookups: int = 0
    keys_asked: int = 0
    keys_ready: int = 0
    prefix_keys_ready: int = 0
    keys_pending: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    dropped_keys: int = 0


class Namespace:
    """Geometry, index and books of one fingerprint. Compared by identity; it is never closed."""

    def __init__(
        self,
        fingerprint: bytes,
        label: str,
        world_size: int,
        key_bytes: int,
        groups: Sequence[GroupSpec],
        description: str,
    ) -> None:
        self.fingerprint = fingerprint
        self.label = label
        self.world_size = world_size
        self.key_bytes = key_bytes
        self.groups = tuple(groups)
        self.description = description
        self.counters = Counters()
        self.index: tuple[dict[bytes, Block], ...] = tuple({} for _ in self.groups)
        """By group: the blocks that are being written or ready."""
        self.blocks_in = [0] * (max(BlockState) + 1)
        """By state, the number of blocks. ABSENT, where blocks come from and go to, is minus all others."""
        self.bytes_in = [0] * (max(BlockState) + 1)
        """By state, the pool bytes of its blocks."""
        self._shard_bytes: list[tuple[int, ...] | None] = [None] * world_size
        self._slot_bytes: list[tuple[int, ...] | None] = [None] * world_size
        self._shards: list[tuple[ShardSpec, ...] | None] = [None] * world_size
        self.nodes: dict[int, int | None] = {}
        """By rank, the NUMA node that its last store wanted its slots on: what comes up from a tier goes there too."""
        self._states = tuple(KeyStates(key_bytes) for _ in self.groups)
        """By group: the states of the blocks in the index, which only ``move`` and ``move_all`` change."""
        self._key_type = np.dtype((np.void, key_bytes))

    @property
    def ready_blocks(self) -> int:
        """Blocks that can be read."""
        return self.blocks_in[BlockState.READY]

    @property
    def ready_bytes(self) -> int:
        """Pool bytes of those blocks."""
        return self.bytes_in[BlockState.READY]

    @property
    def writing_blocks(self) -> int:
        """Blocks that lack a shard."""
        return self.blocks_in[BlockState.WRITING]

    def check_same(self, world_size: int, key_bytes: int, groups: Sequence[GroupSpec]) -> None:
        """Raise NamespaceMismatch unless the geometry is this namespace's."""
        if (world_size, key_bytes, tuple(groups)) != (self.world_size, self.key_bytes, self.groups):
            raise NamespaceMismatch(
                f"The namespace {self.label!r} is open with world size {self.world_size}, {self.key_bytes}-byte keys "
                f"and {len(self.groups)} groups, but was asked for with world size {world_size}, {key_bytes}-byte keys "
                f"and {len(groups)} groups, or groups of another kind; give engines that differ different fingerprints."
            )

    def check_group(self, group: int) -> None:
        """Raise BadGeometry unless there is such a group."""
        if not 0 <= group < len(self.groups):
            raise BadGeometry(f"There is no group {group}: the namespace {self.label!r} has {len(self.groups)} groups.")

    def check_keys(self, group: int, keys: bytes) -> None:
        """Raise BadGeometry for a group that is not there, BadKeys where ``keys`` is not a whole number of keys."""
        self.check_group(group)
        if len(keys) % self.key_bytes:
            raise BadKeys(
                f"The keys of group {group} are {len(keys)} bytes long, which is not a multiple of the namespace's "
                f"{self.key_bytes} bytes a key; send whole keys."
            )

    def states_of(self, group: int, keys: bytes) -> bytes:
        """ABSENT, WRITING or READY, one byte a key. Raises BadGeometry, BadKeys."""
        self.check_keys(group, keys)
        return self._states[group].of(keys)

    def indexed(self, group: int) -> int:
        """Keys that ``states_of`` does not call absent."""
        return len(self._states[group])

    def split(self, group: int, keys: bytes, *, distinct: bool = False) -> list[bytes]:
        """Cut ``keys`` of ``group`` into single keys.

        Raises BadGeometry for a group that is not there; BadKeys where ``keys`` is not a whole number of keys or,
        if they must be ``distinct``, holds one twice.
        """
        self.check_keys(group, keys)
        # Six times as fast as slicing.
        split: list[bytes] = np.frombuffer(keys, self._key_type).tolist()
        if distinct and len(set(split)) != len(split):
            raise BadKeys(f"A key of group {group} is there twice in one store; send each key once.")
        return split

    def shard_bytes(self, rank: int) -> tuple[int, ...] | None:
        """By group, bytes of that rank's shard of a block; None where no worker of the rank registered yet."""
        return self._shard_bytes[rank]

    def shards(self, rank: int) -> tuple[ShardSpec, ...] | None:
        """By group, what that rank's shard of a block is made of; None where nobody told."""
        return self._shards[rank]

    def describe_shards(self, rank: int, shards: Sequence[ShardSpec]) -> bool:
        """Note what a rank's shards are made of, by group, unless more is known already; True where it was noted.

        Nothing is decided by it: engines that agree on a shard's bytes may differ in what they call its layers.
        """
        known = self._shards[rank]
        if known is not None and (_told(known) or not _told(shards)):
            return False
        self._shards[rank] = tuple(shards)
        return True

    def facts(self) -> NamespaceRecord:
        """What a successor must know to go on with the blocks."""
        return NamespaceRecord(
            self.fingerprint,
            self.label,
            self.world_size,
            self.key_bytes,
            self.groups,
            self.description,
            tuple(self._shard_bytes),
            tuple(self._shards),
        )

    def fix_shard_bytes(self, rank: int, shard_bytes: Sequence[int], slot_bytes: Sequence[int]) -> None:
        """Set the sizes of a rank's shards and slots, by group. Raises BadGeometry if they are others already."""
        self.check_shard_bytes(rank, shard_bytes)
        self._shard_bytes[rank] = tuple(shard_bytes)
        self._slot_bytes[rank] = tuple(slot_bytes)

    def check_shard_bytes(self, rank: int, shard_bytes: Sequence[int]) -> None:
        """Raise BadGeometry unless a worker of this rank may register with these sizes."""
        if not 0 <= rank < self.world_size:
            raise BadGeometry(f"There is no rank {rank} in a world of {self.world_size}; register the right rank.")
        if len(shard_bytes) != len(self.groups):
            raise BadGeometry(
                f"The registration has {len(shard_bytes)} groups, the namespace {self.label!r} has {len(self.groups)}; "
                "register every group of the namespace in its order."
            )
        known = self._shard_bytes[rank]
        if known is not None and known != tuple(shard_bytes):
            raise BadGeometry(
                f"Rank {rank} of the namespace {self.label!r} was registered with shards of {list(known)} bytes by "
                f"group, not {list(shard_bytes)}; engines whose shards differ need different fingerprints."
            )

    def slot_bytes(self, rank: int, group: int) -> int:
        """Bytes of the slot of one shard. Raises BadGeometry while no worker of the rank has registered."""
        sizes = self._slot_bytes[rank] if 0 <= rank < self.world_size else None
        if sizes is None:
            raise BadGeometry(
                f"No worker of rank {rank} has registered in the namespace {self.label!r}; register it first."
            )
        self.check_group(group)
        return sizes[group]

    def move(self, block: Block, state: BlockState) -> None:
        """Take a block of this namespace to another state, in the books too. In the index it must be by now."""
        self.move_all([block], block.state, state)

    def move_all(self, blocks: Sequence[Block], before: BlockState, state: BlockState) -> None:
        """As ``move``, for blocks of one group that are all in the state ``before``."""
        if not blocks:
            return
        nbytes = 0
        for block in blocks:
            nbytes += block.slot_bytes
            block.state = state
        self.blocks_in[before] -= len(blocks)
        self.bytes_in[before] -= nbytes
        self.blocks_in[state] += len(blocks)
        self.bytes_in[state] += nbytes
        if before in _INDEXED or state in _INDEXED:
            keys = b"".join([block.key for block in blocks])
            self._states[blocks[0].group].set(keys, state if state in _INDEXED else BlockState.ABSENT)


def _told(shards: Sequence[ShardSpec]) -> bool:
    """Whether any layer has more than a size."""
    return any(page.layer is not None for shard in shards for page in shard.pages)
