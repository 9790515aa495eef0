"""Requests for statistics, health, sessions, prompts and namespaces."""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter, defaultdict
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.namespace import Namespace
from kvoffd.config import settings_in_force
from kvoffd.observe.meters import HOUR_S, MINUTE_S
from kvoffd.server.handlers import answers, filled
from kvoffd.server.health import health_of, health_reply
from kvoffd.server.sessions import Session
from kvoffd.server.tier_supervisor import Disk
from kvoffd.server.traffic import counts_of, figures
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.tier import TierStats
from kvoffd.transfer.plan import Direction
from kvoffd_proto import admin as a
from kvoffd_proto import stats as s
from kvoffd_proto.build import with_commit
from kvoffd_proto.messages import PROTOCOL_VERSION, Role
from kvoffd_proto.verdict import judge

if TYPE_CHECKING:
    from kvoffd.server.service import Service


@answers(s.Stats)
def stats(service: Service, session: Session, message: s.Stats) -> s.StatsReply:
    return s.StatsReply(message.request_id, daemon_stats(service))


def daemon_stats(service: Service) -> s.DaemonStats:
    cache, traffic, curve, jobs = service.cache, service.traffic, service.curve, service.jobs
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = traffic.total()
    recent = traffic.in_last(MINUTE_S, total)
    hour_requests, hour_errors = service.in_last_hour()
    level, causes = health_of(service, recent)
    on_disk = sum(
        (disk.tier.bytes_by_namespace() for disk in service.tier_supervisor if disk.tier is not None), Counter[bytes]()
    )
    found = filled(
        s.DaemonStats,
        service.loop_watch,
        traffic,
        version=with_commit(__version__),
        protocol=PROTOCOL_VERSION,
        node=socket.gethostname(),
        policy=service.config.eviction_policy,
        pid=os.getpid(),
        uptime_seconds=service.clock() - service.started_at,
        ready=level is not a.HealthLevel.DOWN,
        health=level,
        health_problems=[s.Problem(cause.reason, cause.sentence) for cause in causes],
        sessions=service.sessions.of_engines,
        ended_sessions=dict(service.sessions.ended),
        leases=len(cache.leases),
        pinned_blocks=cache.blocks.pinned_blocks,
        requests=service.requests,
        errors=dict(service.errors),
        last_hour_requests=hour_requests,
        last_hour_errors=hour_errors,
        replies_dropped=dict(service.replies_dropped),
        kv_events=service.events.published,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        resident_bytes=_resident_bytes(),
        lookup_seconds=service.lookup_times.counted(),
        cancelled_stores=jobs.cancelled_stores,
        pool=_pool_stats(service),
        store=_copy_stats(service, Direction.STORE),
        load=_copy_stats(service, Direction.LOAD),
        since_start=traffic.since_start(total),
        last_hour=traffic.in_last(HOUR_S, total),
        last_minute=recent,
        lifetime=traffic.lifetime(total),
        namespaces=_namespace_rows(service, on_disk),
        integrity=filled(s.IntegrityStats, cache),
        tiers=_tiering_stats(service),
        disks=list(map(_disk_stats, service.tier_supervisor)),
        shared=_shared_stats(service),
        lent=_lent_stats(service),
        curve=curve.in_all(),
        curve_seen_bytes=curve.seen_bytes,
        ghost_entries=cache.policy.ghosts,
        policy_bytes=cache.policy.nbytes,
        learned=cache.policy.describe(),
        settings=[s.SettingInfo(*one) for one in settings_in_force(service.config)],
        paying_off=None,
        verdict="",
    )
    paying_off, verdict = judge(found)
    return structs.replace(found, paying_off=paying_off, verdict=verdict)


