"""Namespaces as a client names them, and the geometry of their blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffd_client.errors import BlockUnavailable
from kvoffd_client.namespace_differences import how_they_differ
from kvoffd_proto.admin import NamespaceDescribed, ShardSpec, shard_bytes_of
from kvoffd_proto.messages import GroupSpec

DEFAULT_GROUPS = (GroupSpec(kind="full_attention", tokens_per_block=0),)
LABEL_IN_NAME = 80
"""Characters of a namespace's label in the name of an engine's session."""


def canonical_json(value: object) -> str:
    """Return JSON with sorted keys and no spaces, equal for equal values in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint_of(canonical: str) -> bytes:
    return hashlib.sha256(canonical.encode()).digest()


@dataclass(frozen=True)
class NamespaceSpec:
    """Properties that engines must have in common to share blocks.

    Attributes:
        fingerprint: 32 bytes; equal only if the engines' KV bytes are interchangeable.
        label: name for operators, at most 256 characters.
        world_size: shards of a block.
        key_bytes: length of a block hash in bytes, 8 to 64.
        groups: KV cache groups, by index.
        description: input of the fingerprint as JSON, for display.
    """

    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str = "{}"

    @classmethod
    def named(
        cls,
        name: str,
        world_size: int = 1,
        key_bytes: int = 32,
        groups: Sequence[GroupSpec] = DEFAULT_GROUPS,
        **fields: str | int,
    ) -> NamespaceSpec:
        """Return a namespace whose fingerprint is the SHA-256 of its name and geometry as canonical JSON.

        ``fields`` are further properties that must be equal for sharing (a model, a dtype, a salt).
        """
        described = {
            "name": name,
            "world_size": world_size,
            "key_bytes": key_bytes,
            "groups": [[spec.kind, spec.tokens_per_block, spec.window_tokens] for spec in groups],
            "fields": fields,
        }
        canonical = canonical_json(described)
        return cls(fingerprint_of(canonical), name, world_size, key_bytes, tuple(groups), canonical)


@dataclass(frozen=True)
class Geometry(NamespaceSpec):
    """A namespace with the layout of its blocks: enough to open it without an engine and to read its blocks.

    Attributes:
        shards: by rank and group, the layers' pages of a shard.
    """

    shards: tuple[tuple[ShardSpec, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.shards) != self.world_size or {len(of_rank) for of_rank in self.shards} != {len(self.groups)}:
            raise ValueError("The geometry of the namespace is inconsistent.")

    @classmethod
    def of_reply(cls, fingerprint: bytes, reply: NamespaceDescribed) -> Geometry:
        """Return the geometry that the daemon describes. Raises BlockUnavailable if a rank's shards are unknown."""
        unknown = [rank for rank, shards in enumerate(reply.shards) if shards is None]
        if unknown:
            raise BlockUnavailable(
                f"The daemon does not know the layout of rank {unknown[0]}'s shards in the namespace {reply.label!r}; "
                "start its engine once."
            )
        shards = tuple(tuple(of_rank or ()) for of_rank in reply.shards)
        groups = tuple(reply.groups)
        return cls(fingerprint, reply.label, reply.world_size, reply.key_bytes, groups, reply.description, shards)

    def shard_bytes(self, rank: int, group: int) -> int:
        return shard_bytes_of(self.shards[rank][group])

    def block_bytes(self, group: int) -> int:
        return sum(self.shard_bytes(rank, group) for rank in range(self.world_size))

    def mismatch(self, other: Geometry) -> str:
        """Return why blocks of ``other`` do not fit, as half a sentence; empty if they do."""
        if self.fingerprint != other.fingerprint:
            return f"the fingerprints differ: {how_they_differ(self.description, other.description)}"
        for rank, (own, others) in enumerate(zip(self.shards, other.shards, strict=False)):
            sizes = [
                [(shard.blocks_per_key, [page.page_bytes for page in shard.pages]) for shard in shards]
                for shards in (own, others)
            ]
            if sizes[0] != sizes[1]:
                return f"the shards of rank {rank} have other sizes"
        same = (self.world_size, self.key_bytes, self.groups) == (other.world_size, other.key_bytes, other.groups)
        return "" if same else "the number of ranks, the keys or the groups differ"
