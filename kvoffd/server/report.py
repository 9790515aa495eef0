"""What the daemon tells operators: statistics, health, sessions, namespaces."""

from __future__ import annotations

import os
import resource
from typing import TypeVar

from msgspec import Struct

from kvoffd import __version__
from kvoffd.cache.namespace import Namespace
from kvoffd.server.context import Context
from kvoffd.server.disks import Disk
from kvoffd.server.session import Session
from kvoffd.tiers.tier import TierStats
from kvoffd.transfer.engine import Direction
from kvoffd_proto import messages as m

StructT = TypeVar("StructT", bound=Struct)


def filled(kind: type[StructT], *sources: object, **given: object) -> StructT:
    """Return a struct: a field is ``given``, or else the attribute of the same name of the first source that has it.

    A counter with the name of its field needs no line here.

    Raises:
        AttributeError: a field is nowhere to be found.
    """
    for name in kind.__struct_fields__:
        if name not in given:
            for source in sources:
                if hasattr(source, name):
                    given[name] = getattr(source, name)
                    break
            else:
                raise AttributeError(f"Nothing that counts has {kind.__name__}.{name}.")
    return kind(**given)


class Reporter:
    """Builds the replies of the administration's requests from the daemon's parts."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def stats(self, request_id: int) -> m.StatsReply:
        """All counters."""
        context, cache = self._context, self._context.cache
        usage = resource.getrusage(resource.RUSAGE_SELF)
        operator_pinned = cache.blocks.operator_pinned
        return filled(
            m.StatsReply,
            context,
            cache,
            request_id=request_id,
            daemon_version=__version__,
            pid=os.getpid(),
            uptime_seconds=context.clock() - context.started_at,
            policy=context.config.eviction_policy,
            pool=self._pool(),
            store=self._direction(Direction.STORE),
            load=self._direction(Direction.LOAD),
            lookup_latency=context.lookup_latency.summary(),
            leases=len(cache.leases),
            pinned_blocks=cache.blocks.pinned_blocks,
            sessions=len(self._shown_sessions()),
            lookups_per_second=context.lookup_rate.per_second(),
            errors=dict(context.errors),
            replies_dropped=dict(context.replies_dropped),
            events_published=context.publisher.sequence,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            resident_bytes=_resident_bytes(),
            namespaces=[
                filled(m.NamespaceStats, namespace, namespace.counters, namespace=namespace.fingerprint)
                for namespace in cache.namespaces
            ],
            integrity=filled(m.IntegrityStats, cache.integrity),
            blocks=filled(
                m.BlockAccessStats,
                context.block_access,
                context.block_writer,
                pinned_blocks=len(operator_pinned),
                pinned_bytes=cache.operator_pinned_bytes,
            ),
            below=self._tiering(),
            disks=[_disk_stats(disk) for disk in context.disks] if context.disks is not None else [],
        )

    def health(self, request_id: int) -> m.HealthReply:
        """Whether the daemon works. That it answers at all says that its loop does."""
        context = self._context
        problems = list(context.memory.problems)
        if lost := context.cache.integrity.mismatches:
            problems.append(
                f"{lost} slot{'' if lost == 1 else 's'} of the pool lost what was stored there. The blocks are dropped "
                "and the slots not used before a restart; check the machine's memory (dmesg, edac-util)."
            )
        if context.disks is not None:
            problems += context.disks.problems
        if context.sessions.stopping:
            problems.append("The daemon is stopping.")
        return m.HealthReply(request_id, context.epoch, not problems, not context.sessions.stopping, problems)

    def sessions(self, request_id: int) -> m.SessionsReply:
        """The open sessions, oldest first."""
        context = self._context
        return m.SessionsReply(request_id, context.epoch, [self._session(s) for s in self._shown_sessions()])

    def namespaces(self, request_id: int) -> m.NamespacesReply:
        """The open namespaces, in the order in which they were opened."""
        context = self._context
        infos = [
            _namespace_info(namespace, sum(namespace.fingerprint in s.namespaces for s in self._shown_sessions()))
            for namespace in context.cache.namespaces
        ]
        return m.NamespacesReply(request_id, context.epoch, infos)

    def _shown_sessions(self) -> list[Session]:
        return [session for session in self._context.sessions if not session.internal]

    def _pool(self) -> m.PoolStats:
        cache, pinning = self._context.cache, self._context.memory.pinning
        usage = cache.pool_usage()
        return filled(
            m.PoolStats,
            usage,
            cache.slots,
            self._context,
            usable_bytes=max(0, cache.slots.touched_bytes - usage.quarantined_bytes),
            page_locked_bytes=pinning.pinned_bytes,
            unlockable_bytes=pinning.refused_bytes,
        )

    def _tiering(self) -> m.BelowStats | None:
        tiering = self._context.tiering
        if tiering is None:
            return None
        promoter, demoter = tiering.promoter, tiering.demoter
        return filled(
            m.BelowStats,
            promoter,
            demoter,
            pending_blocks=promoter.waiting_blocks,
            failed_promotions=dict(promoter.failures),
            read_bytes_per_second=promoter.bytes_per_second,
            waiting_writes=demoter.waiting_blocks,
            write_mode=demoter.mode.value,
            budget_left_bytes=demoter.budget.left_bytes,
        )

    def _direction(self, direction: Direction) -> m.DirectionStats:
        counters = self._context.jobs.counters[direction]
        load = self._context.memory.load_of(direction)
        return filled(
            m.DirectionStats,
            counters,
            load,
            queued_jobs=load.queued,
            running_jobs=load.running,
            bytes_per_second=counters.rate.per_second(),
        )

    def _session(self, session: Session) -> m.SessionInfo:
        context = self._context
        now = context.clock()
        return filled(
            m.SessionInfo,
            session,
            session.peer,
            session_id=session.id,
            role=session.role or "new",
            age_seconds=now - session.opened_at,
            idle_seconds=now - session.last_request_at,
            leases=context.cache.leases.count_of(session.id),
            jobs=len(session.jobs),
            registrations=len(session.registrations),
            registered_bytes=sum(registration.mapped_bytes for registration in session.registrations.values()),
            unacknowledged=len(session.completions),
        )


def _namespace_info(namespace: Namespace, sessions: int) -> m.NamespaceInfo:
    shard_bytes = [
        [sizes[group] if (sizes := namespace.shard_bytes(rank)) else 0 for rank in range(namespace.world_size)]
        for group in range(len(namespace.groups))
    ]
    return filled(
        m.NamespaceInfo,
        namespace,
        namespace=namespace.fingerprint,
        groups=list(namespace.groups),
        shard_bytes=shard_bytes,
        sessions=sessions,
    )


def _disk_stats(disk: Disk) -> m.DiskStats:
    tier = disk.tier
    if tier is None:
        figures, report = TierStats(disk.size.size_bytes), None
    else:
        figures, report = tier.stats(), tier.report()
    return filled(
        m.DiskStats,
        disk,
        disk.size,
        figures,
        directory=disk.size.directory,
        state="hanging" if report and report.hangs else str(disk.state),
        oldest_seconds=report.oldest_age_s if report else 0.0,
        lifetime_written_bytes=report.lifetime_written_bytes if report else 0,
        direct=report.direct if report else False,
        errors=dict(figures.errors),
    )


def _resident_bytes() -> int:
    """Private memory: resident pages less the shared ones, which are the pool, its table and engines' memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
