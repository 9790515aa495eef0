"""Release 0.2.0 from this repository's history, with its library, to be run beside this release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .require import require

ROOT = Path(__file__).parents[2]
COMMIT = "72eec6340a52099e37a7ede6fe0e54d917b10474"
"""Of release 0.2.0."""
BUILD = "import hatch_build as h, subprocess; "
BUILD += "subprocess.run([*h._compiler(), *h.FLAGS, '-o', h.LIBRARY, *h.SOURCES], check=True)"
BUILD_S = 300.0


class Release(NamedTuple):
    """Packages of a release, in a directory that is laid out as the repository."""

    name: str
    place: Path

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a process that imports these packages, and no other kvoffd."""
        return {"PYTHONPATH": os.pathsep.join(str(self.place / part) for part in (".", "client", "proto"))}

    @property
    def program(self) -> list[str]:
        """The command line of its ``kvoffd``. -P: not the packages of the working directory."""
        return [sys.executable, "-P", "-m", "kvoffd"]


THIS = Release("this", ROOT)


def release_02(place: Path) -> Release:
    """Make release 0.2.0 in an empty directory. Skips the test if the repository's history lacks it."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    require("history", archive.returncode == 0, f"the commit of release 0.2.0 is not here: {archive.stderr!r}")
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    subprocess.run([sys.executable, "-c", BUILD], cwd=place, check=True, timeout=BUILD_S)
    return Release("0.2.0", place)
