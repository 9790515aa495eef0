"""What the daemon tells operators: statistics, health, sessions, namespaces."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from kvoffd import __version__
from kvoffd.cache.namespace import Namespace
from kvoffd.server.session import Session
from kvoffd.transfer.engine import Direction
from kvoffd_proto import messages as m
from kvoffd_proto.messages import BlockAccessStats

if TYPE_CHECKING:
    from kvoffd.server.service import Service


class Reporter:
    """Builds the replies of the administration's requests from the service's state."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def stats(self, request_id: int) -> m.StatsReply:
        """All counters."""
        service, cache = self._service, self._service.cache
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return m.StatsReply(
            request_id,
            service.epoch,
            __version__,
            os.getpid(),
            service.clock() - service.started_at,
            service.config.eviction_policy,
            self._pool(),
            self._direction(Direction.STORE),
            self._direction(Direction.LOAD),
            service.lookup_latency.summary(),
            len(cache.leases),
            cache.pinned_blocks,
            len(self._shown_sessions()),
            service.lookup_rate.per_second(),
            service.requests,
            dict(service.errors),
            service.publisher.sequence,
            usage.ru_utime + usage.ru_stime,
            _resident_bytes(),
            [self._namespace_stats(namespace) for namespace in cache.namespaces],
            self._integrity(),
            self._blocks(),
            self._tiering(),
            service.disks.report() if service.disks is not None else [],
            service.replies_dropped,
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
        cache = self._service.cache
        usage = cache.pool_usage()
        pinning = self._service.memory.pinning
        return m.PoolStats(
            cache.slots.pool_bytes,
            max(0, cache.slots.touched_bytes - usage.quarantined_bytes),
            self._service.table_bytes,
            usage.free_bytes,
            usage.writing_bytes,
            usage.ready_bytes,
            usage.leaving_bytes,
            usage.pinned_bytes,
            usage.quarantined_bytes,
            cache.slots.spilled_slots,
            pinning.pinned_bytes,
            pinning.refused_bytes,
        )

    def _integrity(self) -> m.IntegrityStats:
        integrity = self._service.cache.integrity
        return m.IntegrityStats(
            integrity.checked_slots,
            integrity.checked_bytes,
            integrity.mismatches,
            integrity.quarantined_slots,
            integrity.unverified_slots,
        )

    def _blocks(self) -> BlockAccessStats:
        service = self._service
        pins, puts = service.cache.operator_pins, service.puts
        return BlockAccessStats(
            len(pins.blocks), pins.pinned_bytes, service.desk.got_blocks, puts.put_blocks, puts.put_bytes
        )

    def _tiering(self) -> m.BelowStats | None:
        tiering = self._service.tiering
        if tiering is None:
            return None
        promoter, demoter = tiering.promoter, tiering.demoter
        return m.BelowStats(
            promoter.promoted_blocks,
            promoter.promoted_bytes,
            promoter.waiting_blocks,
            dict(promoter.failures),
            promoter.bytes_per_second,
            demoter.written_blocks,
            demoter.written_bytes,
            demoter.waiting_blocks,
            demoter.over_budget,
            demoter.mode.value,
            demoter.budget.left_bytes,
        )

    def _direction(self, direction: Direction) -> m.DirectionStats:
        counters = self._service.jobs.counters[direction]
        load = self._service.memory.load_of(direction)
        return m.DirectionStats(
            counters.jobs,
            counters.failed_jobs,
            counters.bytes,
            load.busy_seconds,
            load.queued,
            load.running,
            counters.rate.per_second(),
            load.checksum_seconds,
            load.checksum_bytes,
        )

    def _namespace_stats(self, namespace: Namespace) -> m.NamespaceStats:
        counters = namespace.counters
        return m.NamespaceStats(
            namespace.fingerprint,
            namespace.label,
            namespace.ready_blocks,
            namespace.ready_bytes,
            namespace.writing_blocks,
            counters.lookups,
            counters.keys_asked,
            counters.keys_ready,
            counters.prefix_keys_ready,
            counters.stored_blocks,
            counters.stored_bytes,
            counters.loaded_bytes,
            counters.evicted_blocks,
            counters.invalidated_blocks,
            counters.dropped_keys,
            counters.keys_pending,
        )

    def _session(self, session: Session) -> m.SessionInfo:
        service = self._service
        now = service.clock()
        return m.SessionInfo(
            session.id,
            session.role or "new",
            session.name,
            session.software,
            session.peer.pid,
            session.peer.uid,
            now - session.opened_at,
            now - session.last_request_at,
            service.cache.leases.count_of(session.id),
            len(session.jobs),
            len(session.registrations),
            sum(registration.mapped_bytes for registration in session.registrations.values()),
            len(session.completions),
        )


def _namespace_info(namespace: Namespace, sessions: int) -> m.NamespaceInfo:
    shard_bytes = [
        [sizes[group] if (sizes := namespace.shard_bytes(rank)) else 0 for rank in range(namespace.world_size)]
        for group in range(len(namespace.groups))
    ]
    return m.NamespaceInfo(
        namespace.fingerprint,
        namespace.label,
        namespace.world_size,
        namespace.key_bytes,
        list(namespace.groups),
        shard_bytes,
        namespace.ready_blocks,
        namespace.ready_bytes,
        namespace.writing_blocks,
        sessions,
        namespace.description,
    )


def _resident_bytes() -> int:
    """Private memory: resident pages less the shared ones, which are the pool, its table and engines' memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
