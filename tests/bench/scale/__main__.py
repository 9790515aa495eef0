"""What blocks cost by their number: memory, lookups, stores, the first hit after a restart.

``python -m tests.bench.scale``. Each size is measured in processes of its own,
over a pool whose pages are never touched: slots of 8 KiB, the smallest there are. It needs 10 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvoffd.cache import DEFAULT_POLICY, POLICY_NAMES
from tests.bench.report_file import ROOT, add_report_options, publish_report, run_facts
from tests.bench.scale.page import page

CASES = "10000x1,100000x1,1000000x1,5000000x1,10000x8,100000x8,1000000x8"
PARTS = ("fill", "restart")
TITLE = "What blocks cost by their number"


def child(part: str, *arguments: str) -> list[dict[str, Any]]:
    """What one of the programs beside this one prints."""
    print(f"measuring: {part} {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"tests.bench.scale.{part}", *arguments]
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    )
    return found


def measure(cases: Sequence[str], parts: Sequence[str], policy: str) -> dict[str, Any]:
    """All parts of all cases, each ``BLOCKSxSHARDS``."""
    results: dict[str, Any] = {"fill": [], "restart": []}
    chosen = ["--policy", policy]
    for case in cases:
        for part in ("fill", "restart"):
            if part in parts:
                results[part] += child(part, case, *chosen)
    return results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--cases", default=CASES, help=f"BLOCKSxSHARDS, with commas (default {CASES})")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--policy", default=DEFAULT_POLICY, choices=POLICY_NAMES)
    add_report_options(parser)
    given = parser.parse_args(arguments)
    cases, parts = ([word for word in text.split(",") if word] for text in (given.cases, given.parts))
    found = measure(cases, parts, given.policy)
    facts = run_facts(
        f"python -m tests.bench.scale {' '.join(arguments)}".strip(),
        load_average=round(os.getloadavg()[0], 1),
    )
    publish_report(given, TITLE, facts, found, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
