"""The systemd files, judged by systemd itself. Nothing is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.kit.require import require

EXECUTABLE = "/opt/kvoffd/bin/kvoffd"
SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = (SYSTEMD / "kvoffd.service").read_text()
# systemd's own scale: 10 is a service with no hardening at all.
MAX_EXPOSURE = 2.0


@pytest.fixture(autouse=True)
def systemd() -> None:
    require("systemd", shutil.which("systemd-analyze") and shutil.which("systemd-sysusers"), "systemd is not installed")


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """Stands for the daemon, which this machine does not have under /opt: verify insists that it is there."""
    path = tmp_path / "kvoffd"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def verify(directory: Path, executable: Path, unit: str, drop_in: str | None = None) -> str:
    """What `systemd-analyze verify` has to say about the unit; nothing when it is right."""
    file = directory / "kvoffd.service"
    file.write_text(unit.replace(EXECUTABLE, str(executable)))
    if drop_in is not None:
        (directory / "kvoffd.service.d").mkdir(exist_ok=True)
        (directory / "kvoffd.service.d" / "gpu.conf").write_text(drop_in)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in (result.stdout + result.stderr).splitlines() if "kvoffd" in line]
    return "\n".join(said) or ("" if result.returncode == 0 else result.stderr)


def test_the_unit_is_valid_with_and_without_drop_ins(tmp_path: Path, executable: Path) -> None:
    assert EXECUTABLE in UNIT
    assert verify(tmp_path, executable, UNIT) == ""
    assert verify(tmp_path, executable, UNIT, (SYSTEMD / "gpu.conf").read_text()) == ""
    (lines,) = re.findall(r"^## systemd\n\n((?:    .*\n)+)", (SYSTEMD.parent / "peers.md").read_text(), re.M)
    assert verify(tmp_path, executable, UNIT, textwrap.dedent(lines)) == ""


def security(*options: str) -> str:
    """What systemd says of the unit's hardening."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", *options, str(SYSTEMD / "kvoffd.service")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_the_unit_is_hardened_and_what_remains_open_is_explained() -> None:
    overall = re.search(r"Overall exposure level for kvoffd.service: ([0-9.]+)", security())
    assert overall is not None
    assert float(overall[1]) <= MAX_EXPOSURE
    remaining = {item["name"] for item in json.loads(security("--json=short")) if item["exposure"]}
    assert len(remaining) > 5  # else the list was not read
    assert not remaining - set(re.findall(r"^#   (\S+)   \S", UNIT, re.MULTILINE))


def test_the_unit_is_what_the_daemon_needs() -> None:
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", UNIT, re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["NotifyAccess"] == "main"
    assert settings["RuntimeDirectory"] == settings["StateDirectory"] == "kvoffd"
    assert settings["LimitMEMLOCK"] == "infinity"
    # systemd closes the pool when it starts a service no more; make delivery shows that it starts this one.
    assert settings["StartLimitIntervalSec"] == "0"
    assert settings["Restart"] == "on-failure"
    assert settings["ExecReload"] == settings["ExecStart"].replace("kvoffd serve", "kvoffd config")
    # Containers mount the directory; were it removed at a stop they would go on looking at the removed one.
    assert settings["RuntimeDirectoryPreserve"] == "yes"
    # The pool has a size of its own; below that the daemon would refuse to start.
    assert not {"MemoryMax", "MemoryHigh"} & settings.keys()
    # With these the daemon would refuse every client, or not see how much memory there is.
    assert "PrivateUsers" not in settings
    assert "ProcSubset" not in settings


def test_the_user_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    file = SYSTEMD / "kvoffd.sysusers.conf"
    command = ["systemd-sysusers", f"--root={tmp_path}", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert re.search(r"^kvoffd:x:\d+:\d+:kvoffd daemon:/run/kvoffd:", (tmp_path / "etc" / "passwd").read_text(), re.M)
    assert re.search(r"^kvoffd:x:\d+:", (tmp_path / "etc" / "group").read_text(), re.M)
