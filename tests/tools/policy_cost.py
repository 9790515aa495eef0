"""What a policy costs per key of a trace, apart from the cache: ``python -m tests.tools.policy_cost FILE``.

Every call of the policy is timed. With ``--split 32`` each block of the trace becomes 32 smaller ones.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, cast

from kvoffd.cache.namespace import Block
from kvoffd.cache.policies import POLICY_NAMES, EvictionPolicy, make_policy
from kvoffd.simulate import replay
from kvoffd.simulate.trace import KEY_BYTES, Trace, read_trace

TIMED = ("requested", "insert", "remove", "offers", "declined")


def clock_seconds() -> float:
    """What it takes to ask the clock."""
    started = time.perf_counter()
    for _ in range(100_000):
        time.perf_counter()
    return (time.perf_counter() - started) / 100_000


class TimedPolicy:
    """Another policy, and how long its calls took, in seconds. Times are right where nothing else runs."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._clock_seconds = clock_seconds()
        self.seconds: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)
        if name not in TIMED:
            return method

        def timed(*arguments: object, **named: object) -> object:
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - started - self._clock_seconds

        setattr(self, name, timed)
        return timed

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        """Each step is timed."""
        clock, spent, overhead = time.perf_counter, 0.0, self._clock_seconds
        started = clock()
        try:
            for block in self._policy.candidates(worth):
                spent += clock() - started - overhead
                yield block
                started = clock()
            spent += clock() - started - overhead
        finally:
            self.seconds["candidates"] += spent

    def __len__(self) -> int:
        return len(self._policy)


def split(trace: Trace, parts: int, requests: int) -> Trace:
    """The first requests of a trace, each block cut into parts."""
    cut = []
    for keys in trace.requests[:requests]:
        numbers = [int.from_bytes(keys[at : at + KEY_BYTES], "big") for at in range(0, len(keys), KEY_BYTES)]
        cut.append(b"".join((n * parts + part).to_bytes(KEY_BYTES, "big") for n in numbers for part in range(parts)))
    return Trace(trace.name, trace.tokens_per_block // parts, cut)


def main() -> None:
    """Print microseconds of each call per key of the trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--policy", default=",".join(POLICY_NAMES))
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--split", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10**9)
    given = parser.parse_args()
    trace = split(read_trace(given.file), given.split, given.requests)
    for name in given.policy.split(","):
        made: list[TimedPolicy] = []

        def timed(policy: str, pool_bytes: int, made: list[TimedPolicy] = made) -> EvictionPolicy:
            made.append(TimedPolicy(make_policy(policy, pool_bytes)))
            return cast(EvictionPolicy, made[-1])

        replay.make_policy = timed  # type: ignore[attr-defined]
        replayed = replay.replay(trace, name, given.blocks * given.split)
        cost = {call: round(1e6 * seconds / trace.accesses, 3) for call, seconds in made[0].seconds.items()}
        print(f"{name}: {sum(cost.values()):.2f} us/key, {replayed.hit_percent:.2f} % hits; {cost}", flush=True)


if __name__ == "__main__":
    main()
