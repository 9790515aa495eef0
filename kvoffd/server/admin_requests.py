"""Requests of administrators about the cache, its disks, and single blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kvoffd.cache.namespace import Block, Namespace
from kvoffd.errors import BadGeometry, KvoffdError
from kvoffd.server.context import Context, answers, filled
from kvoffd.server.namespaces import find_or_open, forget_idle
from kvoffd.server.session import Session
from kvoffd_proto import blocks as b
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

FLEET_WAIT_S = 1.5
"""For all shared stores to be told of a reset; the client waits for 2 s."""
LIMITS_WAIT_S = 1.5
"""For the file with the quotas of namespaces to be written."""


@answers(m.Clear)
def clear(context: Context, session: Session, message: m.Clear) -> Iterator[m.Done | None]:
    """Drop the blocks of one namespace, or of all. What is empty then and nobody has open is forgotten."""
    cache, count = context.cache, 0
    steps = cache.clear_all() if message.namespace is None else cache.reset(cache.namespace(message.namespace))
    # Before the last step a directory may be open, and somebody have a namespace open of which only disks have blocks.
    context.disks.cleared(message.namespace)
    if message.namespace is None and context.tiering is not None:
        count += context.tiering.forget_unopened()
    count += yield from steps
    if message.namespace is None and context.tiering is not None:  # those that were forgotten meanwhile
        count += context.tiering.forget_unopened()
    forget_idle(context)
    yield from context.removals_kept()
    logger.info("Session %d (%s) cleared %d blocks.", session.id, session.peer, count)
    yield m.Done(message.request_id, context.epoch, count)


@answers(m.ResetFleet)
def reset_fleet(context: Context, session: Session, message: m.ResetFleet) -> Iterator[m.Done | None]:
    """Make a namespace's blocks void for all nodes; the count is that of the stores that were told."""
    stores = context.disks.shared
    if not stores:
        why = "No tier is shared with other nodes; start the daemon with --shared URL."
        raise KvoffdError(why, ErrorCode.NOT_READY)
    raises = [store.raise_generation(message.namespace) for store in stores]
    yield from context.others_served(lambda: all(one.ended for one in raises), context.clock() + FLEET_WAIT_S)
    if problems := [one.problem or "It has not answered yet." for one in raises if one.problem or not one.ended]:
        raise KvoffdError(f"Not every shared store could be told: {' '.join(problems)}", ErrorCode.NOT_READY)
    logger.info("Session %d (%s) reset a namespace for all nodes.", session.id, session.peer)
    yield m.Done(message.request_id, context.epoch, len(raises))


@answers(m.SetQuota)
def set_quota(context: Context, session: Session, message: m.SetQuota) -> Iterator[m.Done | None]:
    """Set a namespace's quota, and have it written for the next daemon before the answer, which says where that
    failed."""
    kept, until = context.kept_limits, context.clock() + LIMITS_WAIT_S
    context.cache.blocks.quotas.set(message.namespace, message.quota_bytes)
    logger.info(
        "Session %d (%s) set the quota of the namespace %s: %s.",
        *(session.id, session.peer, message.namespace.hex()[:12]),
        "none" if message.quota_bytes is None else format_size(message.quota_bytes),
    )
    yield from context.others_served(lambda: not kept.is_being_written, until)
    kept.note()
    yield from context.others_served(lambda: not kept.is_being_written, until)
    if problem := kept.problem:
        logger.warning("The quotas of namespaces hold, but %s.", problem)
        why = f"The quota holds until the daemon ends, and the next one may not have it: {problem}."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
    yield m.Done(message.request_id, context.epoch, 1)


@answers(m.DescribePolicy)
def describe_policy(context: Context, session: Session, message: m.DescribePolicy) -> m.PolicyDescribed:
    policy, key = context.cache.policy, None
    if message.namespace is not None:
        namespace = context.cache.namespace(message.namespace)
        namespace.check_keys(message.group, message.key)
        key = policy.worth_of(namespace, message.group, message.key) if message.key else None
    state = policy.describe()
    return filled(
        m.PolicyDescribed,
        state,
        context,
        request_id=message.request_id,
        policy=context.config.eviction_policy,
        ghost_keys=policy.ghosts,
        policy_bytes=policy.nbytes,
        classes=list(state.classes),
        key=key,
    )


@answers(m.Record)
def record(context: Context, session: Session, message: m.Record) -> m.Recorded:
    found = context.recorder.fetch(session, message.recording, message.end)
    return m.Recorded(message.request_id, context.epoch, *found)


@answers(m.Scrub)
def scrub(context: Context, session: Session, message: m.Scrub) -> m.ScrubReply:
    """Begin to compare every readable block with its checksum, or tell how far that is."""
    if message.start:
        context.scrubber.start()
    return context.scrubber.report(message.request_id, context.epoch)


