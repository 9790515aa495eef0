"""deploy/grafana and deploy/prometheus: their names are those of /metrics, panels show data, and each alert fires."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffd.observe.metrics import all_metrics
from kvoffd.server.tier_supervisor import HARMLESS_ERRORS
from kvoffd_client import NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import findings as f
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.stats import LATE_SHARE, MIN_LATE
from kvoffd_proto.verdict import MIN_LOOKUPS, PAYS_PERCENT
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.redis_server import PROGRAM as REDIS
from tests.kit.redis_server import RedisServer
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, refused

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvoffd.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
CONNECTED = "vllm:kvoffd_connected"
"""An engine's own: `kvoffd_client.vllm.metrics`, which imports vLLM."""
NAMES = {spec.name for spec in all_metrics(None)}
NAMES |= {f"{name}_{part}" for name in NAMES if name.endswith("_seconds") for part in ("bucket", "count", "sum")}
OTHERS = {"process_cpu_seconds_total", "process_start_time_seconds", "up", CONNECTED}

AT, MODEL = 'instance="n:9464", job="kvoffd"', 'kv_namespace="ab", model="m"'
TOKENS = "kvoffd_namespace_prompt_tokens_total"
FIRES: dict[str, dict[str, str]] = {
    # Series with what they count each minute, of a fault that lasts.
    "KvoffdDown": {f"up{{{AT}}}": "0x120"},
    "KvoffdDegraded": {f'kvoffd_health_problems{{{AT}, reason="pool_pinned"}}': "1x120"},
    "KvoffdLateLookups": {
        f"kvoffd_namespace_late_lookups_total{{{AT}, {MODEL}}}": "0+10x120",
        f"kvoffd_namespace_lookups_total{{{AT}, {MODEL}}}": "0+100x120",
    },
    "KvoffdNeverPaysOff": {
        f"kvoffd_namespace_lookups_total{{{AT}, {MODEL}}}": "0+1x480",
        f'{TOKENS}{{{AT}, {MODEL}, source="engine"}}': "0+9000x480",
        f'{TOKENS}{{{AT}, {MODEL}, source="pool"}}': "0+1x480",
        f'{TOKENS}{{{AT}, {MODEL}, source="computed"}}': "0+160x480",
    },
    "KvoffdThrashing": {
        f'kvoffd_namespace_misses_total{{{AT}, {MODEL}, reason="evicted"}}': "0+21x120",
        f"kvoffd_namespace_asked_keys_total{{{AT}, {MODEL}}}": "0+100x120",
    },
    "KvoffdNoSpace": {f"kvoffd_namespace_no_space_keys_total{{{AT}, {MODEL}}}": "0+50x120"},
    "KvoffdErrors": {
        f'kvoffd_errors_total{{{AT}, code="malformed"}}': "0+2x120",
        f"kvoffd_requests_total{{{AT}}}": "0+100x120",
    },
    "KvoffdCopiesFail": {
        f'kvoffd_copy_failed_jobs_total{{{AT}, direction="load"}}': "0+2x120",
        f'kvoffd_copy_jobs_total{{{AT}, direction="load"}}': "0+100x120",
    },
    "KvoffdEngineNotConnected": {f'{CONNECTED}{{{AT}, model_name="m"}}': "0x120"},
    "KvoffdRestarts": {f"process_start_time_seconds{{{AT}}}": "0+60x120", f"kvoffd_ready{{{AT}}}": "1x120"},
    "KvoffdDiskDown": {f'kvoffd_disk_up{{{AT}, disk="/d"}}': "0x120"},
    "KvoffdDiskErrors": {f'kvoffd_disk_errors_total{{{AT}, disk="/d", kind="no_space"}}': "0x110 1x10"},
    "KvoffdDiskSlow": {  # all of it is late
        f'kvoffd_namespace_misses_total{{{AT}, {MODEL}, reason="tier_late"}}': "0+20x120",
        f'kvoffd_namespace_found_keys_total{{{AT}, {MODEL}, source="disk"}}': "0x120",
    },
    "KvoffdStoreDark": {f'kvoffd_shared_up{{{AT}, store="redis://s"}}': "0x120"},
    "KvoffdLoopBlocked": {
        f"kvoffd_loop_blocked_seconds_count{{{AT}}}": "0+1200x120",
        f'kvoffd_loop_blocked_seconds_bucket{{{AT}, le="0.05"}}': "0+1180x120",
        f'kvoffd_loop_blocked_seconds_bucket{{{AT}, le="+Inf"}}': "0+1200x120",
    },
    "KvoffdPoolNotPinned": {f"kvoffd_pool_unpinnable_bytes{{{AT}}}": "1024x120"},
    "KvoffdCorruption": {f"kvoffd_integrity_mismatches_total{{{AT}}}": "0x60 1x60"},
}
LATEST = {"KvoffdNeverPaysOff": "8h", "KvoffdCorruption": "80m"}
"""When it is looked whether an alert fires, where that is not after two hours."""
QUIET = {
    f"up{{{AT}}}": "1x720",
    f"kvoffd_ready{{{AT}}}": "1x720",
    'up{instance="o:80", job="another"}': "0x720",
    'process_start_time_seconds{instance="o:80", job="another"}': "0+60x720",
    f'{CONNECTED}{{{AT}, model_name="m"}}': "1x720",
    f"kvoffd_namespace_late_lookups_total{{{AT}, {MODEL}}}": "0+1x720",
    f"kvoffd_namespace_lookups_total{{{AT}, {MODEL}}}": "0+100x720",
    f'{TOKENS}{{{AT}, {MODEL}, source="engine"}}': "0+9000x720",
    f'{TOKENS}{{{AT}, {MODEL}, source="store"}}': "0+2x720",
    f'{TOKENS}{{{AT}, {MODEL}, source="computed"}}': "0+160x720",
    f'kvoffd_namespace_misses_total{{{AT}, {MODEL}, reason="evicted"}}': "0+10x720",
    f'kvoffd_namespace_misses_total{{{AT}, {MODEL}, reason="tier_late"}}': "0+1x720",
    f'kvoffd_namespace_found_keys_total{{{AT}, {MODEL}, source="disk"}}': "0+100x720",
    f"kvoffd_namespace_asked_keys_total{{{AT}, {MODEL}}}": "0+100x720",
    f"kvoffd_namespace_no_space_keys_total{{{AT}, {MODEL}}}": "7x720",
    f'kvoffd_errors_total{{{AT}, code="malformed"}}': "0+1x720",
    f"kvoffd_requests_total{{{AT}}}": "0+100x720",
    f'kvoffd_copy_failed_jobs_total{{{AT}, direction="load"}}': "3x720",
    f'kvoffd_copy_jobs_total{{{AT}, direction="load"}}': "0+100x720",
    f'kvoffd_disk_up{{{AT}, disk="/d"}}': "1x720",
    f'kvoffd_disk_errors_total{{{AT}, disk="/d", kind="torn"}}': "4x720",
    f'kvoffd_disk_errors_total{{{AT}, disk="/d", kind="not_direct"}}': "0x60 1x660",
    f'kvoffd_shared_up{{{AT}, store="redis://s"}}': "1x720",
    f"kvoffd_loop_blocked_seconds_count{{{AT}}}": "0+1200x720",
    f'kvoffd_loop_blocked_seconds_bucket{{{AT}, le="0.05"}}': "0+1190x720",
    f'kvoffd_loop_blocked_seconds_bucket{{{AT}, le="+Inf"}}': "0+1200x720",
    f"process_start_time_seconds{{{AT}}}": "0x718 1x2",
    f'kvoffd_health_problems{{{AT}, reason="disk_errors"}}': "1x720",
    f"kvoffd_pool_unpinnable_bytes{{{AT}}}": "0x720",
    f"kvoffd_integrity_mismatches_total{{{AT}}}": "1x720",
}
"""Of a daemon that works: no alert fires."""


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:(?:vllm:)?kvoffd|process)_[a-z_]+|\bup\b", re.sub(r'"[^"]*"', "", expression)))


def rule_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def firing(tmp_path: Path, cases: list[tuple[list[str], dict[str, str]]]) -> set[str]:
    """Which alerts of each case fire with its series."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "alert_rule_test": [
                {"eval_time": LATEST.get(name, "2h"), "alertname": name, "exp_alerts": []} for name in names
            ],
        }
        for names, series in cases
    ]
    file = tmp_path / "tests.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=300)
    printed = done.stdout + done.stderr
    assert "FAILED" in printed or "SUCCESS" in printed, printed
    return {name for names, _ in cases for name in names if f'alertname="{name}"' in printed}


@pytest.mark.nightly
def test_each_alert_fires_when_it_should_and_is_silent_else(tmp_path: Path) -> None:
    require("prometheus", shutil.which("promtool"), "promtool is not installed")
    assert firing(tmp_path, [([name], series) for name, series in FIRES.items()]) == set(rule_names())
    assert firing(tmp_path, [(rule_names(), QUIET)]) == set()
    gpu = f'kvoffd_health_problems{{{AT}, reason="gpu"}}'
    not_pinned = QUIET | FIRES["KvoffdPoolNotPinned"] | {gpu: "1x720"}
    assert firing(tmp_path, [(rule_names(), not_pinned)]) == {"KvoffdPoolNotPinned"}, "one cause, one alert"
    assert "KvoffdDegraded" in firing(tmp_path, [(rule_names(), not_pinned | {gpu: "2x720"})]), "a GPU hangs too"


def test_dashboard_and_alerts_name_metrics_that_there_are() -> None:
    assert set(FIRES) == set(rule_names())
    assert f'"{CONNECTED}"' in (DEPLOY.parent / "client/kvoffd_client/vllm/metrics.py").read_text()
    used = metric_names(RULES.read_text().partition("groups:")[2].replace("kvoffd_cli", ""))
    for _, query in QUERIES:
        used |= metric_names(query)
    for series in (QUIET, *FIRES.values()):
        used |= {one.partition("{")[0] for one in series}
    assert used - NAMES - OTHERS == set()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_have_the_figures_of_doctor_and_of_health() -> None:
    expressions = dict(re.findall(r"- alert: (\w+)\n +expr: (.*?)\n +(?:for|labels):", RULES.read_text(), re.DOTALL))
    for name, figures in {
        "KvoffdLateLookups": {LATE_SHARE, MIN_LATE},
        "KvoffdNeverPaysOff": {PAYS_PERCENT / 100, MIN_LOOKUPS},
        "KvoffdThrashing": {f.THRASH_SHARE, 0},
        "KvoffdErrors": {f.ERROR_SHARE, f.MIN_ERRORS},
        "KvoffdCopiesFail": {f.ERROR_SHARE, f.MIN_ERRORS},
        "KvoffdDiskSlow": {f.LATE_TIER_SHARE, f.MIN_ERRORS},
        "KvoffdLoopBlocked": {f.LOOP_BLOCKED_S, MIN_LOOKUPS},
    }.items():
        assert set(map(float, re.findall(r"[<>]=? ([\d.]+)", expressions[name]))) == figures, name
    for kind in HARMLESS_ERRORS:
        assert kind in expressions["KvoffdDiskErrors"]


@contextmanager
def prometheus(tmp_path: Path, port: int, own_port: int) -> Iterator[None]:
    """Scrapes a daemon each second."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvoffd", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own_port}",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            yield
        finally:
            server.kill()


