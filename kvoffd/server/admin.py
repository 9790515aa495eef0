"""Requests of administrators about the cache, its disks, and single blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd.cache.namespace import MissReason
from kvoffd.errors import KvoffdError
from kvoffd.server.handlers import Pending, answers, filled
from kvoffd.server.namespaces import forget_idle
from kvoffd.server.sessions import Session
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import namespace_id
from kvoffd_proto.units import format_size

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)

FLEET_WAIT_S = 1.5
"""Time for a reset to reach all shared stores and peers; the client waits for 2 s."""
LISTED_POINTS = 8
CLEARED_NOT_SAVED = "After a kill or a reboot cleared blocks may come back from disks."


@answers(a.Clear)
def clear(service: Service, session: Session, message: a.Clear) -> Pending:
    """Drop the blocks of one namespace, or of all, and forget empty namespaces that no session has open."""
    if message.namespace is not None:
        service.cache.namespaces.required(message.namespace)  # raises if there is none
    count = service.reset(message.namespace)
    forget_idle(service)
    whose = "all namespaces" if message.namespace is None else f"namespace {namespace_id(message.namespace)}"
    logger.info("Session %d (%s) cleared %s: %d blocks.", session.id, session.peer, whose, count)
    return service.reply_once_saved(m.Done(message.request_id, count), CLEARED_NOT_SAVED)


@answers(a.ResetFleet)
def reset_fleet(service: Service, session: Session, message: a.ResetFleet) -> Pending:
    """Void a namespace's blocks on all nodes; the reply's count is the number of blocks of this one."""
    if not service.tier_supervisor.shares:
        why = "This daemon has no shared store and no peers, so no other nodes to clear; leave out --all-nodes."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
    tiers = list(service.tier_supervisor.shared)
    networks = service.tier_supervisor.networks
    raises = service.tier_supervisor.void_everywhere(message.namespace)
    count = service.follow_fleet()
    saved = service.reply_once_saved(m.Done(message.request_id, count), CLEARED_NOT_SAVED)

    def poll(late: bool) -> m.AnyReply | None:
        if not late and not all(one.ended for one in raises):
            return None
        failed = [(tier.name, one) for tier, one in zip(tiers, raises, strict=True) if one.problem or not one.ended]
        problems = [f"{name}: {one.problem or 'it has not answered yet.'}" for name, one in failed]
        problems += [f"{one}: its nodes hear of it once they exchange blocks; clear there too." for one in networks]
        if not (tiers or networks):
            problems.append(
                "nobody was told: this node names no store and no peer, and only lends; clear on one that does."
            )
        if problems:
            why = f"The reset did not reach every shared store and peer: {' '.join(problems)}"
            raise KvoffdError(why, ErrorCode.NOT_READY)
        return saved.poll(late)

    what = f"namespace {namespace_id(message.namespace)}"
    logger.info("Session %d (%s) cleared %s on all nodes: %d blocks here.", session.id, session.peer, what, count)
    return Pending(poll, service.clock() + FLEET_WAIT_S)


@answers(a.SetQuota)
def set_quota(service: Service, session: Session, message: a.SetQuota) -> Pending:
    """Set a namespace's quota. The reply waits until it is saved for the next daemon."""
    quotas = service.cache.quotas
    if message.quota_bytes is None:
        quotas.pop(message.namespace, None)
    else:
        if message.namespace not in quotas and len(quotas) >= (most := service.config.limits.max_quotas):
            why = f"{most} namespaces, open or not, have a quota, which is the limit; remove some."
            raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
        quotas[message.namespace] = message.quota_bytes
    service.state.save_quotas(quotas)
    logger.info(
        "Session %d (%s) set the quota of the namespace %s: %s.",
        *(session.id, session.peer, namespace_id(message.namespace)),
        "none" if message.quota_bytes is None else format_size(message.quota_bytes),
    )

    otherwise = "The quota applies until the daemon ends; the next one may not have it."
    return service.reply_once_saved(m.Done(message.request_id, 1), otherwise)


@answers(a.SetLogLevel)
def set_log_level(service: Service, session: Session, message: a.SetLogLevel) -> m.Done:
    """Log records of this level and above, of all loggers."""
    root, level = logging.getLogger(), logging.getLevelNamesMapping()[message.level.upper()]
    root.setLevel(min(root.level, level, logging.INFO))  # an operator who reads the log sees the change, either way
    logger.info("Session %d (%s) set the log level: %s.", session.id, session.peer, message.level)
    root.setLevel(level)
    return m.Done(message.request_id, 0)


@answers(a.Trace)
def trace(service: Service, session: Session, message: a.Trace) -> a.TraceReply:
    return a.TraceReply(message.request_id, *service.tracer.fetch(session))


@answers(a.Scrub)
def scrub(service: Service, session: Session, message: a.Scrub) -> a.ScrubReply:
    """Start a scrub of all ready blocks, or report its progress."""
    if message.start:
        service.scrubber.start()
    return service.scrubber.report(message.request_id)


@answers(a.ListBranchPoints)
def list_branch_points(service: Service, session: Session, message: a.ListBranchPoints) -> a.BranchPointsListed:
    found = []
    for namespace in service.cache.namespaces.values():
        seen_tokens, points = service.branch_points.of(namespace)
        found += [
            a.BranchPoint(
                namespace.fingerprint,
                point.at_tokens,
                round(point.prompts),
                round(point.repeated_tokens),
                seen_tokens,
                list(point.examples),
            )
            for point in points[:LISTED_POINTS]
        ]
    return a.BranchPointsListed(message.request_id, found)


@answers(a.FindBlock)
def find_block(service: Service, session: Session, message: a.FindBlock) -> a.BlockFound:
    cache, group, key = service.cache, message.group, message.key
    namespace = cache.namespaces.required(message.namespace)
    state, first_block, checksums = cache.describe_block(namespace, group, key)
    reason = MissReason.PARTIAL
    if state is m.KeyState.ABSENT:
        fits = len(key) == namespace.key_bytes
        reason = MissReason(cache.reasons_of(namespace, group, key)[0]) if fits else MissReason.UNKNOWN
    why = "" if state is m.KeyState.READY else reason.name.lower()
    return a.BlockFound(message.request_id, state, why, first_block, checksums)


@answers(a.DescribeNamespace)
def describe_namespace(service: Service, session: Session, message: a.DescribeNamespace) -> a.NamespaceDescribed:
    namespace = service.cache.namespaces.required(message.namespace)
    shards = [
        None if one is None else [a.ShardSpec(count, list(pages)) for count, pages in one] for one in namespace.shards
    ]
    return filled(
        a.NamespaceDescribed, namespace, request_id=message.request_id, groups=list(namespace.groups), shards=shards
    )


@answers(a.ListBlocks)
def list_blocks(service: Service, session: Session, message: a.ListBlocks) -> a.BlocksListed:
    namespace = service.cache.namespaces.required(message.namespace)
    found = service.cache.list_blocks(namespace, message.group, message.position, message.limit)
    return a.BlocksListed(message.request_id, *found)
