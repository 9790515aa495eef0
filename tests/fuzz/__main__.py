"""Coverage-guided fuzzing of every target, what `make fuzz` runs.

Each input that breaks a promise is written to .fuzz/TARGET.crash-*, and how to run it again is printed. The inputs that
reached something new stay in .fuzz/TARGET/ and are where the next run begins.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import DECODERS

WORK = Path(".fuzz")
MAX_INPUT_BYTES = 4096
MAX_MEMORY_MIB = 2048
MAX_INPUT_S = 25
HANGING_S = 120
"""Seconds that start and end may take besides the fuzzing itself."""


class Outcome(NamedTuple):
    """The result of fuzzing one target."""

    target: str
    inputs: int
    seconds: float
    kept: int
    """The number of inputs that reached code that no other did."""
    problem: str
    """What broke and how to reproduce it; empty when nothing did."""


def fuzz(target: str, seconds: int, inputs: int) -> Outcome:
    """Until the time is over or so many inputs were tried (0: any number)."""
    kept = WORK / target
    kept.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (kept / f"seed-{number}").write_bytes(seed)
    command = [
        *(sys.executable, "-m", "tests.fuzz.guided", target, str(kept), f"-artifact_prefix={WORK}/{target}."),
        *(f"-max_total_time={seconds}", f"-runs={inputs or -1}", f"-max_len={MAX_INPUT_BYTES}"),
        *(f"-rss_limit_mb={MAX_MEMORY_MIB}", f"-timeout={MAX_INPUT_S}", "-print_final_stats=1", "-close_fd_mask=1"),
    ]
    started = time.monotonic()
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + HANGING_S)
        said, failed = run.stderr, run.returncode != 0
    except subprocess.TimeoutExpired as expired:
        said, failed = (expired.stderr or b"").decode(errors="replace"), True
    took = time.monotonic() - started
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    problem = ""
    if failed:
        crash = re.search(r"Test unit written to (\S+)", said)
        again = f"\n\n    python -m tests.fuzz.guided {target} {crash[1]}\n" if crash else ""
        problem = f"{target} broke:{again}\n" + "\n".join(said.splitlines()[-40:])
    return Outcome(target, int(executed[1]) if executed else 0, took, len(os.listdir(kept)), problem)


def main() -> int:
    """Run the command line. Returns 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(DECODERS)}; all by default")
    parser.add_argument("--seconds", type=int, default=30, help="for each target [30]")
    parser.add_argument("--inputs", type=int, default=0, help="for each target; 0 for as many as the time allows [0]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time [one a core]")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(DECODERS):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; there are {', '.join(DECODERS)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed; `make fuzz` does that.")
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.processes) as pool:
        wanted = options.targets or DECODERS
        for outcome in pool.map(lambda target: fuzz(target, options.seconds, options.inputs), wanted):
            outcomes.append(outcome)
            rate = outcome.inputs / outcome.seconds
            verdict = "BROKE" if outcome.problem else "held"
            print(
                f"{outcome.target:<18}{outcome.inputs:>12,} inputs {rate:>9,.0f}/s {outcome.kept:>6} kept  {verdict}",
                flush=True,
            )
    print(f"{'together':<18}{sum(outcome.inputs for outcome in outcomes):>12,} inputs")
    for outcome in outcomes:
        if outcome.problem:
            print(f"\n{outcome.problem}")
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
