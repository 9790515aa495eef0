"""What this process has open."""

from __future__ import annotations

import contextlib
import os


def open_files() -> set[tuple[str, str, int]]:
    """Its descriptors, what each is of, and that file's inode.

    Look for what is new in it, not at its size: threads and objects that an earlier test left may close
    theirs at any time.
    """
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what was closed since
            path = f"/proc/self/fd/{fd}"
            files.add((fd, os.readlink(path), os.stat(path).st_ino))
    return files