def _namespace_rows(service: Service, on_disk: Counter[bytes]) -> list[s.NamespaceStats]:
    """Return a row for each namespace, the largest first. Of two whose ids are the same, one has a row: a name of a
    series must be unique."""
    quotas, engines = service.cache.quotas, _engines(service)
    by_id = {s.namespace_id(one.fingerprint): one for one in service.cache.namespaces.values()}
    shown = sorted(by_id.values(), key=attrgetter("ready_bytes"), reverse=True)
    return [
        filled(
            s.NamespaceStats,
            one.counters,
            one,
            id=s.namespace_id(one.fingerprint),
            model=one.label,
            fingerprint=one.fingerprint.hex(),
            disk_bytes=on_disk[one.fingerprint],
            quota_bytes=quotas.get(one.fingerprint),
            engines=engines[one.fingerprint],
            curve=curve,
            branching=_branching(service, one),
            **figures(counts_of(one)),
        )
        for one, curve in zip(shown, service.curve.of_namespaces(shown), strict=True)
    ]


def _branching(service: Service, namespace: Namespace) -> s.Branching | None:
    seen_tokens, points = service.branch_points.of(namespace)
    for point in points[:1]:
        return s.Branching(point.at_tokens, round(point.prompts), round(point.repeated_tokens), seen_tokens)
    return None


def _engines(service: Service) -> defaultdict[bytes, list[str]]:
    found = defaultdict[bytes, list[str]](list)
    for session in service.sessions:
        if session.role is Role.SCHEDULER:
            pid = f", pid {session.peer.pid}" if session.peer.pid else ""
            for fingerprint in session.namespaces:
                found[fingerprint].append(s.engine_name(session.name, session.role) + pid)
    return found


@answers(a.Health)
def health(service: Service, session: Session, message: a.Health) -> a.HealthReply:
    return health_reply(service, message)


@answers(a.Sessions)
def sessions(service: Service, session: Session, message: a.Sessions) -> a.SessionsReply:
    return a.SessionsReply(message.request_id, session_infos(service))


def session_infos(service: Service) -> list[a.SessionInfo]:
    """Return the open sessions, oldest first."""
    now, cache = service.clock(), service.cache
    return [
        filled(
            a.SessionInfo,
            one,
            one.peer,
            session_id=one.id,
            role=one.role,
            age_seconds=now - one.opened_at,
            idle_seconds=now - one.last_request_at,
            leases=len(cache.leases_of(one.id).leases),
            jobs=len(one.jobs),
            registrations=len(one.registrations),
            registered_bytes=sum(size for each in one.registrations.values() for _, size in each.memory.spans),
            unacknowledged=sum(len(batch.results) for batch in one.completions.replay()),
            namespaces=sorted(one.namespaces),
            pinned_bytes=cache.leases_of(one.id).nbytes,
        )
        for one in service.sessions
    ]


@answers(a.ListPrompts)
def list_prompts(service: Service, session: Session, message: a.ListPrompts) -> a.PromptsListed:
    return a.PromptsListed(message.request_id, latest_prompts(service, message.limit, message.name))


def latest_prompts(service: Service, limit: int, name: str = "") -> list[a.LoggedPrompt]:
    """Return the latest prompts of all engines whose ids have ``name``, in the order of their decisions."""
    found: list[a.LoggedPrompt] = []
    for session in service.sessions:
        named = (one for one in reversed(session.prompts) if name in one.report.request)
        found += reversed([*islice(named, limit)])
    found.sort(key=lambda one: one.report.decided_at)
    return found[-limit:]


@answers(a.Namespaces)
def namespaces(service: Service, session: Session, message: a.Namespaces) -> a.NamespacesReply:
    unshared = service.state.generations.unshared_of(service.cache.namespaces)
    return a.NamespacesReply(message.request_id, namespace_infos(service), unshared)


def namespace_infos(service: Service) -> list[a.NamespaceInfo]:
    """Return the open namespaces."""
    cache = service.cache
    quotas = cache.quotas
    return [
        filled(
            a.NamespaceInfo,
            namespace,
            namespace=namespace.fingerprint,
            groups=list(namespace.groups),
            shard_bytes=[
                [0 if sizes is None else sizes[group] for sizes in namespace.shard_bytes]
                for group in range(len(namespace.groups))
            ],
            sessions=sum(namespace.fingerprint in session.namespaces for session in service.sessions),
            quota_bytes=quotas.get(namespace.fingerprint),
        )
        for namespace in cache.namespaces.values()
    ]


