"""What hints of agents bring over a policy alone, right and wrong: ``python -m tests.bench.hints``.

Sixty agents with one of five system prompts take 5 to 60 turns, with pauses of seconds or, one in five, of a tool that
runs for 30 to 300 s. They release a conversation at its end, all of it but the system prompt, and retain it for 300 s
where a tool runs. Each wrong hint is the other one. Beside them, or not, others ask once.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvoffd.simulate.replay import replay
from kvoffd.simulate.trace import KEY_BYTES, Trace, TracedHint
from kvoffd_proto.messages import HintAction
from tests.kit.made_up_loads import Chain, Traffic, trace_of

AGENTS, SYSTEM_BLOCKS, REQUESTS, TTL_S = 60, 12, 4000, 300.0
POOLS = 500, 1000, 2000


class Hinting(NamedTuple):
    """What agents tell."""

    releases: bool
    retains: bool
    wrong: float = 0.0


HINTS = {
    "release": Hinting(releases=True, retains=False),
    "retain": Hinting(releases=False, retains=True),
    "both": Hinting(releases=True, retains=True),
    "both, 10 % wrong": Hinting(releases=True, retains=True, wrong=0.1),
    "both, 30 % wrong": Hinting(releases=True, retains=True, wrong=0.3),
}


def agents(seed: int, hinting: Hinting, others_per_s: float) -> Trace:
    """The requests of agents and others, and the agents' hints."""
    traffic, wrong = Traffic(seed), random.Random(seed)
    chance = traffic.chance
    prompts = traffic.documents(5, SYSTEM_BLOCKS)
    due: list[tuple[float, float, Chain, int]] = []
    requests: list[Chain] = []
    seconds: list[float] = []
    hints: list[TracedHint] = []

    def begin(at: float) -> None:
        turns = chance.randint(5, 60)
        heapq.heappush(due, (at, chance.random(), chance.choice(prompts) + traffic.text(4), turns))

    def tell(action: HintAction, text: Chain) -> None:
        keys = b"".join(key.to_bytes(KEY_BYTES, "big") for key in text)
        hints.append(TracedHint(len(requests), seconds[-1], action, keys, 50, TTL_S))

    for _ in range(AGENTS):
        begin(chance.uniform(0, 60))
    other_at = chance.expovariate(others_per_s) if others_per_s else float("inf")
    while len(requests) < REQUESTS:
        if other_at < due[0][0]:
            requests.append(traffic.text(1, 12))
            seconds.append(other_at)
            other_at += chance.expovariate(others_per_s)
            continue
        now, _, text, turns = heapq.heappop(due)
        text = text + traffic.text(1, 1.5)
        requests.append(text)
        seconds.append(now)
        runs_tool, is_last = chance.random() < 0.2, turns == 0
        pause = chance.uniform(30, 300) if runs_tool else chance.expovariate(1 / 8)
        releases = is_last != (wrong.random() < hinting.wrong)
        if releases and hinting.releases:
            tell(HintAction.RELEASE, text[SYSTEM_BLOCKS:])
        elif not releases and hinting.retains and runs_tool != (wrong.random() < hinting.wrong):
            tell(HintAction.RETAIN, text)
        if is_last:
            begin(now + chance.uniform(1, 30))
        else:
            heapq.heappush(due, (now + pause, chance.random(), text, turns - 1))
    return trace_of(requests)._replace(seconds=seconds, hints=hints)


def row(name: str, hits: Sequence[float]) -> None:
    print(f"| {name} | {' | '.join(f'{one:.1f}' for one in hits)} |", flush=True)


def main() -> int:
    for others_per_s in (0.0, 4.0):
        print(f"\n## {'Beside others' if others_per_s else 'Agents alone'}\n")
        print(f"| hints | {' | '.join(f'{blocks:,}' for blocks in POOLS)} |\n|---|{'---|' * len(POOLS)}")
        plain = agents(1, HINTS["both"], others_per_s)
        for policy in ("lru", "learned"):
            row(f"{policy}, none", [replay(plain, policy, blocks).hit_percent for blocks in POOLS])
        for name, hinting in HINTS.items():
            trace = agents(1, hinting, others_per_s)
            row(f"learned, {name}", [replay(trace, "learned", blocks, hints=True).hit_percent for blocks in POOLS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
