"""What the daemon counts, and how it is shown: each number is a field of a StatsReply or of one of its parts.

A number is defined once, by its field: ``read_blocks: Annotated[Count, counter("Blocks read.")]``. The protocol's page,
``kvoffd-cli stats --json``, /metrics and METRICS.md are made from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.messages import (
    ANY_ROLE,
    ByteCount,
    Count,
    Fingerprint,
    PerSecond,
    Reply,
    Request,
    Seconds,
    Section,
    Wire,
    doc,
    exchange,
    metas_of,
)

# --- fields and their annotations ----------------------------------------------------------------

_METRIC = "metric"
"""Key of ``Meta.extra`` under which a field has its Metric, MetricPart, MetricLabel or MetricInfo."""


FixedLabel: TypeAlias = tuple[str, str] | tuple[()]
"""Name and value of a label, or none."""


@dataclass(frozen=True)
class Metric:
    """What /metrics shows of a field.

    Its name is ``kvoffd_``, the prefix of the part that the Struct is, the name, and ``_total`` for a counter. Fields
    with the same name are one metric, told apart by ``label``; the help is that of the first.

    Attributes:
        kind: what Prometheus takes it for.
        name: the field's own where empty.
        help: the field's description where empty.
        label: a label that is the same for all.
        key_label: for a map of numbers, the name of the label that holds the key.
        nil: the value while the field is nil; there is no sample where this is None.
        true_for: for a string, the values for which the metric is 1; for others it is 0.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str = ""
    help: str = ""
    label: FixedLabel = ()
    key_label: str = ""
    nil: float | None = None
    true_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricPart:
    """What the metrics of a Struct, or of a list of Structs, inside a StatsReply have in common."""

    prefix: str = ""
    label: FixedLabel = ()


@dataclass(frozen=True)
class MetricLabel:
    """The field's value tells the Structs of a list apart: it is a label of that name.

    Attributes:
        short: bytes of the value that the label has, in hexadecimal, unless two Structs begin with the same; 0 for all.
        info_name: the label of the whole value in the Structs' metric ``info``; there is none where this is empty.
    """

    name: str
    short: int = 0
    info_name: str = ""


@dataclass(frozen=True)
class MetricInfo:
    """The field's value is a label of that name in the metric ``info`` of the Structs of a list, and of no other."""

    name: str


def counter(description: str, name: str = "", help: str = "", key_label: str = "") -> Meta:
    """Describe a field that is a counter on /metrics: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("counter", name, help, key_label=key_label)})


def gauge(
    description: str,
    name: str = "",
    help: str = "",
    label: FixedLabel = (),
    *,
    key_label: str = "",
    nil: float | None = None,
    true_for: tuple[str, ...] = (),
) -> Meta:
    """Describe a field that is a gauge on /metrics: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("gauge", name, help, label, key_label, nil, true_for)})


