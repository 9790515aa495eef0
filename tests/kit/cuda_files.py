"""Where NVIDIA's headers and assemblers and Debian's driver library are, which `make test` fetches."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".cuda"
sys.path.insert(0, str(ROOT))

from tests.kit.require import missing  # noqa: E402
from tests.tools.cuda_files import ASSEMBLER, HEADERS, fetch  # noqa: E402

VERSIONS = list(HEADERS)
WHY = "python -m tests.tools.cuda_files .cuda says why"


def include_directory(version: str) -> Path:
    """The directory of one version's `cuda.h`; without it the test is skipped, or fails where it is required."""
    path = DIRECTORY / "headers" / version
    if not path.is_dir():
        _fetch_once()
    if not path.is_dir():
        missing(
            "cuda-headers",
            f"cuda.h of CUDA {version} could not be fetched; {WHY}",
        )
    return path


def assembler(version: str) -> Path:
    """One version's `ptxas`; without it the test is skipped, or fails where it is required."""
    path = DIRECTORY / "ptxas" / version / ASSEMBLER
    if not path.exists():
        _fetch_once()
    if not path.exists():
        missing(
            "cuda-headers",
            f"{ASSEMBLER} {version} could not be fetched; {WHY}",
        )
    path.chmod(0o755)
    return path


def real_driver() -> Path:
    """Debian's libcuda, for which there is no GPU here; a test without it is skipped, or fails where required."""
    for _ in range(2):
        for path in (DIRECTORY / "driver").glob("libcuda.so.*"):
            return path
        _fetch_once()
    missing("cuda-headers", f"Debian's libcuda1 could not be fetched; {WHY}")


@cache
def _fetch_once() -> None:
    fetch(DIRECTORY)
