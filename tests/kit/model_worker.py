"""The vLLM worker of ``model_double``. Only an engine's process imports it."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from .model_double import RATE

TOKEN = 7
"""The token that every request generates in every step."""
TILE_BYTES = 32 << 20


class ModelRunner:
    """Has a model by which the connector names the weights, allocates the KV cache, and makes steps."""

    def __init__(self, config: VllmConfig, tokens_per_second: float) -> None:
        self._config = config
        self._tokens_per_second = tokens_per_second
        self._model = torch.nn.Linear(4, 4)
        for parameter in self._model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        self._prompt_tokens: dict[str, int] = {}
        self._output: ModelRunnerOutput | None = None

    def get_model(self) -> torch.nn.Module:
        return self._model

    def initialize_kv_cache(self, cache: KVCacheConfig) -> None:
        """Allocate the KV cache as vLLM does, and fill it with random bytes, which no file system leaves out."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        context = connector.get_mem_pool_context() if connector is not None else None
        layout = self._config.cache_config.get_resolved_kv_cache_layout()
        with context or nullcontext():
            tensors = allocate_kv_cache(cache, torch.device("cpu"), layout)
        first = next(iter(tensors.values()))
        memory = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        tile = torch.randint(256, (TILE_BYTES,), dtype=torch.uint8)
        for part in memory.split(TILE_BYTES):
            part.copy_(tile[: len(part)])
        if connector is not None:
            connector.register_kv_caches(tensors)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Make a step, with the calls of the connector that vLLM's model runners make."""
        has_connector = has_kv_transfer_group()
        if has_connector:
            get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)
        with set_forward_context(None, self._config):
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as transfers:
                time.sleep(output.total_num_scheduled_tokens / self._tokens_per_second)
        result = ModelRunnerOutput.with_kv_conn_output_only(transfers)
        if not output.total_num_scheduled_tokens:
            return result
        ids = list(output.num_scheduled_tokens)
        sampled = [[TOKEN] if self._is_whole(output, each) else [] for each in ids]
        self._output = ModelRunnerOutput(ids, {each: at for at, each in enumerate(ids)}, sampled)
        self._output.kv_connector_output = result.kv_connector_output
        return None

    def sample_tokens(self) -> ModelRunnerOutput | None:
        """Return the output of the step that ``execute_model`` made."""
        made, self._output = self._output, None
        return made

    def _is_whole(self, output: SchedulerOutput, request_id: str) -> bool:
        """Whether a request's prompt is computed after this step."""
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                self._prompt_tokens[request_id] = len(new.prompt_token_ids or ())
                computed = new.num_computed_tokens
                break
        else:
            cached = output.scheduled_cached_reqs
            computed = cached.num_computed_tokens[cached.req_ids.index(request_id)]
        return computed + output.num_scheduled_tokens[request_id] >= self._prompt_tokens[request_id]


class ModelWorker(WorkerBase):
    """Answers what vLLM's executor asks of a worker."""

    model_runner: Any

    def init_device(self) -> None:
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self.model_runner = ModelRunner(self.vllm_config, float(os.environ.get(RATE, "inf")))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Do nothing: the runner has its model."""

    def get_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()
        return model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        config, parallel = self.model_config, self.parallel_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=config.get_num_kv_heads(parallel),
            head_size=config.get_head_size(),
            dtype=config.dtype,
        )
        layers = range(config.get_num_layers(parallel))
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in layers}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        return 1 << 40  # num_gpu_blocks_override says how much is taken

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        result: ModelRunnerOutput | None = self.model_runner.execute_model(scheduler_output)
        return result

    def sample_tokens(self, grammar_output: object) -> ModelRunnerOutput | None:
        result: ModelRunnerOutput | None = self.model_runner.sample_tokens()
        return result

    def get_kv_connector_handshake_metadata(self) -> None:
        """Return None: kvoffd's workers do not meet each other."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def synchronize_device(self) -> None:
        """Do nothing: there is no device."""

    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown()
