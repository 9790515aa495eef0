"""Routers that others wrote read engines' streams, and credit a prompt to each engine whose daemon has it.

Two engines of one daemon, of which the second stores nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.routers.consumers import DYNAMO, VLLM_ROUTER, DynamoIndexer, VllmRouter, Worker
from tests.routers.streams import BLOCK_TOKENS, POOL_BLOCKS, StreamEngine, chain, external

LENGTH = 4 * BLOCK_TOKENS
HOST_CREDIT = 0.8
"""vllm-router's ``--kv-penalty-host``: what it credits a token in host memory with."""

needs_dynamo = pytest.mark.skipif(not DYNAMO.exists(), reason="ai-dynamo-runtime is not installed (`make routers`)")
needs_vllm_router = pytest.mark.skipif(not VLLM_ROUTER.exists(), reason="vllm-router is not installed (`make routers`)")


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("1MiB", eviction_policy="lru", limits={"leased_share": 1}) as running:
        yield running


@pytest.fixture
def engines(daemon: DaemonProcess) -> Iterator[list[StreamEngine]]:
    with StreamEngine(daemon) as first, StreamEngine(daemon) as second:
        yield [first, second]


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [number * 1000 + at for at in range(length)]


def eventually(engines: Sequence[StreamEngine], found: Callable[[], Any], wanted: Any) -> None:
    """Wait until ``found`` is ``wanted``, while the engines make steps."""
    last: list[Any] = []

    def same() -> bool:
        for engine in engines:
            engine.step()
        last[:] = [found()]
        return bool(last[0] == wanted)

    wait_until(same, 15, explain=lambda: f"{last[0]} and not {wanted}", interval_s=0.05)


def published_by(engines: Sequence[StreamEngine]) -> set[tuple[int, str, Any, Any]]:
    """What the engines' streams fold to, as Dynamo's index has it."""
    tiers = {"CPU": "host_pinned", "STORAGE": "disk"}
    return {
        (number, tiers[medium], block, parent or 0)
        for number, engine in enumerate(engines, 1)
        for medium, blocks in engine.published.blocks.items()
        for block, parent in blocks.items()
    }


def churn(engine: StreamEngine, rng: random.Random, stores: int) -> list[list[int]]:
    """Store prompts with common beginnings, three times what the pool holds, so that the daemon evicts."""
    prompts: list[list[int]] = []
    for number in range(stores):
        shared = rng.choice(prompts)[: rng.randrange(1, 4) * BLOCK_TOKENS] if prompts and rng.random() < 0.6 else []
        prompts.append(shared + prompt(2000 + number, LENGTH - len(shared)))
        engine.store(prompts[-1])
    return prompts


@needs_dynamo
def test_dynamo_credits_all_engines_of_a_daemon_with_what_one_has_stored(
    engines: list[StreamEngine], tmp_path: Path
) -> None:
    first, second = engines
    with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        for number, engine in enumerate(engines, 1):
            dynamo.register(number, engine.port, engine.replay_port)

        def credits(number: int = 1) -> dict[int, tuple[int, int]]:
            return dynamo.credits(prompt(number))

        first.store(prompt(1))
        eventually(engines, credits, {1: (LENGTH, LENGTH), 2: (LENGTH, LENGTH)})
        assert credits(2) == {}
        hashes = chain(prompt(1))
        first.scheduler.invalidate(hashes[1:2], b"model".ljust(32, b"."))
        eventually(engines, credits, {1: (16, 16), 2: (16, 16)})
        first.store(prompt(1))
        eventually(engines, credits, {1: (LENGTH, LENGTH), 2: (LENGTH, LENGTH)})
        assert second.scheduler.reset(b"model".ljust(32, b".")) == 4
        eventually(engines, credits, {})
        first.store(prompt(1)[:32])
        eventually(engines, credits, {1: (32, 32), 2: (32, 32)})


@needs_dynamo
def test_dynamo_credits_a_late_engine_from_its_first_hit_on(
    daemon: DaemonProcess, engines: list[StreamEngine], tmp_path: Path
) -> None:
    first, _ = engines
    first.store(prompt(1))
    with StreamEngine(daemon) as late, DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        dynamo.register(1, late.port, late.replay_port)
        first.store(prompt(2))
        eventually([late], lambda: dynamo.credits(prompt(2)), {1: (LENGTH, LENGTH)})
        assert dynamo.credits(prompt(1)) == {}
        late.hit([*prompt(1), *prompt(3)])
        eventually([late], lambda: dynamo.credits(prompt(1)), {1: (LENGTH, LENGTH)})
        daemon.kill()
        eventually([late], lambda: dynamo.credits(prompt(1)), {})


