"""Where NVIDIA's headers and assemblers and Debian's driver library are, which `make abi` and `make test` fetch."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".cuda"
sys.path.insert(0, str(ROOT))

from tests.tools.cuda_files import ASSEMBLER, HEADERS, fetch  # noqa: E402

VERSIONS = list(HEADERS)


def include_directory(version: str) -> Path:
    """The directory of one version's `cuda.h`; skips the test where it cannot be had."""
    path = DIRECTORY / "headers" / version
    if not path.is_dir():
        _fetch_once()
    if not path.is_dir():
        pytest.skip(f"cuda.h of CUDA {version} could not be fetched (python -m tests.tools.cuda_files .cuda says why)")
    return path


def assembler(version: str) -> Path:
    """One version's `ptxas`; skips the test where it cannot be had."""
    path = DIRECTORY / "ptxas" / version / ASSEMBLER
    if not path.exists():
        _fetch_once()
    if not path.exists():
        pytest.skip(f"{ASSEMBLER} {version} could not be fetched (python -m tests.tools.cuda_files .cuda says why)")
    path.chmod(0o755)
    return path


def real_driver() -> Path:
    """Debian's libcuda, for which there is no GPU here; skips the test where it cannot be had."""
    for _ in range(2):
        for path in (DIRECTORY / "driver").glob("libcuda.so.*"):
            return path
        _fetch_once()
    pytest.skip("Debian's libcuda1 could not be fetched (python -m tests.tools.cuda_files .cuda says why)")


@cache
def _fetch_once() -> None:
    fetch(DIRECTORY)
