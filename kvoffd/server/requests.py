"""Requests of engines: their sessions, namespaces and memory, lookups of schedulers, stores and loads of workers."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.config import Limits
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.handlers import Pending, answers, filled
from kvoffd.server.memory import EngineMemory
from kvoffd.server.sessions import Registration, Session
from kvoffd.transfer.plan import build_layouts
from kvoffd_proto import messages as m
from kvoffd_proto.admin import LoggedPrompt, PageSpec, ShardSpec
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import MAX_PAGES, Handle
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)
CLEARED_UNKEPT = "A kill or a reboot may bring back what was cleared, from disks and shared stores."
UNUSED = {"late": MissReason.LATE, "skipped": MissReason.SKIPPED}
"""Why a lease ends whose blocks were not loaded."""
_other_versions = RareWarnings(logger)


@answers(m.Hello)
def hello(service: Service, session: Session, message: m.Hello) -> m.Welcome:
    """Open the session. Saying it twice with the same role is harmless."""
    if message.protocol_version != m.PROTOCOL_VERSION:
        _other_versions.warn(
            "A client (%s) was refused: it speaks protocol %d, this daemon speaks %d. Install the same kvoffd release "
            "on both ends.",
            printable(message.name),
            message.protocol_version,
            m.PROTOCOL_VERSION,
        )
        raise KvoffdError(
            f"The client speaks protocol {message.protocol_version}, this daemon (kvoffd {__version__}) speaks "
            f"{m.PROTOCOL_VERSION}; install the same kvoffd release on both ends.",
            ErrorCode.BAD_VERSION,
        )
    service.sessions.say_hello(session, message.role, printable(message.name), printable(message.software))
    session.operator = message.operator
    return m.Welcome(
        message.request_id,
        session.id,
        filled(m.Limits, service.config.limits),
        0 if message.role is m.Role.ADMIN else service.sessions.credit_bytes,
    )


@answers(m.Results)
def results(service: Service, session: Session, message: m.Results) -> m.ResultsReply:
    """Give out the completions that were not acknowledged, and the jobs that have none yet."""
    session.completions.acknowledge(message.acknowledged)
    # A job that ended but whose batch is still open must be in one of the two lists.
    if frames := session.completions.flush(service.sessions.credit_bytes):
        service.publications.append(frames)
    return m.ResultsReply(message.request_id, session.completions.replay(), list(session.jobs))


@answers(m.Register)
def register(service: Service, session: Session, message: m.Register) -> Pending:
    """Map a worker's memory; the reply follows once that is done.

    Takes the attached descriptors over when all of it is sound, none of them otherwise.
    """
    namespace = session.namespaces[message.namespace]
    _check_registration(service, session, message, namespace)
    descriptors = _claim(session, message.segments)
    session.registering.add(message.registration_id)
    answer = Pending()

    def mapped(result: EngineMemory | Exception) -> None:
        session.registering.discard(message.registration_id)
        try:
            reply = _registered(service, session, message, namespace, result)
        except Exception as error:
            _give_back(session, descriptors)
            answer.bring(error)
            return
        for fd in descriptors.values():
            os.close(fd)
        answer.bring(reply)

    try:
        service.memory.map(session.peer.uid, message.segments, descriptors, mapped)
    except Exception as error:
        mapped(error)
    return answer


@answers(m.Unregister)
def unregister(service: Service, session: Session, message: m.Unregister) -> Pending:
    """Stop the registration's jobs and unmap its memory; the reply follows once that is done."""
    registration = session.registrations[message.registration_id]
    del session.registrations[message.registration_id]
    service.sessions.share_credit()
    answer = Pending()
    service.jobs.abandon([job for job in session.jobs.values() if job.registration is registration])
    registration.close_when_idle(lambda: answer.bring(m.Done(message.request_id, 1)))
    return answer


