"""``vllm serve`` with the connector, in a process group of its own, started as users start it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.kit.closing import Starting
from tests.kit.engine import (
    ANSWER_DEADLINE_S,
    BLOCK_TOKENS,
    ENGINE_ENVIRON,
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    Completion,
    connector_config,
    session_pids,
)
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

MODEL = "tiny"


class EngineServer(Starting):
    """An OpenAI server on a free port of 127.0.0.1 (``server_main``); it finds the connector on its own.

    The model needs a tokenizer. ``settings`` are flags of the server, ``extra_config`` options of the connector.
    """

    def __init__(
        self, model: Path, directory: Path, extra_config: dict[str, Any] | None = None, **settings: str
    ) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="kvoffd-server-", dir="/tmp"))
        self.log_path = self._own / "log"
        self.port = free_port()
        transfer = connector_config(directory, {"do_no_harm": False, **(extra_config or {})})
        flags = {
            "model": str(model),
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": str(self.port),
            "dtype": "float32",
            "seed": "0",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": "4096",
            "num-gpu-blocks-override": "400",
            "kv-transfer-config": json.dumps(transfer),
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self._command = [sys.executable, "-m", "tests.kit.server_main"]
        self._command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        self._command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        self._environ = {
            **os.environ,
            **ENGINE_ENVIRON,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache and /collective_rpc
            "TORCH_COMPILE_DISABLE": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def pids(self) -> list[int]:
        """The ids of all its processes."""
        return session_pids(self._process.pid) if self._process else []

    def start(self) -> Self:
        """Start and wait until it serves."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> Self:
        """Start without waiting; nothing where it was launched before."""
        if self._process is None:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=self._environ,
                    start_new_session=True,
                )
        return self

    def wait_ready(self) -> Self:
        """Until it serves. Raises AssertionError with the end of its log when it does not."""

        def serves() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended:\n{self.log[-5000:]}"
            try:
                return self.ask("GET", "/health")[0] == 200
            except OSError:
                return False

        wait_until(serves, START_DEADLINE_S, explain=lambda: self.log[-5000:], interval_s=0.1)
        return self

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_DEADLINE_S)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, tokens: list[int], max_tokens: int = 8, **params: Any) -> Completion:
        """Complete one prompt with these ``kv_transfer_params``."""
        body = {
            "model": MODEL,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"kv_transfer_params": params} if params else {}),
        }
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        found = json.loads(answer)
        (choice,) = found["choices"]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Completion(choice["token_ids"], [], details.get("cached_tokens") or 0, choice["finish_reason"], 0.0)

    def generate(self, prompts: list[list[int]], max_tokens: int = 8) -> list[Completion]:
        """Have the engine answer these prompts, all at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda tokens: self.complete(tokens, max_tokens), prompts))

    def forget(self, connector: bool = False) -> None:
        """Clear the engine's own prefix cache, so that only the daemon has the blocks; and the connector's if asked."""
        path = f"/reset_prefix_cache?reset_external={str(connector).lower()}"

        def cleared() -> bool:
            status, answer = self.ask("POST", path)
            assert status == 200, answer
            return bool(json.loads(answer)["success"])

        wait_until(cleared, interval_s=0.05)

    def reload_weights(self, path: Path) -> None:
        """Load the weights of another checkpoint in place, by vLLM's own method."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        status, answer = self.ask("POST", "/collective_rpc", call)
        assert status == 200, answer

    def close(self) -> None:
        """End it and remove what it left."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE_S)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_DEADLINE_S)
            self._process = None
        shutil.rmtree(self._own, ignore_errors=True)
