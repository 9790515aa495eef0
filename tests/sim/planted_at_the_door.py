"""Runs the door suite's tests with each planted fault: ``python -m tests.sim.planted_at_the_door [FAULT ...]``.

The test that ``Planted.door`` names runs with the fault in every process that it starts, where it has to fail, and
without it, where it may not. The status is 1 where a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.sim.planted import PLANTED, Planted, fault

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900
FOUND, NOT_FOUND = "found", "NOT FOUND"


def run_tests(tests: str, name: str = "") -> tuple[int, str, float]:
    """The exit status of pytest over some tests, its last lines, and seconds. ``name``: a fault that is planted."""
    path = [str(Path(__file__).with_name("plant")), str(ROOT)] if name else [str(ROOT)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=90", "-p", "no:cacheprovider", *tests.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PLANTED_FAULT": name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def judge(planted: Planted) -> tuple[str, str, float]:
    """The outcome for one fault, what the failing test says, and seconds."""
    status, output, seconds = run_tests(planted.door, planted.name)
    said = "\n".join(f"    {line}" for line in re.findall("^E  +(.*)", output, re.MULTILINE)[:4])
    if status not in (0, 1):
        return f"pytest ends with {status}", output[-2000:], seconds
    return FOUND if status else NOT_FOUND, said, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help="faults; all that have a test at the door without one")
    names = parser.parse_args().faults
    chosen = [fault(name) for name in names] or [planted for planted in PLANTED if planted.door]
    for planted in chosen:
        with planted.plant():
            pass  # its line is there
    missed = 0
    for planted in chosen:
        outcome, said, seconds = judge(planted)
        print(f"{planted.name}: {outcome}, {seconds:.1f} s\n{said}", flush=True)
        missed += outcome != FOUND
    status, output, seconds = run_tests(" ".join(sorted({test for planted in chosen for test in planted.door.split()})))
    print(f"Without a fault: status {status}, {seconds:.0f} s")
    if status:
        print(output[-4000:])
    return int(missed > 0 or status > 0)


if __name__ == "__main__":
    raise SystemExit(main())
