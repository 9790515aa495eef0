"""The Prometheus page, made from a ``StatsReply``.

``METRICS`` is the only list of metrics there is; ``python -m kvoffd.observe.metrics`` prints it as the reference page
METRICS.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoffd.observe.disk_metrics import DISK_METRICS
from kvoffd.observe.metric import MetricSpec, Sample
from kvoffd_proto.messages import DirectionStats, NamespaceStats, StatsReply


def _gauge(name: str, description: str, read: Callable[[StatsReply], float]) -> MetricSpec:
    return MetricSpec(name, "gauge", description, (), lambda stats: [((), read(stats))])


def _counter(name: str, description: str, read: Callable[[StatsReply], float]) -> MetricSpec:
    return MetricSpec(name, "counter", description, (), lambda stats: [((), read(stats))])


def _copying(
    name: str, kind: Literal["counter", "gauge"], description: str, read: Callable[[DirectionStats], float]
) -> MetricSpec:
    def samples(stats: StatsReply) -> Iterable[Sample]:
        return [(("store",), read(stats.store)), (("load",), read(stats.load))]

    return MetricSpec(name, kind, description, ("direction",), samples)


def _spaced(
    name: str, kind: Literal["counter", "gauge"], description: str, read: Callable[[NamespaceStats], float]
) -> MetricSpec:
    def samples(stats: StatsReply) -> Iterable[Sample]:
        return [((space.namespace.hex(), space.label), read(space)) for space in stats.namespaces]

    return MetricSpec(name, kind, description, ("namespace", "label"), samples)


def _pool_states(stats: StatsReply) -> Iterable[Sample]:
    pool = stats.pool
    return [
        (("free",), pool.free_bytes),
        (("writing",), pool.writing_bytes),
        (("ready",), pool.ready_bytes),
        (("leaving",), pool.leaving_bytes),
        (("quarantined",), pool.quarantined_bytes),
    ]


def _lookup_quantiles(stats: StatsReply) -> Iterable[Sample]:
    latency = stats.lookup_latency
    return [(("0.5",), latency.p50), (("0.99",), latency.p99), (("1",), latency.maximum)]


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "kvoffd_build_info",
        "gauge",
        "Always 1; the labels say what runs.",
        ("version", "policy"),
        lambda stats: [((stats.daemon_version, stats.policy), 1.0)],
    ),
    _gauge("kvoffd_uptime_seconds", "Seconds since the daemon's start.", lambda stats: stats.uptime_seconds),
    _counter("kvoffd_cpu_seconds_total", "CPU time of the daemon, in seconds.", lambda stats: stats.cpu_seconds),
    _gauge(
        "kvoffd_resident_bytes", "Resident memory without the pool and its table.", lambda stats: stats.resident_bytes
    ),
    _gauge("kvoffd_pool_size_bytes", "Size of the pool.", lambda stats: stats.pool.pool_bytes),
    _gauge(
        "kvoffd_pool_usable_bytes", "Bytes that are touched and ready for use.", lambda stats: stats.pool.usable_bytes
    ),
    _gauge("kvoffd_pool_table_bytes", "Size of the slot table.", lambda stats: stats.pool.table_bytes),
    MetricSpec(
        "kvoffd_pool_bytes", "gauge", "Bytes of the pool by state; they add up to its size.", ("state",), _pool_states
    ),
    _gauge(
        "kvoffd_pool_pinned_bytes",
        "Of the ready and leaving bytes, those under a lease, a copy or an operator's pin.",
        lambda stats: stats.pool.pinned_bytes,
    ),
    _gauge(
        "kvoffd_pool_page_locked_bytes",
        "Bytes that GPUs copy at full speed, since the CUDA driver has locked their pages.",
        lambda stats: stats.pool.page_locked_bytes,
    ),
    _gauge(
        "kvoffd_pool_unlockable_bytes",
        "Bytes whose pages the CUDA driver would not lock: GPUs copy them slowly.",
        lambda stats: stats.pool.unlockable_bytes,
    ),
    _counter(
        "kvoffd_pool_spilled_slots_total",
        "Slots that had to be taken on another NUMA node than their GPU's.",
        lambda stats: stats.pool.spilled_slots,
    ),
    _counter(
        "kvoffd_checked_slots_total",
        "Slots whose bytes were compared with their checksum.",
        lambda stats: stats.integrity.checked_slots,
    ),
    _counter(
        "kvoffd_checked_bytes_total",
        "Bytes that were compared with their checksum.",
        lambda stats: stats.integrity.checked_bytes,
    ),
    _counter(
        "kvoffd_checksum_mismatches_total",
        "Slots whose bytes were not those that were stored.",
        lambda stats: stats.integrity.mismatches,
    ),
    _gauge(
        "kvoffd_quarantined_slots",
        "Slots that lost what was stored in them and are not used any more.",
        lambda stats: stats.integrity.quarantined_slots,
    ),
    _gauge(
        "kvoffd_unverified_slots",
        "Slots of an earlier daemon that nobody has looked at yet; a load of one does first.",
        lambda stats: stats.integrity.unverified_slots,
    ),
    *DISK_METRICS,
    _gauge(
        "kvoffd_pinned_blocks", "Blocks under a lease, a copy or an operator's pin.", lambda stats: stats.pinned_blocks
    ),
    _gauge(
        "kvoffd_operator_pinned_blocks",
        "Blocks that operators have pinned.",
        lambda stats: stats.blocks.pinned_blocks,
    ),
    _gauge(
        "kvoffd_operator_pinned_bytes",
        "Pool bytes of the blocks that operators have pinned.",
        lambda stats: stats.blocks.pinned_bytes,
    ),
    _counter(
        "kvoffd_blocks_got_total",
        "Blocks that operators opened for reading, exports included.",
        lambda stats: stats.blocks.got_blocks,
    ),
    _counter(
        "kvoffd_blocks_put_total",
        "Blocks that operators wrote, imports included.",
        lambda stats: stats.blocks.put_blocks,
    ),
    _counter("kvoffd_blocks_put_bytes_total", "Bytes copied for these blocks.", lambda stats: stats.blocks.put_bytes),
    _gauge("kvoffd_leases", "Live leases.", lambda stats: stats.leases),
    _gauge("kvoffd_sessions", "Open sessions.", lambda stats: stats.sessions),
    _copying("kvoffd_jobs_total", "counter", "Jobs that ended.", lambda side: side.jobs),
    _copying(
        "kvoffd_jobs_failed_total", "counter", "Jobs that failed or were cancelled.", lambda side: side.failed_jobs
    ),
    _copying("kvoffd_jobs_queued", "gauge", "Jobs that wait now.", lambda side: side.queued_jobs),
    _copying("kvoffd_jobs_running", "gauge", "Jobs that run now.", lambda side: side.running_jobs),
    _copying("kvoffd_copied_bytes_total", "counter", "Bytes copied.", lambda side: side.bytes),
    _copying(
        "kvoffd_copy_busy_seconds_total",
        "counter",
        "Time that copy threads spent copying, and comparing the checksums of loads, in seconds.",
        lambda side: side.busy_seconds,
    ),
    _copying(
        "kvoffd_checksum_cpu_seconds_total",
        "counter",
        "CPU time of all threads that went into the checksums of jobs, in seconds; without those that a copy takes "
        "along the way, as in host memory.",
        lambda side: side.checksum_seconds,
    ),
    _copying(
        "kvoffd_checksum_bytes_total",
        "counter",
        "Bytes of which a job had checksums taken or compared.",
        lambda side: side.checksum_bytes,
    ),
    _copying(
        "kvoffd_copy_bytes_per_second",
        "gauge",
        "Bytes copied per second over the last ten seconds.",
        lambda side: side.bytes_per_second,
    ),
    _counter(
        "kvoffd_lookups_timed_total",
        "Lookups whose time inside the daemon was measured.",
        lambda stats: stats.lookup_latency.count,
    ),
    MetricSpec(
        "kvoffd_lookup_seconds",
        "gauge",
        "Quantiles of the time spent on a lookup inside the daemon, over the last minutes.",
        ("quantile",),
        _lookup_quantiles,
    ),
    _gauge(
        "kvoffd_lookups_per_second",
        "Lookups per second over the last ten seconds.",
        lambda stats: stats.lookups_per_second,
    ),
    _counter("kvoffd_requests_total", "Requests answered, errors included.", lambda stats: stats.requests),
    _counter(
        "kvoffd_replies_dropped_total",
        "Replies that could not be sent, since their client was gone or did not read.",
        lambda stats: stats.replies_dropped,
    ),
    MetricSpec(
        "kvoffd_errors_total",
        "counter",
        "Error replies and refusals at the lifeline, by the name of the error code.",
        ("code",),
        lambda stats: [((code,), count) for code, count in sorted(stats.errors.items())],
    ),
    _counter("kvoffd_events_published_total", "KV event messages published.", lambda stats: stats.events_published),
    _spaced("kvoffd_namespace_ready_blocks", "gauge", "Blocks that can be read.", lambda space: space.ready_blocks),
    _spaced(
        "kvoffd_namespace_ready_bytes",
        "gauge",
        "Pool bytes of the blocks that can be read.",
        lambda space: space.ready_bytes,
    ),
    _spaced(
        "kvoffd_namespace_writing_blocks", "gauge", "Blocks that lack a shard.", lambda space: space.writing_blocks
    ),
    _spaced("kvoffd_namespace_lookups_total", "counter", "Lookup messages.", lambda space: space.lookups),
    _spaced("kvoffd_namespace_keys_asked_total", "counter", "Keys in lookups.", lambda space: space.keys_asked),
    _spaced(
        "kvoffd_namespace_keys_ready_total",
        "counter",
        "Keys in lookups that were ready.",
        lambda space: space.keys_ready,
    ),
    _spaced(
        "kvoffd_namespace_prefix_keys_ready_total",
        "counter",
        "Keys in the unbroken run of ready keys at each group's start.",
        lambda space: space.prefix_keys_ready,
    ),
    _spaced(
        "kvoffd_namespace_keys_pending_total",
        "counter",
        "Keys in lookups that were on disk, and on their way up; when asked first.",
        lambda space: space.keys_pending,
    ),
    _spaced(
        "kvoffd_namespace_stored_blocks_total",
        "counter",
        "Blocks that became ready.",
        lambda space: space.stored_blocks,
    ),
    _spaced(
        "kvoffd_namespace_stored_bytes_total", "counter", "Bytes copied from engines.", lambda space: space.stored_bytes
    ),
    _spaced(
        "kvoffd_namespace_loaded_bytes_total", "counter", "Bytes copied to engines.", lambda space: space.loaded_bytes
    ),
    _spaced(
        "kvoffd_namespace_evicted_blocks_total",
        "counter",
        "Blocks evicted to make room.",
        lambda space: space.evicted_blocks,
    ),
    _spaced(
        "kvoffd_namespace_invalidated_blocks_total",
        "counter",
        "Blocks dropped by Invalidate, Reset, Clear, a timeout or a wrong checksum.",
        lambda space: space.invalidated_blocks,
    ),
    _spaced(
        "kvoffd_namespace_dropped_keys_total",
        "counter",
        "Keys of stores that found no room.",
        lambda space: space.dropped_keys,
    ),
)


class _StatsCollector(Collector):
    def __init__(self, stats: StatsReply) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for spec in METRICS:
            # The library adds the ending to a counter's name itself.
            family = (
                CounterMetricFamily(spec.name.removesuffix("_total"), spec.description, labels=spec.labels)
                if spec.kind == "counter"
                else GaugeMetricFamily(spec.name, spec.description, labels=spec.labels)
            )
            for labels, value in spec.read(self._stats):
                family.add_metric(labels, value)
            yield family


def render_metrics(stats: StatsReply) -> bytes:
    """The page that Prometheus scrapes, in its text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(stats))
    return generate_latest(registry)


def metrics_reference() -> str:
    """The reference page of all metrics, as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Served as Prometheus text on `/metrics` of the daemon's HTTP address. This page is generated by",
        "`python -m kvoffd.observe.metrics > kvoffd/observe/METRICS.md`; do not edit it. Counters count from the",
        "daemon's start.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_reference(), end="")
