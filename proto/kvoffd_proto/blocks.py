"""Requests about single blocks: what they are made of, listing, reading and writing them.

For administrators, and only as far as the daemon's setting ``block_access`` goes. The bytes themselves never travel in
these messages: they are read in a read-only mapping of the pool (see ``OpenPool`` in ``lifeline``), and written from
memory that the client has attached.
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
    Keys,
    KeyState,
    LeaseId,
    NamespaceRequest,
    Reply,
    Request,
    Section,
    Wire,
    doc,
    exchange,
)

CHECKSUM_BYTES = 8

Checksum = Annotated[
    bytes,
    doc(
        "XXH3 of the shard's bytes: 64 bits, seed 0, big-endian, 0 replaced by 1; all zeros for none.",
        min_length=CHECKSUM_BYTES,
        max_length=CHECKSUM_BYTES,
    ),
]

PUT_NO_ROOM = 0
PUT_STORED = 1
PUT_PRESENT = 2


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


@exchange(Section.BLOCKS, ADMIN)
class RestoreNamespace(NamespaceRequest, frozen=True):
    """Opens a namespace and fixes its shards without an engine, as before an import.

    A namespace that is open already must have the same geometry; ranks without a registered worker get these shards.
    """

    shards: Annotated[list[RankSpec], doc("Shards by rank and group.", min_length=1, max_length=4096)]


class BlockInfo(Wire, frozen=True):
    """One block."""

    key: Annotated[bytes, doc("Hash of the block.")]
    state: Annotated[KeyState, doc("As a lookup tells it: 1 while a shard is missing, 2 ready.")]
    slot_bytes: Annotated[ByteCount, doc("Pool bytes of the block's slots.")]
    pins: Annotated[Count, doc("Leases and loads that hold the block.")]


class BlocksListed(Reply, frozen=True):
    blocks: Annotated[list[BlockInfo], doc("Blocks of the page that are still in the pool.")]
    next_position: Annotated[Count, doc("Where the next page begins; 0 when there is none.")]
    total: Annotated[Count, doc("Keys in the snapshot of the first page.")]


@exchange(Section.BLOCKS, ADMIN)
class ListBlocks(Request[BlocksListed], frozen=True):
    """Lists the blocks of one group, a page at a time, in the order in which they were stored.

    The first page (``position`` 0) takes a snapshot of the keys; the following pages go through it.
    """

    namespace: Fingerprint
    group: GroupIndex
    position: Annotated[Count, doc("0 for the first page, else ``next_position`` of the page before.")] = 0
    limit: Annotated[int, doc("Most blocks on the page.", ge=1, le=4096)] = 1024
    prefix: Annotated[str, doc("List only keys that begin with these hex digits.", max_length=128)] = ""


class HeldShard(Wire, frozen=True):
    """Where one rank's shard of a block lies."""

    offset_bytes: Annotated[ByteCount, doc("Offset of the shard in the pool, in bytes.")]
    length: Annotated[ByteCount, doc("Bytes of the shard.")]
    checksum: Checksum
    first_block: Annotated[Count, doc("Engine blocks at the start of each layer that hold nothing that was stored.")]


class BlocksGot(Reply, frozen=True):
    blocks: Annotated[
        list[list[HeldShard] | None], doc("Per key, the block's shards by rank; nil where the block is not ready.")
    ]
    ttl_ms: Annotated[int, doc("Lifetime of the lease without renewal, in milliseconds; 0 without blocks.", ge=0)]


@exchange(Section.BLOCKS, ADMIN)
class GetBlocks(Request[BlocksGot], frozen=True):
    """Pins ready blocks under a lease of the session and returns where they are in the pool.

    A repeated request with the same lease returns the blocks under it. Heartbeats renew the lease, Release ends it.
    """

    namespace: Fingerprint
    lease_id: LeaseId
    group: GroupIndex
    keys: Keys


class PutShard(Wire, frozen=True):
    """Where one rank's shard of a block lies in the attached segment."""

    offset_bytes: Annotated[ByteCount, doc("Offset of the shard in the segment, in bytes.")]
    checksum: Checksum


class BlocksPut(Reply, frozen=True):
    states: Annotated[bytes, doc("One byte per key: 0 no room, 1 stored, 2 present or being written already.")]


@exchange(Section.BLOCKS, ADMIN)
class PutBlocks(Request[BlocksPut], frozen=True):
    """Copies whole blocks from an attached segment into the pool; the reply comes when they can be read.

    Where a shard's bytes do not match its checksum the whole request is refused. The segment stays attached, and
    mapped, until the session ends; its bytes must not change before the reply.
    """

    namespace: Fingerprint
    segment_id: Annotated[Count, doc("Id under which the memfd was attached.")]
    segment_bytes: Annotated[int, doc("Bytes of the segment to map.", ge=1, le=2**63 - 1)]
    group: GroupIndex
    keys: Keys
    shards: Annotated[
        list[Annotated[list[PutShard], doc(max_length=4096)]],
        doc("Per key, the block's shards by rank, each as long as in ``NamespaceDescribed``.", max_length=65536),
    ]
    first_block: Annotated[int, doc("Engine blocks at the start of key 0 that hold nothing.", ge=0, lt=65536)] = 0
