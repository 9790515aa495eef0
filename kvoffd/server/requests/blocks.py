"""Requests of operators about single blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import Block, Namespace
from kvoffd.errors import BadGeometry, KvoffdError, UnknownLease
from kvoffd.server.requests.memory import find_or_open
from kvoffd.server.session import Session
from kvoffd_proto import blocks as b
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)


def describe_namespace(service: Service, session: Session, message: b.DescribeNamespace) -> b.NamespaceDescribed:
    """What the blocks of a namespace are made of."""
    namespace = service.cache.namespace(message.namespace)
    ranks = [namespace.shards(rank) for rank in range(namespace.world_size)]
    return b.NamespaceDescribed(
        message.request_id,
        service.epoch,
        namespace.label,
        namespace.world_size,
        namespace.key_bytes,
        list(namespace.groups),
        namespace.description,
        [None if shards is None else list(shards) for shards in ranks],
    )


def restore_namespace(service: Service, session: Session, message: b.RestoreNamespace) -> m.NamespaceOpened:
    """Open a namespace as an import needs it: all ranks' shards fixed."""
    service.refuse_when_stopping()
    service.desk.admit(session, write=True)
    if len(message.shards) != message.world_size:
        raise BadGeometry(
            f"Shards of {len(message.shards)} ranks are described, of a world of {message.world_size}; describe all."
        )
    sizes = [[b.shard_bytes_of(shard) for shard in shards] for shards in message.shards]
    for nbytes in {size for by_group in sizes for size in by_group}:
        service.cache.slots.slot_bytes(max(nbytes, 1))
    for by_group in sizes:
        if len(by_group) != len(message.groups):
            raise BadGeometry(f"A rank has {len(by_group)} groups, the namespace {len(message.groups)}.")
    known = {namespace.fingerprint: namespace for namespace in service.cache.namespaces}.get(message.namespace)
    if known is not None:
        known.check_same(message.world_size, message.key_bytes, message.groups)
        for rank, by_group in enumerate(sizes):
            known.check_shard_bytes(rank, by_group)
    namespace, created = find_or_open(service, message)
    for rank, by_group in enumerate(sizes):
        service.cache.set_shard_bytes(namespace, rank, by_group, message.shards[rank])
    return m.NamespaceOpened(message.request_id, service.epoch, created)


def list_blocks(service: Service, session: Session, message: b.ListBlocks) -> b.BlocksListed:
    """One page of a listing."""
    service.desk.admit(session, write=False)
    namespace = service.cache.namespace(message.namespace)
    pins = service.cache.blocks.operator_pinned
    blocks, following, total = service.desk.page(
        session, namespace, message.group, message.prefix, message.pinned, message.position, message.limit
    )
    infos = [b.BlockInfo(block.key, block.state, block.slot_bytes, block.pins, block in pins) for block in blocks]
    return b.BlocksListed(message.request_id, service.epoch, infos, following, total)


def get_blocks(service: Service, session: Session, message: b.GetBlocks) -> b.BlocksGot:
    """Pin blocks and tell where they lie."""
    service.desk.admit(session, write=False)
    if message.lease_id >> 32 != session.id:
        raise UnknownLease(f"Lease ids of session {session.id} are {session.id} * 2**32 + n.")
    namespace = service.cache.namespace(message.namespace)
    service.check_key_count(namespace, [m.GroupKeys(message.group, message.keys)])
    limit = service.config.max_leases
    if service.cache.leases.count_of(session.id) >= limit:
        raise KvoffdError(f"The session holds {limit} leases, its limit; release some.", ErrorCode.TOO_MANY)
    found = service.cache.lease_blocks(namespace, message.lease_id, session.id, message.group, message.keys)
    told = [None if block is None else _held(namespace, block) for block in found]
    got = sum(block is not None for block in found)
    service.desk.got_blocks += got
    ttl_ms = round(service.config.lease_ttl_s * 1000) if got else 0
    return b.BlocksGot(message.request_id, service.epoch, told, ttl_ms)


def put_blocks(service: Service, session: Session, message: b.PutBlocks) -> None:
    """Copy blocks into the pool; the reply follows once that is done."""
    service.refuse_when_stopping()
    service.desk.admit(session, write=True)
    namespace = service.cache.namespace(message.namespace)
    service.check_key_count(namespace, [m.GroupKeys(message.group, message.keys)])
    sender = service.sender

    def ended(result: bytes | KvoffdError) -> None:
        if isinstance(result, KvoffdError):
            service.reply(sender, service.refusal(message.request_id, result))
        else:
            service.reply(sender, b.BlocksPut(message.request_id, service.epoch, result))

    service.puts.put(session, namespace, message, service.config.max_registrations, ended)


def pin_blocks(service: Service, session: Session, message: b.PinBlocks) -> m.Done:
    """Keep blocks from eviction, or no more."""
    service.desk.admit(session, write=True)
    cache = service.cache
    namespace = cache.namespace(message.namespace)
    service.check_key_count(namespace, [m.GroupKeys(message.group, message.keys)])
    count = (cache.pin if message.pin else cache.unpin)(namespace, message.group, message.keys)
    verb = "pinned" if message.pin else "unpinned"
    logger.info("Session %d (uid %d) %s %d blocks.", session.id, session.peer.uid, verb, count)
    return m.Done(message.request_id, service.epoch, count)


def _held(namespace: Namespace, block: Block) -> list[b.HeldShard]:
    shards = []
    for rank in range(namespace.world_size):
        shard, sizes = block.shards[rank], namespace.shard_bytes(rank)
        assert sizes is not None, "a written shard has a size"
        checksum = shard.checksum.to_bytes(b.CHECKSUM_BYTES, "big")
        shards.append(b.HeldShard(shard.offset, sizes[block.group], checksum, shard.first_block))
    return shards
