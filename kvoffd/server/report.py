"""What the daemon tells operators: statistics, health, sessions, namespaces."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from kvoffd import __version__
from kvoffd.cache.namespace import Namespace
from kvoffd.server.session import Session
from kvoffd.transfer.engine import Direction
from kvoffd_proto import messages as m

if TYPE_CHECKING:
    from kvoffd.server.service import Service


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
    """Builds the replies of the administration's requests from the service's state."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def stats(self, request_id: int) -> m.StatsReply:
        """All counters."""
        service, cache = self._service, self._service.cache
        usage = resource.getrusage(resource.RUSAGE_SELF)
        operator_pinned = cache.blocks.operator_pinned
        return filled(
            m.StatsReply,
            service,
            cache,
            request_id=request_id,
            daemon_version=__version__,
            pid=os.getpid(),
            uptime_seconds=service.clock() - service.started_at,
            policy=service.config.eviction_policy,
            pool=self._pool(),
            store=self._direction(Direction.STORE),
            load=self._direction(Direction.LOAD),
            lookup_latency=service.lookup_latency.summary(),
            leases=len(cache.leases),
            pinned_blocks=cache.blocks.pinned_blocks,
            sessions=len(self._shown_sessions()),
            lookups_per_second=service.lookup_rate.per_second(),
            errors=dict(service.errors),
            events_published=service.publisher.sequence,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            resident_bytes=_resident_bytes(),
            namespaces=[
                filled(m.NamespaceStats, namespace, namespace.counters, namespace=namespace.fingerprint)
                for namespace in cache.namespaces
            ],
            integrity=filled(m.IntegrityStats, cache.integrity),
            blocks=filled(
                m.BlockAccessStats,
                service.desk,
                service.puts,
                pinned_blocks=len(operator_pinned),
                pinned_bytes=cache.operator_pinned_bytes,
            ),
            below=self._tiering(),
            disks=service.disks.report() if service.disks is not None else [],
        )

    def health(self, request_id: int) -> m.HealthReply:
        """Whether the daemon works. That it answers at all says that its loop does."""
        service = self._service
        problems = list(service.memory.problems)
        if lost := service.cache.integrity.mismatches:
            problems.append(
                f"{lost} slot{'' if lost == 1 else 's'} of the pool lost what was stored there. The blocks are dropped "
                "and the slots not used before a restart; check the machine's memory (dmesg, edac-util)."
            )
        if service.disks is not None:
            problems += service.disks.problems
        if service.stopping:
            problems.append("The daemon is stopping.")
        return m.HealthReply(request_id, service.epoch, not problems, not service.stopping, problems)

    def sessions(self, request_id: int) -> m.SessionsReply:
        """The open sessions, oldest first."""
        service = self._service
        return m.SessionsReply(request_id, service.epoch, [self._session(s) for s in self._shown_sessions()])

    def namespaces(self, request_id: int) -> m.NamespacesReply:
        """The open namespaces, in the order in which they were opened."""
        service = self._service
        infos = [
            _namespace_info(namespace, sum(namespace.fingerprint in s.namespaces for s in self._shown_sessions()))
            for namespace in service.cache.namespaces
        ]
        return m.NamespacesReply(request_id, service.epoch, infos)

    def _shown_sessions(self) -> list[Session]:
        return [session for session in self._service.sessions.values() if not session.internal]

    def _pool(self) -> m.PoolStats:
        cache, pinning = self._service.cache, self._service.memory.pinning
        usage = cache.pool_usage()
        return filled(
            m.PoolStats,
            usage,
            cache.slots,
            self._service,
            usable_bytes=max(0, cache.slots.touched_bytes - usage.quarantined_bytes),
            page_locked_bytes=pinning.pinned_bytes,
            unlockable_bytes=pinning.refused_bytes,
        )

    def _tiering(self) -> m.BelowStats | None:
        tiering = self._service.tiering
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
        counters = self._service.jobs.counters[direction]
        load = self._service.memory.load_of(direction)
        return filled(
            m.DirectionStats,
            counters,
            load,
            queued_jobs=load.queued,
            running_jobs=load.running,
            bytes_per_second=counters.rate.per_second(),
        )

    def _session(self, session: Session) -> m.SessionInfo:
        service = self._service
        now = service.clock()
        return filled(
            m.SessionInfo,
            session,
            session.peer,
            session_id=session.id,
            role=session.role or "new",
            age_seconds=now - session.opened_at,
            idle_seconds=now - session.last_request_at,
            leases=service.cache.leases.count_of(session.id),
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


def _resident_bytes() -> int:
    """Private memory: resident pages less the shared ones, which are the pool, its table and engines' memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
