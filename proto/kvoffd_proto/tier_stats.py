"""What is counted of the tiers below the pool: parts of a StatsReply."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from kvoffd_proto.wire import (
    ByteCount,
    Count,
    PerSecond,
    Seconds,
    Wire,
    counter,
    doc,
    gauge,
    metric_label,
    metrics_of_part,
)


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
