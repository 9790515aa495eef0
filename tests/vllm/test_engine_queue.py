"""Prompts that wait in an engine's queue load what the daemon has when they are scheduled, not when they arrived.

The KV cache holds two and a half documents, so vLLM's own cache has none of them when it comes again. The connector has
its defaults. Computing a document takes the model about a second, loading it some milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
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
    completions,
    full_blocks,
    prompt,
    tokens,
    wait_connected,
    wait_stored,
)
from tests.kit.models import make_demo_llama
from tests.kit.waiting import wait_until
from tests.kit.wire import books

pytestmark = [pytest.mark.engine, pytest.mark.concurrent, pytest.mark.timeout(900)]

LENGTH = 650
LOADED = full_blocks(LENGTH)
"""Tokens of a document that are loaded: 20 blocks. The rest is computed, as always."""
DOCUMENT_BLOCKS = LENGTH // BLOCK_TOKENS
CACHE_BLOCKS = DOCUMENT_BLOCKS * 5 // 2 + 1
"""Two and a half documents, and vLLM's null block."""
DOCUMENTS = 6
LONG_ANSWER = 1000 - LENGTH
"""Tokens of an answer behind which others wait for seconds, until it is aborted."""
LEASE_TTL_S = 4.0
STOPPED_S = 3.0
ARRIVED_S = 100.0
"""An engine takes new prompts between two steps, which take 10 s each at a load of 30."""
SETTINGS: dict[str, Any] = {"num_blocks": CACHE_BLOCKS, "max_model_len": 1024, "max_num_seqs": 1}


@dataclass
class Queue:
    """An engine that runs one prompt at a time, and its daemon, whose pool has space for all documents."""

    model: Path
    v2: bool
    daemon: DaemonProcess = field(default_factory=lambda: DaemonProcess("1GiB", limits={"lease_ttl_s": LEASE_TTL_S}))

    def __post_init__(self) -> None:
        self.engine = self.new_engine()
        self._abort_file = self.daemon.directory / "abort"

    def new_engine(self) -> EngineProcess:
        return EngineProcess(self.model, self.daemon.directory, v2=self.v2, **SETTINGS)

    def start(self) -> None:
        self.daemon.start()
        self.engine.start()
        wait_connected(self.daemon.directory)

    def close(self) -> None:
        self.engine.close()
        self.daemon.close()

    def counts(self) -> Counter[str]:
        """Tokens that the engine has loaded so far, and lookups that were late: those prompts are rightly computed."""
        found = self.engine.metrics()
        return Counter(
            loaded=int(found.get("vllm:external_prefix_cache_hits", 0)),
            late=int(found.get("vllm:kvoffd_late_lookups", 0)),
        )

    def lookups(self) -> int:
        return sum(one.lookups for one in books(self.daemon.directory).namespaces.values())

    def begin_behind(self, others: list[list[int]], wanted: list[int]) -> None:
        """Ask for a document behind others, which get long answers until ``finish_last``."""
        self._abort_file.unlink(missing_ok=True)
        limits = [LONG_ANSWER] * len(others) + [8]
        prompts, file = [*others, wanted], str(self._abort_file)
        self.engine.begin("generate", prompts=prompts, max_tokens=limits, abort_file=file)

    def finish_last(self) -> Completion:
        """Abort the others, so that it is the document's turn, and return its answer."""
        self._abort_file.touch()
        return completions(self.engine.finish())[-1]

    def ask_twice(self, batch: list[Any]) -> None:
        """Ask a batch that has each prompt twice, and see that each is loaded the second time."""
        before = self.counts()
        answers = self.engine.generate(batch)
        counted = self.counts() - before
        first, again = cached(answers[:DOCUMENTS]), cached(answers[DOCUMENTS:])
        assert first == [0] * DOCUMENTS
        assert again.count(LOADED) >= DOCUMENTS - counted["late"], again
        assert counted["loaded"] == sum(again)
        assert tokens(answers[DOCUMENTS:]) == tokens(answers[:DOCUMENTS])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_llama(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.nightly)])
