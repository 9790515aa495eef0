"""Standard input, output and error, which whoever starts a process may have closed."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Put /dev/null where one is closed. Else a socket or a file of the daemon would have its number: what a library
    prints would go there, and libuv ends the process when it is to close one.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        if fd == 1 and sys.stdout is None:
            sys.stdout = os.fdopen(fd, "w", closefd=False)
        if fd == 2 and sys.stderr is None:
            sys.stderr = os.fdopen(fd, "w", closefd=False)
    os.close(fd)
