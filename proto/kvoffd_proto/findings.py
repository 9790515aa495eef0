"""Checks of ``kvoffd-cli doctor``: functions over facts gathered beforehand, so that each can be tested.

KINDS has the meaning and the fix of each finding; a check adds the evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from shlex import quote
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvoffd_proto import stats as s
from kvoffd_proto import verdict
from kvoffd_proto.admin import NamespaceInfo, SessionInfo
from kvoffd_proto.engines import engines_of
from kvoffd_proto.messages import BENCH_LABEL, Role
from kvoffd_proto.namespace_differences import explain, fields_of_description, how_they_differ
from kvoffd_proto.stats import engine_name, namespace_name
from kvoffd_proto.units import (
    count_blocks,
    exact_size,
    format_count,
    format_duration,
    format_size,
    parse_duration,
    percent,
    printable,
)

MIN_ERRORS = 20
"""Least number of failed requests, jobs, keys or blocks for a finding."""
MANY_POINTS = 10.0
"""Percentage points of prompts' tokens, or of the hit ratio, that justify a warning."""
MIN_BRANCHES = 20
"""Least number of prompts that differ in one place for a finding."""
LRU_POINTS = 2.0
"""Points by which lru must win: more than its estimate errs."""
MAX_WRITTEN_PER_READ = 10.0
"""More bytes written per byte read are too many."""
LATE_TIER_SHARE, ERROR_SHARE = 0.1, 0.01
"""Shares of late blocks in tiers, and of failed requests and jobs, that justify a warning."""
LIMITED_SHARE = 0.1
"""Share of the blocks for the disks that the daily write limit may exclude."""
THRASH_SHARE = 0.2
"""Share of looked up keys that had been evicted."""
LOOP_BLOCKED_S = 0.05
"""Largest normal 99th percentile of the event loop's delay."""
AT_QUOTA = 0.9
"""Share of its quota from which a namespace has used it up."""
SHORT_LIFE_S = 3600.0
"""A full disk that is overwritten in less time is too small."""
LONG_ENOUGH_S = 3600.0
"""Least uptime for advice."""
OVERSIZED, SPARE = 2.0, 1.25
"""Sizes of a pool, in the bytes asked for: from the first on it is too large; the second is enough."""
QUOTAS = (1 / 8, 1 / 4, 1 / 2)
"""Quotas that may help others, as parts of what a namespace has."""
DAY_S = 86_400.0
CONNECTING_S = 60.0
"""Largest normal delay between an engine's scheduler and its workers."""
ENGINE_PREFIX = "vllm:"
"""Beginning of the names of vLLM's engines."""
HUGE_PAGES_FROM_BYTES = 8 << 30
"""Size of a pool from which small pages matter."""
REMOTE_SHARE = 0.1
"""Share of slots on another NUMA node than their GPU that justifies a finding."""
AGREE = 1.1
"""Tolerance between counters of engine and daemon, which are not read at the same time."""


class Kind(NamedTuple):
    """A kind of finding: its level, its meaning, and the command or setting that fixes it.

    ``error``: something does not work. ``warning``: the cache could work better. ``info``: worth knowing. ``fix`` goes
    through ``str.format``: a check fills in ``{}``, and other braces are doubled.
    """

    level: str
    meaning: str
    fix: str


_RESTART = "; then restart the daemon"
_LOG = "the daemon's log"
_CONNECTOR = """vllm serve MODEL --kv-transfer-config '{{"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}}'"""
_CPU = "a core of its own for the daemon (CPUAffinity= in its systemd unit, or taskset)" + _RESTART

