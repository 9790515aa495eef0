"""File systems of a test's own.

They need root. Where the kernel lacks something the test is skipped, or fails, as ``tests.kit.require`` says.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .require import missing, require


def run(*command: str | Path) -> str:
    """Run a program; its output. Skips the test where it is not there or fails."""
    require("root", os.geteuid() == 0, f"{command[0]} needs root")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        missing("root", f"there is no {command[0]}")
    if done.returncode:
        missing("root", f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory at ``place``, which is made."""
    place.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)
