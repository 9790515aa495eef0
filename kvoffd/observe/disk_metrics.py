"""The metrics of the disk tier: without one they have no samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from kvoffd.observe.metric import MetricSpec, Sample
from kvoffd_proto.messages import BelowStats, DiskStats, StatsReply


def _below(
    name: str, kind: Literal["counter", "gauge"], description: str, read: Callable[[BelowStats], float]
) -> MetricSpec:
    return MetricSpec(
        name, kind, description, (), lambda stats: [((), read(stats.below))] if stats.below is not None else []
    )


def _disk(
    name: str, kind: Literal["counter", "gauge"], description: str, read: Callable[[DiskStats], float]
) -> MetricSpec:
    def samples(stats: StatsReply) -> Iterable[Sample]:
        return [((disk.directory,), read(disk)) for disk in stats.disks]

    return MetricSpec(name, kind, description, ("disk",), samples)


def _failed_promotions(stats: StatsReply) -> Iterable[Sample]:
    failed = stats.below.failed_promotions if stats.below is not None else {}
    return [((reason,), count) for reason, count in sorted(failed.items())]


def _errors(stats: StatsReply) -> Iterable[Sample]:
    return [((disk.directory, kind), count) for disk in stats.disks for kind, count in sorted(disk.errors.items())]


_COUNTER: Literal["counter"] = "counter"
_GAUGE: Literal["gauge"] = "gauge"

DISK_METRICS: tuple[MetricSpec, ...] = (
    _below("kvoffd_promoted_blocks_total", _COUNTER, "Blocks that came up from disk.", lambda b: b.promoted_blocks),
    _below("kvoffd_promoted_bytes_total", _COUNTER, "Bytes of these.", lambda b: b.promoted_bytes),
    _below(
        "kvoffd_pending_blocks",
        _GAUGE,
        "Blocks that are on their way up, or wait for it.",
        lambda b: b.pending_blocks,
    ),
    MetricSpec(
        "kvoffd_promotions_failed_total",
        _COUNTER,
        "Blocks on disk that were asked for and did not come up, by reason.",
        ("reason",),
        _failed_promotions,
    ),
    _below(
        "kvoffd_promoted_bytes_per_second",
        _GAUGE,
        "Speed at which blocks came up lately.",
        lambda b: b.read_bytes_per_second,
    ),
    _below("kvoffd_demoted_blocks_total", _COUNTER, "Blocks written to disk.", lambda b: b.written_blocks),
    _below("kvoffd_demoted_bytes_total", _COUNTER, "Bytes of these.", lambda b: b.written_bytes),
    _below("kvoffd_demotions_waiting", _GAUGE, "Blocks that wait for being written.", lambda b: b.waiting_writes),
    _below(
        "kvoffd_disk_write_budget_left_bytes",
        _GAUGE,
        "What disk_write_per_day allows to write now; -1 without a bound.",
        lambda b: -1 if b.budget_left_bytes is None else b.budget_left_bytes,
    ),
    _below(
        "kvoffd_disk_writes_over_budget_total",
        _COUNTER,
        "Times that a write had to wait, or to be left, for the budget.",
        lambda b: b.over_budget,
    ),
    _disk(
        "kvoffd_disk_serving",
        _GAUGE,
        "1 while the directory is read and written, or drained; else 0.",
        lambda disk: disk.state in ("serving", "draining"),
    ),
    _disk("kvoffd_disk_size_bytes", _GAUGE, "The most it may take of its device.", lambda disk: disk.size_bytes),
    _disk("kvoffd_disk_physical_bytes", _GAUGE, "What its file takes.", lambda disk: disk.physical_bytes),
    _disk("kvoffd_disk_used_bytes", _GAUGE, "Bytes of the slots that hold blocks.", lambda disk: disk.used_bytes),
    _disk("kvoffd_disk_blocks", _GAUGE, "Blocks that can be brought up.", lambda disk: disk.blocks),
    _disk("kvoffd_disk_oldest_seconds", _GAUGE, "Age of the oldest block.", lambda disk: disk.oldest_seconds),
    _disk("kvoffd_disk_read_blocks_total", _COUNTER, "Blocks read.", lambda disk: disk.read_blocks),
    _disk("kvoffd_disk_read_bytes_total", _COUNTER, "Bytes of these.", lambda disk: disk.read_bytes),
    _disk("kvoffd_disk_written_blocks_total", _COUNTER, "Blocks written.", lambda disk: disk.written_blocks),
    _disk("kvoffd_disk_written_bytes_total", _COUNTER, "Bytes of these.", lambda disk: disk.written_bytes),
    _disk(
        "kvoffd_disk_lifetime_written_bytes",
        _GAUGE,
        "Bytes written since the file was made, by all daemons: the drive's wear.",
        lambda disk: disk.lifetime_written_bytes,
    ),
    _disk("kvoffd_disk_evicted_blocks_total", _COUNTER, "Blocks that made room.", lambda disk: disk.evicted_blocks),
    _disk("kvoffd_disk_refused_writes_total", _COUNTER, "Writes not taken.", lambda disk: disk.refused_writes),
    _disk("kvoffd_disk_queued_reads", _GAUGE, "Reads that wait.", lambda disk: disk.queued_reads),
    _disk("kvoffd_disk_queued_writes", _GAUGE, "Writes that wait.", lambda disk: disk.queued_writes),
    _disk("kvoffd_disk_running_reads", _GAUGE, "Reads that run.", lambda disk: disk.running_reads),
    _disk("kvoffd_disk_running_writes", _GAUGE, "Writes that run.", lambda disk: disk.running_writes),
    _disk(
        "kvoffd_disk_busy_seconds_total",
        _COUNTER,
        "Time that threads spent reading and writing, in seconds.",
        lambda disk: disk.busy_seconds,
    ),
    MetricSpec("kvoffd_disk_errors_total", _COUNTER, "What was wrong, by kind.", ("disk", "kind"), _errors),
)
