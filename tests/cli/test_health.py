"""``kvoffd-cli health``, as probes run it: exit statuses of two meanings, little to import, and never for long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.kit.command import DEADLINE_S, Cli
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

PROBES = ((), ("--live",), ("--ready",))
HEAVY = {"asyncio", "numpy", "rich", "typer", "kvoffd_proto.messages", "kvoffd_client.admin_client"}
"""ZeroMQ is not among them: a probe asks as engines do, so that it proves what they need. It costs 16 ms of CPU."""


def test_a_healthy_daemon_is_status_0(cli: Cli) -> None:
    for probe in PROBES:
        status, out, err = cli("health", *probe)
        assert (status, err) == (0, "")
        assert out.startswith("ok")
    found = json.loads(cli("health", "--json").out)
    assert (found["level"], found["causes"]) == ("ok", [])
    assert cli("health", "--live", "--ready").status == 2, "one at a time"


def test_a_degraded_daemon_is_alive_and_ready(cli: Cli, tmp_path: Path) -> None:
    """It serves without its disk: neither a restart nor other nodes would help."""
    with DaemonProcess("8MiB", disk=f"{tmp_path / 'missing'}=64MiB", disk_start="optional") as daemon:
        wait_until(lambda: books(daemon.directory).health == "degraded")
        assert [cli("health", *probe, on=daemon).status for probe in PROBES] == [1, 0, 0]
        out = cli("health", on=daemon).out
        assert out.startswith("degraded")
        assert "missing" in out
        found = json.loads(cli("health", "--json", on=daemon).out)
        assert [cause["reason"] for cause in found["causes"]] == ["disk_failed"]


def test_a_probe_imports_nothing_heavy(shared_daemon: DaemonProcess) -> None:
    """Probes run every few seconds, beside engines."""
    script = (
        "import json, sys; from kvoffd_client.cli import main; "
        "status = main(sys.argv[1:]); print(json.dumps([status, sorted(sys.modules)]))"
    )
    for probe in ([], ["--live"], ["--json"]):
        command = [sys.executable, "-c", script, "health", *probe, "--directory", str(shared_daemon.directory)]
        said, imported = subprocess.check_output(command, text=True, timeout=DEADLINE_S).splitlines()
        status, modules = json.loads(imported)
        assert (said.startswith(("ok", '{"level": "ok"')), status) == (True, 0)
        assert HEAVY.isdisjoint(modules)
