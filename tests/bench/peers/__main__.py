"""kvoffd and LMCache's multiprocess server, the same work on the same machine: ``python -m tests.bench.peers``.

Started by ``make bench-peers``; README.md beside this file says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median

from tests.bench.peers.client import ClientFailed
from tests.bench.peers.compare import Comparison, Disturbed, Effort, load_average
from tests.bench.peers.servers import ServerFailed
from tests.bench.peers.table import table
from tests.bench.report_file import ROOT, add_report_options, number, publish_report, run_facts

PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"


def main() -> int:
    """Compare, print, save; 0 when all was measured."""
    options = _options()
    if not (options.lmcache_python.parent / "lmcache").exists():
        print(f"There is no LMCache in {options.lmcache_python.parent}; `make bench-peers` builds it.", file=sys.stderr)
        return 2
    before = load_average()
    effort = Effort(options.rounds, options.samples, options.others_share, options.patience)
    comparison = Comparison(options.lmcache_python, effort, lambda text: print(f"{text} ...", file=sys.stderr))
    try:
        comparison.run()
    except (ClientFailed, Disturbed, ServerFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    facts = run_facts(f"python -m tests.bench.peers {' '.join(sys.argv[1:])}") | {
        "load_average": {"before": before, "after": load_average()},
        "priority": f"nice {os.getpriority(os.PRIO_PROCESS, 0)}" + (f", {options.note}" if options.note else ""),
        "effort": vars(effort),
        "others": {
            "share of all cores, median": number(median(comparison.shares)),
            "most": number(max(comparison.shares)),
            "rounds done again": comparison.disturbed,
        },
        "sides": comparison.facts,
        "servers": comparison.commands,
    }
    results: dict[str, object] = {"results": [row.to_object() for row in comparison.rows]}
    publish_report(options, "kvoffd and LMCache's multiprocess server", facts, results, table(comparison.rows))
    return 0


def _options() -> argparse.Namespace:
    effort = Effort()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lmcache-python", type=Path, default=PYTHON, help="Python of LMCache's environment")
    parser.add_argument("--rounds", type=int, default=effort.rounds, help="counted rounds")
    parser.add_argument("--samples", type=int, default=effort.samples, help="lookups in a round")
    parser.add_argument(
        "--others-share", type=float, default=effort.others_share, help="of all cores, what others may use in a round"
    )
    parser.add_argument("--patience", type=int, default=effort.patience, help="rounds that may be done again")
    parser.add_argument("--note", default="", help="how the machine was made ready, for the results")
    add_report_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
