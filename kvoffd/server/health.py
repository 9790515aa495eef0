"""The daemon's health: its level, and the problems that an operator should fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvoffd.observe.meters import MINUTE_S
from kvoffd.system.limits import open_descriptors
from kvoffd_proto import admin as a
from kvoffd_proto.cuda import descriptor_limits
from kvoffd_proto.stats import LATE_SHARE, MIN_LATE, NO_SPACE_CAUSES, Window, namespace_id
from kvoffd_proto.units import format_count, format_duration, format_size, plural

if TYPE_CHECKING:
    from kvoffd.server.service import Service

PINNED_SHARE = 0.85
"""Share of the usable pool at which pinned bytes leave too little for stores. Less than leases may pin."""
DESCRIPTORS_SHARE = 0.8
"""Share of the limit of open files that is a problem. Sessions may attach up to half of the limit."""


def health_reply(service: Service, message: a.Health) -> a.HealthReply:
    """Reply to a health request, which needs no session. A reply also proves that the loop runs."""
    traffic = service.traffic
    level, causes = health_of(service, traffic.in_last(MINUTE_S, traffic.total()))
    return a.HealthReply(message.request_id, level, causes)


def health_of(service: Service, recent: Window) -> tuple[a.HealthLevel, list[a.HealthProblem]]:
    """Return the level and its causes, the worst first. ``recent``: traffic of the last minute."""
    causes = [a.HealthProblem(reason, sentence) for reason, sentence in _problems(service, recent)]
    if service.sessions.stopping:
        return a.HealthLevel.DOWN, [a.HealthProblem("stopping", "The daemon is stopping."), *causes]
    if service.sockets_problem:
        return a.HealthLevel.DOWN, causes
    return (a.HealthLevel.DEGRADED if causes else a.HealthLevel.OK), causes


def _problems(service: Service, recent: Window) -> Iterator[tuple[str, str]]:
    """Yield a word for each problem's kind, and a sentence that says what to do."""
    if service.sockets_problem:
        yield "sockets_lost", service.sockets_problem
    for sentence in service.memory.gpus.problems:
        yield "gpu", sentence
    if lost := service.cache.life.quarantined_slots:
        yield (
            "pool_corrupt",
            f"{lost} slot{plural(lost)} of the pool did not match the checksum. The blocks were dropped and the slots "
            "are not used any more; check the machine's memory (dmesg, edac-util). A new pool uses all of its memory "
            "again.",
        )
    if service.pool.removed:
        yield (
            "pool_file_removed",
            f"The pool file {service.config.pool_file} was removed. Blocks are served until the daemon stops; the next "
            "one starts empty, with a new file. Keep cleaners of temporary files away from it.",
        )
    yield from service.tier_supervisor.problems
    usage, over = service.cache.life.usage, format_duration(recent.seconds)
    usable_bytes = max(1, service.cache.slots.pool_bytes - usage.quarantined)
    if usage.pinned >= PINNED_SHARE * usable_bytes:
        yield (
            "pool_pinned",
            f"{format_size(usage.pinned)} of {format_size(usable_bytes)} of the pool are pinned"
            f"{_most_pinned(service)}: stores find no space. `kvoffd-cli clients` shows what each session pins. "
            "Enlarge the pool, or end the sessions that pin blocks without loading them.",
        )
    if dropped := recent.no_space_keys:
        cause = max(recent.no_space_causes, key=recent.no_space_causes.__getitem__)
        whose, advice = "", "Enlarge the pool."
        if cause == "pinned":
            whose, advice = _most_pinned(service), "`kvoffd-cli clients` shows what each session pins."
        elif cause == "quota":
            whose, advice = _full_quota(service), "`kvoffd-cli namespaces quota` raises it."
        elif cause == "unregistered":
            whose = _missing_ranks(service)
            advice = "Nothing is stored without them: the logs of the daemon and of the engine's workers say why."
        yield (
            "stores_without_space",
            f"In the last {over}, {format_count(dropped)} block{plural(dropped)} that engines offered were not stored: "
            f"{NO_SPACE_CAUSES[cause]}{whose}. {advice}",
        )
    late, lookups = recent.late_lookups, max(recent.lookups, recent.late_lookups)
    if late >= MIN_LATE and late > LATE_SHARE * lookups:
        yield (
            "lookups_late",
            f"In the last {over}, {format_count(late)} of {format_count(lookups)} lookups took longer than computing "
            "the prompts, so engines computed them. The daemon or the engines get too little CPU: give the daemon a "
            "core of its own (CPUAffinity= in its systemd unit), or run less on this machine.",
        )
    if service.sessions.of_engines >= (most := service.config.max_sessions):
        yield (
            "sessions_taken",
            f"All {most} sessions are taken: further engines are refused, and run without the cache. `kvoffd-cli "
            "clients` lists them; close some, or raise max_sessions.",
        )
    # libzmq aborts the process if it has no descriptor for a connection.
    open_files, most_files = open_descriptors(), descriptor_limits()[0]
    if open_files > DESCRIPTORS_SHARE * most_files:
        yield (
            "descriptors",
            f"{format_count(open_files)} of the {format_count(most_files)} files that the daemon may open are open. At "
            "the limit it crashes and restarts. A client keeps many connections open, or registers memory in many "
            "pieces: `ss -xp` and `kvoffd-cli clients` show which. End it, or raise the limit (LimitNOFILE= in the "
            "systemd unit, ulimit -n).",
        )
    if (file := service.state.file).is_tried and file.problem:
        yield (
            "state_unwritable",
            f"{file.problem}. `clear`, resets and quotas report errors, and a kill may undo them.",
        )


def _full_quota(service: Service) -> str:
    """Return the namespace whose quota refused the most blocks, as a part of a sentence."""
    one = max(service.cache.namespaces.values(), key=lambda one: one.counters.no_space["quota"], default=None)
    quota_bytes = None if one is None else service.cache.quotas.get(one.fingerprint)
    if one is None or quota_bytes is None:  # it was forgotten, or its quota was removed
        return ""
    return f" ({one.label} {namespace_id(one.fingerprint)}, at most {format_size(quota_bytes)})"


def _missing_ranks(service: Service) -> str:
    """Return the ranks of a namespace that have not registered, as a part of a sentence."""
    for one in service.cache.namespaces.values():
        missing = [rank for rank, sizes in enumerate(one.shard_bytes) if sizes is None]
        if 0 < len(missing) < one.world_size:
            ranks = ", ".join(map(str, missing))
            return f" ({one.label} {namespace_id(one.fingerprint)} lacks rank{plural(len(missing))} {ranks})"
    return ""


def _most_pinned(service: Service) -> str:
    """Return the session that pins the most, as a part of a sentence."""
    found = [
        (service.cache.leases.of(one.id).nbytes, one.id, one.name or one.role or "new") for one in service.sessions
    ]
    nbytes, number, name = max(found, default=(0, 0, ""))
    return f", {format_size(nbytes)} by session {number} ({name})" if nbytes else ""
