"""Packages of others, as pip installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(package: Path, target: Path) -> Path:
    """Install a package with its metadata into a directory, which is returned; nothing is fetched."""
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True, capture_output=True)
    return target
