"""The helper process for peers, forked from a process that has imported NIXL: its imports are most of a start's CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace

from kvoffd.tiers import peer_helper, peer_process

# Before NIXL is imported, as in the helper.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")

with suppress(ImportError):
    import nixl_cu12  # noqa: F401


class ForkedHelper:
    """Has what ``HelperProcess`` needs of a subprocess.Popen."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], stdin: int) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if self.pid:
            return
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in pass_fds:
                    with suppress(OSError):
                        os.close(fd)
            # pytest's own lead to descriptors that are closed now, or another file's by then.
            sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.argv = list(command[-2:])
            peer_helper.main()
        except Exception:
            traceback.print_exc()  # as the helper's own end does, in the daemon's log
        finally:
            os._exit(1)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


SUBPROCESS = SimpleNamespace(Popen=ForkedHelper, DEVNULL=subprocess.DEVNULL)
"""In place of the module in ``peer_process``."""


def fork_helpers() -> None:
    """Have the daemon that this process becomes fork its helper."""
    peer_process.subprocess = SUBPROCESS  # type: ignore[assignment, attr-defined]