@pytest.mark.nightly
def test_every_panel_shows_data_of_a_daemon_under_load(tmp_path: Path) -> None:
    there = shutil.which("prometheus")
    require("prometheus", there, "prometheus is not installed")
    require("redis", REDIS, "redis is not installed")
    port, own_port = free_ports(2)

    def query(expression: str) -> list[Any]:
        text = urllib.parse.quote(expression)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{own_port}/api/v1/query?query={text}", timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except OSError:
            return []  # it starts

    def concrete(expression: str) -> str:
        return expression.replace("$__rate_interval", "20s").replace("$job", ".*").replace("$instance", ".*")

    spec = NamespaceSpec(b"\xcd" * 32, "a model", 1, 32, (GroupSpec("full_attention", 16),))
    options = {"http_address": f"127.0.0.1:{port}", "disk": f"{tmp_path / 'disk'}=64MiB", "eviction_policy": "lru"}
    (tmp_path / "disk").mkdir()
    with (
        RedisServer() as redis,
        DaemonProcess("2MiB", shared=redis.url, shared_write="always", disk_write="always", **options) as daemon,
        FakeEngine(daemon.directory, spec) as engine,
        prometheus(tmp_path, port, own_port),
    ):
        wait_until(lambda: query('up{job="kvoffd"} == 1'), 60)
        block_keys = [bytes([number]) * 32 for number in range(64)]
        engine.scheduler.report(1000.0, 1, 0, 1)
        before = time.monotonic()

        def some_traffic() -> list[str]:
            """Returns the panels that still show nothing."""
            for first in range(0, 64, 8):
                some = block_keys[first : first + 8]
                if found := engine.lookup(some):
                    engine.load(some[:found], range(found))
                else:
                    engine.store(some, range(8))
            engine.scheduler.report(1000.0, 1, 0, 1)
            engine.load([b"n" * 32], [0])  # of nothing: it fails
            with WireClient(daemon.directory) as other:
                assert refused(other.raw, b"\xc1") == "malformed"
            if time.monotonic() - before < 5:
                return ["all"]
            return [f"{title}: {text}" for title, text in QUERIES if not query(concrete(text))]

        wait_until(lambda: not some_traffic(), 60, explain=some_traffic, interval_s=0.5)
        assert query("scrape_samples_scraped")[0]["value"][1] != "0"
        firing_now = {one["metric"]["alertname"] for one in query('ALERTS{alertstate="firing"}')}
        assert firing_now == set()
