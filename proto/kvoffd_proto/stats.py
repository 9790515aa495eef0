"""What the daemon counts, in one encoding: maps, so that ``msgspec.json.encode`` of a DaemonStats is what
``kvoffd-cli stats --json`` prints, what ``/stats.json`` serves and what the page at ``/`` reads.

A number is defined once, by its field. A field with ``counter``, ``gauge`` or ``histogram`` is on /metrics too, under
``kvoffd_``, the prefix of its part and its own name, and ``_total`` for a counter. Readers ignore fields that they do
not know, and take the default for one that is missing: a command and a daemon of different releases understand each
other.

The names, in short. ``Traffic`` is counted for each namespace, and in sum over the last minute, the last hour and since
the start (``last_minute``, ``last_hour``, ``since_start``):

    asked_keys = loaded_keys + not_needed_keys + sum(misses.values()), always
    loaded_keys, loaded_tokens, saved_seconds    what was brought, and the seconds of prefill that this saved
    not_needed_keys                              found, and not loaded: the engine had them itself
    misses{reason}                               MISS_REASONS has the reasons with their meaning
    found_keys{pool, disk, shared}               where keys were found: loaded, not needed, ``late`` or ``skipped``
    asked_tokens                                 tokens of the prompts that were looked up

``lifetime`` has totals that outlive the daemon. A namespace's ``id`` is the first 12 hex digits of its fingerprint,
wherever one is shown; ``model`` is its label.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    ANY_ROLE,
    ByteCount,
    Count,
    PerSecond,
    Reply,
    Request,
    Seconds,
    doc,
    exchange,
    metas_of,
)

# --- fields and their annotations ----------------------------------------------------------------


class Metric(NamedTuple):
    """What /metrics shows of a field: a ``counter``, ``gauge`` or ``histogram``; a ``label`` that tells the Structs of
    a list apart; or a ``part``, a Struct or a list of Structs that holds metrics.

    Attributes:
        label: a label's name; of a map, and of a list that is counted by its Structs' first field, that of the key.
        fixed: of a part, name and value of a label that all of it has.
        keys: of a map, those that are there from the start, at 0: ``increase`` misses what a series begins with.
    """

    kind: str
    label: str = ""
    prefix: str = ""
    fixed: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def _metric(kind: str, description: str, label: str = "", keys: Iterable[str] = ()) -> Meta:
    return Meta(description=description, extra={"metric": Metric(kind, label, keys=tuple(keys))})


counter, gauge, histogram = partial(_metric, "counter"), partial(_metric, "gauge"), partial(_metric, "histogram")
"""Describe a field that is such a metric. There is no sample of a gauge while it is None."""
label = partial(_metric, "label")
"""Describe a field that tells the Structs of a list apart, and the name of its label."""


def part(description: str, prefix: str, fixed: tuple[str, ...] = ()) -> Meta:
    """Describe a field whose Structs hold metrics. Without it no field of a Struct is on /metrics."""
    return Meta(description=description, extra={"metric": Metric("part", "", prefix, fixed)})


def metric_of(hint: object) -> Metric | None:
    """What a field is on /metrics, if anything."""
    return next((meta.extra["metric"] for meta in metas_of(hint) if meta.extra and "metric" in meta.extra), None)


class Part(Struct, frozen=True):
    """Base of statistics: maps, whose readers ignore what they do not know."""


ID_DIGITS = 12


def namespace_id(fingerprint: bytes | str) -> str:
    """A namespace's name for people, wherever one is shown: the first 12 hex digits of its fingerprint."""
    return (fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint)[:ID_DIGITS]


Labelled: TypeAlias = dict[str, Count]


# --- traffic ---------------------------------------------------------------------------------------

