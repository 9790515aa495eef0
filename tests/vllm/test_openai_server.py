"""``vllm serve`` with the connector: what a request says over HTTP about its KV cache is followed."""

from __future__ import annotations

import json

import pytest

from tests.kit.command import run_cli
from tests.kit.engine import BLOCK_TOKENS, prompt, wait_books
from tests.kit.wire import NamespaceStats, books
from tests.vllm.engine_home import EngineHome
from tests.vllm.engine_server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BLOCKS = 10
PROMPT = prompt(1, BLOCKS * BLOCK_TOKENS + 5)


class Requests:
    """One prompt, asked again and again, each time from an empty cache of the server's own."""

    def __init__(self, home: EngineHome, server: EngineServer) -> None:
        self._home, self._server = home, server
        server.forget()
        self.expected = server.complete(PROMPT, max_load_tokens=0, max_offload_tokens=3 * BLOCK_TOKENS).tokens
        self.wait_stored(3)

    @property
    def books(self) -> NamespaceStats:
        (namespace,) = books(self._home.directory).namespaces.values()
        return namespace

    def wait_stored(self, blocks: int) -> None:
        """Until the daemon has so many blocks of the prompt."""
        wait_books(self._home.directory, lambda found: found.ready_blocks == blocks)

    def loaded(self, **params: object) -> float:
        """Blocks that the request loaded which says this in its ``kv_transfer_params``."""
        self._server.forget()
        before = self.books
        answer = self._server.complete(PROMPT, **params)
        assert answer.tokens == self.expected
        after = self.books
        found = (after.loaded_bytes - before.loaded_bytes) / (after.stored_bytes / after.stored_blocks)
        assert answer.cached == found * BLOCK_TOKENS
        return found


@pytest.fixture(scope="module")
def requests(home: EngineHome, server: EngineServer) -> Requests:
    home.ensure_no_daemon()
    home.ensure_daemon(server)
    return Requests(home, server)


def test_server_follows_what_requests_say_of_their_cache(requests: Requests) -> None:
    """max_offload_tokens, of the first request, max_load_tokens, kv_load_tiers; what cannot be read is ignored."""
    assert requests.loaded() == 3
    requests.wait_stored(BLOCKS)
    assert requests.loaded() == BLOCKS
    assert requests.loaded(max_load_tokens=4 * BLOCK_TOKENS) == 4
    assert requests.loaded(max_load_tokens=0) == 0
    assert requests.loaded(max_load_tokens="many") == BLOCKS, "vLLM warns of it"
    assert requests.loaded(kv_load_tiers=[]) == BLOCKS, "the pool is the primary tier, which is always read"
    assert requests.loaded(kvoffd={"priority": "high"}) == BLOCKS, "a parameter that nobody reads"


def test_engine_and_daemon_count_the_same(requests: Requests, home: EngineHome, server: EngineServer) -> None:
    """``kvoffd-cli doctor --engine`` compares them: tokens that were brought, and who is connected."""
    assert requests.loaded() == BLOCKS
    url = f"http://127.0.0.1:{server.port}"
    done = run_cli("doctor", "--json", "--engine", url, "--directory", str(home.directory))
    report = json.loads(done.stdout)
    assert report["value"]["loaded_tokens"] >= BLOCKS * BLOCK_TOKENS
    checks = {one["check"] for one in report["findings"]}
    assert not {one for one in checks if one.startswith(("engine_", "hits_", "workers_", "no_", "broken_"))}
