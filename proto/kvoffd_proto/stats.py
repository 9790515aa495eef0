"""The daemon's statistics, as maps: ``kvoffd-cli stats --json`` prints ``msgspec.json.encode`` of a DaemonStats,
``/stats.json`` serves the same, and the page at ``/`` reads it.

Each number is defined once, by its field. A field with ``counter``, ``gauge`` or ``histogram`` is also on /metrics as
``kvoffd_``, the prefix of its part and its name, with ``_total`` for a counter. Readers ignore unknown fields and use
the default of missing ones, so that a command and a daemon of different releases understand each other.

``Traffic`` is counted per namespace and summed over the last minute, hour and day, and since the start
(``last_minute``, ``last_hour``, ``last_day``, ``since_start``):

    prompt_tokens{source}                        all tokens of prompts that engines reported; see PROMPT_SOURCES
    asked_keys = loaded_keys + not_needed_keys + sum(misses.values()), always
    loaded_keys, loaded_tokens, saved_seconds    loaded by engines, and the seconds of prefill that this saved
    saved_gpu_seconds                            these seconds on each rank of the engine
    not_needed_keys                              the engine had them itself, or dropped the request
    misses{reason}                               see MISS_REASONS
    found_keys{pool, disk, shared}               where keys were found: loaded, not needed, ``late`` or ``skipped``
    asked_tokens                                 tokens of the prompts that were looked up

``lifetime`` has totals that survive restarts. A namespace's ``id`` is the first 12 hex digits of its fingerprint;
``model`` is its label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from math import inf
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    ADMIN,
    ANY_ROLE,
    PAUSED_STORES,
    ByteCount,
    Count,
    Fingerprint,
    PerSecond,
    Reply,
    Request,
    Seconds,
    doc,
    exchange,
    metas_of,
)
from kvoffd_proto.units import format_duration, printable

# --- fields and their annotations ----------------------------------------------------------------


class Metric(NamedTuple):
    """A field on /metrics: a ``counter``, ``gauge`` or ``histogram``; a ``label`` that distinguishes the Structs of a
    list; or a ``part``, a Struct or list of Structs that holds metrics.

    Attributes:
        label: name of the label. For a map it holds the key; for a counted list, the Structs' first field.
        prefix: beginning of the names of a part's metrics, after ``kvoffd_``.
        fixed: name and value of a label that the whole part has.
        keys: keys of a map that are shown from the start, as 0: ``increase`` ignores the first value of a series.
    """

    kind: str
    label: str = ""
    prefix: str = ""
    fixed: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def _metric(kind: str, description: str, label: str = "", keys: Iterable[str] = ()) -> Meta:
    return Meta(description=description, extra={"metric": Metric(kind, label, keys=tuple(keys))})


counter, gauge, histogram = partial(_metric, "counter"), partial(_metric, "gauge"), partial(_metric, "histogram")
"""Describe a field that is such a metric. A gauge that is None has no sample."""
label = partial(_metric, "label")
"""Describe a field that distinguishes the Structs of a list, and the name of its label."""


def part(description: str, prefix: str, fixed: tuple[str, ...] = ()) -> Meta:
    """Describe a field whose Structs hold metrics. Without it no field of a Struct is on /metrics."""
    return Meta(description=description, extra={"metric": Metric("part", "", prefix, fixed)})


def metric_of(hint: object) -> Metric | None:
    """Return how /metrics shows a field; None if it does not."""
    return next((meta.extra["metric"] for meta in metas_of(hint) if meta.extra and "metric" in meta.extra), None)


class Part(Struct, frozen=True):
    """Base of statistics: maps whose readers ignore unknown fields."""


ID_DIGITS = 12


def namespace_id(fingerprint: bytes | str) -> str:
    """Return a namespace's id for people: the first 12 hex digits of its fingerprint."""
    return (fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint)[:ID_DIGITS]


def namespace_name(label: str, fingerprint: bytes | str) -> str:
    """Return a namespace's name for people: ``llama-70b (106ed1a3c0de)``; only the id if it has no label."""
    return f"{printable(label)} ({namespace_id(fingerprint)})" if label else namespace_id(fingerprint)


def engine_name(session: str, role: str | None) -> str:
    """Return an engine's name: that of its session without the role."""
    return re.sub(rf" {role}( \d+)?$", "", session)


Labelled: TypeAlias = dict[str, Count]


# --- traffic ---------------------------------------------------------------------------------------

