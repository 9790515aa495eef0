"""The Prometheus page: every number of the statistics, named, described and correct."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvoffd.observe
from kvoffd.observe.metrics import METRICS, MetricSpec, metrics_reference, render_metrics
from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.stats import (
    DirectionStats,
    DiskStats,
    Histogram,
    HitCurve,
    IntegrityStats,
    NamespaceStats,
    PoolStats,
    SharedServer,
    SharedStats,
    StatsReply,
    TieringStats,
)

PAGE = Path(kvoffd.observe.__file__).parent / "METRICS.md"


def numbers(struct: type, start: int, **given: object) -> object:
    """A ``struct`` whose numbers are all different, so that one put in another's place is seen."""
    fields = msgspec.structs.fields(struct)
    return struct(**{field.name: given.get(field.name, start + i) for i, field in enumerate(fields)})


def some_stats() -> StatsReply:
    spaces = [
        numbers(
            NamespaceStats,
            600,
            namespace=b"\xaa" * 32,
            label="tiny",
            recent=[],
            misses={"evicted": 1601},
            curve=numbers(HitCurve, 2000, lru_ratios={"0.5": 2101}),
        ),
        numbers(NamespaceStats, 700, namespace=b"\xbb" * 32, label='odd "label"\n\\', recent=[], misses={}, curve=None),
    ]
    stats = numbers(
        StatsReply,
        100,
        daemon_version="1.2.3",
        policy="lru",
        pool=numbers(PoolStats, 200),
        store=numbers(DirectionStats, 300),
        load=numbers(DirectionStats, 400),
        errors={"bad_token": 801, "malformed": 802},
        replies_dropped={"gone": 803, "unread": 804},
        ended_sessions={"closed": 1651},
        namespaces=spaces,
        lookup_seconds=Histogram({"0.1": 1511, "+Inf": 1512}, 1513),
        integrity=numbers(IntegrityStats, 900),
        below=numbers(TieringStats, 1000, failed_promotions={"corrupt": 1101}, write_mode="reuse"),
        recent=[],
        curve=numbers(HitCurve, 2200, lru_ratios={"10": 2301}),
        health=HealthLevel.DEGRADED,
        health_problems={"disk_errors": 1701},
        loop_blocked=Histogram({"0.1": 1501, "+Inf": 1502}, 1503),
        shared=[
            numbers(
                SharedStats,
                1800,
                name="redis://a",
                failed_promotions={"gone": 1901},
                errors={"full": 1902},
                servers=[SharedServer("a:6379", True, "")],
            )
        ],
        disks=[
            numbers(DiskStats, 1200, directory="/a", state="serving", problem="", direct=True, errors={"torn": 1301}),
            numbers(DiskStats, 1400, directory="/b", state="failed", problem="No.", direct=False, errors={}),
        ],
    )
    assert isinstance(stats, StatsReply)
    return stats


