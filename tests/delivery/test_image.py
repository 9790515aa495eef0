"""The image, built as `make image` does and run as deploy/README.md says: read-only, without rights, killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delivery.built import ROOT, debian, need, run
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.delivery, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
IMAGE = "localhost/kvoffd:delivery"
MAX_BYTES = 400 * 2**20
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
USERS = 10064
# Where root may not raise limits, and where runtimes know no mixture of the two versions of cgroups.
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
WAYS = (
    ["podman", "run"],
    ["podman", "run", *LIMITS],
    ["podman", "--cgroup-manager=cgroupfs", "--runtime=runc", "run", *LIMITS],
)


@pytest.fixture(scope="module")
def image() -> str:
    """The image over a Debian of our own, since no registry need be there; with this machine's certificates."""
    need("podman", "buildah", root=True)
    base = debian([])
    run("podman", "import", "--quiet", base, "localhost/kvoffd-base:delivery")
    trust = []
    if CERTIFICATES.exists():  # where a proxy has its own
        trust = [f"--volume={CERTIFICATES}:/run/certificates:ro", "--build-arg=PIP_CERT=/run/certificates"]
    given = f"--tag={IMAGE}", "--build-arg=BASE=localhost/kvoffd-base:delivery", "--isolation=chroot", *trust
    run(ROOT / "deploy" / "docker" / "build_image.sh", *given, timeout_s=900)
    return IMAGE


@pytest.fixture(scope="module")
def podman_run(image: str) -> list[str]:
    """How containers can be run here."""
    errors = []
    for way in WAYS:
        command = [*way, "--rm", "--no-healthcheck", "--network=host"]
        tried = subprocess.run([*command, "--entrypoint=true", image], capture_output=True, text=True, timeout=60)
        if tried.returncode == 0:
            return command
        errors.append(tried.stderr.strip().splitlines()[-1:])
    pytest.skip(f"no container can be run here: {errors}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Directories for the sockets and, in the host's memory, for the pool."""
    sockets, pool = tmp_path / "sockets", Path("/dev/shm", f"kvoffd-delivery-{os.getpid()}")
    for directory, mode in ((sockets, 0o750), (pool, 0o700)):
        directory.mkdir(mode=mode)
        os.chown(directory, USERS, USERS)
    yield sockets, pool
    shutil.rmtree(pool)


def test_what_is_in_it(image: str, podman_run: list[str]) -> None:
    (found,) = json.loads(run("podman", "image", "inspect", image))
    labels = {name.rsplit(".", 1)[1]: text for name, text in found["Labels"].items() if name.startswith("org.opencont")}
    assert labels.keys() == {"title", "description", "licenses", "version", "revision", "created"}
    assert "unknown" not in labels.values()
    assert found["Healthcheck"]["Test"] == ["CMD", "kvoffd-cli", "health", "--live"]
    assert found["User"] == f"{USERS}:{USERS}"
    assert found["Size"] < MAX_BYTES
    look = "import importlib.util as u, os, kvoffd; print(u.find_spec('pip'), os.path.exists(kvoffd.__cached__))"
    assert run(*podman_run, "--entrypoint=/opt/kvoffd/bin/python", image, "-c", look) == "None True\n"
    verified = "import obstore, ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 100)"
    assert run(*podman_run, "--entrypoint=/opt/kvoffd/bin/python", image, "-c", verified) == "True\n"
    assert run(*podman_run, "--entrypoint=sh", image, "-c", "command -v pip pip3 gcc || true") == ""


def test_blocks_outlive_the_container(image: str, podman_run: list[str], node: tuple[Path, Path]) -> None:
    sockets, pool = node
    name = f"kvoffd-delivery-{uuid.uuid4().hex[:8]}"
    hardened = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    daemon = [*podman_run, *hardened, f"--name={name}", "--detach", f"--volume={sockets}:/run/kvoffd"]
    daemon += [f"--volume={pool}:/pool", "--env=KVOFFD_POOL_FILE=/pool/kvoffd.pool", "--env=KVOFFD_HTTP_ADDRESS="]
    daemon += ["--env=KVOFFD_POOL_SIZE=64MiB", "--env=KVOFFD_ALLOWED_UIDS=2000", image]
    engine = [*podman_run, *hardened, f"--volume={sockets}:/run/kvoffd:ro"]
    engine += [f"--volume={HERE / 'traffic.py'}:/traffic.py:ro", "--user=2000:2000", f"--group-add={USERS}"]
    engine += ["--entrypoint=/opt/kvoffd/bin/python", image, "/traffic.py"]

    def healthy() -> bool:
        command = ["podman", "exec", name, "kvoffd-cli", "health", "--ready"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    try:
        run(*daemon)
        wait_until(healthy, 60)
        assert run(*engine, "store", "/run/kvoffd") == "16\n"
        logged = subprocess.run(["podman", "logs", name], capture_output=True, text=True, timeout=60)
        lines = [json.loads(line) for line in (logged.stdout + logged.stderr).splitlines()]
        assert any(line["message"].startswith("Serving") for line in lines)
        # The engine's number means nothing in the daemon's namespace of processes.
        assert any("in another pid namespace" in line["message"] for line in lines)
        run("podman", "kill", "--signal=KILL", name)
        wait_until(lambda: name not in run("podman", "ps", "--all", "--format={{.Names}}"), 60)
        run(*daemon)
        wait_until(healthy, 60)
        assert run(*engine, "find", "/run/kvoffd") == "16\n"
        run("podman", "stop", "--time=20", name)
        assert not list(sockets.glob("*.sock"))
    finally:
        subprocess.run(["podman", "rm", "--force", name], capture_output=True, timeout=60)