def histogram(description: str, name: str = "") -> Meta:
    """Describe a field of type ``Histogram``: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("histogram", name)})


def metrics_of_part(description: str, prefix: str = "", label: FixedLabel = ()) -> Meta:
    """Describe a field whose Structs hold metrics: see MetricPart."""
    return Meta(description=description, extra={_METRIC: MetricPart(prefix, label)})


def metric_label(description: str, name: str, short: int = 0, info_name: str = "") -> Meta:
    """Describe a field that tells the Structs of a list apart: see MetricLabel."""
    return Meta(description=description, extra={_METRIC: MetricLabel(name, short, info_name)})


def metric_info(description: str, name: str) -> Meta:
    """Describe a field that says more of the Structs of a list: see MetricInfo."""
    return Meta(description=description, extra={_METRIC: MetricInfo(name)})


def metric_annotation(hint: object) -> Metric | MetricPart | MetricLabel | MetricInfo | None:
    """What a field is on /metrics, if anything."""
    return next((meta.extra[_METRIC] for meta in metas_of(hint) if meta.extra and _METRIC in meta.extra), None)


# --- tiers below the pool --------------------------------------------------------------------------


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
    TORN = (
        "torn",
        "blocks not kept whole by the drive when the machine ended without closing the file; they were recomputed",
    )
    DAMAGED = "damaged", "regions whose records are damaged; the blocks in them are lost"
    STARTED_ANEW = "started_anew", "the file could not be read and was emptied"
    TRUNCATED = "truncated", "the file had been cut off; the blocks beyond are lost"
    NOT_DIRECT = "not_direct", "the file system refuses O_DIRECT; reads and writes go through the page cache"
    TOO_LARGE = "too_large", "blocks that no region has room for; they are not written"
    READ_FAILED = "read_failed", "reads that failed; see dmesg and the drive's own report"
    WRITE_FAILED = "write_failed", "writes of blocks that failed; see dmesg and the drive's own report"
    RECORD_FAILED = "record_failed", "writes of records that failed; see dmesg and the drive's own report"
    SHORT_READ = "short_read", "reads that ended too soon; see dmesg and the drive's own report"
    NO_SPACE = "no_space", "writes that found no space, though it was allocated; see the file system"
    NO_MEMORY = "no_memory", "times that there was no memory to write records from; they are written later"
    FORGET_FAILED = "forget_failed", "files that may bring removed blocks back; remove them"
    HUNG = "hung", "times that a call did not return for long, and nothing was read and written; see dmesg"
    BUG = "bug", "bugs; please report the traceback in the daemon's log"


class DiskStats(Wire, frozen=True):
    """One directory of the disk tier. Counters count since the directory was opened."""

    directory: Annotated[str, metric_label("Directory that holds the file.", "disk")]
    state: Annotated[
        DiskState,
        gauge(
            "Where it is in its life; ``hanging`` while a call to its disk does not return.",
            "serving",
            "1 while the directory is read and written; else 0.",
            true_for=(DiskState.SERVING,),
        ),
    ]
    problem: Annotated[str, doc("Why the directory failed, a sentence; empty otherwise.")]
    size_bytes: Annotated[ByteCount, gauge("Most bytes that the directory may take of its device.")]
    physical_bytes: Annotated[ByteCount, gauge("Bytes that the file takes of its device.")]
    used_bytes: Annotated[ByteCount, gauge("Bytes of the slots that hold blocks.")]
    blocks: Annotated[Count, gauge("Blocks that can be promoted to the pool.")]
    oldest_seconds: Annotated[Seconds, gauge("Age of the oldest block, in seconds, to the hour.")]
    read_blocks: Annotated[Count, counter("Blocks read.")]
    read_bytes: Annotated[ByteCount, counter("Bytes of the blocks read.")]
    written_blocks: Annotated[Count, counter("Blocks written.")]
    written_bytes: Annotated[ByteCount, counter("Bytes of the blocks written.")]
    lifetime_written_bytes: Annotated[
        ByteCount, gauge("Bytes written since the file was made, by all daemons: the drive's wear.")
    ]
    evicted_blocks: Annotated[Count, counter("Blocks evicted to make room for others.")]
    refused_writes: Annotated[Count, counter("Writes refused for want of room, or because too many were under way.")]
    queued_reads: Annotated[Count, gauge("Reads that wait now.")]
    queued_writes: Annotated[Count, gauge("Writes that wait now.")]
    running_reads: Annotated[Count, gauge("Reads that run now.")]
    running_writes: Annotated[Count, gauge("Writes that run now.")]
    busy_seconds: Annotated[Seconds, counter("Time that threads spent reading and writing, in seconds.")]
    direct: Annotated[bool, doc("Whether the file bypasses the page cache (O_DIRECT).")]
    errors: Annotated[
        dict[DiskFault, Count], counter("Errors of the disk by kind; the log has the sentences.", key_label="kind")
    ]


class TieringStats(Wire, frozen=True):
    """Blocks moved between the pool and the disks since the daemon's start."""

    promoted_blocks: Annotated[Count, counter("Blocks promoted from disk to the pool.")]
    promoted_bytes: Annotated[ByteCount, counter("Bytes of the blocks promoted.")]
    pending_blocks: Annotated[Count, gauge("Blocks that are being promoted, or wait for it.")]
    failed_promotions: Annotated[
        dict[str, Count],
        counter(
            "Blocks that were asked for and not promoted, by reason; overdue means not in time.",
            "promotions_failed",
            key_label="reason",
        ),
    ]
    read_bytes_per_second: Annotated[
        PerSecond, gauge("Speed of the latest promotions, in bytes per second.", "promoted_bytes_per_second")
    ]
    written_blocks: Annotated[Count, counter("Blocks written to disk.", "demoted_blocks")]
    written_bytes: Annotated[ByteCount, counter("Bytes of the blocks written to disk.", "demoted_bytes")]
    waiting_writes: Annotated[Count, gauge("Blocks that wait to be written to disk.", "demotions_waiting")]
    over_budget: Annotated[
        Count,
        counter(
            "Times that a write had to wait or was skipped because of the write budget.", "disk_writes_over_budget"
        ),
    ]
    write_mode: Annotated[str, doc("Which blocks are written: the setting ``disk_write``.")]
    budget_left_bytes: Annotated[
        ByteCount | None,
        gauge(
            "Bytes that ``disk_write_per_day`` allows to be written now; nil without a bound.",
            "disk_write_budget_left_bytes",
            "Bytes that disk_write_per_day allows to be written now; -1 without a bound.",
            nil=-1,
        ),
    ]
    spared_blocks: Annotated[
        Count,
        counter(
            "Blocks that were not written to a full disk, since the policy expects that they do not come back before "
            "they would be evicted there.",
            "disk_writes_spared",
        ),
    ] = 0


