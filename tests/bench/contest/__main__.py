"""A contest that anybody can run: vLLM's own prefix cache alone, kvoffd, and LMCache, by programs of others too.

The sides run real servers one after the other, with the same model, settings and prompts, in rounds of changing order.
``make contest`` builds .venv-contest and runs all; the page and its picture go to tests/bench/results.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.bench.contest import page
from tests.bench.contest.bench import (
    AGENTS,
    FULL,
    LMCACHE_BENCH,
    OPEN_TRACES,
    PARTS,
    QUICK,
    RESTARTS,
    STORE_BYTES_PER_S,
    STORE_DELAY_S,
    STORE_REFUSES,
    STORES,
    TRACES,
    Bench,
    Size,
    say,
)
from tests.bench.contest.caches import CONTEST_PYTHON as PYTHON
from tests.bench.contest.caches import LMCACHE, POOL_GIB, SIDES
from tests.bench.contest.engine import KV_TOKENS, MAX_RUNNING
from tests.bench.contest.model import make_model
from tests.bench.contest.rows import Row
from tests.bench.contest.traces import Slice
from tests.bench.report_file import ROOT, fact_text, run_facts
from tests.kit.engine import BLOCK_TOKENS

RESULTS = ROOT / "tests" / "bench" / "results"
ONCE = (AGENTS, LMCACHE_BENCH, RESTARTS, STORES)
"""Parts that run in the first round only: they take three quarters of the time."""
TRACE_HELP = """\
a recording of `kvoffd-cli trace record`, or a trace in Mooncake's format, replayed instead of the open traces; may be
repeated"""
TEXT = """\
Sides: `none` is vLLM's own prefix cache alone; `kvoffd` the daemon and the connector with their defaults; `lmcache`
LMCache's multiprocess server and connector with its defaults on a CPU (`engine_driven` over shared memory, chunks of
256 tokens). Each of the two has {pool} GiB of memory. vLLM's own OffloadingConnector refuses CPUs. Engines are vLLM's
OpenAI server: float32, greedy, eager, one OpenMP thread, blocks of {block} tokens, a KV cache of {kv:,} tokens,
{running} requests at a time. The model is a Llama with random weights. All caches are empty before each row unless its
name says otherwise.

* **seconds**: from the first request to the end of the last answer. **of none**: the mean of the rounds, as a part of
  that of `none`. Other columns are means of the rounds too.
* **first token**, **between tokens**: as the client saw them; of cache-pressure and `lmcache bench`, as they report
  them.
* **computed**, **own cache**, **outside**: prompts' tokens by source, by vLLM's `prompt_tokens_by_source`; they add up
  to all prompts' tokens.
* **CPU s**: of the engine's processes, and of the daemon or server, from /proc.
* **same tokens**: whether the answers are those of the workload's first row.
* The parts {once} run in the first round only.

`batch`: {prompts} prompts at once of {document} + {question} tokens about {documents} documents. `rollout`: {sampled}
prompts about a document of their own, {samples} answers each, each prompt twice. `timed_trace`: {requests} requests of
whole conversations of each trace in {trace_s:g} s, their lengths divided{slices}. cache-pressure and `lmcache bench`
have their sizes scaled to the KV cache (`programs.py`). The needles of `needle-test` need a model that was trained:
with random weights none can be found. Restarts: {long} prompts of {long_tokens:,} tokens one after the other, sent as
soon as the engine serves; both caches have a disk, a Redis, and kvoffd a pool file. Stores: {stored} prompts of the
batch, with an S3 behind {mb:g} MB/s, {refused:.0%} of 503 and {delay:g} ms more a request."""


def text(size: Size, slices: Mapping[str, Slice]) -> str:
    """Return what the page says of the sides, the columns and the workloads."""
    drawn = "; ".join(
        f" by {one.divisor} ({name}: {one.tokens:,} tokens, of which {one.repeated:,} repeat)"
        for name, one in slices.items()
    )
    return TEXT.format(
        pool=POOL_GIB,
        block=BLOCK_TOKENS,
        kv=KV_TOKENS,
        running=MAX_RUNNING,
        once=", ".join(ONCE[:-1]) + f" and {ONCE[-1]}",
        prompts=size.prompts,
        document=size.document_tokens,
        question=size.question_tokens,
        documents=size.documents,
        sampled=size.sampled,
        samples=size.samples,
        requests=size.trace_requests,
        trace_s=size.trace_s,
        slices=drawn,
        long=size.long_prompts,
        long_tokens=size.long_tokens,
        stored=size.stored_prompts,
        mb=STORE_BYTES_PER_S / 1e6,
        refused=STORE_REFUSES,
        delay=1000 * STORE_DELAY_S,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.contest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="a part; may be repeated (default: all)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"which sides (default {','.join(SIDES)})")
    parser.add_argument("--rounds", type=int, default=2, help="how often each side runs (default 2)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests: whether all of it runs")
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help=TRACE_HELP)
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="file to which rows are added; --rounds 0 makes its page",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page (default: one in tests/bench/results)")
    given = parser.parse_args()
    parts, sides = given.part or PARTS, given.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides has {', '.join(sorted(unknown))}; it may have {', '.join(SIDES)}")
    if LMCACHE in sides and not PYTHON.exists():
        parser.error(f"{PYTHON} is missing: run `make contest`, or leave lmcache out by --sides none,kvoffd")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    facts = run_facts(f"python -m tests.bench.contest {' '.join(sys.argv[1:])}".strip())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="contest-") as place:
        rows_file = (given.rows or Path(place) / "rows.jsonl").absolute()
        traces = {name: file for name, file in OPEN_TRACES.items() if file.exists()}
        if given.trace:
            traces = {file.name.partition(".")[0]: file for file in given.trace}
        model = make_model(Path(place) / "model", quick=given.quick)
        bench = Bench(model, QUICK if given.quick else FULL, lambda row: row.append(rows_file), traces)
        try:
            for number in range(given.rounds):
                for side in sides[:: -1 if number % 2 else 1]:
                    bench.run(side, [part for part in parts if not number or part not in ONCE], number + 1)
            slices = {name: bench.slice(name) for name in traces} if TRACES in parts else {}
        finally:
            bench.close()
        shown = {name: fact_text(fact) for name, fact in facts.items()}
        shown["versions"] = fact_text(page.versions())
        shown["minutes"] = f"{(time.monotonic() - began) / 60:.0f}"
        shown["load at the end"] = f"{os.getloadavg()[0]:.1f}"
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        written = given.page or RESULTS / f"{date}-contest-cpu.md"
        page.write(written, rows_file, shown, text(QUICK if given.quick else FULL, slices))
        lost = [row for row in Row.read(rows_file) if row.lost]
    say(f"{written}, {len(lost)} rows lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
