"""Alerts fire for the chart's pods under the names that Prometheus gives them: by a PodMonitor, and by annotations."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_helm import CHART, daemon_of, documents, rendered
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.require import require
from tests.kit.waiting import wait_until

META = "__meta_kubernetes_pod_"


def label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def found_by_kubernetes_sd(template: dict[str, Any], port: dict[str, Any]) -> list[dict[str, Any]]:
    """The target that Prometheus' discovery of pods makes of a container's port, with the labels of its documentation.

    Debian's Prometheus is built without that discovery; relabelling is its own.
    """
    metadata = template["metadata"]
    labels = {f"{META}label_{label(name)}": text for name, text in metadata["labels"].items()}
    labels |= {f"{META}annotation_{label(name)}": text for name, text in metadata["annotations"].items()}
    labels |= {"__meta_kubernetes_namespace": "kvoffd", f"{META}name": "kvoffd-x", f"{META}ip": "127.0.0.1"}
    labels |= {f"{META}container_port_name": port["name"]}
    return [{"targets": [f"127.0.0.1:{port['containerPort']}"], "labels": labels}]


def of_monitor(monitor: dict[str, Any], pods: list[dict[str, Any]]) -> dict[str, Any]:
    """The job that Prometheus' operator makes of a PodMonitor (its documentation of PodMonitor, and its generator)."""
    spec = monitor["spec"]
    ((selected, wanted),) = spec["selector"]["matchLabels"].items()
    (endpoint,) = spec["podMetricsEndpoints"]
    return {
        "job_name": f"podMonitor/{monitor['metadata']['namespace']}/{monitor['metadata']['name']}/0",
        "static_configs": pods,
        "relabel_configs": [
            {"action": "keep", "source_labels": [f"{META}label_{label(selected)}"], "regex": wanted},
            {"action": "keep", "source_labels": [f"{META}container_port_name"], "regex": endpoint["port"]},
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{META}name"], "target_label": "pod"},
            {"target_label": "job", "replacement": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"},
            {
                "source_labels": [f"{META}label_{label(spec['jobLabel'])}"],
                "target_label": "job",
                "regex": "(.+)",
            },
        ],
    }


def of_annotations(pods: list[dict[str, Any]]) -> dict[str, Any]:
    """The job `kubernetes-pods` of Prometheus' Helm chart."""
    annotation = f"{META}annotation_prometheus_io_"
    return {
        "job_name": "kubernetes-pods",
        "static_configs": pods,
        "relabel_configs": [
            {"action": "keep", "source_labels": [f"{annotation}scrape"], "regex": "true"},
            {
                "action": "replace",
                "source_labels": [f"{annotation}port", f"{META}ip"],
                "regex": r"(\d+);(.+)",
                "replacement": "$2:$1",
                "target_label": "__address__",
            },
            {"action": "labelmap", "regex": f"{META}label_(.+)"},
            {"source_labels": [f"{META}name"], "target_label": "pod"},
        ],
    }


@pytest.mark.parametrize(
    ("sidecar", "was_up"),
    [(False, False), (True, True), *(pytest.param(one, not one, marks=pytest.mark.nightly) for one in (False, True))],
)
def test_a_daemon_that_is_down_is_noticed(tmp_path: Path, was_up: bool, sidecar: bool) -> None:
    require("prometheus", shutil.which("prometheus"), "prometheus is not installed")
    values: dict[str, Any] = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    values["sidecar"] = {"enabled": sidecar}
    port, own_port = free_ports(2)
    document = rendered(*(("Deployment", "vllm-kvoffd") if sidecar else ("DaemonSet", "kvoffd")), **values)
    template = document["spec"]["template"]
    (metrics,) = [one for one in daemon_of(document)["ports"] if one["name"] == "metrics"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(metrics["containerPort"])
    metrics["containerPort"] = port
    template["metadata"]["annotations"]["prometheus.io/port"] = str(port)
    (rules,) = [one["spec"] for one in documents(**values) if one["kind"] == "PrometheusRule"]
    assert rules == yaml.safe_load((CHART / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)  # it shall not wait two minutes
    (tmp_path / "rules.yml").write_text(json.dumps(rules))

    def query(expression: str) -> set[str]:
        """The jobs of what an expression finds."""
        text = urllib.parse.quote(expression)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{own_port}/api/v1/query?query={text}", timeout=10) as found:
                return {one["metric"]["job"] for one in json.load(found)["data"]["result"]}
        except OSError:
            return set()  # it starts

    jobs = {"vllm-kvoffd" if sidecar else "kvoffd", "kubernetes-pods"}
    pods = found_by_kubernetes_sd(template, metrics)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / "rules.yml")],
        "scrape_configs": [of_monitor(rendered("PodMonitor", **values), pods), of_annotations(pods)],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own_port}"], stdout=log, stderr=log)
    try:
        if was_up:
            with DaemonProcess("8MiB", http_address=f"127.0.0.1:{port}") as daemon:
                wait_until(lambda: query("kvoffd_ready == 1") == jobs, 60, explain=lambda: query("up"))
                assert query('ALERTS{alertname="KvoffdDown"}') == set()
                daemon.kill()
        fires = 'ALERTS{alertname="KvoffdDown", alertstate="firing"}'
        wait_until(lambda: query(fires) == jobs, 60, explain=lambda: (query("up"), query(fires)))
    finally:
        server.kill()
        server.wait(30)