def samples(stats: StatsReply) -> dict[tuple[str, frozenset[str]], float]:
    """By name and label values, which are all different here."""
    families = text_string_to_metric_families(render_metrics(stats).decode())
    return {(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples}


def test_every_number_of_the_statistics_is_on_the_page() -> None:
    stats = some_stats()
    shown = set(samples(stats).values())

    def check(part: object, path: str) -> None:
        if isinstance(part, msgspec.Struct):
            for name in part.__struct_fields__:
                # These say who asked and who answered, not how the daemon is.
                # The recent lookups and the settings are for people.
                if (path or name not in ("request_id", "epoch", "pid")) and name not in ("recent", "settings"):
                    check(getattr(part, name), f"{path}.{name}")
        elif isinstance(part, (list, dict)):
            for item in part.values() if isinstance(part, dict) else part:
                check(item, path)
        elif isinstance(part, (int, float)):
            assert part in shown, f"StatsReply{path} is not on the page"

    check(stats, "")


def test_samples_carry_their_labels_and_values() -> None:
    stats = some_stats()
    found = samples(stats)
    assert found["kvoffd_build_info", frozenset({"1.2.3", "lru"})] == 1
    assert found["kvoffd_pool_bytes", frozenset({"writing"})] == stats.pool.writing_bytes
    assert found["kvoffd_jobs_total", frozenset({"load"})] == stats.load.jobs
    assert found["kvoffd_errors_total", frozenset({"malformed"})] == 802
    assert found["kvoffd_replies_dropped_total", frozenset({"unread"})] == 804
    assert found["kvoffd_serving", frozenset()] == 1
    assert found["kvoffd_health_problems", frozenset({"disk_errors"})] == 1701
    assert found["kvoffd_lookup_seconds_bucket", frozenset({"0.1"})] == 1511
    assert found["kvoffd_namespace_keys_ready_total", frozenset({"bb" * 6})] == stats.namespaces[1].keys_ready
    assert found["kvoffd_namespace_info", frozenset({"bb" * 6, "bb" * 32, 'odd "label"\n\\'})] == 1


def test_namespaces_that_begin_alike_have_their_whole_name() -> None:
    """A client chooses its fingerprint; two series of one name would fail the whole scrape."""
    alike = [b"\xaa" * 6 + bytes([number]) * 26 for number in (1, 2)]
    spaces = [
        numbers(NamespaceStats, 600, namespace=name, label="", misses={}, curve=None) for name in (*alike, b"\xbb" * 32)
    ]
    page = render_metrics(msgspec.structs.replace(some_stats(), namespaces=spaces)).decode()
    shown = set(re.findall('kvoffd_namespace_lookups_total{namespace="(.*)"}', page))
    assert shown == {alike[0].hex(), alike[1].hex(), "bb" * 6}


def test_a_page_tells_when_the_process_started() -> None:
    page = render_metrics(some_stats()).decode()
    (started,) = re.findall(r"^process_start_time_seconds ([\d.e+]+)$", page, re.MULTILINE)
    assert 0 < time.time() - float(started) < 24 * 3600


def test_disks_have_samples_of_their_own() -> None:
    found = samples(some_stats())
    assert found["kvoffd_disk_serving", frozenset({"/a"})] == 1
    assert found["kvoffd_disk_serving", frozenset({"/b"})] == 0
    assert found["kvoffd_disk_errors_total", frozenset({"/a", "torn"})] == 1301
    page = render_metrics(msgspec.structs.replace(some_stats(), below=None, disks=[]))
    assert b"\nkvoffd_promoted_blocks_total " not in page


def test_a_shared_tier_has_samples_of_its_own() -> None:
    found = samples(some_stats())
    assert found["kvoffd_shared_errors_total", frozenset({"redis://a", "full"})] == 1902
    assert found["kvoffd_shared_promotions_failed_total", frozenset({"redis://a", "gone"})] == 1901
    assert found["kvoffd_shared_server_answers", frozenset({"redis://a", "a:6379"})] == 1


def test_a_daemon_without_namespaces_or_errors_has_a_page() -> None:
    page = render_metrics(msgspec.structs.replace(some_stats(), namespaces=[], errors={}))
    assert b"kvoffd_namespace_lookups_total{" not in page
    assert b"# HELP kvoffd_errors_total" in page


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_every_metric_has_a_conventional_name_and_a_description(spec: MetricSpec) -> None:
    assert re.fullmatch("kvoffd_[a-z_]+", spec.name)
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert spec.description.endswith(".")
    assert "nil" not in spec.description.replace(";", "").split(), "Prometheus has no nil: the sample is absent"
    unit = {"second": "_seconds", "byte": "_bytes"}
    for word, ending in unit.items():
        if spec.description.lower().startswith(word):
            assert ending in spec.name


def test_no_metric_is_there_twice() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == metrics_reference(), "run: python -m kvoffd.observe.metrics > kvoffd/observe/METRICS.md"


def test_a_metric_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        METRICS[0].name = "other"  # type: ignore[misc]
