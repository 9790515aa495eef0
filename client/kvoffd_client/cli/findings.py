"""What ``kvoffd-cli doctor`` can find: checks over facts that were gathered before, so that each can be tried.

KINDS has what each finding means and what mends it; a check adds its evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvoffd_client.cli.format import count_blocks, namespace_name, percent
from kvoffd_client.cli.show import engines_of
from kvoffd_client.namespace_differences import explain, fields_of_description
from kvoffd_proto.admin import NamespaceInfo, SessionInfo
from kvoffd_proto.messages import BENCH_LABEL, Role
from kvoffd_proto.stats import (
    MISS_REASONS,
    NO_SPACE_CAUSES,
    CopyStats,
    DaemonStats,
    DiskStats,
    HitCurve,
    NamespaceStats,
    Window,
    namespace_id,
)
from kvoffd_proto.units import exact_size, format_count, format_duration, format_size, printable

FEWEST_LOOKUPS = 100
"""With fewer the numbers are left to chance."""
FEWEST_ERRORS = 20
POINTS, MANY_POINTS = 1.0, 10.0
"""Percentage points of hits that make a finding, and a warning."""
LRU_POINTS = 2.0
"""By so much more an estimate of lru's hits is more than the estimate's error."""
PAYS_PERCENT = 1.0
"""Of the keys that engines needed, the part from which on loading them pays off."""
OWN_SHARE = 0.9
"""Of what engines ask for, the part from which on their own caches suffice."""
DEAR = 10.0
"""Bytes written for a byte read that are too many."""
LATE_SHARE, LATE_TIER_SHARE, ERROR_SHARE = 0.05, 0.1, 0.01
"""Of lookups, of what tiers have, of requests and jobs."""
THRASH_SHARE = 0.2
"""Of the keys that are asked for, the part that was evicted before."""
LOOP_BLOCKED_S = 0.05
"""What one of a hundred beats of the daemon's loop may be late."""
FULL_POOL, AT_QUOTA = 0.8, 0.9
SHORT_LIFE_S = 3600.0
"""A full disk that is written over in less is too small."""
LONG_ENOUGH_S, ROOMY = 3600.0, 2.0
"""From then on the pool should not be so many times what was asked for."""
DAY_S = 86_400.0
CONNECTING_S = 60.0
"""What the workers of an engine may be later than its scheduler."""
HUGE_PAGES_FROM_BYTES = 8 << 30
REMOTE_SHARE = 0.1
AGREE = 1.1
"""Counters of engine and daemon may differ by so much, since they are read one after the other."""


class Kind(NamedTuple):
    """A kind of finding: its level, what it means, and the command or setting that mends it.

    ``error``: something does not work. ``warning``: the cache works worse than it could. ``info``: good to know.
    """

    level: str
    meaning: str
    fix: str


_RESTART = "; then restart the daemon"
_LOG = "the daemon's log"
_CONNECTOR = """vllm serve MODEL --kv-transfer-config '{{"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}}'"""
_CPU = "a core of its own for the daemon (CPUAffinity= in its systemd unit, or taskset)" + _RESTART

