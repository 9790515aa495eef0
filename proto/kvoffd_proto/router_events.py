"""KV events for routers: what vLLM's own publisher sends with integer hashes (``vllm/distributed/kv_events.py``, 0.32).

A hash is the last eight bytes of the block hash as a big-endian number, as vLLM makes it by default (its
``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``) and llm-d of bytes. The batch's rank is 0: not all consumers take nil.
"""

from __future__ import annotations

from msgspec import Struct

HASH_BYTES = 8


def router_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-HASH_BYTES:], "big")


class StoredBlocks(Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    """Blocks of one chain, each the parent of the next, can be had at this medium from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Before the first block; nil for the first of a prompt."""
    token_ids: list[int]
    """Of all blocks, end to end."""
    block_size: int
    """Tokens of a block."""
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int = -1
    kv_cache_spec_kind: str = ""
    kv_cache_spec_sliding_window: int | None = None


class RemovedBlocks(Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    """Blocks of one group that cannot be had at this medium any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int = -1


class ClearedBlocks(Struct, frozen=True, tag="AllBlocksCleared"):
    """Nothing of what this source told of is there any more."""


RouterEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class RouterBatch(Struct, frozen=True, array_like=True):
    """The payload of one message."""

    ts: float
    events: list[RouterEvent]
    data_parallel_rank: int = 0