SOURCES = "pool", "disk", "shared"
PROMPT_SOURCES = {
    "computed": "computed by the engine",
    "engine": "in the engine's own prefix cache",
    "pool": "loaded from the pool",
    "disk": "loaded after they came up from a disk",
    "store": "loaded after they came from a shared store",
    "peer": "loaded after they came from another node's pool",
    "other": "loaded by another KV connector of the engine",
}
"""Sources of the tokens of prompts, with their meanings. They add up to all tokens of the prompts."""
LOADED_SOURCES = "pool", "disk", "store", "peer"
"""Those from which engines loaded through the pool."""
SLOW_PAGES = 1.2
"""Least ``page_slowdown`` at which a pool's small pages matter."""
MISS_REASONS = {
    "unknown": "never stored in this namespace since the daemon's start",
    "forgotten": "never stored, or evicted so long ago that it is not remembered",
    "computing": "not stored yet: another prompt that came first was computing it",
    "evicted": "evicted to make space for other blocks",
    "rejected": "not stored: the eviction policy expected no reuse",
    "no_space": "not stored or not promoted: the pool had no space",
    "partial": "still being written, or a rank has not stored its part",
    "invalidated": "stored before a reset or a clear, or dropped by an engine",
    "corrupt": "did not match its checksum",
    "tier_late": "on a disk or in a shared store, and not read in time",
    "tier_failed": "on a disk or in a shared store, and reading it failed",
    "tier_down": "perhaps on a disk or in a shared store that failed, or was not asked after failures",
    "unanswered": "perhaps in a shared store, for whose answer the engine did not wait",
    "excluded": "on a disk or in a shared store, which the request's kv_load_tiers exclude",
    "lease_limit": "found, but leases may pin no more",
    "late": "found, but the engine did not wait for it",
    "skipped": "found, but computing was faster than loading",
    "quota": "evicted or not stored: its namespace was at its quota",
    "engine_full": "found, but the engine's KV cache had no space to load it",
    "load_failed": "found, but the load failed, see the engine's log",
    "after_gap": "found, but an earlier block of the prompt was missing",
    "not_loaded": "found, but the engine could not load it",
}
"""Reasons why a key was not loaded, with their meanings."""
NO_SPACE_CAUSES = {
    "quota": "a namespace was at its quota, all of it pinned, being written, or of the same prompt",
    "pinned": "leases and copies pinned the pool",
    "writing": "the pool was full of blocks being written",
    "sizes": "the free space lay between pinned blocks of another size",
    "prompt": "only blocks of the same prompt, or of newer ones, could have gone",
    "too_large": "a block is larger than the pool",
    "unregistered": "not all ranks of an engine have registered their memory",
}
"""Causes for which keys were not stored for lack of space, with their meanings."""


def reason_name(reason: str) -> str:
    """Return a reason of misses for people; in statistics and metrics "never stored" is ``unknown``."""
    return "never stored" if reason == "unknown" else printable(reason).replace("_", " ")


LATE_SHARE, MIN_LATE = 0.05, 20
"""Share and number of late lookups, both of which make a problem for health and doctor."""


class Traffic(Part, frozen=True):
    """Lookups, loads and stores of engines. asked_keys = loaded_keys + not_needed_keys + all misses."""

    lookups: Annotated[Count, counter("Lookups of prompts in a namespace.")] = 0
    asked_keys: Annotated[Count, counter("Keys (block hashes) looked up whose outcome is known.")] = 0
    loaded_keys: Annotated[Count, counter("Keys looked up and loaded by engines.")] = 0
    not_needed_keys: Annotated[Count, doc("Keys not needed: the engine had their blocks, or dropped the request.")] = 0
    prompt_tokens: Annotated[Labelled, counter("Tokens of prompts by source.", "source", PROMPT_SOURCES)] = {}
    misses: Annotated[Labelled, counter("Keys looked up and not loaded although needed, by reason.", "reason")] = {}
    found_keys: Annotated[Labelled, counter("Keys found, needed or not, by source.", "source", SOURCES)] = {}
    asked_tokens: Annotated[Count, counter("Tokens of the prompts looked up, in whole blocks.")] = 0
    loaded_tokens: Annotated[Count, counter("Tokens that engines loaded instead of computing them.")] = 0
    saved_seconds: Annotated[Seconds, counter("Seconds of prefill saved, by the rates that engines reported.")] = 0.0
    saved_gpu_seconds: Annotated[Seconds, counter("The same on all ranks of an engine: seconds of GPUs.")] = 0.0
    loaded_bytes: Annotated[ByteCount, counter("Bytes copied from the pool to engines.")] = 0
    stored_bytes: Annotated[ByteCount, counter("Bytes copied from engines to the pool.")] = 0
    stored_blocks: Annotated[Count, doc("Blocks that became readable after all their shards were stored.")] = 0
    evicted_blocks: Annotated[Count, counter("Blocks evicted from the pool for others, or because of a quota.")] = 0
    no_space_keys: Annotated[Count, counter("Keys not stored because the pool or the quota had no space.")] = 0
    no_space_causes: Annotated[Labelled, doc("Keys without space, by cause: " + ", ".join(NO_SPACE_CAUSES) + ".")] = {}
    rejected_keys: Annotated[Count, doc("Keys not stored because the eviction policy rejected them.")] = 0
    partial_blocks: Annotated[Count, doc("Blocks dropped because a rank did not store its part within 60 seconds.")] = 0
    late_lookups: Annotated[Count, counter("Lookups whose answers engines did not wait for: they computed.")] = 0
    skipped_loads: Annotated[Count, doc("Loads that engines skipped because computing was faster.")] = 0
    paused_stores: Annotated[Count, doc(PAUSED_STORES)] = 0
    retained_blocks: Annotated[Count, doc("Blocks that hints retained.")] = 0
    unretained_blocks: Annotated[Count, doc("Blocks not retained although a hint asked for it: too many.")] = 0
    retained_found_keys: Annotated[Count, counter("Keys found in blocks that a hint retained.")] = 0
    released_blocks: Annotated[Count, doc("Blocks that hints released.")] = 0
    prefetched_keys: Annotated[Count, doc("Keys that hints had promoted from disks and stores.")] = 0
    unknown_hints: Annotated[Count, counter("Hints that engines did not know, could not read or did not send.")] = 0

    @property
    def all_prompt_tokens(self) -> int:
        """All tokens of the prompts that engines reported."""
        return sum(self.prompt_tokens.values())

    @property
    def loaded_prompt_tokens(self) -> int:
        """Tokens of these prompts that engines loaded."""
        return sum(self.prompt_tokens.get(source, 0) for source in LOADED_SOURCES)


