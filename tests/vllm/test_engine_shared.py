"""Two nodes over one Redis: what one engine computed the other loads, also when the first node is gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.daemon import DaemonProcess
from support.engine import Completion, EngineProcess, full_blocks, prompt, wait_connected
from support.models import make_tiny_llama
from support.redis_server import RedisServer, needs_redis
from support.waiting import wait_until

from kvoffd_client import AdminClient
from kvoffd_proto.messages import SharedStats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400), needs_redis]

LENGTH = 3000
PROMPTS = [prompt(seed, LENGTH) for seed in range(2)]
DEADLINE_S = 60.0
# A machine busy with other tests may be slow; a block that is given up would fail the test.
PATIENT = {"disk_wait": "wait"}


def shared_of(daemon: DaemonProcess) -> SharedStats:
    with AdminClient(daemon.directory) as admin:
        (found,) = admin.stats().shared
        return found


def completed(engine: EngineProcess) -> list[Completion]:
    return [engine.generate([one])[0] for one in PROMPTS]


def test_a_prompt_of_one_node_is_loaded_on_another_also_when_the_first_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model")
    blocks = len(PROMPTS) * (full_blocks(LENGTH) // 32)
    with RedisServer() as server:
        flags = {"shared": server.url, "shared_write": "always", "shared_deadline": "60s", "shared_ask_deadline": "5s"}
        with DaemonProcess("64MiB", **flags) as first:
            with (
                EngineProcess(model, first.directory, extra_config=PATIENT) as engine,
                AdminClient(first.directory) as admin,
            ):
                wait_connected(admin)
                computed = completed(engine)
                wait_until(
                    lambda: shared_of(first).written_blocks >= blocks, DEADLINE_S, explain=lambda: shared_of(first)
                )
        with DaemonProcess("64MiB", **flags) as second:
            with (
                EngineProcess(model, second.directory, extra_config=PATIENT) as engine,
                AdminClient(second.directory) as admin,
            ):
                wait_connected(admin)
                wait_until(lambda: shared_of(second).reachable, DEADLINE_S)
                started = time.monotonic()
                loaded = completed(engine)
                seconds = time.monotonic() - started
                assert [one.tokens for one in loaded] == [one.tokens for one in computed]
                assert [one.cached for one in loaded] == [full_blocks(LENGTH)] * len(PROMPTS), shared_of(second)
                shared = shared_of(second)
                assert shared.read_blocks >= blocks
                assert shared.mismatches == 0
                engine.forget()
                server.kill()
                again = completed(engine)
                assert [one.tokens for one in again] == [one.tokens for one in computed], "the pool has them"
                with capsys.disabled():
                    print(f"\n{len(PROMPTS)} prompts of {LENGTH} tokens from another node: {seconds:.3f} s; {shared}")
