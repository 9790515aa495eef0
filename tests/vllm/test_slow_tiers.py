"""Prompts that come at once from a slow store, through vLLM's own scheduler and a real daemon, without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, full_blocks, prompt
from tests.kit.filled_tiers import fill_tiers
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.vllm.engine_of_parts import EngineOfParts

PROMPTS = [prompt(seed, 1001) for seed in range(1, 9)]
FULL = [full_blocks(len(each)) for each in PROMPTS]
WARM_UP = [prompt(seed, 1001) for seed in range(11, 15)]
BLOCKS = 320
RATE = 500
BYTES_PER_SECOND = 8e6


@pytest.fixture
def store(model: Path) -> Iterator[RedisServer]:
    """One that has PROMPTS."""
    with RedisServer() as server:
        with DaemonProcess("128MiB", shared=server.url, shared_write="always") as daemon:
            with EngineOfParts(model, daemon.directory, BLOCKS, 1e9) as engine:
                engine.wait_connected(daemon.directory)
                fill_tiers(daemon.directory, engine, PROMPTS, sum(FULL) // BLOCK_TOKENS)
        yield server


def test_eight_prompts_at_once_come_whole_from_a_slow_store(model: Path, store: RedisServer) -> None:
    """4 s to load, 16 s to compute. The machine may give the line, the daemon and the engine no CPU now and then."""
    with SlowLink(store.port, BYTES_PER_SECOND) as link, DaemonProcess("128MiB", shared=link.url) as daemon:
        with EngineOfParts(model, daemon.directory, BLOCKS, RATE) as engine:
            engine.wait_connected(daemon.directory)
            for each in WARM_UP:
                engine.generate([each])
            began = time.monotonic()
            loaded = engine.generate(PROMPTS)
            seconds = time.monotonic() - began
    assert loaded == FULL
    assert seconds < sum(FULL) / RATE / 2
