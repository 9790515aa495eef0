"""What an operator should see to, and how well the daemon works for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.server.descriptors import open_descriptors
from kvoffd_proto import admin as a
from kvoffd_proto.cuda import descriptor_limits
from kvoffd_proto.stats import Window
from kvoffd_proto.units import format_count, format_duration, format_size, plural

if TYPE_CHECKING:
    from kvoffd.server.service import Service

PINNED_SHARE = 0.85
"""From this share of the usable pool on, pinned bytes leave too little for stores. Less than leases may pin."""
LATE_SHARE, LEAST_LATE = 0.05, 20
"""So many late lookups in the last minute, and this share of all, are a problem."""
DESCRIPTORS_SHARE = 0.8
"""Of the files that the process may open. What sessions attach is bounded by half of them."""


def health_reply(service: Service, message: a.Health) -> a.HealthReply:
    """The daemon's health. That it answers at all says that its loop does. Needs no session."""
    traffic = service.traffic
    level, causes = health_of(service, traffic.last_minute(traffic.total()))
    return a.HealthReply(message.request_id, level, causes)


def health_of(service: Service, recent: Window) -> tuple[a.HealthLevel, list[a.HealthProblem]]:
    """The level, and its causes, the worst first. ``recent``: the last minute."""
    causes = [a.HealthProblem("gpu", sentence) for sentence in service.memory.gpus.problems]
    if lost := service.cache.quarantined_slots:
        causes.append(
            a.HealthProblem(
                "pool_corrupt",
                f"{lost} slot{plural(lost)} of the pool did not match the checksum. The blocks are dropped "
                "and the slots not used any more; check the machine's memory (dmesg, edac-util). A new pool uses all "
                "of its memory again.",
            )
        )
    if service.pool.removed:
        causes.append(
            a.HealthProblem(
                "pool_file_removed",
                f"The pool file {service.config.pool_file} was removed. Blocks are served until the daemon stops; the "
                "next one starts empty, with a new file. Keep cleaners of temporary files away from it.",
            )
        )
    causes += [a.HealthProblem(reason, sentence) for reason, sentence in service.tiers.problems]
    causes += _crowded(service, recent)
    causes += _late(recent)
    causes += _full(service)
    causes += _descriptors()
    if service.sockets_problem:
        causes.insert(0, a.HealthProblem("sockets_lost", service.sockets_problem))
    if service.http_problem:
        causes.append(a.HealthProblem("http_unavailable", service.http_problem))
    if service.sessions.stopping:
        return a.HealthLevel.DOWN, [a.HealthProblem("stopping", "The daemon is stopping."), *causes]
    return (a.HealthLevel.DEGRADED if causes else a.HealthLevel.OK), causes


def _crowded(service: Service, recent: Window) -> list[a.HealthProblem]:
    """What keeps stores from the pool."""
    cache = service.cache
    causes: list[a.HealthProblem] = []
    usage = cache.usage
    usable_bytes = max(1, cache.slots.pool_bytes - usage.quarantined)
    if usage.pinned >= PINNED_SHARE * usable_bytes:
        causes.append(
            a.HealthProblem(
                "pool_pinned",
                f"{format_size(usage.pinned)} of {format_size(usable_bytes)} of the pool are pinned"
                f"{_most_pinned(service)}: stores find no space. `kvoffd-cli clients` says who holds what. "
                "Enlarge the pool, or end the sessions that hold blocks and do not load them.",
            )
        )
    if dropped := recent.no_space_keys:
        causes.append(
            a.HealthProblem(
                "stores_without_space",
                f"In the last {format_duration(recent.seconds)} the pool had no space for {format_count(dropped)} "
                f"block{plural(dropped)} that engines offered. It is too small, or too much is pinned.",
            )
        )
    return causes


def _late(recent: Window) -> list[a.HealthProblem]:
    """Lookups whose answers engines did not wait for."""
    late, lookups = recent.late_lookups, max(recent.lookups, recent.late_lookups)
    if late < LEAST_LATE or late <= LATE_SHARE * lookups:
        return []
    return [
        a.HealthProblem(
            "lookups_late",
            f"In the last {format_duration(recent.seconds)} engines did not get the answers of {format_count(late)} of "
            f"{format_count(lookups)} lookups in the time that computing the prompts takes, so they computed them. The "
            "daemon or the engines get too little CPU: give the daemon a core of its own (CPUAffinity= in its systemd "
            "unit), or run less on this machine.",
        )
    ]


def _full(service: Service) -> list[a.HealthProblem]:
    """Sessions that further engines lack."""
    most = service.config.max_sessions
    if service.sessions.of_engines < most:
        return []
    return [
        a.HealthProblem(
            "sessions_taken",
            f"All {most} sessions are taken: further engines are refused, and run without the cache. `kvoffd-cli "
            "clients` says who has them; close some, or raise max_sessions.",
        )
    ]


def _descriptors() -> list[a.HealthProblem]:
    """Few descriptors left: libzmq ends the process where it has none for a connection."""
    open_files, most = open_descriptors(), descriptor_limits()[0]
    if open_files <= DESCRIPTORS_SHARE * most:
        return []
    return [
        a.HealthProblem(
            "descriptors",
            f"{format_count(open_files)} of the {format_count(most)} files that the daemon may open are open. With the "
            "last one it ends, and starts again. Something keeps connections open or registers memory in many pieces: "
            "`ss -xp` and `kvoffd-cli clients` say who. End it, or raise the limit (LimitNOFILE= in the systemd "
            "unit, ulimit -n).",
        )
    ]


def _most_pinned(service: Service) -> str:
    sessions = {session.id: session for session in service.sessions}
    by_session = {session_id: service.cache.leases_of(session_id).nbytes for session_id in sessions}
    most = max(by_session, key=by_session.__getitem__, default=None)
    if most is None:
        return ""
    name = sessions[most].name or sessions[most].role or "new"
    return f", {format_size(by_session[most])} by session {most} ({name})" if by_session[most] else ""
