"""A trace over three real nodes, beside what ``kvoffd-cli trace replay --nodes 3`` says for the same requests.

Daemons, their peers (NIXL over TCP) and a Redis are real; engines have no model, and serve one prompt after the other,
each on the next node. The simulation gets the times at which the prompts were really served. ``python -m
tests.bench.fleet_replay TRACE`` prints Markdown; without a trace the requests are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

from kvoffd_client import GroupSpec, NamespaceSpec
from tests.bench.report_file import markdown_table, print_report, run_facts
from tests.kit.command import CLI
from tests.kit.made_up_loads import Traffic
from tests.kit.peer_node import Node
from tests.kit.ports import free_ports
from tests.kit.prompt_engine import PromptEngine
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import books, key

NODES, TOKENS = 3, 512
LAYERS, PAGE_BYTES = 4, 4096
BLOCK_BYTES = LAYERS * PAGE_BYTES
POOL_BYTES = 64 << 20
SHARED = {"nothing": (False, False), "peers": (True, False), "store": (False, True), "peers and store": (True, True)}
"""What nodes share: whether they have each other as peers, and a Redis."""
SOURCES = "computed", "pool", "peer", "store"
REPORTED_S = 10.0
"""Time for the last reports of prompts to be counted; engines send them within a second."""
SIMULATED_S = 900.0
"""Limit of the simulation's time."""
MADE_UP_REQUESTS = 1500

Prompts = Sequence[Sequence[int]]
"""Keys of each prompt as numbers."""


class Found(NamedTuple):
    """Tokens of all prompts by source, in percent, of the real nodes and of the simulation."""

    real: dict[str, float]
    simulated: dict[str, float]
    seconds: float
    """Time of the real replay."""

    @property
    def points(self) -> float:
        """The largest difference."""
        return max(abs(self.real[source] - self.simulated[source]) for source in SOURCES)


def prompts_of(trace: Path) -> Prompts:
    """Return the prompts of a trace in Mooncake's format."""
    return [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]


def made_up_prompts(count: int) -> Prompts:
    """Return conversations, and documents that come again."""
    traffic = Traffic(7)
    mixed = traffic.mixed((1, traffic.chat(60)), (1, traffic.popular(traffic.documents(120, 24), 0.8)))
    return [*islice(mixed, count)]


class ReplayNode(Node):
    """A node whose engine serves prompts of up to ``longest`` blocks."""

    def __init__(self, longest: int, secret: Path | None, address: str, *peers: str, **flags: str) -> None:
        super().__init__(secret, address, *peers, pool_size=str(POOL_BYTES), page_bytes=PAGE_BYTES, **flags)
        self.spec = NamespaceSpec.named("replay", groups=[GroupSpec("full_attention", TOKENS)])
        self._longest = longest

    def __enter__(self) -> Self:
        self.daemon.start()
        shape = 1, LAYERS, self._longest, PAGE_BYTES
        self.engine = self.prompts = PromptEngine(self.daemon.directory, self.spec, *shape)
        return self

    @property
    def tokens(self) -> Counter[str]:
        """Tokens of its prompts by source."""
        return Counter(books(self.daemon.directory).namespaces[self.spec.fingerprint].prompt_tokens)


def replay_really(prompts: Prompts, *, peers: bool, store: bool) -> tuple[Counter[str], list[float]]:
    """Serve prompts, each on the next node. Return their tokens by source, and the times when they began."""
    with ExitStack() as stack:
        at, secret = [f"127.0.0.1:{port}" for port in free_ports(NODES)], None
        if peers:
            secret = Path(stack.enter_context(tempfile.TemporaryDirectory()), "secret")
            secret.write_text(secrets.token_hex())
        flags = {"shared": stack.enter_context(RedisServer()).url} if store else {}
        longest, nodes = max(map(len, prompts)), []
        for number, address in enumerate(at):
            others = [at[(number + distance) % NODES] for distance in range(1, NODES)]
            its = (secret, address, *others) if peers else (None, "")
            nodes.append(stack.enter_context(ReplayNode(longest, *its, **flags)))
        for node in nodes:
            node.wait_up()
        times = []
        for number, prompt in enumerate(prompts):
            times.append(time.monotonic())
            if prompt:
                nodes[number % NODES].prompts.serve(str(number), [*map(key, prompt)])
        every = TOKENS * sum(map(len, prompts))

        def counted() -> Counter[str] | None:
            tokens = sum((node.tokens for node in nodes), Counter[str]())
            return tokens if tokens.total() == every else None

        found = wait_until(counted, REPORTED_S)
        assert found is not None
        return found, [began - times[0] for began in times]


def simulate(prompts: Prompts, times: Sequence[float], *, peers: bool, store: bool) -> dict[str, int]:
    """Return the tokens by source of the same prompts at the same times, by the command line."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for prompt, at in zip(prompts, times, strict=True):
            line = {"timestamp": 1000 * at, "input_length": TOKENS * len(prompt), "hash_ids": prompt}
            print(json.dumps(line), file=file)
        file.flush()
        words = [file.name, "--nodes", str(NODES), "--route", "round_robin", "--size", str(POOL_BYTES)]
        words += ["--block-size", str(BLOCK_BYTES), "--json"]
        words += [*["--peers", "all"] * peers, *["--shared", "unlimited"] * store]
        done = subprocess.run([CLI, "trace", "replay", *words], stdout=subprocess.PIPE, timeout=SIMULATED_S, check=True)
    row = json.loads(done.stdout)["results"][-1]
    assert row["shares"] == ("given" if peers or store else "nothing")
    found: dict[str, int] = row["tokens"]
    return found


def compare(prompts: Prompts, *, peers: bool, store: bool) -> Found:
    """Replay prompts over real nodes, and in the simulation."""
    real, times = replay_really(prompts, peers=peers, store=store)
    return Found(_percent(real), _percent(simulate(prompts, times, peers=peers, store=store)), times[-1])


def _percent(tokens: dict[str, int]) -> dict[str, float]:
    every = sum(tokens.values())
    assert not {source for source, count in tokens.items() if count} - {*SOURCES}
    return {source: 100 * tokens.get(source, 0) / every for source in SOURCES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="in Mooncake's format")
    parser.add_argument("--requests", type=int, default=0, help="replay its first ones only")
    parser.add_argument("--shared", default=",".join(SHARED), help="what nodes share, some of: " + ", ".join(SHARED))
    given = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp")  # without the devices that UCX looks for
    prompts = prompts_of(given.trace) if given.trace else made_up_prompts(MADE_UP_REQUESTS)
    prompts = prompts[: given.requests or None]
    rows = [["nodes share", "", *(f"{source} %" for source in SOURCES), "most points", "seconds"]]
    facts = run_facts(shlex.join(["python", "-m", "tests.bench.fleet_replay", *sys.argv[1:]]))
    for name in given.shared.split(","):
        peers, store = SHARED[name.strip()]
        found = compare(prompts, peers=peers, store=store)
        real, simulated = ([f"{one[source]:.2f}" for source in SOURCES] for one in (found.real, found.simulated))
        rows.append([name, "real", *real, "", f"{found.seconds:.0f}"])
        rows.append(["", "simulated", *simulated, f"{found.points:.2f}", ""])
    title = f"{len(prompts):,} requests, {sum(map(len, prompts)):,} blocks, over three nodes"
    print_report(title, facts, markdown_table(rows))


if __name__ == "__main__":
    main()