KINDS = {
    # The daemon. What it says of its own health has sentences of its own.
    "errors": Kind("warning", "Requests of a client are refused.", _LOG),
    "failed_stores": Kind("warning", "These blocks are computed again when they are asked for.", _LOG),
    "failed_loads": Kind("warning", "Engines computed these blocks.", _LOG),
    "loop_blocked": Kind("warning", "Lookups take that long, and engines do not wait.", _LOG),
    "lookups_late": Kind("warning", "Engines computed these: they or the daemon have too little CPU.", _CPU),
    "no_engine": Kind("info", "Nobody uses this cache now.", _CONNECTOR),
    "engine_refused": Kind("error", "This engine computes all prompts.", "the engine, started as this says"),
    "workers_missing": Kind("warning", "No block becomes ready without all ranks.", "kvoffd-cli clients --all"),
    "partial_blocks": Kind("warning", "A worker does not store, or they are on several machines.", _LOG),
    # The machine.
    "swapped": Kind("warning", "Loads wait for the swap device, longer than computing takes.", "swapoff -a"),
    "unpinnable": Kind("warning", "GPUs copy these slowly.", "LimitMEMLOCK=infinity or ulimit -l unlimited" + _RESTART),
    "numa": Kind("info", "Copies of these are slower: one node's part of the pool is full.", "numactl --hardware"),
    "huge_pages": Kind(
        "info",
        "The daemon starts slower, and page tables are larger.",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" + _RESTART,
    ),
    # Tiers.
    "disk_space": Kind("warning", "Writes will fail when the file system is full.", "df -h"),
    "disk_too_small": Kind("info", "Blocks leave it before they come back.", "{}" + _RESTART),
    "tier_late": Kind("warning", "Engines computed these: tiers are slow, or have too much to do.", "{}" + _RESTART),
    "disk_writes": Kind("warning", "The drives wear out for little.", "{}" + _RESTART),
    # Namespaces.
    "not_shared": Kind("warning", "Each computes what the other has.", "kvoffd-cli namespaces diff {}"),
    "left_behind": Kind(
        "warning",
        "Engines do not find these blocks. If the change was meant, drop them; else undo it.",
        "kvoffd-cli clear {}",
    ),
    # Value.
    "pool_too_small": Kind("info", "More memory would save more prefill.", "{}" + _RESTART),
    "lru_is_better": Kind("info", "What it learned does not fit this traffic.", 'eviction_policy = "lru"' + _RESTART),
    "thrash": Kind("warning", "Blocks leave before they come back.", "{}"),
    "pool_too_large": Kind("info", "The rest of the memory brings nothing now.", "a smaller pool_size" + _RESTART),
    "starving": Kind("warning", "Others take the space, or its quota is too low.", "kvoffd-cli namespaces quota {}"),
    # Engines.
    "engine_unreachable": Kind("warning", "What it counts cannot be compared.", "curl {}"),
    "engine_without": Kind(
        "warning",
        "It runs without KvoffdConnector, or had no request yet.",
        _CONNECTOR,
    ),
    "engine_away": Kind("warning", "It computes all prompts. Its log says why.", "KVOFFD_DIRECTORY of the engine"),
    "engine_late": Kind("warning", "The daemon or this engine has too little CPU.", _CPU),
    "hits_disagree": Kind("info", "One was restarted, or the engine uses another daemon.", "kvoffd-cli clients"),
}  # fmt: skip
LEVELS = ("error", "warning", "info")


class Finding(msgspec.Struct, frozen=True):
    """One thing that an operator should know. ``check`` is its kind, a word for scripts.

    ``weight`` orders findings of one level: the part of lookups, tokens or bytes that it costs, 0 to 1.
    """

    level: str
    check: str
    evidence: str
    meaning: str
    fix: str
    weight: float = 0.0


def finding(check: str, evidence: str, weight: float = 0.1, fix: str = "", level: str = "") -> Finding:
    """A finding of a kind, with its evidence; ``fix`` stands in that of the kind."""
    kind = KINDS[check]
    return Finding(level or kind.level, check, evidence, kind.meaning, kind.fix.format(fix), min(1.0, weight))


class EngineMetrics(NamedTuple):
    """What an engine's /metrics say, summed over its data-parallel ranks; ``problem``: why they cannot be read."""

    metrics: Mapping[str, float] = MappingProxyType({})
    problem: str = ""
    age_seconds: float | None = None
    """Since its process began; None where it does not say."""

    def of(self, name: str) -> float:
        return self.metrics.get(f"vllm:{name}", 0.0)


