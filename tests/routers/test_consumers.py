"""Two nodes' daemons, and routers that others wrote: they credit a prompt to the node that has it, until it is gone.

What a router has of a node is compared, block by block, with what that node's daemon holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.router_daemon import BLOCK_TOKENS, PromptEngine, router_daemon
from tests.kit.waiting import wait_until
from tests.routers.consumers import DYNAMO, VLLM_ROUTER, DynamoIndexer, VllmRouter, Worker

LENGTH = 4 * BLOCK_TOKENS
POOL_BLOCKS = 64
HOST_CREDIT = 0.8
"""vllm-router's ``--kv-penalty-host``: what it credits a token in host memory with."""

needs_dynamo = pytest.mark.skipif(not DYNAMO.exists(), reason="ai-dynamo-runtime is not installed (`make routers`)")
needs_vllm_router = pytest.mark.skipif(not VLLM_ROUTER.exists(), reason="vllm-router is not installed (`make routers`)")


@dataclass
class Node:
    """One node: its daemon, the ports of its events and replays, and an engine on it."""

    daemon: DaemonProcess
    port: int
    replay_port: int
    engine: PromptEngine

    def reachable(self) -> dict[int, int]:
        """The blocks that a prompt can be read from the beginning with, and their parents."""
        held = self.engine.held()
        parents = {}
        for tokens, block in self.engine.keys.items():
            parents[block] = self.engine.keys.get(tokens[:-BLOCK_TOKENS], 0)
        found: dict[int, int] = {}
        for block in sorted(held):  # a parent's number is smaller
            if parents[block] == 0 or parents[block] in found:
                found[block] = parents[block]
        return found

    def depth(self, prompt: list[int]) -> int:
        """The prompt's leading blocks that the daemon holds."""
        held = self.engine.held()
        chain = self.engine.chain(prompt)
        return next((at for at, block in enumerate(chain) if block not in held), len(chain))


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with ExitStack() as stack:
        keys: dict[tuple[int, ...], int] = {}
        found = []
        for name in ("a", "b"):
            daemon, port, replay_port = stack.enter_context(
                router_daemon(f"node-{name}", pool_size="1MiB", eviction_policy="lru")
            )
            found.append(Node(daemon, port, replay_port, stack.enter_context(PromptEngine(daemon, keys=keys))))
        yield found


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [number * 1000 + at for at in range(length)]


def eventually(found: Callable[[], Any], wanted: Any) -> None:
    """Wait until ``found`` is ``wanted``: events take some time."""
    last: list[Any] = []

    def same() -> bool:
        last[:] = [found()]
        return bool(last[0] == wanted)

    wait_until(same, 10, explain=lambda: f"{last[0]} and not {wanted}", interval_s=0.05)


def churn(node: Node, rng: random.Random, stores: int) -> list[list[int]]:
    """Store prompts with common beginnings, three times what the pool holds, so that the daemon evicts."""
    prompts: list[list[int]] = []
    for number in range(stores):
        shared = rng.choice(prompts)[: rng.randrange(1, 4) * BLOCK_TOKENS] if prompts and rng.random() < 0.6 else []
        prompts.append(shared + prompt(2000 + number, LENGTH - len(shared)))
        node.engine.store(prompts[-1])
    return prompts


@needs_dynamo
def test_dynamo_credits_the_node_that_has_a_prompt_until_it_is_gone(nodes: list[Node], tmp_path: Path) -> None:
    a, b = nodes
    with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        for number, node in enumerate(nodes, 1):
            dynamo.register(number, node.port, node.replay_port)
        a.engine.store(prompt(1))
        eventually(lambda: dynamo.credits(prompt(1)), {1: (LENGTH, LENGTH)})
        b.engine.store(prompt(1)[:32])
        eventually(lambda: dynamo.credits(prompt(1)), {1: (LENGTH, LENGTH), 2: (32, 32)})
        assert dynamo.credits(prompt(2)) == {}
        a.engine.invalidate(a.engine.chain(prompt(1))[1])
        eventually(lambda: dynamo.credits(prompt(1)), {1: (16, 16), 2: (32, 32)})
        a.engine.store(prompt(1))
        eventually(lambda: dynamo.credits(prompt(1)), {1: (LENGTH, LENGTH), 2: (32, 32)})
        a.engine.reset()
        eventually(lambda: dynamo.credits(prompt(1)), {2: (32, 32)})