class SharedServer(Wire, frozen=True):
    """One server of a store, as this node found it last."""

    name: Annotated[str, metric_label("Host and port.", "server")]
    answers: Annotated[bool, gauge("Whether it can be used: it answers, and takes the password.")]
    problem: Annotated[str, doc("What failed last there, a sentence; empty where nothing did.")]


class SharedStats(Wire, frozen=True):
    """The tier that nodes share, as this node sees it. Counters count since the daemon's start."""

    name: Annotated[str, metric_label("URL of the store.", "store")]
    reachable: Annotated[bool, gauge("Whether it is asked; not while it fails, but for a probe every few seconds.")]
    opened: Annotated[Count, counter("Times that it was given up after failures.", "breaker_opened")]
    ask_seconds: Annotated[Seconds, gauge("Time that asking takes, averaged over the latest times.")]
    asked_keys: Annotated[Count, counter("Keys asked for, which pool and disks did not have.")]
    found_keys: Annotated[Count, counter("Keys that were there.")]
    unanswered_keys: Annotated[Count, counter("Keys without an answer in time.")]
    read_blocks: Annotated[Count, counter("Blocks read into the pool.")]
    read_bytes: Annotated[ByteCount, counter("Bytes of the blocks read.")]
    queued_reads: Annotated[Count, gauge("Reads that wait or run.")]
    written_blocks: Annotated[Count, counter("Blocks written.")]
    written_bytes: Annotated[ByteCount, counter("Bytes of the blocks written.")]
    present_blocks: Annotated[Count, counter("Blocks that were to be written and were there already.")]
    dropped_writes: Annotated[Count, counter("Blocks that were not written: it was full, slow or not reachable.")]
    queued_writes: Annotated[Count, gauge("Writes that wait or run.")]
    mismatches: Annotated[Count, counter("Objects that were not the block that they should be; they are removed.")]
    failed_promotions: Annotated[
        dict[str, Count],
        counter("Blocks that were there and did not come, by reason.", "promotions_failed", key_label="reason"),
    ]
    errors: Annotated[dict[str, Count], counter("Errors by kind; the log has the sentences.", key_label="kind")]
    servers: Annotated[
        list[SharedServer], metrics_of_part("The servers of the store; empty where it cannot tell, as S3.", "server_")
    ] = field(default_factory=list)
    left_namespaces: Annotated[
        Count, gauge("Namespaces that are not shared since an engine reset them; see `kvoffd-cli reset --fleet`.")
    ] = 0


# --- parts of the statistics ---------------------------------------------------------------------


class RecentStats(Wire, frozen=True):
    """What was counted in a window of time that ends now."""

    window_seconds: Annotated[Seconds, doc("Length of the window; 0 for all since the daemon's start.")]
    seconds: Annotated[Seconds, doc("How much of the window there was: less soon after the start.")]
    lookups: Annotated[Count, doc("Lookup messages.")]
    keys_asked: Annotated[Count, doc("Keys in lookups.")]
    keys_ready: Annotated[Count, doc("Keys in lookups that were ready: hits of the pool.")]
    keys_pending: Annotated[Count, doc("Keys in lookups that a disk or a shared store has: hits of these.")]
    stored_bytes: Annotated[ByteCount, doc("Bytes copied from engines.")]
    loaded_bytes: Annotated[ByteCount, doc("Bytes copied to engines.")]
    evicted_blocks: Annotated[Count, doc("Blocks evicted to make room.")]
    dropped_keys: Annotated[Count, doc("Keys of stores for which the pool had no room.")]
    cpu_seconds: Annotated[Seconds, doc("CPU time of the daemon; 0 for a namespace.")] = 0.0
    misses: Annotated[
        dict[str, Count], doc("Keys in lookups that were not there, by reason, as in NamespaceStats.")
    ] = field(default_factory=dict)
    keys_shared: Annotated[Count, doc("Of the pending keys, those that a store has which nodes share.")] = 0
    late_lookups: Annotated[Count, doc("Lookups whose answers engines did not wait for any longer.")] = 0

    @property
    def keys_missing(self) -> int:
        """Keys in lookups that neither the pool nor a tier below it had, or that one is being asked for."""
        return self.keys_asked - self.keys_ready - self.keys_pending


