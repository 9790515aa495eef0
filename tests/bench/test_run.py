"""The driver behind ``make bench``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).with_name("run.py")


def test_an_unknown_bench_is_refused_before_anything_starts() -> None:
    found = subprocess.run(
        (sys.executable, str(RUN), "nonsense"), capture_output=True, text=True, timeout=30, check=False
    )
    assert found.returncode == 2
    assert "choose from lookup, copy, jobs" in found.stderr
