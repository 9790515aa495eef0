"""What ``make gpu`` runs with: this Python's wheels, and a library of the C that lies in the tree."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.bench.gpu import carry
from tests.kit.cuda_abi import compiler


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree without .venv, whose library is older than its only source."""
    for name, path in {"ROOT": ".", "CARRIED": ".gpu", "SITES": ".gpu-site", "VENV_PYTHON": ".venv/python"}.items():
        monkeypatch.setattr(carry, name, tmp_path / path)
    for path, text in {
        "kvoffd/one.c": "int one(void) { return 1; }",
        "hatch_build.py": 'SOURCES = ["kvoffd/one.c"]\nFLAGS = ["-fPIC", "-shared"]\n',
        "kvoffd/libkvoffd.so": "old",
        ".gpu/none": "",
        ".gpu-site/a/kvoffd/libkvoffd.so": "carried",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    os.utime(tmp_path / carry.LIBRARY, (0, 0))
    return tmp_path


def fake_python(path: Path, tag: str, has_torch: bool) -> Path:
    """Says what a Python says of itself, or with which arguments it was started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {tag} {has_torch} || echo started "$0" "$@"\n')
    path.chmod(0o755)
    return path


def run_carry(root: Path, path: Path, *arguments: str) -> str:
    """What a process prints that runs ``carry.py run`` over a tree, and on a machine, of the test's."""
    program = (
        "import pathlib, runpy, sys\n"
        "root = pathlib.Path(sys.argv[2])\n"
        "run = runpy.run_path(sys.argv[1])['run']\n"
        "names = {'ROOT': '.', 'CARRIED': '.gpu', 'SITES': '.gpu-site', 'VENV_PYTHON': '.venv/python'}\n"
        "run.__globals__.update({name: root / place for name, place in names.items()})\n"
        "sys.modules['tomllib'] = None\n"  # an older Python has none
        "run(sys.argv[3:])\n"
    )
    command = [sys.executable, "-c", program, carry.__file__, str(root), *arguments]
    environ = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    return done.stdout + done.stderr


def test_the_first_python_that_fits_and_has_torch_is_taken(root: Path, tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    wheel = root / ".gpu" / "msgspec-0.19-cp313-cp313-manylinux2014_x86_64.whl"
    with ZipFile(wheel, "w") as packed:
        packed.writestr("msgspec.py", "")
    plain, other = fake_python(bin_ / "python3.13", "cp313", False), fake_python(bin_ / "python3.14", "cp314", True)
    assert f"started {plain} -m tests.bench.gpu --part copy" in run_carry(root, bin_, "--part", "copy")
    with_torch = fake_python(bin_ / "python3", "cp313", True)
    venv = fake_python(root / ".venv" / "python", "cp313", False)
    assert f"started {with_torch} " in run_carry(root, bin_), "where .venv has no torch for CUDA another is better"
    assert f"started {venv} " in run_carry(root, bin_, "--double"), "which needs none"
    assert f"started {other} " not in run_carry(root, bin_), "the wheels are not for it"
    fake_python(venv, "cp313", True)
    assert f"started {venv} " in run_carry(root, bin_)
    assert [path.name for path in (root / ".gpu").glob("*.whl")] == [wheel.name]
    assert not (root / ".gpu" / "site").exists(), "what is unpacked would be carried too"
    assert len(list((root / ".gpu-site").iterdir())) == 1


def test_wheels_that_are_renewed_are_unpacked_again(root: Path) -> None:
    wheel, sites = root / ".gpu" / "a-1-py3-none-any.whl", set()
    for text in ("1", "22"):
        with ZipFile(wheel, "w") as packed:
            packed.writestr("a.py", text)
        sites.add(site := carry._unpacked([wheel]))
        assert carry._unpacked([wheel]) == site
        assert (site / "a.py").read_text() == text
    assert len(sites) == 2


def test_wheels_for_another_python_are_reported_in_a_sentence(root: Path) -> None:
    assert "Neither .venv nor .gpu is here" in run_carry(root, root)
    (root / ".gpu" / "msgspec-0.19-cp39-cp39-manylinux2014_x86_64.whl").touch()
    assert "is for Python 3.9, which is not here" in run_carry(root, root)


def test_make_without_a_python_says_so() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    done = subprocess.run(["make", "gpu", "PYTHON="], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode != 0
    assert "no Python 3.11" in done.stderr


def test_a_library_that_is_older_than_its_source_is_compiled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler()
    carry._renew_library()
    assert ctypes.CDLL(str(root / carry.LIBRARY)).one() == 1
    (root / carry.LIBRARY).unlink()  # it is loaded: to cut it short kills this process when it ends
    (root / carry.LIBRARY).write_text("newer than its source")
    carry._renew_library()
    assert (root / carry.LIBRARY).read_text() == "newer than its source"
    os.utime(root / carry.LIBRARY, (0, 0))
    monkeypatch.setenv("PATH", str(root))
    carry._renew_library()
    assert (root / carry.LIBRARY).read_text() == "carried"
