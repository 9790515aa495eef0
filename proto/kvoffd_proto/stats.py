"""What the daemon counts, and how it is shown: each number is a field of a StatsReply or of one of its parts.

A number is defined once, by its field: ``read_blocks: Annotated[Count, counter("Blocks read.")]``. The protocol's page,
``kvoffd-cli stats --json``, /metrics and METRICS.md are made from that.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from kvoffd_proto.wire import (
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
    counter,
    doc,
    exchange,
    gauge,
    metric_label,
    metrics_of_part,
)

# --- parts of the statistics ---------------------------------------------------------------------


class NamespaceStats(Wire, frozen=True):
    """Counters of one namespace since the daemon's start."""

    namespace: Annotated[Fingerprint, metric_label("The namespace's fingerprint, 32 bytes.", "namespace")]
    label: Annotated[str, metric_label("Name for operators.", "label")]
    ready_blocks: Annotated[Count, gauge("Blocks that can be read.")]
    ready_bytes: Annotated[
        ByteCount, gauge("Pool bytes of those blocks.", help="Pool bytes of the blocks that can be read.")
    ]
    writing_blocks: Annotated[Count, gauge("Blocks that lack a shard.")]
    lookups: Annotated[Count, counter("Lookup messages.")]
    keys_asked: Annotated[Count, counter("Keys in them.", help="Keys in lookups.")]
    keys_ready: Annotated[Count, counter("Keys that were ready.", help="Keys in lookups that were ready.")]
    prefix_keys_ready: Annotated[Count, counter("Keys in the unbroken run of ready keys at each group's start.")]
    stored_blocks: Annotated[Count, counter("Blocks that became ready.")]
    stored_bytes: Annotated[ByteCount, counter("Bytes copied from engines.")]
    loaded_bytes: Annotated[ByteCount, counter("Bytes copied to engines.")]
    evicted_blocks: Annotated[Count, counter("Blocks evicted to make room.")]
    invalidated_blocks: Annotated[
        Count, counter("Blocks dropped by Invalidate, Reset, Clear, a timeout or a wrong checksum.")
    ]
    dropped_keys: Annotated[Count, counter("Keys of stores that found no room.")]
    keys_pending: Annotated[
        Count,
        counter(
            "Keys in lookups that were on their way up from disk; when asked first.",
            help="Keys in lookups that were on disk, and on their way up; when asked first.",
        ),
    ] = 0


class DirectionStats(Wire, frozen=True):
    """Counters of one direction of copying."""

    jobs: Annotated[Count, counter("Jobs that ended.")]
    failed_jobs: Annotated[
        Count,
        counter("Of these, jobs that failed or were cancelled.", "jobs_failed", "Jobs that failed or were cancelled."),
    ]
    bytes: Annotated[ByteCount, counter("Bytes copied.", "copied_bytes")]
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
            "CPU time of all threads that went into the checksums of jobs, in seconds; without those that "
            "a copy takes along the way.",
            "checksum_cpu_seconds",
            "CPU time of all threads that went into the checksums of jobs, in seconds; without those that a copy "
            "takes along the way, as in host memory.",
        ),
    ] = 0.0
    checksum_bytes: Annotated[ByteCount, counter("Bytes of which a job had checksums taken or compared.")] = 0


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
    pinned_bytes: Annotated[
        ByteCount, gauge("Of the ready and leaving bytes, those under a lease, a copy or an operator's pin.")
    ]
    quarantined_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes in slots that lost what was stored in them; not used until a restart.",
            "bytes",
            label=("state", "quarantined"),
        ),
    ]
    spilled_slots: Annotated[
        Count,
        counter(
            "Slots since the start that had to be taken on another NUMA node than their GPU's.",
            help="Slots that had to be taken on another NUMA node than their GPU's.",
        ),
    ]
    page_locked_bytes: Annotated[
        ByteCount,
        gauge(
            "Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages: from the "
            "first engine on a GPU, in steps, until the last one has gone and all is unlocked.",
            help="Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages.",
        ),
    ] = 0
    unlockable_bytes: Annotated[
        ByteCount, gauge("Bytes whose pages the CUDA driver would not lock: GPUs copy them slowly.")
    ] = 0