class Window(Traffic, frozen=True):
    """Traffic of all namespaces over a period that ends now, without benches."""

    seconds: Annotated[Seconds, doc("Length of the period, shorter than its name soon after the start.")] = 0.0


Ratio = Annotated[float, doc(ge=0, le=1)]


class HitCurve(Part, frozen=True):
    """Hit ratio of the pool, and estimates for pools of other sizes. The weight of old lookups halves every day."""

    asked_tokens: Annotated[Count, gauge("Tokens looked up that engines lacked, weighted by age.")] = 0
    found_tokens: Annotated[Count, gauge("Tokens found in the pool, before each prompt's first missing block.")] = 0
    lru_hit_ratio: Annotated[dict[str, Ratio], gauge("Estimated hit ratio of lru, by times the size.", "times")] = {}


class BranchPoint(Part, frozen=True):
    """A place at which prompts with one beginning differ.

    Known only if engines send the tokens of blocks: with KV cache events.
    """

    at_tokens: Annotated[Count, doc("Tokens of the common beginning.")]
    prompts: Annotated[Count, doc("Prompts that differ there. Every day this and ``repeated_tokens`` are halved.")]
    repeated_tokens: Annotated[Count, doc("Tokens behind it that were computed although the same block was stored.")]
    seen_tokens: Annotated[Count, doc("Tokens of all blocks of the namespace, each counted once.")]


class ListedBranchPoint(BranchPoint, frozen=True):
    """A branch point of any namespace, with tokens of its prompts."""

    namespace: Fingerprint
    examples: Annotated[list[bytes], doc("Token ids, uint32, of the first different block of two prompts.")]


class NamespaceStats(Traffic, frozen=True):
    """One namespace, since the daemon's start."""

    id: Annotated[str, label("First 12 digits of the fingerprint.", "kv_namespace")] = ""
    model: Annotated[str, label("Label of the namespace: the engine's name of its model.", "model")] = ""
    fingerprint: Annotated[str, doc("The namespace's fingerprint, 64 hex digits.")] = ""
    of_bench: Annotated[bool, doc("Whether it belongs to a bench; then no sum includes it.")] = False
    ready_blocks: Annotated[Count, doc("Blocks of the namespace that can be read.")] = 0
    ready_bytes: Annotated[ByteCount, gauge("Pool bytes of the namespace's readable blocks.")] = 0
    disk_bytes: Annotated[ByteCount, doc("Bytes of the namespace's blocks on this node's disks.")] = 0
    invalidated_blocks: Annotated[Count, doc("Blocks dropped by reset, clear, engine, timeout or checksum.")] = 0
    quota_bytes: Annotated[ByteCount | None, gauge("Pool bytes that the namespace may use at most.")] = None
    world_size: Annotated[Count, doc("Ranks of an engine: shards that make a block.")] = 1
    prefill_tokens_per_second: Annotated[PerSecond, doc("Prefill rate an engine reported last; 0 if unknown.")] = 0.0
    curve: Annotated[HitCurve | None, doc("Hit ratios of pools of other sizes.")] = None
    branching: Annotated[BranchPoint | None, doc("The branch point that costs the most tokens.")] = None
    engines: Annotated[list[str], doc("Names of the engines that have it open, each with its pid if known.")] = []


class Lifetime(Part, frozen=True):
    """Totals that survive restarts; saved every ten seconds and at the end.

    On /metrics they are gauges: a kill loses the last seconds, so they may fall.
    """

    since: Annotated[Seconds, doc("Time when counting began, in seconds since 1970; 0 if nothing was counted.")] = 0.0
    loaded_tokens: Annotated[Count, gauge("Tokens that engines loaded, earlier runs included.")] = 0
    saved_seconds: Annotated[Seconds, gauge("Seconds of prefill that loads saved, earlier runs included.")] = 0.0


# --- the pool and copies -----------------------------------------------------------------------------


