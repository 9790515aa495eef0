"""Requests about single blocks: what they are made of, listing, reading, writing and pinning them.

For administrators, and only as far as the daemon's setting ``block_access`` goes. The bytes themselves never travel in
these messages: they are read in a read-only mapping of the pool (see ``OpenPool`` in ``lifeline``), and written from
memory that the client has attached.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvoffd_proto.handles import LayerSpec
from kvoffd_proto.wire import (
    ADMIN,
    ByteCount,
    Count,
    Done,
    Fingerprint,
    GroupIndex,
    GroupSpec,
    LeaseId,
    NamespaceOpened,
    Reply,
    Request,
    Section,
    Wire,
    exchange,
)

CHECKSUM_BYTES = 8

Keys = Annotated[bytes, Meta(description="Block hashes, end to end, each of the namespace's ``key_bytes``.")]
Checksum = Annotated[
    bytes,
    Meta(
        min_length=CHECKSUM_BYTES,
        max_length=CHECKSUM_BYTES,
        description="XXH3 of the shard's bytes: 64 bits, seed 0, big-endian, 0 replaced by 1; all zeros for none.",
    ),
]

PUT_NO_ROOM = 0
PUT_STORED = 1
PUT_PRESENT = 2


# --- what a namespace's blocks are made of --------------------------------------------------------


class PageSpec(Wire, frozen=True):
    """One layer's part of a shard: ``blocks_per_key`` pages, end to end."""

    page_bytes: Annotated[int, Meta(ge=1, lt=2**31, description="Bytes of an engine block that belong to the layer.")]
    layer: Annotated[LayerSpec | None, Meta(description="What they are; nil where the engine did not tell.")] = None


class ShardSpec(Wire, frozen=True):
    """One rank's shard of a group's block: its layers' pages, layer after layer."""

    blocks_per_key: Annotated[int, Meta(ge=1, lt=65536, description="Engine blocks that one key covers.")]
    pages: Annotated[list[PageSpec], Meta(max_length=65536, description="Layers, in the order of the slot.")]


def shard_bytes_of(shard: ShardSpec) -> int:
    """Bytes of such a shard."""
    return shard.blocks_per_key * sum(page.page_bytes for page in shard.pages)


RankSpec = Annotated[list[ShardSpec], Meta(max_length=1024)]


class NamespaceDescribed(Reply, frozen=True):
    """Answer to DescribeNamespace."""

    label: Annotated[str, Meta(description="Name for operators.")]
    world_size: Annotated[int, Meta(ge=1, description="Shards that make a block.")]
    key_bytes: Annotated[int, Meta(ge=1, description="Length of a block hash in bytes.")]
    groups: Annotated[list[GroupSpec], Meta(description="KV cache groups.")]
    description: Annotated[str, Meta(description="What the fingerprint was made of, as JSON.")]
    shards: Annotated[
        list[RankSpec | None], Meta(description="By rank and group; nil for a rank of which no worker registered.")
    ]


@exchange(Section.BLOCKS, ADMIN)
class DescribeNamespace(Request[NamespaceDescribed], frozen=True):
    """Asks what the blocks of a namespace are made of."""

    namespace: Fingerprint


@exchange(Section.BLOCKS, ADMIN)
class RestoreNamespace(Request[NamespaceOpened], frozen=True):
    """Opens a namespace and fixes its shards without an engine, as before an import.

    Where it is open it must have the same geometry; ranks that no worker registered for get theirs.
    """

    namespace: Fingerprint
    label: Annotated[str, Meta(max_length=256, description="Name for operators, such as the model's.")]
    world_size: Annotated[int, Meta(ge=1, le=4096, description="Shards that make a block.")]
    key_bytes: Annotated[int, Meta(ge=8, le=64, description="Length of a block hash in bytes.")]
    groups: Annotated[list[GroupSpec], Meta(min_length=1, max_length=1024, description="KV cache groups, by index.")]
    description: Annotated[
        str, Meta(max_length=65536, description="What the fingerprint was made of, as JSON, for display.")
    ]
    shards: Annotated[list[RankSpec], Meta(min_length=1, max_length=4096, description="By rank and group.")]


# --- reading --------------------------------------------------------------------------------------


