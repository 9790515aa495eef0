"""Runs the door suite's tests with each planted fault: ``python -m tests.sim.planted_at_the_door [FAULT ...]``.

The tests that ``Planted.door`` names run twice: with the fault in every process that they start, where one of them has
to fail, and before that without it, where none may. The outcome goes into ``PLANTED.md``; the status is 1 where a fault
is not found.
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
TABLE = Path(__file__).with_name("PLANTED.md")
HEAD = """# Planted faults at the door

Each fault is a line of kvoffd made wrong ([planted.py](planted.py)). The test runs with the fault in the daemon and in
the client, and has to fail. Written by `python -m tests.sim.planted_at_the_door`.

| fault | promise | test | outcome | seconds |
|---|---|---|---|---|
"""
DEADLINE_S = 300
FOUND, NOT_FOUND = "found", "NOT FOUND"


def run_tests(tests: str, name: str = "") -> tuple[int, str, float]:
    """The exit status of pytest over some tests, its last lines, and seconds. ``name``: a fault that is planted."""
    path = [str(Path(__file__).with_name("plant")), str(ROOT)] if name else [str(ROOT)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=90", *tests.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PLANTED_FAULT": name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def judge(planted: Planted, tests: str) -> tuple[str, float]:
    """The outcome for one fault, and seconds."""
    with planted.plant():
        pass  # its line is there
    status, output, seconds = run_tests(tests, planted.name)
    if status not in (0, 1):
        print(output[-2000:])
        return f"pytest ends with {status}", seconds
    if status:
        print("    " + "\n    ".join(re.findall("^E  .*", output, re.MULTILINE)[:4]), flush=True)
    return FOUND if status else NOT_FOUND, seconds


def rows() -> dict[str, str]:
    """The table as it is, by fault."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "---" not in line}


def main() -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help="faults; all that have a test at the door without one")
    parser.add_argument("--tests", help="other tests than those of the fault's; the table stays as it is")
    given = parser.parse_args()
    chosen = [fault(name) for name in given.faults] or [planted for planted in PLANTED if planted.door]
    tests = sorted({given.tests or planted.door for planted in chosen})
    status, output, seconds = run_tests(" ".join(sorted({one for each in tests for one in each.split()})))
    if status:
        print(output[-4000:], "\nWithout a fault these tests have to pass.")
        return 1
    print(f"all pass without a fault, in {seconds:.0f} s", flush=True)
    known, missed = rows(), 0
    for planted in chosen:
        outcome, seconds = judge(planted, given.tests or planted.door)
        print(f"{planted.name}: {outcome}, {seconds:.1f} s", flush=True)
        missed += outcome != FOUND
        known[planted.name] = f"| {planted.name} | {planted.promise} | `{planted.door}` | {outcome} | {seconds:.0f} |"
        if not given.tests:
            there = [known[planted.name] for planted in PLANTED if planted.door and planted.name in known]
            TABLE.write_text(HEAD + "".join(f"{row}\n" for row in there))
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
