"""Requests of engines: sessions, memory, lookups, invalidations and reports. Stores and loads are in ``jobs``."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.asked_keys import AskedKeys, PromptOutcome
from kvoffd.cache.block_table import FOUND
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.prompt_tokens import PromptTokens
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.handlers import Pending, answers, filled
from kvoffd.server.sessions import Registration, Session
from kvoffd.transfer.engine import EngineMemory
from kvoffd.transfer.plan import build_layouts
from kvoffd_proto import messages as m
from kvoffd_proto.admin import LoggedPrompt
from kvoffd_proto.build import with_commit
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import MAX_PAGES, Handle
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)
RESET_NOT_SAVED = "After a kill or a reboot the namespace's blocks may come back from disks and shared stores."
UNLOADED: Mapping[str, MissReason] = {
    m.Outcome.LATE: MissReason.LATE,
    m.Outcome.SKIPPED: MissReason.SKIPPED,
    m.Outcome.NO_SPACE: MissReason.ENGINE_FULL,
    m.Outcome.FAILED: MissReason.LOAD_FAILED,
}
"""Miss reasons of keys that were found and not loaded, by the prompt's outcome."""
NOT_AWAITED: Mapping[str, MissReason] = {
    reason.name.lower(): reason for reason in (MissReason.TIER_LATE, MissReason.UNANSWERED, MissReason.EXCLUDED)
}
"""Miss reasons of keys that were coming and not waited for, as engines report them."""
_other_versions = RareWarnings(logger)


@answers(m.Hello)
def hello(service: Service, session: Session, message: m.Hello) -> m.Welcome:
    """Set the session's role and name. Idempotent for the same role."""
    if message.protocol_version != m.PROTOCOL_VERSION:
        _other_versions.warn(
            "A client (%s) was refused: it speaks protocol %d, this daemon speaks %d. Install the same kvoffd release "
            "on both ends.",
            printable(message.name),
            message.protocol_version,
            m.PROTOCOL_VERSION,
        )
        ours = with_commit(__version__)
        raise KvoffdError(
            f"The client speaks protocol {message.protocol_version}, but this daemon (kvoffd {ours}) "
            f"speaks {m.PROTOCOL_VERSION}; install the same kvoffd release on both ends.",
            ErrorCode.BAD_VERSION,
        )
    service.sessions.set_role(session, message.role, printable(message.name), printable(message.software))
    return m.Welcome(
        message.request_id,
        session.id,
        filled(m.Limits, service.config.limits),
        0 if message.role is m.Role.ADMIN else service.sessions.credit_bytes,
    )


@answers(m.Results)
def results(service: Service, session: Session, message: m.Results) -> m.ResultsReply:
    """Return the unacknowledged results, and the ids of unfinished jobs."""
    session.completions.acknowledge(message.acknowledged)
    # Without the flush a job whose result is in the open batch would be in neither list.
    if frames := session.completions.flush(service.sessions.credit_bytes):
        service.publications.append(frames)
    return m.ResultsReply(message.request_id, session.completions.replay(), list(session.jobs))


@answers(m.Register)
def register(service: Service, session: Session, message: m.Register) -> Pending:
    """Map a worker's memory, then reply. After an error the session keeps the attached descriptors."""
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
            answer.resolve(error)
            return
        for fd in descriptors.values():
            os.close(fd)
        answer.resolve(reply)

    try:
        service.memory.map(session.peer.uid, message.segments, descriptors, mapped)
    except Exception as error:
        mapped(error)
    return answer


@answers(m.Unregister)
def unregister(service: Service, session: Session, message: m.Unregister) -> Pending:
    """Stop the registration's jobs and unmap its memory, then reply."""
    registration = session.registrations[message.registration_id]
    del session.registrations[message.registration_id]
    service.sessions.share_credit()
    answer = Pending()
    service.jobs.abandon([job for job in session.jobs.values() if job.registration is registration])
    registration.close_when_idle(lambda: answer.resolve(m.Done(message.request_id, 1)))
    return answer


def _check_registration(service: Service, session: Session, message: m.Register, namespace: Namespace) -> None:
    if message.registration_id in session.registrations or message.registration_id in session.registering:
        raise BadGeometry("A registration with this id exists; use a new id.")
    held = len(session.registrations) + len(session.registering)
    if held >= service.config.limits.max_registrations:
        raise KvoffdError(f"The session holds {held} registrations, its limit; end one.", ErrorCode.TOO_MANY)
    if message.rank >= namespace.world_size:
        last = namespace.world_size - 1
        raise BadGeometry(f"The namespace has no rank {message.rank}; use one from 0 to {last}.")
    if (pages := sum(map(len, message.groups))) > MAX_PAGES:
        raise BadGeometry(f"The registration has {pages} pages in its groups; the limit is {MAX_PAGES}.")
    if len(message.groups) != len(namespace.groups):
        raise BadGeometry(
            f"The registration has {len(message.groups)} groups, but its namespace {len(namespace.groups)}; send each."
        )


