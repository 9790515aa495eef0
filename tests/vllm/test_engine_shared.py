"""Real vLLM engines of nodes that know nothing of each other but a store: Redis, a cluster of them, S3.

`make demo` and its test show one of them in CI.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import Completion, EngineProcess, full_blocks, prompt, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.redis_server import PROGRAM as REDIS
from tests.kit.redis_server import RedisCluster, RedisServer
from tests.kit.require import missing, required
from tests.kit.s3_server import PROGRAM as MOTO
from tests.kit.s3_server import S3Server
from tests.kit.waiting import wait_until
from tests.kit.wire import SharedStats, books

pytestmark = [pytest.mark.engine, pytest.mark.shapes, pytest.mark.timeout(900)]

LENGTH = 3000
PROMPTS = [prompt(seed, LENGTH) for seed in range(2)]
BLOCKS = len(PROMPTS) * (full_blocks(LENGTH) // 32)
DEADLINE_S = 60.0
# A machine busy with other tests may be slow; a block that is given up would fail the test.
PATIENT = {"disk_wait_ms": 60_000, "do_no_harm": False}
FLAGS = {"shared_write": "always", "shared_deadline": "60s", "shared_ask_deadline": "5s"}


def shared_of(daemon: DaemonProcess) -> list[SharedStats]:
    return books(daemon.directory).shared


def completed(engine: EngineProcess) -> list[Completion]:
    return [engine.generate([one])[0] for one in PROMPTS]


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The stores that can be started here."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found: dict[str, str] = {}
    with ExitStack() as running:
        if REDIS is not None or "redis" in required():
            found["Redis"] = running.enter_context(RedisServer()).url
            found["a cluster"] = running.enter_context(RedisCluster()).url
        if (MOTO is not None and importlib.util.find_spec("obstore") is not None) or "s3" in required():
            found["S3"] = running.enter_context(S3Server()).url
        if not found:
            missing("redis", "there is neither a redis-server nor moto with obstore; `make servers` installs them")
        yield found


def test_prompts_of_a_node_that_is_gone_are_loaded_on_others_from_each_store(
    tmp_path: Path, urls: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model")
    with DaemonProcess("64MiB", shared=",".join(urls.values()), **FLAGS) as first:
        with EngineProcess(model, first.directory, extra_config=PATIENT) as engine:
            wait_connected(first.directory)
            computed = completed(engine)
            wait_until(
                lambda: all(one.written_blocks >= BLOCKS for one in shared_of(first)),
                DEADLINE_S,
                explain=lambda: shared_of(first),
            )
    for name, url in urls.items():
        with (
            DaemonProcess("64MiB", shared=url, **FLAGS) as other,
            EngineProcess(model, other.directory, extra_config=PATIENT) as engine,
        ):
            wait_connected(other.directory)
            wait_until(lambda other=other: shared_of(other)[0].up, DEADLINE_S)  # type: ignore[misc]
            started = time.monotonic()
            loaded = completed(engine)
            seconds = time.monotonic() - started
            (shared,) = shared_of(other)
            assert [one.tokens for one in loaded] == [one.tokens for one in computed], name
            assert [one.cached for one in loaded] == [full_blocks(LENGTH)] * len(PROMPTS), (name, shared)
            assert shared.read_blocks >= BLOCKS
            assert shared.mismatches == 0
            with capsys.disabled():
                print(f"\n{len(PROMPTS)} prompts of {LENGTH} tokens from another node over {name}: {seconds:.3f} s")
