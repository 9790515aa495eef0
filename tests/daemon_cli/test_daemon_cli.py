"""``kvoffd serve`` where it cannot start, or fails inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command import run_daemon_here


@pytest.mark.parametrize("thread", ["kvoffd-open", "log"])
def test_a_daemon_that_gets_no_threads_says_so_and_ends_well(tmp_path: Path, thread: str) -> None:
    program = (
        "import sys, threading; from kvoffd.cli import main\n"
        "real = threading.Thread.start\n"
        "def start(thread):\n"
        f"    if thread.name.startswith('{thread}'): raise RuntimeError(\"can't start new thread\")\n"
        "    real(thread)\n"
        "threading.Thread.start = start\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}', '--disk', '{tmp_path}=16MiB', '--pool-size', '16MiB',"
        "    '--http-address', '', '--log-level', 'error']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "pids.max" in ended.stderr


def test_a_crash_and_a_bad_flag_are_json_too(tmp_path: Path) -> None:
    environ = {**os.environ, "KVOFFD_LOG_FORMAT": "json"}
    program = (
        "import sys, threading, warnings; from kvoffd.server import daemon; from kvoffd.cli import main\n"
        "def broken():\n"
        "    warnings.warn('x', stacklevel=1); threading.Thread(target=lambda: 1 / 0).start(); raise LookupError\n"
        "daemon.native = broken\n"
        f"sys.exit(main(['serve', '--directory', '{tmp_path}']))"
    )
    for arguments, levels in (
        (("-m", "kvoffd", "serve", "--pool-siz", "1"), ["error"]),
        (("-c", program), ["critical", "critical", "warning"]),
    ):
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode != 0
        assert sorted(json.loads(line)["level"] for line in ended.stderr.splitlines()) == levels


def test_a_start_without_a_required_disk_is_refused(tmp_path: Path) -> None:
    """Also by `kvoffd config`, before the pool is touched. Nothing is created."""
    (link := tmp_path / "link").symlink_to(tmp_path)
    cases = {
        f"{tmp_path / 'missing'}=16MiB": "missing cannot be used (No such file or directory); make it, name another",
        f"{tmp_path}=1024TiB": "can be used; choose a smaller size",
        f"{tmp_path}=16MiB,{link}=16MiB": "is the same directory as",
    }
    for disk, why in cases.items():
        for command in ("serve", "config"):
            given = "--directory", str(tmp_path / "run"), "--pool-size", "1MiB", "--disk", disk
            ended = run_daemon_here(command, *given)
            assert ended.returncode == 2
            assert why in ended.stderr
            assert "disk_start" in ended.stderr
    assert {one.name for one in tmp_path.iterdir()} <= {"run", "link"}
