"""The daemon's statistics: figures of all its parts."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from msgspec import structs

from kvoffd import __version__
from kvoffd.cache.branch_points import Branch, BranchPoints
from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config, settings_in_force
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.observe.meters import DAY_S, HOUR_S, MINUTE_S
from kvoffd.pool.pool import MemoryKind, Pool
from kvoffd.server.events import EventLog
from kvoffd.server.handlers import answers, filled
from kvoffd.server.health import HealthWatch
from kvoffd.server.jobs import Jobs
from kvoffd.server.lookups import Lookups
from kvoffd.server.persistence import State
from kvoffd.server.request_counts import RequestCounts
from kvoffd.server.session import Session
from kvoffd.server.sessions import SessionTable
from kvoffd.server.tier_supervisor import Disk, TierSupervisor
from kvoffd.server.traffic import TrafficCounts
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.tier import TierStats
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import WorkByDirection
from kvoffd.transfer.plan import Direction
from kvoffd_proto import admin as a
from kvoffd_proto import stats as s
from kvoffd_proto.build import with_commit
from kvoffd_proto.messages import PROTOCOL_VERSION, Role
from kvoffd_proto.verdict import judge

LISTED_POINTS = 8
"""Branch points of a namespace that are listed: those behind which the most stored tokens were computed again."""


@dataclass(eq=False)
class Statistics:
    """Asks all parts of the daemon for their figures."""

    config: Config
    clock: Callable[[], float]
    cache: Cache
    pool: Pool
    events: EventLog
    state: State
    gpus: Gpus
    copy_work: WorkByDirection
    jobs: Jobs
    sessions: SessionTable
    tier_supervisor: TierSupervisor
    traffic: TrafficCounts
    curve: HitRatioCurve
    branch_points: BranchPoints
    request_counts: RequestCounts
    lookups: Lookups
    loop_watch: LoopWatch
    health: HealthWatch

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self._settings = [s.SettingInfo(*one) for one in settings_in_force(self.config)]

    @answers(s.Stats)
    def stats(self, session: Session, message: s.Stats) -> s.StatsReply:
        return s.StatsReply(message.request_id, self.read())

    def read(self) -> s.DaemonStats:
        cache, traffic, curve, jobs = self.cache, self.traffic, self.curve, self.jobs
        usage = resource.getrusage(resource.RUSAGE_SELF)
        total = traffic.total()
        recent = traffic.in_last(MINUTE_S, total)
        hour_requests, hour_errors = self.request_counts.in_last_hour()
        level, causes = self.health.judge(recent)
        on_disk = sum(
            (disk.tier.bytes_by_namespace() for disk in self.tier_supervisor.disks if disk.tier is not None),
            Counter[bytes](),
        )
        found = s.DaemonStats(
            version=with_commit(__version__),
            protocol=PROTOCOL_VERSION,
            node=socket.gethostname(),
            policy=self.config.eviction_policy,
            pid=os.getpid(),
            uptime_seconds=self.clock() - self.started_at,
            ready=level is not a.HealthLevel.DOWN,
            health=level,
            health_problems=[s.Problem(cause.reason, cause.sentence) for cause in causes],
            sessions=self.sessions.engine_sessions,
            ended_sessions=dict(self.sessions.endings),
            leases=cache.leases.count,
            pinned_blocks=cache.blocks.pinned_blocks,
            requests=self.request_counts.requests,
            errors=dict(self.request_counts.errors),
            last_hour_requests=hour_requests,
            last_hour_errors=hour_errors,
            replies_dropped=dict(self.request_counts.replies_dropped),
            kv_events=self.events.published,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            resident_bytes=_resident_bytes(self.pool),
            lookup_seconds=self.lookups.times.counted(),
            loop_blocked_seconds=self.loop_watch.loop_blocked_seconds,
            loop_blocked_max_seconds=self.loop_watch.loop_blocked_max_seconds,
            cancelled_stores=jobs.cancelled_stores,
            pool=self._pool_stats(),
            store=self._copy_stats(Direction.STORE),
            load=self._copy_stats(Direction.LOAD),
            since_start=traffic.since_start(total),
            last_day=traffic.in_last(DAY_S, total),
            last_hour=traffic.in_last(HOUR_S, total),
            last_minute=recent,
            lifetime=traffic.lifetime(total),
            gone_namespaces=traffic.gone_namespaces,
            namespaces=self._namespace_rows(on_disk),
            integrity=s.IntegrityStats(
                checked_slots=cache.integrity.checked_slots,
                checked_bytes=cache.integrity.checked_bytes,
                mismatches=cache.integrity.mismatches,
                quarantined_slots=cache.life.quarantined_slots,
                unverified_slots=cache.blocks.unverified_slots,
            ),
            tiers=self._tiering_stats(),
            disks=list(map(_disk_stats, self.tier_supervisor.disks)),
            shared=self._shared_stats(),
            lent=self._lent_stats(),
            curve=curve.in_all(),
            curve_seen_bytes=curve.seen_bytes,
            ghost_entries=cache.policy.ghosts,
            policy_bytes=cache.policy.nbytes,
            learned=cache.policy.describe(),
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
            last_hour_loop_blocked=self.loop_watch.recent.in_last(HOUR_S),
            settings=self._settings,
            paying_off=None,
            verdict="",
        )
        paying_off, verdict = judge(found)
        return structs.replace(found, paying_off=paying_off, verdict=verdict)

    def _namespace_rows(self, on_disk: Counter[bytes]) -> list[s.NamespaceStats]:
        """Return a row for each namespace, the largest first. Of two whose ids are the same, one has a row: a name of a
        series must be unique."""
        quotas, engines = self.cache.quotas, self._engines()
        by_id = {s.namespace_id(one.fingerprint): one for one in self.cache.namespaces.values()}
        shown = sorted(by_id.values(), key=attrgetter("ready_bytes"), reverse=True)
        return [
            s.NamespaceStats(
                id=s.namespace_id(one.fingerprint),
                model=one.label,
                fingerprint=one.fingerprint.hex(),
                disk_bytes=on_disk[one.fingerprint],
                quota_bytes=quotas.get(one.fingerprint),
                engines=engines[one.fingerprint],
                curve=curve,
                branching=self._branching(one),
                of_bench=one.of_bench,
                world_size=one.world_size,
                ready_blocks=one.ready_blocks,
                ready_bytes=one.ready_bytes,
                invalidated_blocks=one.counters.invalidated_blocks,
                prefill_tokens_per_second=one.counters.prefill_tokens_per_second,
                **self.traffic.of_namespace(one),  # the fields of ``Traffic``, its base class
            )
            for one, curve in zip(shown, self.curve.of_namespaces(shown), strict=True)
        ]

    @answers(s.ListBranchPoints)
    def list_branch_points(self, session: Session, message: s.ListBranchPoints) -> s.BranchPointsListed:
        found: list[s.ListedBranchPoint] = []
        for namespace in self.cache.namespaces.values():
            seen_tokens, points = self.branch_points.of(namespace)
            found += [
                s.ListedBranchPoint(*_branch_fields(point, seen_tokens), namespace.fingerprint, list(point.examples))
                for point in points[:LISTED_POINTS]
            ]
        return s.BranchPointsListed(message.request_id, found)

    def _branching(self, namespace: Namespace) -> s.BranchPoint | None:
        """Return the branch point behind which the most stored tokens were computed again; None if there is none."""
        seen_tokens, points = self.branch_points.of(namespace)
        return s.BranchPoint(*_branch_fields(points[0], seen_tokens)) if points else None

    def _engines(self) -> defaultdict[bytes, list[str]]:
        found = defaultdict[bytes, list[str]](list)
        for session in self.sessions:
            if session.role is Role.SCHEDULER:
                pid = f", pid {session.process.pid}" if session.process.pid else ""
                for fingerprint in session.namespaces:
                    found[fingerprint].append(s.engine_name(session.name, session.role) + pid)
        return found

    def _pool_stats(self) -> s.PoolStats:
        cache, pinning = self.cache, self.gpus.pinning
        usage, pool = cache.life.usage, self.pool
        return s.PoolStats(
            size_bytes=pool.pool_bytes,
            bytes={state: getattr(usage, state) for state in ("free", "writing", "ready", "dropped", "quarantined")},
            usable_bytes=pool.pool_bytes - usage.quarantined,
            pinned_bytes=usage.pinned,
            retained_bytes=cache.order.retentions.retained_bytes,
            pinned_for_gpu_bytes=pinning.pinned_bytes,
            unpinnable_bytes=pinning.refused_bytes,
            pinning_gpu_bytes=pinning.gpu_bytes,
            index_bytes=cache.blocks.nbytes,
            numa_remote_slots=pool.slots.slots_on_other_nodes,
            integrated_gpus=self.gpus.integrated,
            at_the_end=pool.at_the_end,
            memory=pool.kind.value,
            huge_page_bytes=pool.pages.huge_bytes,
            page_slowdown=pool.pages.slowdown,
        )

    def _copy_stats(self, direction: Direction) -> s.CopyStats:
        work, ended = self.copy_work[direction], self.jobs.counters[direction]
        recent = self.jobs.in_last_hour(direction)
        return s.CopyStats(
            jobs=ended.jobs,
            failed_jobs=ended.failed_jobs,
            bytes=ended.bytes,
            busy_seconds=work.busy_seconds,
            queued_jobs=work.queued_jobs,
            running_jobs=work.running_jobs,
            checksum_seconds=work.checksum_seconds,
            refused_batches=work.refused_batches,
            last_hour_jobs=recent.jobs,
            last_hour_failed_jobs=recent.failed_jobs,
        )

    def _tiering_stats(self) -> s.TieringStats | None:
        if (tiering := self.tier_supervisor.tiering) is None:
            return None
        disks, writer = tiering.disks, tiering.disk_writer
        return s.TieringStats(
            written_blocks=writer.written_blocks,
            written_bytes=writer.written_bytes,
            promoted_blocks=sum(one.promoted_blocks for one in disks),
            promoted_bytes=sum(one.promoted_bytes for one in disks),
            promotions_waiting=sum(one.unended_blocks for one in disks),
            promotions_failed=dict(sum((one.failures for one in disks), Counter[str]())),
            promotions_unused=sum(one.unused_blocks for one in disks),
            writes_waiting=len(writer.waiting),
            not_written=dict(writer.not_written),
            write_budget_left_bytes=writer.budget.left_bytes,
            write_mode=writer.mode.value,
            promotion_bytes_per_second=sum(one.reads.speed.measured for one in disks),
        )

    def _shared_stats(self) -> list[s.SharedStats]:
        if (tiering := self.tier_supervisor.tiering) is None:
            return []
        unshared = len(self.state.generations.unshared_of(self.cache.namespaces))
        found: list[s.SharedStats] = []
        for source in tiering.stores:
            tier = source.tier
            # One of many peers is shown while it answers: requests may name what is gone.
            if not isinstance(tier, SharedTier) or (tier.may_be_away and not tier.available()):
                continue
            found.append(
                filled(
                    s.SharedStats,
                    tier.stats(),  # sizes, queues and counters: see TierStats
                    url=tier.name,
                    up=tier.available(),
                    breaker_trips=tier.breaker.opened,
                    promotions_failed=dict(source.failures),
                    promotions_unused=source.unused_blocks,
                    not_written=dict(source.writer.not_written),
                    full=tier.lifetime_bytes > 0,
                    write_mode=source.writer.mode.value,
                    servers=[s.SharedServer(*server) for server in tier.servers],
                    unshared_namespaces=unshared,
                )
            )
        return found

    def _lent_stats(self) -> s.LentStats | None:
        peers = self.tier_supervisor.peers
        if (server := peers.server) is None or (helper := peers.helper) is None:
            return None
        return s.LentStats(
            asked_keys=server.asked_keys,
            found_keys=server.found_keys,
            leases=server.leases,
            up=helper.up,
            blocks=server.lent_blocks,
            bytes=server.served_bytes,
            refused_requests=server.refused,
            refused_handshakes=helper.refused_handshakes,
            pinned_bytes=server.pinned_bytes,
        )


def _branch_fields(point: Branch, seen_tokens: int) -> tuple[int, int, int, int]:
    """Return the fields of a branch point on the wire."""
    return point.at_tokens, round(point.prompts), round(point.repeated_tokens), seen_tokens


def _disk_stats(disk: Disk) -> s.DiskStats:
    tier = disk.tier
    found = tier.stats() if tier is not None else TierStats(disk.size.size_bytes)
    state = s.DiskState.HANGING if tier is not None and tier.hangs else disk.state
    return filled(
        s.DiskStats,
        found,  # sizes, queues and counters: see TierStats
        directory=disk.size.directory,
        up=state is s.DiskState.SERVING,
        state=state.value,
        problem=disk.problem,
        direct=tier is not None and tier.direct,
        oldest_seconds=0.0 if tier is None else tier.oldest_seconds,
        lifetime_written_bytes=0 if tier is None else tier.lifetime_written_bytes,
    )


def _resident_bytes(pool: Pool) -> int:
    """Return the daemon's own memory: resident pages without the pool and shared ones (its table, engines' memory).

    0 without /proc, as in some sandboxes.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            _, resident, shared, *_ = statm.read().split()
    except OSError:
        return 0
    own_bytes = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return max(0, own_bytes - pool.pool_bytes) if pool.kind is MemoryKind.PRIVATE else own_bytes
