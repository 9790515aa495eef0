"""Routers of others, from PyPI, each in an environment of its own that `make routers` builds."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.kit.closing import Closing, ServerThread, ThreadsServer
from tests.kit.ports import free_port, free_ports, http_get
from tests.kit.waiting import wait_until

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-routers"
DYNAMO = ENVIRONMENTS / "dynamo" / "bin" / "python"
VLLM_ROUTER = ENVIRONMENTS / "vllm-router" / "bin" / "vllm-router"
START_S = 30.0
MODEL = "model"
COMPLETION = {
    "id": "x",
    "object": "text_completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def request(url: str, body: object = None) -> Any:
    """POST ``body`` as JSON, or GET; the answer from JSON."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as reply:
        return json.loads(reply.read() or b"null")


def serves(port: int) -> bool:
    with suppress(OSError):
        return http_get(port, "/health")[0] == 200
    return False


class Consumer(Closing):
    """A router as a process, from ``command``, that answers at ``port`` once it serves. ``log`` gets what it prints."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url, self.log_path = f"http://127.0.0.1:{port}", log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env={"PATH": "/usr/bin:/bin", "DYN_LOG": "info"}
            )
        wait_until(lambda: serves(port), START_S, explain=lambda: self.log)

    @property
    def log(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text(errors="replace"))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class DynamoIndexer(Consumer):
    """Dynamo's indexer as a service. Engines are its workers, by number."""

    def __init__(self, log: Path) -> None:
        port = free_port()
        command = [str(DYNAMO), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        super().__init__(command, port, log)

    def register(self, worker: int, port: int, replay_port: int, block_tokens: int) -> None:
        """Have it subscribe to an engine's events."""
        endpoints = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}"}
        engine = {"instance_id": worker, "model_name": MODEL, "block_size": block_tokens}
        request(f"{self.url}/register", engine | endpoints)

    def query(self, prompt: Sequence[int]) -> dict[int, dict[str, int]]:
        """By worker: the prompt's tokens that it has, by the lowest tier that is looked at."""
        found = request(f"{self.url}/query", {"token_ids": list(prompt), "model_name": MODEL})
        return {int(worker): one for worker, one in found["instances"].items()}

    def blocks(self) -> set[tuple[int, str, int, int]]:
        """Its whole index: worker, tier, hash of the block and of its parent."""
        found = set()
        for event in request(f"{self.url}/dump")[f"{MODEL}:default"]["events"]:
            stored = event["event"]["data"]["stored"]
            parent = stored["parent_hash"] or 0
            for block in stored["blocks"]:
                found.add((event["worker_id"], event["storage_tier"], block["block_hash"], parent))
                parent = block["block_hash"]
        return found


class Worker(ServerThread):
    """What a router sends completions to in an engine's place. It counts them."""

    def __init__(self) -> None:
        worker = self
        self.completions = 0

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None: ...

            def do_GET(self) -> None:
                data = b"{}"
                if length := int(self.headers.get("content-length", 0)):
                    self.rfile.read(length)
                    worker.completions += 1
                    data = json.dumps(COMPLETION).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

        super().__init__(ThreadsServer(Handler))
        self.url = f"http://127.0.0.1:{self.port}"


class VllmRouter(Consumer):
    """vLLM's router with the policy ``kv_aware``: ``engines`` are workers, with the ports of events and replays."""

    def __init__(self, log: Path, engines: Sequence[tuple[Worker, int, int]], block_tokens: int) -> None:
        port, metrics_port = free_ports(2)
        self._workers = [worker for worker, _, _ in engines]
        options = f"--port {port} --prometheus-port {metrics_port} --policy kv_aware --log-level debug"
        options += f" --kv-event-block-size {block_tokens} --kv-event-model {MODEL} --worker-urls"
        command = [str(VLLM_ROUTER), *options.split(), *[worker.url for worker in self._workers]]
        for worker, events, replays in engines:
            command += ["--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{events}"]
            command += ["--kv-event-replay-source", f"{worker.url}=tcp://127.0.0.1:{replays}"]
        super().__init__(command, port, log)

    def ask(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Send a completion: which worker it went to, and how many of the prompt's tokens that one was credited."""
        before = [worker.completions for worker in self._workers]
        decisions = len(self._decisions())
        request(f"{self.url}/v1/completions", {"model": MODEL, "prompt": list(prompt), "max_tokens": 1})
        wait_until(lambda: len(self._decisions()) > decisions, 5, explain=lambda: self.log[-2000:])
        (chosen,) = [at for at, worker in enumerate(self._workers) if worker.completions > before[at]]
        return chosen, int(self._decisions()[-1])

    def _decisions(self) -> list[str]:
        return re.findall(r"KV prefix decision .*credited_prefix_tokens=(\d+)", self.log)
