"""What this process has open, and how large its files may be."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


def open_files() -> set[tuple[str, str]]:
    """Its descriptors, and what each is of."""
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return files


def open_descriptors() -> int:
    """How many they are, that of the listing itself included."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What this process writes beyond that fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
