"""``kvoffd`` whose copies obey a file: ``faulty_main.py FAULT_FILE serve ...``. See ``support.faulty_daemon``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvoffd.cli import main
from kvoffd.transfer import host
from kvoffd.transfer.strokes import Stroke


def faulty(fault_file: Path) -> Callable[[Stroke], None]:
    """The copy function, with the fault that the file names at the time of each copy, for one direction."""

    def copy_with_fault(stroke: Stroke) -> None:
        words = fault_file.read_text().split() if fault_file.exists() else []
        if not words or words[0] != threading.current_thread().name.split("-")[1]:  # kvoffd-store-0
            host.copy_stroke(stroke)
            return
        if words[1] == "fails":
            raise OSError("a deliberate failure")
        if words[1] == "slow":
            time.sleep(float(words[2]))
        host.copy_stroke(stroke)
        if words[1] == "lies":
            destination, _, size, inner, inner_to, _, outer, outer_to, _ = stroke
            lie = np.ndarray((outer, inner, size), np.uint8, host._SPACE, destination - 1, (outer_to, inner_to, 1))
            lie[...] = 0x3C

    return copy_with_fault


def install(fault_file: Path) -> None:
    """Put the faults under the daemon's copy threads."""
    host.HostEngine.__init__.__defaults__ = (time.monotonic, 1, faulty(fault_file))  # type: ignore[attr-defined]


if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    sys.exit(main())
