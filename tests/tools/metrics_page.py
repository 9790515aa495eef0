"""Prints the reference page of metrics: ``python -m tests.tools.metrics_page > kvoffd/observe/METRICS.md``."""

from __future__ import annotations

from kvoffd.observe.metrics import all_metrics


def metrics_reference() -> str:
    lines = [
        "# Metrics",
        "",
        "Prometheus text on `/metrics`. This page: `python -m tests.tools.metrics_page > kvoffd/observe/METRICS.md`.",
        "Counters count from the daemon's start. `lifetime` metrics survive restarts and are gauges, because",
        "a kill loses the last ten seconds: do not take a `rate` of them. Namespaces of benches are left out.",
        "",
        "There are also `process_start_time_seconds`, `process_cpu_seconds_total`, `process_resident_memory_bytes`",
        "(with the pool) and others that exporters share.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for spec in all_metrics(None):
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_reference(), end="")
