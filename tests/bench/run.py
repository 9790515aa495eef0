"""Starts a daemon, runs all benches against it, stops it: what ``make bench`` does.

python tests/bench/run.py [--json] [--pool-size 1GiB] [lookup|copy|jobs ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.daemon import DaemonProcess

BENCHES = ("lookup", "copy", "jobs")


def main() -> int:
    """Run the benches through ``kvoffd-cli``, as a user would; return the first status that is not 0."""
    parser = argparse.ArgumentParser(description="Measure kvoffd on this machine.")
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"any of {', '.join(BENCHES)} [default: all]")
    parser.add_argument("--json", action="store_true", help="print one object per bench and line")
    parser.add_argument("--pool-size", default="1GiB", help="pool of the daemon [default: 1GiB]")
    given = parser.parse_args()
    wanted = given.benches or BENCHES
    if unknown := [name for name in wanted if name not in BENCHES]:
        parser.error(f"there is no bench {unknown[0]!r}; choose from {', '.join(BENCHES)}")
    with DaemonProcess(pool_size=given.pool_size) as daemon:
        command = [sys.executable, "-c", "import sys; from kvoffd_client.cli import main; sys.exit(main())", "bench"]
        flags = ["--directory", str(daemon.directory), *(["--json"] if given.json else [])]
        for index, name in enumerate(wanted):
            if index and not given.json:
                print(flush=True)
            if status := subprocess.run([*command, name, *flags], check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