Ratio = Annotated[float, doc(ge=0, le=1)]


class HitCurve(Wire, frozen=True):
    """What requests for tokens found, and would have found in pools of other sizes. What is a day old weighs half."""

    asked_tokens: Annotated[Count, gauge("Tokens of all keys that requests asked for; each request counts once.")]
    found_tokens: Annotated[
        Count, gauge("Tokens of those keys that were ready in the pool, up to the first that was not.")
    ]
    lru_ratios: Annotated[
        dict[str, Ratio],
        gauge(
            "The part of the tokens that requests had found with the policy lru, by the size of the pool, in parts of "
            "the size that it has; estimated from a sample of the keys.",
            "lru_hit_ratio",
            key_label="pool",
        ),
    ]


class NamespaceStats(Wire, frozen=True):
    """Counters of one namespace since the daemon's start."""

    namespace: Annotated[
        Fingerprint, metric_label("The namespace's fingerprint, 32 bytes.", "namespace", 6, "fingerprint")
    ]
    label: Annotated[str, metric_info("Name of the namespace for operators.", "label")]
    ready_blocks: Annotated[Count, gauge("Blocks that can be read.")]
    ready_bytes: Annotated[ByteCount, gauge("Pool bytes of the blocks that can be read.")]
    writing_blocks: Annotated[Count, gauge("Blocks that lack a shard.")]
    lookups: Annotated[Count, counter("Lookup messages.")]
    keys_asked: Annotated[Count, counter("Keys in lookups.")]
    keys_ready: Annotated[Count, counter("Keys in lookups that were ready.")]
    prefix_keys_ready: Annotated[
        Count, counter("Keys in lookups in the unbroken run of ready keys at each group's start.")
    ]
    stored_blocks: Annotated[Count, counter("Blocks that became ready.")]
    stored_bytes: Annotated[ByteCount, counter("Bytes copied from engines.")]
    loaded_bytes: Annotated[ByteCount, counter("Bytes copied to engines.")]
    evicted_blocks: Annotated[Count, counter("Blocks evicted to make room.")]
    invalidated_blocks: Annotated[
        Count, counter("Blocks dropped by Invalidate, Reset, Clear, a timeout or a wrong checksum.")
    ]
    half_stored_blocks: Annotated[
        Count,
        counter(
            "Blocks dropped because a shard of some rank was not stored within 60 seconds, or earlier, where "
            "such blocks had more than a quarter of the pool and others needed room."
        ),
    ]
    dropped_keys: Annotated[Count, counter("Keys of stores for which the pool had no room.")]
    declined_keys: Annotated[Count, counter("Keys of stores that the policy did not want in the pool.")] = 0
    keys_pending: Annotated[
        Count, counter("Keys in lookups that a disk or a shared store had when first asked for.")
    ] = 0
    recent: Annotated[list[RecentStats], doc("The same over the last 10, 100 and 1,000 seconds.")] = field(
        default_factory=list
    )
    misses: Annotated[
        dict[str, Count],
        counter(
            "Keys in lookups that were not there, by reason: ``never_stored`` (or left longer ago than is "
            "remembered: the daemon has a table of the last half million keys that left), ``evicted``, ``declined`` by "
            "the policy, ``no_room`` in the pool, ``half_stored``, ``invalidated``, ``corrupt``, ``lease_limit`` (it "
            "is in the pool, but the session may lease no more). Of the pending keys, those that did not come up in "
            "the end: ``disk_late``, ``disk_failed``, or one of the others.",
            "keys_missed",
            help="Keys in lookups that were not there, by reason; never_stored has those that left too long ago too.",
            key_label="reason",
        ),
    ] = field(default_factory=dict)
    quota_bytes: Annotated[ByteCount | None, gauge("The most that it may have of the pool; nil for all of it.")] = None
    curve: Annotated[
        HitCurve | None, metrics_of_part("What its requests found, and had found in pools of other sizes.", "curve_")
    ] = None
    prefill_tokens_per_second: Annotated[
        PerSecond, gauge("Prompt tokens that an engine computes a second, as it last told; 0 if not known.")
    ] = 0.0
    load_tokens_per_second: Annotated[
        PerSecond, gauge("Tokens that loads bring an engine a second, as it last told; 0 if not known.")
    ] = 0.0
    skipped_loads: Annotated[Count, counter("Loads that engines left out, since computing is faster.")] = 0
    paused_stores: Annotated[
        Count, counter("Stores that engines left out, since they had waited for stores too often.")
    ] = 0
    keys_shared: Annotated[Count, counter("Of the pending keys, those that a store has which nodes share.")] = 0
    late_lookups: Annotated[
        Count, counter("Lookups whose answers engines did not wait for any longer: they computed these prompts.")
    ] = 0


