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
    effort = Effort(
        options.rounds, options.samples, options.starts, options.idle_seconds, options.others_share, options.patience
    )
    comparison = Comparison(options.lmcache_python, effort, lambda text: print(f"{text} ...", file=sys.stderr))
    try:
        comparison.run()
    except (ClientFailed, Disturbed, ServerFailed) as failure:
        print(failure, file=sys.stderr)
        return 1
    facts = run_facts(_command(options, effort)) | {
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
    parser.add_argument("--starts", type=int, default=effort.starts, help="starts of each server, and floods")
    parser.add_argument("--idle-seconds", type=float, default=effort.idle_s, help="how long idling is watched")
    parser.add_argument(
        "--others-share", type=float, default=effort.others_share, help="of all cores, what others may use in a round"
    )
    parser.add_argument("--patience", type=int, default=effort.patience, help="rounds that may be done again")
    parser.add_argument("--note", default="", help="how the machine was made ready, for the results")
    add_report_options(parser)
    return parser.parse_args()


def _command(options: argparse.Namespace, effort: Effort) -> str:
    """How to measure the same again. Where things were on this machine is nobody's business elsewhere."""
    defaults = vars(Effort())
    names = {"starts": "starts", "rounds": "rounds", "samples": "samples", "idle_s": "idle-seconds"}
    names |= {"others_share": "others-share", "patience": "patience"}
    changed = [f"--{names[name]} {value:g}" for name, value in vars(effort).items() if value != defaults[name]]
    changed += ["--json"] if options.json else []
    return "make bench-peers" + (f' ARGS="{" ".join(changed)}"' if changed else "")


if __name__ == "__main__":
    sys.exit(main())