SOURCES = "pool", "disk", "shared"
MISS_REASONS = {
    "unknown": "never stored, or gone for too long to be remembered",
    "evicted": "evicted to make space for others",
    "rejected": "not stored: the eviction policy expected no reuse",
    "no_space": "not stored or not promoted: the pool had no space",
    "partial": "still being written, or a rank has not stored its part",
    "invalidated": "dropped by a reset, a clear or an engine",
    "corrupt": "did not match its checksum",
    "tier_late": "on a disk or in a shared store, and not read in time",
    "tier_failed": "on a disk or in a shared store that failed",
    "lease_limit": "in the pool, but the session may lease no more",
    "late": "found, but the engine did not wait for it",
    "skipped": "found, but computing was faster than loading",
    "quota": "evicted or not stored: its namespace had its quota",
}
"""Why a key that was asked for was not brought, and what it means."""
NO_SPACE_CAUSES = {
    "quota": "a namespace had its quota, all of it pinned or being written",
    "pinned": "leases and copies pinned the pool",
    "filling": "the pool was full of blocks that were being written",
    "sizes": "the space lay between pinned blocks of another size",
    "too_large": "a block takes more than the pool has",
}
"""What had the space that keys to be stored did not get."""


class Traffic(Part, frozen=True):
    """What engines asked for, got and stored. asked_keys = loaded_keys + not_needed_keys + all misses."""

    lookups: Annotated[Count, counter("Lookups of prompts in a namespace.")] = 0
    asked_keys: Annotated[Count, counter("Keys (block hashes) that lookups asked for and whose outcome is known.")] = 0
    loaded_keys: Annotated[Count, counter("Keys that lookups asked for and engines loaded.")] = 0
    not_needed_keys: Annotated[
        Count, doc("Keys found and not loaded: the engine had them, or dropped the request.")
    ] = 0
    misses: Annotated[Labelled, counter("Keys that lookups asked for and did not get, by reason.", "reason")] = {}
    found_keys: Annotated[
        Labelled, counter("Keys found, by source. Engines ask for what they hold too.", "source", SOURCES)
    ] = {}
    asked_tokens: Annotated[Count, counter("Tokens of the prompts that lookups asked for, in whole blocks.")] = 0
    loaded_tokens: Annotated[Count, counter("Tokens that engines loaded and did not have to compute.")] = 0
    saved_seconds: Annotated[Seconds, counter("Seconds of prefill saved, by the speed that engines reported.")] = 0.0
    loaded_bytes: Annotated[ByteCount, counter("Bytes copied from the pool to engines.")] = 0
    stored_bytes: Annotated[ByteCount, counter("Bytes copied from engines to the pool.")] = 0
    stored_blocks: Annotated[Count, doc("Blocks that were stored whole and became readable.")] = 0
    evicted_blocks: Annotated[Count, counter("Blocks evicted from the pool for others, by a quota too.")] = 0
    no_space_keys: Annotated[Count, counter("Keys not stored, since the pool, or the quota, had no space.")] = 0
    no_space_causes: Annotated[
        Labelled, doc("Keys not stored, by what had the space: " + ", ".join(NO_SPACE_CAUSES) + ".")
    ] = {}
    rejected_keys: Annotated[Count, doc("Keys that were not stored, since the eviction policy rejected them.")] = 0
    late_lookups: Annotated[Count, counter("Lookups whose answer engines did not wait for: they computed.")] = 0
    skipped_loads: Annotated[Count, doc("Loads that engines skipped, since computing was faster.")] = 0
    paused_stores: Annotated[Count, doc("Stores that engines skipped, since they had waited too long for stores.")] = 0


class Window(Traffic, frozen=True):
    """Traffic of all namespaces over a stretch of time that ends now. Benches are in no sum."""

    seconds: Annotated[Seconds, doc("Length of the stretch: shorter than its name says soon after the start.")] = 0.0


Ratio = Annotated[float, doc(ge=0, le=1)]


class HitCurve(Part, frozen=True):
    """What requests for tokens found, and would have found in pools of other sizes. What is a day old weighs half."""

    asked_tokens: Annotated[Count, gauge("Tokens that requests asked for, as far as they still count.")] = 0
    found_tokens: Annotated[Count, gauge("Tokens of those in the pool, up to the first block that was not.")] = 0
    lru_hit_ratio: Annotated[
        dict[str, Ratio],
        gauge("Share of tokens that lru would find in a pool of so many times the size; estimated.", "times"),
    ] = {}