@answers(b.DescribeNamespace)
def describe_namespace(context: Context, session: Session, message: b.DescribeNamespace) -> b.NamespaceDescribed:
    namespace = context.cache.namespace(message.namespace)
    ranks = [namespace.shards(rank) for rank in range(namespace.world_size)]
    return filled(
        b.NamespaceDescribed,
        context,
        namespace,
        request_id=message.request_id,
        groups=list(namespace.groups),
        shards=[None if shards is None else list(shards) for shards in ranks],
    )


@answers(b.RestoreNamespace)
def restore_namespace(
    context: Context, session: Session, message: b.RestoreNamespace
) -> Iterator[m.NamespaceOpened | None]:
    """Open a namespace as an import needs it: all ranks' shards fixed."""
    context.sessions.check_not_stopping()
    context.block_access.admit(session, write=True)
    if len(message.shards) != message.world_size:
        raise BadGeometry(
            f"The request describes shards of {len(message.shards)} of {message.world_size} ranks; describe all."
        )
    sizes = [[b.shard_bytes_of(shard) for shard in shards] for shards in message.shards]
    for nbytes in {size for by_group in sizes for size in by_group}:
        context.cache.slots.slot_bytes(nbytes)
    for by_group in sizes:
        if len(by_group) != len(message.groups):
            raise BadGeometry(f"A rank has {len(by_group)} groups, the namespace has {len(message.groups)}.")
    known = context.cache.find_namespace(message.namespace)
    if known is not None:
        known.check_same(message.world_size, message.key_bytes, message.groups)
        for rank, by_group in enumerate(sizes):
            known.check_shard_bytes(rank, by_group)
    namespace, created = yield from find_or_open(context, session, message)
    for rank, by_group in enumerate(sizes):
        context.cache.set_shard_bytes(namespace, rank, by_group, message.shards[rank])
    yield m.NamespaceOpened(message.request_id, context.epoch, created)


@answers(b.ListBlocks)
def list_blocks(context: Context, session: Session, message: b.ListBlocks) -> b.BlocksListed:
    context.block_access.admit(session, write=False)
    namespace = _namespace_with_group(context, message)
    blocks, following, total = context.block_access.page(
        session, namespace, message.group, message.prefix, message.position, message.limit
    )
    infos = [b.BlockInfo(block.key, m.KeyState(block.state), block.slot_bytes, block.pins) for block in blocks]
    return b.BlocksListed(message.request_id, context.epoch, infos, following, total)


@answers(b.GetBlocks)
def get_blocks(context: Context, session: Session, message: b.GetBlocks) -> b.BlocksGot:
    """Pin blocks and tell where they lie."""
    context.block_access.admit(session, write=False)
    namespace = _namespace_with_group(context, message)
    context.check_block_count(namespace, message.keys)
    context.check_lease_count(session)
    found = context.cache.lease_blocks(namespace, message.lease_id, session.id, message.group, message.keys)
    shards = [None if block is None else _shards_of(namespace, block) for block in found]
    got = sum(block is not None for block in found)
    context.block_access.got_blocks += got
    ttl_ms = round(context.config.lease_ttl_s * 1000) if got else 0
    return b.BlocksGot(message.request_id, context.epoch, shards, ttl_ms)


@answers(b.PutBlocks)
def put_blocks(context: Context, session: Session, message: b.PutBlocks) -> None:
    """Copy blocks into the pool; the reply follows once that is done."""
    context.sessions.check_not_stopping()
    context.block_access.admit(session, write=True)
    namespace = context.cache.namespace(message.namespace)
    context.check_block_count(namespace, message.keys)
    answer = context.answer_later(message.request_id)

    def ended(result: bytes | KvoffdError) -> None:
        answer(b.BlocksPut(message.request_id, context.epoch, result) if isinstance(result, bytes) else result)

    context.block_writer.write(session, namespace, message, ended)


def _namespace_with_group(context: Context, message: b.ListBlocks | b.GetBlocks) -> Namespace:
    namespace = context.cache.namespace(message.namespace)
    if message.group >= (groups := len(namespace.groups)):
        there = "only group 0" if groups == 1 else f"groups 0 to {groups - 1}"
        raise KvoffdError(
            f"The namespace {namespace.label!r} has no group {message.group}; it has {there}.", ErrorCode.BAD_ARGUMENT
        )
    return namespace


def _shards_of(namespace: Namespace, block: Block) -> list[b.HeldShard]:
    shards = []
    for rank in range(namespace.world_size):
        shard, length = block.shard(rank), namespace.shard_length(rank, block.group)
        checksum = shard.checksum.to_bytes(b.CHECKSUM_BYTES, "big")
        shards.append(b.HeldShard(shard.offset, length, checksum, shard.first_block))
    return shards
