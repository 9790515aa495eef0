"""FAQ.md's way to remove kvoffd, run on what a daemon and its store really leave."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvoffd_client import NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.messages import GroupSpec
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.require import require
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
FAQ = (ROOT / "FAQ.md").read_text()


def commands(word: str) -> list[str]:
    """The FAQ's lines that begin with a word, without comments."""
    return [line.partition(" #")[0].strip() for line in re.findall(rf"^    ({word}\b.*)$", FAQ, re.MULTILINE)]


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_of_a_daemon_is_left(tmp_path: Path, killed: bool) -> None:
    require("redis", shutil.which("redis-cli"), "redis-cli is not installed")
    places = {name: tmp_path / name.strip("/") for name in ("/var/lib/kvoffd", "/dev/shm/kvoffd", "/mnt/nvme0/kvoffd")}
    for place in places.values():
        place.mkdir(parents=True, mode=0o700)
    with RedisServer() as redis:
        daemon = DaemonProcess(
            "16MiB",
            environ={"STATE_DIRECTORY": str(places["/var/lib/kvoffd"])},
            pool_file=str(Path("/dev/shm", f"kvoffd-removal-{tmp_path.name}")),
            disk=f"{places['/mnt/nvme0/kvoffd']}=64MiB",
            shared=redis.url,
            shared_write="always",
            eviction_policy="learned",
        )
        with daemon:
            spec = NamespaceSpec(b"\xcd" * 32, "a model", 1, 32, (GroupSpec("full_attention", 16),))
            with FakeEngine(daemon.directory, spec) as engine:
                engine.store([bytes([number]) * 32 for number in range(8)], range(8))
                asked = ["redis-cli", "-u", redis.url, "--scan", "--pattern", "*"]
                wait_until(lambda: len(subprocess.check_output(asked, timeout=30).split()) >= 8, 60)
            (daemon.kill if killed else daemon.stop)()
            places["/run/kvoffd"] = daemon.directory
            shutil.move(daemon.flags["pool-file"], places["/dev/shm/kvoffd"])
            before = sum(one.is_file() for place in places.values() for one in place.rglob("*"))
            assert before >= 5, "it leaves a lock, its state, the pool, blocks and their index"
            here = str(tmp_path), str(daemon.directory)
            for one in commands("rm"):
                line = one
                for known, place in places.items():
                    line = line.replace(f" {known}", f" {place}")
                if all(part.startswith(here) for part in line.split()[2:]):  # others are this machine's own
                    subprocess.run(line, shell=True, check=True, timeout=30)
            assert [one for place in places.values() for one in place.rglob("*")] == []
        script = "\n".join([*commands("url=[^ ]*"), *commands("redis-cli")])
        script = script.replace("redis://valkey.example:6379", redis.url)
        subprocess.run(script, shell=True, check=True, timeout=30, stdout=subprocess.DEVNULL)
        assert subprocess.check_output(asked, timeout=30).split() == []


def test_nothing_of_an_installation_is_left() -> None:
    """Each path that the page of systemd installs, or that a drop-in needs, is in a line of the FAQ."""
    page = (ROOT / "deploy" / "README.md").read_text() + (ROOT / "deploy" / "peers.md").read_text()
    section = page.partition("\n## systemd\n")[2].partition("\n## Docker\n")[0] + page.partition("\n## Docker\n")[2]
    removed = [part for line in commands("rm") for part in line.split()[2:]]
    paths = set(re.findall(r"(?<![\w.:])/(?:etc|opt|usr|var|run)/[\w./-]*kvoffd[\w./-]*", section))
    assert len(paths) > 8
    for path in paths:
        assert any(path == one or path.startswith(f"{one}/") for one in removed), path
    assert "userdel kvoffd" in FAQ
