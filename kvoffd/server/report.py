"""Requests for what the daemon tells of itself: statistics, health, sessions, namespaces."""

from __future__ import annotations

import os
import resource
from collections import Counter

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.index_memory import index_memory
from kvoffd.cache.namespace import Namespace
from kvoffd.config import settings_in_force
from kvoffd.memory_estimate import max_index_bytes
from kvoffd.server.context import Context, answers, filled
from kvoffd.server.health import health_of, health_reply
from kvoffd.server.recent import named
from kvoffd.server.sessions import Session
from kvoffd.server.tiers import Disk
from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.tier import TierStats
from kvoffd.transfer.plan import Direction
from kvoffd_proto import admin as a
from kvoffd_proto import stats as s

DESCRIPTIONS_BYTES = 1 << 20
"""Of the namespaces in one listing: 64 KiB of each would make tens of MiB."""


@answers(s.Stats)
def stats(context: Context, session: Session, message: s.Stats) -> s.StatsReply:
    return stats_reply(context, message)


def stats_reply(context: Context, message: s.Stats) -> s.StatsReply:
    cache = context.cache
    cache.count_misses()
    quotas = cache.blocks.quotas
    namespaces = [
        filled(
            s.NamespaceStats,
            namespace,
            namespace.counters,
            namespace=namespace.fingerprint,
            quota_bytes=quotas.of(namespace.fingerprint),
            misses=named(namespace.counters.misses),
            recent=context.recent.of_namespace(namespace),
            curve=context.curve.of_namespace(namespace),
        )
        for namespace in cache.namespaces
    ]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    level, causes = health_of(context)
    return filled(
        s.StatsReply,
        context,
        cache,
        context.loop_watch,
        context.jobs,
        request_id=message.request_id,
        daemon_version=__version__,
        pid=os.getpid(),
        uptime_seconds=context.clock() - context.started_at,
        policy=context.config.eviction_policy,
        ghost_keys=cache.policy.ghosts,
        policy_bytes=cache.policy.nbytes,
        pool=_pool_stats(context),
        store=_direction_stats(context, Direction.STORE),
        load=_direction_stats(context, Direction.LOAD),
        lookup_seconds=context.lookup_times.counted(),
        leases=len(cache.leases),
        pinned_blocks=cache.blocks.pinned_blocks,
        sessions=sum(1 for _ in context.sessions),
        ended_sessions=dict(context.sessions.ended),
        lookups_per_second=context.lookup_rate.per_second(),
        errors=dict(context.errors),
        replies_dropped=dict(context.replies_dropped),
        events_published=context.events.published,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        resident_bytes=_resident_bytes(),
        namespaces=namespaces,
        integrity=filled(s.IntegrityStats, cache.integrity),
        below=_tiering_stats(context),
        disks=list(map(_disk_stats, context.tiers)),
        shared=_shared_stats(context),
        health=level,
        health_problems=dict(Counter(cause.reason for cause in causes)),
        recent=context.recent.in_all(),
        curve=context.curve.in_all(),
        curve_seen_bytes=context.curve.seen_bytes,
        curve_bytes=context.curve.nbytes,
        settings=[s.SettingInfo(*one) for one in settings_in_force(context.config)],
    )


@answers(a.Health)
def health(context: Context, session: Session, message: a.Health) -> a.HealthReply:
    return health_reply(context, message)


@answers(a.Sessions)
def sessions(context: Context, session: Session, message: a.Sessions) -> a.SessionsReply:
    now, leases = context.clock(), context.cache.leases
    infos = [
        filled(
            a.SessionInfo,
            one,
            one.peer,
            session_id=one.id,
            role=one.role,
            age_seconds=now - one.opened_at,
            idle_seconds=now - one.last_request_at,
            leases=leases.count_of(one.id),
            jobs=len(one.jobs),
            registrations=len(one.registrations),
            registered_bytes=sum(registration.mapped_bytes for registration in one.registrations.values()),
            unacknowledged=len(one.completions),
            namespaces=sorted(one.namespaces),
            pinned_bytes=leases.held(one.id).nbytes,
        )
        for one in context.sessions
    ]
    return a.SessionsReply(message.request_id, context.epoch, infos)


