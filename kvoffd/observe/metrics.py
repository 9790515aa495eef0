"""The Prometheus page and its reference page METRICS.md, made from the metrics that the fields of a ``StatsReply`` are.

``python -m kvoffd.observe.metrics`` prints the reference page. A metric is defined by its field: see ``Metric`` in
``kvoffd_proto.stats``; nothing has to be added here for another one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvoffd_proto.messages import fields_of, struct_in
from kvoffd_proto.stats import Histogram, Metric, MetricInfo, MetricLabel, MetricPart, StatsReply, metric_annotation

Labels = tuple[str, ...]
AnnotationT = TypeVar("AnnotationT", MetricLabel, MetricInfo)


@dataclass(frozen=True)
class MetricSpec:
    """One metric: what it is called, what it means, and its samples (label values and number) of one reply, if any."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    labels: Labels
    samples: list[tuple[Labels, float | Histogram]] = field(default_factory=list)


def _metrics_of(
    struct: type[Struct], held: list[tuple[Labels, Struct]], prefix: str, labels: Labels
) -> Iterator[MetricSpec]:
    """The metrics of one Struct of the reply and of those inside it, in the order of the wire.

    ``held`` has all Structs of this type that the reply holds here, each with the values of ``labels``; none of them
    for the reference page.
    """
    for name, annotation, inner, description in _fields(struct):
        if isinstance(annotation, Metric):
            ending = "_total" if annotation.kind == "counter" else ""
            label = annotation.label[:1] or ((annotation.key_label,) if annotation.key_label else ())
            yield MetricSpec(
                f"{prefix}{annotation.name or name}{ending}",
                annotation.kind,
                annotation.help or re.sub(r"\bnil\b", "absent", description),
                (*labels, *label),
                [sample for values, owner in held for sample in _samples(getattr(owner, name), annotation, values)],
            )
        elif inner is not None:
            part = annotation if isinstance(annotation, MetricPart) else MetricPart()
            found = [
                ((*values, *part.label[1:], *own), item)
                for values, owner in held
                for own, item in _with_labels(inner, _structs_in(getattr(owner, name)))
            ]
            own_labels = (label.name for label in _annotated(inner, MetricLabel).values())
            inner_labels = (*labels, *part.label[:1], *own_labels)
            if infos := _info_fields(inner):
                samples: list[tuple[Labels, float | Histogram]] = [
                    ((*values, *(_label_value(getattr(item, field)) for field in infos)), 1.0) for values, item in found
                ]
                text = "Always 1; the labels say in full what the others' labels name shortly."
                name = f"{prefix}{part.prefix}info"
                yield MetricSpec(name, "gauge", text, (*inner_labels, *infos.values()), samples)
            yield from _metrics_of(inner, found, prefix + part.prefix, inner_labels)


def _with_labels(struct: type[Struct], items: list[Struct]) -> Iterator[tuple[Labels, Struct]]:
    """``items``, which are of that type, each with the values of its labels."""
    columns = [
        _label_values([getattr(item, field) for item in items], label.short)
        for field, label in _annotated(struct, MetricLabel).items()
    ]
    yield from zip(zip(*columns, strict=True) if columns else [()] * len(items), items, strict=True)


def _label_values(values: list[object], short: int) -> list[str]:
    """The label of each value: its first ``short`` bytes, all of it where two begin with the same or ``short`` is 0."""
    begins = Counter(value[:short] for value in values if isinstance(value, bytes))
    return [
        _label_value(value[:short] if short and isinstance(value, bytes) and begins[value[:short]] == 1 else value)
        for value in values
    ]


def _info_fields(struct: type[Struct]) -> dict[str, str]:
    """The fields of the metric ``info`` with their labels; none where the Struct has no such metric."""
    more = {field: info.name for field, info in _annotated(struct, MetricInfo).items()}
    full = {field: label.info_name for field, label in _annotated(struct, MetricLabel).items() if label.info_name}
    return {**full, **more} if more else {}


def _annotated(struct: type[Struct], kind: type[AnnotationT]) -> dict[str, AnnotationT]:
    return {field: annotation for field, annotation, *_ in _fields(struct) if isinstance(annotation, kind)}


@cache
def _fields(
    struct: type[Struct],
) -> list[tuple[str, Metric | MetricPart | MetricLabel | MetricInfo | None, type[Struct] | None, str]]:
    """Name, annotation, Struct inside and description of the fields."""
    return [
        (field.name, metric_annotation(hint), struct_in(hint), description)
        for field, hint, description in fields_of(struct)
    ]


def _structs_in(value: Struct | list[Struct] | None) -> list[Struct]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _label_value(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _samples(value: Any, metric: Metric, labels: Labels) -> Iterator[tuple[Labels, float | Histogram]]:
    if metric.key_label:
        yield from (((*labels, key), count) for key, count in sorted(value.items()))
    elif metric.true_for:
        yield (*labels, *metric.label[1:]), value in metric.true_for
    elif (number := metric.nil if value is None else value) is not None:
        yield (*labels, *metric.label[1:]), number


def _all_metrics(stats: StatsReply | None) -> tuple[MetricSpec, ...]:
    """All metrics with their samples of ``stats``; fields that have the same name are one metric."""
    build = MetricSpec("kvoffd_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "policy"))
    if stats is not None:
        build.samples.append(((stats.daemon_version, stats.policy), 1.0))
    found = {build.name: build}
    for spec in _metrics_of(StatsReply, [] if stats is None else [((), stats)], "kvoffd_", ()):
        if found.setdefault(spec.name, spec) is not spec:
            found[spec.name].samples.extend(spec.samples)
    return tuple(found.values())


METRICS = _all_metrics(None)
_PROCESS = ProcessCollector(registry=None)
"""What every exporter tells of its process, ``process_start_time_seconds`` for one."""


class _StatsCollector(Collector):
    def __init__(self, stats: StatsReply) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Family]:
        for spec in _all_metrics(self._stats):
            # The library adds the ending to a counter's name itself.
            name, text, labels = spec.name.removesuffix("_total"), spec.description, spec.labels
            family = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)
            distribution = HistogramMetricFamily(name, text, labels=labels)
            for values, value in spec.samples:
                if isinstance(value, Histogram):
                    distribution.add_metric(values, list(value.buckets.items()), value.sum_seconds)
                else:
                    family.add_metric(values, value)
            yield distribution if spec.kind == "histogram" else family


def render_metrics(stats: StatsReply) -> bytes:
    """The page that Prometheus scrapes, in its text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(stats))
    registry.register(_PROCESS)
    return generate_latest(registry)


def metrics_reference() -> str:
    lines = [
        "# Metrics",
        "",
        "Served as Prometheus text on `/metrics` of the daemon's HTTP address. This page is generated by",
        "`python -m kvoffd.observe.metrics > kvoffd/observe/METRICS.md`; do not edit it. Counters count from the",
        "daemon's start. Beside them are those that exporters have in common: `process_start_time_seconds`,",
        "`process_cpu_seconds_total`, `process_resident_memory_bytes` (with the pool), `process_open_fds` and others.",
        "`kvoffd-cli stats --json` has the same numbers; [JSON.md](../../client/JSON.md) lists the reasons of misses.",
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
