"""Names of blocks and generations in Redis and S3."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.store import StoreError, StoreFault


def generation_name(fingerprint: bytes) -> bytes:
    """Return the name of a namespace's generation, a decimal number; if it is missing, the generation is 0."""
    return b"kvoffd/2/%s/generation" % fingerprint.hex().encode()


def decode_generation(value: bytes, where: str) -> int:
    """Decode the generation that is stored at ``where``; 0 for an empty value. Raises StoreError."""
    if not re.fullmatch(rb"[0-9]{0,18}", value):  # it affects one namespace, others are served
        raise StoreError(
            StoreFault.GENERATION, f"{where} is not a number of up to 18 digits that a node wrote; remove it there."
        )
    return int(value or 0)


def block_names(group: BlockGroup, keys: Iterable[bytes]) -> list[bytes]:
    """Return the names of a group's blocks. The generation is part of them: to raise it voids all of a namespace."""
    prefix = b"kvoffd/2/%s/%d/%d/" % (group.fingerprint.hex().encode(), group.generation, group.group_index)
    return [prefix + key.hex().encode() for key in keys]


def block_name(group: BlockGroup, key: bytes) -> bytes:
    return block_names(group, [key])[0]