class DirectionStats(Wire, frozen=True):
    """Counters of one direction of copying."""

    jobs: Annotated[Count, counter("Jobs that ended.")]
    failed_jobs: Annotated[Count, counter("Jobs that failed or were cancelled.", "jobs_failed")]
    bytes: Annotated[ByteCount, counter("Bytes copied, those of benches included.", "copied_bytes")]
    busy_seconds: Annotated[
        Seconds,
        counter(
            "Time that copy threads spent copying, and comparing the checksums of loads, in seconds.",
            "copy_busy_seconds",
        ),
    ]
    queued_jobs: Annotated[Count, gauge("Jobs that wait now.", "jobs_queued")]
    running_jobs: Annotated[Count, gauge("Jobs that run now.", "jobs_running")]
    bytes_per_second: Annotated[
        PerSecond, gauge("Bytes copied per second over the last ten seconds.", "copy_bytes_per_second")
    ]
    checksum_seconds: Annotated[
        Seconds,
        counter(
            "CPU time that all threads spent on the checksums of jobs, in seconds; without checksums that are taken "
            "during the copy, as in host memory.",
            "checksum_cpu_seconds",
        ),
    ] = 0.0
    checksum_bytes: Annotated[ByteCount, counter("Bytes whose checksums were taken or compared for a job.")] = 0
    refused_batches: Annotated[
        Count,
        counter("Batches of copies, or kernels in their place, that a CUDA driver refused: copied piece by piece."),
    ] = 0


class PoolStats(Wire, frozen=True):
    """State of the pool, in bytes. free + writing + ready + leaving + quarantined = pool."""

    pool_bytes: Annotated[ByteCount, gauge("Size of the pool.", "size_bytes")]
    usable_bytes: Annotated[ByteCount, gauge("Bytes that are touched and ready for use.")]
    table_bytes: Annotated[ByteCount, gauge("Size of the slot table.")]
    free_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes in no slot, or in a free one.",
            "bytes",
            "Bytes of the pool by state; they add up to its size.",
            label=("state", "free"),
        ),
    ]
    writing_bytes: Annotated[
        ByteCount, gauge("Bytes in slots of blocks that are being written.", "bytes", label=("state", "writing"))
    ]
    ready_bytes: Annotated[ByteCount, gauge("Bytes in slots of readable blocks.", "bytes", label=("state", "ready"))]
    leaving_bytes: Annotated[
        ByteCount,
        gauge("Bytes of dropped blocks that a lease or a copy still holds.", "bytes", label=("state", "leaving")),
    ]
    pinned_bytes: Annotated[ByteCount, gauge("Ready and leaving bytes that are under a lease or a copy.")]
    quarantined_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes in slots that did not match their checksum; not used until a restart.",
            "bytes",
            label=("state", "quarantined"),
        ),
    ]
    spilled_slots: Annotated[Count, counter("Slots that had to be taken on another NUMA node than their GPU's.")]
    page_locked_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages: from the start "
            "or the first engine on a GPU (pin_pool), in steps, until some time after the last one.",
            help="Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages.",
        ),
    ] = 0
    unlockable_bytes: Annotated[
        ByteCount, gauge("Bytes whose pages the CUDA driver would not lock: GPUs copy them slowly.")
    ] = 0
    page_locking_gpu_bytes: Annotated[
        ByteCount,
        gauge(
            "Memory of the first GPU that locking the pool's pages took there: the fall of what the driver showed free "
            "meanwhile, others' allocations included. 0 until all is locked.",
            help="Memory of the first GPU that locking the pool's pages took there.",
        ),
    ] = 0
    index_bytes: Annotated[
        ByteCount,
        gauge(
            "Memory of what is known of the blocks in the pool, and, where the policy is learned, of its knowledge the "
            "part for keys with blocks."
        ),
    ] = 0
    index_block_bytes: Annotated[float, gauge("index_bytes for each block in the pool; 0 where there is none.")] = 0.0
    index_counted_bytes: Annotated[
        ByteCount,
        gauge("What blocks count towards index_limit_bytes, 600 bytes for one of one shard: more than thousands take."),
    ] = 0
    index_limit_bytes: Annotated[
        ByteCount, gauge("Memory for the index (index_size): blocks are evicted that would count beyond it.")
    ] = 0
    left_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes in slots of blocks that an earlier daemon left and that are still to be taken over.",
            "bytes",
            label=("state", "left"),
        ),
    ] = 0
    left_blocks: Annotated[
        Count, gauge("Blocks that an earlier daemon left and that are still to be taken over, the newest first.")
    ] = 0


