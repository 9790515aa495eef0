"""What ``make gpu`` runs with: this Python's wheels, and a library of the C that lies in the tree."""

from __future__ import annotations

import ctypes
import os
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
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    os.utime(tmp_path / carry.LIBRARY, (0, 0))
    return tmp_path


def test_this_python_runs_with_wheels_that_are_for_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda python, _, environ: started.append((python, environ.get("PYTHONPATH"))))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match=r"Neither \.venv nor \.gpu is here"):
        carry.run([])
    wrong = root / ".gpu" / "msgspec-0.19-cp39-cp39-manylinux2014_x86_64.whl"
    wrong.touch()
    with pytest.raises(SystemExit, match=r"is for Python 3\.9, and this is 3"):
        carry.run([])
    carry.VENV_PYTHON.parent.mkdir()
    carry.VENV_PYTHON.touch()
    carry.run([])
    assert started == [(str(carry.VENV_PYTHON), None)]
    wrong.unlink()
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for text in ("1", "22"):  # wheels that are renewed are unpacked again
        for name in (f"a-1-{ours}-{ours}-manylinux2014_x86_64.whl", "b-1-cp38-abi3-manylinux2014_x86_64.whl"):
            with ZipFile(root / ".gpu" / name, "w") as packed:
                packed.writestr(f"{name[0]}.py", text)
        carry.run([])
        python, path = started.pop()
        (site,) = (root / ".gpu-site").iterdir()
        assert (python, path.split(os.pathsep)[-1]) == (sys.executable, str(site))
        assert [(site / name).read_text() for name in ("a.py", "b.py")] == [text, text]


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
    (root / ".gpu-site/a/kvoffd").mkdir(parents=True)
    (root / ".gpu-site/a" / carry.LIBRARY).write_text("carried")
    carry._renew_library()
    assert (root / carry.LIBRARY).read_text() == "carried"
