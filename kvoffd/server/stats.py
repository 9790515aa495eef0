"""Requests for what the daemon tells of itself: statistics, health, sessions, namespaces."""

from __future__ import annotations

import os
import resource
from collections import Counter
from typing import TYPE_CHECKING

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.index_memory import index_memory
from kvoffd.cache.namespace import Namespace
from kvoffd.config import settings_in_force
from kvoffd.memory_estimate import max_index_bytes
from kvoffd.server.handlers import answers, filled
from kvoffd.server.health import health_of, health_reply
from kvoffd.server.namespaces import opened_namespaces
from kvoffd.server.recent import named
from kvoffd.server.sessions import Session
from kvoffd.server.tiers import Disk
from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.tier import TierStats
from kvoffd.transfer.plan import Direction
from kvoffd_proto import admin as a
from kvoffd_proto import stats as s

if TYPE_CHECKING:
    from kvoffd.server.service import Service

MAX_NAMESPACES = 100
"""In one reply of Stats: they take the loop some 5 ms."""
DESCRIPTIONS_BYTES = 1 << 20
"""Of the namespaces in one listing: 64 KiB of each would make tens of MiB."""


@answers(s.Stats)
def stats(service: Service, session: Session, message: s.Stats) -> s.StatsReply:
    return stats_reply(service, message)


def stats_reply(service: Service, message: s.Stats) -> s.StatsReply:
    cache = service.cache
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
            recent=service.recent.of_namespace(namespace),
            curve=service.curve.of_namespace(namespace),
        )
        for namespace in _shown(service)
    ]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    level, causes = health_of(service)
    return filled(
        s.StatsReply,
        service,
        cache,
        service.loop_watch,
        service.jobs,
        request_id=message.request_id,
        daemon_version=__version__,
        pid=os.getpid(),
        uptime_seconds=service.clock() - service.started_at,
        policy=service.config.eviction_policy,
        ghost_keys=cache.policy.ghosts,
        policy_bytes=cache.policy.nbytes,
        pool=_pool_stats(service),
        store=_direction_stats(service, Direction.STORE),
        load=_direction_stats(service, Direction.LOAD),
        lookup_seconds=service.lookup_times.counted(),
        leases=len(cache.leases),
        pinned_blocks=cache.blocks.pinned_blocks,
        sessions=sum(1 for _ in service.sessions),
        ended_sessions=dict(service.sessions.ended),
        lookups_per_second=service.lookup_rate.per_second(),
        errors=dict(service.errors),
        replies_dropped=dict(service.replies_dropped),
        events_published=service.events.published,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        resident_bytes=_resident_bytes(),
        namespaces=namespaces,
        omitted_namespaces=len(cache.namespaces) - len(namespaces),
        integrity=filled(s.IntegrityStats, cache.integrity),
        below=_tiering_stats(service),
        disks=list(map(_disk_stats, service.tiers)),
        shared=_shared_stats(service),
        health=level,
        health_problems=dict(Counter(cause.reason for cause in causes)),
        recent=service.recent.in_all(),
        curve=service.curve.in_all(),
        curve_seen_bytes=service.curve.seen_bytes,
        curve_bytes=service.curve.nbytes,
        settings=[s.SettingInfo(*one) for one in settings_in_force(service.config)],
    )


def _shown(service: Service) -> list[Namespace]:
    """The namespaces that statistics have: where there are too many, those in use, then those with the most blocks."""
    known = service.cache.namespaces
    if len(known) <= MAX_NAMESPACES:
        return known
    opened = opened_namespaces(service)
    known.sort(key=lambda one: (one.fingerprint in opened, one.ready_bytes), reverse=True)
    return known[:MAX_NAMESPACES]


@answers(a.Health)
def health(service: Service, session: Session, message: a.Health) -> a.HealthReply:
    return health_reply(service, message)


@answers(a.Sessions)
def sessions(service: Service, session: Session, message: a.Sessions) -> a.SessionsReply:
    now, leases = service.clock(), service.cache.leases
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
        for one in service.sessions
    ]
    return a.SessionsReply(message.request_id, service.epoch, infos)


@answers(a.Namespaces)
def namespaces(service: Service, session: Session, message: a.Namespaces) -> a.NamespacesReply:
    cache = service.cache
    quotas = cache.blocks.quotas
    infos = [
        filled(
            a.NamespaceInfo,
            namespace,
            namespace=namespace.fingerprint,
            groups=list(namespace.groups),
            shard_bytes=_shard_bytes(namespace),
            sessions=sum(namespace.fingerprint in session.namespaces for session in service.sessions),
            quota_bytes=quotas.of(namespace.fingerprint),
        )
        for namespace in cache.namespaces
    ]
    room_bytes = DESCRIPTIONS_BYTES
    for number, info in enumerate(infos):
        room_bytes -= len(info.description)
        if room_bytes < 0:
            infos[number] = structs.replace(info, description="")
    return a.NamespacesReply(message.request_id, service.epoch, infos)


def _pool_stats(service: Service) -> s.PoolStats:
    cache, pinning = service.cache, service.memory.gpus.pinning
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
        index_limit_bytes=max_index_bytes(service.config),
    )


def _tiering_stats(service: Service) -> s.TieringStats | None:
    tiering = service.tiering
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


def _shared_stats(service: Service) -> list[s.SharedStats]:
    if (tiering := service.tiering) is None:
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
            left_namespaces=sum(one.fingerprint in shared.unshared for one in service.cache.namespaces),
        )
        for shared in tiering.shared
        if isinstance(tier := shared.tier, SharedTier)
    ]


def _direction_stats(service: Service, direction: Direction) -> s.DirectionStats:
    counters = service.jobs.counters[direction]
    load = service.memory.load_of(direction)
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
