"""Namespaces as a client names them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

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
