"""Requests about namespaces and engine memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import Namespace
from kvoffd.errors import BadGeometry, KvoffdError
from kvoffd.server.engine_memory import EngineMemory, segment_ids
from kvoffd.server.registration import Registration
from kvoffd.server.session import Session
from kvoffd.transfer.plan import build_layouts
from kvoffd_proto import messages as m
from kvoffd_proto.blocks import PageSpec, RestoreNamespace, ShardSpec
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import Handle

if TYPE_CHECKING:
    from kvoffd.server.service import Service

MAX_PAGES = 65536
"""Of all groups of a registration together: each costs the event loop some microseconds."""


def open_namespace(service: Service, session: Session, message: m.OpenNamespace) -> m.NamespaceOpened:
    """Open a namespace or join it."""
    service.refuse_when_stopping()
    _, created = find_or_open(service, message)
    session.namespaces.add(message.namespace)
    return m.NamespaceOpened(message.request_id, service.epoch, created)


def find_or_open(service: Service, message: m.OpenNamespace | RestoreNamespace) -> tuple[Namespace, bool]:
    """The namespace a message describes, and whether it is new. Raises KvoffdError."""
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
        if service.tiering is not None:
            service.tiering.namespace_opened(namespace)
    return namespace, created


def register(service: Service, session: Session, message: m.Register) -> None:
    """Map a worker's memory; the reply follows once that is done.

    Takes the attached descriptors over when all of it is sound, none of them otherwise.
    """
    service.refuse_when_stopping()
    namespace = service.namespace_of(session, message.namespace)
    _check(service, session, message, namespace)
    descriptors = _claim(session, message.segments)
    session.registering.add(message.registration_id)
    sender = service.sender

    def mapped(result: EngineMemory | KvoffdError) -> None:
        session.registering.discard(message.registration_id)
        reply: m.AnyReply
        try:
            reply = _registered(service, session, message, namespace, result)
        except Exception as error:
            reply = service.refusal(message.request_id, error)
            _give_back(session, descriptors)
        else:
            _close(descriptors)
        service.reply(sender, reply)

    try:
        service.memory.map(message.registration_id, message.segments, descriptors, mapped)
    except BaseException:
        session.registering.discard(message.registration_id)
        _give_back(session, descriptors)
        raise


def unregister(service: Service, session: Session, message: m.Unregister) -> None:
    """Stop the registration's jobs and unmap its memory; the reply follows once that is done."""
    registration = service.registration_of(session, message.registration_id)
    del session.registrations[message.registration_id]
    sender, reply = service.sender, m.Done(message.request_id, service.epoch, 1)
    service.jobs.abandon([job for job in session.jobs.values() if job.registration is registration])
    registration.close_when_idle(lambda: service.reply(sender, reply))


def _check(service: Service, session: Session, message: m.Register, namespace: Namespace) -> None:
    if message.registration_id in session.registrations or message.registration_id in session.registering:
        raise BadGeometry("A registration with this id exists; make a new id.")
    held = len(session.registrations) + len(session.registering)
    if held >= service.config.max_registrations:
        raise KvoffdError(f"The session holds {held} registrations, its limit.", ErrorCode.TOO_MANY)
    if message.rank >= namespace.world_size:
        raise BadGeometry(f"Rank {message.rank} is outside the namespace's world size {namespace.world_size}.")
    if (pages := sum(map(len, message.groups))) > MAX_PAGES:
        raise BadGeometry(f"The registration has {pages} pages in its groups; {MAX_PAGES} are allowed.")
    if len(message.groups) != len(namespace.groups):
        raise BadGeometry(f"The registration has {len(message.groups)} groups, its namespace {len(namespace.groups)}.")


def _registered(
    service: Service,
    session: Session,
    message: m.Register,
    namespace: Namespace,
    memory: EngineMemory | KvoffdError,
) -> m.Registered:
    """Enter the registration into the books, or unmap its memory and raise."""
    if isinstance(memory, KvoffdError):
        raise memory
    try:
        if session.ended:
            raise KvoffdError(ErrorCode.SESSION_ENDED.sentence, ErrorCode.SESSION_ENDED)
        layouts = build_layouts(memory.spans, message.tensors, message.groups, message.blocks_per_key)
        shard_bytes = [layout.shard_bytes for layout in layouts]
        service.cache.set_shard_bytes(namespace, message.rank, shard_bytes, _shards(message))
    except BaseException:
        memory.close(lambda: None)
        raise
    session.registrations[message.registration_id] = Registration(
        message.registration_id, namespace, message.rank, memory, layouts
    )
    return m.Registered(message.request_id, service.epoch, message.registration_id, shard_bytes)


def _shards(message: m.Register) -> list[ShardSpec]:
    """What the worker says of its shards, by group."""
    return [
        ShardSpec(message.blocks_per_key, [PageSpec(page.page_bytes, page.layer) for page in pages])
        for pages in message.groups
    ]


def _claim(session: Session, handles: list[Handle]) -> dict[int, int]:
    """Take the descriptors that handles name from the session: segment id -> fd."""
    ids = segment_ids(handles)
    for segment_id in ids:
        if segment_id not in session.segments:
            raise KvoffdError(f"No descriptor was attached as segment {segment_id}.", ErrorCode.UNKNOWN_SEGMENT)
    return {segment_id: session.segments.pop(segment_id) for segment_id in ids}


def _give_back(session: Session, descriptors: dict[int, int]) -> None:
    """Undo a claim. A new attachment may have got the same id meanwhile; then the old one has lost it."""
    for segment_id, fd in descriptors.items():
        if session.ended or segment_id in session.segments:
            os.close(fd)
        else:
            session.segments[segment_id] = fd


def _close(descriptors: dict[int, int]) -> None:
    for fd in descriptors.values():
        os.close(fd)
