"""What an eviction policy tells of itself."""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.wire import (
    ADMIN,
    ByteCount,
    Count,
    Fingerprint,
    GroupIndex,
    Reply,
    Request,
    Section,
    Wire,
    doc,
    exchange,
)


class PolicyClass(Wire, frozen=True):
    """What a learning policy has learned of the keys of one class.

    Ages are in pool lifetimes: the time in which as many bytes are accessed as the pool holds.
    """

    name: Annotated[str, doc("What tells its keys from others.")]
    accessed_share: Annotated[float, doc("Its part of the keys that were asked for lately, 0 to 1.")]
    return_chance: Annotated[float, doc("Chance that such a key is asked for again, 0 to 1.")]
    return_age: Annotated[float, doc("Age by which half of those that come back have done so.")]
    kept_bytes: Annotated[ByteCount, doc("Pool bytes of its blocks.")]
    worth: Annotated[float, doc("Most hits to be expected for a block of it in a pool lifetime.")]
    short_name: Annotated[str, doc("The name in a few words, for tables; empty from daemons that have none.")] = ""


class KeyWorth(Wire, frozen=True):
    """What a learning policy knows of one key."""

    kind: Annotated[str, doc("Name of its class.")]
    age: Annotated[float, doc("Since it was asked for, in pool lifetimes.")]
    requests: Annotated[Count, doc("Requests that asked for it.")]
    turn: Annotated[Count, doc("Number of the last one in its conversation; 0 for what only a store brought.")]
    worth: Annotated[float, doc("Hits to be expected for it in a pool lifetime.")]
    bytes_before: Annotated[ByteCount, doc("Pool bytes of the blocks that would go before it, about.")]


class PolicyDescribed(Reply, frozen=True):
    """Answer to DescribePolicy. Of policies that do not learn: the name, the keys without a block and their memory."""

    policy: Annotated[str, doc("Name of the policy.")]
    requests: Annotated[Count, doc("Requests that it was told of.")]
    known_keys: Annotated[Count, doc("Keys that it knows, with and without a block.")]
    ghost_keys: Annotated[Count, doc("Those without.")]
    policy_bytes: Annotated[ByteCount, doc("Memory of what it knows.")]
    hit_bytes: Annotated[ByteCount, doc("Bytes of the blocks that requests found, from the first to the one missing.")]
    lru_hit_bytes: Annotated[ByteCount, doc("The same as it would have been with the policy lru.")]
    as_lru: Annotated[bool, doc("Whether blocks go as with lru for a while, since that had more hits.")]
    classes: Annotated[list[PolicyClass], doc("By their part of what was asked for, the largest first.")]
    key: Annotated[KeyWorth | None, doc("What is known of the key that was asked for; nil if nothing.")] = None


@exchange(Section.ADMINISTRATION, ADMIN)
class DescribePolicy(Request[PolicyDescribed], frozen=True):
    """Asks what the eviction policy has learned, and what it knows of one key. Admin only."""

    namespace: Annotated[Fingerprint | None, doc("Namespace of the key; nil to ask for none.")] = None
    group: GroupIndex = 0
    key: Annotated[bytes, doc("The block's key, of the namespace's ``key_bytes``.", max_length=64)] = b""
