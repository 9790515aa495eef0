"""vLLM's own scheduler with kvoffd's connector in it and no model under it: the workers' half is played."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvoffd_client.vllm.connector_metadata import WorkerReport

BLOCK_TOKENS = 32
CREDIT_BYTES = 1 << 20
IDLE_STEP_S = 0.001
"""vLLM's engine sleeps so long after a step in which no model ran."""
REQUEST_DEADLINE_S = 20.0


class SchedulerHarness:
    """One scheduler whose workers do at once what they are told, and report it one step later.

    Args:
        model: directory of a model's configuration; its weights are not read.
        blocks: of the longest prompt.
    """

    def __init__(self, model: Path, blocks: int, extra_config: dict[str, Any]) -> None:
        tokens = (blocks + 2) * BLOCK_TOKENS
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=tokens,
            max_num_batched_tokens=tokens,
            hf_overrides={"max_position_embeddings": tokens},
        ).create_engine_config()
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvoffdConnector",
            kv_connector_module_path="kvoffd_client.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra_config,
        )
        config.cache_config.kv_cache_layout = "LBHNC"
        config.cache_config.num_gpu_blocks = 2 * (blocks + 2)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=_cache(config.cache_config.num_gpu_blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.connector: Any = self._scheduler.connector

    def request(self, name: str, tokens: list[int]) -> Request:
        """A request that wants one token, its block hashes computed as vLLM's front end has them computed."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return Request(name, tokens, sampling, None, block_hasher=self._hasher)

    def run(self, request: Request) -> None:
        """Take one request through all its scheduler steps, as the engine does."""
        deadline = time.monotonic() + REQUEST_DEADLINE_S
        self._scheduler.add_request(request)
        jobs: dict[int, str | None] = {}
        while self._scheduler.has_requests() or jobs:
            assert time.monotonic() < deadline, "the request did not end"
            jobs, computed = self._step(jobs)
            if not computed:
                time.sleep(IDLE_STEP_S)
        # One more: the connector hears of the request's end in the next step's metadata.
        self._step(jobs)

    def close(self) -> None:
        self._scheduler.shutdown()

    def _step(self, ended: dict[int, str | None]) -> tuple[dict[int, str | None], bool]:
        """One step, in which the workers report the jobs in ``ended``; return the jobs they were given meanwhile."""
        output = self._scheduler.schedule()
        metadata = output.kv_connector_metadata
        given = {job_id: job.req_id for job_id, job in getattr(metadata, "load_jobs", {}).items()}
        given |= dict.fromkeys(getattr(metadata, "store_jobs", {}))
        self._scheduler.update_from_output(output, self._model(list(output.num_scheduled_tokens), ended))
        return given, output.total_num_scheduled_tokens > 0

    def _model(self, names: list[str], ended: dict[int, str | None]) -> ModelRunnerOutput:
        """What a model and its workers would have answered."""
        report = WorkerReport(dict.fromkeys(ended, 1), credit_bytes=CREDIT_BYTES) if ended else None
        received = {name for name in ended.values() if name is not None}
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=report),
        )


def _cache(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec(layer_names=["layer.0"], kv_cache_spec=spec)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC")