MAX_NAMESPACE_ROWS = 100
"""Namespaces with a row of their own: each costs a scrape of /metrics some twenty series."""
OTHERS = "other"
"""``id`` of the row in which the other namespaces are summed."""


class NamespaceStats(Traffic, frozen=True):
    """One namespace, since the daemon's start."""

    id: Annotated[str, label("First 12 digits of the fingerprint; ``other`` beyond 100.", "kv_namespace")] = ""
    model: Annotated[str, label("Name of the namespace: its model, as the engine calls it.", "model")] = ""
    fingerprint: Annotated[str, doc("The namespace's fingerprint, 64 hex digits; empty for ``other``.")] = ""
    of_bench: Annotated[bool, doc("Whether a bench made it: it is in no sum.")] = False
    ready_blocks: Annotated[Count, doc("Blocks of the namespace that can be read.")] = 0
    ready_bytes: Annotated[ByteCount, gauge("Pool bytes of the namespace's readable blocks.")] = 0
    disk_bytes: Annotated[ByteCount, doc("Bytes of the namespace's blocks on this node's disks.")] = 0
    invalidated_blocks: Annotated[Count, doc("Blocks dropped by reset, clear, engine, timeout or checksum.")] = 0
    partial_blocks: Annotated[Count, doc("Blocks dropped because a rank did not store its part within 60 seconds.")] = 0
    quota_bytes: Annotated[ByteCount | None, gauge("Pool bytes that the namespace may have at most.")] = None
    prefill_tokens_per_second: Annotated[PerSecond, doc("Of prompts, as an engine reported last; 0 if not known.")] = (
        0.0
    )
    curve: Annotated[HitCurve | None, doc("What pools of other sizes would have found.")] = None


class Lifetime(Part, frozen=True):
    """Totals that outlive the daemon; saved every ten seconds and at the end.

    On /metrics they are gauges: after a kill they fall by what the last seconds brought.
    """

    since: Annotated[Seconds, doc("When counting began, in seconds since 1970; 0 where nothing was counted.")] = 0.0
    loaded_tokens: Annotated[Count, gauge("Tokens that engines loaded, earlier runs included.")] = 0
    saved_seconds: Annotated[Seconds, gauge("Seconds of prefill that loads saved, earlier runs included.")] = 0.0


# --- the pool and copies -----------------------------------------------------------------------------


class PoolStats(Part, frozen=True):
    """State of the pool."""

    size_bytes: Annotated[ByteCount, gauge("Size of the pool in bytes.")] = 0
    bytes: Annotated[
        Labelled,
        gauge(
            "Bytes of the pool by state: free, filling (being written), ready, evicting (dropped, but not freed yet), "
            "quarantined (bad checksum).",
            "state",
        ),
    ] = {}
    usable_bytes: Annotated[ByteCount, doc("Bytes of the pool without what is quarantined.")] = 0
    pinned_bytes: Annotated[ByteCount, gauge("Bytes of the pool under a lease or a copy: they cannot be evicted.")] = 0
    pinned_for_gpu_bytes: Annotated[ByteCount, gauge("Bytes page-locked for GPUs, which then copy at full speed.")] = 0
    unpinnable_bytes: Annotated[ByteCount, gauge("Bytes that CUDA refused to page-lock: GPUs copy them slowly.")] = 0
    pinning_gpu_bytes: Annotated[ByteCount, doc("Memory of the first GPU that page-locking the pool took.")] = 0
    index_bytes: Annotated[ByteCount, gauge("Memory of what is known of the slots, most of it untouched.")] = 0
    numa_remote_slots: Annotated[Count, doc("Slots so far that are on another NUMA node than their GPU.")] = 0

    def of(self, state: str) -> int:
        """Bytes in a state."""
        return self.bytes.get(state, 0)


