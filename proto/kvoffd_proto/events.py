"""KV cache events in the format of vLLM's own publisher.

Each message on ``events.sock`` has three frames: topic, 8-byte big-endian sequence number, payload.
KV events have topics that begin with ``kv@``; their payload is a msgpack ``EventBatch``, an array whose
events are maps, as in vLLM's ``vllm/distributed/kv_events.py`` (0.32). Sequence numbers count all KV event
messages of the daemon, whatever their namespace.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from kvoffd_proto.wire import doc

KV_TOPIC_PREFIX = b"kv@"
SESSION_TOPIC_PREFIX = b"session@"
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


def kv_topic(fingerprint: bytes) -> bytes:
    """Topic of a namespace's KV events: ``kv@`` and the fingerprint in hex."""
    return KV_TOPIC_PREFIX + fingerprint.hex().encode()


def session_topic(epoch: int, session_id: int) -> bytes:
    """Topic of a session's completions. Ends in a separator, so that no topic is another's prefix."""
    return SESSION_TOPIC_PREFIX + f"{epoch}/{session_id}/".encode()


class BlockStored(Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks of one group are in a tier from now on. Blocks in the pool can be loaded, those on disk be promoted."""

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks, oldest first.")]
    parent_block_hash: Annotated[bytes | None, doc("Always nil: the daemon knows no chains.")]
    token_ids: Annotated[list[int], doc("Always empty: the daemon sees no tokens.")]
    block_size: Annotated[int, doc("Tokens of one block of the group.", ge=0)]
    lora_id: Annotated[int | None, doc("Always nil: the adapter is part of the hash.")]
    medium: Annotated[str | None, doc("The tier: CPU for the pool, STORAGE for disks.")]
    lora_name: Annotated[str | None, doc("Always nil: the adapter is part of the hash.")]
    group_idx: Annotated[int | None, doc("KV cache group of the blocks.")] = None


class BlockRemoved(Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks of one group are not in a tier any more."""

    block_hashes: Annotated[list[bytes], doc("Hashes of the blocks.")]
    medium: Annotated[str | None, doc("The tier: CPU for the pool, STORAGE for disks.")]
    group_idx: Annotated[int | None, doc("KV cache group of the blocks.")] = None


class AllBlocksCleared(Struct, frozen=True, omit_defaults=True, tag=True):
    """No block of the topic's namespace is in any tier any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """The payload of one KV event message."""

    ts: Annotated[float, doc("Unix time in seconds.")]
    events: Annotated[list[KvEvent], doc("Events, in the order in which they happened.")]
    data_parallel_rank: Annotated[int | None, doc("Always nil: the pool serves the whole node.")] = None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode_event_batch(payload: bytes) -> EventBatch:
    """Decode a payload frame. Raises msgspec.MsgspecError."""
    try:
        return _decoder.decode(payload)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through as they are
        raise msgspec.DecodeError(str(error)) from error
