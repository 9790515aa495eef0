"""``python -m tests.bench.foreign_simulators TRACE...``: hits by simulators of others, beside ``trace replay``'s.

kvcache-simulator (KVCache.AI) and AIPerf's ``analyze-trace`` (NVIDIA) are run by their commands. They come from PyPI,
into an environment of their own:

    python3.11 -m venv .venv-simulators
    .venv-simulators/bin/pip install kvcache-simulator==0.1.3 aiperf==0.13.0
    python -m tests.bench.foreign_simulators TRACE... --bin .venv-simulators/bin

kvcache-simulator needs a C++ compiler. A trace is in Mooncake's format, one request a line, with blocks of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.simulate.optimum import optimum_percent, uses_of
from kvoffd.simulate.replay import GIVER, LEASE, SESSION, STEP_TOKENS, FoundPrefix, replay, serve
from kvoffd.simulate.tiers import SimulatedTiers
from kvoffd.simulate.trace import MOONCAKE_TOKENS, RequestTrace, read_trace
from tests.bench.report_file import markdown_table, print_report, run_facts

BLOCKS = 100, 300, 1000, 2000, 4000, 8000, 16000, 32000, 64000
MODEL = "llama-3.1-8b", "bf16_fp16"
"""Model and precision for kvcache-simulator, in which a block of 512 tokens has 64 MiB."""
BLOCKS_PER_GIB = 16
FILLER = 1 << 48
"""Number of the first block of the requests before a trace."""
STATISTICS = ("mean", "std_dev", "min", "p25", "median", "p75", "max")
EQUAL_TO = 1e-9
"""Largest difference of two sums of the same floating-point numbers in another order."""
TEXT = """\
kvcache-simulator counts tokens of the last half of the requests. To have it count blocks of all requests, it got the
trace with a weight of one for each block, after as many requests whose blocks nobody asks for again: they fill the
cache, and go first. *As it prints* is without both.

* **kvoffd lru**: what `kvoffd-cli trace replay --policy lru` counts.
* **at once**: the same replay, but a prompt's new blocks are stored at once, the last one first, where an engine stores
  them in steps of {step_tokens:,} tokens, and each step is newer than the one before.
* **prompt last**: the same replay, but after each request all blocks of its prompt become the newest, the last one
  first. So a block is never newer than what it follows, as in a cache that evicts leaves of a tree only. Both show what
  the difference comes from, and are no settings.
* **possible**: `trace replay`'s column, in blocks.
* *as it prints*: hits in percent of tokens, of the last half of the requests, with the trace as it is. **kvoffd, in the
  same measure** is `prompt last` in percent of the same tokens of the same requests. `-`: kvcache-simulator leaves the
  size out, because the cache is not full after half of the requests.
* `analyze-trace` has a cache without end. Its statistics are of the hit rates of requests, each with the same weight.
"""


class Found(NamedTuple):
    """What a simulator counts at one size: hits, in blocks or tokens, and of how many."""

    lru: int
    optimal: int
    total: int


class Lengths(NamedTuple):
    """Tokens and blocks of a trace's requests."""

    tokens: list[int]
    blocks: list[list[int]]

    @classmethod
    def read(cls, path: Path, requests: int) -> Lengths:
        lines = [json.loads(line) for line in path.read_text().splitlines()[:requests]]
        return cls([line["input_length"] for line in lines], [line["hash_ids"] for line in lines])

    def tokens_of(self, number: int, hits: int) -> int:
        """Return the tokens of a request's first ``hits`` blocks, of which the last may not be full."""
        return min(self.tokens[number], hits * MOONCAKE_TOKENS)


def make_prompt_last(cache: Cache, namespace: Namespace, keys: bytes) -> None:
    """Make all blocks of a prompt the newest, the last one first."""
    cache.lookup(namespace, SESSION, LEASE, [(0, keys)], giver=GIVER)
    cache.prompts.report()
    cache.leases.end(SESSION, [LEASE])


