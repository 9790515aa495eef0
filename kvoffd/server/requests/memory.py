"""Requests about namespaces and engine memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffd.errors import BadGeometry, KvoffdError
from kvoffd.server.registration import Registration
from kvoffd.server.session import Session
from kvoffd.transfer.layout import build_layouts
from kvoffd.transfer.segments import MappedSegment
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import Handle, MemfdHandle

if TYPE_CHECKING:
    from kvoffd.server.service import Service


def open_namespace(service: Service, session: Session, message: m.OpenNamespace) -> m.NamespaceOpened:
    """Open a namespace or join it."""
    service.refuse_when_stopping()
    limit = service.config.max_namespaces
    known = {namespace.fingerprint for namespace in service.cache.namespaces}
    if message.namespace not in known and len(known) >= limit:
        raise KvoffdError(f"{limit} namespaces are open, the limit; raise max_namespaces.", ErrorCode.TOO_MANY)
    namespace, created = service.cache.open_namespace(
        message.namespace,
        message.label,
        message.world_size,
        message.key_bytes,
        message.groups,
        message.description,
    )
    if created:
        # A subscriber that knew an earlier life of the daemon must forget what it believed.
        service.publisher.cleared(namespace)
    session.namespaces.add(message.namespace)
    return m.NamespaceOpened(message.request_id, service.epoch, created)


def register(service: Service, session: Session, message: m.Register) -> m.Registered:
    """Map a worker's memory. Takes the attached descriptors over when all of it is sound, none of them otherwise."""
    service.refuse_when_stopping()
    namespace = service.namespace_of(session, message.namespace)
    if message.registration_id in session.registrations:
        raise BadGeometry("A registration with this id exists; make a new id.")
    if len(session.registrations) >= service.config.max_registrations:
        raise KvoffdError(
            f"The session holds {len(session.registrations)} registrations, its limit.", ErrorCode.TOO_MANY
        )
    if message.rank >= namespace.world_size:
        raise BadGeometry(f"Rank {message.rank} is outside the namespace's world size {namespace.world_size}.")
    if len(message.groups) != len(namespace.groups):
        raise BadGeometry(f"The registration has {len(message.groups)} groups, its namespace {len(namespace.groups)}.")
    segment_ids = _memfd_ids(session, message.segments)
    mapped: list[MappedSegment] = []
    try:
        for segment_id, handle in zip(segment_ids, message.segments, strict=True):
            assert isinstance(handle, MemfdHandle)
            mapped.append(service.map_segment(session.segments[segment_id], handle.size_bytes))
        spans = [(segment.address, segment.size_bytes) for segment in mapped]
        layouts = build_layouts(spans, message.tensors, message.groups, message.blocks_per_key)
        service.cache.set_shard_bytes(namespace, message.rank, [layout.shard_bytes for layout in layouts])
    except BaseException:
        for segment in mapped:
            segment.close()
        raise
    for segment_id in segment_ids:
        os.close(session.segments.pop(segment_id))
    session.registrations[message.registration_id] = Registration(
        message.registration_id, namespace, message.rank, mapped, layouts
    )
    shard_bytes = [layout.shard_bytes for layout in layouts]
    return m.Registered(message.request_id, service.epoch, message.registration_id, shard_bytes)


def unregister(service: Service, session: Session, message: m.Unregister) -> None:
    """Stop the registration's jobs and unmap its memory; the reply follows once that is done."""
    registration = service.registration_of(session, message.registration_id)
    del session.registrations[message.registration_id]
    sender, reply = service.sender, m.Done(message.request_id, service.epoch, 1)
    service.jobs.abandon([job for job in session.jobs.values() if job.registration is registration])
    registration.close_when_idle(lambda: service.outbox.replies.append((sender, codec.encode(reply))))


def _memfd_ids(session: Session, handles: list[Handle]) -> list[int]:
    """The attached segments that ``handles`` name, each once."""
    ids: list[int] = []
    for handle in handles:
        if not isinstance(handle, MemfdHandle):
            raise KvoffdError(
                "This daemon takes memfd segments only; GPU memory comes in a later release.", ErrorCode.UNSUPPORTED
            )
        if handle.segment_id not in session.segments:
            raise KvoffdError(f"No descriptor was attached as segment {handle.segment_id}.", ErrorCode.UNKNOWN_SEGMENT)
        if handle.segment_id in ids:
            raise BadGeometry("A segment is named twice; name it once and let tensors share it.")
        ids.append(handle.segment_id)
    return ids