class IntegrityStats(Wire, frozen=True):
    """Checksums that were compared since the daemon's start."""

    checked_slots: Annotated[Count, counter("Slots whose bytes were compared with their checksum.")]
    checked_bytes: Annotated[
        ByteCount, counter("Bytes of these slots.", help="Bytes that were compared with their checksum.")
    ]
    mismatches: Annotated[
        Count,
        counter(
            "Of these, slots whose bytes were not those that were stored.",
            "checksum_mismatches",
            "Slots whose bytes were not those that were stored.",
        ),
    ]
    quarantined_slots: Annotated[
        Count,
        gauge(
            "Slots that are not used any more for that reason.",
            help="Slots that lost what was stored in them and are not used any more.",
        ),
    ]
    unverified_slots: Annotated[
        Count, gauge("Slots of an earlier daemon that nobody has looked at yet; a load of one does first.")
    ]


class DiskStats(Wire, frozen=True):
    """One directory of the disk tier. Counters count since it was opened."""

    directory: Annotated[str, metric_label("Where its file is.", "disk")]
    state: Annotated[
        str,
        gauge(
            "``opening``, ``serving``, ``draining``, ``hanging``, ``closing`` or ``failed``.",
            "serving",
            "1 while the directory is read and written, or drained; else 0.",
            true_for=("serving", "draining"),
        ),
    ]
    problem: Annotated[str, doc("Why it failed, a sentence; empty otherwise.")]
    size_bytes: Annotated[ByteCount, gauge("The most it may take of its device.")]
    physical_bytes: Annotated[ByteCount, gauge("What its file takes of the device.", help="What its file takes.")]
    used_bytes: Annotated[ByteCount, gauge("Bytes of the slots that hold blocks.")]
    blocks: Annotated[Count, gauge("Blocks that can be brought up.")]
    oldest_seconds: Annotated[
        Seconds, gauge("Since the oldest block was written, in seconds, to the hour.", help="Age of the oldest block.")
    ]
    read_blocks: Annotated[Count, counter("Blocks read.")]
    read_bytes: Annotated[ByteCount, counter("Bytes of these.")]
    written_blocks: Annotated[Count, counter("Blocks written.")]
    written_bytes: Annotated[ByteCount, counter("Bytes of these.")]
    lifetime_written_bytes: Annotated[
        ByteCount, gauge("Bytes written since the file was made, by all daemons: the drive's wear.")
    ]
    evicted_blocks: Annotated[Count, counter("Blocks that made room for others.", help="Blocks that made room.")]
    refused_writes: Annotated[
        Count, counter("Writes not taken, for want of room or too many under way.", help="Writes not taken.")
    ]
    queued_reads: Annotated[Count, gauge("Reads that wait now.", help="Reads that wait.")]
    queued_writes: Annotated[Count, gauge("Writes that wait now.", help="Writes that wait.")]
    running_reads: Annotated[Count, gauge("Reads that run now.", help="Reads that run.")]
    running_writes: Annotated[Count, gauge("Writes that run now.", help="Writes that run.")]
    busy_seconds: Annotated[Seconds, counter("Time that threads spent reading and writing, in seconds.")]
    direct: Annotated[bool, doc("Whether it goes past the page cache (O_DIRECT).")]
    errors: Annotated[
        dict[str, Count],
        counter(
            "What was wrong, by kind; the log has the sentences.", help="What was wrong, by kind.", key_label="kind"
        ),
    ]


class BelowStats(Wire, frozen=True):
    """What moved between the pool and the disks below it since the daemon's start."""

    promoted_blocks: Annotated[Count, counter("Blocks that came up.", help="Blocks that came up from disk.")]
    promoted_bytes: Annotated[ByteCount, counter("Bytes of these.")]
    pending_blocks: Annotated[Count, gauge("Blocks that are on their way up, or wait for it.")]
    failed_promotions: Annotated[
        dict[str, Count],
        counter(
            "Blocks that were asked for and did not come, by reason; ``overdue``: not in time.",
            "promotions_failed",
            "Blocks on disk that were asked for and did not come up, by reason.",
            key_label="reason",
        ),
    ]
    read_bytes_per_second: Annotated[
        PerSecond, gauge("Speed at which blocks came up lately.", "promoted_bytes_per_second")
    ]
    written_blocks: Annotated[Count, counter("Blocks written to disk.", "demoted_blocks")]
    written_bytes: Annotated[ByteCount, counter("Bytes of these.", "demoted_bytes")]
    waiting_writes: Annotated[Count, gauge("Blocks that wait for being written.", "demotions_waiting")]
    over_budget: Annotated[
        Count, counter("Times that a write had to wait, or to be left, for the budget.", "disk_writes_over_budget")
    ]
    write_mode: Annotated[str, doc("What is written: the setting ``disk_write``.")]
    budget_left_bytes: Annotated[
        ByteCount | None,
        gauge(
            "What ``disk_write_per_day`` allows to write now; nil without a bound.",
            "disk_write_budget_left_bytes",
            "What disk_write_per_day allows to write now; -1 without a bound.",
            nil=-1,
        ),
    ]