def queue(request: pytest.FixtureRequest, model: Path) -> Iterator[Queue]:
    made = Queue(model, request.param == "v2")
    try:
        made.start()
        assert ("Using V2 Model Runner" in made.engine.log) == made.v2
        yield made
    finally:
        made.close()


def documents(first_seed: int, count: int = DOCUMENTS) -> list[list[int]]:
    return [prompt(seed, LENGTH) for seed in range(first_seed, first_seed + count)]


def _stored(queue: Queue, wanted: list[int], others: list[list[int]]) -> Completion:
    """Have the daemon store a document, and the engine's own cache forget it. Returns its answer."""
    (answer,) = queue.engine.generate([wanted])
    queue.engine.generate(others)
    wait_stored(queue.daemon.directory)
    return answer


def test_documents_that_come_again_in_one_batch_are_loaded(queue: Queue) -> None:
    """All sixteen arrive before the first is computed."""
    queue.ask_twice(documents(100) * 2)


def test_tenants_in_one_batch_load_each_its_own_documents(queue: Queue) -> None:
    """Two tenants ask about the same documents, all of them twice."""
    tenants, asked = ("red", "blue"), documents(200, DOCUMENTS // 2)
    once = [{"prompt_token_ids": one, "cache_salt": tenant} for tenant in tenants for one in asked]
    queue.ask_twice(once * 2)


def test_a_document_that_waits_for_longer_than_its_lease_lives_is_loaded(queue: Queue) -> None:
    """It was found whole, and pinned, when it arrived."""
    wanted, *others = documents(400, 4)
    known = _stored(queue, wanted, others)
    arrived = queue.lookups() + len(others) + 1
    queue.begin_behind(others, wanted)
    wait_until(lambda: queue.lookups() >= arrived, ARRIVED_S)
    time.sleep(1.5 * LEASE_TTL_S)
    last = queue.finish_last()
    assert last.scheduled_at - last.queued_at > LEASE_TTL_S
    assert (last.cached, last.tokens) == (LOADED, known.tokens)


def test_a_document_whose_first_lookup_failed_is_loaded(queue: Queue) -> None:
    """The daemon stands still when the prompts arrive, for longer than a request waits."""
    wanted, *others = documents(500, 4)
    known = _stored(queue, wanted, others)
    asked = queue.lookups()
    os.kill(queue.daemon.pid, signal.SIGSTOP)
    try:
        queue.begin_behind(others, wanted)
        time.sleep(1.5 * STOPPED_S)
    finally:
        os.kill(queue.daemon.pid, signal.SIGCONT)
    wait_until(lambda: queue.lookups() > asked, ARRIVED_S)  # it serves again
    last = queue.finish_last()
    assert last.scheduled_at - last.queued_at > STOPPED_S
    assert (last.cached, last.tokens) == (LOADED, known.tokens)


@pytest.mark.parametrize("queue", ["v1"], indirect=True)
def test_a_document_in_the_queue_is_loaded_once_another_engine_has_stored_it(queue: Queue) -> None:
    """It waits behind others when the other engine computes it."""
    *others, wanted = documents(300, 2 * DOCUMENTS)
    directory = queue.daemon.directory

    with queue.new_engine() as other:
        wait_connected(directory, workers=2)
        wait_stored(directory)
        before, arrived = books(directory).ready_blocks, queue.lookups() + len(others) + 1
        counted_before = queue.counts()
        queue.engine.begin("generate", prompts=[*others, wanted], max_tokens=8)
        wait_until(lambda: queue.lookups() >= arrived, ARRIVED_S)
        (computed,) = other.generate([wanted])
        stored_at = computed.first_token_at
        answers = completions(queue.engine.finish())
    assert books(directory).ready_blocks - before == DOCUMENT_BLOCKS * (len(others) + 1)
    *_, last = answers
    assert last.scheduled_at > stored_at, "its turn came before the other engine had it"
    assert (computed.cached, cached(answers[:-1])) == (0, [0] * len(others))
    assert last.cached == LOADED or (queue.counts() - counted_before)["late"], last.cached
    assert last.tokens == computed.tokens