class CopyStats(Part, frozen=True):
    """One direction of copying."""

    jobs: Annotated[Count, counter("Copy jobs that ended.")] = 0
    failed_jobs: Annotated[Count, counter("Copy jobs that failed or were cancelled.")] = 0
    bytes: Annotated[ByteCount, counter("Bytes that copy jobs moved, those of benches included.")] = 0
    busy_seconds: Annotated[Seconds, doc("Seconds that copy threads spent copying.")] = 0.0
    queued_jobs: Annotated[Count, gauge("Copy jobs that wait.")] = 0
    running_jobs: Annotated[Count, doc("Copy jobs that run.")] = 0
    checksum_seconds: Annotated[Seconds, doc("CPU seconds spent on the checksums of copy jobs.")] = 0.0
    refused_batches: Annotated[Count, doc("Batches that a CUDA driver refused: their pieces were copied.")] = 0


class IntegrityStats(Part, frozen=True):
    """Comparisons of slots with their checksums."""

    checked_slots: Annotated[Count, doc("Slots whose bytes were compared with their checksum.")] = 0
    checked_bytes: Annotated[ByteCount, doc("Bytes that were compared with their checksum.")] = 0
    mismatches: Annotated[Count, counter("Slots of the pool that did not match their checksum.")] = 0
    quarantined_slots: Annotated[Count, doc("Slots that did not match, and are used no more.")] = 0
    unverified_slots: Annotated[Count, doc("Slots whose checksum is still to be compared or taken.")] = 0


