"""The long chaos run: ``python -m tests.chaos``.

Rounds of signals at random to a daemon and its engines under traffic, half of them with the pool in a file, half with
the pool kept by systemd's protocol; then clients that connect and are killed. Prints the figures; status 1 when one is
bad.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.cycles import measure_cycles
from tests.chaos.rounds import run_rounds

PRINT_EVERY = 25


def main() -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500, help="how many")
    parser.add_argument("--cycles", type=int, default=10_000, help="clients that are killed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    given = parser.parse_args()
    print(f"seed {given.seed}, on {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}", flush=True)
    failed = False
    for number in range(2):
        rounds = (given.rounds + 1 - number) // 2
        if not rounds:
            continue
        with TemporaryDirectory(dir="/dev/shm") as directory:
            file = None if number else Path(directory) / "pool"
            report = run_rounds(rounds, given.seed + number, file, _print_progress)
        print(report, flush=True)
        failed = failed or bool(report.problems)
        print(*report.problems, sep="\n")
    if given.cycles:
        print(*measure_cycles(given.cycles, given.seed))
    return int(failed)


def _print_progress(number: int) -> None:
    if number % PRINT_EVERY == 0:
        print(f"  round {number}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