def _registered(
    service: Service,
    session: Session,
    message: m.Register,
    namespace: Namespace,
    memory: EngineMemory | Exception,
) -> m.Registered:
    """Add the registration; on an error unmap its memory and raise."""
    if isinstance(memory, Exception):
        raise memory
    try:
        if session.ended:
            raise KvoffdError.of(ErrorCode.SESSION_ENDED)
        layouts = build_layouts(
            *(memory.spans, message.tensors, message.groups, message.blocks_per_key), on_gpu=memory.on_gpu
        )
        shard_bytes = [layout.shard_bytes for layout in layouts]
        shards = tuple((message.blocks_per_key, tuple(page.page_bytes for page in pages)) for pages in message.groups)
        service.cache.register_rank(namespace, message.rank, shard_bytes, memory.node, shards)
    except BaseException:
        memory.close(lambda: None)
        raise
    registration = Registration(memory, namespace, message.rank, layouts)
    session.registrations[message.registration_id] = registration
    service.sessions.share_credit()
    return m.Registered(message.request_id, message.registration_id, shard_bytes)


def _claim(session: Session, handles: list[Handle]) -> dict[int, int]:
    """Take the handles' descriptors from the session and return them by segment id. Raises KvoffdError."""
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
    """Undo a claim. Close a descriptor whose id was attached again since."""
    for segment_id, fd in descriptors.items():
        if session.ended or segment_id in session.segments:
            session.lifeline.close_descriptor(fd)
        else:
            session.segments[segment_id] = fd


@answers(m.Lookup)
def lookup(service: Service, session: Session, message: m.Lookup) -> m.LookupReply:
    """Return the states of keys, and pin those that are ready."""
    started, limits = service.clock(), service.config.limits
    namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
    _check_count(groups, namespace, limits.max_keys_per_request)
    held, is_new = service.cache.session_leases.get(session.id), message.lease_id not in service.cache.leases
    if is_new and held is not None and len(held.leases) >= limits.max_leases:
        raise KvoffdError(f"The session holds {limits.max_leases} leases, its limit; release some.", ErrorCode.TOO_MANY)
    peer = service.tier_supervisor.peer_at(message.peer) if message.peer else ""
    states, pinned = service.cache.lookup(
        namespace,
        session.id,
        message.lease_id,
        groups,
        again=message.again,
        reported=message.reported,
        peer=peer,
        giver=message.giver,
    )
    ttl_ms = wait_ms = asking = 0
    if (lease := service.cache.leases.get(message.lease_id)) is not None:
        ttl_ms = max(1, round(1000 * (lease.deadline - started)))
        if lease.coming:
            wait_ms, asking = math.ceil(1000 * lease.wait_s), lease.asking
    if not namespace.of_bench:
        service.lookup_times.observe(service.clock() - started)
    return m.LookupReply(message.request_id, message.lease_id, states, pinned, ttl_ms, wait_ms, asking)


