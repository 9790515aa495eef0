"""Metrics for Prometheus, made from the fields of ``DaemonStats``: see ``Metric`` in ``kvoffd_proto.stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvoffd_proto.messages import fields_of, struct_in
from kvoffd_proto.stats import DaemonStats, Metric, metric_of

Labels = tuple[str, ...]


@dataclass(frozen=True)
class MetricSpec:
    """Name, meaning and samples (label values and value) of one metric."""

    name: str
    kind: str
    description: str
    labels: Labels
    samples: list[tuple[Labels, Any]] = field(default_factory=list)


@cache
def _fields(struct: type[Struct]) -> list[tuple[str, Metric, type[Struct] | None, str]]:
    """Return name, metric, inner Struct and description of the fields that /metrics has."""
    return [
        (item.name, metric, struct_in(hint), description)
        for item, hint, description in fields_of(struct)
        if (metric := metric_of(hint)) is not None
    ]


def _metrics(struct: type[Struct], rows: list[tuple[Labels, Any]], prefix: str, labels: Labels) -> Iterator[MetricSpec]:
    """Yield the metrics of a Struct type and of its parts.

    ``rows``: all Structs of the type, each with its values of ``labels``. To these are added the Struct's own labels.
    """
    own = [(name, metric.label) for name, metric, *_ in _fields(struct) if metric.kind == "label"]
    labels = (*labels, *(label for _, label in own))
    rows = [((*values, *(getattr(one, name) for name, _ in own)), one) for values, one in rows]
    for name, metric, inner, description in _fields(struct):
        if metric.kind == "part":
            assert inner is not None
            fixed_name, fixed_value = metric.fixed[:1], metric.fixed[1:]  # both empty without a fixed label
            parts = [((*values, *fixed_value), each) for values, one in rows for each in _all(getattr(one, name))]
            yield from _metrics(inner, parts, prefix + metric.prefix, (*labels, *fixed_name))
        elif metric.kind != "label":
            ending = "_total" if metric.kind == "counter" else ""
            samples = [sample for values, one in rows for sample in _samples(getattr(one, name), values, metric.keys)]
            label = (metric.label,) if metric.label else ()
            yield MetricSpec(f"{prefix}{name}{ending}", metric.kind, description, (*labels, *label), samples)


def _all(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _samples(value: Any, labels: Labels, keys: Iterable[str]) -> Iterator[tuple[Labels, Any]]:
    if isinstance(value, list):  # Structs, counted by their first field: see ``Metric.label``
        value = Counter(getattr(one, one.__struct_fields__[0]) for one in value)
    if isinstance(value, dict):
        every = dict.fromkeys(map(str, keys), 0) | value
        yield from (((*labels, key), number) for key, number in sorted(every.items()))
    elif value is not None:
        yield labels, value


def all_metrics(stats: DaemonStats | None) -> list[MetricSpec]:
    """Return all metrics with the samples of ``stats``; parts that differ in a fixed label are one metric.

    Namespaces of benches are left out, since each run creates new ones.
    """
    if stats is not None:
        stats = replace(stats, namespaces=[one for one in stats.namespaces if not one.of_bench])
    build = MetricSpec(
        "kvoffd_build_info",
        "gauge",
        "Release, protocol and eviction policy of the daemon; always 1.",
        ("version", "protocol", "policy"),
    )
    if stats is not None:
        build.samples.append(((stats.version, str(stats.protocol), stats.policy), 1))
    found = {build.name: build}
    for spec in _metrics(DaemonStats, [] if stats is None else [((), stats)], "kvoffd_", ()):
        if spec.name in found:
            found[spec.name].samples.extend(spec.samples)
        else:
            found[spec.name] = spec
    return list(found.values())


_PROCESS = ProcessCollector(registry=None)
"""Standard metrics of a process, such as ``process_start_time_seconds``."""


class _StatsCollector(Collector):
    def __init__(self, stats: DaemonStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Family]:
        for spec in all_metrics(self._stats):
            if spec.kind == "histogram":
                histogram = HistogramMetricFamily(spec.name, spec.description, labels=spec.labels)
                for values, one in (sample for sample in spec.samples if sample[1].buckets):
                    histogram.add_metric(values, list(one.buckets.items()), one.sum_seconds)
                yield histogram
                continue
            # The library appends _total to a counter's name.
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name.removesuffix("_total"), spec.description, labels=spec.labels)
            for values, number in spec.samples:
                family.add_metric(values, number)
            yield family


def render_metrics(stats: DaemonStats) -> bytes:
    """Return the metrics in Prometheus's text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(stats))
    registry.register(_PROCESS)
    return generate_latest(registry)