def _pool_stats(service: Service) -> s.PoolStats:
    cache, pinning = service.cache, service.memory.gpus.pinning
    usage, pool = cache.usage, service.pool
    return filled(
        s.PoolStats,
        size_bytes=pool.pool_bytes,
        bytes={state: getattr(usage, state) for state in ("free", "writing", "ready", "dropped", "quarantined")},
        usable_bytes=pool.pool_bytes - usage.quarantined,
        pinned_bytes=usage.pinned,
        retained_bytes=cache.order.retained_bytes,
        pinned_for_gpu_bytes=pinning.pinned_bytes,
        unpinnable_bytes=pinning.refused_bytes,
        pinning_gpu_bytes=pinning.gpu_bytes,
        index_bytes=cache.blocks.nbytes,
        numa_remote_slots=pool.slots.slots_on_other_nodes,
        integrated_gpus=service.memory.gpus.integrated,
        at_the_end=pool.at_the_end,
    )


def _copy_stats(service: Service, direction: Direction) -> s.CopyStats:
    copies, counters = service.memory.stats(direction), service.jobs.counters[direction]
    return filled(
        s.CopyStats,
        copies,
        counters,
        queued_jobs=copies.queued,
        running_jobs=copies.running,
    )


def _tiering_stats(service: Service) -> s.TieringStats | None:
    if (tiering := service.tiering) is None:
        return None
    disks, writer = tiering.disks, tiering.disk_writer
    return filled(
        s.TieringStats,
        writer,
        promoted_blocks=sum(one.promoted_blocks for one in disks),
        promoted_bytes=sum(one.promoted_bytes for one in disks),
        promotions_waiting=sum(one.waiting_blocks for one in disks),
        promotions_failed=dict(sum((one.failures for one in disks), Counter[str]())),
        promotions_unused=sum(one.unused_blocks for one in disks),
        writes_waiting=writer.waiting_blocks,
        not_written=dict(writer.not_written),
        write_budget_left_bytes=writer.budget.left_bytes,
        write_mode=writer.mode.value,
        promotion_bytes_per_second=sum(one.speed.measured for one in disks),
    )


def _disk_stats(disk: Disk) -> s.DiskStats:
    tier = disk.tier
    found = tier.stats() if tier is not None else TierStats(disk.size.size_bytes)
    state = s.DiskState.HANGING if tier is not None and tier.hangs else disk.state
    return filled(
        s.DiskStats,
        found,
        directory=disk.size.directory,
        up=state is s.DiskState.SERVING,
        state=state.value,
        problem=disk.problem,
        direct=tier is not None and tier.direct,
        oldest_seconds=0.0 if tier is None else tier.oldest_seconds,
        lifetime_written_bytes=0 if tier is None else tier.lifetime_written_bytes,
    )


def _shared_stats(service: Service) -> list[s.SharedStats]:
    if (tiering := service.tiering) is None:
        return []
    unshared = len(service.state.generations.unshared_of(service.cache.namespaces))
    return [
        filled(
            s.SharedStats,
            tier.stats(),
            url=tier.name,
            up=tier.available(),
            breaker_trips=tier.breaker.opened,
            promotions_failed=dict(source.failures),
            promotions_unused=source.unused_blocks,
            not_written=dict(writer.not_written),
            full=tier.lifetime_bytes > 0,
            write_mode=writer.mode.value,
            servers=[s.SharedServer(*server) for server in tier.servers],
            unshared_namespaces=unshared,
        )
        for source, writer in tiering.stores
        # A peer that only requests name is shown while it answers: they may name what is gone.
        if isinstance(tier := source.tier, SharedTier) and (tier.available() or not tier.only_named)
    ]


def _lent_stats(service: Service) -> s.LentStats | None:
    supervisor = service.tier_supervisor
    if (server := supervisor.peer_server) is None or (helper := supervisor.peer_helper) is None:
        return None
    return filled(
        s.LentStats,
        server,
        up=helper.up,
        blocks=server.lent_blocks,
        bytes=server.served_bytes,
        refused_requests=server.refused,
        refused_handshakes=helper.refused_handshakes,
        pinned_bytes=server.lent_bytes,
    )


def _resident_bytes() -> int:
    """Return the private memory: resident pages without shared ones (the pool, its table and engines' memory).

    0 without /proc, as in some sandboxes.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            _, resident, shared, *_ = statm.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