class BlockInfo(Wire, frozen=True):
    """One block."""

    key: Annotated[bytes, Meta(description="Its hash.")]
    state: Annotated[int, Meta(ge=0, le=2, description="1 while a shard is lacking, 2 ready.")]
    slot_bytes: Annotated[ByteCount, Meta(description="Pool bytes of its slots.")]
    pins: Annotated[Count, Meta(description="Leases, loads and operators that hold it.")]
    pinned: Annotated[bool, Meta(description="An operator has pinned it.")]


class BlocksListed(Reply, frozen=True):
    """Answer to ListBlocks."""

    blocks: Annotated[list[BlockInfo], Meta(description="Blocks that are still there.")]
    next_position: Annotated[Count, Meta(description="Where the next page begins; 0 when there is none.")]
    total: Annotated[Count, Meta(description="Keys noted for the first page.")]


@exchange(Section.BLOCKS, ADMIN)
class ListBlocks(Request[BlocksListed], frozen=True):
    """Asks for the blocks of one group, a page at a time, in the order in which they came.

    The first page (``position`` 0) notes the keys that are there; the following ones go through that note.
    """

    namespace: Fingerprint
    group: GroupIndex
    position: Annotated[Count, Meta(description="0, or ``next_position`` of the page before.")] = 0
    limit: Annotated[int, Meta(ge=1, le=4096, description="Blocks of the page.")] = 1024
    prefix: Annotated[str, Meta(max_length=128, description="First hex digits of the keys wanted.")] = ""
    pinned: Annotated[bool, Meta(description="Only those that an operator has pinned.")] = False


class HeldShard(Wire, frozen=True):
    """Where one rank's shard of a block lies."""

    offset_bytes: Annotated[ByteCount, Meta(description="In the pool.")]
    length: Annotated[ByteCount, Meta(description="Bytes of the shard.")]
    checksum: Checksum
    first_block: Annotated[
        Count, Meta(description="Engine blocks at the start of each layer that hold nothing that was stored.")
    ]


class BlocksGot(Reply, frozen=True):
    """Answer to GetBlocks."""

    blocks: Annotated[
        list[list[HeldShard] | None], Meta(description="Per key its shards, by rank; nil where it is not ready.")
    ]
    ttl_ms: Annotated[
        int, Meta(ge=0, description="Life of the lease without renewal, in milliseconds; 0 without blocks.")
    ]


@exchange(Section.BLOCKS, ADMIN)
class GetBlocks(Request[BlocksGot], frozen=True):
    """Pins ready blocks under a lease of the session and tells where in the pool they lie.

    Asking again with the same lease tells of the blocks under it. Heartbeats renew it, Release ends it.
    """

    namespace: Fingerprint
    lease_id: LeaseId
    group: GroupIndex
    keys: Keys


# --- writing --------------------------------------------------------------------------------------


class PutShard(Wire, frozen=True):
    """Where one rank's shard of a block lies in the attached segment."""

    offset_bytes: Annotated[ByteCount, Meta(description="In the segment.")]
    checksum: Checksum


class BlocksPut(Reply, frozen=True):
    """Answer to PutBlocks."""

    states: Annotated[
        bytes, Meta(description="One byte a key: 0 no room, 1 stored, 2 it was there or is being written already.")
    ]


@exchange(Section.BLOCKS, ADMIN)
class PutBlocks(Request[BlocksPut], frozen=True):
    """Copies whole blocks from an attached segment into the pool; the reply comes when they can be read.

    Bytes that do not hash to their checksum refuse the request whole. The segment stays attached, and mapped, until
    the session ends; it must not change before the reply.
    """

    namespace: Fingerprint
    segment_id: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Id under which the memfd was attached.")]
    segment_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1, description="Bytes of it to map.")]
    group: GroupIndex
    keys: Keys
    shards: Annotated[
        list[Annotated[list[PutShard], Meta(max_length=4096)]],
        Meta(max_length=65536, description="Per key its shards, by rank; each as long as the namespace's are."),
    ]
    first_block: Annotated[
        int, Meta(ge=0, lt=65536, description="Engine blocks of key 0 that hold nothing, at its start.")
    ] = 0


@exchange(Section.BLOCKS, ADMIN)
class PinBlocks(Request[Done], frozen=True):
    """Keeps ready blocks from eviction until they are unpinned, dropped, or the daemon ends.

    At most half of the pool may be pinned so.
    """

    namespace: Fingerprint
    group: GroupIndex
    keys: Keys
    pin: Annotated[bool, Meta(description="False unpins. Blocks that are in that state already are not counted.")]