@needs_dynamo
def test_dynamo_s_index_is_the_daemon_s_after_evictions_a_late_start_and_a_restart(
    nodes: list[Node], tmp_path: Path
) -> None:
    rng = random.Random(7)
    a, b = nodes
    churn(a, rng, 30)

    def wanted() -> set[tuple[int, str, int, int]]:
        return {
            (number, "host_pinned", block, parent)
            for number, node in enumerate(nodes, 1)
            for block, parent in node.reachable().items()
        }

    with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        for number, node in enumerate(nodes, 1):
            dynamo.register(number, node.port, node.replay_port)
        eventually(dynamo.blocks, wanted())  # it came late
        assert len(wanted()) > POOL_BLOCKS // 2
        prompts = churn(b, rng, 40)
        eventually(dynamo.blocks, wanted())
        credits = {number: node.depth(prompts[-1]) * BLOCK_TOKENS for number, node in enumerate(nodes, 1)}
        assert dynamo.credits(prompts[-1]) == {number: (many, many) for number, many in credits.items() if many}
        b.engine.close()
        b.daemon.stop()
        b.daemon.start()
        with PromptEngine(b.daemon, keys=a.engine.keys) as b.engine:
            b.engine.store(prompt(3))
            eventually(dynamo.blocks, wanted())


@needs_dynamo
def test_dynamo_credits_what_is_on_disk_as_such(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = {"disk": f"{disk}=64MiB", "disk_write": "always", "pool_size": "1MiB"}
    with router_daemon(**flags) as (daemon, port, replay_port), PromptEngine(daemon) as engine:
        with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
            dynamo.register(1, port, replay_port)
            engine.store(prompt(1))
            eventually(lambda: {tier for _, tier, _, _ in dynamo.blocks()}, {"host_pinned", "disk"})
            number = 2
            while any(tier == "host_pinned" and block <= 4 for _, tier, block, _ in dynamo.blocks()):
                engine.store(prompt(number))  # until the pool has evicted the first prompt
                number += 1
            assert dynamo.credits(prompt(1)) == {1: (0, LENGTH)}


@needs_vllm_router
def test_vllm_router_sends_a_prompt_to_the_node_that_has_it_until_it_is_gone(nodes: list[Node], tmp_path: Path) -> None:
    a, b = nodes
    a.engine.store(prompt(1))  # before the router is there
    with Worker() as first, Worker() as second:
        at = [(first, a.port, a.replay_port), (second, b.port, b.replay_port)]
        with VllmRouter(tmp_path / "router.log", at) as router:
            eventually(lambda: router.ask(prompt(1)), (0, int(HOST_CREDIT * LENGTH)))
            b.engine.store(prompt(2))
            eventually(lambda: router.ask(prompt(2)), (1, int(HOST_CREDIT * LENGTH)))
            assert router.ask(prompt(3))[1] == 0
            b.engine.invalidate(b.engine.chain(prompt(2))[2])
            eventually(lambda: router.ask(prompt(2)), (1, int(HOST_CREDIT * 32)))
            a.engine.reset()
            eventually(lambda: router.ask(prompt(1))[1], 0)
            a.engine.store(prompt(1))
            eventually(lambda: router.ask(prompt(1)), (0, int(HOST_CREDIT * LENGTH)))


@needs_vllm_router
def test_vllm_router_s_index_is_the_daemon_s_after_evictions(nodes: list[Node], tmp_path: Path) -> None:
    rng = random.Random(11)
    a, b = nodes
    early = churn(a, rng, 25)
    with Worker() as first, Worker() as second:
        at = [(first, a.port, a.replay_port), (second, b.port, b.replay_port)]
        with VllmRouter(tmp_path / "router.log", at) as router:
            prompts = early + churn(a, rng, 25)
            last = prompts[-1]
            eventually(lambda: router.ask(last), (0, int(HOST_CREDIT * a.depth(last) * BLOCK_TOKENS)))
            depths = [a.depth(one) for one in prompts]
            assert len(set(depths)) > 2, "some prompts are there in part"
            credited = [router.ask(one)[1] for one in prompts]
            assert credited == [int(HOST_CREDIT * depth * BLOCK_TOKENS) for depth in depths]
