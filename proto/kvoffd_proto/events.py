"""KV cache events, as the daemon publishes them to its clients.

Each message on ``events.sock`` has three frames: topic, 8-byte big-endian sequence number, payload. KV events have
topics that begin with ``kv@``; their payload is an ``EventBatch``. The messages of a namespace are numbered from 0.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from kvoffd_proto.messages import doc

KV_TOPIC_PREFIX = b"kv@"
SESSION_TOPIC_PREFIX = b"session@"
SEQUENCE_BYTES = 8
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


def kv_topic(fingerprint: bytes) -> bytes:
    """Return the topic of a namespace's KV events: ``kv@`` and the fingerprint in hex."""
    return KV_TOPIC_PREFIX + fingerprint.hex().encode()


def session_topic(epoch: int, session_id: int) -> bytes:
    """Return the topic of a session's completions. With its final slash no topic is a prefix of another."""
    return SESSION_TOPIC_PREFIX + f"{epoch}/{session_id}/".encode()


class BlockStored(Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks of one group were added to a tier. Blocks in the pool can be loaded, those on disk can be promoted.

    Blocks of one store keep its order: a parent is before its child.
    """

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks.")]
    block_size: Annotated[int, doc("Tokens of one block of the group.", ge=0)]
    medium: Annotated[str, doc("The tier: CPU for the pool, STORAGE for disks.")]
    group_idx: Annotated[int, doc("KV cache group of the blocks.", ge=0)]
    parents: Annotated[list[bytes], doc("Parent of each block, as in ``GroupBlocks.parents``; empty if unknown.")] = []
    token_ids: Annotated[bytes, doc("Token ids, as in ``GroupBlocks.tokens``; empty if ``parents`` is.")] = b""


class BlockRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks of one group were removed from a tier."""

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks.")]
    medium: Annotated[str, doc("The tier: CPU for the pool, STORAGE for disks.")]
    group_idx: Annotated[int, doc("KV cache group of the blocks.", ge=0)]


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """All blocks of the topic's namespace were removed from all tiers."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """The payload of one KV event message."""

    ts: Annotated[float, doc("Unix time in seconds.")]
    events: Annotated[list[KvEvent], doc("Events, oldest first.")]


decode_event_batch = msgspec.msgpack.Decoder(EventBatch).decode
"""Decodes a payload frame. Raises ``codec.CODEC_ERRORS``."""
