"""The page for Prometheus."""

from __future__ import annotations

import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import kvoffd.observe
from kvoffd.observe.metrics import all_metrics, metrics_reference, render_metrics
from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.stats import (
    CopyStats,
    DaemonStats,
    DiskStats,
    Histogram,
    HitCurve,
    NamespaceStats,
    PoolStats,
    Problem,
    SharedServer,
    SharedStats,
    TieringStats,
)

PAGE = Path(kvoffd.observe.__file__).with_name("METRICS.md")
METRICS = all_metrics(None)
EVIL = 'odd "model"\n\\'


def some_stats() -> DaemonStats:
    return DaemonStats(
        version="1.2.3",
        policy="lru",
        ready=True,
        health=HealthLevel.DEGRADED,
        health_problems=[Problem("disk_errors", "One."), Problem("disk_errors", "Two.")],
        errors={"malformed": 802},
        lookup_seconds=Histogram({"0.1": 3, "+Inf": 4}, 0.5),
        pool=PoolStats(100, {"free": 60, "ready": 40}),
        store=CopyStats(jobs=3),
        load=CopyStats(jobs=5),
        namespaces=[
            NamespaceStats(id="aa" * 6, model="llama", loaded_tokens=7, misses={"evicted": 9}, quota_bytes=5),
            NamespaceStats(id="bb" * 6, model=EVIL, loaded_tokens=8),
            NamespaceStats(id="other", loaded_tokens=2),
        ],
        tiers=TieringStats(write_budget_left_bytes=None, promotions_failed={"corrupt": 1}),
        disks=[DiskStats("/a", True, "serving", errors={"torn": 13}), DiskStats("/b", False, "failed")],
        shared=[SharedStats("redis://a", True, errors={"full": 19}, servers=[SharedServer("a:6379", True)])],
        curve=HitCurve(10, 5, {"2": 0.5}),
    )


def samples(stats: DaemonStats) -> dict[tuple[str, ...], float]:
    """By name and label values, in order."""
    families = text_string_to_metric_families(render_metrics(stats).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_samples_carry_their_labels_and_values() -> None:
    found = samples(some_stats())
    assert found["kvoffd_build_info", "lru", "1.2.3"] == 1
    assert found["kvoffd_ready",] == 1
    assert found["kvoffd_health_problems", "disk_errors"] == 2
    assert found["kvoffd_errors_total", "malformed"] == 802
    assert found["kvoffd_lookup_seconds_bucket", "0.1"] == 3
    assert (found["kvoffd_lookup_seconds_count",], found["kvoffd_lookup_seconds_sum",]) == (4, 0.5)
    assert (found["kvoffd_pool_bytes", "free"], found["kvoffd_pool_bytes", "ready"]) == (60, 40)
    assert (found["kvoffd_copy_jobs_total", "store"], found["kvoffd_copy_jobs_total", "load"]) == (3, 5)
    assert found["kvoffd_namespace_loaded_tokens_total", "aa" * 6, "llama"] == 7
    assert found["kvoffd_namespace_loaded_tokens_total", "bb" * 6, EVIL] == 8
    assert found["kvoffd_namespace_loaded_tokens_total", "other", ""] == 2
    assert found["kvoffd_namespace_misses_total", "aa" * 6, "llama", "evicted"] == 9
    assert [labels for name, *labels in found if name == "kvoffd_namespace_quota_bytes"] == [["aa" * 6, "llama"]]
    assert found["kvoffd_tiers_promotions_failed_total", "corrupt"] == 1
    assert ("kvoffd_tiers_write_budget_left_bytes",) not in found, "there is no bound"
    assert (found["kvoffd_disk_up", "/a"], found["kvoffd_disk_up", "/b"]) == (1, 0)
    assert found["kvoffd_disk_errors_total", "/a", "torn"] == 13
    assert found["kvoffd_shared_errors_total", "full", "redis://a"] == 19
    assert found["kvoffd_shared_server_up", "a:6379", "redis://a"] == 1
    assert found["kvoffd_curve_lru_hit_ratio", "2"] == 0.5


def test_a_page_tells_when_the_process_started() -> None:
    page = render_metrics(some_stats()).decode()
    (started,) = re.findall(r"^process_start_time_seconds ([\d.e+]+)$", page, re.MULTILINE)
    assert 0 < time.time() - float(started) < 24 * 3600


def test_every_metric_has_a_conventional_name_and_a_description() -> None:
    for spec in METRICS:
        assert re.fullmatch("kvoffd_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert "per_second" not in spec.name, "Prometheus takes rates itself"
        assert "namespace" not in spec.labels, "it is Kubernetes' own"
        assert len(set(spec.labels)) == len(spec.labels), spec.name
        assert spec.description.endswith("."), spec.name
        assert len(spec.description.split()) >= 4, "a subject and what of it"
        for word, ending in {"second": "_seconds", "byte": "_bytes"}.items():
            assert not re.match(f"(cpu )?{word}", spec.description.lower()) or ending in spec.name, spec.name


def test_there_are_few_metrics_and_none_twice() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS) <= 75


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == metrics_reference(), "run: python -m kvoffd.observe.metrics > kvoffd/observe/METRICS.md"
