"""``vllm serve`` with the connector, in a process group of its own; every night it is started as users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kit import runner_v2
from tests.kit.amount import TIMES
from tests.kit.engine import BLOCK_TOKENS, ENGINE_ENVIRON, Completion, connector_config
from tests.kit.fork_servers import server_with_vllm
from tests.kit.forked import Forked
from tests.kit.forked_server import serve
from tests.kit.openai_server import OpenAiServer

MODEL = "tiny"
PROGRAM = sys.executable, "-m", "tests.kit.server_main"


class EngineServer(OpenAiServer):
    """An OpenAI server on a free port of 127.0.0.1 (``server_main``); it finds the connector on its own.

    The model needs a tokenizer. ``settings`` are flags of the server, ``extra_config`` options of the connector.
    """

    def __init__(
        self, model: Path, directory: Path, extra_config: dict[str, Any] | None = None, **settings: str
    ) -> None:
        transfer = connector_config(directory, {"do_no_harm": False, **(extra_config or {})})
        flags = {
            "enforce-eager": "",
            "enable-prompt-tokens-details": "",
            "model": str(model),
            "served-model-name": MODEL,
            "dtype": "float32",
            "seed": "0",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": "4096",
            "num-gpu-blocks-override": "400",
            "kv-transfer-config": json.dumps(transfer),
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        environ = {
            **ENGINE_ENVIRON,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache and /collective_rpc
            "TORCH_COMPILE_DISABLE": "1",
        }
        super().__init__(PROGRAM, flags, environ)

    def _begin(self) -> subprocess.Popen[bytes] | Forked:
        if TIMES > 1:
            return super()._begin()
        self.log_path.touch()
        given = self._command[len(PROGRAM) :], self._environ, str(self.log_path)
        return Forked(server_with_vllm(v2=runner_v2.wanted()), serve, *given)

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

    def reload_weights(self, path: Path) -> None:
        """Load the weights of another checkpoint in place, by vLLM's own method."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        status, answer = self.ask("POST", "/collective_rpc", call)
        assert status == 200, answer