def _check_count(groups: list[tuple[int, bytes]], namespace: Namespace, most: int) -> None:
    if (keys := sum([len(one) for _, one in groups]) // namespace.key_bytes) > most:
        raise KvoffdError(f"{keys} keys in one request; the limit is {most}. Send several.", ErrorCode.TOO_MANY)


@answers(m.Release)
def release(service: Service, session: Session, message: m.Release) -> m.Done:
    return m.Done(message.request_id, service.cache.release(session.id, message.lease_ids))


@answers(m.Hint)
def hint(service: Service, session: Session, message: m.Hint) -> m.Done:
    namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
    _check_count(groups, namespace, min(m.MAX_HINT_KEYS, service.config.limits.max_keys_per_request))
    ready = service.cache.hint(
        *(namespace, message.action, groups, message.priority, message.ttl_s), session=session.id, giver=message.giver
    )
    service.tracer.record_hint(namespace, message)
    return m.Done(message.request_id, ready)


@answers(m.Invalidate)
def invalidate(service: Service, session: Session, message: m.Invalidate) -> m.Done:
    """Forget blocks. After a kill a disk may still have some of them, with valid checksums."""
    namespace, groups = session.namespaces[message.namespace], [(part.group, part.keys) for part in message.groups]
    _check_count(groups, namespace, service.config.limits.max_keys_per_request)
    return m.Done(message.request_id, service.cache.invalidate(namespace, groups))


@answers(m.ReportEngine)
def report_engine(service: Service, session: Session, message: m.ReportEngine) -> m.Done:
    namespace = session.namespaces[message.namespace]
    counters = namespace.counters
    if 0 < message.prefill_tokens_per_second < m.MIN_PER_SECOND:
        why = f"{message.prefill_tokens_per_second} tokens per second is not an engine's speed; report 0 if unknown."
        raise KvoffdError(why, ErrorCode.MALFORMED)
    if message.prefill_tokens_per_second:  # else unknown, as after the engine's restart
        counters.prefill_tokens_per_second = message.prefill_tokens_per_second
    counters.loaded(0)  # counts loads from before the speed was known
    counters.skipped_loads += message.skipped_loads
    counters.paused_stores += message.paused_stores
    counters.late_lookups += message.late_lookups
    if not namespace.of_bench:
        service.traffic.date_back("late_lookups", message.late_lookups, message.late_age_s)
    counters.unknown_hints += message.unknown_hints
    session.problem = message.problem
    return m.Done(message.request_id)


@answers(m.ReportPrompts)
def report_prompts(service: Service, session: Session, message: m.ReportPrompts) -> m.Done:
    """Keep reports of prompts, each with the reason why it was not loaded whole."""
    namespace = session.namespaces[message.namespace]
    for one in message.prompts:
        namespace.check(one.missing_group, one.missing_key)
        if len(one.missing_key) > namespace.key_bytes:
            raise BadKeys("A report has one first missing key at most; leave the others out.")
        if not one.again and (had := one.own_tokens + one.loaded_tokens + one.other_tokens) > one.tokens:
            why = f"A prompt of {one.tokens} tokens did not have {had}; report those of the prompt only."
            raise KvoffdError(why, ErrorCode.MALFORMED)
    for one in message.prompts:
        unloaded, not_awaited = UNLOADED.get(one.outcome), NOT_AWAITED.get(one.reason)
        outcome = PromptOutcome(one.own_keys, one.covered_keys, unloaded, one.coming_keys, not_awaited)
        counted = service.cache.count_prompt(session.id, one.lease_id, outcome)
        reason, tiers = _reason_of(service, namespace, one, counted)
        one = structs.replace(one, reason=reason)
        tokens: dict[str, int] = {}
        if not (one.again or one.outcome == m.Outcome.DROPPED):
            its = PromptTokens(one.tokens, one.own_tokens, one.loaded_tokens, one.other_tokens)
            tokens = service.cache.count_tokens(namespace, session.id, one.load_lease_id, its)
        session.prompts.append(LoggedPrompt(session.id, message.namespace, one, tokens, tiers))
    return m.Done(message.request_id, len(message.prompts))


def _reason_of(
    service: Service, namespace: Namespace, report: m.PromptReport, counted: Sequence[AskedKeys]
) -> tuple[str, list[str]]:
    """Return why a prompt's first missing key was missing, or why nothing was loaded, and the tiers that this is about.

    It is the reason by which the key was ``counted``. Of keys that were not, it is what the engine says, else what is
    known now.
    """
    down: dict[str, None] = {}
    sources: dict[str, None] = {}
    found: MissReason | None = None
    for part in counted:
        down |= dict.fromkeys(part.down)
        sources |= dict.fromkeys(part.sources)
        is_its = part.chain is not None and part.chain.group.index == report.missing_group
        if found is None and is_its and (entry := part.reason_of(report.missing_key)) not in (None, FOUND):
            found = MissReason(entry)
    if (tiering := service.tiering) is not None:
        tiering.count_missed(list(down), sum(part.reasons.count(MissReason.TIER_DOWN) for part in counted))
    if found is None and not report.reason:
        found = UNLOADED.get(report.outcome)
        if report.missing_key:
            (found,) = map(MissReason, service.cache.reasons_of(namespace, report.missing_group, report.missing_key))
    reason = report.reason if found is None else found.name.lower()
    if found is MissReason.TIER_FAILED and tiering is not None:
        return reason, tiering.failing
    if found in NOT_AWAITED.values():
        return reason, list(sources)
    return reason, list(down) if found is MissReason.TIER_DOWN else []


@answers(m.Reset)
def reset(service: Service, session: Session, message: m.Reset) -> m.Done | Pending:
    """Drop all blocks of a namespace that the session has open, and stop sharing it."""
    namespace = session.namespaces[message.namespace]
    count = service.reset(namespace.fingerprint)
    if namespace.of_bench:
        return m.Done(message.request_id, count)
    service.state.generations.stop_sharing(message.namespace)
    if service.tier_supervisor.shares:
        logger.info(
            "An engine reset the namespace %r; its blocks are no longer shared with other nodes. `kvoffd-cli clear %s "
            "--all-nodes` shares it again.",
            *(namespace.label, namespace.fingerprint.hex()),
        )
    in_memory = ""
    if service.tier_supervisor.shares:
        in_memory = (
            f"It is done, but a reboot would undo it: {service.state.file.path}, the record that the namespace is not "
            f"shared any more, is in memory. Run `kvoffd-cli clear {namespace.fingerprint.hex()} --all-nodes`, or set "
            "STATE_DIRECTORY to a directory on a disk."
        )
    return service.reply_once_saved(m.Done(message.request_id, count), RESET_NOT_SAVED, in_memory)
