"""Commands of ``kvoffd-cli`` over kills and full disks: a status, a sentence, and the next attempt works."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvoffd_client import AdminClient
from tests.kit.checked import CheckedEngine, Truth
from tests.kit.command import start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import tmpfs
from tests.kit.waiting import wait_until
from tests.kit.wire import books

EXPORTED = range(512)


def cli(daemon: DaemonProcess, *words: str) -> subprocess.Popen[str]:
    return start_cli(*words, "--directory", str(daemon.directory))


def ended(command: subprocess.Popen[str], *statuses: int) -> str:
    """What a command said until its end, which came with one of the statuses."""
    said = "".join(command.communicate(timeout=60))
    assert command.returncode in statuses, (command.returncode, said)
    assert "Traceback" not in said
    return said


def test_export_and_import_over_kills(tmp_path: Path, pool_file: Path) -> None:
    """The daemon dies in the middle of each. The same command then ends what was begun, and all blocks are right."""
    truth, target = Truth(), tmp_path / "blocks"
    with DaemonProcess("64MiB", pool_file=str(pool_file)) as daemon:
        with CheckedEngine(daemon, truth) as engine:
            engine.put(EXPORTED)
        export = cli(daemon, "blocks", "export", "--namespace", "demo", str(target))
        wait_until(lambda: any(tmp_path.iterdir()) or export.poll() is not None)
        daemon.kill()
        said = ended(export, 0, 2)
        assert export.returncode == 0 or "daemon" in said
        daemon.start()
        if export.returncode:
            ended(cli(daemon, "blocks", "export", "--namespace", "demo", str(target)), 0)
        with AdminClient(daemon.directory) as admin:
            assert admin.clear() == len(EXPORTED)
        first = cli(daemon, "blocks", "import", "--stale", str(target))
        wait_until(lambda: books(daemon.directory).ready_bytes or first.poll() is not None)
        daemon.kill()
        ended(first, 0, 2)
        daemon.start()
        ended(cli(daemon, "blocks", "import", "--stale", str(target)), 0)
        with CheckedEngine(daemon, truth) as engine:
            assert engine.has(EXPORTED)


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
