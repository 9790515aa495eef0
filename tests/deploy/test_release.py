"""A release by one command: what is built and signed, and that nothing is published unasked."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvoffd import __version__

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "gpg", "podman", "cosign", "helm", "twine", "gh")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone with what a release reads, in git and tagged; the tools only say what they were asked."""
    made, tools = tmp_path / "tree", tmp_path / "tools"
    shutil.copytree(ROOT / "deploy", made / "deploy", symlinks=True)
    (made / "kvoffd").mkdir()
    shutil.copy(ROOT / "kvoffd" / "__init__.py", made / "kvoffd")
    (made / ".gitignore").write_text("dist\n")
    (made / "dist").mkdir()
    for name in (f"kvoffd-{__version__}.tar.gz", f"kvoffd-{__version__}-py3-none-any.whl", "kvoffd.deb"):
        (made / "dist" / name).write_text("x")
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(f'#!/bin/sh\necho "RAN {name} $*"\n')
        (tools / name).chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"], ["tag", f"v{__version__}"]):
        subprocess.run([*git, *words], cwd=made, check=True)
    return made


def release(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{tree.parent / 'tools'}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(tree), "KEY": "K", "REGISTRY": "r.example/kvoffd", **variables}
    command = [tree / "deploy" / "release.sh"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_it_builds_and_signs_all_and_publishes_nothing_unasked(tree: Path) -> None:
    ended = release(tree)
    assert ended.returncode == 0, ended.stderr
    ran = [line for line in ended.stdout.splitlines() if line.startswith("RAN")]
    assert [line.split()[1] for line in ran] == ["make", "make", "make", "gpg"]
    sums = (tree / "dist" / "SHA256SUMS").read_text()
    chart = f"kvoffd-chart-{__version__}.tgz"
    assert all(name in sums for name in (".whl", ".tar.gz", ".deb", chart))
    with tarfile.open(tree / "dist" / chart) as archive:
        manifest = archive.getmember("kvoffd/daemonset.yaml")
        assert manifest.isreg(), "not the link"
    would = [line for line in ended.stdout.splitlines() if line.startswith("+ ")]
    assert f"+ helm push dist/{chart} oci://r.example/kvoffd/charts" in would
    for tag in (__version__, f"{__version__}-peers"):
        assert f"+ podman push r.example/kvoffd/kvoffd:{tag}" in would
    assert len(would) == 10


def test_what_is_no_tag_and_what_has_no_key_is_refused(tree: Path) -> None:
    assert "names the GPG key" in release(tree, KEY="").stderr
    (tree / ".gitignore").write_text("dist\n# changed\n")
    ended = release(tree, PUBLISH="yes")
    assert f"The tree is not the tag v{__version__} without changes" in ended.stderr
    assert "RAN" not in ended.stdout
