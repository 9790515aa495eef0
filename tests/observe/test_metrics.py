"""The page for Prometheus."""

from __future__ import annotations

import re
import time
from pathlib import Path

import kvoffd.observe
from kvoffd.observe.metrics import all_metrics, render_metrics
from kvoffd.tiering.promotions import NotRead
from kvoffd.tiers.tier import Result
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import DaemonStats, DiskFault, DiskStats, NamespaceStats, TieringStats
from tests.tools.metrics_page import metrics_reference

PAGE = Path(kvoffd.observe.__file__).with_name("METRICS.md")
METRICS = all_metrics(None)


def test_a_page_tells_when_the_process_started() -> None:
    page = render_metrics(DaemonStats()).decode()
    (started,) = re.findall(r"^process_start_time_seconds ([\d.e+]+)$", page, re.MULTILINE)
    assert 0 < time.time() - float(started) < 24 * 3600


def test_every_metric_has_a_conventional_name_and_a_description() -> None:
    """promtool, in tests/daemon/test_http.py, sees other conventions."""
    for spec in METRICS:
        assert re.fullmatch("kvoffd_[a-z_]+", spec.name)
        assert "per_second" not in spec.name, "Prometheus takes rates itself"
        assert "namespace" not in spec.labels, "it is Kubernetes' own"
        assert spec.description.endswith("."), spec.name
        assert len(spec.description.split()) >= 4, "a subject and what of it"
        for word, ending in {"second": "_seconds", "byte": "_bytes"}.items():
            assert not re.match(f"(cpu )?{word}", spec.description.lower()) or ending in spec.name, spec.name


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == metrics_reference(), "python -m tests.tools.metrics_page > kvoffd/observe/METRICS.md"


def test_counters_of_errors_begin_at_zero() -> None:
    """``increase`` does not see the first one of a series that begins with it."""
    stats = DaemonStats(errors={"malformed": 2}, disks=[DiskStats("/d", errors={"torn": 3})], tiers=TieringStats())
    samples = {
        spec.name: {values[-1]: count for values, count in spec.samples if values} for spec in all_metrics(stats)
    }
    codes = {code.name.lower() for code in ErrorCode}
    assert samples["kvoffd_errors_total"] == dict.fromkeys(codes, 0) | {"malformed": 2}
    assert samples["kvoffd_disk_errors_total"] == dict.fromkeys(map(str, DiskFault), 0) | {"torn": 3}
    failures = {*map(str, NotRead), *map(str, Result)} - {"done", "existed", "cancelled", "unwanted"}
    assert samples["kvoffd_tiers_promotions_failed_total"] == dict.fromkeys(failures, 0)


def test_namespaces_of_benches_are_on_no_page() -> None:
    rows = [NamespaceStats(id="ab", model="a model", ready_bytes=1), NamespaceStats(id="cd", of_bench=True)]
    (ready,) = (spec for spec in all_metrics(DaemonStats(namespaces=rows)) if spec.name.endswith("ready_bytes"))
    assert ready.samples == [(("ab", "a model"), 1)]