def _check_registration(service: Service, session: Session, message: m.Register, namespace: Namespace) -> None:
    """Raise KvoffdError where the registration cannot be."""
    if message.registration_id in session.registrations or message.registration_id in session.registering:
        raise BadGeometry("A registration with this id exists; make a new id.")
    held = len(session.registrations) + len(session.registering)
    if held >= service.config.limits.max_registrations:
        raise KvoffdError(f"The session holds {held} registrations, its limit; end one.", ErrorCode.TOO_MANY)
    if message.rank >= namespace.world_size:
        last = namespace.world_size - 1
        raise BadGeometry(f"The namespace has no rank {message.rank}; name one from 0 to {last}.")
    if (pages := sum(map(len, message.groups))) > MAX_PAGES:
        raise BadGeometry(f"The registration has {pages} pages in its groups; send {MAX_PAGES} at most.")
    if len(message.groups) != len(namespace.groups):
        raise BadGeometry(
            f"The registration has {len(message.groups)} groups, its namespace {len(namespace.groups)}; describe each."
        )


def _registered(
    service: Service,
    session: Session,
    message: m.Register,
    namespace: Namespace,
    memory: EngineMemory | Exception,
) -> m.Registered:
    """Enter the registration, or unmap its memory and raise."""
    if isinstance(memory, Exception):
        raise memory
    try:
        if session.ended:
            raise KvoffdError.of(ErrorCode.SESSION_ENDED)
        layouts = build_layouts(
            *(memory.spans, message.tensors, message.groups, message.blocks_per_key), on_gpu=memory.on_gpu
        )
        shard_bytes = [layout.shard_bytes for layout in layouts]
        shards = [
            ShardSpec(message.blocks_per_key, [PageSpec(page.page_bytes, page.layer) for page in pages])
            for pages in message.groups
        ]
        service.cache.register_rank(namespace, message.rank, shard_bytes, memory.node, shards)
    except BaseException:
        memory.close(lambda: None)
        raise
    registration = Registration(memory, namespace, message.rank, layouts)
    session.registrations[message.registration_id] = registration
    service.sessions.share_credit()
    return m.Registered(message.request_id, message.registration_id, shard_bytes)


def _claim(session: Session, handles: list[Handle]) -> dict[int, int]:
    """Take the descriptors that handles name from the session: segment id -> fd. Raises KvoffdError."""
    ids: list[int] = []
    for handle in handles:
        if isinstance(handle, m.MemfdHandle):
            ids.append(handle.segment_id)
        elif isinstance(handle, m.CudaVmmHandle):
            ids += handle.segment_ids
    if len(set(ids)) < len(ids):
        raise BadGeometry("A segment is named twice; name it once and let tensors share it.")
    for segment_id in ids:
        if segment_id not in session.segments:
            why = f"No descriptor was attached as segment {segment_id}; attach it first."
            raise KvoffdError(why, ErrorCode.UNKNOWN_SEGMENT)
    return {segment_id: session.segments.pop(segment_id) for segment_id in ids}


def _give_back(session: Session, descriptors: dict[int, int]) -> None:
    """Undo a claim. A new attachment may have the same id by now; then the old one has lost it."""
    for segment_id, fd in descriptors.items():
        if session.ended or segment_id in session.segments:
            session.lifeline.close_descriptor(fd)
        else:
            session.segments[segment_id] = fd


@answers(m.Lookup)
def lookup(service: Service, session: Session, message: m.Lookup) -> m.LookupReply:
    """Tell which keys are ready and pin those."""
    started, limits = service.clock(), service.config.limits
    namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
    _check_count(groups, namespace, limits)
    if (held := service.cache.session_leases.get(session.id)) is not None and len(held.leases) >= limits.max_leases:
        raise KvoffdError(f"The session holds {limits.max_leases} leases, its limit; release some.", ErrorCode.TOO_MANY)
    again = message.again or session.operator
    states, pinned = service.cache.lookup(namespace, session.id, message.lease_id, groups, again=again)
    ttl_ms = wait_ms = asking = 0
    if (lease := service.cache.leases.get(message.lease_id)) is not None:
        ttl_ms = max(1, round(1000 * (lease.deadline - started)))
        if lease.coming:
            wait_ms, asking = math.ceil(1000 * lease.wait_s), lease.asking
    if not namespace.of_bench:
        service.lookup_times.observe(service.clock() - started)
    return m.LookupReply(message.request_id, message.lease_id, states, pinned, ttl_ms, wait_ms, asking)


