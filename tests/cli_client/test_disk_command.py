"""``kvoffd-cli disk`` against a real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.cli import main
from tests.kit.daemon import DaemonProcess


def test_a_directory_that_was_mistyped_is_no_problem_of_the_daemon(
    shared_daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, there = tmp_path / "absent", tmp_path / "there"
    there.mkdir(mode=0o700)
    where = ["--directory", str(shared_daemon.directory)]
    assert main(["disk", "attach", f"{absent}=64MiB", *where]) == 1
    assert "cannot be opened" in capsys.readouterr().out
    assert main(["disk", "attach", f"{there}=64MiB", *where]) == 0
    with AdminClient(shared_daemon.directory) as admin:
        assert [disk.directory for disk in admin.stats().disks] == [str(there)]
        assert not admin.stats().health_problems
    assert main(["disk", "detach", str(there), *where]) == 0


def test_what_failed_before_stays_known_when_it_fails_again(tmp_path: Path) -> None:
    with DaemonProcess(disk=f"{tmp_path / 'absent'}=64MiB") as daemon:
        where = ["--directory", str(daemon.directory)]
        assert main(["disk", "attach", f"{tmp_path / 'absent'}=64MiB", *where]) == 1
        with AdminClient(daemon.directory) as admin:
            assert admin.stats().health_problems == {"disk_failed": 1}