class IntegrityStats(Wire, frozen=True):
    """Slots that were compared with their checksums since the daemon's start."""

    checked_slots: Annotated[Count, counter("Slots whose bytes were compared with their checksum.")]
    checked_bytes: Annotated[ByteCount, counter("Bytes that were compared with their checksum.")]
    mismatches: Annotated[Count, counter("Slots whose bytes did not match their checksum.", "checksum_mismatches")]
    quarantined_slots: Annotated[
        Count, gauge("Slots that did not match their checksum and are not used until a restart.")
    ]
    unverified_slots: Annotated[
        Count,
        gauge(
            "Slots of an earlier daemon that are not compared with their checksum yet: a load compares first. And "
            "slots whose checksum is still to be taken: stores were faster than the threads that take checksums."
        ),
    ]
    loaded_unverified_slots: Annotated[
        Count, counter("Slots that were loaded while their checksum was still to be taken.")
    ] = 0


class Histogram(Wire, frozen=True):
    """Distribution of a duration since the daemon's start."""

    buckets: Annotated[
        dict[str, Count], doc("Durations up to each bound, in seconds, which is the key; ``+Inf`` has all of them.")
    ]
    sum_seconds: Annotated[Seconds, doc("Sum of all durations.")]

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


# --- the statistics ------------------------------------------------------------------------------


class SettingInfo(Wire, frozen=True):
    """One setting of the running daemon."""

    name: Annotated[str, doc("Its name, as in the configuration file.")]
    value: Annotated[str, doc("Its value, as a flag would give it.")]
    default: Annotated[bool, doc("Whether that is the default.")]


