"""A daemon whose copies can be made to fail, to lie or to take long, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .daemon import DaemonProcess

MAIN = Path(__file__).parent / "faulty_main.py"


class FaultyDaemon(DaemonProcess):
    """A DaemonProcess with faults: ``with daemon.fault("load fails"): ...``, ``load lies``, ``store slow 0.5``."""

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(MAIN), str(self.fault_file)]

    @property
    def fault_file(self) -> Path:
        return self.directory / "fault"

    @contextmanager
    def fault(self, words: str) -> Iterator[None]:
        """Every copy that starts within has the fault."""
        self.fault_file.write_text(words)
        try:
            yield
        finally:
            self.fault_file.unlink()
