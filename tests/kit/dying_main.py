"""``kvoffd`` that takes its time to die: ``dying_main.py LIBRARY serve ...``. See ``tests.kit.dying_daemon``."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading

from kvoffd.cli import main

CLOSING_US = int(os.environ.get("DYING_CLOSING_US", 700_000))
COPYING_US = 100_000


def die_slowly(library: str) -> None:
    """At SIGUSR1 do what the kernel does with a killed process, and take time between the steps.

    Its sockets close from the highest down. The GPU, whose descriptors are lower, copies on; then it is gone too. No
    other Python thread runs meanwhile, since calls of PyDLL keep the GIL.
    """
    signal.sigwait({signal.SIGUSR1})
    libc, driver = ctypes.PyDLL(None), ctypes.PyDLL(library)
    for fd in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
        except OSError:
            pass  # that of the listing
    libc.usleep(CLOSING_US)
    driver.stub_release()  # what hung in the driver copies now
    libc.usleep(COPYING_US)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=die_slowly, args=(sys.argv.pop(1),), daemon=True).start()
    sys.exit(main())