class LatencyStats(Wire, frozen=True):
    """Distribution of a duration, in seconds, over the last minutes."""

    count: Annotated[
        Count,
        counter(
            "Observations since the daemon's start.",
            "lookups_timed",
            "Lookups whose time inside the daemon was measured.",
        ),
    ]
    p50: Annotated[
        Seconds,
        gauge(
            "Median of the recent ones.",
            "lookup_seconds",
            "Quantiles of the time spent on a lookup inside the daemon, over the last minutes.",
            label=("quantile", "0.5"),
        ),
    ]
    p99: Annotated[Seconds, gauge("99th percentile of the recent ones.", "lookup_seconds", label=("quantile", "0.99"))]
    maximum: Annotated[Seconds, gauge("Largest of the recent ones.", "lookup_seconds", label=("quantile", "1"))]


class BlockAccessStats(Wire, frozen=True):
    """What operators did with single blocks since the daemon's start."""

    pinned_blocks: Annotated[Count, gauge("Blocks that operators have pinned.", "operator_pinned_blocks")]
    pinned_bytes: Annotated[
        ByteCount,
        gauge(
            "Pool bytes of these blocks.",
            "operator_pinned_bytes",
            "Pool bytes of the blocks that operators have pinned.",
        ),
    ]
    got_blocks: Annotated[
        Count,
        counter(
            "Blocks that were opened for reading.",
            "blocks_got",
            "Blocks that operators opened for reading, exports included.",
        ),
    ]
    put_blocks: Annotated[
        Count, counter("Blocks that were written.", "blocks_put", "Blocks that operators wrote, imports included.")
    ]
    put_bytes: Annotated[
        ByteCount, counter("Bytes copied for them.", "blocks_put_bytes", "Bytes copied for these blocks.")
    ]


# --- the statistics ------------------------------------------------------------------------------


class StatsReply(Reply, frozen=True):
    """Answer to Stats."""

    daemon_version: Annotated[str, doc("Release of the daemon.")]
    pid: Annotated[int, doc("Process id, in the daemon's own pid namespace.", ge=0)]
    uptime_seconds: Annotated[
        Seconds, gauge("Since the daemon's start, in seconds.", help="Seconds since the daemon's start.")
    ]
    policy: Annotated[str, doc("Eviction policy.")]
    pool: Annotated[PoolStats, metrics_of_part("The pool.", "pool_")]
    store: Annotated[DirectionStats, metrics_of_part("Engine to pool.", label=("direction", "store"))]
    load: Annotated[DirectionStats, metrics_of_part("Pool to engine.", label=("direction", "load"))]
    lookup_latency: Annotated[LatencyStats, doc("Time spent on a Lookup inside the daemon.")]
    leases: Annotated[Count, gauge("Live leases.")]
    pinned_blocks: Annotated[Count, gauge("Blocks under a lease, a copy or an operator's pin.")]
    sessions: Annotated[Count, gauge("Open sessions.")]
    lookups_per_second: Annotated[
        PerSecond, gauge("Lookups over the last ten seconds.", help="Lookups per second over the last ten seconds.")
    ]
    requests: Annotated[Count, counter("Requests answered, errors included.")]
    errors: Annotated[
        dict[str, Count],
        counter(
            "Error replies by code name, and refusals at the lifeline.",
            help="Error replies and refusals at the lifeline, by the name of the error code.",
            key_label="code",
        ),
    ]
    events_published: Annotated[Count, counter("KV event messages published.")]
    cpu_seconds: Annotated[Seconds, counter("CPU time of the daemon, in seconds.")]
    resident_bytes: Annotated[ByteCount, gauge("Resident memory without the pool and its table.")]
    namespaces: Annotated[list[NamespaceStats], metrics_of_part("Open namespaces.", "namespace_")]
    integrity: Annotated[IntegrityStats, doc("Checksums of the slots.")]
    blocks: Annotated[BlockAccessStats, doc("What operators did with single blocks.")]
    below: Annotated[BelowStats | None, doc("Traffic with the disks; nil while there is none.")] = None
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


@exchange(Section.ADMINISTRATION, ANY_ROLE, over_tcp=True)
class Stats(Request[StatsReply], frozen=True):
    """Asks for all counters."""