def _check_count(groups: list[tuple[int, bytes]], namespace: Namespace, limits: Limits) -> None:
    """Raise KvoffdError where these are more keys than a request may have."""
    if (keys := sum([len(one) for _, one in groups]) // namespace.key_bytes) > (most := limits.max_keys_per_request):
        raise KvoffdError(f"{keys} keys in one request; {most} are allowed. Send several.", ErrorCode.TOO_MANY)


@answers(m.Release)
def release(service: Service, session: Session, message: m.Release) -> m.Done:
    unused = UNUSED.get(message.unused)
    not_awaited = MissReason.LATE if message.unused == "coming" else unused
    count = service.cache.release(session.id, message.lease_ids, unused, not_awaited)
    return m.Done(message.request_id, count)


@answers(m.Invalidate)
def invalidate(service: Service, session: Session, message: m.Invalidate) -> m.Done:
    """Forget blocks, now: after a kill a disk may have some still, which are compared with their checksums as any."""
    namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
    _check_count(groups, namespace, service.config.limits)
    return m.Done(message.request_id, service.cache.invalidate(namespace, groups))


@answers(m.ReportEngine)
def report_engine(service: Service, session: Session, message: m.ReportEngine) -> m.Done:
    counters = session.namespaces[message.namespace].counters
    if 0 < message.prefill_tokens_per_second < m.LEAST_PER_SECOND:
        why = f"No engine computes {message.prefill_tokens_per_second} tokens a second; report 0 where it is not known."
        raise KvoffdError(why, ErrorCode.MALFORMED)
    if message.prefill_tokens_per_second:  # else it has computed nothing yet, as after its restart
        counters.prefill_tokens_per_second = message.prefill_tokens_per_second
    counters.loaded(0)  # what was loaded before the speed was known
    counters.skipped_loads += message.skipped_loads
    counters.paused_stores += message.paused_stores
    counters.late_lookups += message.late_lookups
    session.problem = message.problem
    return m.Done(message.request_id)


@answers(m.ReportPrompts)
def report_prompts(service: Service, session: Session, message: m.ReportPrompts) -> m.Done:
    """Keep what became of requests, each with the reason why its first missing key was not there."""
    namespace = session.namespaces[message.namespace]
    for one in message.prompts:
        namespace.check(one.missing_group, one.missing_key)
        if len(one.missing_key) > namespace.key_bytes:
            raise BadKeys("A request has one first missing key at most; leave the others out.")
    for one in message.prompts:
        if one.missing_key and not one.reason:
            reason = service.cache.reason_of(namespace, one.missing_group, one.missing_key)
            one = structs.replace(one, reason=reason.name.lower())
        session.prompts.append(LoggedPrompt(session.id, message.namespace, one))
    return m.Done(message.request_id, len(message.prompts))


@answers(m.Reset)
def reset(service: Service, session: Session, message: m.Reset) -> Pending:
    """Drop every block of a namespace that the session has opened, and share nothing of it from now on."""
    count = service.reset(session.namespaces[message.namespace])
    service.tier_supervisor.namespace_reset(message.namespace)
    if service.tier_supervisor.shared and not service.state.file.outlives_reboot:
        raise KvoffdError(
            f"It is done, but a reboot undoes it: {service.state.file.path}, which says that the namespace is not "
            "shared any more, is in memory. Clear it on all nodes, or name a directory on a disk as STATE_DIRECTORY.",
            ErrorCode.NOT_KEPT,
        )
    return service.once_kept(m.Done(message.request_id, count), CLEARED_UNKEPT)
