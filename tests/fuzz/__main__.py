"""Coverage-guided fuzzing of every decoder, what `make fuzz` runs.

Each input that breaks a promise is written to .fuzz/TARGET.crash-*, and how to run it again is printed. The inputs that
reached something new stay in .fuzz/TARGET/ and are where the next run begins.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import DECODERS

WORK = Path(".fuzz")
LIMITS = ("-max_len=4096", "-rss_limit_mb=2048", "-timeout=25", "-print_final_stats=1", "-close_fd_mask=1")


def fuzz(target: str, seconds: int) -> bool:
    """Fuzz one target until the time is over; whether its promises held."""
    corpus = WORK / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    again = [sys.executable, "-m", "tests.fuzz.guided", target]
    command = [*again, str(corpus), f"-artifact_prefix={WORK}/{target}.", f"-max_total_time={seconds}", *LIMITS]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    inputs = re.search(r"number_of_executed_units:\s*(\d+)", run.stderr)
    print(f"{target:<18}{inputs[1] if inputs else '?':>12} inputs  {'BROKE' if run.returncode else 'held'}", flush=True)
    if run.returncode:
        crash = re.search(r"Test unit written to (\S+)", run.stderr)
        print(*run.stderr.splitlines()[-40:], f"    {' '.join(again)} {crash[1] if crash else ''}", sep="\n")
    return run.returncode == 0


def main() -> int:
    """Run the command line. Returns 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(DECODERS)}; all by default")
    parser.add_argument("--seconds", type=int, default=30, help="for each target [30]")
    options = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return int(not all(list(pool.map(lambda target: fuzz(target, options.seconds), options.targets or DECODERS))))


if __name__ == "__main__":
    sys.exit(main())
