"""What ``make gpu`` runs with: this Python's wheels, and a library of the C that lies in the tree."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.gpu import carry
from tests.kit.cuda_abi import compiler


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree without .venv, whose library is older than its only source."""
    for name, path in {"ROOT": ".", "CARRIED": ".gpu", "SITE": ".gpu/site", "VENV_PYTHON": ".venv/python"}.items():
        monkeypatch.setattr(carry, name, tmp_path / path)
    for path, text in {
        "kvoffd/one.c": "int one(void) { return 1; }",
        "hatch_build.py": 'SOURCES = ["kvoffd/one.c"]\nFLAGS = ["-fPIC", "-shared"]\n',
        "kvoffd/libkvoffd.so": "old",
        ".gpu/site/kvoffd/libkvoffd.so": "carried",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    os.utime(tmp_path / carry.LIBRARY, (0, 0))
    return tmp_path


def test_wheels_for_another_python_are_told_in_a_sentence(root: Path) -> None:
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in ("kvoffd-1-py3-none-linux_x86_64", f"a-1-{ours}-{ours}-any", "b-1-cp38-abi3-any"):
        carry._check_python([root / f"{name}.whl"])
    (root / ".gpu" / "msgspec-0.19-cp39-cp39-manylinux2014_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=r"is for Python 3\.9, and this is .*make gpu PYTHON=python3\.9"):
        carry.run([])


def test_an_older_python_is_told_so_too(root: Path) -> None:
    """Which has no tomllib, as Ubuntu 22.04's."""
    (root / ".gpu" / "msgspec-0.19-cp39-cp39-manylinux2014_x86_64.whl").touch()
    program = (
        "import pathlib, runpy, sys\n"
        "sys.modules['tomllib'] = None\n"
        "run = runpy.run_path(sys.argv[1])['run']\n"
        "run.__globals__.update(CARRIED=pathlib.Path(sys.argv[2]), VENV_PYTHON=pathlib.Path('/nowhere'))\n"
        "run([])\n"
    )
    command = [sys.executable, "-c", program, carry.__file__, str(root / ".gpu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is for Python 3.9" in done.stderr


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
