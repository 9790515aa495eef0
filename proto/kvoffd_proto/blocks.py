"""Requests about single blocks: what they are made of, and which there are.

The bytes are copied as an engine's are: a client opens the namespace, registers memory, looks up and loads, or stores.
"""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.handles import LayerSpec
from kvoffd_proto.wire import (
    ADMIN,
    MAX_GROUPS,
    MAX_PAGES,
    ByteCount,
    Count,
    Fingerprint,
    GroupIndex,
    GroupSpec,
    KeyState,
    Reply,
    Request,
    Section,
    Wire,
    doc,
    exchange,
)

CHECKSUM_BYTES = 8


class PageSpec(Wire, frozen=True):
    """One layer's part of a shard: ``blocks_per_key`` pages, end to end."""

    page_bytes: Annotated[int, doc("Bytes of an engine block that belong to the layer.", ge=1, lt=2**31)]
    layer: Annotated[LayerSpec | None, doc("What these bytes are; nil where the engine did not say.")] = None


class ShardSpec(Wire, frozen=True):
    """One rank's shard of a group's block: its layers' pages, layer after layer."""

    blocks_per_key: Annotated[int, doc("Engine blocks that one key covers.", ge=1, lt=65536)]
    pages: Annotated[list[PageSpec], doc("Layers, in the order of the slot.", max_length=MAX_PAGES)]


def shard_bytes_of(shard: ShardSpec) -> int:
    """Bytes of such a shard."""
    return shard.blocks_per_key * sum(page.page_bytes for page in shard.pages)


RankSpec = Annotated[list[ShardSpec], doc(max_length=MAX_GROUPS)]


class NamespaceDescribed(Reply, frozen=True):
    label: Annotated[str, doc("Name of the namespace for operators.")]
    world_size: Annotated[int, doc("Shards that make a block.", ge=1)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=1)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups.")]
    description: Annotated[str, doc("What the fingerprint was made of, as JSON.")]
    shards: Annotated[
        list[RankSpec | None], doc("Shards by rank and group; nil for a rank without a registered worker.")
    ]


@exchange(Section.BLOCKS, ADMIN)
class DescribeNamespace(Request[NamespaceDescribed], frozen=True):
    """Asks what the blocks of a namespace are made of."""

    namespace: Fingerprint


class BlockInfo(Wire, frozen=True):
    """One block."""

    key: Annotated[bytes, doc("Hash of the block.")]
    state: Annotated[KeyState, doc("As a lookup tells it: 1 while a shard is missing, 2 ready.")]
    slot_bytes: Annotated[ByteCount, doc("Pool bytes of the block's slots.")]
    pins: Annotated[Count, doc("Leases and loads that hold the block.")]
    first_block: Annotated[Count, doc("Engine blocks at the start of each layer that hold nothing that was stored.")]
    checksums: Annotated[
        bytes,
        doc(
            "XXH3 of each rank's shard: 64 bits, seed 0, big-endian, 0 replaced by 1; all zeros for none. Where "
            "``first_block`` is not 0 the bytes before it are in the sum too, whatever they are."
        ),
    ]


class BlocksListed(Reply, frozen=True):
    blocks: Annotated[list[BlockInfo], doc("Blocks of the page.")]
    next_position: Annotated[Count, doc("Where the next page begins; 0 when there is none.")]


@exchange(Section.BLOCKS, ADMIN)
class ListBlocks(Request[BlocksListed], frozen=True):
    """Lists the blocks of one group, a page at a time, in no order.

    A block that is in the pool from the first page to the last is on exactly one of them. A page may be short or empty
    though others follow.
    """

    namespace: Fingerprint
    group: GroupIndex
    position: Annotated[Count, doc("0 for the first page, else ``next_position`` of the page before.")] = 0
    limit: Annotated[int, doc("Most blocks on the page.", ge=1, le=4096)] = 1024
    prefix: Annotated[str, doc("List only keys that begin with these hex digits.", max_length=128)] = ""
