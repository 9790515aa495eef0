"""``vllm serve`` with the connector, in a process group of its own, started as users start it."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kit.engine import BLOCK_TOKENS, ENGINE_ENVIRON, Completion, connector_config
from tests.kit.openai_server import OpenAiServer

MODEL = "tiny"


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
        super().__init__([sys.executable, "-m", "tests.kit.server_main"], flags, environ)

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
