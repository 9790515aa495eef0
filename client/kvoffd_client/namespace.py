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


def is_int(value: object) -> bool:
    """Return whether a value is an int, but not True or False: Python counts them as ints, the daemon does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Return whether a value is a number above 0, which True is not."""
    return (isinstance(value, float) or is_int(value)) and value > 0  # type: ignore[operator]


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

    def check_group(self, group: int) -> None:
        """Raise ValueError if the namespace has no group of this index."""
        if not is_int(group):
            raise ValueError(f"group is an int, not {type(group).__name__}.")
        if not 0 <= group < len(self.groups):
            raise ValueError(f"The namespace has groups 0 to {len(self.groups) - 1}, not {group}.")

    def count_keys(self, group: int, keys: bytes) -> int:
        """Return the number of keys of a group, which are end to end. Raises ValueError if they cannot be its keys."""
        self.check_group(group)
        if not isinstance(keys, bytes):
            raise ValueError(f"The keys of a group are bytes, end to end, not {type(keys).__name__}.")
        count, rest = divmod(len(keys), self.key_bytes)
        if rest:
            raise ValueError(f"{len(keys)} bytes are not a whole number of keys of {self.key_bytes} bytes each.")
        return count

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
