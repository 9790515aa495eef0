"""Lookups that engines did not wait for: counted, shown, and a problem while they are many."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.waiting import wait_until

METRIC = "kvoffd_namespace_late_lookups_total"
KEY = b"k" * 32


def cli(daemon: DaemonProcess, *command: str) -> str:
    """What a command prints."""
    return run_cli(*command, "--directory", str(daemon.directory)).stdout


def reasons(admin: AdminClient) -> list[str]:
    return [cause.reason for cause in admin.health().causes]


class Engine(FakeEngine):
    """One that reports late lookups, as the connector does every ten seconds."""

    def look_up(self, times: int, late: int = 0) -> None:
        for _ in range(times):
            self.lookup([KEY])
        self.scheduler.report(0.0, 0.0, 0, 0, late)


def test_late_lookups_are_counted_and_shown() -> None:
    (port,) = free_ports(1)
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon, Engine(daemon.directory) as engine:

        def found() -> dict[str, Any]:
            (namespace,) = json.loads(cli(daemon, "stats", "--json"))["namespaces"]
            return dict(namespace)

        engine.look_up(10, late=1)
        engine.look_up(10, late=2)
        wait_until(lambda: found()["late_lookups"] == 3)
        assert re.search(r"^lookups late +3 +3 +3$", cli(daemon, "stats"), re.MULTILINE)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            (line,) = [line for line in page.read().decode().splitlines() if line.startswith(METRIC)]
        assert line.endswith((" 3.0", " 3"))
        with AdminClient(daemon.directory) as admin:
            assert reasons(admin) == [], "three are few"


def test_many_late_lookups_are_a_problem_until_they_are_few() -> None:
    with DaemonProcess() as daemon, Engine(daemon.directory) as engine, AdminClient(daemon.directory) as admin:
        engine.look_up(100, late=19)
        wait_until(lambda: admin.stats().namespaces[0].late_lookups == 19)
        assert reasons(admin) == [], "19 are fewer than 20"
        engine.look_up(0, late=6)
        wait_until(lambda: reasons(admin) == ["lookups_late"])
        (cause,) = admin.health().causes
        assert "25 of 100 lookups" in cause.sentence
        assert "CPUAffinity" in cause.sentence
        assert cli(daemon, "health").startswith("degraded: ")
        engine.look_up(400)
        assert reasons(admin) == [], "25 of 500 are 5 %"
