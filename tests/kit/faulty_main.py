"""``kvoffd`` whose copies obey a file: ``faulty_main.py FAULT_FILE serve ...``. See ``tests.kit.faulty_daemon``."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvoffd.cli import main
from kvoffd.transfer import host_engine
from kvoffd.transfer.host_engine import HostCopy
from kvoffd.transfer.pace import Pace

STEPS = 8
"""For each time that the file is read."""


def faulty(fault_file: Path) -> Callable[[HostCopy, Pace], None]:
    """The copy function, with the fault that the file names every few steps, for one direction."""

    def run_with_fault(copy: HostCopy, pace: Pace) -> None:
        words = fault_file.read_text().split() if fault_file.exists() else []
        if not words or words[0] != threading.current_thread().name.split("-")[1]:  # kvoffd-store-0
            copy.run(pace, STEPS)
            return
        if words[1] == "fails":
            raise OSError("a deliberate failure")
        if words[1] == "slow":
            time.sleep(float(words[2]))
        copy.run(pace, STEPS)
        if words[1] == "lies":
            for address, size in zip(copy.plan.destination.tolist(), copy.plan.size.tolist(), strict=True):
                ctypes.memset(address, 0x3C, size)

    return run_with_fault


def install(fault_file: Path) -> None:
    """Put the faults under the daemon's copy threads."""
    defaults = (time.monotonic, 1, faulty(fault_file), host_engine.STEP_BYTES)
    host_engine.HostEngine.__init__.__defaults__ = defaults  # type: ignore[attr-defined]


if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    sys.exit(main())