KINDS = {
    # The daemon. Its own health reports have their own sentences.
    "errors": Kind("warning", "Requests of a client are refused.", _LOG),
    "failed_stores": Kind("warning", "These blocks will be recomputed when they are needed.", _LOG),
    "failed_loads": Kind("warning", "Engines computed these blocks.", _LOG),
    "loop_blocked": Kind("warning", "Lookups are delayed, and engines do not wait for them.", _LOG),
    "lookups_late": Kind("warning", "Engines computed instead: they or the daemon have too little CPU.", _CPU),
    "no_engine": Kind("info", "The cache is not in use.", _CONNECTOR),
    "engine_refused": Kind("error", "This engine computes all prompts.", "do as the problem says"),
    "halves_apart": Kind(
        "warning",
        "Unless it sleeps, its other processes look for a daemon elsewhere, and it stores and loads nothing. "
        "Its log says more.",
        "one directory of the daemon for all processes of the engine: mount it for each",
    ),
    "workers_missing": Kind("warning", "Blocks become ready only with all ranks.", "kvoffd-cli clients --all"),
    "partial_blocks": Kind("warning", "A worker does not store, or workers are on several machines.", _LOG),
    # The machine.
    "swapped": Kind("warning", "Loads from swap take longer than computing.", "swapoff -a"),
    "unpinnable": Kind("warning", "GPUs copy these slowly.", "LimitMEMLOCK=infinity or ulimit -l unlimited" + _RESTART),
    "numa": Kind("info", "They are copied more slowly: a node's part of the pool is full.", "numactl --hardware"),
    "integrated_gpu": Kind(
        "info",
        "vLLM does not start if less is free than its part of the memory (0.92 by default).",
        "a lower --gpu-memory-utilization of vLLM, or a smaller pool_size" + _RESTART,
    ),
    "huge_pages": Kind(
        "info",
        "The daemon starts and copies more slowly, and page tables are larger.",
        "{}" + _RESTART,
    ),
    # Tiers.
    "disk_space": Kind("warning", "Writes will fail when the file system is full.", "df -h"),
    "disk_too_small": Kind("info", "Blocks are evicted before they are reused.", "{}" + _RESTART),
    "tier_late": Kind("warning", "Engines computed instead: tiers are slow or overloaded.", "{}"),
    "tier_down": Kind("warning", "Engines computed what these may have had.", "kvoffd-cli stats tiers"),
    "disk_writes": Kind("warning", "The drives wear out for little benefit.", "{}" + _RESTART),
    "disk_write_limit": Kind("info", "They are recomputed if needed.", "{}, if the SSDs are rated for it" + _RESTART),
    # Namespaces.
    "not_shared": Kind("warning", "To share, make these settings equal.", "kvoffd-cli namespaces diff {}"),
    "left_behind": Kind(
        "warning",
        "Engines do not find these blocks. Drop them if the change was intended, else undo it.",
        "kvoffd-cli clear {}",
    ),
    # Value.
    "pool_too_small": Kind("info", "More memory would save more prefill.", "{}" + _RESTART),
    "lru_is_better": Kind("info", "The policy does not fit this traffic.", 'eviction_policy = "lru"' + _RESTART),
    "thrash": Kind("warning", "Blocks are evicted before they are reused.", "{}"),
    "pool_too_large": Kind("info", "The rest of the memory has no benefit now.", "{}" + _RESTART),
    "starving": Kind("warning", "Its quota is too low.", "kvoffd-cli namespaces quota {}"),
    "crowding": Kind("warning", "Its blocks take the space of others.", "kvoffd-cli namespaces quota {}"),
    "prompts_differ": Kind("info", "The same tokens are computed again and again.", "kvoffd-cli namespaces reuse"),
    # Engines.
    "engine_unreachable": Kind("warning", "Its counters cannot be compared.", "curl {}"),
    "engine_without": Kind(
        "warning",
        "It runs without KvoffdConnector, or has had no request yet.",
        _CONNECTOR,
    ),
    "engine_away": Kind("warning", "It computes all prompts. Its log says why.", "set the engine's KVOFFD_DIRECTORY"),
    "engine_late": Kind("warning", "The daemon or this engine has too little CPU.", _CPU),
    "hits_disagree": Kind("info", "One was restarted, or the engine uses another daemon.", "kvoffd-cli clients"),
}  # fmt: skip
LEVELS = ("error", "warning", "info")


class Finding(msgspec.Struct, frozen=True):
    """A finding for an operator. ``check`` is its kind, a word for scripts.

    ``weight``, 0 to 1, orders findings of one level: a share of lookups, tokens or bytes, or a constant. ``gain``: the
    percentage points of the prompts' tokens that engines would compute no more if the fix were applied, as estimated
    for the time since the daemon's start; None if unknown.
    """

    level: str
    check: str
    evidence: str
    meaning: str
    fix: str
    weight: float = 0.0
    gain: float | None = None


def finding(
    check: str, evidence: str, weight: float = 0.1, fix: str = "", level: str = "", gain: float | None = None
) -> Finding:
    """Return a finding with its evidence; ``fix`` is inserted into the fix of its kind."""
    kind = KINDS[check]
    return Finding(level or kind.level, check, evidence, kind.meaning, kind.fix.format(fix), min(1.0, weight), gain)


class EngineMetrics(NamedTuple):
    """An engine's /metrics, summed over its data-parallel ranks; ``problem``: why they cannot be read."""

    metrics: Mapping[str, float] = MappingProxyType({})
    problem: str = ""
    age_seconds: float | None = None
    """Age of its process; None if unknown."""

    def of(self, name: str) -> float:
        return self.metrics.get(f"vllm:{name}", 0.0)