class PoolStats(Part, frozen=True):
    """State of the pool."""

    size_bytes: Annotated[ByteCount, gauge("Size of the pool in bytes.")] = 0
    bytes: Annotated[
        Labelled,
        gauge("Pool bytes: free, writing, ready, dropped (not freed yet), quarantined (bad checksum).", "state"),
    ] = {}
    usable_bytes: Annotated[ByteCount, doc("Bytes of the pool that are not quarantined.")] = 0
    pinned_bytes: Annotated[ByteCount, gauge("Bytes of the pool under a lease or a copy: they cannot be evicted.")] = 0
    retained_bytes: Annotated[ByteCount, gauge("Bytes of the pool that hints retain: they are evicted last.")] = 0
    pinned_for_gpu_bytes: Annotated[ByteCount, gauge("Bytes page-locked for GPUs, copied at full speed.")] = 0
    unpinnable_bytes: Annotated[ByteCount, gauge("Bytes that CUDA refused to page-lock, copied slowly.")] = 0
    pinning_gpu_bytes: Annotated[ByteCount, doc("Memory of the first GPU used for page-locking the pool.")] = 0
    index_bytes: Annotated[ByteCount, gauge("Memory of the slot table and index, most of it not resident.")] = 0
    numa_remote_slots: Annotated[Count, doc("Slots used so far on another NUMA node than their GPU.")] = 0
    integrated_gpus: Annotated[Count, doc("GPUs that take the host's memory, as the pool does.")] = 0
    at_the_end: Annotated[
        str, doc("What becomes of the memory: `ends with this process`, `is kept by systemd`, or `is kept in` a file.")
    ] = ""
    memory: Annotated[
        str,
        doc("`private`, `shared` (with systemd, peers or a file), or `reserved` (huge pages of the administrator's)."),
    ] = ""
    huge_page_bytes: Annotated[ByteCount, gauge("Bytes of the pool in huge pages when the daemon started.")] = 0
    page_slowdown: Annotated[
        float,
        doc("How many times as long reading the pool takes as reading huge pages, at the start; 0 if it has these."),
    ] = 0.0

    def of(self, state: str) -> int:
        return self.bytes.get(state, 0)


class CopyStats(Part, frozen=True):
    """One direction of copying."""

    jobs: Annotated[Count, counter("Copy jobs that ended.")] = 0
    failed_jobs: Annotated[Count, counter("Copy jobs that failed or were cancelled.")] = 0
    bytes: Annotated[ByteCount, counter("Bytes that copy jobs moved, including those of benches.")] = 0
    busy_seconds: Annotated[Seconds, doc("Seconds that copy threads spent copying.")] = 0.0
    queued_jobs: Annotated[Count, gauge("Copy jobs that are queued.")] = 0
    running_jobs: Annotated[Count, doc("Copy jobs that are running.")] = 0
    checksum_seconds: Annotated[Seconds, doc("CPU seconds spent on the checksums of copy jobs.")] = 0.0
    refused_batches: Annotated[Count, doc("Batches refused by a CUDA driver, copied piece by piece instead.")] = 0
    last_hour_jobs: Annotated[Count, doc("Copy jobs that ended in the last hour.")] = 0
    last_hour_failed_jobs: Annotated[Count, doc("Those of them that failed or were cancelled.")] = 0


class IntegrityStats(Part, frozen=True):
    """Comparisons of slots with their checksums."""

    checked_slots: Annotated[Count, doc("Slots compared with their checksums.")] = 0
    checked_bytes: Annotated[ByteCount, doc("Bytes compared with checksums.")] = 0
    mismatches: Annotated[Count, counter("Slots of the pool that did not match their checksum.")] = 0
    quarantined_slots: Annotated[Count, doc("Slots that did not match and are no longer used.")] = 0
    unverified_slots: Annotated[Count, doc("Slots whose checksum has not been compared or computed yet.")] = 0


FEW_DURATIONS = 20
"""Fewer durations than this have no 99th percentile: it would be the slowest of them, or a bucket's bound."""


class Histogram(Part, frozen=True):
    """Distribution of a duration, since the daemon's start unless noted otherwise."""

    buckets: Annotated[Labelled, doc("Number of durations up to each key, in seconds; ``+Inf`` counts all.")] = {}
    sum_seconds: Annotated[Seconds, doc("Sum of all durations; 0 for those of an hour.")] = 0.0

    @property
    def count(self) -> int:
        return self.buckets.get("+Inf", 0)

    def quantile(self, share: float) -> float:
        """Return the quantile in seconds, interpolated as Prometheus does; 0 without durations.

        It is never more than the largest bound.
        """
        wanted, below, below_s = share * self.count, 0, 0.0
        for bound, total in self.buckets.items():
            if bound == "+Inf":
                break
            if total >= wanted and total > below:
                return below_s + (float(bound) - below_s) * (wanted - below) / (total - below)
            below, below_s = total, float(bound)
        return below_s if self.count else 0.0

    @property
    def bound_of_all(self) -> float:
        """The least bound in seconds that no duration exceeds: infinity if one exceeds the largest, 0 without any."""
        bounds = (float(bound) for bound, total in self.buckets.items() if total == self.count)
        return next(bounds, 0.0) if self.count else 0.0

    def summary(self) -> str:
        """Return the median and the 99th percentile in words; of few durations their number and a bound of all."""
        if self.count >= FEW_DURATIONS:
            half, most = (format_duration(self.quantile(share)) for share in (0.5, 0.99))
            return f"p50 {half}, p99 {most}"
        if self.bound_of_all == inf:
            return f"{self.count}, the slowest took more than {format_duration(self.quantile(1.0))}"
        return f"{self.count}, each within {format_duration(self.bound_of_all)}" if self.count else "none"