def own_hits(trace: RequestTrace, blocks: int, *, at_once: bool = False, prompt_last: bool = False) -> list[int]:
    """Return the hits of each request in a replay with the policy ``lru``.

    ``at_once``: a prompt's new blocks are stored in one step. ``prompt_last``: ``make_prompt_last`` after each request.
    """
    hits: list[int] = []

    def counted(
        cache: Cache, namespace: Namespace, keys: bytes, below: SimulatedTiers | None = None, step_blocks: int = 2**30
    ) -> FoundPrefix:
        found = serve(cache, namespace, keys, below, step_blocks)
        hits.append(found.hits)
        if prompt_last:
            make_prompt_last(cache, namespace, keys)
        return found

    step_tokens = sys.maxsize if at_once else STEP_TOKENS
    with patch.multiple("kvoffd.simulate.replay", serve=counted, STEP_TOKENS=step_tokens):
        found = replay(trace, "lru", blocks)
    assert sum(hits) == found.hits, "hits of requests do not add up"
    return hits


def write_weighed(lengths: Lengths, most: int, file: Path) -> None:
    """Write a trace for kvcache-simulator: a block weighs one, and as many requests before fill ``most`` blocks."""
    count = len(lengths.blocks)
    each = -(-most // count)
    filler = (range(FILLER + at * each, FILLER + (at + 1) * each) for at in range(count))
    with file.open("w") as lines:
        for ids in (*map(list, filler), *lengths.blocks):
            line = {"hash_ids": ids, "input_length": len(ids), "block_tokens": [1] * len(ids)}
            lines.write(json.dumps(line | {"block_size": MOONCAKE_TOKENS}) + "\n")


def run_simulator(program: Path, trace: Path, sizes: Sequence[int], requests: int = 0) -> dict[int, Found]:
    """Run kvcache-simulator over a trace; return what it counts by size, and what an endless cache has by size 0."""
    model, precision = MODEL
    budgets = ",".join(str(blocks / BLOCKS_PER_GIB) for blocks in sizes)
    command = [str(program), "run", "--trace", str(trace), "--block-size", str(MOONCAKE_TOKENS), "--model", model]
    command += ["--kv-precision", precision, "--budgets-gib", budgets, "--policies", "lru,optimal", "--format", "json"]
    command += ["--max-records", str(requests)]
    printed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    endless = printed["ceiling"]
    found = {0: Found(endless["hitTokens"], endless["hitTokens"], endless["totalTokens"])}
    for point in printed["points"]:
        lru, optimal = (point["results"][policy] for policy in ("lru", "optimal"))
        found[point["cacheBlocks"]] = Found(lru["hitTokens"], optimal["hitTokens"], lru["totalTokens"])
    return found


def run_analyze_trace(program: Path, trace: Path) -> dict[str, Any]:
    """Run AIPerf's ``analyze-trace``; return its report."""
    with TemporaryDirectory() as place:
        file = Path(place) / "report.json"
        command = [str(program), "analyze-trace", str(trace), "--block-size", str(MOONCAKE_TOKENS)]
        subprocess.run([*command, "--output-file", str(file)], check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(file.read_text())
    return report


def statistics_of(hits: Sequence[int], lengths: Lengths) -> dict[str, float]:
    """Return the statistics that ``analyze-trace`` has of the requests' hit rates."""
    rates = np.array(hits) / np.array([len(ids) for ids in lengths.blocks])
    quartiles = (float(np.percentile(rates, at)) for at in (0, 25, 50, 75, 100))
    return dict(zip(STATISTICS, (float(rates.mean()), float(rates.std()), *quartiles), strict=True))


def endless_table(report: dict[str, Any], endless: Found, hits: Sequence[int], lengths: Lengths) -> str:
    """Compare a pool that holds all blocks. ``hits``: of each request, by ``trace replay``."""
    total = sum(map(len, lengths.blocks))
    theirs, own = report["hit_rate_stats"], statistics_of(hits, lengths)
    distinct = len({block for ids in lengths.blocks for block in ids})
    rows = [["", "theirs", "kvoffd", "equal"]]

    def add(name: str, left: float, right: float, shown: Callable[[float], str]) -> None:
        rows.append([name, shown(left), shown(right), "yes" if abs(left - right) < EQUAL_TO else "NO"])

    def count(value: float) -> str:
        return f"{value:,.0f}"

    add("analyze-trace: requests", report["total_requests"], len(hits), count)
    add("analyze-trace: different blocks", report["unique_prefixes"], distinct, count)
    for name in STATISTICS:
        add(f"analyze-trace: hit rate, {name}", theirs[name], own[name], "{:.9f}".format)
    add("kvcache-simulator: hits, blocks", endless.lru, sum(hits), count)
    add("kvcache-simulator: blocks", endless.total, total, count)
    overall = f"{100 * sum(hits) / total:.2f} % of blocks are hits, as `trace replay` prints it."
    return f"{markdown_table(rows)}\n\n{overall}"


def tables(path: Path, trace: RequestTrace, lengths: Lengths, sizes: Sequence[int], commands: Path) -> Iterator[str]:
    """Yield the text of a trace's comparison."""
    simulator, total = commands / "kvcache-simulator", sum(map(len, lengths.blocks))
    with TemporaryDirectory() as place:
        weighed, part = Path(place) / "weighed.jsonl", Path(place) / path.name
        part.write_text("".join(path.read_text().splitlines(keepends=True)[: len(lengths.tokens)]))
        write_weighed(lengths, max(sizes), weighed)
        theirs = run_simulator(simulator, weighed, sizes)
        printed = run_simulator(simulator, part, sizes)
        report = run_analyze_trace(commands / "aiperf", part)
    yield f"## {trace.name}\n"
    yield f"{len(trace.requests):,} requests for {total:,} blocks of {MOONCAKE_TOKENS} tokens.\n"
    yield "### A pool of all blocks\n"
    yield endless_table(report, theirs[0], own_hits(trace, trace.accesses), lengths) + "\n"
    yield "### Pools: hits in blocks\n"
    rows = [["blocks", "lru: theirs", "kvoffd", "of theirs", "at once", "prompt last", "optimal: theirs", "possible"]]
    percents = [["blocks", "as it prints: lru %", "kvoffd, in the same measure", "`trace replay`, % of blocks"]]
    half, uses = len(lengths.blocks) // 2, uses_of(trace)
    for blocks in sizes:
        print(f"replaying: {trace.name}, {blocks:,} blocks", file=sys.stderr, flush=True)
        found, plain = theirs[blocks], sum(own_hits(trace, blocks))
        at_once, last = sum(own_hits(trace, blocks, at_once=True)), own_hits(trace, blocks, prompt_last=True)
        possible = round(optimum_percent(uses, blocks) * total / 100)
        share = f"{plain / found.lru:.2%}" if found.lru else "-"
        counts = found.lru, plain, share, at_once, sum(last), found.optimal, possible
        rows.append([f"{blocks:,}", *(one if isinstance(one, str) else f"{one:,}" for one in counts)])
        same, cell = sum(lengths.tokens_of(at, last[at]) for at in range(half, len(last))), "-"
        if of_half := printed.get(blocks):
            cell = f"{100 * of_half.lru / of_half.total:.2f} ({of_half.lru:,} tokens)"
        of_tokens = f"{100 * same / sum(lengths.tokens[half:]):.2f} ({same:,} tokens)"
        percents.append([f"{blocks:,}", cell, of_tokens if of_half else "-", f"{100 * plain / total:.2f}"])
    yield markdown_table(rows) + "\n"
    yield "### Pools: hits as it prints them\n"
    yield markdown_table(percents) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.foreign_simulators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="file of a trace, not compressed")
    parser.add_argument("--bin", type=Path, required=True, help="directory with kvcache-simulator and aiperf")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="sizes of the pool in blocks")
    parser.add_argument("--requests", type=int, default=1 << 62, help="only the first ones of each trace")
    given = parser.parse_args(arguments)
    facts = run_facts(f"python -m tests.bench.foreign_simulators {' '.join(arguments)}")
    for package in ("kvcache-simulator", "aiperf"):
        code = f"from importlib.metadata import version; print(version({package!r}))"
        facts[package] = subprocess.check_output([given.bin / "python", "-c", code], text=True).strip()
    sizes, pages = sorted(map(int, given.blocks.split(","))), []
    for path in given.traces:
        trace, lengths = read_trace(path), Lengths.read(path, given.requests)
        trace = trace._replace(requests=trace.requests[: given.requests], seconds=trace.seconds[: given.requests])
        pages.append("\n".join(tables(path, trace, lengths, sizes, given.bin)))
    print_report(
        "Hits of other simulators beside `trace replay`",
        facts,
        TEXT.format(step_tokens=STEP_TOKENS) + "\n" + "\n".join(pages),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
