"""What the tests of delivery build once: wheels, and Debian's files for containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".delivery"
"""Kept between runs; `make clean` removes it."""
DEBIAN = "bookworm"
DEBIANS_PYTHON = "3.11"


def need(*programs: str, root: bool = False) -> None:
    """Skip the test where a program, or the right to use it, is not there."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if root and os.geteuid() != 0:
        pytest.skip("only root may do this")


def run(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = 300, environ: dict[str, str] | None = None
) -> str:
    """What a command prints on stdout; fails the test with all that it printed."""
    words, environ = list(map(str, command)), {**os.environ, **(environ or {})}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    ended = subprocess.run(words, cwd=cwd, env=environ, timeout=timeout_s, check=False, **streams)
    if ended.returncode:
        pytest.fail(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def debian(packages: Sequence[str]) -> Path:
    """A tar file of a Debian with ``packages``; skips the test where no mirror can be reached."""
    need("mmdebstrap", root=True)
    made = CACHE / f"{'-'.join([DEBIAN, *packages])}.tar"
    if not made.exists():
        CACHE.mkdir(exist_ok=True)
        being_made = made.with_suffix(".new")
        command = ["mmdebstrap", "--quiet", "--variant=minbase"]
        command += [f"--include={','.join(packages)}"] if packages else []
        ended = subprocess.run(
            [*command, "--format=tar", DEBIAN, being_made], capture_output=True, text=True, timeout=600
        )
        if ended.returncode:
            pytest.skip(f"no Debian could be made: {ended.stderr.strip().splitlines()[-1:]}")
        being_made.rename(made)
    return made


def unpack(archive: Path, directory: Path) -> None:
    """All files of a root file system with their owners and modes."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # an argument since Python 3.11.4
        opened.extractall(directory)


def wheelhouse() -> Path:
    """A directory with this tree's wheel and with all that it needs, for Debian's Python."""
    house = CACHE / f"wheels-{DEBIANS_PYTHON}"
    house.mkdir(parents=True, exist_ok=True)
    for old in house.glob("kvoffd-*"):
        old.unlink()
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", house, cwd=ROOT)
    (wheel,) = house.glob("kvoffd-*.whl")
    options = ["--quiet", "--only-binary=:all:", "--python-version", DEBIANS_PYTHON, "--find-links", str(house)]
    run(sys.executable, "-m", "pip", "download", *options, "--dest", house, f"{wheel}[s3]")
    return house