class Histogram(Part, frozen=True):
    """Distribution of a duration since the daemon's start."""

    buckets: Annotated[Labelled, doc("Durations up to each key, in seconds; ``+Inf`` has all.")] = {}
    sum_seconds: Annotated[Seconds, doc("Sum of all durations.")] = 0.0

    @property
    def count(self) -> int:
        """How many durations there were."""
        return self.buckets.get("+Inf", 0)

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations took at most, interpolated as Prometheus does; 0 where none was.

        The largest bound where it lies above that.
        """
        wanted, below, below_s = share * self.count, 0, 0.0
        for bound, total in self.buckets.items():
            if bound == "+Inf":
                break
            if total >= wanted and total > below:
                return below_s + (float(bound) - below_s) * (wanted - below) / (total - below)
            below, below_s = total, float(bound)
        return below_s if self.count else 0.0


# --- tiers below the pool ----------------------------------------------------------------------------


class DiskState(StrEnum):
    """Where a directory of the disk tier is in its life."""

    OPENING = "opening"
    SERVING = "serving"
    HANGING = "hanging"
    FAILED = "failed"


class DiskFault(StrEnum):
    """What kinds of errors a disk has, each with what it means."""

    meaning: str

    def __new__(cls, kind: str, meaning: str = "") -> DiskFault:
        fault = str.__new__(cls, kind)
        fault._value_ = kind
        fault.meaning = meaning
        return fault

    CORRUPT = "corrupt", "blocks read back were not as they were written: a bad drive; they were recomputed"
    TORN = "torn", "blocks that the drive had not written whole when the machine stopped; they were recomputed"
    STARTED_ANEW = "started_anew", "the file could not be read and was emptied"
    TRUNCATED = "truncated", "the file had been cut off; the blocks beyond are lost"
    NOT_DIRECT = "not_direct", "the file system refuses O_DIRECT; reads and writes go through the page cache"
    TOO_LARGE = "too_large", "blocks that no region has room for; they are not written"
    READ_FAILED = "read_failed", "reads that failed; see dmesg and the drive's own report"
    WRITE_FAILED = "write_failed", "writes of blocks that failed; see dmesg and the drive's own report"
    RECORD_FAILED = "record_failed", "writes of records that failed; see dmesg and the drive's own report"
    SHORT_READ = "short_read", "reads that ended too soon; see dmesg and the drive's own report"
    NO_SPACE = "no_space", "writes that found no space, though it was allocated; see the file system"
    HUNG = "hung", "times that a call did not return for long, and nothing was read and written; see dmesg"
    BUG = "bug", "bugs; please report the traceback in the daemon's log"


PROMOTION_FAILURES = "failed", "corrupt", "deadline", "gone", "no_space", "overdue", "quota", "slower"
"""Why a block that a tier has was not promoted."""


NOT_WRITTEN = {
    "late": "were evicted before their turn: engines copied, or the tier was slow or away",
    "budget": "were left out, as the day's bytes were written",
    "unlikely": "were left out, as little of their kind comes back and the tier is full",
}
"""Why blocks that left the pool were not written to a tier."""


class TieringStats(Part, frozen=True):
    """Blocks moved between the pool and the disks."""

    promoted_blocks: Annotated[Count, counter("Blocks promoted from disk to the pool.")] = 0
    promoted_bytes: Annotated[ByteCount, doc("Bytes promoted from disk to the pool.")] = 0
    promotions_waiting: Annotated[Count, doc("Blocks that are being promoted, or wait for it.")] = 0
    promotions_failed: Annotated[
        Labelled, counter("Blocks on disk that were not promoted.", "reason", PROMOTION_FAILURES)
    ] = {}
    promotions_unused: Annotated[Count, counter("Blocks promoted from disk and evicted before they were loaded.")] = 0
    demoted_blocks: Annotated[Count, counter("Blocks written from the pool to disk.")] = 0
    demoted_bytes: Annotated[ByteCount, doc("Bytes written from the pool to disk.")] = 0
    demotions_waiting: Annotated[Count, doc("Blocks that wait to be written to disk.")] = 0
    not_written: Annotated[Labelled, counter("Blocks that left the pool and no disk has.", "reason", NOT_WRITTEN)] = {}
    write_budget_left_bytes: Annotated[ByteCount | None, gauge("Bytes that disk_write_per_day allows now.")] = None
    write_mode: Annotated[str, doc("Which blocks are written: the setting ``disk_write``.")] = ""
    promotion_bytes_per_second: Annotated[PerSecond, doc("Speed of the latest promotions.")] = 0.0


class DiskStats(Part, frozen=True):
    """One directory of the disk tier. Counters count since the directory was opened."""

    directory: Annotated[str, label("Directory that holds the file.", "disk")]
    up: Annotated[bool, gauge("1 while the disk is read and written, else 0.")] = False
    state: Annotated[str, doc("``opening``, ``serving``, ``hanging`` (a call does not return) or ``failed``.")] = ""
    problem: Annotated[str, doc("Why the directory failed, a sentence; empty otherwise.")] = ""
    size_bytes: Annotated[ByteCount, gauge("Bytes that kvoffd may take of the disk at most.")] = 0
    used_bytes: Annotated[ByteCount, gauge("Bytes of the disk's blocks.")] = 0
    physical_bytes: Annotated[ByteCount, doc("Bytes that the file takes of its device.")] = 0
    blocks: Annotated[Count, doc("Blocks on the disk that can be promoted.")] = 0
    oldest_seconds: Annotated[Seconds, doc("Age of the oldest block at most; of earlier runs to the hour.")] = 0.0
    read_blocks: Annotated[Count, doc("Blocks read.")] = 0
    read_bytes: Annotated[ByteCount, counter("Bytes read from the disk, headers of blocks included.")] = 0
    written_blocks: Annotated[Count, doc("Blocks written.")] = 0
    written_bytes: Annotated[ByteCount, counter("Bytes written to the disk, headers of blocks included.")] = 0
    lifetime_written_bytes: Annotated[ByteCount, gauge("Bytes written to the disk since its file was made.")] = 0
    evicted_blocks: Annotated[Count, doc("Blocks evicted to make space for others.")] = 0
    refused_writes: Annotated[Count, doc("Writes to the disk that were refused: too many were under way.")] = 0
    queued_reads: Annotated[Count, doc("Reads that wait.")] = 0
    queued_writes: Annotated[Count, doc("Writes that wait.")] = 0
    running_reads: Annotated[Count, doc("Reads that run.")] = 0
    running_writes: Annotated[Count, doc("Writes that run.")] = 0
    busy_seconds: Annotated[Seconds, doc("Seconds in which blocks were read, and that threads spent writing.")] = 0.0
    direct: Annotated[bool, doc("Whether the file bypasses the page cache (O_DIRECT).")] = False
    errors: Annotated[Labelled, counter("Errors of the disk; the log has the sentences.", "kind", DiskFault)] = {}


class SharedServer(Part, frozen=True):
    """One server of a store, as this node found it last."""

    name: Annotated[str, label("Host and port.", "server")]
    up: Annotated[bool, gauge("1 while the server answers and takes the password, else 0.")] = False
    problem: Annotated[str, doc("What failed last there, a sentence; empty where nothing did.")] = ""


SHARED_ERRORS = {
    "unreachable": "attempts to connect that failed; see the URL, the network and whether the server runs",
    "timeout": "answers that did not come in time",
    "disconnected": "connections that the server closed",
    "credentials": "refusals of the password or the keys; see shared_password_file, which is read at the start",
    "forbidden": "commands that the user may not give; the daemon's log says which it needs",
    "region": "refusals because the URL names another region than the bucket's",
    "clock": "refusals because this machine's clock, or the server's, is wrong",
    "bucket": "answers that there is no such bucket; see the URL",
    "busy": "answers that the server has too much to do",
    "tls": "connections whose server does not prove who it is; SSL_CERT_FILE names its authority",
    "full": "writes that there is no space for; see Redis's maxmemory and maxmemory-policy, or the bucket's quota",
    "mismatch": "objects that were not the block that they should be; they are removed there",
    "cluster": "servers of a cluster that was not named as redis+cluster://, has changed, or is down",
    "refused": "other refusals; the daemon's log has the first",
    "protocol": "answers that are not what the protocol says",
    "generation": "generations of namespaces that are no numbers",
    "internal": "bugs; please report the traceback in the daemon's log",
}
"""What the kinds of a shared store's errors are."""


