"""What the Makefile says without building anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # MAKEFLAGS: these tests are themselves started by make, whose flags are not meant for this one.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_missing_python_is_named_in_one_sentence(tmp_path: Path) -> None:
    for target in ("venv", "lint", "test"):
        result = make(target, "PYTHON=", f"VENV={tmp_path / 'venv'}")
        assert result.returncode != 0
        assert "kvoffd needs Python 3.11" in result.stderr
        assert not (tmp_path / "venv").exists()
