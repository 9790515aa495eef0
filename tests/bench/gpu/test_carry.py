"""What ``make gpu`` runs with: this Python's wheels, and a library of the C that lies in the tree."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from tests.bench.gpu import carry
from tests.support.cuda_abi import compiler


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
