"""What hatch makes of this tree: a wheel that has all it needs, or a sentence; and the tree is as it was."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "kvoffd/libkvoffd.so"

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed (`make venv`)")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a library of somebody's in it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("kvoffd", "client", "proto"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tree / LIBRARY).write_bytes(b"another's")
    return tree


def build(tree: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.skipif(not shutil.which("dpkg"), reason="there is no dpkg here")
def test_a_package_of_a_commit_sorts_between_the_releases_and_behind_earlier_ones() -> None:
    def version(of: str, *seconds: str) -> str:
        program = str(ROOT / "deploy" / "debian" / "package_version.sh")
        return subprocess.run([program, of, *seconds], capture_output=True, text=True, check=True).stdout.strip()

    assert version("0.2.0") == "0.2.0"
    earlier, later = version("0.2.0+gffffffffffff", "1795961445"), version("0.2.0+g000000000000.dirty", "1795961446")
    assert earlier == "0.2.0+git20261129.141045.gffffffffffff"
    now = version("0.2.0+g000000000000")
    for one, next_one in ((earlier, later), *((one, "0.2.1") for one in (earlier, later, now))):
        subprocess.run(["dpkg", "--compare-versions", "0.2.0", "lt", one], check=True)
        subprocess.run(["dpkg", "--compare-versions", one, "lt", next_one], check=True)


@pytest.mark.nightly
def test_a_wheel_has_the_library_and_the_tree_is_left_alone(tree: Path) -> None:
    built = build(tree)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tree / "dist").iterdir()
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        library = archive.read(LIBRARY)
    assert library[:4] == b"\x7fELF"
    # So `make dist` makes wheels of manylinux2014, whatever glibc is here.
    assert max(tuple(map(int, version.split(b"."))) for version in re.findall(rb"GLIBC_([\d.]+)", library)) <= (2, 17)
    assert names.count(LIBRARY) == 1
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "kvoffd",
        "kvoffd_client",
        "kvoffd_proto",
    }
    assert (tree / LIBRARY).read_bytes() == b"another's"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return import_module("hatch_build")


def test_a_build_that_is_no_release_has_its_commit(
    hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    monkeypatch.delenv("KVOFFD_COMMIT", raising=False)
    assert hook._commit(tree, "0.2.0") == "", "no checkout"
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "a")
    assert re.fullmatch("g[0-9a-f]{12}", hook._commit(tree, "0.2.0"))
    git("tag", "-am", "a", "v0.2.0")
    assert hook._commit(tree, "0.2.0") == "", "a release"
    (tree / "README.md").write_text("changed")
    assert hook._commit(tree, "0.2.0") == "dirty"
    git("commit", "-qam", "b")
    commit = hook._commit(tree, "0.2.0")
    assert re.fullmatch("g[0-9a-f]{12}", commit)
    for said, found in ((f"v0.2.0-3-{commit}{'0' * 28}-dirty", f"{commit}.dirty"), ("unknown", ""), ("v0.2.0", "")):
        monkeypatch.setenv("KVOFFD_COMMIT", said)
        assert hook._commit(tree, "0.2.0") == found


def test_a_built_copy_prints_its_commit(hook: ModuleType, tree: Path) -> None:
    """A wheel of a sdist has that of the sdist, which has all that the compiler reads. The library, which takes most of
    the time, is the one of this tree."""
    reads = f'{shlex.join(hook._compiler())} -fsyntax-only "$@" || exit 1'
    copies = f'while [ "$1" != -o ]; do shift || exit 1; done\ncp {ROOT / LIBRARY} "$2"'
    (compiler := tree / "cc").write_text(f"#!/bin/sh\n{reads}\n{copies}\n")
    compiler.chmod(0o700)
    command = [sys.executable, "-m", "hatchling", "build", "--target"]
    commit = "0123456789ab"
    environ = {**os.environ, "KVOFFD_COMMIT": commit + "0" * 28}
    subprocess.run([*command, "sdist"], cwd=tree, env=environ, check=True, capture_output=True)
    (sdist,) = (tree / "dist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(tree / "from", filter="data")
    (source,) = (tree / "from").iterdir()
    environ = {**os.environ, "CC": str(compiler)}
    subprocess.run([*command, "wheel"], cwd=source, env=environ, check=True, capture_output=True)
    (wheel,) = (source / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree / "site")
    code = "from kvoffd.__main__ import main; main()"
    environ = {**os.environ, "PYTHONPATH": str(tree / "site")}
    said = subprocess.run([sys.executable, "-c", code, "--version"], env=environ, capture_output=True, text=True)
    assert f"+g{commit} (protocol" in said.stdout, said


def test_without_a_compiler_there_is_no_wheel(tree: Path) -> None:
    built = build(tree, PATH="/nowhere", CC="")
    assert built.returncode != 0
    assert "no compiler was found (cc, gcc, clang)" in built.stderr
    assert "Traceback" not in built.stderr
    assert not list(tree.glob("dist/*"))
    assert (tree / LIBRARY).read_bytes() == b"another's"


def test_what_is_copied_into_the_image_is_what_the_package_is_built_from() -> None:
    docker = ROOT / "deploy" / "docker"
    ignore = (docker / "Dockerfile.dockerignore").read_text()
    kept = [line[1:] for line in ignore.splitlines() if line.startswith("!")]
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "kvoffd", "client", "proto"} == set(kept)
    assert all((ROOT / name).exists() for name in kept)
    assert (docker / "engine.Dockerfile.dockerignore").read_text() == ignore