@dataclass(frozen=True)
class Facts:
    """Input of the checks. Sessions and the machine are unknown over HTTP."""

    stats: s.DaemonStats
    namespaces: Sequence[NamespaceInfo] = ()
    sessions: Sequence[SessionInfo] | None = None
    engines: Mapping[str, EngineMetrics] = field(default_factory=dict)
    swapped_bytes: int = 0
    """Swapped memory of the daemon, including the pool."""
    huge_pages: str = ""
    """Value of ``shmem_enabled``: ``never``, ``advise``, ..."""
    disks_free_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free bytes of the visible disks by directory."""

    def setting(self, name: str) -> str:
        return next((one.value for one in self.stats.settings if one.name == name), "")

    def has(self, reason: str) -> bool:
        """Return whether the daemon's own health reports it already."""
        return any(one.reason == reason for one in self.stats.health_problems)

    @property
    def engine_count(self) -> int | None:
        return None if self.sessions is None else len(engines_of(self.sessions))

    @property
    def counted(self) -> list[s.NamespaceStats]:
        """Statistics of the namespaces of engines, without those of benches."""
        return [one for one in self.stats.namespaces if not one.of_bench]

    @property
    def known(self) -> list[NamespaceInfo]:
        """Descriptions of these namespaces."""
        return [one for one in self.namespaces if not one.label.startswith(BENCH_LABEL)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _whole_mib(nbytes: float) -> str:
    """Return a size for a setting, at least a MiB: 0 may mean no limit."""
    return exact_size(max(1 << 20, round(nbytes) >> 20 << 20))


# --- the daemon as it is now ------------------------------------------------------------------------


def daemon_health(facts: Facts) -> Iterator[Finding]:
    for cause in facts.stats.health_problems:
        level = "error" if cause.reason == "pool_corrupt" or not facts.stats.ready else "warning"
        yield Finding(level, cause.reason, printable(cause.sentence), "", "", 1.0)


def late_lookups(facts: Facts) -> Iterator[Finding]:
    late, lookups = facts.stats.last_hour.late_lookups, facts.stats.last_hour.lookups
    if late >= s.MIN_LATE and late > s.LATE_SHARE * lookups and not facts.has("lookups_late"):
        counts = f"{format_count(late)} of {format_count(lookups)} lookups"
        evidence = f"In the last hour engines did not wait for {counts}."
        yield finding("lookups_late", evidence, _share(late, lookups))


def failures(facts: Facts) -> Iterator[Finding]:
    stats = facts.stats
    refused = sum(stats.last_hour_errors.values())
    if refused >= MIN_ERRORS and refused > ERROR_SHARE * stats.last_hour_requests:
        counts = sorted(stats.last_hour_errors.items())
        named = ", ".join(f"{format_count(count)} {printable(name)}" for name, count in counts)
        yield finding("errors", f"In the last hour the daemon answered with errors: {named}.", 0.5)
    for name, copies in failing_copies(stats):
        share = f"{format_count(copies.last_hour_failed_jobs)} of {format_count(copies.last_hour_jobs)}"
        evidence = f"In the last hour {share} {name} jobs failed."
        causes = stats.last_hour.no_space_causes if name == "store" else {}
        for cause, lost in sorted(causes.items(), key=lambda item: -item[1])[:1]:
            evidence += f" {count_blocks(lost)} had no space: {s.NO_SPACE_CAUSES.get(cause, printable(cause))}."
        yield finding(f"failed_{name}s", evidence, _share(copies.last_hour_failed_jobs, copies.last_hour_jobs))


def failing_copies(stats: s.DaemonStats) -> Iterator[tuple[str, s.CopyStats]]:
    """Yield stores and loads if many failed in the last hour, but not stores refused mostly by quotas, which health
    reports."""
    causes = stats.last_hour.no_space_causes
    mostly_quotas = bool(causes) and max(causes, key=causes.__getitem__) == "quota"
    for name, copies in (("store", stats.store), ("load", stats.load)):
        if name == "store" and mostly_quotas:
            continue
        failed = copies.last_hour_failed_jobs
        if failed >= MIN_ERRORS and failed > ERROR_SHARE * copies.last_hour_jobs:
            yield name, copies


def blocked_loop(facts: Facts) -> Iterator[Finding]:
    beats = facts.stats.last_hour_loop_blocked
    late, longest = beats.quantile(0.99), format_duration(facts.stats.loop_blocked_max_seconds)
    if beats.count >= verdict.MIN_LOOKUPS and late >= LOOP_BLOCKED_S:
        evidence = f"In the last hour 1 % of the delays of the daemon's event loop were {format_duration(late)} or more"
        yield finding("loop_blocked", f"{evidence}; the longest since the start was {longest}.", 0.3)


def connected_clients(facts: Facts) -> Iterator[Finding]:
    if facts.sessions is None:
        return
    engines = [one for one in facts.sessions if one.role in (Role.SCHEDULER, Role.WORKER)]
    if not engines and not facts.engines:
        yield finding("no_engine", "No engine is connected.", 0.9)
    for one in engines:
        if one.problem:
            yield finding("engine_refused", f"{printable(one.name)} is not registered: {printable(one.problem)}", 1.0)
    yield from _missing_workers(facts, engines)


def _missing_workers(facts: Facts, sessions: Sequence[SessionInfo]) -> Iterator[Finding]:
    """Find namespaces of which an engine has fewer workers than ranks; those of half an engine are ``halves_apart``."""
    halves = {number for numbers in _half_engines(sessions).values() for number in numbers}
    for info in facts.known:
        own = [one for one in sessions if info.namespace in one.namespaces and one.session_id not in halves]
        all_workers = sum(one.role == Role.WORKER for one in own)
        has_scheduler = len(own) > all_workers
        if not has_scheduler or any(one.problem for one in own):
            continue
        # An engine's workers are known by its scheduler's name. If none have one, all may be those of a single engine.
        of_engines = (engine.workers for engine in engines_of(own) if engine.schedulers and engine.workers)
        workers = min(of_engines, default=all_workers)
        if workers < info.world_size and min(one.age_seconds for one in own) > CONNECTING_S:
            name = namespace_name(info.label, info.namespace)
            evidence = f"{name}: {workers} of {info.world_size} workers of an engine are connected."
            yield finding("workers_missing", evidence, 1.0)


def _half_engines(sessions: Sequence[SessionInfo]) -> dict[str, list[int]]:
    """Return vLLM's engines of which only the scheduler, or only workers, are connected, with their sessions' ids.

    Only of vLLM's is it known that both have one name.
    """
    found = defaultdict[str, list[SessionInfo]](list)
    for one in sessions:
        if one.name.startswith(ENGINE_PREFIX):
            found[engine_name(one.name, one.role)].append(one)
    return {
        name: [one.session_id for one in own]
        for name, own in found.items()
        if len({one.role for one in own}) == 1
        and min(one.age_seconds for one in own) > CONNECTING_S
        and not any(one.problem for one in own)
    }


def halves_apart(facts: Facts) -> Iterator[Finding]:
    engines = {one.session_id: one for one in facts.sessions or () if one.role in (Role.SCHEDULER, Role.WORKER)}
    for name, own in _half_engines([*engines.values()]).items():
        half = "its scheduler is" if engines[own[0]].role == Role.SCHEDULER else "workers are"
        yield finding("halves_apart", f"Of the engine {printable(name)} only {half} connected.", 1.0)


def partial_blocks(facts: Facts) -> Iterator[Finding]:
    """Find namespaces of which blocks were dropped, if any blocks were in the last hour."""
    recent = facts.stats.last_hour.partial_blocks
    if recent < MIN_ERRORS:
        return
    for one in facts.counted:
        share = _share(one.partial_blocks, one.partial_blocks + one.stored_blocks)
        if one.partial_blocks >= MIN_ERRORS and share > ERROR_SHARE:
            evidence = (
                f"{namespace_name(one.model, one.id)}: not all ranks stored their part of "
                f"{count_blocks(one.partial_blocks)} since the start, which were dropped. In the last hour "
                f"{format_count(recent)} of all namespaces were."
            )
            yield finding("partial_blocks", evidence, share)


# --- the machine ------------------------------------------------------------------------------------


def memory(facts: Facts) -> Iterator[Finding]:
    if facts.swapped_bytes:
        yield finding("swapped", f"{format_size(facts.swapped_bytes)} of the daemon's memory are swapped out.", 0.8)
    yield from _huge_pages(facts)
    pool = facts.stats.pool
    # A block has a slot for each rank; blocks of removed namespaces count as one.
    stored_slots = facts.stats.since_start.stored_blocks
    stored_slots += sum(one.stored_blocks * (one.world_size - 1) for one in facts.counted)
    if pool.unpinnable_bytes:
        evidence = f"CUDA refused to page-lock {format_size(pool.unpinnable_bytes)} of {format_size(pool.size_bytes)}."
        yield finding("unpinnable", evidence, 0.6)
    if pool.integrated_gpus:
        yield finding(
            "integrated_gpu", f"The pool's {format_size(pool.size_bytes)} are taken from the GPU's memory.", 0.5
        )
    if pool.numa_remote_slots > REMOTE_SHARE * stored_slots > 0:
        count = format_count(pool.numa_remote_slots)
        yield finding("numa", f"Since the start {count} slots were taken on another NUMA node than their GPU.", 0.2)


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    """Yield a finding of a large pool that has mostly small pages, with what would give it huge ones."""
    pool, file = facts.stats.pool, facts.setting("pool_file")
    if not pool.memory or pool.size_bytes < HUGE_PAGES_FROM_BYTES or 2 * pool.huge_page_bytes >= pool.size_bytes:
        return
    evidence = f"Of the pool {percent(pool.huge_page_bytes, pool.size_bytes)} are in huge pages."
    if pool.page_slowdown >= s.SLOW_PAGES:
        evidence += f" Reading it takes {pool.page_slowdown:.1f} times as long as reading memory in huge pages."
    if file:
        fix = f"mount -o remount,huge=advise $(findmnt -no TARGET -T {quote(file)})"  # it may be in a subdirectory
    elif pool.memory == "shared":
        evidence += f" It is shared memory, and the kernel's shmem_enabled is {facts.huge_pages or 'unknown'}."
        fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    else:
        fix = "more free memory when the daemon starts"
    yield finding("huge_pages", evidence, 0.0, fix)


# --- tiers ------------------------------------------------------------------------------------------


def _disk_life_s(facts: Facts, disk: s.DiskStats) -> float:
    """Return the seconds in which a full disk's contents are replaced; infinity until that has happened once."""
    if disk.evicted_blocks < max(1, disk.blocks):
        return inf
    return facts.stats.uptime_seconds * _share(disk.blocks, disk.evicted_blocks)


def disks(facts: Facts) -> Iterator[Finding]:
    for disk in facts.stats.disks:
        free, name = facts.disks_free_bytes.get(disk.directory), printable(disk.directory)
        missing = disk.size_bytes - disk.physical_bytes
        if disk.up and free is not None and free < missing:
            evidence = f"{name} may use {format_size(missing)} more, but only {format_size(free)} are free."
            yield finding("disk_space", evidence, _share(missing, disk.size_bytes))
        if (life_s := _disk_life_s(facts, disk)) < SHORT_LIFE_S:
            evidence = f"{name} is full. Since the start its whole contents were replaced every "
            evidence += f"{format_duration(life_s)}."
            yield finding("disk_too_small", evidence, 0.3, f'disk = ["{name}={exact_size(2 * disk.size_bytes)}"]')


def late_tiers(facts: Facts) -> Iterator[Finding]:
    hour, start = facts.stats.last_hour, facts.stats.since_start
    late, late_since_start = hour.misses.get("tier_late", 0), start.misses.get("tier_late", 0)
    had = late + hour.found_keys.get("disk", 0) + hour.found_keys.get("shared", 0)
    if late >= MIN_ERRORS and late >= LATE_TIER_SHARE * had:
        tiers = [("disks", "disk_deadline")] if facts.stats.disks else []
        tiers += [("shared stores", "shared_deadline")] if facts.stats.shared else []
        names = " and ".join(name for name, _ in tiers) or "tiers"
        evidence = f"In the last hour {percent(late, had)} of the blocks found in {names} came too late."
        failed = [*(one.promotions_failed for one in facts.stats.shared)]
        failed += [facts.stats.tiers.promotions_failed] if facts.stats.tiers is not None else []
        by_deadline = sum(one.get(kind, 0) for one in failed for kind in ("deadline", "overdue"))
        if 2 * by_deadline < late_since_start:  # a longer deadline would bring less than half of them
            evidence += " Engines did not wait for most of them: computing was to take less time."
            yield finding("tier_late", evidence, _share(late, had), "a larger pool_size, or a faster disk or store")
            return
        gain = _of_prompts(start, 100 * _share(late_since_start, _needed_keys(facts.stats)))
        deadlines = [(setting, facts.setting(setting)) for _, setting in tiers]
        fixes = [f'{setting} = "{2 * parse_duration(now):g}s"' for setting, now in deadlines if now]
        fix = " or ".join(fixes) or "a longer disk_deadline or shared_deadline"
        yield finding("tier_late", evidence, _share(late, had), fix + _RESTART, gain=gain)


def tiers_down(facts: Facts) -> Iterator[Finding]:
    traffic = facts.stats.last_hour
    keys = traffic.misses.get("tier_down", 0) + traffic.misses.get("tier_failed", 0)
    if keys >= MIN_ERRORS and keys >= LATE_TIER_SHARE * traffic.asked_keys:
        tiers = [(one.directory, one.missed_keys) for one in facts.stats.disks]
        tiers += [(one.url, one.missed_keys) for one in facts.stats.shared]
        share = percent(keys, traffic.asked_keys)
        evidence = f"In the last hour {share} of the keys asked for were missed while a disk or a shared store failed."
        if names := " and ".join(printable(name) for name, missed in tiers if missed):
            evidence += f" Since the start these have failed: {names}."
        yield finding("tier_down", evidence, _share(keys, traffic.asked_keys))


def disk_writes(facts: Facts) -> Iterator[Finding]:
    """Find at most one of: the disks are written for little benefit, or their write limit excludes what is read."""
    stats, tiers = facts.stats, facts.stats.tiers or s.TieringStats()
    written, read = sum(one.written_bytes for one in stats.disks), sum(one.read_bytes for one in stats.disks)
    day_bytes, size = written * DAY_S / max(1.0, stats.uptime_seconds), sum(one.size_bytes for one in stats.disks)
    if not written:
        return
    if written >= MAX_WRITTEN_PER_READ * read:
        if written < size or stats.since_start.lookups < verdict.MIN_LOOKUPS:
            return  # filling them once is no waste
        times = f"{written / read:.1f} bytes for each byte" if read else f"{format_size(written)}, and no byte"
        evidence = f"Since the start the disks wrote {times} that was read from them: {format_size(day_bytes)} a day."
        if any(_disk_life_s(facts, one) < SHORT_LIFE_S for one in stats.disks):
            evidence += " First give it more space (see disk_too_small), so that more of it is read."
        fix = 'disk_write = "auto"' if tiers.write_mode == "always" else _daily_limit(min(size, day_bytes / 2))
        yield finding("disk_writes", evidence, 0.3, fix, gain=0.0)
        return
    skipped = tiers.not_written.get("budget", 0)
    offered = sum(tiers.not_written.values()) + tiers.written_blocks
    if skipped >= MIN_ERRORS and skipped >= LIMITED_SHARE * offered:
        evidence = f"Since the start {percent(skipped, offered)} of the blocks for disks were skipped: the daily write "
        evidence += "limit was reached."
        wanted = _daily_limit(day_bytes * (1 + skipped / max(1, tiers.written_blocks)))
        yield finding("disk_write_limit", evidence, _share(skipped, offered), wanted)


def _daily_limit(nbytes: float) -> str:
    return f'disk_write_per_day = "{_whole_mib(nbytes)}"'


# --- namespaces -------------------------------------------------------------------------------------


def namespaces_apart(facts: Facts) -> Iterator[Finding]:
    """Find namespaces of one model that do not share: of concurrent engines, or after a rollout."""
    for _, of_model in groupby(sorted(facts.known, key=_model), key=_model):
        found = list(of_model)
        used = [one for one in found if one.sessions]
        unused = [one for one in found if not one.sessions and one.ready_bytes]
        if len(used) > 1:
            yield from _not_shared(used, {one.fingerprint: one.engines for one in facts.stats.namespaces})
        if used and unused:
            yield _left_behind(unused, used[-1], facts.stats.pool.size_bytes)


def _model(info: NamespaceInfo) -> str:
    return str((fields_of_description(info.description) or {}).get("model") or info.label)


def _not_shared(used: Sequence[NamespaceInfo], engines: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    one, other = used[:2]
    if [each.field for each in explain(one.description, other.description)] == ["salt"]:
        return  # the purpose of a salt
    words = how_they_differ(one.description, other.description)
    ids = [s.namespace_id(each.namespace) for each in (one, other)]
    more = f" {len(used) - 2} more are in use." if len(used) > 2 else ""
    whose = [printable("; ".join(engines.get(each.namespace.hex(), ()))) for each in (one, other)]
    both = " and ".join(f"{name} ({who})" if who else name for name, who in zip(ids, whose, strict=True))
    evidence = f"Engines of {printable(one.label)} do not share blocks. {both} differ: {words}.{more}"
    yield finding("not_shared", evidence, 0.5, " ".join(ids))


def _left_behind(unused: Sequence[NamespaceInfo], new: NamespaceInfo, pool_bytes: int) -> Finding:
    old = max(unused, key=lambda one: one.ready_bytes)
    words = "; ".join(each.sentence(", was") for each in explain(new.description, old.description))
    more = f" {len(unused) - 1} more are unused." if len(unused) > 1 else ""
    evidence = (
        f"{namespace_name(old.label, old.namespace)} has {format_size(old.ready_bytes)}, but no engine uses it.{more} "
        f"Engines use {s.namespace_id(new.namespace)} now, with "
        f"{words or 'a description that does not say what differs'}."
    )
    return finding("left_behind", evidence, _share(old.ready_bytes, pool_bytes), s.namespace_id(old.namespace))


# --- does it pay off ---------------------------------------------------------------------------------


class Value(msgspec.Struct, frozen=True):
    """Benefit of the cache since the daemon's start. ``paying_off`` and ``sentence``: see ``Verdict``.

    ``needed_tokens``: tokens of prompts that engines did not have themselves. ``gpu_seconds``: ``saved_seconds`` of all
    ranks of the engines. ``gpu_seconds_a_day``: at the rate of the last day; None if the daemon has not been up for
    long.
    """

    paying_off: bool | None
    lookups: int
    loaded_tokens: int
    needed_tokens: int
    saved_seconds: float
    gpu_seconds: float
    gpu_seconds_a_day: float | None
    sentence: str


def judge_value(facts: Facts) -> Value:
    traffic = facts.stats.since_start
    needed = verdict.needed_tokens(traffic)
    pays, sentence = verdict.judge(facts.stats)
    day, saved = facts.stats.last_day, (traffic.saved_seconds, traffic.saved_gpu_seconds)
    a_day = day.saved_gpu_seconds * DAY_S / day.seconds if day.seconds >= LONG_ENOUGH_S else None
    return Value(pays, traffic.lookups, traffic.loaded_tokens, needed, *saved, a_day, sentence)


def pool_size(facts: Facts) -> Iterator[Finding]:
    """Find at most one of: the pool is too small, too large, or evicts too early for another reason."""
    stats, curve, pool_bytes = facts.stats, facts.stats.curve, facts.stats.pool.size_bytes
    if not verdict.enough_lookups(stats) or curve is None or not curve.asked_tokens:
        return
    if not verdict.repeats(curve) or verdict.own_suffices(stats.since_start):
        return  # no size would help, as the verdict says
    if stats.pool.of("ready") < verdict.FULL_POOL * pool_bytes and any(map(at_quota, facts.counted)):
        return  # a quota is the limit: see ``starving``
    evicted = verdict.missed_for_space(stats.last_hour)
    gone = f"{percent(evicted, 1)} of the keys asked for in the last hour had been evicted, or had not got space"
    size, found_more = _better_size(curve)
    # What a larger pool would find besides is missed now, or comes from tiers: only the missed part is a gain.
    missed, in_tiers = verdict.most_gain(stats.since_start), 100 * _share(_found_in_tiers(stats), _needed_keys(stats))
    gain = min(found_more * _share(missed, missed + in_tiers), missed)
    if stats.curve_seen_bytes >= pool_bytes and gain >= verdict.POINTS:
        if gain >= verdict.doubt_points(stats.since_start):  # else it is too early to advise
            yield _too_small(stats, size, gain, f" {gone}." if evicted >= verdict.POINTS / 100 else "")
    elif evicted >= THRASH_SHARE:
        fix = 'eviction_policy = "learned"' + _RESTART
        if stats.policy == "learned":
            fix = "kvoffd-cli trace record FILE; kvoffd-cli trace replay FILE"
        yield finding("thrash", f"{gone}, and more memory would find little more.", evicted, fix)
    elif stats.uptime_seconds >= LONG_ENOUGH_S and OVERSIZED * stats.curve_seen_bytes <= pool_bytes:
        up, seen = format_duration(stats.uptime_seconds), format_size(stats.curve_seen_bytes)
        evidence = f"In {up} engines asked for {seen} of distinct blocks; the pool has {format_size(pool_bytes)}."
        enough = _whole_mib(SPARE * stats.curve_seen_bytes)
        yield finding("pool_too_large", evidence, fix=f'pool_size = "{enough}"', gain=0.0)


def _better_size(curve: s.HitCurve) -> tuple[float, float]:
    """Return the smallest larger pool that finds nearly as much as the largest, as a multiple of the present one, and
    how many percentage points more it finds; less than 0 if none does."""
    larger = {float(size): 100 * ratio for size, ratio in curve.lru_hit_ratio.items() if float(size) > 1}
    size = min((size for size, ratio in larger.items() if max(larger.values()) - ratio < verdict.POINTS), default=1.0)
    return size, larger.get(size, 0.0) - max(_found_percent(curve), _lru_percent(curve))


def _too_small(stats: s.DaemonStats, size: float, points: float, gone: str) -> Finding:
    """Return the finding that a pool of ``size`` times the bytes would find these more points of what engines lack.

    ``gone``: a sentence, after a space, about what was evicted; or empty.
    """
    total, pool_bytes, gain = stats.since_start, stats.pool.size_bytes, _of_prompts(stats.since_start, points)
    evidence = f"{_computed(stats)}; {_would_be(stats, points)} with a pool of {format_size(size * pool_bytes)}, not "
    evidence += f"{format_size(pool_bytes)} (estimated for lru, without quotas)."
    evidence += " Blocks are evicted as with lru for now." if stats.learned.as_lru else ""
    evidence += gone + verdict.doubt(stats)
    if stats.disks or stats.shared:
        evidence += f" Tiers had {percent(_found_in_tiers(stats), total.asked_keys)} of the keys asked for."
    fix = f'pool_size = "{exact_size(round(size * pool_bytes))}"'
    fix += "" if stats.disks else f', or disk = ["/mnt/nvme={_whole_mib((size - 1) * pool_bytes)}"]'
    level = "warning" if gain >= MANY_POINTS else "info"
    return finding("pool_too_small", evidence, gain / 100, fix, level, gain)


def _needed_keys(stats: s.DaemonStats) -> int:
    return stats.since_start.asked_keys - stats.since_start.not_needed_keys


def _found_in_tiers(stats: s.DaemonStats) -> int:
    """Return the keys that came from tiers in time."""
    total = stats.since_start
    found = sum(keys for source, keys in total.found_keys.items() if source != "pool")
    return max(0, found - sum(total.misses.get(reason, 0) for reason in verdict.TOO_LATE))


def _of_prompts(traffic: s.Window, points: float) -> float:
    """Convert percentage points of what engines lack in whole blocks to points of all tokens of prompts, if these are
    known."""
    total = traffic.all_prompt_tokens
    return points * min(1.0, verdict.lacked_tokens(traffic) / total) if total else points


def _computed(stats: s.DaemonStats) -> str:
    """Return a sentence without its end: what engines compute; what they lack, if they report no prompts."""
    traffic = stats.since_start
    if total := traffic.all_prompt_tokens:
        computed = percent(traffic.prompt_tokens.get("computed", 0), total)
        return f"Since the start engines computed {computed} of the prompts' tokens"
    missed = sum(traffic.misses.values())
    return f"Since the start {percent(missed, traffic.asked_keys)} of the keys asked for were missed"


def _would_be(stats: s.DaemonStats, points: float) -> str:
    """Return the sentence's end: what engines would compute if these more points of what they lack were found."""
    traffic = stats.since_start
    if total := traffic.all_prompt_tokens:
        now, gain = 100 * traffic.prompt_tokens.get("computed", 0) / total, _of_prompts(traffic, points)
    else:
        now = 100 * _share(sum(traffic.misses.values()), traffic.asked_keys)
        gain = points * _share(_needed_keys(stats), traffic.asked_keys)
    return f"it would be {max(0.0, now - gain):.1f} %"


def _found_percent(curve: s.HitCurve) -> float:
    return 100 * curve.found_tokens / curve.asked_tokens


def _lru_percent(curve: s.HitCurve) -> float:
    """Return the hit ratio that lru would have with this pool."""
    return 100 * curve.lru_hit_ratio.get("1", 0.0)


def sentence_of(point: s.BranchPoint, of: str = "") -> str:
    """Return what a place costs, and what would help. ``of``: whose prompts, a part of the sentence."""
    each = format_count(point.repeated_tokens // max(1, point.prompts))
    at = f"after {format_count(point.at_tokens)} tokens"
    if point.prompts == 1:
        costs = f"1 prompt{of} differs from others {at} and continues with {each} tokens"
    else:
        costs = f"{format_count(point.prompts)} prompts{of} differ {at} and continue with {each} tokens each"
    return (
        f"{costs} that were stored before. If what differs there came last, they would share "
        f"{percent(point.repeated_tokens, point.seen_tokens)} of what is computed."
    )


def prompts_differ(facts: Facts) -> Iterator[Finding]:
    """Find the namespace in which a difference near the beginning of prompts costs the most."""
    points = [(one.branching, one) for one in facts.counted if one.branching is not None]
    for point, namespace in sorted(points, key=lambda item: -item[0].repeated_tokens)[:1]:
        share, all_tokens = _share(point.repeated_tokens, point.seen_tokens), facts.stats.since_start.all_prompt_tokens
        if point.prompts < MIN_BRANCHES or 100 * share < MANY_POINTS:
            return
        evidence = sentence_of(point, f" of {printable(namespace.model)}")
        gain = 100 * share * _share(namespace.prompt_tokens.get("computed", 0), all_tokens) if all_tokens else None
        yield finding("prompts_differ", evidence, share, gain=gain)


def lru_is_better(facts: Facts) -> Iterator[Finding]:
    """Find whether lru would hit more with this pool, because of the policy, after an hour or more."""
    stats, curve, hour = facts.stats, facts.stats.curve, facts.stats.last_hour
    limited = any(one.quota_bytes for one in stats.namespaces)
    if stats.policy == "lru" or curve is None or not curve.asked_tokens or limited:
        return
    if stats.uptime_seconds < LONG_ENOUGH_S or stats.since_start.lookups < verdict.MIN_LOOKUPS:
        return
    found, lru = _found_percent(curve), _lru_percent(curve)
    # Count only misses caused by the policy: the estimate for lru has no other misses.
    by_policy = sum(hour.misses.get(reason, 0) for reason in ("evicted", "rejected"))
    lost = min(lru - found, 100 * _share(by_policy, hour.asked_keys))
    if lost >= LRU_POINTS:
        gain = _of_prompts(stats.since_start, lost)
        evidence = f"{_computed(stats)} with the policy {printable(stats.policy)}; {_would_be(stats, lost)} with lru "
        evidence += "(estimated)."
        level = "warning" if gain >= MANY_POINTS else "info"
        yield finding("lru_is_better", evidence, gain / 100, "", level, gain)


def at_quota(one: s.NamespaceStats) -> bool:
    return one.quota_bytes is not None and one.ready_bytes >= AT_QUOTA * one.quota_bytes


def starving(facts: Facts) -> Iterator[Finding]:
    """Find namespaces that use up a quota and could find more."""
    if (every := facts.stats.curve) is None:
        return
    for one in facts.counted:
        curve = one.curve
        if curve is None or not curve.asked_tokens or one.lookups < verdict.MIN_LOOKUPS or not at_quota(one):
            continue
        own, could = _found_percent(curve), verdict.most_of(curve)
        if could - own < MANY_POINTS:
            continue
        asks = _share(curve.asked_tokens, every.asked_tokens)
        evidence = (
            f"{namespace_name(one.model, one.id)} uses all its quota of {format_size(one.quota_bytes or 0)}. Of the "
            f"tokens that its engines lack it finds {own:.1f} %; it would be {could:.1f} % with enough memory."
        )
        fix = f"{one.id} --max {_whole_mib(2 * (one.quota_bytes or 0))}"
        yield finding("starving", evidence, asks * (could - own) / 100, fix)


def crowding(facts: Facts) -> Iterator[Finding]:
    """Find the namespace whose limit would help others the most, without a quota so far."""
    stats, curves = facts.stats, [one.curve for one in facts.counted if one.curve is not None]
    asked = sum(one.asked_tokens for one in curves)
    if len(curves) < 2 or not asked or not verdict.enough_lookups(stats):
        return
    if stats.pool.of("ready") < verdict.FULL_POOL * stats.pool.size_bytes:
        return  # all have what space they want
    found = 100 * sum(one.found_tokens for one in curves) / asked
    # Quotas are compared by estimates for lru, which must win against the policy too.
    base = max(found, sum(_lru_percent(one) * one.asked_tokens for one in curves) / asked)
    most = verdict.most_gain(stats.since_start)
    best, quota, chosen = 0.0, 0.0, None
    for one in facts.counted:
        if one.lookups < verdict.MIN_LOOKUPS or one.quota_bytes is not None or not one.ready_bytes:
            continue
        for part in QUOTAS:
            points = min(most, _found_with_quota(facts, one, part * one.ready_bytes) - base)
            # A larger quota of the same namespace must help by a point more: others want the space.
            if points > best + verdict.POINTS or (points > best and one is not chosen):
                best, quota, chosen = points, part * one.ready_bytes, one
    if chosen is None or best < LRU_POINTS or best < verdict.doubt_points(stats.since_start):
        return
    gain = _of_prompts(stats.since_start, best)
    held = percent(chosen.ready_bytes, sum(one.ready_bytes for one in facts.counted))
    most_bytes = _whole_mib(quota)
    evidence = (
        f"{namespace_name(chosen.model, chosen.id)} has {held} of the blocks. {_computed(stats)}; "
        f"{_would_be(stats, best)} or less if it had {most_bytes} at most (estimated for lru)."
    )
    level = "warning" if gain >= MANY_POINTS else "info"
    yield finding("crowding", evidence, gain / 100, f"{chosen.id} --max {most_bytes}", level, gain)


def _found_with_quota(facts: Facts, limited: s.NamespaceStats, quota_bytes: float) -> float:
    """Return the percentage of the tokens that lru would find, of those that engines lack, with a quota.

    Estimates are for multiples of the whole pool, of which each namespace has its part. So the limited one finds what
    it would in a pool that shrinks as its part does, and the others what they would in one that grows as theirs do.
    """
    pool_bytes, part_bytes = facts.stats.pool.size_bytes, limited.ready_bytes
    others_size = (pool_bytes - quota_bytes) / max(1, pool_bytes - part_bytes)
    found = asked = 0.0
    for one in facts.counted:
        if one.curve is None:
            continue
        size = quota_bytes / part_bytes if one is limited else others_size
        asked += one.curve.asked_tokens
        found += one.curve.asked_tokens * _lru_ratio(one.curve, size)
    return 100 * _share(found, asked)


def _lru_ratio(curve: s.HitCurve, size: float) -> float:
    """Return the hit ratio of lru at this size, a multiple of the pool's, between the estimated ones."""
    known = sorted((float(at), ratio) for at, ratio in curve.lru_hit_ratio.items())
    before = (0.0, 0.0)
    for at, ratio in known:
        if size <= at:
            return before[1] + (ratio - before[1]) * (size - before[0]) / (at - before[0])
        before = at, ratio
    return before[1]


# --- engines ----------------------------------------------------------------------------------------


def engines(facts: Facts) -> Iterator[Finding]:
    """Check vLLM's own counters, which count since the engine's start."""
    for url, engine in facts.engines.items():
        at = f"The engine at {printable(url)}"
        if engine.problem:
            yield finding("engine_unreachable", f"{at} {printable(engine.problem)}.", 0.4, url)
        elif "vllm:kvoffd_connected" not in engine.metrics:
            yield finding("engine_without", f"{at} has no metrics of kvoffd.", 0.9)
        elif not engine.of("kvoffd_connected"):
            # vLLM reads its connector's metrics only after the first prompt.
            if engine.of("prompt_tokens_total") or not facts.engine_count:
                yield finding("engine_away", f"{at} is not connected to a daemon.", 1.0)
        else:
            yield from _engine_counts(facts, at, engine)


def _engine_counts(facts: Facts, at: str, engine: EngineMetrics) -> Iterator[Finding]:
    late, lookups = engine.of("kvoffd_late_lookups_total"), engine.of("kvoffd_lookups_total")
    if late >= s.MIN_LATE and late > s.LATE_SHARE * lookups:
        counts = f"{format_count(round(late))} of {format_count(round(lookups))} lookups"
        evidence = f"{at} did not wait for {counts} since its start."
        yield finding("engine_late", evidence, _share(late, lookups))
    # Bytes of the connector, and those that the daemon loaded for all engines. Not vLLM's external hits: below its
    # MultiConnector they include other connectors'. An engine that is older than the daemon may have counted loads of
    # the previous daemon.
    nbytes, traffic = engine.of("kv_offload_load_bytes_total"), facts.stats.since_start
    loaded, is_alone = traffic.loaded_bytes, facts.engine_count == 1
    if engine.age_seconds is None:
        is_older = facts.stats.lifetime.loaded_tokens > traffic.loaded_tokens
    else:
        is_older = engine.age_seconds > facts.stats.uptime_seconds
    more_there = not is_older and nbytes > AGREE * loaded
    none_there = is_alone and traffic.loaded_tokens >= verdict.MIN_LOOKUPS and lookups and not nbytes
    if more_there or none_there:
        evidence = f"{at} counts {format_size(round(nbytes))} of loads, this daemon {format_size(loaded)}."
        yield finding("hits_disagree", evidence, 0.3)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    daemon_health, late_lookups, failures, blocked_loop, connected_clients, halves_apart, partial_blocks,
    memory,
    disks, late_tiers, tiers_down, disk_writes, namespaces_apart, pool_size, lru_is_better, prompts_differ, starving,
    crowding, engines,
)  # fmt: skip


def find(facts: Facts) -> list[Finding]:
    found = [one for check in CHECKS for one in check(facts)]
    return sorted(found, key=lambda one: (LEVELS.index(one.level), -one.weight))


PROGRAMS = "kvoffd-cli", "vllm", "curl", "df", "swapoff", "numactl", "echo", "mount"
"""First words of fixes that are commands."""


def command_of(one: Finding) -> str:
    """Return the command of a finding's fix, to copy; empty if it is a setting, or advice."""
    return one.fix.removesuffix(_RESTART) if one.fix.partition(" ")[0] in PROGRAMS else ""
