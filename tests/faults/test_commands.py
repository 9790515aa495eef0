"""Commands of ``kvoffd-cli`` over full disks: a status and a sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kit.checked import CheckedEngine
from tests.kit.command import start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import tmpfs


def cli(daemon: DaemonProcess, *words: str) -> subprocess.Popen[str]:
    return start_cli(*words, "--directory", str(daemon.directory))


def ended(command: subprocess.Popen[str], *statuses: int) -> str:
    """What a command said until its end, which came with one of the statuses."""
    said = "".join(command.communicate(timeout=60))
    assert command.returncode in statuses, (command.returncode, said)
    assert "Traceback" not in said
    return said


def test_a_record_onto_a_full_disk_says_what_is_in_it(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "full", "4k") as place, DaemonProcess("16MiB") as daemon:
        (place / "filler").write_bytes(bytes(4096))
        recording = cli(daemon, "trace", "record", str(place / "trace"))
        with CheckedEngine(daemon) as engine:
            while recording.poll() is None:
                engine.put(range(8))
                engine.get(range(8))
        said = ended(recording, 2)
        assert "can be replayed" not in said, said
