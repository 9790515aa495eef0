"""The pool as other processes may see it: by a descriptor that can only be read."""

from __future__ import annotations

import os
from typing import NamedTuple

_OWNER_ONLY = 0o600


class PoolShare(NamedTuple):
    """A descriptor to hand out, and where in its file the pool lies. Whoever has it closes it."""

    fd: int
    offset_bytes: int
    pool_bytes: int


def read_only(fd: int) -> int:
    """A new descriptor of the same file that can be mapped for reading only.

    A receiver could open the file again by /proc for writing where its mode lets him, and a memfd is made with 0777:
    so it becomes the owner's alone. Nothing keeps out the owner himself and root, who could trace the daemon as well.

    Raises:
        OSError: as where /proc is not mounted.
    """
    os.fchmod(fd, _OWNER_ONLY)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
