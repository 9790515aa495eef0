"""The commit of an installed copy of kvoffd, where that is no release, and the command lines of its programs."""

from __future__ import annotations

import sys
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


def program(module: str, library: Path) -> list[str]:
    """Return the command line that calls the function ``main`` of a module in the directory ``library``.

    The directory is added to Python's path, on which the Debian package's modules are not.
    """
    directory = str(library)
    code = (
        f"import sys; {directory!r} in sys.path or sys.path.insert(0, {directory!r}); "
        f"from {module} import main; sys.exit(main())"
    )
    # -P: modules of the working directory are not the program's.
    return [sys.executable, "-P", "-c", code]
