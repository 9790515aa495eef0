"""``kvoffd simulate``: replays a trace with several policies and pool sizes, on several cores."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from kvoffd.cache.policies import POLICY_NAMES
from kvoffd.simulate.optimum import optimum_percent
from kvoffd.simulate.replay import Replayed, replay
from kvoffd.simulate.trace import BadTrace, Trace, read_trace

ALL = "all"
BAR_CELLS = 50


class Result(NamedTuple):
    """What one policy made of the trace, and what could have been made of it."""

    replayed: Replayed
    optimum_percent: float


def simulate(given: argparse.Namespace) -> int:
    """Run ``kvoffd simulate``. Raises ValueError with a sentence, OSError."""
    policies, sizes = _policies(given.policy), _sizes(given.blocks)
    trace = read_trace(given.file)
    if not trace.accesses:
        raise BadTrace(f"{given.file} has no request; give a trace in Mooncake's format.")
    results = _run(trace, policies, sizes)
    if given.json:
        print(json.dumps(_as_json(trace, results), indent=2))
    else:
        print(_as_table(trace, results), end="")
    if given.plot:
        print(_as_plot(results), end="", file=sys.stderr if given.json else sys.stdout)
    return 0


def _policies(text: str) -> list[str]:
    names = list(POLICY_NAMES) if text == ALL else text.split(",")
    if unknown := [name for name in names if name not in POLICY_NAMES]:
        raise ValueError(f"There is no policy {unknown[0]!r}; choose of {', '.join(POLICY_NAMES)}, or {ALL}.")
    return list(dict.fromkeys(names))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(f"--blocks {text!r} is no list of numbers of blocks; give some as in 1000,2000.")
    return list(dict.fromkeys(sizes))


def _run(trace: Trace, policies: Sequence[str], sizes: Sequence[int]) -> list[Result]:
    """Replay all combinations on as many processes as there are cores; tell on a terminal how many are done."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        best = {blocks: pool.submit(optimum_percent, trace, blocks) for blocks in sizes}
        runs = [pool.submit(replay, trace, policy, blocks) for blocks in sizes for policy in policies]
        _show_progress([*best.values(), *runs])
        done = [run.result() for run in runs]
        return [Result(replayed, best[replayed.blocks].result()) for replayed in done]


def _show_progress(futures: Iterable[Future[Replayed] | Future[float]]) -> None:
    everything = list(futures)
    for number, _ in enumerate(as_completed(everything), 1):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(everything)} replayed", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _as_json(trace: Trace, results: Sequence[Result]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "accesses": trace.accesses,
        "results": [
            {
                "policy": result.replayed.policy,
                "blocks": result.replayed.blocks,
                "hit_percent": round(result.replayed.hit_percent, 3),
                "written_percent": round(result.replayed.written_percent, 3),
                "optimum_percent": round(result.optimum_percent, 3),
            }
            for result in results
        ],
    }


def _as_table(trace: Trace, results: Sequence[Result]) -> str:
    lines = [
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} blocks of {trace.tokens_per_block} tokens",
        f"{'blocks':>10}  {'policy':<12}{'hits %':>8}{'written %':>11}{'optimum %':>11}",
    ]
    lines += [
        f"{one.blocks:>10,}  {one.policy:<12}{one.hit_percent:>8.2f}{one.written_percent:>11.2f}{optimum:>11.2f}"
        for one, optimum in results
    ]
    return "\n".join(lines) + "\n"


def _as_plot(results: Sequence[Result]) -> str:
    """Bars of the hit ratios; a mark shows the optimum."""
    most = max(max(result.optimum_percent for result in results), 1e-9)
    lines = []
    for one, optimum in results:
        cells, mark = round(BAR_CELLS * one.hit_percent / most), round(BAR_CELLS * optimum / most)
        bar = "█" * cells + " " * (mark - cells) + "|"
        lines.append(f"{one.blocks:>10,}  {one.policy:<12}{bar} {one.hit_percent:.1f}")
    return "\n".join(lines) + "\n"
