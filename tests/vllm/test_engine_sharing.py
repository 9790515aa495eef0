"""Real engines share: what one stored, it gets back itself, after its restart, and so does another engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    PATIENCE,
    EngineProcess,
    cached,
    full_blocks,
    prompt,
    tokens,
    wait_books,
    wait_connected,
    wait_stored,
)
from tests.kit.shapes import make_tiny_gemma3
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTHS = [2000, 777, 1111]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
FULL = [full_blocks(length) for length in LENGTHS]
FULL_BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)
WINDOW_BLOCKS = 256 // BLOCK_TOKENS


def test_server_loads_what_another_engine_stored(home: EngineHome, server: EngineServer) -> None:
    """Each serves the other's prompts. The server was started as users start it, the engine has more features."""
    home.ensure_no_daemon()
    home.ensure_daemon(home.engine, server)
    for engine in (home.engine, server):
        engine.forget()
    cold = home.engine.generate(PROMPTS)
    before = wait_stored(home.directory)
    assert before.ready_blocks == FULL_BLOCKS
    loaded = server.generate(PROMPTS)
    after = wait_stored(home.directory)
    back = [prompt(40, 500)]
    computed = server.generate(back)
    wait_books(home.directory, lambda found: found.ready_blocks == FULL_BLOCKS + 500 // BLOCK_TOKENS)
    returned = home.engine.generate(back)
    assert (cached(cold), cached(loaded)) == ([0, 0, 0], FULL)
    assert tokens(loaded) == tokens(cold)
    assert (cached(computed), cached(returned)) == ([0], [full_blocks(500)])
    assert tokens(returned) == tokens(computed)
    assert len(after.namespaces) == 1
    assert after.load.bytes == after.store.bytes == before.store.bytes, "nothing was stored anew"
    assert (after.store.failed_jobs, after.load.failed_jobs, after.leases, after.pinned_blocks) == (0, 0, 0, 0)


def test_workers_that_ray_started_reach_the_schedulers_daemon(model: Path) -> None:
    """vLLM's executor copies only some variables to them, and Ray has another working directory."""
    with (
        DaemonProcess("64MiB") as daemon,
        EngineProcess(
            model,
            daemon.directory,
            tensor_parallel=2,
            transfer={"kv_connector_extra_config": dict(PATIENCE)},
            environ={"KVOFFD_DIRECTORY": str(daemon.directory)},
            worker_cls="tests.vllm.ray_worker.RayWorker",
        ) as engine,
    ):
        engine.generate([prompt(50, 100)])
        wait_connected(daemon.directory, 2)
        cold = engine.generate(PROMPTS)
        wait_books(daemon.directory, lambda found: found.ready_blocks >= FULL_BLOCKS)
        engine.forget()
        loaded = engine.generate(PROMPTS)
    assert (cached(cold), cached(loaded)) == ([0, 0, 0], FULL)
    assert tokens(loaded) == tokens(cold)


# --- sliding windows -------------------------------------------------------------------------------

BEGINNING = 512
ALIKE = [prompt(10, BEGINNING) + prompt(seed, 300) for seed in (11, 12, 13)]
"""They begin alike."""
LONG = [prompt(seed, 1100) for seed in (1, 2)]
"""With windows, these two fill the KV cache but for 2 blocks, and to go on each needs one in all six groups."""


@dataclass
class Windows:
    """A daemon beside an engine of a model with sliding windows, that has few blocks."""

    engine: EngineProcess
    daemon: DaemonProcess


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    model = make_tiny_gemma3(tmp_path_factory.mktemp("models") / "model")
    few = {"num_blocks": 151, "max_model_len": 1152, "max_num_batched_tokens": 128}
    with DaemonProcess("256MiB") as daemon, EngineProcess(model, daemon.directory, patient=True, **few) as engine:
        wait_connected(daemon.directory)
        yield Windows(engine, daemon)


@pytest.mark.usefixtures("early_server")
def test_windows_loads_leave_blocks_for_what_is_computed(windows: Windows) -> None:
    """Of a window only what a prompt's end can reach is stored, and every full block is loaded."""
    engine, directory = windows.engine, windows.daemon.directory
    cold = [engine.generate([each])[0] for each in LONG]
    assert wait_stored(directory).ready_blocks == len(LONG) * (1100 // BLOCK_TOKENS + 5 * WINDOW_BLOCKS)
    engine.forget()
    loaded = engine.generate(LONG)
    assert tokens(loaded) == tokens(cold)
    assert cached(loaded) == [full_blocks(1100)] * 2


@pytest.mark.usefixtures("early_server")
def test_windows_prompts_that_begin_alike(windows: Windows) -> None:
    """They find their beginning as in vLLM's own cache, the third one at the latest."""
    engine, directory = windows.engine, windows.daemon.directory
    alike = []
    for each in ALIKE:
        alike += engine.generate([each])
        wait_stored(directory)
        engine.forget()
    with AdminClient(directory) as admin:
        admin.clear()
    alike += engine.generate(ALIKE[-1:])
    # The second one stores those blocks of the windows that are at the end of what it has in common with the first.
    assert cached(alike) in ([0, found, BEGINNING, 0] for found in (0, BEGINNING))
    assert alike[2].tokens == alike[3].tokens