class StatsReply(Reply, frozen=True):
    daemon_version: Annotated[str, doc("Release of the daemon.")]
    pid: Annotated[int, doc("Process id, in the daemon's own pid namespace.", ge=0)]
    uptime_seconds: Annotated[Seconds, gauge("Seconds since the daemon's start.")]
    policy: Annotated[str, doc("Eviction policy.")]
    pool: Annotated[PoolStats, metrics_of_part("The pool.", "pool_")]
    store: Annotated[DirectionStats, metrics_of_part("Copies from engines to the pool.", label=("direction", "store"))]
    load: Annotated[DirectionStats, metrics_of_part("Copies from the pool to engines.", label=("direction", "load"))]
    leases: Annotated[Count, gauge("Live leases.")]
    pinned_blocks: Annotated[Count, gauge("Blocks under a lease or a copy.")]
    sessions: Annotated[Count, gauge("Open sessions.")]
    lookups_per_second: Annotated[PerSecond, gauge("Lookups per second over the last ten seconds.")]
    requests: Annotated[Count, counter("Requests answered, errors included.")]
    errors: Annotated[
        dict[str, Count],
        counter("Error replies and refusals at the lifeline, by the name of the error code.", key_label="code"),
    ]
    events_published: Annotated[Count, counter("KV event messages published.")]
    cpu_seconds: Annotated[Seconds, counter("CPU time of the daemon, in seconds.")]
    resident_bytes: Annotated[ByteCount, gauge("Resident memory without the pool and its table.")]
    namespaces: Annotated[
        list[NamespaceStats],
        metrics_of_part(
            "Open namespaces, 100 at most: those of sessions, then those with the most bytes.", "namespace_"
        ),
    ]
    integrity: Annotated[IntegrityStats, doc("Comparisons of slots with their checksums.")]
    below: Annotated[TieringStats | None, doc("Traffic with the disks; nil while there is no tier.")] = None
    shared: Annotated[list[SharedStats], metrics_of_part("The tier that nodes share.", "shared_")] = field(
        default_factory=list
    )
    disks: Annotated[list[DiskStats], metrics_of_part("Directories of the disk tier.", "disk_")] = field(
        default_factory=list
    )
    replies_dropped: Annotated[
        dict[str, Count],
        counter(
            "Replies that could not be sent, by reason: the client is ``gone``, or has left too many ``unread``.",
            help="Replies that could not be sent, by reason: the client is gone, or has left too many unread.",
            key_label="reason",
        ),
    ] = field(default_factory=dict)
    loop_blocked: Annotated[
        Histogram,
        histogram(
            "How long the event loop, which answers all clients, was blocked, as far as its thread had a CPU; measured "
            "20 times a second, and 4 times while it is idle.",
            "loop_blocked_seconds",
        ),
    ] = field(default_factory=lambda: Histogram({}, 0.0))
    loop_blocked_maximum_seconds: Annotated[
        Seconds, gauge("Longest time for which the event loop was blocked since the daemon's start.")
    ] = 0.0
    shortened_lookups: Annotated[
        Count, counter("Lookups that were told of fewer ready keys, since their session may not lease more.")
    ] = 0
    health: Annotated[
        HealthLevel,
        gauge(
            "As ``Health`` tells it.",
            "serving",
            "1 while the daemon takes sessions and jobs, else 0.",
            true_for=("ok", "degraded"),
        ),
    ] = HealthLevel.OK
    health_problems: Annotated[
        dict[str, Count],
        gauge(
            "What an operator should see to now, as ``Health`` tells it, by reason.",
            help="What an operator should see to now, as kvoffd-cli health tells it, by reason.",
            key_label="reason",
        ),
    ] = field(default_factory=dict)
    recent: Annotated[
        list[RecentStats],
        doc(
            "All namespaces together over the last 10, 100 and 1,000 seconds and since the daemon's start, those that "
            "are forgotten included."
        ),
    ] = field(default_factory=list)
    cancelled_stores: Annotated[
        Count, counter("Stores cancelled before their copy began, since blocks of their message were wanted.")
    ] = 0
    unsent_stores: Annotated[
        Count, counter("Stores that clients dropped before they sent them, since their blocks were wanted.")
    ] = 0
    ended_sessions: Annotated[
        dict[str, Count],
        counter(
            "Sessions of engines that ended, by reason: ``closed`` by their client; ``gone``, their process ended; and "
            "ended by the daemon, ``no_hello``, ``malformed``, ``failed``. The log names them.",
            "sessions_ended",
            help="Sessions of engines that ended, by reason: closed by their client, gone with their process, others.",
            key_label="reason",
        ),
    ] = field(default_factory=dict)
    lookup_seconds: Annotated[Histogram, histogram("Time spent on a lookup inside the daemon.")] = field(
        default_factory=lambda: Histogram({}, 0.0)
    )
    ghost_keys: Annotated[Count, gauge("Keys that have no block in the pool and that the policy remembers.")] = 0
    policy_bytes: Annotated[ByteCount, gauge("Memory of what the policy knows of keys; 0 where it does not count.")] = 0
    curve: Annotated[
        HitCurve | None, metrics_of_part("What requests found, and had found in pools of other sizes.", "curve_")
    ] = None
    curve_seen_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes of the different blocks that were asked for, up to ten pools: nothing is known of larger pools.",
            "curve_seen_bytes",
        ),
    ] = 0
    omitted_namespaces: Annotated[Count, gauge("Namespaces that are left out, since 100 others have more.")] = 0
    curve_bytes: Annotated[ByteCount, gauge("Memory of the sample from which the curve is made.")] = 0
    settings: Annotated[list[SettingInfo], doc("The settings that the daemon runs with.")] = field(default_factory=list)


@exchange(Section.ADMINISTRATION, ANY_ROLE)
class Stats(Request[StatsReply], frozen=True):
    """Asks for all counters."""