@answers(a.Namespaces)
def namespaces(context: Context, session: Session, message: a.Namespaces) -> a.NamespacesReply:
    cache = context.cache
    quotas = cache.blocks.quotas
    infos = [
        filled(
            a.NamespaceInfo,
            namespace,
            namespace=namespace.fingerprint,
            groups=list(namespace.groups),
            shard_bytes=_shard_bytes(namespace),
            sessions=sum(namespace.fingerprint in session.namespaces for session in context.sessions),
            quota_bytes=quotas.of(namespace.fingerprint),
        )
        for namespace in cache.namespaces
    ]
    room_bytes = DESCRIPTIONS_BYTES
    for number, info in enumerate(infos):
        room_bytes -= len(info.description)
        if room_bytes < 0:
            infos[number] = structs.replace(info, description="")
    return a.NamespacesReply(message.request_id, context.epoch, infos)


def _pool_stats(context: Context) -> s.PoolStats:
    cache, pinning = context.cache, context.memory.pinning
    usage = cache.pool_usage()
    held = sum(namespace.held_blocks for namespace in cache.namespaces)
    index_bytes = index_memory(cache.blocks, cache.policy)
    return filled(
        s.PoolStats,
        usage,
        cache.slots,
        usable_bytes=max(0, cache.slots.touched_bytes - usage.quarantined_bytes),
        left_blocks=cache.inherited_blocks,
        left_bytes=usage.inherited_bytes,
        page_locked_bytes=pinning.pinned_bytes,
        unlockable_bytes=pinning.refused_bytes,
        page_locking_gpu_bytes=pinning.gpu_bytes,
        index_bytes=index_bytes,
        index_block_bytes=index_bytes / held if held else 0.0,
        index_counted_bytes=cache.blocks.index_bytes,
        index_limit_bytes=max_index_bytes(context.config),
    )


def _tiering_stats(context: Context) -> s.TieringStats | None:
    tiering = context.tiering
    if tiering is None:
        return None
    promoter, demoter = tiering.promoter, tiering.demoter
    return filled(
        s.TieringStats,
        promoter,
        demoter,
        pending_blocks=promoter.waiting_blocks,
        failed_promotions=dict(promoter.failures),
        read_bytes_per_second=promoter.bytes_per_second,
        waiting_writes=demoter.waiting_blocks,
        write_mode=demoter.mode.value,
        budget_left_bytes=demoter.budget.left_bytes,
    )


def _shared_stats(context: Context) -> list[s.SharedStats]:
    if (tiering := context.tiering) is None:
        return []
    return [
        filled(
            s.SharedStats,
            tier,
            tier.counters,
            opened=tier.breaker.opened,
            failed_promotions=dict(shared.promoter.failures),
            errors=dict(tier.counters.errors),
            servers=[s.SharedServer(*server) for server in tier.servers],
            left_namespaces=sum(one.fingerprint in shared.unshared for one in context.cache.namespaces),
        )
        for shared in tiering.shared
        if isinstance(tier := shared.tier, SharedTier)
    ]


def _direction_stats(context: Context, direction: Direction) -> s.DirectionStats:
    counters = context.jobs.counters[direction]
    load = context.memory.load_of(direction)
    return filled(
        s.DirectionStats,
        counters,
        load,
        queued_jobs=load.queued,
        running_jobs=load.running,
        bytes_per_second=counters.rate.per_second(),
    )


def _shard_bytes(namespace: Namespace) -> list[list[int]]:
    return [
        [sizes[group] if (sizes := namespace.shard_bytes(rank)) else 0 for rank in range(namespace.world_size)]
        for group in range(len(namespace.groups))
    ]


def _disk_stats(disk: Disk) -> s.DiskStats:
    tier = disk.tier
    figures = tier.stats() if tier is not None else TierStats(disk.size.size_bytes)
    unopened = {} if tier is not None else {"direct": False, "oldest_seconds": 0.0, "lifetime_written_bytes": 0}
    return filled(
        s.DiskStats,
        disk,
        disk.size,
        figures,
        tier,
        directory=disk.size.directory,
        state=s.DiskState.HANGING if tier is not None and tier.hangs else disk.state,
        errors={s.DiskFault(kind): count for kind, count in figures.errors.items()},
        **unopened,
    )


def _resident_bytes() -> int:
    """Private memory: resident pages less the shared ones, which are the pool, its table and engines' memory.

    0 where there is no /proc, as in some sandboxes.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            _, resident, shared, *_ = statm.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
