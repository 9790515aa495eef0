"""What every policy makes of traces and of made-up traffic, and how true the hit-ratio curve is.

`python -m tests.bench.policies TRACE...` writes kvoffd/cache/POLICIES.md. The traces are no part of kvoffd: Mooncake's,
or what kvoffd-cli record wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.curve import SIZES, HitRatioCurve
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import Chain, Group
from kvoffd.simulate.replay import replay
from kvoffd.simulate.trace import KEY_BYTES, Trace, read_trace
from kvoffd_proto.messages import GroupSpec
from tests.kit.made_up_loads import LOADS, Traffic

PAGE = Path(__file__).parents[2] / "kvoffd" / "cache" / "POLICIES.md"
BLOCKS = (1000, 2000, 4000, 8000, 16000, 32000)
POOLS = (1000, 16000)
"""Of which the curve is made."""
SMALL_TOKENS = 16
NOTHING: BlockIds = np.empty(0, np.uint32)
BLOCK_BYTES = 1 << 20
MADE_REQUESTS = 6000
PARTS = (24, 8, 3)
"""Of made-up traffic's different blocks, one of so many has room in the pool."""

HEAD = """# What the policies make of traces

Token hit ratio in %, and in brackets the share of the blocks asked for that is written, by the size of the pool in
blocks of the trace, through the daemon's own cache; the optimum is Belady's with bypass. Written by `python -m
tests.bench.policies TRACE...`, here on the traces of Mooncake's FAST'25 release (an hour of chat,
`conversation_trace`, and `synthetic_trace`), which are no part of kvoffd.

Aimed at on `conversation_trace` were 8.5, 12, 17, 22.5, 29 and 34.5 % with `learned`, and 12 % written at 2,000
blocks; what had to be reached were 8.0, 11.2, 15.9, 21.2, 28.1 and 33.9 %, and 20 %.
"""

MADE = """
## Made-up traffic

Token hit ratio in % with `learned`, and with `lru`, by the part of all different blocks that the pool has room for; in
brackets the blocks asked for, in pools. {requests:,} requests of each kind, of `tests/kit/made_up_loads.py`.

| traffic | {parts} |
|---|{lines}
"""

CURVE = """
## The hit-ratio curve

The daemon estimates what an LRU would find in pools from a tenth to ten times the size, for `kvoffd-cli top` and
`doctor`. Here it has watched a whole trace. Its worst error over all these sizes, against replays with the policy
`lru`, is in percentage points. The sample is drawn anew at each start, so other runs differ.
`tests/cache/test_curve.py` allows 1.5.

| trace | pool, blocks | blocks of the trace | the same in blocks of 16 tokens |
|---|---|---|---|
"""


def simulated(path: Path, policies: str, blocks: Sequence[int]) -> list[dict[str, float | str]]:
    """The results of ``kvoffd-cli trace replay``."""
    words = ["--policy", policies, "--blocks", ",".join(map(str, blocks)), "--json", "--", str(path)]
    told = subprocess.run([sys.executable, "-m", "kvoffd.simulate.command", *words], check=True, stdout=subprocess.PIPE)
    found: list[dict[str, float | str]] = json.loads(told.stdout)["results"]
    return found


def policy_table(path: Path, trace: Trace) -> Iterator[str]:
    results = simulated(path, "all", BLOCKS)
    yield f"\n## {trace.name}\n"
    yield f"{len(trace.requests):,} requests for {trace.accesses:,} blocks of {trace.tokens_per_block} tokens.\n"
    yield f"| policy | {' | '.join(f'{blocks:,}' for blocks in BLOCKS)} |"
    yield f"|---|{'---|' * len(BLOCKS)}"
    for policy in dict.fromkeys(one["policy"] for one in results):
        cells = [
            f"{one['hit_percent']:.1f} ({one['written_percent']:.0f})" for one in results if one["policy"] == policy
        ]
        yield f"| {policy} | {' | '.join(cells)} |"
    best = [f"{one['optimum_percent']:.1f}" for one in results if one["policy"] == results[0]["policy"]]
    yield f"| the optimum | {' | '.join(best)} |"


def made_trace(name: str) -> Trace:
    requests = islice(LOADS[name](Traffic(1)), MADE_REQUESTS)
    return Trace(name, 512, [b"".join(key.to_bytes(KEY_BYTES, "big") for key in keys) for keys in requests])


def made_table() -> Iterator[str]:
    yield MADE.format(
        requests=MADE_REQUESTS, parts=" | ".join(f"1/{part}" for part in PARTS), lines="---|" * len(PARTS)
    ).rstrip("\n")
    for name in LOADS:
        trace = made_trace(name)
        different = {keys[at : at + KEY_BYTES] for keys in trace.requests for at in range(0, len(keys), KEY_BYTES)}
        cells = []
        for part in PARTS:
            blocks = max(1, len(different) // part)
            learned, lru = (replay(trace, policy, blocks).hit_percent for policy in ("learned", "lru"))
            cells.append(f"{learned:.1f}, {lru:.1f} ({trace.accesses / blocks:.0f})")
        yield f"| {name} | {' | '.join(cells)} |"


def split(trace: Trace, parts: int) -> Trace:
    """A trace, each block cut into parts."""
    requests = []
    for keys in trace.requests:
        ids = [int.from_bytes(keys[at : at + KEY_BYTES], "big") * parts for at in range(0, len(keys), KEY_BYTES)]
        requests.append(b"".join((one + part).to_bytes(KEY_BYTES, "big") for one in ids for part in range(parts)))
    return Trace(trace.name, trace.tokens_per_block // parts, requests)


def curve_of(trace: Trace, pool: int, cut: int) -> list[float]:
    """The curve in %, where each block of the trace is ``cut`` smaller ones."""
    curve = HitRatioCurve(pool * BLOCK_BYTES, lambda: 0.0)
    small = split(trace, cut)
    namespace = Namespace(bytes(32), trace.name, 1, KEY_BYTES, [GroupSpec("full", small.tokens_per_block)], "{}")
    group = Group(1, namespace, 0, KEY_BYTES, [BLOCK_BYTES // cut], [BLOCK_BYTES // cut])
    for keys in small.requests:
        curve.requested([Chain(group, keys, NOTHING)])
    return [100 * ratio for ratio in curve.in_all().lru_hit_ratio.values()]


def curve_rows(path: Path, trace: Trace) -> Iterator[str]:
    for pool in POOLS:
        sizes = [round(pool * size) for size in SIZES]
        truth = [float(one["hit_percent"]) for one in simulated(path, "lru", sizes)]
        errors = [
            max(abs(found - true) for found, true in zip(curve_of(trace, pool, cut), truth, strict=True))
            for cut in (1, max(1, trace.tokens_per_block // SMALL_TOKENS))
        ]
        yield f"| {trace.name} | {pool:,} | {errors[0]:.2f} | {errors[1]:.2f} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policies", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="file of a trace")
    traces = {path: read_trace(path) for path in parser.parse_args(arguments).traces}
    lines = [line for path, trace in traces.items() for line in policy_table(path, trace)] + list(made_table())
    rows = [row for path, trace in traces.items() for row in curve_rows(path, trace)]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + CURVE + "\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
