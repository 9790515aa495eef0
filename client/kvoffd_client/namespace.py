"""Namespaces as a client names them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffd_proto.messages import FINGERPRINT_BYTES, GroupSpec

DEFAULT_GROUPS = (GroupSpec(kind="full_attention", tokens_per_block=0),)


@dataclass(frozen=True)
class NamespaceSpec:
    """Everything the daemon must agree on before blocks are shared.

    Attributes:
        fingerprint: 32 bytes; equal only for engines whose KV bytes are interchangeable.
        label: name for operators, at most 256 characters.
        world_size: shards that make a block.
        key_bytes: length of a block hash in bytes, 8 to 64.
        groups: KV cache groups, by index.
        description: what the fingerprint was made of, as JSON, for display.

    Raises:
        ValueError: a field is out of range.
    """

    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str = "{}"

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"A fingerprint has {FINGERPRINT_BYTES} bytes; this one has {len(self.fingerprint)}.")
        if len(self.label) > 256:
            raise ValueError("A namespace's label has at most 256 characters; choose a shorter one.")
        if not 1 <= self.world_size <= 4096:
            raise ValueError(f"world_size must be 1 to 4096; it is {self.world_size}.")
        if not 8 <= self.key_bytes <= 64:
            raise ValueError(f"key_bytes must be 8 to 64; it is {self.key_bytes}.")
        if not 1 <= len(self.groups) <= 1024:
            raise ValueError(f"A namespace has 1 to 1024 groups; this one has {len(self.groups)}.")

    @classmethod
    def named(
        cls,
        name: str,
        world_size: int = 1,
        key_bytes: int = 32,
        groups: Sequence[GroupSpec] = DEFAULT_GROUPS,
        **fields: str | int,
    ) -> NamespaceSpec:
        """Return the namespace of a name and its geometry: the fingerprint is the SHA-256 of their canonical JSON.

        ``fields`` are further facts that must be equal for sharing (a model, a dtype, a salt).
        """
        facts = {
            "name": name,
            "world_size": world_size,
            "key_bytes": key_bytes,
            "groups": [[spec.kind, spec.tokens_per_block, spec.window_tokens] for spec in groups],
            "fields": fields,
        }
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        fingerprint = hashlib.sha256(canonical.encode()).digest()
        return cls(fingerprint, name, world_size, key_bytes, tuple(groups), canonical)
