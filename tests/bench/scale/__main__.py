"""What blocks cost by their number: memory, lookups, stores, the first hit after a restart.

``python -m tests.bench.scale``. Each size is measured in processes of its own, over a pool whose pages are never
touched: slots of 8 KiB, the smallest there are. It needs 10 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvoffd.cache import DEFAULT_POLICY, POLICY_NAMES
from kvoffd.memory_estimate import SLOT_BYTES
from tests.bench.report_file import (
    ROOT,
    add_report_options,
    markdown_table,
    number,
    percentile,
    publish_report,
    run_facts,
)
from tests.bench.scale.fill import fill
from tests.bench.scale.restart import restart

CASES = "10000x1,100000x1,1000000x1,5000000x1,10000x8,100000x8,1000000x8"
PARTS: dict[str, Callable[[int, int, str, int], dict[str, object]]] = {"fill": fill, "restart": restart}
SHARD_BYTES = 32
"""What each further shard of a block may take; the first is ``memory_estimate``'s."""
Result = dict[str, Any]


def child(part: str, case: str, policy: str = DEFAULT_POLICY, samples: int = 300) -> Result:
    """What a part finds in a process of its own."""
    print(f"measuring: {part} {case}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tests.bench.scale", "--inside", part, "--cases", case, "--policy", policy]
    done = subprocess.run([*command, "--samples", str(samples)], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    found: Result = json.loads(done.stdout)
    return found


def bound_of(shards: int) -> int:
    """Bytes that a block may take."""
    return SLOT_BYTES + SHARD_BYTES * (shards - 1)


def page(results: dict[str, list[Result]]) -> str:
    """All tables, with what they mean."""
    memory = [["blocks", "shards", "filled", "again", "of it the policy", "allowed", "ghosts"]]
    times = [["blocks", "shards", "answer p50", "p99", "lookup p50", "p99", "store p50", "p99"]]
    restarts = [["blocks", "shards", "serves, s", "first hit, s", "lookup p50, µs", "p99", "memory"]]
    for one in results["fill"]:
        case, churned = _case(one), one["churned"]
        sizes = (one["filled"]["without_ghosts"], churned["without_ghosts"], churned["policy"])
        memory.append([*case, *map(number, sizes), str(bound_of(one["shards"])), f"{churned['ghosts']:,}"])
        times.append([*case, *_us(one["answer_seconds"]), *_us(one["lookup_seconds"]), *_us(one["store_seconds"])])
    for one in results["restart"]:
        seconds = number(one["open_seconds"]), number(one["first_hit_seconds"])
        mib = f"{one['private_bytes'] / 2**20:,.0f} MiB"
        restarts.append([*_case(one), *seconds, *_us(one["answer_seconds"]), mib])
    return "\n".join(
        [
            "## What a block costs in memory\n",
            "Private memory of a process with the daemon's cache, over what it had before the first block, in bytes of "
            "a block. The slot table's 128 bytes a shard are not in it, nor are ghosts, keys without blocks. *Again* "
            "is after as many blocks more, for which others were evicted.\n",
            markdown_table(memory),
            "\n## Lookups and stores\n",
            "In µs, in the same process, without sockets and copies: a lookup of 1,000 keys that are all ready, until "
            "its answer and with all that follows it; one rank's store of 64 new blocks into a full pool, from keys "
            "to blocks that are ready, with the evictions for them.\n",
            markdown_table(times),
            "\n## The first hit after a restart\n",
            "A daemon process that gets a full pool from its service manager, from its start on: until a lookup finds "
            "the 1,000 blocks that were stored last; lookups afterwards, over the socket, and the process's private "
            "memory. The pool has no pages: touching it and reading it for its checksums is left out.\n",
            markdown_table(restarts),
        ]
    )


def _case(one: Result) -> list[str]:
    return [f"{one['blocks']:,}", str(one["shards"])]


def _us(seconds: Sequence[float]) -> list[str]:
    return [number(1e6 * percentile(seconds, share)) if seconds else "" for share in (0.5, 0.99)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--cases", default=CASES, help=f"BLOCKSxSHARDS, with commas (default {CASES})")
    parser.add_argument("--policy", default=DEFAULT_POLICY, choices=POLICY_NAMES)
    parser.add_argument("--samples", type=int, default=300, help="lookups, and stores")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    add_report_options(parser)
    given = parser.parse_args(arguments)
    if given.inside:
        blocks, _, shards = given.cases.partition("x")
        print(json.dumps(PARTS[given.inside](int(blocks), int(shards), given.policy, given.samples)))
        return 0
    cases = given.cases.split(",")
    found = {part: [child(part, case, given.policy, given.samples) for case in cases] for part in PARTS}
    command = f"python -m tests.bench.scale {' '.join(arguments)}".strip()
    facts = run_facts(command, load_average=round(os.getloadavg()[0], 1))
    publish_report(given, "What blocks cost by their number", facts, found, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
