"""The page before Prometheus' own eyes: its linter, and a server that scrapes a daemon; one package of Debian."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.require import require
from tests.kit.waiting import wait_until

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: kvoffd
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def test_prometheus_scrapes_all_metrics_without_complaint(tmp_path: Path) -> None:
    there = shutil.which("promtool") and shutil.which("prometheus")
    require("prometheus", there, "prometheus and promtool are not installed")
    port, own_port = free_ports(2)
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon:
        with FakeEngine(daemon.directory) as engine:
            assert engine.store([b"a" * 32], [0]).ok
            for _ in range(3):
                engine.lookup([b"a" * 32])
        page = get(f"http://127.0.0.1:{port}/metrics")
        linted = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60)
        assert (linted.returncode, linted.stdout, linted.stderr) == (0, b"", b"")

        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(port=port))
        listen = f"--web.listen-address=127.0.0.1:{own_port}"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", listen]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:

            def value_of(query: str) -> float | None:
                """The only value that Prometheus has for a query; None without one, and while it starts."""
                try:
                    found = get(f"http://127.0.0.1:{own_port}/api/v1/query?query={urllib.parse.quote(query)}")
                except OSError:
                    return None
                results = json.loads(found)["data"]["result"]
                return float(results[0]["value"][1]) if len(results) == 1 else None

            try:
                wait_until(lambda: value_of('up{job="kvoffd"}') == 1, 60)
                series = [line for line in page.decode().splitlines() if not line.startswith("#")]
                assert value_of('scrape_samples_scraped{job="kvoffd"}') >= len(series)
                assert value_of("kvoffd_lookup_seconds_count") == 3
                assert 0 < value_of("histogram_quantile(0.99, kvoffd_lookup_seconds_bucket)") < 1
                assert value_of('kvoffd_namespace_ready_bytes{model="demo"}') == 65536
                assert abs(time.time() - value_of("process_start_time_seconds")) < 600
            finally:
                server.kill()
