"""A real daemon whose death takes most of a second, its lifelines first and its GPU's copies last."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from .daemon import STOP_DEADLINE_S, DaemonProcess

MAIN = Path(__file__).with_name("dying_main.py")


class DyingDaemon(DaemonProcess):
    """Over a stub driver. ``kill`` returns when the process is gone."""

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(MAIN), self.flags["cuda-library"]]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGUSR1)
        try:
            self.process.wait(STOP_DEADLINE_S)
        finally:
            super().kill()
