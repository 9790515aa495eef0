"""vLLM's scheduler, both halves of the connector and a model that is a double, in this process: no engine starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvoffd_client import AdminClient
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.kit.engine import BLOCK_TOKENS
from tests.kit.model_worker import ModelRunner
from tests.kit.waiting import wait_until
from tests.vllm.vllm_config import full_attention, make_config

LAYERS = 4
TOKEN_BYTES = LAYERS * full_attention().page_size_bytes // BLOCK_TOKENS
EMPTY_STEP_S = 0.001
"""What vLLM sleeps after a step in which nothing was computed."""
DEADLINE_S = 100.0


class EngineOfParts:
    """An engine whose connector has its defaults but for ``options``; one at a time in a process.

    Args:
        model: a model's directory, of which only the configuration is read.
        directory: the daemon's.
        blocks: of its KV cache.
        rate: tokens that it computes in a second.
    """

    def __init__(self, model: Path, directory: Path, blocks: int, rate: float, **options: object) -> None:
        config = make_config(model, {"directory": str(directory), **options})
        config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = blocks
        specs = {f"layer.{number}": full_attention() for number in range(LAYERS)}
        (cache,) = get_kv_cache_configs(config, [specs], [1 << 40])
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._worker = KvoffdConnector(config, KVConnectorRole.WORKER, cache)
        kv_transfer_state._KV_CONNECTOR_AGENT = self._worker
        self._runner = ModelRunner(config, rate)
        self._runner.initialize_kv_cache(cache)
        self._scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_TOKENS, BLOCK_TOKENS)
        self._number = 0
        self._cached: dict[str, int] = {}
        """By request, how many of its tokens were not computed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._scheduler.shutdown()
        self._worker.shutdown()

    def wait_connected(self, directory: Path) -> None:
        """Make steps until both halves of the connector are connected and the memory is registered."""

        def connected() -> bool:
            self.step()
            with AdminClient(directory) as admin:
                sessions = admin.sessions().sessions
            return any(one.registrations for one in sessions) and any(one.role == "scheduler" for one in sessions)

        wait_until(connected)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int = 1) -> list[int]:
        """Serve these prompts at once; return how many tokens of each were not computed."""
        requests = [self._request(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            self._scheduler.add_request(request)
        deadline = time.monotonic() + DEADLINE_S
        while self._scheduler.has_requests():
            assert time.monotonic() < deadline, [request.status for request in requests]
            self.step()
        return [self._cached.pop(request.request_id) for request in requests]

    def step(self) -> None:
        """Make one step, as vLLM's engine core does."""
        output = self._scheduler.schedule()
        result: Any = self._runner.execute_model(output) or self._runner.sample_tokens()
        for outputs in self._scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self._cached[one.request_id] = one.prefill_stats.num_cached_tokens
        if not output.total_num_scheduled_tokens:
            time.sleep(EMPTY_STEP_S)

    def forget(self) -> None:
        """Clear the engine's own prefix cache, when stores have ended that read its blocks."""

        def forgotten() -> bool:
            self.step()
            return bool(self._scheduler.reset_prefix_cache())

        wait_until(forgotten)

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request(f"r{self._number}", prompt, sampling, None, block_hasher=self._hasher)