# --- tiers below the pool ----------------------------------------------------------------------------


class DiskState(StrEnum):
    """State of a directory of the disk tier."""

    OPENING = "opening"
    SERVING = "serving"
    HANGING = "hanging"
    FAILED = "failed"


class DiskFault(StrEnum):
    """Kinds of disk errors, with their meanings."""

    meaning: str

    def __new__(cls, kind: str, meaning: str = "") -> DiskFault:
        fault = str.__new__(cls, kind)
        fault._value_ = kind
        fault.meaning = meaning
        return fault

    CORRUPT = "corrupt", "blocks read back differed from what was written: a bad drive; they were recomputed"
    TORN = "torn", "blocks that were incomplete on the drive when the machine stopped; they were recomputed"
    STARTED_ANEW = "started_anew", "the file could not be read and was emptied"
    TRUNCATED = "truncated", "the file had been truncated; the blocks beyond its end are lost"
    NOT_DIRECT = "not_direct", "the file system does not support O_DIRECT; reads and writes use the page cache"
    TOO_LARGE = "too_large", "blocks larger than any region; they are not written"
    READ_FAILED = "read_failed", "reads that failed; see dmesg and the drive's SMART data"
    WRITE_FAILED = "write_failed", "writes of blocks that failed; see dmesg and the drive's SMART data"
    RECORD_FAILED = "record_failed", "writes of records that failed; see dmesg and the drive's SMART data"
    SHORT_READ = "short_read", "reads that returned too few bytes; see dmesg and the drive's SMART data"
    NO_SPACE = "no_space", "writes that failed for lack of space although it was allocated; see the file system"
    HUNG = "hung", "times that a call hung, and nothing was read or written; see dmesg"
    BUG = "bug", "bugs; please report the traceback in the daemon's log"


PROMOTION_FAILURES = "failed", "corrupt", "deadline", "gone", "no_space", "overdue", "quota", "slower"
"""Reasons why a block of a tier was not promoted."""


NOT_WRITTEN = {
    "late": "were evicted before they could be written: engines were copying, or the tier was slow or unavailable",
    "budget": "were skipped: the daily write limit was reached",
    "unlikely": "were skipped: the tier is full and their reuse is unlikely",
}
"""Reasons why blocks that left the pool were not written to a tier."""


class TieringStats(Part, frozen=True):
    """Blocks moved between the pool and the disks."""

    promoted_blocks: Annotated[Count, counter("Blocks promoted from disk to the pool.")] = 0
    promoted_bytes: Annotated[ByteCount, doc("Bytes promoted from disk to the pool.")] = 0
    promotions_waiting: Annotated[Count, doc("Blocks being promoted or waiting for it.")] = 0
    promotions_failed: Annotated[Labelled, counter("Blocks on disk not promoted.", "reason", PROMOTION_FAILURES)] = {}
    promotions_unused: Annotated[Count, counter("Blocks promoted from disk and evicted before they were loaded.")] = 0
    written_blocks: Annotated[Count, counter("Blocks written from the pool to disk.")] = 0
    written_bytes: Annotated[ByteCount, doc("Bytes written from the pool to disk.")] = 0
    writes_waiting: Annotated[Count, doc("Blocks waiting to be written to disk.")] = 0
    not_written: Annotated[Labelled, counter("Blocks that left the pool unwritten.", "reason", NOT_WRITTEN)] = {}
    write_budget_left_bytes: Annotated[ByteCount | None, gauge("Bytes that disk_write_per_day allows now.")] = None
    write_mode: Annotated[str, doc("Which blocks are written: the setting ``disk_write``.")] = ""
    promotion_bytes_per_second: Annotated[PerSecond, doc("Speed of the latest promotions.")] = 0.0