class SharedStats(Part, frozen=True):
    """A store that nodes share, as this node sees it."""

    url: Annotated[str, label("URL of the store, without its password.", "store")]
    up: Annotated[bool, gauge("1 while the shared store is asked; 0 while it fails and is only probed.")] = False
    breaker_trips: Annotated[Count, doc("Times that the shared store was not asked for a while after failures.")] = 0
    ask_seconds: Annotated[Seconds, gauge("Seconds that asking the shared store takes, a moving average.")] = 0.0
    asked_keys: Annotated[Count, counter("Keys that the shared store was asked for.")] = 0
    found_keys: Annotated[Count, counter("Keys that the shared store had.")] = 0
    unanswered_keys: Annotated[Count, counter("Keys for which the shared store did not answer in time.")] = 0
    read_blocks: Annotated[Count, doc("Blocks read into the pool.")] = 0
    read_bytes: Annotated[ByteCount, counter("Bytes read from the shared store.")] = 0
    queued_reads: Annotated[Count, doc("Reads that wait or run.")] = 0
    size_bytes: Annotated[ByteCount, gauge("Bytes that the shared store may hold; 0 where it does not say.")] = 0
    used_bytes: Annotated[ByteCount, gauge("Bytes that the shared store uses; 0 where it does not say.")] = 0
    full: Annotated[bool, gauge("1 while the shared store is full, and gets what is likely to come back.")] = False
    write_mode: Annotated[str, doc("Which blocks are written: the setting ``shared_write``.")] = ""
    written_blocks: Annotated[Count, doc("Blocks written.")] = 0
    written_bytes: Annotated[ByteCount, counter("Bytes written to the shared store.")] = 0
    already_stored: Annotated[Count, doc("Blocks that were to be written and were there already.")] = 0
    dropped_writes: Annotated[Count, counter("Blocks not written to the store: it was full, slow or away.")] = 0
    not_written: Annotated[
        Labelled, counter("Blocks that left the pool and were not offered to the store.", "reason", NOT_WRITTEN)
    ] = {}
    dropped_removals: Annotated[Count, doc("Objects not removed there: the store was slow or away.")] = 0
    queued_writes: Annotated[Count, doc("Writes that wait or run.")] = 0
    mismatches: Annotated[Count, doc("Objects that were not the block that they should be; they are removed.")] = 0
    promotions_failed: Annotated[Labelled, doc("Blocks that the shared store had and that were not promoted.")] = {}
    promotions_unused: Annotated[Count, counter("Blocks read from the store and evicted before they were loaded.")] = 0
    errors: Annotated[Labelled, counter("Errors of the shared store by kind; the log has the sentences.", "kind")] = {}
    servers: Annotated[list[SharedServer], part("Servers of the store; empty where it cannot tell.", "server_")] = []
    unshared_namespaces: Annotated[Count, doc("Namespaces that are not shared since an engine reset them.")] = 0


