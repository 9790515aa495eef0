"""The unit under a systemd that is booted in a container: what a typo and kills do to the daemon's blocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delivery.built import ROOT, debian, need, run, unpack, wheelhouse

pytestmark = [pytest.mark.delivery, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CHECK_UNIT = """[Unit]
After=multi-user.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
TimeoutStartSec=150
ExecStart=/bin/sh /booted.sh
[Install]
WantedBy=graphical.target
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """The root directory of a Debian with the unit as deploy/README.md installs it."""
    need("systemd-nspawn", root=True)
    root = tmp_path / "root"
    unpack(debian(["systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "procps"]), root)
    shutil.copytree(wheelhouse(), root / "wheels")
    for source, target in (
        (ROOT / "deploy" / "systemd" / "kvoffd.service", "etc/systemd/system"),
        (ROOT / "deploy" / "systemd" / "kvoffd.sysusers.conf", "usr/lib/sysusers.d/kvoffd.conf"),
        (HERE / "traffic.py", ""),
        (HERE / "booted.sh", ""),
    ):
        shutil.copy(source, root / target)
    (root / "etc" / "kvoffd").mkdir()
    config = (ROOT / "deploy" / "kvoffd.toml").read_text()
    assert 'pool_size = "4GiB"' in config
    (root / "etc" / "kvoffd" / "kvoffd.toml").write_text(config.replace('pool_size = "4GiB"', 'pool_size = "64MiB"'))
    (root / "etc" / "systemd" / "system" / "check.service").write_text(CHECK_UNIT)
    install = (
        "python3 -m venv /opt/kvoffd && /opt/kvoffd/bin/pip install --quiet --no-index --find-links /wheels kvoffd"
    )
    run("chroot", root, "sh", "-ec", f"{install}; systemd-sysusers; systemctl --quiet enable check kvoffd")
    yield root
    shutil.rmtree(root, ignore_errors=True)


def test_a_typo_and_kills_lose_no_block(machine: Path) -> None:
    options = [f"--directory={machine}", "--register=no", "--keep-unit", "--private-network", "--boot"]
    command = ["systemd-nspawn", *options, "systemd.unit=graphical.target"]
    booted = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    checked = machine / "checked"
    if not checked.exists():
        pytest.skip(f"no systemd can be booted here: {(booted.stderr or booted.stdout).strip().splitlines()[-3:]}")
    said = dict(line.split(": ", 1) for line in checked.read_text().splitlines() if ": " in line)
    journal = (machine / "journal").read_text() if (machine / "journal").exists() else booted.stdout
    assert int(said.pop("tried", "0")) >= 3, journal  # systemd went on by itself
    assert int(said.pop("refusals as errors", "0")) >= 8, journal
    assert int(said.pop("information as such", "0")) >= 8, journal
    assert said == {
        "started": "active",
        "stored": "16",
        "tells its start": "True",
        "reload of a typo": "1",
        "same process": "0",
        "found after the reload": "16",
        "with the typo": "activating",
        "mended": "active",
        "found after the typo": "16",
        "reload of what is right": "0",
        "after six kills": "active",
        "found after six kills": "16",
        "anything else above": "0",
        "done": "yes",
    }, journal