class DiskStats(Part, frozen=True):
    """One directory of the disk tier. Counters count since the directory was opened."""

    directory: Annotated[str, label("Directory that holds the file.", "disk")]
    up: Annotated[bool, gauge("1 while the disk is in use, else 0.")] = False
    state: Annotated[str, doc("``opening``, ``serving``, ``hanging`` (a call does not return) or ``failed``.")] = ""
    problem: Annotated[str, doc("Sentence that says why the directory failed; empty otherwise.")] = ""
    size_bytes: Annotated[ByteCount, gauge("Bytes that kvoffd may use of the disk at most.")] = 0
    used_bytes: Annotated[ByteCount, gauge("Bytes of the blocks on the disk.")] = 0
    physical_bytes: Annotated[ByteCount, doc("Bytes that the file occupies on its device.")] = 0
    blocks: Annotated[Count, doc("Blocks on the disk that can be promoted.")] = 0
    oldest_seconds: Annotated[Seconds, doc("Largest possible age of the oldest block.")] = 0.0
    read_blocks: Annotated[Count, doc("Blocks read.")] = 0
    read_bytes: Annotated[ByteCount, counter("Bytes read from the disk, including headers of blocks.")] = 0
    written_blocks: Annotated[Count, doc("Blocks written.")] = 0
    written_bytes: Annotated[ByteCount, counter("Bytes written to the disk, including headers of blocks.")] = 0
    lifetime_written_bytes: Annotated[ByteCount, gauge("Bytes written to the disk since its file was created.")] = 0
    evicted_blocks: Annotated[Count, doc("Blocks evicted to make space for others.")] = 0
    missed_keys: Annotated[Count, counter("Keys of prompts that were missed while the disk was down.")] = 0
    queued_reads: Annotated[Count, doc("Reads that are queued.")] = 0
    queued_writes: Annotated[Count, doc("Writes that are queued.")] = 0
    direct: Annotated[bool, doc("Whether the file bypasses the page cache (O_DIRECT).")] = False
    errors: Annotated[Labelled, counter("Errors of the disk; the log has the sentences.", "kind", DiskFault)] = {}


class SharedServer(Part, frozen=True):
    """One server of a store, as this node saw it last."""

    name: Annotated[str, label("Host and port.", "server")]
    up: Annotated[bool, gauge("1 while the server answers and accepts the password, else 0.")] = False
    problem: Annotated[str, doc("Sentence that describes its last failure; empty for none.")] = ""


SHARED_ERRORS = {
    "unreachable": "connections that failed; check the URL, the network and the server",
    "timeout": "answers that did not arrive in time",
    "disconnected": "connections that the server closed",
    "credentials": "refused passwords or keys; check shared_password_file, which is read at the start",
    "forbidden": "commands that the user is not permitted to use; the daemon's log lists those it needs",
    "region": "refusals because the bucket is in another region than the URL says",
    "clock": "refusals because the clock of this machine or of the server is wrong",
    "bucket": "answers that the bucket does not exist; check the URL",
    "busy": "answers that the server is overloaded, or that a peer has lent as many blocks as it may",
    "helper": "attempts without the helper process for peers, which starts or has ended; see the log",
    "tls": "servers whose certificate could not be verified; SSL_CERT_FILE names its authority",
    "full": "writes refused for lack of space; see Redis's maxmemory and maxmemory-policy, or the bucket's quota",
    "mismatch": "objects that did not hold the expected block; they are removed from the store",
    "cluster": "servers of a cluster that has changed, is down, or needs a redis+cluster:// URL",
    "refused": "other refusals; the daemon's log has the first",
    "protocol": "answers that violate the protocol",
    "generation": "generations of namespaces that are not numbers",
    "internal": "bugs; please report the traceback in the daemon's log",
}
"""Kinds of a shared store's errors, with their meanings."""


class SharedStats(Part, frozen=True):
    """A store that nodes share, as this node sees it."""

    url: Annotated[str, label("URL of the store, without its password.", "store")]
    up: Annotated[bool, gauge("1 while the shared store is in use; 0 while it fails and is only probed.")] = False
    breaker_trips: Annotated[Count, doc("Times that the shared store was not used for a while after failures.")] = 0
    ask_seconds: Annotated[Seconds, gauge("Seconds until the shared store answers a lookup, a moving average.")] = 0.0
    asked_keys: Annotated[Count, counter("Keys looked up in the shared store.")] = 0
    found_keys: Annotated[Count, counter("Keys found in the shared store.")] = 0
    unanswered_keys: Annotated[Count, counter("Keys for which the shared store did not answer in time.")] = 0
    missed_keys: Annotated[Count, counter("Keys of prompts that were missed while the shared store was down.")] = 0
    read_blocks: Annotated[Count, doc("Blocks read into the pool.")] = 0
    read_bytes: Annotated[ByteCount, counter("Bytes read from the shared store.")] = 0
    queued_reads: Annotated[Count, doc("Reads that wait or run.")] = 0
    size_bytes: Annotated[ByteCount, gauge("Bytes that the shared store may hold; 0 if unknown.")] = 0
    used_bytes: Annotated[ByteCount, gauge("Bytes that the shared store uses; 0 if unknown.")] = 0
    full: Annotated[bool, gauge("1 while the store is full and gets only blocks likely to be reused.")] = False
    write_mode: Annotated[str, doc("Which blocks are written: the setting ``shared_write``.")] = ""
    written_blocks: Annotated[Count, doc("Blocks written.")] = 0
    written_bytes: Annotated[ByteCount, counter("Bytes written to the shared store.")] = 0
    already_stored: Annotated[Count, doc("Blocks not written because the store already had them.")] = 0
    dropped_writes: Annotated[Count, counter("Blocks not written to the store: it was full, slow or unavailable.")] = 0
    not_written: Annotated[Labelled, counter("Blocks that left the pool unwritten.", "reason", NOT_WRITTEN)] = {}
    dropped_removals: Annotated[Count, doc("Objects not removed from the store: it was slow or unavailable.")] = 0
    queued_writes: Annotated[Count, doc("Writes that wait or run.")] = 0
    mismatches: Annotated[Count, doc("Objects that did not hold the expected block; they are removed.")] = 0
    promotions_failed: Annotated[Labelled, doc("Blocks of the shared store that could not be promoted.")] = {}
    promotions_unused: Annotated[Count, counter("Blocks read from the store and evicted before they were loaded.")] = 0
    errors: Annotated[Labelled, counter("Errors of the shared store by kind; the log has the sentences.", "kind")] = {}
    servers: Annotated[list[SharedServer], part("Servers of the store; empty if unknown.", "server_")] = []
    unshared_namespaces: Annotated[Count, doc("Namespaces not shared, open or not: reset here, or damaged state.")] = 0