# --- what the policy learned -------------------------------------------------------------------------


class PolicyClass(Part, frozen=True):
    """What a learning policy has learned of the keys of one class.

    Ages are in pool lifetimes: the time in which as many bytes are accessed as the pool holds.
    """

    name: Annotated[str, doc("What tells its keys from others.")] = ""
    accessed_share: Annotated[float, doc("Its part of the keys that were asked for lately, 0 to 1.")] = 0.0
    return_chance: Annotated[float, doc("Chance that such a key is asked for again, 0 to 1.")] = 0.0
    return_age: Annotated[float, doc("Age by which half of those that come back have done so.")] = 0.0
    pool_bytes: Annotated[ByteCount, doc("Pool bytes of its blocks.")] = 0
    score: Annotated[float, doc("Most hits to be expected for a block of it in a pool lifetime.")] = 0.0


class LearnedStats(Part, frozen=True):
    """What the policy knows of requests. All is 0 and empty for one that does not learn."""

    requests: Annotated[Count, doc("Requests that it has seen.")] = 0
    known_keys: Annotated[Count, doc("Keys that it knows, with and without a block.")] = 0
    as_lru: Annotated[bool, doc("Whether blocks go as with lru for a while, since that had more hits.")] = False
    classes: Annotated[list[PolicyClass], doc("By their part of what was asked for, the largest first.")] = []


# --- the statistics --------------------------------------------------------------------------------


class Problem(Part, frozen=True):
    """Something that an operator should see to."""

    reason: Annotated[str, doc("What kind it is, one word for scripts.")]
    sentence: Annotated[str, doc("What it is and what to do.")] = ""


class SettingInfo(Part, frozen=True):
    """One setting of the running daemon."""

    name: Annotated[str, doc("Its name, as in the configuration file.")]
    value: Annotated[str, doc("Its value, as a flag would give it.")]
    source: Annotated[str, doc("As ``default``, ``flag --numa``, ``variable KVOFFD_NUMA``, ``file PATH``.")] = "default"


ERROR_NAMES = [code.name.lower() for code in ErrorCode]


