"""Requests of an engine's scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvoffd.errors import KvoffdError, UnknownLease
from kvoffd.server.session import Session
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

if TYPE_CHECKING:
    from kvoffd.server.service import Service

_PENDING = bytes([m.PENDING])


def lookup(service: Service, session: Session, message: m.Lookup) -> m.LookupReply:
    """Tell which keys are ready and pin those."""
    started = service.clock()
    if message.lease_id >> 32 != session.id:
        raise UnknownLease(f"Lease ids of session {session.id} are {session.id} * 2**32 + n.")
    namespace = service.namespace_of(session, message.namespace)
    service.check_key_count(namespace, message.groups)
    limit = service.config.max_leases
    if service.cache.leases.count_of(session.id) >= limit:
        raise KvoffdError(f"The session holds {limit} leases, its limit; release some.", ErrorCode.TOO_MANY)
    groups = [(part.group, part.keys) for part in message.groups]
    answer = service.cache.lookup(namespace, message.lease_id, session.id, groups, message.again)
    ttl_ms = round(service.config.lease_ttl_s * 1000) if answer.pinned else 0
    service.note_lookup(message.lease_id, service.clock() - started)
    wait_ms = 0
    if service.tiering is not None and any(_PENDING in states for states in answer.states):
        wait_ms = math.ceil(service.tiering.promoter.wait_s * 1000)
    return m.LookupReply(
        message.request_id, service.epoch, message.lease_id, answer.states, answer.pinned, ttl_ms, wait_ms
    )


def release(service: Service, session: Session, message: m.Release) -> m.Done:
    """End leases of this session."""
    return m.Done(message.request_id, service.epoch, service.cache.release(session.id, message.lease_ids))


def invalidate(service: Service, session: Session, message: m.Invalidate) -> m.Done:
    """Drop blocks that proved unusable."""
    namespace = service.namespace_of(session, message.namespace)
    service.check_key_count(namespace, message.groups)
    count = service.cache.invalidate(namespace, [(part.group, part.keys) for part in message.groups])
    return m.Done(message.request_id, service.epoch, count)


def reset(service: Service, session: Session, message: m.Reset) -> m.Done:
    """Drop every block of a namespace that the session has opened."""
    namespace = service.namespace_of(session, message.namespace)
    count = service.cache.reset(namespace)
    if service.disks is not None:
        service.disks.namespace_reset(namespace.fingerprint)
    return m.Done(message.request_id, service.epoch, count)
