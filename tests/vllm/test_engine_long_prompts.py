"""Long prompts come back whole from disks and other nodes, and none waits for nothing; by the connector's defaults.

Most tests run with a model that computes nothing and takes a stated time (``light``), so that what loading and
computing cost does not depend on the machine. Nightly they run with a model that computes (``demo``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    Completion,
    EngineProcess,
    cached,
    full_blocks,
    prompt,
    tokens,
    wait_books,
    wait_connected,
)
from tests.kit.filled_tiers import fill_tiers, wait_serving
from tests.kit.model_double import DOUBLE, RATE, llama_8b
from tests.kit.models import make_demo_llama
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.wire import Books

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIGHT, DEMO = "light", "demo"
KINDS = [LIGHT, pytest.param(DEMO, marks=pytest.mark.nightly)]
LAYERS = 4
TOKEN_BYTES = 16384
"""Of both models."""
LENGTHS = [6013, 5003, 4007]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS, 1)]
WARM_UP = [520, 520]
"""Prompts that an engine computes first; the connector knows after two of them how fast it is."""
CONNECT_S = 60.0
ANSWER_SHARE = 0.1
"""Of the time that computing takes: for that long a very long prompt waits for its lookup (RELIABILITY.md)."""
SHARED_DEADLINE_S = 2.0
"""Of the setting `shared_deadline`."""
MAX_TOKENS = 8192
PAUSED = "are tried again"
"""In the line that the connector logs when it loads nothing for a while."""


@dataclass
class Model:
    """A model of one kind, and engines of it. ``unseen`` numbers prompts that nobody computed."""

    kind: str
    path: Path
    unseen: int = 100

    @contextmanager
    def engine(self, daemon: DaemonProcess, rate: float | None, tokens: int = MAX_TOKENS) -> Iterator[EngineProcess]:
        """An engine whose connector has its defaults, and whose cache holds ``tokens`` and one prompt more.

        The light model computes ``rate`` tokens a second. Without one it takes no time, and nothing warms it up.
        """
        settings: dict[str, Any] = {}
        environ = {"PYTHONHASHSEED": "0"}
        if self.kind == LIGHT:
            settings = {**DOUBLE, "block_size": BLOCK_TOKENS}
            environ |= {"PYTHONPATH": str(Path(__file__).parents[2])} | ({RATE: str(rate)} if rate else {})
        blocks = 2 * MAX_TOKENS // BLOCK_TOKENS + tokens // BLOCK_TOKENS
        with EngineProcess(
            self.path,
            daemon.directory,
            num_blocks=blocks,
            max_model_len=MAX_TOKENS,
            environ=environ,
            **settings,
        ) as engine:
            wait_connected(daemon.directory, 1, CONNECT_S, lambda: engine.pids)
            if rate:
                for length in WARM_UP:
                    engine.generate([self.new_prompt(length)], max_tokens=1)
            yield engine

    def new_prompt(self, length: int) -> list[int]:
        self.unseen += 1
        return prompt(self.unseen, length)


@dataclass
class Filled:
    """A store that has PROMPTS, and the answers of the engine that computed them."""

    model: Model
    store: RedisServer
    cold: list[Completion] = field(default_factory=list)

    @contextmanager
    def link(self, bytes_per_second: float) -> Iterator[SlowLink]:
        with SlowLink(self.store.port, bytes_per_second) as link:
            yield link

    @contextmanager
    def other_node(self, url: str, rate: float) -> Iterator[EngineProcess]:
        """An engine of another node, whose pool is empty and whose store is at ``url``."""
        with DaemonProcess("512MiB", shared=url) as daemon:
            wait_serving(daemon.directory)
            with self.model.engine(daemon, rate) as engine:
                yield engine


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / request.param
    return Model(request.param, llama_8b(path, LAYERS) if request.param == LIGHT else make_demo_llama(path))


@pytest.fixture(scope="module")
def filled(model: Model) -> Iterator[Filled]:
    with RedisServer() as store:
        made = Filled(model, store)
        # What is not written cannot come back; which blocks are written is not the matter here.
        with DaemonProcess("512MiB", shared=store.url, shared_write="always") as daemon:
            wait_serving(daemon.directory)
            with model.engine(daemon, None) as engine:
                made.cold = [engine.generate([each])[0] for each in PROMPTS]
                engine.forget()
                fill_tiers(daemon.directory, engine, PROMPTS, blocks_of(PROMPTS))
        yield made


@pytest.fixture
def disk() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="kvoffd-long-", dir="/var/tmp"))
    yield place
    shutil.rmtree(place)


def full(prompts: list[list[int]]) -> list[int]:
    return [full_blocks(len(each)) for each in prompts]


def blocks_of(prompts: list[list[int]]) -> int:
    return sum(full(prompts)) // BLOCK_TOKENS


# --- another node ----------------------------------------------------------------------------------


def test_a_store_that_is_slower_than_computing_delays_nothing(filled: Filled) -> None:
    """1 MB/s: 82 s to load, 8 s to compute."""
    wanted, rate = PROMPTS[1], 600
    with filled.link(1e6) as link, filled.other_node(link.url, rate) as engine:
        (answer,) = engine.generate([wanted])
    assert answer.tokens == filled.cold[1].tokens
    assert answer.cached < full_blocks(len(wanted)) / 20
    assert answer.scheduled_at - answer.queued_at < 5 * ANSWER_SHARE * len(wanted) / rate


def test_a_store_that_hangs_is_not_waited_for(filled: Filled) -> None:
    """25 MB/s up to the middle of the prompt, 3.3 s for all of it, 5 s to compute."""
    wanted, rate = PROMPTS[1], 1000
    with filled.link(25e6) as link, filled.other_node(link.url, rate) as engine:
        link.hang_after(full_blocks(len(wanted)) * TOKEN_BYTES // 2)
        (answer,) = engine.generate([wanted])
        assert link.answered_bytes > 0
    assert answer.tokens == filled.cold[1].tokens
    assert answer.scheduled_at - answer.queued_at < 5 * SHARED_DEADLINE_S


# --- the node's own disk ---------------------------------------------------------------------------


def test_conversations_that_take_turns_come_back_from_disk(model: Model, disk: Path) -> None:
    """Four of 4,000 tokens, each half of the pool and 5 s to compute, one after the other, three times over."""
    conversations = [model.new_prompt(4001) for _ in range(4)]
    loaded = []
    with DaemonProcess("140MiB", disk=f"{disk}=3GiB") as daemon:
        wait_serving(daemon.directory)
        with model.engine(daemon, rate=800) as engine:
            for _ in range(3):
                engine.forget()
                loaded.append(sum(cached([engine.generate([each])[0] for each in conversations])))
    whole = sum(full(conversations))
    assert loaded[1] >= 0.95 * whole
    assert loaded[2] == whole


def test_many_prompts_at_once_read_each_block_once(model: Model, disk: Path) -> None:
    """Ten, each a tenth of the pool and 5 s to compute. What is computed was on the disk, and the engine said that it
    did not wait for it."""
    prompts = [model.new_prompt(1281) for _ in range(10)]
    disks, wanted = {"disk": f"{disk}=1GiB"}, blocks_of(prompts)
    with DaemonProcess("512MiB", **disks, disk_write="always") as daemon:
        wait_serving(daemon.directory)
        with model.engine(daemon, None, tokens=10 * 1312) as engine:
            fill_tiers(daemon.directory, engine, prompts, wanted)
        daemon.stop()
    with DaemonProcess("200MiB", **disks) as daemon:
        wait_serving(daemon.directory)
        with model.engine(daemon, 250, tokens=10 * 1312) as engine:
            answers = engine.generate(prompts)
            found = wait_books(daemon.directory, lambda found: loaded_keys(found) + late_keys(found) >= wanted)
    loaded = sum(cached(answers)) // BLOCK_TOKENS
    assert loaded + late_keys(found) == wanted, (cached(answers), [one.misses for one in found.namespaces.values()])
    assert loaded > wanted / 2
    assert loaded <= found.disks[0].read_blocks <= wanted


def loaded_keys(found: Books) -> int:
    return sum(one.loaded_keys for one in found.namespaces.values())


def late_keys(found: Books) -> int:
    """Keys that were in the pool or on a disk, and for which a prompt did not wait, or not for one before them."""
    return sum(
        one.misses.get(why, 0) for one in found.namespaces.values() for why in ("tier_late", "late", "after_gap")
    )


# --- the pool --------------------------------------------------------------------------------------


def test_loads_at_once_that_are_faster_than_computing_are_not_paused(model: Model) -> None:
    """A load waits for those before it, which says nothing of how long it takes itself."""
    prompts = [model.new_prompt(1001) for _ in range(40)]
    with DaemonProcess("1GiB") as daemon, model.engine(daemon, 40_000, tokens=40 * 1024) as engine:
        cold = [engine.generate([each])[0] for each in prompts]
        engine.forget()
        fill_tiers(daemon.directory, engine, prompts, blocks_of(prompts))
        engine.forget()
        late = engine.metrics().get("vllm:kvoffd_late_lookups", 0)
        loaded = engine.generate(prompts)
        late = engine.metrics().get("vllm:kvoffd_late_lookups", 0) - late
        log = engine.log
    assert PAUSED not in log
    assert cached(loaded).count(0) <= late, "one is computed in 25 ms, and its lookup may take longer"
    assert tokens(loaded) == tokens(cold)