@dataclass(frozen=True)
class Facts:
    """All that checks know. Over HTTP nothing is known of sessions and the machine."""

    stats: DaemonStats
    namespaces: Sequence[NamespaceInfo] = ()
    sessions: Sequence[SessionInfo] | None = None
    engines: Mapping[str, EngineMetrics] = field(default_factory=dict)
    swapped_bytes: int = 0
    """Of the daemon's memory, the pool included."""
    huge_pages: str = ""
    """What ``shmem_enabled`` says: ``never``, ``advise``, ..."""
    disks_free_bytes: Mapping[str, int] = field(default_factory=dict)
    """By directory; those that can be seen."""

    def setting(self, name: str) -> str:
        return next((one.value for one in self.stats.settings if one.name == name), "")

    def has(self, reason: str) -> bool:
        """Whether the daemon's own health says it already."""
        return any(one.reason == reason for one in self.stats.health_problems)

    @property
    def engine_count(self) -> int | None:
        """Engines that are connected; None where nothing is known of sessions."""
        return None if self.sessions is None else len(engines_of(self.sessions))

    @property
    def counted(self) -> list[NamespaceStats]:
        """Namespaces of engines: those of benches, and the row of all others, have no advice."""
        return [one for one in self.stats.namespaces if not one.of_bench and one.fingerprint]

    @property
    def known(self) -> list[NamespaceInfo]:
        return [one for one in self.namespaces if not one.label.startswith(BENCH_LABEL)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# --- the daemon as it is now ------------------------------------------------------------------------


def daemon_health(facts: Facts) -> Iterator[Finding]:
    for cause in facts.stats.health_problems:
        level = "error" if cause.reason == "pool_corrupt" or not facts.stats.ready else "warning"
        yield Finding(level, cause.reason, printable(cause.sentence), "", "", 1.0)


def late_lookups(facts: Facts) -> Iterator[Finding]:
    late, lookups = facts.stats.since_start.late_lookups, facts.stats.since_start.lookups
    if late >= FEWEST_ERRORS and late > LATE_SHARE * lookups and not facts.has("lookups_late"):
        evidence = f"Since the start engines did not wait for {format_count(late)} of {format_count(lookups)} lookups."
        yield finding("lookups_late", evidence, _share(late, lookups))


def failures(facts: Facts) -> Iterator[Finding]:
    stats = facts.stats
    refused = sum(stats.last_hour_errors.values())
    if refused >= FEWEST_ERRORS and refused > ERROR_SHARE * stats.last_hour_requests:
        counts = sorted(stats.last_hour_errors.items())
        named = ", ".join(f"{format_count(count)} {printable(name)}" for name, count in counts)
        yield finding("errors", f"In the last hour the daemon answered with errors: {named}.", 0.5)
    for name, copies in failing_copies(stats):
        evidence = f"{format_count(copies.failed_jobs)} of {format_count(copies.jobs)} {name} jobs failed."
        causes = stats.since_start.no_space_causes if name == "store" else {}
        for cause, lost in sorted(causes.items(), key=lambda item: -item[1])[:1]:
            evidence += f" {count_blocks(lost)} had no space: {NO_SPACE_CAUSES.get(cause, printable(cause))}."
        yield finding(f"failed_{name}s", evidence, _share(copies.failed_jobs, copies.jobs))


def failing_copies(stats: DaemonStats) -> Iterator[tuple[str, CopyStats]]:
    """Stores and loads of which many failed; no stores where quotas refused most: health says that."""
    causes = stats.since_start.no_space_causes
    for name, copies in (("store", stats.store), ("load", stats.load)):
        refused = name == "store" and causes and max(causes, key=causes.__getitem__) == "quota"
        if copies.failed_jobs >= FEWEST_ERRORS and copies.failed_jobs > ERROR_SHARE * copies.jobs and not refused:
            yield name, copies


def blocked_loop(facts: Facts) -> Iterator[Finding]:
    beats = facts.stats.loop_blocked_seconds
    late, longest = beats.quantile(0.99), format_duration(facts.stats.loop_blocked_max_seconds)
    if beats.count >= FEWEST_LOOKUPS and late >= LOOP_BLOCKED_S:
        evidence = f"1 % of the time the daemon's event loop was blocked for {format_duration(late)} or more, at most"
        yield finding("loop_blocked", f"{evidence} {longest}.", 0.3)


def connected_clients(facts: Facts) -> Iterator[Finding]:
    if facts.sessions is None:
        return
    engines = [one for one in facts.sessions if one.role in (Role.SCHEDULER, Role.WORKER)]
    if not engines and not facts.engines:
        yield finding("no_engine", "No engine is connected.", 0.9)
    for one in engines:
        if one.problem:
            yield finding("engine_refused", f"{printable(one.name)} has no memory here: {printable(one.problem)}", 1.0)
    for info in facts.known:
        own = [one for one in engines if info.namespace in one.namespaces]
        workers = sum(one.role == Role.WORKER for one in own)
        is_said = any(one.problem for one in own)
        if not is_said and len(own) > workers < info.world_size and min(one.age_seconds for one in own) > CONNECTING_S:
            name = namespace_name(info.label, info.namespace)
            yield finding("workers_missing", f"{name}: {workers} of {info.world_size} workers are connected.", 1.0)


def partial_blocks(facts: Facts) -> Iterator[Finding]:
    for one in facts.counted:
        share = _share(one.partial_blocks, one.partial_blocks + one.stored_blocks)
        if one.partial_blocks >= FEWEST_ERRORS and share > ERROR_SHARE:
            evidence = f"{namespace_name(one.model, one.id)}: not all ranks stored their part of"
            yield finding(
                "partial_blocks", f"{evidence} {count_blocks(one.partial_blocks)}, which were dropped.", share
            )


# --- the machine ------------------------------------------------------------------------------------


def memory(facts: Facts) -> Iterator[Finding]:
    if facts.swapped_bytes:
        yield finding("swapped", f"{format_size(facts.swapped_bytes)} of the daemon's memory are swapped out.", 0.8)
    large = facts.stats.pool.size_bytes >= HUGE_PAGES_FROM_BYTES and not facts.setting("pool_file")
    if large and facts.huge_pages in ("never", "deny"):
        evidence = f"The kernel gives shared memory no huge pages (shmem_enabled is {facts.huge_pages})."
        yield finding("huge_pages", evidence)
    pool, stored = facts.stats.pool, facts.stats.since_start.stored_blocks
    if pool.unpinnable_bytes:
        evidence = f"CUDA refused to page-lock {format_size(pool.unpinnable_bytes)} of {format_size(pool.size_bytes)}."
        yield finding("unpinnable", evidence, 0.6)
    if pool.numa_remote_slots > REMOTE_SHARE * stored > 0:
        share = percent(pool.numa_remote_slots, max(stored, pool.numa_remote_slots))
        yield finding("numa", f"{share} of the blocks lie on another NUMA node than their GPU.", 0.2)


# --- tiers ------------------------------------------------------------------------------------------


def _disk_life_s(facts: Facts, disk: DiskStats) -> float:
    """Seconds in which as much as a full disk holds is written to it; infinite where it evicts nothing.

    It evicts once no slot is free: how much of it blocks fill then depends on their sizes. What is used stays.
    """
    return facts.stats.uptime_seconds * _share(disk.used_bytes, disk.written_bytes) if disk.evicted_blocks else inf


def disks(facts: Facts) -> Iterator[Finding]:
    for disk in facts.stats.disks:
        free, name = facts.disks_free_bytes.get(disk.directory), printable(disk.directory)
        missing = disk.size_bytes - disk.physical_bytes
        if disk.up and free is not None and free < missing:
            evidence = f"{name} may take {format_size(missing)} more, and {format_size(free)} are free."
            yield finding("disk_space", evidence, _share(missing, disk.size_bytes))
        if (life_s := _disk_life_s(facts, disk)) < SHORT_LIFE_S:
            evidence = f"{name} is full, and as much as it holds is written to it every {format_duration(life_s)}."
            yield finding("disk_too_small", evidence, 0.3, f'disk = ["{name}={exact_size(2 * disk.size_bytes)}"]')


def late_tiers(facts: Facts) -> Iterator[Finding]:
    traffic, has_disks = facts.stats.since_start, bool(facts.stats.disks)
    late = traffic.misses.get("tier_late", 0)
    had = late + traffic.found_keys.get("disk", 0) + traffic.found_keys.get("shared", 0)
    if late >= FEWEST_ERRORS and late >= LATE_TIER_SHARE * had:
        what = [*["disks"] * has_disks, *["shared stores"] * bool(facts.stats.shared)]
        settings = [*["disk_deadline"] * has_disks, *["shared_deadline"] * bool(facts.stats.shared)]
        evidence = f"{percent(late, had)} of the blocks that {' and '.join(what) or 'tiers'} had came too late."
        yield finding("tier_late", evidence, _share(late, had), f"a longer {' or '.join(settings)}")


def disk_writes(facts: Facts) -> Iterator[Finding]:
    stats = facts.stats
    written, read = (sum(getattr(one, f"{verb}_bytes") for one in stats.disks) for verb in ("written", "read"))
    size = sum(one.size_bytes for one in stats.disks)  # to fill them once is no waste
    if written and written >= max(size, DEAR * read) and stats.since_start.lookups >= FEWEST_LOOKUPS:
        times = f"{written / read:.1f} bytes for each byte" if read else f"{format_size(written)}, and no byte"
        always = stats.tiers is not None and stats.tiers.write_mode == "always"
        day_bytes = written * DAY_S / max(1.0, stats.uptime_seconds)
        less = f'disk_write_per_day = "{exact_size(round(min(size, day_bytes / 2)) >> 20 << 20)}"'
        fix = 'disk_write = "auto"' if always else less
        evidence = f"The disks wrote {times} that was read from them. That is {format_size(day_bytes)} a day."
        if any(_disk_life_s(facts, one) < SHORT_LIFE_S for one in stats.disks):
            evidence += " First give it more space (see disk_too_small): then more of it is read."
        yield finding("disk_writes", evidence, 0.3, fix)


# --- namespaces -------------------------------------------------------------------------------------


def namespaces_apart(facts: Facts) -> Iterator[Finding]:
    """Namespaces of one model that do not share: of engines side by side, and after a rollout."""
    for _, alike in groupby(sorted(facts.known, key=_model), key=_model):
        every = list(alike)
        used = [one for one in every if one.sessions]
        left = [one for one in every if not one.sessions and one.ready_bytes]
        if len(used) > 1:
            yield from _apart(used)
        if used and left:
            yield _left_behind(left, used[-1], facts.stats.pool.size_bytes)


def _model(info: NamespaceInfo) -> str:
    return str((fields_of_description(info.description) or {}).get("model") or info.label)


def _apart(used: Sequence[NamespaceInfo]) -> Iterator[Finding]:
    one, other = used[:2]
    differences = explain(one.description, other.description)
    if [each.field for each in differences] == ["salt"]:
        return  # that is what a salt is for
    words = "; ".join(map(str, differences)) or "their descriptions do not say in what"
    ids = [namespace_id(each.namespace) for each in (one, other)]
    more = f" {len(used) - 2} more are in use." if len(used) > 2 else ""
    evidence = f"Engines of {printable(one.label)} do not share blocks. {' and '.join(ids)} differ: {words}.{more}"
    yield finding("not_shared", evidence, 0.5, " ".join(ids))


def _left_behind(left: Sequence[NamespaceInfo], new: NamespaceInfo, pool_bytes: int) -> Finding:
    old = max(left, key=lambda one: one.ready_bytes)
    words = "; ".join(each.sentence(", was") for each in explain(new.description, old.description))
    more = f" {len(left) - 1} more are like it." if len(left) > 1 else ""
    evidence = (
        f"{namespace_name(old.label, old.namespace)} has {format_size(old.ready_bytes)}, and no engine uses it.{more} "
        f"Engines use {namespace_id(new.namespace)} now, with "
        f"{words or 'a description that does not say what differs'}."
    )
    return finding("left_behind", evidence, _share(old.ready_bytes, pool_bytes), namespace_id(old.namespace))


# --- does it pay off ---------------------------------------------------------------------------------


class Value(msgspec.Struct, frozen=True):
    """What the cache brought since the daemon's start. ``paying_off`` is None while there were too few lookups to tell.

    Of the tokens that engines asked for they needed those that they did not have themselves. ``why_not``: a sentence.
    """

    paying_off: bool | None
    lookups: int
    loaded_tokens: int
    needed_tokens: int
    saved_seconds: float
    why_not: str


def judge_value(facts: Facts) -> Value:
    traffic = facts.stats.since_start
    needed = round(traffic.asked_tokens * (1 - _share(traffic.not_needed_keys, traffic.asked_keys)))
    needed = max(needed, traffic.loaded_tokens)
    pays = None
    if traffic.lookups >= FEWEST_LOOKUPS:  # by keys: not every engine says how many tokens a block has
        pays = 100 * _share(traffic.loaded_keys, traffic.asked_keys - traffic.not_needed_keys) >= PAYS_PERCENT
    why = _why_not(facts) if pays is False else ""
    return Value(pays, traffic.lookups, traffic.loaded_tokens, needed, traffic.saved_seconds, why)


def _why_not(facts: Facts) -> str:
    traffic, curve = facts.stats.since_start, facts.stats.curve
    if own_suffices(traffic):
        own = percent(traffic.not_needed_keys, traffic.asked_keys)
        return f"The engines' own caches had {own} of what they asked for."
    if not traffic.stored_blocks:
        return "Engines stored nothing: their prompts are shorter than a block, or kv_role is kv_consumer."
    if not repeats(curve):
        return f"Prompts do not repeat: {most_of(curve):.1f} % would be found with ten times the memory."
    reason, keys = max(traffic.misses.items(), key=lambda item: item[1], default=("", 0))
    if not reason:
        return "No key was missed."
    why = MISS_REASONS.get(reason, printable(reason))
    return f"{percent(keys, traffic.asked_keys)} of the keys asked for were {why}."


def own_suffices(traffic: Window) -> bool:
    return _share(traffic.not_needed_keys, traffic.asked_keys) >= OWN_SHARE


def repeats(curve: HitCurve | None) -> bool:
    """Whether anything that is asked for comes back, as far as ten times the memory would find it."""
    return curve is None or not curve.asked_tokens or most_of(curve) >= POINTS


def most_of(curve: HitCurve | None) -> float:
    return 100 * max(curve.lru_hit_ratio.values(), default=0.0) if curve is not None else 0.0


def pool_size(facts: Facts) -> Iterator[Finding]:
    """One finding at most: the pool is too small, or too large, or blocks leave it too soon for another reason."""
    stats, curve, pool_bytes = facts.stats, facts.stats.curve, facts.stats.pool.size_bytes
    if stats.since_start.lookups < FEWEST_LOOKUPS or curve is None or not curve.asked_tokens:
        return
    if not repeats(curve) or own_suffices(stats.since_start):
        return  # no size brings anything, as the verdict says
    if stats.pool.of("ready") < FULL_POOL * pool_bytes and any(map(at_quota, facts.counted)):
        return  # nor does it to those that a quota limits, of whom ``starving`` tells
    found, lru = 100 * curve.found_tokens / curve.asked_tokens, 100 * curve.lru_hit_ratio.get("1", 0.0)
    # The smallest larger pool that finds nearly what the largest does.
    larger = {float(size): 100 * ratio for size, ratio in curve.lru_hit_ratio.items() if float(size) > 1}
    size = min((size for size, ratio in larger.items() if max(larger.values()) - ratio < POINTS), default=1.0)
    best = larger.get(size, 0.0)
    gain = best - max(found, lru)
    evicted = _share(stats.last_hour.misses.get("evicted", 0), stats.last_hour.asked_keys)
    gone = f"{percent(evicted, 1)} of the keys asked for in the last hour had been evicted"
    if stats.curve_seen_bytes >= pool_bytes and gain >= POINTS:
        more = exact_size(max(1 << 20, round((size - 1) * pool_bytes) >> 20 << 20))
        here, there = (format_size(nbytes) for nbytes in (pool_bytes, size * pool_bytes))
        own = f"Requests find {found:.1f}" if found >= lru else f"With lru requests would find {lru:.1f}"
        other = f"{'with lru ' if found >= lru else ''}{best:.1f}"
        evidence = f"{own} % of their tokens in a pool of {here}, and {other} % in {there} (estimated, without quotas)."
        total = stats.since_start
        below = sum(keys for source, keys in total.found_keys.items() if source != "pool")
        evidence += f" {gone}." * (evicted >= POINTS / 100)
        if stats.disks or stats.shared:
            evidence += f" Tiers below it had {percent(below, total.asked_keys)} of the keys asked for."
        fix = f'pool_size = "{exact_size(round(size * pool_bytes))}"'
        fix += "" if stats.disks else f', or disk = ["/mnt/nvme={more}"]'
        gain -= 100 * _share(below, total.asked_keys)
        yield finding("pool_too_small", evidence, gain / 100, fix, "warning" if gain >= MANY_POINTS else "info")
    elif evicted >= THRASH_SHARE:
        fix = 'eviction_policy = "learned"' + _RESTART
        if stats.policy == "learned":
            fix = "kvoffd-cli trace record FILE; kvoffd-cli trace replay FILE"
        yield finding("thrash", f"{gone}, and more memory would find little more.", evicted, fix)
    elif stats.uptime_seconds >= LONG_ENOUGH_S and ROOMY * stats.curve_seen_bytes <= pool_bytes:
        up, seen = format_duration(stats.uptime_seconds), format_size(stats.curve_seen_bytes)
        evidence = f"In {up} engines asked for {seen} of different blocks; the pool has {format_size(pool_bytes)}."
        yield finding("pool_too_large", evidence)


def lru_is_better(facts: Facts) -> Iterator[Finding]:
    """Where the same pool would find more with the policy lru, for long, and not for want of something else."""
    stats, curve, hour = facts.stats, facts.stats.curve, facts.stats.last_hour
    limited = any(one.quota_bytes for one in stats.namespaces)
    if stats.policy == "lru" or curve is None or not curve.asked_tokens or limited:
        return
    if stats.uptime_seconds < LONG_ENOUGH_S or stats.since_start.lookups < FEWEST_LOOKUPS:
        return
    found, lru = 100 * curve.found_tokens / curve.asked_tokens, 100 * curve.lru_hit_ratio.get("1", 0.0)
    # What was never stored, or was lost for another reason, is not the policy's doing: lru is credited with all of it.
    by_policy = sum(hour.misses.get(reason, 0) for reason in ("evicted", "rejected"))
    lost = min(lru - found, 100 * _share(by_policy, hour.asked_keys))
    if lost >= LRU_POINTS:
        evidence = (
            f"Requests found {found:.1f} % of their tokens in the pool with the policy {printable(stats.policy)}. With "
            f"lru it would have been {lru:.1f} % (estimated)."
        )
        yield finding("lru_is_better", evidence, lost / 100, "", "warning" if lost >= MANY_POINTS else "info")


def at_quota(one: NamespaceStats) -> bool:
    return one.quota_bytes is not None and one.ready_bytes >= AT_QUOTA * one.quota_bytes


def starving(facts: Facts) -> Iterator[Finding]:
    every, held = facts.stats.curve, sum(one.ready_bytes for one in facts.counted)
    for one in facts.counted:
        curve = one.curve
        if every is None or curve is None or not curve.asked_tokens or one.lookups < FEWEST_LOOKUPS:
            continue
        own, could = 100 * curve.found_tokens / curve.asked_tokens, most_of(curve)
        asks, has = _share(curve.asked_tokens, every.asked_tokens), _share(one.ready_bytes, held)
        if could - own < MANY_POINTS or (has >= asks / 2 and not at_quota(one)):
            continue
        evidence = (
            f"{namespace_name(one.model, one.id)} asks for {percent(asks, 1)} of all tokens and has {percent(has, 1)} "
            f"of the blocks. It finds {own:.1f} %, and could find {could:.1f} %."
        )
        limited, most_bytes = one, 2 * (one.quota_bytes or 0)
        if at_quota(one):
            evidence += f" Its quota of {format_size(one.quota_bytes or 0)} is used."
        else:
            limited = max(facts.counted, key=lambda each: each.ready_bytes)
            most_bytes = max(1 << 20, limited.ready_bytes >> 21 << 20)
        yield finding("starving", evidence, asks * (could - own) / 100, f"{limited.id} --max {exact_size(most_bytes)}")


# --- engines ----------------------------------------------------------------------------------------


def engines(facts: Facts) -> Iterator[Finding]:
    """What vLLM's own counters say. Theirs begin with the engine, the daemon's with the daemon."""
    for url, engine in facts.engines.items():
        at = f"The engine at {printable(url)}"
        if engine.problem:
            yield finding("engine_unreachable", f"{at} {printable(engine.problem)}.", 0.4, url)
        elif "vllm:kvoffd_connected" not in engine.metrics:
            yield finding("engine_without", f"{at} has no metrics of kvoffd.", 0.9)
        elif not engine.of("kvoffd_connected"):
            # Before its first prompt vLLM asks its connector for no metrics.
            if engine.of("prompt_tokens_total") or not facts.engine_count:
                yield finding("engine_away", f"{at} is not connected to a daemon.", 1.0)
        else:
            yield from _engine_counts(facts, at, engine)


def _engine_counts(facts: Facts, at: str, engine: EngineMetrics) -> Iterator[Finding]:
    late, lookups = engine.of("kvoffd_late_lookups_total"), engine.of("kvoffd_lookups_total")
    if late >= FEWEST_ERRORS and late > LATE_SHARE * lookups:
        evidence = f"{at} did not wait for {format_count(round(late))} of {format_count(round(lookups))} lookups."
        yield finding("engine_late", evidence, _share(late, lookups))
    # Tokens that vLLM counts as external hits, and those that the daemon loaded for all engines. What an engine that is
    # older than the daemon has counted may be of the one before.
    hits, asked = (engine.of(f"external_prefix_cache_{name}_total") for name in ("hits", "queries"))
    loaded = facts.stats.since_start.loaded_tokens
    alone = facts.engine_count == 1
    is_older = engine.age_seconds is not None and engine.age_seconds > facts.stats.uptime_seconds
    more_there = not is_older and hits > AGREE * max(loaded, facts.stats.lifetime.loaded_tokens)
    none_there = alone and loaded >= FEWEST_LOOKUPS and asked and not hits
    if more_there or none_there:
        evidence = f"{at} counts {format_count(round(hits))} tokens as loaded, and this daemon {format_count(loaded)}."
        yield finding("hits_disagree", evidence, 0.3)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    daemon_health, late_lookups, failures, blocked_loop, connected_clients, partial_blocks, memory,
    disks, late_tiers, disk_writes, namespaces_apart, pool_size, lru_is_better, starving, engines,
)  # fmt: skip


def find(facts: Facts) -> list[Finding]:
    """All findings, the heaviest first."""
    found = [one for check in CHECKS for one in check(facts)]
    return sorted(found, key=lambda one: (LEVELS.index(one.level), -one.weight))
