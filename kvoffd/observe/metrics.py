"""The Prometheus page and its reference page METRICS.md, made from the metrics that the fields of a ``StatsReply`` are.

``python -m kvoffd.observe.metrics`` prints the reference page. A metric is defined by its field: see ``Metric`` in
``kvoffd_proto.wire``; nothing has to be added here for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvoffd_proto.messages import (
    BelowStats,
    DirectionStats,
    Metric,
    MetricLabel,
    MetricPart,
    NamespaceStats,
    PoolStats,
    StatsReply,
    fields_of,
    metric_annotation,
)
from kvoffd_proto.wire import struct_in

Sample = tuple[tuple[str, ...], float]
"""Label values and number."""
_Selector = Callable[[StatsReply], Iterable[tuple[tuple[str, ...], Struct]]]
"""The Structs of one kind in a reply, each with the label values that tell it apart."""

_ORDER: dict[type[Struct], tuple[tuple[str, ...], ...]] = {
    StatsReply: (
        ("uptime_seconds", "cpu_seconds", "resident_bytes"),
        ("pool", "integrity", "below", "disks", "pinned_blocks", "blocks", "leases", "sessions"),
        ("requests", "replies_dropped"),
    ),
    PoolStats: (("unlockable_bytes", "spilled_slots"),),
    DirectionStats: (("failed_jobs", "queued_jobs", "running_jobs"), ("checksum_bytes", "bytes_per_second")),
    BelowStats: (("waiting_writes", "budget_left_bytes"),),
    NamespaceStats: (("prefix_keys_ready", "keys_pending"),),
}
"""Fields that come behind the first of their row on the page; on the wire, the newest field is the last."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric: what it is called, what it means, and how its samples are read from a reply."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    labels: tuple[str, ...]
    read: Callable[[StatsReply], Iterable[Sample]]


def _metrics_of(struct: type[Struct], select: _Selector, prefix: str, labels: tuple[str, ...]) -> Iterator[MetricSpec]:
    """The metrics of one Struct of the reply and of those inside it, in the order of the page."""
    for field, hint, description in _in_page_order(struct):
        annotation, inner = metric_annotation(hint), struct_in(hint)
        if isinstance(annotation, Metric):
            ending = "_total" if annotation.kind == "counter" else ""
            label = annotation.label[:1] or ((annotation.key_label,) if annotation.key_label else ())
            yield MetricSpec(
                f"{prefix}{annotation.name or field}{ending}",
                annotation.kind,
                annotation.help or description,
                (*labels, *label),
                _reader(select, field, annotation),
            )
        elif inner is not None:
            part = annotation if isinstance(annotation, MetricPart) else MetricPart()
            own_labels = {name: found.name for name, found in _annotations(inner) if isinstance(found, MetricLabel)}
            yield from _metrics_of(
                inner,
                _select_in(select, field, part, tuple(own_labels)),
                prefix + part.prefix,
                (*labels, *part.label[:1], *own_labels.values()),
            )


def _in_page_order(struct: type[Struct]) -> list[tuple[str, object, str]]:
    found = {field.name: (field.name, hint, description) for field, hint, description in fields_of(struct)}
    names = list(found)
    for first, *followers in _ORDER.get(struct, ()):
        names = [name for name in names if name not in followers]
        at = names.index(first) + 1
        names[at:at] = followers
    return [found[name] for name in names]


def _annotations(struct: type[Struct]) -> Iterator[tuple[str, object]]:
    return ((field.name, metric_annotation(hint)) for field, hint, _ in fields_of(struct))


def _select_in(select: _Selector, field: str, part: MetricPart, label_fields: tuple[str, ...]) -> _Selector:
    """How to get at the Structs in ``field``: none where it is nil, all where it is a list."""

    def found(stats: StatsReply) -> Iterator[tuple[tuple[str, ...], Struct]]:
        for values, owner in select(stats):
            held = getattr(owner, field)
            for inner in held if isinstance(held, list) else [] if held is None else [held]:
                own = tuple(_label_value(getattr(inner, name)) for name in label_fields)
                yield (*values, *part.label[1:], *own), inner

    return found


def _label_value(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _reader(select: _Selector, field: str, metric: Metric) -> Callable[[StatsReply], Iterator[Sample]]:

    def samples(stats: StatsReply) -> Iterator[Sample]:
        for values, owner in select(stats):
            value = getattr(owner, field)
            if metric.key_label:
                yield from (((*values, key), count) for key, count in sorted(value.items()))
            elif metric.true_for:
                yield (*values, *metric.label[1:]), value in metric.true_for
            elif (number := metric.nil if value is None else value) is not None:
                yield (*values, *metric.label[1:]), number

    return samples


def _all_metrics() -> tuple[MetricSpec, ...]:
    found: dict[str, list[MetricSpec]] = {}
    for spec in _metrics_of(StatsReply, lambda stats: [((), stats)], "kvoffd_", ()):
        found.setdefault(spec.name, []).append(spec)
    build = MetricSpec(
        "kvoffd_build_info",
        "gauge",
        "Always 1; the labels say what runs.",
        ("version", "policy"),
        lambda stats: [((stats.daemon_version, stats.policy), 1.0)],
    )
    return (build, *map(_joined, found.values()))


def _joined(specs: list[MetricSpec]) -> MetricSpec:
    """One metric of all fields that have its name."""
    return replace(specs[0], read=lambda stats: chain.from_iterable(spec.read(stats) for spec in specs))


METRICS = _all_metrics()


class _StatsCollector(Collector):
    def __init__(self, stats: StatsReply) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Family]:
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