class LentStats(Part, frozen=True):
    """Blocks that this node lends to its peers."""

    up: Annotated[bool, doc("Whether the helper process serves peers.")] = False
    asked_keys: Annotated[Count, doc("Keys that peers looked up here.")] = 0
    found_keys: Annotated[Count, doc("Keys that peers found here.")] = 0
    blocks: Annotated[Count, doc("Blocks lent to peers.")] = 0
    bytes: Annotated[ByteCount, counter("Bytes lent to peers.")] = 0
    refused_requests: Annotated[Count, counter("Requests of peers that a limit cut short, or that were invalid.")] = 0
    refused_handshakes: Annotated[
        Count, counter("Connections to peer_listen that were refused: of another secret, or of no kvoffd.")
    ] = 0
    leases: Annotated[Count, doc("Requests of peers whose blocks are lent now.")] = 0
    pinned_bytes: Annotated[ByteCount, doc("Pool bytes that are lent now.")] = 0


# --- the policy --------------------------------------------------------------------------------------


class PolicyClass(Part, frozen=True):
    """Statistics of a learning policy on one class of keys.

    Ages are in pool lifetimes. In one lifetime as many bytes are accessed as the pool holds.
    """

    name: Annotated[str, doc("Name of the class: the property that its keys share.")] = ""
    accessed_share: Annotated[float, doc("Its share of the keys looked up recently, 0 to 1.")] = 0.0
    return_chance: Annotated[float, doc("Probability that one of its keys is looked up again, 0 to 1.")] = 0.0
    return_age: Annotated[float, doc("Median age at reuse.")] = 0.0
    pool_bytes: Annotated[ByteCount, doc("Pool bytes of its blocks.")] = 0
    score: Annotated[float, doc("Highest expected number of hits of one block per pool lifetime.")] = 0.0


class LearnedStats(Part, frozen=True):
    """State of the learning policy; 0 and empty for other policies."""

    requests: Annotated[Count, doc("Prompts that it has seen.")] = 0
    known_keys: Annotated[Count, doc("Keys that it remembers, with and without a block.")] = 0
    as_lru: Annotated[bool, doc("Whether it evicts like lru for now, because lru would have had more hits.")] = False
    classes: Annotated[list[PolicyClass], doc("Classes by their share of lookups, largest first.")] = []


# --- the statistics --------------------------------------------------------------------------------


class Problem(Part, frozen=True):
    """A problem for an operator to solve."""

    reason: Annotated[str, doc("Kind of problem, one word for scripts.")]
    sentence: Annotated[str, doc("The problem and what to do about it.")] = ""


class SettingInfo(Part, frozen=True):
    """One setting of the running daemon."""

    name: Annotated[str, doc("Name, as in the configuration file.")]
    value: Annotated[str, doc("Value, as a flag would give it.")]
    source: Annotated[str, doc("``default``, ``flag --numa``, ``variable KVOFFD_NUMA`` or ``file PATH``.")] = "default"


ERROR_NAMES = [code.name.lower() for code in ErrorCode]


