"""A real engine over a pool that is too small for its prompts, and a disk that holds them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_proto.messages import StatsReply
from tests.support.daemon import DaemonProcess
from tests.support.engine import Completion, EngineProcess, full_blocks, prompt, wait_connected
from tests.support.models import make_tiny_llama
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTH = 3000
PROMPTS = [prompt(seed, LENGTH) for seed in range(4)]
DEADLINE_S = 60.0
# A machine busy with other tests may read slowly; a block that is given up would fail a test.
PATIENT = {"disk_wait": "wait"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "model")


def stats_of(daemon: DaemonProcess) -> StatsReply:
    with AdminClient(daemon.directory) as admin:
        return admin.stats()


def wait_on_disk(daemon: DaemonProcess, blocks: int) -> None:
    wait_until(lambda: stats_of(daemon).disks[0].blocks >= blocks, DEADLINE_S, explain=lambda: stats_of(daemon))


def timed(engine: EngineProcess, index: int, salt: str | None = None) -> tuple[Completion, float]:
    """A prompt alone, and the time to its first token; the others follow at once."""
    started = time.monotonic()
    engine.generate([PROMPTS[index]], 1, salt=salt)
    seconds = time.monotonic() - started
    return engine.generate([PROMPTS[index]], salt=salt)[0], seconds


def test_blocks_come_back_from_disk_also_after_the_daemon_was_restarted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = len(PROMPTS) * (LENGTH // 32)
    daemon = DaemonProcess("32MiB", disk=f"{tmp_path}=256MiB", disk_write="always", disk_deadline="60s")
    engine: EngineProcess | None = None
    try:
        daemon.start()
        engine = EngineProcess(model, daemon.directory, extra_config=PATIENT).start()
        with AdminClient(daemon.directory) as admin:
            wait_connected(admin)
        computed = [engine.generate([one])[0] for one in PROMPTS]
        wait_on_disk(daemon, every)
        assert stats_of(daemon).namespaces[0].ready_blocks < every, "the pool should be too small"

        engine.forget()
        from_disk, disk_s = timed(engine, 0)
        assert from_disk.tokens == computed[0].tokens
        promoted = stats_of(daemon).below
        assert promoted is not None
        assert promoted.promoted_blocks >= full_blocks(LENGTH) // 32
        by_source = engine.call("cached_by_source")
        assert by_source["disk"] >= full_blocks(LENGTH)
        engine.forget()
        _, compute_s = timed(engine, 0, salt="never seen")
        with capsys.disabled():
            print(f"\n{LENGTH} tokens to the first one: {disk_s:.3f} s from disk, {compute_s:.3f} s computed")

        daemon.stop()
        daemon.start()
        engine.forget()
        with AdminClient(daemon.directory) as admin:
            wait_connected(admin)
        wait_on_disk(daemon, every)
        assert stats_of(daemon).pool.ready_bytes == 0
        again = [engine.generate([one])[0] for one in PROMPTS]
        assert [one.tokens for one in again] == [one.tokens for one in computed]
        assert [one.cached for one in again] == [full_blocks(LENGTH)] * len(PROMPTS)
        stats = stats_of(daemon)
        assert stats.below is not None
        assert stats.below.promoted_blocks >= len(PROMPTS) * (full_blocks(LENGTH) // 32)
        assert not stats.below.failed_promotions
    finally:
        if engine is not None:
            engine.close()
        daemon.close()
