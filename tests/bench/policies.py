"""``python -m tests.bench.policies TRACE...``: policies of kvoffd next to those of libCacheSim (in PyPI: libcachesim).

kvoffd's are replayed through the daemon's own cache, as by ``kvoffd-cli trace replay``. libCacheSim's get the same
requests for blocks in the order in which the daemon's policy gets them (``Reference``), and hits are counted alike: a
request's blocks before the first that is not there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.policies import make_policy
from kvoffd.cache.policy import Policy
from kvoffd.simulate.optimum import optimum_percent, uses_of
from kvoffd.simulate.replay import STEP_TOKENS, replay
from kvoffd.simulate.trace import RequestTrace, read_trace
from tests.bench.report_file import markdown_table, print_report, run_facts

BLOCKS = 1000, 2000, 4000, 8000, 16000, 32000
NAMES = {
    "LRU": "LRU",
    "ARC": "ARC",
    "SIEVE": "Sieve",
    "S3-FIFO": "S3FIFO",
    "W-TinyLFU": "WTinyLFU",
    "LIRS": "LIRS",
    "second sight": "LRU",
}
"""Policies of libCacheSim and their classes. Second sight is an LRU behind an admission of what was seen before."""


TIMED = "requested", "insert", "remove", "first", "admit", "rejected", "chance"
"""Methods of kvoffd's policies that a replay calls."""


class Found(NamedTuple):
    policy: str
    blocks: int
    hits: int
    written: int
    seconds: float
    in_policy: float
    """Seconds of them in calls of the policy, where they are known."""


class Reference:
    """A policy of libCacheSim, in which each block has size 1.

    A request is a lookup, then a store, as ``kvoffd.simulate.replay`` has them: blocks that are there are used from
    the last to the first, then the others are stored by steps of the engine, the last of each step first.

    Args:
        keeps_order: use the blocks before a step again after it, so that a request has one order however many steps it
            takes, as kvoffd's ``lru`` does. Other policies count uses.
    """

    def __init__(self, name: str, blocks: int, tokens_per_block: int, keeps_order: bool = False) -> None:
        import libcachesim

        behind = {"admissioner": libcachesim.BloomFilterAdmissioner()} if name == "second sight" else {}
        self._cache = getattr(libcachesim, NAMES[name])(blocks, hashpower=18, **behind)
        self._request: Callable[..., Any] = libcachesim.Request
        self._step_blocks = max(1, STEP_TOKENS // max(1, tokens_per_block))
        self._keeps_order = keeps_order
        self.hits = self.written = 0

    def ask(self, keys: Sequence[int]) -> None:
        cache, requests = self._cache, [self._request(obj_id=key + 1, obj_size=1) for key in keys]
        present = [cache.find(request, update_cache=False) is not None for request in requests]
        self.hits += present.index(False) if False in present else len(present)
        absent = [index for index, is_present in enumerate(present) if not is_present]
        self._get(
            request for request, is_present in zip(reversed(requests), reversed(present), strict=True) if is_present
        )
        for begin in range(0, len(absent), self._step_blocks):
            step = absent[begin : begin + self._step_blocks]
            self._get(requests[index] for index in reversed(step))
            if self._keeps_order:
                before = reversed(requests[: step[0]])
                self._get(request for request in before if cache.find(request, update_cache=False) is not None)

    def _get(self, requests: Iterable[Any]) -> None:
        """Use or store blocks. LIRS may evict at a use, and miss the next block of the same request."""
        for request in requests:
            if not self._cache.get(request):
                self.written += self._cache.find(request, update_cache=False) is not None


def replay_reference(trace: RequestTrace, name: str, blocks: int, keeps_order: bool = False) -> Found:
    requests = [np.frombuffer(keys, ">u8").tolist() for keys in trace.requests]
    reference, began = Reference(name, blocks, trace.tokens_per_block, keeps_order), time.perf_counter()
    for keys in requests:
        reference.ask(keys)
    return Found(name, blocks, reference.hits, reference.written, time.perf_counter() - began, nan)


def replay_own(trace: RequestTrace, name: str, blocks: int) -> Found:
    in_policy = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            nonlocal in_policy
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                in_policy += time.perf_counter() - began

        return called

    def make(*arguments: Any) -> Policy:
        made = make_policy(*arguments)
        for method in TIMED:
            setattr(made, method, timed(getattr(made, method)))
        return made

    with patch("kvoffd.simulate.replay.make_policy", make):
        began = time.perf_counter()
        found = replay(trace, name, blocks)
        return Found(name, blocks, found.hits, found.written, time.perf_counter() - began, in_policy)


def cut(trace: RequestTrace, requests: int) -> RequestTrace:
    """Return the first requests of a trace."""
    return trace._replace(requests=trace.requests[:requests], seconds=trace.seconds[:requests], hints=())


def tables(trace: RequestTrace, sizes: Sequence[int], own: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    found = [replay_own(trace, name, blocks) for name in own for blocks in sizes]
    found += [replay_reference(trace, name, blocks) for name in others for blocks in sizes]
    rows = [["policy", *(f"{blocks:,}" for blocks in sizes), "µs for a block", "in the policy"]]
    for number, name in enumerate([*own, *others]):
        mine = found[number * len(sizes) : (number + 1) * len(sizes)]
        cells = [f"{100 * one.hits / trace.accesses:.2f} ({100 * one.written / trace.accesses:.1f})" for one in mine]
        each, in_policy = (
            1e6 * sum(seconds) / len(sizes) / trace.accesses
            for seconds in ([one.seconds for one in mine], [one.in_policy for one in mine])
        )
        times = f"{each:.1f}", "" if isnan(in_policy) else f"{in_policy:.2f}"
        rows.append([f"{name}, kvoffd" if name in own else name, *cells, *times])
    uses = uses_of(trace)
    rows.append(["the optimum", *(f"{optimum_percent(uses, blocks):.2f}" for blocks in sizes), "", ""])
    yield f"## {trace.name}\n"
    yield f"{len(trace.requests):,} requests for {trace.accesses:,} blocks of {trace.tokens_per_block} tokens.\n"
    yield markdown_table(rows) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policies", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="file of a trace")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="sizes of the pool in blocks")
    parser.add_argument("--requests", type=int, default=1 << 62, help="replay only the first ones of each trace")
    parser.add_argument("--policies", default=",".join((*POLICY_NAMES, *NAMES)))
    chosen = parser.parse_args(arguments)
    facts = run_facts(f"python -m tests.bench.policies {' '.join(arguments)}")
    names, sizes = chosen.policies.split(","), [int(blocks) for blocks in chosen.blocks.split(",")]
    own, others = [name for name in names if name in POLICY_NAMES], [name for name in names if name in NAMES]
    if others:
        facts["libcachesim"] = version("libcachesim")
    pages = ["\n".join(tables(cut(read_trace(path), chosen.requests), sizes, own, others)) for path in chosen.traces]
    print_report("Policies next to those of libCacheSim", facts, "\n".join(pages))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
