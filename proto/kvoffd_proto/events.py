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
    """Topic of a namespace's KV events: ``kv@`` and the fingerprint in hex."""
    return KV_TOPIC_PREFIX + fingerprint.hex().encode()


def session_topic(epoch: int, session_id: int) -> bytes:
    """Topic of a session's completions. Ends in a separator, so that no topic is another's prefix."""
    return SESSION_TOPIC_PREFIX + f"{epoch}/{session_id}/".encode()


class BlockStored(Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks of one group are in a tier from now on. Blocks in the pool can be loaded, those on disk be promoted.

    The blocks of one store are in its order: in a chain the parent is before its child.
    """

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks.")]
    block_size: Annotated[int, doc("Tokens of one block of the group.", ge=0)]
    medium: Annotated[str, doc("The tier: CPU for the pool, STORAGE for disks.")]
    group_idx: Annotated[int, doc("KV cache group of the blocks.", ge=0)]
    parents: Annotated[list[bytes], doc("As ``GroupBlocks.parents``, by block; empty where there are none.")] = []
    token_ids: Annotated[bytes, doc("As ``GroupBlocks.tokens``; empty where ``parents`` is.")] = b""


class BlockRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks of one group are not in a tier any more."""

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks.")]
    medium: Annotated[str, doc("The tier: CPU for the pool, STORAGE for disks.")]
    group_idx: Annotated[int, doc("KV cache group of the blocks.", ge=0)]


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """No block of the topic's namespace is in any tier any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """The payload of one KV event message."""

    ts: Annotated[float, doc("Unix time in seconds.")]
    events: Annotated[list[KvEvent], doc("Events, in the order in which they happened.")]


decode_event_batch = msgspec.msgpack.Decoder(EventBatch).decode
"""Decodes a payload frame. Raises ``codec.CODEC_ERRORS``."""