class DaemonStats(Part, frozen=True):
    """Everything that a daemon counts, since its start where no time is named."""

    version: Annotated[str, doc("Release of the daemon.")] = ""
    policy: Annotated[str, doc("Eviction policy.")] = ""
    pid: Annotated[int, doc("Process id, in the daemon's own pid namespace.", ge=0)] = 0
    uptime_seconds: Annotated[Seconds, gauge("Seconds since the daemon's start.")] = 0.0
    ready: Annotated[bool, gauge("1 while the daemon takes sessions and jobs, else 0.")] = True
    health: Annotated[HealthLevel, doc("``ok``, ``degraded`` or ``down``.")] = HealthLevel.OK
    health_problems: Annotated[list[Problem], gauge("Problems, which kvoffd-cli health explains.", "reason")] = []
    sessions: Annotated[Count, gauge("Sessions of engines that are open.")] = 0
    ended_sessions: Annotated[
        Labelled,
        counter("Sessions of engines that ended: closed; gone (killed, as by vLLM at SIGTERM); and others.", "reason"),
    ] = {}
    leases: Annotated[Count, gauge("Leases that engines hold on blocks.")] = 0
    pinned_blocks: Annotated[Count, doc("Blocks under a lease or a copy.")] = 0
    requests: Annotated[Count, counter("Requests that the daemon answered, errors included.")] = 0
    errors: Annotated[Labelled, counter("Requests that the daemon refused, by error.", "code", ERROR_NAMES)] = {}
    last_hour_requests: Annotated[Count, doc("Requests of the last hour, errors included.")] = 0
    last_hour_errors: Annotated[Labelled, doc("Those of them that the daemon refused, by error code.")] = {}
    replies_dropped: Annotated[Labelled, doc("Replies not sent: the client is gone, or left too many unread.")] = {}
    kv_events: Annotated[Count, doc("KV event messages that were published.")] = 0
    cpu_seconds: Annotated[Seconds, doc("CPU seconds that the daemon used.")] = 0.0
    resident_bytes: Annotated[ByteCount, gauge("Resident memory of the daemon without the pool and its table.")] = 0
    lookup_seconds: Annotated[Histogram, histogram("Seconds that the daemon spent on each lookup.")] = Histogram()
    loop_blocked_seconds: Annotated[Histogram, histogram("Seconds for which the event loop was blocked.")] = Histogram()
    loop_blocked_max_seconds: Annotated[Seconds, gauge("Longest time for which the event loop was blocked.")] = 0.0
    cancelled_stores: Annotated[Count, doc("Stores cancelled before their copy began: vLLM wanted the blocks.")] = 0
    pool: Annotated[PoolStats, part("The pool.", "pool_")] = PoolStats()
    store: Annotated[CopyStats, part("Copies from engines to the pool.", "copy_", ("direction", "store"))] = CopyStats()
    load: Annotated[CopyStats, part("Copies from the pool to engines.", "copy_", ("direction", "load"))] = CopyStats()
    since_start: Annotated[Window, doc("All namespaces together, those forgotten included.")] = Window()
    last_hour: Annotated[Window, doc("The same over the last hour.")] = Window()
    last_minute: Annotated[Window, doc("The same over the last minute.")] = Window()
    lifetime: Annotated[Lifetime, part("Totals that outlive the daemon.", "lifetime_")] = Lifetime()
    namespaces: Annotated[list[NamespaceStats], part("The 100 largest, and a row for all others.", "namespace_")] = []
    other_namespaces: Annotated[Count, doc("How many namespaces are in the row ``other``.")] = 0
    gone_namespaces: Annotated[Count, doc("Forgotten namespaces that count in ``since_start``.")] = 0
    integrity: Annotated[IntegrityStats, part("Comparisons with checksums.", "integrity_")] = IntegrityStats()
    tiers: Annotated[TieringStats | None, part("Traffic with the disks; null without a tier.", "tiers_")] = None
    disks: Annotated[list[DiskStats], part("Directories of the disk tier.", "disk_")] = []
    shared: Annotated[list[SharedStats], part("Stores that nodes share.", "shared_")] = []
    curve: Annotated[HitCurve | None, part("What pools of other sizes would have found.", "curve_")] = None
    curve_seen_bytes: Annotated[ByteCount, doc("Bytes of the different blocks asked for, at most ten pools.")] = 0
    ghost_entries: Annotated[Count, doc("Keys without a block that the policy remembers.")] = 0
    policy_bytes: Annotated[ByteCount, doc("Memory of what the policy knows of keys.")] = 0
    learned: Annotated[LearnedStats, doc("What the policy learned.")] = LearnedStats()
    settings: Annotated[list[SettingInfo], doc("The settings that the daemon runs with.")] = []


class StatsReply(Reply, frozen=True):
    stats: Annotated[DaemonStats, doc("All counters: maps, as in ``kvoffd-cli stats --json``.")]


@exchange(ANY_ROLE)
class Stats(Request[StatsReply], frozen=True):
    """Asks for all counters."""
