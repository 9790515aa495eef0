"""The commit that an installed copy of kvoffd was built from, where that is no release."""

from __future__ import annotations

from functools import cache
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""File next to this one, made by ``hatch_build.py``. A release has none, and neither has a checkout."""


@cache
def with_commit(release: str) -> str:
    """Return the version of this copy: ``0.2.0+g1a2b3c4d5e6f`` for one that was built after the release 0.2.0."""
    try:
        return f"{release}+{Path(__file__).with_name(COMMIT_FILE).read_text('ascii').strip()}"
    except OSError:
        return release
