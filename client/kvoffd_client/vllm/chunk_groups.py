"""The offloaded KV cache groups: the keys of their blocks in vLLM and on the wire, and a key's place in its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext

from kvoffd_proto.messages import GroupKeys

NO_LEASE = 0
GROUP_ID_BYTES = 4
"""Length of the group's id at the end of an OffloadKey, after the block hash."""


@dataclass(frozen=True)
class ChunkGroup:
    """One offloaded KV cache group.

    Attributes:
        hashes_per_chunk: block hashes of a request that one key covers; the key contains the last one.
        tokens_per_chunk: tokens that one key covers.
        blocks_per_chunk: the engine's blocks that one key covers.
    """

    group_id: int
    hashes_per_chunk: int
    tokens_per_chunk: int
    blocks_per_chunk: int = 1

    @property
    def tokens_per_block(self) -> int:
        return self.tokens_per_chunk // self.blocks_per_chunk

    @cached_property
    def suffix(self) -> bytes:
        """The group's suffix of vLLM's keys."""
        return self.group_id.to_bytes(GROUP_ID_BYTES, "big")

    def hashes(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the hashes of a request's complete chunks."""
        return block_hashes[self.hashes_per_chunk - 1 :: self.hashes_per_chunk]

    def keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Return vLLM's keys of a request's complete chunks."""
        return [one + self.suffix for one in self.hashes(block_hashes)]


class Place(NamedTuple):
    """Place of a block in its prompt.

    Attributes:
        group: index of its group on the wire.
        chunk: index of the chunk in which it ends; -1 if vLLM did not say where it ends.
        is_tail: whether it ends inside that chunk; see ``ScannedTails``.
    """

    group: int
    chunk: int
    is_tail: bool


class ChunkGroups(tuple[ChunkGroup, ...]):
    """The offloaded groups, by index on the wire, and where vLLM's keys belong in them."""

    @cached_property
    def indices(self) -> Mapping[bytes, int]:
        """Index of each group by the suffix of its keys."""
        return {group.suffix: index for index, group in enumerate(self)}

    def index_of(self, key: OffloadKey) -> int:
        """Return the index of a key's group."""
        return self.indices[key[-GROUP_ID_BYTES:]]

    def place_in_prompt(self, key: OffloadKey, req_context: ReqContext) -> Place:
        """Return the place of a key's block in its request's prompt."""
        index, end = self.index_of(key), req_context.get_offload_key_position(key) or 0
        tokens = self[index].tokens_per_chunk
        return Place(index, (end - 1) // tokens, end % tokens > 0)

    def hashes_of(self, keys: Iterable[OffloadKey]) -> dict[int, list[bytes]]:
        """Return the hashes of keys by index of the group, in their order."""
        hashes: dict[bytes, list[bytes]] = {}
        for key in keys:
            hashes.setdefault(key[-GROUP_ID_BYTES:], []).append(key[:-GROUP_ID_BYTES])
        return {self.indices[suffix]: found for suffix, found in hashes.items()}

    def spec_of(self, keys: Iterable[OffloadKey], adapter: bytes) -> KeyedSpec:
        """Return keys of a request whose adapter has this content by group, in their order."""
        hashes = self.hashes_of(keys)
        return KeyedSpec(tuple(b"".join(wire_keys(hashes.get(index, ()), adapter)) for index in range(len(self))))


@dataclass(eq=False)
class KeyedSpec(LoadStoreSpec):
    """The daemon's side of a transfer: blocks by key.

    Attributes:
        groups: concatenated block hashes for each group on the wire.
        lease_id: the lease a load reads under; NO_LEASE for stores.
        request_id: the request of a load; None for stores.
        load_tokens: tokens of a load; 0 for stores.
        origins: ``GroupBlocks.parents`` and ``tokens`` of a store, by group on the wire.
        before: key before the first of a store in its prompt, by group on the wire, if there is one.
    """

    groups: tuple[bytes, ...] = field(repr=False)
    lease_id: int = NO_LEASE
    request_id: str | None = None
    load_tokens: int = 0
    origins: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    before: Mapping[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def keys(self) -> list[GroupKeys]:
        return [GroupKeys(index, hashes) for index, hashes in enumerate(self.groups) if hashes]


def wire_keys(hashes: Sequence[bytes], adapter: bytes) -> Sequence[bytes]:
    """Return the keys on the wire of a request's block hashes.

    vLLM's hashes include only the name and path of a LoRA adapter, so ``adapter``, the content of the request's, is
    hashed into them. It is empty if the request has none.
    """
    if not adapter:
        return hashes
    return [hashlib.shake_256(one + adapter).digest(len(one)) for one in hashes]