class DaemonStats(Part, frozen=True):
    """All statistics of a daemon, since its start unless noted otherwise."""

    version: Annotated[str, doc("Release of the daemon, and the commit of a build after it.")] = ""
    node: Annotated[str, doc("Host name of the daemon's machine or container.")] = ""
    policy: Annotated[str, doc("Eviction policy.")] = ""
    pid: Annotated[int, doc("Process id, in the daemon's own pid namespace.", ge=0)] = 0
    uptime_seconds: Annotated[Seconds, gauge("Seconds since the daemon's start.")] = 0.0
    ready: Annotated[bool, gauge("1 while the daemon accepts sessions and jobs, else 0.")] = True
    health: Annotated[HealthLevel, doc("``ok``, ``degraded`` or ``down``.")] = HealthLevel.OK
    health_problems: Annotated[list[Problem], gauge("Problems, which kvoffd-cli health explains.", "reason")] = []
    sessions: Annotated[Count, gauge("Sessions of engines that are open.")] = 0
    ended_sessions: Annotated[Labelled, counter("Engines' sessions that ended, by reason; gone: died.", "reason")] = {}
    leases: Annotated[Count, gauge("Leases that engines hold on blocks.")] = 0
    pinned_blocks: Annotated[Count, doc("Blocks under a lease or a copy.")] = 0
    requests: Annotated[Count, counter("Requests that the daemon answered, including errors.")] = 0
    errors: Annotated[Labelled, counter("Requests that the daemon refused, by error.", "code", ERROR_NAMES)] = {}
    last_hour_requests: Annotated[Count, doc("Requests of the last hour, including errors.")] = 0
    last_hour_errors: Annotated[Labelled, doc("Requests refused in the last hour, by error code.")] = {}
    replies_dropped: Annotated[Labelled, doc("Replies not sent: the client is gone, or has too many unread.")] = {}
    kv_events: Annotated[Count, doc("KV event messages that were published.")] = 0
    cpu_seconds: Annotated[Seconds, doc("CPU seconds that the daemon used.")] = 0.0
    resident_bytes: Annotated[ByteCount, gauge("Resident memory of the daemon without the pool and its table.")] = 0
    lookup_seconds: Annotated[Histogram, histogram("Seconds that the daemon spent on each lookup.")] = Histogram()
    loop_blocked_seconds: Annotated[Histogram, histogram("Seconds for which the event loop was blocked.")] = Histogram()
    loop_blocked_max_seconds: Annotated[Seconds, gauge("Longest time for which the event loop was blocked.")] = 0.0
    cancelled_stores: Annotated[Count, doc("Stores cancelled before their copy: vLLM needed the blocks.")] = 0
    pool: Annotated[PoolStats, part("The pool.", "pool_")] = PoolStats()
    store: Annotated[CopyStats, part("Copies from engines to the pool.", "copy_", ("direction", "store"))] = CopyStats()
    load: Annotated[CopyStats, part("Copies from the pool to engines.", "copy_", ("direction", "load"))] = CopyStats()
    since_start: Annotated[Window, doc("Traffic of all namespaces, including removed ones.")] = Window()
    last_day: Annotated[Window, doc("Traffic of the last 24 hours.")] = Window()
    last_hour: Annotated[Window, doc("Traffic of the last hour.")] = Window()
    last_minute: Annotated[Window, doc("Traffic of the last minute.")] = Window()
    lifetime: Annotated[Lifetime, part("Totals that survive restarts.", "lifetime_")] = Lifetime()
    namespaces: Annotated[list[NamespaceStats], part("Namespaces, the largest first.", "namespace_")] = []
    gone_namespaces: Annotated[Count, doc("Removed namespaces that are included in ``since_start``.")] = 0
    integrity: Annotated[IntegrityStats, part("Comparisons with checksums.", "integrity_")] = IntegrityStats()
    tiers: Annotated[TieringStats | None, part("Traffic with the disks; null without a tier.", "tiers_")] = None
    disks: Annotated[list[DiskStats], part("Directories of the disk tier.", "disk_")] = []
    shared: Annotated[list[SharedStats], part("Stores that nodes share.", "shared_")] = []
    lent: Annotated[LentStats | None, part("Blocks lent to peers; null without peer_listen.", "lent_")] = None
    curve: Annotated[HitCurve | None, part("Hit ratios of pools of other sizes.", "curve_")] = None
    curve_seen_bytes: Annotated[ByteCount, doc("Bytes of the distinct blocks looked up, up to ten times the pool.")] = 0
    ghost_entries: Annotated[Count, doc("Keys without a block that the policy remembers.")] = 0
    policy_bytes: Annotated[ByteCount, doc("Memory that the policy uses for keys.")] = 0
    learned: Annotated[LearnedStats, doc("State of the learning policy.")] = LearnedStats()
    settings: Annotated[list[SettingInfo], doc("The settings that the daemon runs with.")] = []
    paying_off: Annotated[bool | None, doc("Whether the cache pays off; null if it is too early to say.")] = None
    verdict: Annotated[str, doc("Sentence on whether the cache pays off, and why not.")] = ""
    protocol: Annotated[Count, doc("Version of the protocol that the daemon speaks.")] = 0
    log_level: Annotated[str, doc("Least severe records that the daemon logs now; empty if it does not say.")] = ""
    last_hour_loop_blocked: Annotated[Histogram, doc("As ``loop_blocked_seconds``, of the last hour.")] = Histogram()


class StatsReply(Reply, frozen=True):
    stats: Annotated[DaemonStats, doc("All counters: maps, as in ``kvoffd-cli stats --json``.")]


@exchange(ANY_ROLE)
class Stats(Request[StatsReply], frozen=True):
    """Asks for all counters."""


class BranchPointsListed(Reply, frozen=True):
    points: Annotated[list[ListedBranchPoint], doc("The most costly ones of each namespace, at most 8, worst first.")]


@exchange(ADMIN)
class ListBranchPoints(Request[BranchPointsListed], frozen=True):
    """Asks where prompts differ although what follows is the same. Admin only: the answer has tokens of prompts."""
