"""The Debian package, built, installed, used, upgraded and purged in a chroot."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delivery.built import ROOT, debian, need, run, unpack, wheelhouse
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.delivery, pytest.mark.timeout(900)]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def chroot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian with this tree's deploy/ and wheels, and the package that was built there."""
    need("chroot", root=True)
    root = tmp_path_factory.mktemp("debian") / "root"
    unpack(debian(["systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "procps"]), root)
    shutil.copytree(wheelhouse(), root / "source" / "wheels")
    shutil.copytree(ROOT / "deploy", root / "source" / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", root / "source")
    shutil.copy(HERE / "traffic.py", root)
    run("chroot", root, "/source/deploy/debian/build_deb.sh", "/source/wheels", "/")
    shutil.rmtree(root / "source")
    yield root
    shutil.rmtree(root)


def files(root: Path) -> set[str]:
    """All that is there but for dpkg's own notes, the log and caches."""
    found = run("chroot", root, "find", "/etc", "/usr", "/opt", "/run", "/var/lib", "-xdev").splitlines()
    ours = re.compile(
        "/var/lib/(dpkg|systemd)|/run/systemd|/etc/(passwd|group|g?shadow)-?$|/etc/.pwd.lock$|.*__pycache__"
    )
    return {name for name in found if not ours.match(name)}


def test_the_package_is_installed_used_and_purged(chroot: Path) -> None:
    (package,) = chroot.glob("kvoffd_*.deb")
    version = package.name.split("_")[1]
    assert re.fullmatch(r"[\d.]+(\+git\d{8}\.\d{6}\.g[0-9a-f]{12}(\.dirty)?)?", version)
    before = files(chroot)
    run("chroot", chroot, "dpkg", "--install", f"/{package.name}")
    assert re.search(r"^kvoffd:x:\d+:\d+:kvoffd daemon:", (chroot / "etc/passwd").read_text(), re.MULTILINE)
    added = files(chroot) - before
    usr = "bin/kvoffd", "bin/kvoffd-cli", "lib/sysusers.d/kvoffd.conf", "lib/systemd/system/kvoffd.service"
    assert {f"/usr/{name}" for name in (*usr, "share/bash-completion/completions/kvoffd-cli")} <= added
    assert "/etc/kvoffd/kvoffd.toml" in added
    run("chroot", chroot, "systemd-analyze", "verify", "--man=no", "/usr/lib/systemd/system/kvoffd.service")
    assert "pool_size" in run("chroot", chroot, "kvoffd", "config", "--config", "/etc/kvoffd/kvoffd.toml")

    serve = ["kvoffd", "serve", "--directory", "/run/kvoffd", "--pool-size", "64MiB", "--http-address", ""]
    user = ["setpriv", "--reuid=kvoffd", "--regid=kvoffd", "--clear-groups"]
    run("chroot", chroot, "install", "-d", "-o", "kvoffd", "-g", "kvoffd", "-m", "0750", "/run/kvoffd")
    (chroot / "proc").mkdir(exist_ok=True)
    run("mount", "--bind", "/proc", chroot / "proc")
    try:
        with subprocess.Popen(["chroot", str(chroot), *user, *serve], stderr=subprocess.PIPE, text=True) as daemon:
            try:
                wait_until((chroot / "run" / "kvoffd" / "lifeline.sock").exists, 30)
                environ = {"PYTHONPATH": "/usr/lib/kvoffd", "PYTHONDONTWRITEBYTECODE": "1"}
                traffic = ["chroot", chroot, "/usr/bin/python3", "/traffic.py"]
                assert run(*traffic, "store", "/run/kvoffd", environ=environ) == "16\n"
                assert "ok" in run("chroot", chroot, "kvoffd-cli", "health")
                (chroot / "trace").write_text('{"timestamp": 0, "input_length": 4, "hash_ids": [1, 2]}\n' * 2)
                assert "lru" in run("chroot", chroot, "kvoffd-cli", "trace", "replay", "/trace", "--blocks", "2")
                # An upgrade while it runs changes nothing under it.
                run("chroot", chroot, "dpkg", "--install", f"/{package.name}")
                assert run(*traffic, "find", "/run/kvoffd", environ=environ) == "16\n"
                run("chroot", chroot, "/usr/bin/python3", "-c", "import obstore.store", environ=environ)
            finally:
                daemon.terminate()
                _, said = daemon.communicate(timeout=30)
        assert daemon.returncode == 0, said
    finally:
        run("umount", chroot / "proc")

    config = chroot / "etc" / "kvoffd" / "kvoffd.toml"
    as_delivered = config.read_text()
    # A release that refuses the configuration, and so does not start, is installed all the same and says why.
    config.write_text(as_delivered + 'index_size = "1GiB"\n')
    (chroot / "run" / "systemd" / "system").mkdir(parents=True)
    systemctl = chroot / "stub" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text('#!/bin/sh\n[ "$1" != try-restart ]\n')
    systemctl.chmod(0o755)
    said = run("chroot", chroot, "sh", "-c", f"PATH=/stub:$PATH dpkg --install /{package.name} 2>&1")
    assert re.search(r"index_size.* is unknown", said)
    shutil.rmtree(chroot / "run" / "systemd")

    config.write_text(as_delivered + "# mine\n")
    run("chroot", chroot, "dpkg", "--remove", "kvoffd")
    left = {"/etc/kvoffd", "/etc/kvoffd/kvoffd.toml", "/run/kvoffd"}
    assert files(chroot) - before <= left | {"/run/kvoffd/kvoffd.lock", "/run/kvoffd/kvoffd.policy"}
    assert config.read_text().endswith("# mine\n")
    run("chroot", chroot, "dpkg", "--purge", "kvoffd")
    assert files(chroot) == before
    assert not list((chroot / "usr" / "lib").glob("kvoffd*"))