@needs_dynamo
def test_dynamo_s_index_is_the_daemon_s_after_evictions(engines: list[StreamEngine], tmp_path: Path) -> None:
    rng = random.Random(7)
    with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        for number, engine in enumerate(engines, 1):
            dynamo.register(number, engine.port, engine.replay_port)
        eventually(engines, lambda: dynamo.blocks(), set())
        prompts = churn(engines[0], rng, 60)
        depths = [engines[0].depth(one) for one in prompts]
        assert len(set(depths)) > 2, "some prompts are there in part"
        held = set(
            external(
                [
                    key
                    for one in prompts
                    for key, there in zip(chain(one), engines[0].held(chain(one)), strict=True)
                    if there
                ]
            )
        )
        assert POOL_BLOCKS // 2 < len(held) <= POOL_BLOCKS

        def credited() -> list[dict[int, tuple[int, int]]]:
            return [dynamo.credits(one) for one in prompts]

        tokens = [depth * BLOCK_TOKENS for depth in depths]
        eventually(engines, credited, [{1: (many, many), 2: (many, many)} if many else {} for many in tokens])
        assert dynamo.blocks() <= published_by(engines)
        for engine in engines:
            assert set(engine.published.blocks["CPU"]) == held


@needs_dynamo
def test_dynamo_credits_what_is_on_disk_as_such(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with DaemonProcess("1MiB", disk=f"{disk}=64MiB", disk_write="always") as daemon, StreamEngine(daemon) as engine:
        with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
            dynamo.register(1, engine.port, engine.replay_port)
            engine.store(prompt(1))
            eventually([engine], lambda: {tier for _, tier, _, _ in dynamo.blocks()}, {"host_pinned", "disk"})
            for number in range(2, 2 + 2 * POOL_BLOCKS // 4):
                engine.store(prompt(number))  # until the pool has evicted the first prompt
            eventually([engine], lambda: dynamo.credits(prompt(1)), {1: (0, LENGTH)})


@needs_vllm_router
def test_vllm_router_sends_a_prompt_to_an_engine_whose_daemon_has_it_until_it_is_gone(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with DaemonProcess("1MiB", eviction_policy="lru", limits={"leased_share": 1}) as other:
        with StreamEngine(daemon) as a, StreamEngine(other) as b, Worker() as first, Worker() as second:
            engines = [a, b]
            at = [(first, a.port, a.replay_port), (second, b.port, b.replay_port)]
            with VllmRouter(tmp_path / "router.log", at) as router:

                def ask(number: int) -> Callable[[], tuple[int, int]]:
                    return lambda: router.ask(prompt(number))

                a.store(prompt(1))
                eventually(engines, ask(1), (0, int(HOST_CREDIT * LENGTH)))
                b.store(prompt(2))
                eventually(engines, ask(2), (1, int(HOST_CREDIT * LENGTH)))
                assert router.ask(prompt(3))[1] == 0
                b.scheduler.invalidate(chain(prompt(2))[2:3], b"model".ljust(32, b"."))
                eventually(engines, ask(2), (1, int(HOST_CREDIT * 32)))
                b.store(prompt(2))
                eventually(engines, ask(2), (1, int(HOST_CREDIT * LENGTH)))
                a.scheduler.reset(b"model".ljust(32, b"."))
                eventually(engines, lambda: router.ask(prompt(1))[1], 0)
                a.store(prompt(1))
                eventually(engines, ask(1), (0, int(HOST_CREDIT * LENGTH)))


@needs_vllm_router
def test_vllm_router_s_index_is_the_daemon_s_after_evictions(engines: list[StreamEngine], tmp_path: Path) -> None:
    rng = random.Random(11)
    _, reader = engines
    with Worker() as worker, VllmRouter(tmp_path / "router.log", [(worker, reader.port, reader.replay_port)]) as router:
        prompts = churn(engines[0], rng, 50)
        depths = [engines[0].depth(one) for one in prompts]
        assert len(set(depths)) > 2, "some prompts are there in part"
        last = len(prompts) - 1
        eventually(engines, lambda: router.ask(prompts[last])[1], int(HOST_CREDIT * depths[last] * BLOCK_TOKENS))
        credited = [router.ask(one)[1] for one in prompts]
        assert credited == [int(HOST_CREDIT * depth * BLOCK_TOKENS) for depth in depths]
