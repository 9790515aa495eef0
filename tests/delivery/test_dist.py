"""What `make dist` makes: complete, good on package indexes, and one wheel for every Python, without a compiler."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.delivery.built import ROOT, run
from tests.kit.daemon import DaemonProcess

HERE = Path(__file__).parent
LIBRARY = "kvoffd/libkvoffd.so"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""By e_machine of ELF's header."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

pytestmark = [
    pytest.mark.delivery,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("auditwheel") is None, reason="auditwheel is not installed (`make dist`)"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "deploy" / "build_dist.py", directory)
    return directory


def wheel_of(dist: Path, machine: str) -> Path:
    found = list(dist.glob(f"kvoffd-*_{machine}.whl"))
    if not found:
        pytest.skip(f"no gcc for {machine} is here")
    (wheel,) = found
    return wheel


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_is_for_every_python_on_any_linux_of_its_machine(dist: Path, machine: str) -> None:
    wheel = wheel_of(dist, machine)
    assert re.fullmatch(rf"kvoffd-[\d.]+-py3-none-manylinux2014_{machine}\.manylinux_2_17_{machine}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        header = archive.read(LIBRARY)[:20]
        assert (header[:4], int.from_bytes(header[18:20], "little")) == (b"\x7fELF", MACHINES[machine])
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = email.message_from_bytes(archive.read(metadata)).get_payload()
    assert isinstance(text, str)
    assert text.startswith("# kvoffd")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(re.match("https://|#", link) for link in links), "a link that leads nowhere on an index"


def test_the_sdist_is_the_repository(dist: Path) -> None:
    """But for what is about the repository itself."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        there = {name.split("/", 1)[1] for name in archive.getnames()} - {"PKG-INFO"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    assert set(listed.stdout.splitlines()) - there - {".ci/run"} == set()
    assert not [name for name in there if name.endswith((".so", ".pyc"))]


def interpreter(version: str) -> str:
    """A Python of that version: one of pyenv's, or on PATH, where pyenv has programs of names that do not run."""
    for program in (*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")):
        if program and subprocess.run([program, "-m", "venv", "-h"], capture_output=True, timeout=60).returncode == 0:
            return str(program)
    pytest.skip(f"no Python {version} is here")


def isolated(environment: Path) -> dict[str, str]:
    """Variables under which there is no compiler, and no kvoffd but the environment's."""
    return {**os.environ, "PATH": str(environment / "bin"), "PYTHONPATH": "", "CC": "", "PYTHONWARNINGS": "default"}


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_serves_on_every_python_without_a_compiler(dist: Path, tmp_path: Path, version: str) -> None:
    wheel = wheel_of(dist, os.uname().machine)
    environment = tmp_path / "environment"
    run(interpreter(version), "-m", "venv", environment)
    environ, python = isolated(environment), environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", wheel, environ=environ)
    with DaemonProcess(program=[str(environment / "bin" / "kvoffd")], environ=environ) as daemon:
        assert run(python, HERE / "traffic.py", "store", daemon.directory, environ=environ) == "16\n"
        assert run(python, HERE / "traffic.py", "find", daemon.directory, environ=environ) == "16\n"
        command, environ = environment / "bin" / "kvoffd-cli", {**environ, "KVOFFD_DIRECTORY": str(daemon.directory)}
        assert "ok" in run(command, "health", environ=environ)
        assert '"loaded_keys":' in run(command, "stats", "--json", environ=environ)
        assert daemon.stop() == 0
