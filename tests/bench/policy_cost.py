"""What a policy costs per key of a trace, apart from the cache: ``python -m tests.bench.policy_cost FILE``.

The trace is replayed once to record what the cache asks of the policy; then a new policy is asked the same, and
nothing else is done. Times are of the CPU, the best of some runs. With ``--split 32`` a block becomes 32 smaller ones.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, cast

from kvoffd.cache.namespace import Block
from kvoffd.cache.policies import POLICY_NAMES, EvictionPolicy, make_policy
from kvoffd.simulate import replay
from kvoffd.simulate.trace import read_trace
from tests.bench.policies import split

RECORDED = ("requested", "insert", "remove", "offers", "declined")
Calls = list[tuple[str, tuple[Any, ...]]]


class RecordedPolicy:
    """Another policy, and what was asked of it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.calls: Calls = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)
        if name not in RECORDED:
            return method

        def recorded(*arguments: Any, **named: Any) -> object:
            self.calls.append((name, (*arguments, *named.values())))
            return method(*arguments, **named)

        setattr(self, name, recorded)
        return recorded

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        """How many are taken is recorded."""
        number = len(self.calls)
        self.calls.append(("candidates", (worth, 0)))
        for taken, block in enumerate(self._policy.candidates(worth), 1):
            self.calls[number] = ("candidates", (worth, taken))
            yield block

    def __len__(self) -> int:
        return len(self._policy)


def ask_again(policy: EvictionPolicy, calls: Calls) -> None:

    def take(worth: float, count: int) -> None:
        deque(islice(policy.candidates(worth), count + 1), maxlen=0)

    methods: dict[str, Callable[..., object]] = {name: getattr(policy, name) for name in RECORDED}
    methods["candidates"] = take
    for name, arguments in calls:
        methods[name](*arguments)


def main() -> None:
    """Print microseconds of CPU time per key of the trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--policy", default=",".join(POLICY_NAMES))
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--split", type=int, default=1)
    parser.add_argument("--requests", type=int, help="the first so many of the trace (default: all)")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    trace = read_trace(given.file)
    trace = split(trace._replace(requests=trace.requests[: given.requests]), given.split)
    for name in given.policy.split(","):
        made: list[RecordedPolicy] = []

        def recorded(policy: str, pool_bytes: int, made: list[RecordedPolicy] = made) -> EvictionPolicy:
            made.append(RecordedPolicy(make_policy(policy, pool_bytes)))
            return cast(EvictionPolicy, made[-1])

        replay.make_policy = recorded  # type: ignore[attr-defined]
        blocks = given.blocks * given.split
        replayed = replay.replay(trace, name, blocks)
        gc.collect()
        gc.freeze()  # as the daemon does with what lives long
        spent = []
        for _ in range(given.runs):
            policy = make_policy(name, blocks * replay.BLOCK_BYTES)
            started = time.process_time()
            ask_again(policy, made[0].calls)
            spent.append(time.process_time() - started)
        print(f"{name}: {1e6 * min(spent) / trace.accesses:.2f} us/key, {replayed.hit_percent:.2f} % hits", flush=True)


if __name__ == "__main__":
    main()
