"""Commands of the chart's pods, run as their users over a read-only root, with their volumes and without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_helm import daemon_of, documents, rendered
from tests.deploy.test_kubernetes import environment
from tests.kit.ports import free_ports
from tests.kit.require import require, require_nixl
from tests.kit.waiting import wait_until

HERE = Path(__file__).parents[2]
PATH = "/usr/bin:/bin"
ROOT = r"""
set -e
new=$1; shift
mount -t tmpfs tmpfs "$new"
mkdir -p "$new/proc" "$new/dev" "$new/etc" "$new/tmp"
cp /etc/passwd /etc/group /etc/ld.so.cache "$new/etc"
for one in /bin /lib /lib64; do
    if [ -L $one ]; then cp -P $one "$new"; elif [ -e $one ]; then mkdir "$new$one"; mount --rbind $one "$new$one"; fi
done
while [ "$1" != -- ]; do
    mkdir -p "$new${1#*=}"
    mount --rbind "${1%%=*}" "$new${1#*=}"
    shift
done
shift
mount -o remount,ro,bind "$new"
exec chroot "$new" "$@"
"""
"""Makes a root of a directory, with volumes written as HERE=THERE up to ``--``, and runs a command in it."""


class Pod:
    """A pod's volumes below ``place``, except for the pool, which is in memory."""

    def __init__(self, place: Path, pool: Path, spec: dict[str, Any]) -> None:
        self._place, self._spec = place, spec
        self.volumes = dict[str, Path]()
        for volume in spec["volumes"]:
            self.volumes[volume["name"]] = path = pool if volume["name"] == "kvoffd-pool" else place / volume["name"]
            path.mkdir(exist_ok=True)

    def command(self, container: dict[str, Any], words: list[str], environ: dict[str, str]) -> list[str]:
        """Return what runs these words as a container's process."""
        (root := self._place / "root").mkdir(exist_ok=True)
        security = self._spec["securityContext"] | container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        mounts = [f"{self.volumes[one['name']]}={one['mountPath']}" for one in container.get("volumeMounts", [])]
        mounts += [
            f"{one}={one}"
            for one in dict.fromkeys(["/usr", "/proc", "/sys", "/dev", sys.prefix, sys.base_prefix, HERE])
        ]
        user, group = security["runAsUser"], security.get("runAsGroup", 0)
        rights = "".join(f",+{one.lower()}" for one in security["capabilities"].get("add", []))
        limited = ["setpriv", f"--reuid={user}", f"--regid={group}", "--no-new-privs", f"--bounding-set=-all{rights}"]
        limited += [f"--groups={self._spec['securityContext'].get('fsGroup', group)}"]
        variables = [f"{name}={text}" for name, text in environ.items()]
        inside = [*limited, "env", "-i", f"PATH={PATH}", *variables, *words]
        return [
            "unshare",
            "--mount",
            "--propagation=private",
            "sh",
            "-c",
            ROOT,
            "sh",
            str(root),
            *mounts,
            "--",
            *inside,
        ]


@pytest.fixture
def pool() -> Iterator[Path]:
    require("root", os.geteuid() == 0, "mounts need root")
    path = Path("/dev/shm", f"kvoffd-pod-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_the_daemonsets_pod_serves_and_its_cleanup_leaves_nothing_in_memory(tmp_path: Path, pool: Path) -> None:
    require_nixl()
    port, lent = free_ports(2)
    values = {
        "poolSize": "64MiB",
        "disks": [{"path": "/mnt/nvme0/kvoffd", "size": "64MiB"}],
        "shared": {"urls": ["redis://127.0.0.1:1"], "secret": "stores"},
        "peers": {"listen": True, "port": lent, "secret": "fleet"},
    }
    document = rendered(**values)
    spec, daemon = document["spec"]["template"]["spec"], daemon_of(document)
    pod = Pod(tmp_path, pool, spec)
    os.chown(pod.volumes["kvoffd-disk-0"], 10064, 10064)  # as the values want it of the node
    for name, key in (("shared", "passwords"), ("peers", "secret")):
        (volume,) = [one["secret"] for one in spec["volumes"] if one["name"] == f"kvoffd-{name}"]
        (file := pod.volumes[f"kvoffd-{name}"] / key).write_text("a secret of 16 characters or more\n")
        os.chown(file, 0, spec["securityContext"]["fsGroup"])
        file.chmod(volume["defaultMode"])
    (own,) = spec["initContainers"]
    assert not (pod.volumes["kvoffd-state"].stat().st_uid)
    subprocess.run(pod.command(own, own["command"], {}), check=True, timeout=60)
    environ = environment(daemon) | {"PYTHONPATH": f"{HERE}:{HERE}/client:{HERE}/proto"}
    environ |= {"KVOFFD_DIRECTORY": "/run/kvoffd", "PYTHONDONTWRITEBYTECODE": "1", "UCX_TLS": "tcp"}  # the image's
    environ["KVOFFD_HTTP_ADDRESS"] = environ["KVOFFD_HTTP_ADDRESS"].replace("9464", str(port))
    words = [sys.executable, "-m", "kvoffd", *daemon["args"]]

    def answer(path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10) as found:
                return bytes(found.read())
        except OSError:
            return b""

    with (tmp_path / "log").open("w+") as log:
        with subprocess.Popen(pod.command(daemon, words, environ), stdout=log, stderr=log) as process:
            try:
                wait_until(lambda: answer("/readyz"), 60, explain=(tmp_path / "log").read_text)
                assert b"<html" in answer("/"), "as kubectl port-forward reaches it"
                wait_until(lambda: b'"up":true' in answer("/stats.json").partition(b'"lent":')[2], 60)
            finally:
                process.terminate()
                process.wait(60)
        said = (tmp_path / "log").read_text()
    assert process.returncode == 0, said
    assert "is open to other users" not in said
    assert {file.stat().st_uid for place in (pool, pod.volumes["kvoffd-state"]) for file in place.iterdir()} == {10064}
    assert (pool / "kvoffd.pool").stat().st_size >= 64 << 20

    (cleanup,) = [
        one for one in documents() if (one["kind"], one["metadata"]["name"]) == ("DaemonSet", "kvoffd-cleanup")
    ]
    spec = cleanup["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    after = Pod(tmp_path, pool, spec)
    after.volumes["done"].chmod(0o777)
    (shell, dash_c, script) = container["command"]
    words = [shell, dash_c, script.replace("exec sleep infinity", "exec test -e /tmp/done")]
    subprocess.run(after.command(container, words, {}), check=True, timeout=60)
    assert not [*pool.iterdir(), *after.volumes["kvoffd-sockets"].iterdir()]
    assert [*pod.volumes["kvoffd-state"].iterdir()], "what was cleared, for the disk's blocks"
