"""vLLM's own scheduler with a connector in it and no model under it: the workers' half is played."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 32
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
)
"""What the scheduler calls of a connector."""
IDLE_STEP_S = 0.001
"""vLLM's engine sleeps so long after a step in which no model ran."""
REQUEST_DEADLINE_S = 20.0


@dataclass
class RequestRun:
    """What one request took in the scheduler, from its arrival to its end.

    Attributes:
        scheduler_s: seconds in add_request(), schedule() and update_from_output(), all steps together.
        connector_s: of these, in the connector.
        steps: scheduler steps until the request was gone and nothing was left to do.
        loaded_tokens: prompt tokens that the connector brought.
        stored_blocks: blocks that the connector was to store.
    """

    scheduler_s: float = 0.0
    connector_s: float = 0.0
    steps: int = 0
    loaded_tokens: int = 0
    stored_blocks: int = 0


class SchedulerHarness:
    """One scheduler whose workers do at once what they are told, and report it one step later.

    Args:
        model: directory of a model's configuration; its weights are not read.
        connector: name of vLLM's registry, or of a class in ``module``.
        blocks: of the longest prompt.
        report: makes what workers report; the connector's own class.
    """

    def __init__(
        self,
        model: Path,
        connector: str,
        blocks: int,
        *,
        module: str | None = None,
        extra_config: dict[str, Any] | None = None,
        report: Callable[..., OffloadingWorkerMetadata] = OffloadingWorkerMetadata,
    ) -> None:
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
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=extra_config or {},
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
        self._report = report
        self._run = RequestRun()
        for name in CALLS:
            setattr(self.connector, name, partial(self._timed, getattr(self.connector, name)))

    def request(self, name: str, tokens: list[int]) -> Request:
        """A request that wants one token, its block hashes computed as vLLM's front end has them computed."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return Request(name, tokens, sampling, None, block_hasher=self._hasher)

    def clear_prefix_cache(self) -> None:
        assert self._scheduler.reset_prefix_cache(), "blocks are still in use"

    def run(self, request: Request) -> RequestRun:
        """Take one request through all its scheduler steps, as the engine does."""
        run = self._run = RequestRun()
        began = time.perf_counter()
        self._scheduler.add_request(request)
        run.scheduler_s += time.perf_counter() - began
        deadline = began + REQUEST_DEADLINE_S
        jobs: dict[int, str | None] = {}
        while self._scheduler.has_requests() or jobs:
            assert time.perf_counter() < deadline, "the request did not end"
            jobs, computed = self._step(run, jobs)
            if not computed:
                time.sleep(IDLE_STEP_S)
        # One more: the connector hears of the request's end in the next step's metadata.
        self._step(run, jobs)
        return run

    def close(self) -> None:
        self._scheduler.shutdown()

    def _step(self, run: RequestRun, ended: dict[int, str | None]) -> tuple[dict[int, str | None], bool]:
        """One step, in which the workers report the jobs in ``ended``; return the jobs they were given meanwhile."""
        began = time.perf_counter()
        output = self._scheduler.schedule()
        scheduled = time.perf_counter()
        given = _jobs(output.kv_connector_metadata)
        ran = self._model(list(output.num_scheduled_tokens), ended)
        resumed = time.perf_counter()
        self._scheduler.update_from_output(output, ran)
        run.scheduler_s += scheduled - began + time.perf_counter() - resumed
        run.steps += 1
        for new in output.scheduled_new_reqs:
            run.loaded_tokens = max(run.loaded_tokens, new.num_computed_tokens)
        stores = getattr(output.kv_connector_metadata, "store_jobs", {})
        run.stored_blocks += sum(len(job.src_spec.block_ids) for job in stores.values())
        return given, output.total_num_scheduled_tokens > 0

    def _model(self, names: list[str], ended: dict[int, str | None]) -> ModelRunnerOutput:
        """What a model and its workers would have answered."""
        report = self._report(completed_jobs=dict.fromkeys(ended, 1)) if ended else None
        received = {name for name in ended.values() if name is not None}
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=report),
        )

    def _timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._run.connector_s += time.perf_counter() - began


def _jobs(metadata: Any) -> dict[int, str | None]:
    """Job ids, with the request where it is a load."""
    loads = {job_id: job.req_id for job_id, job in getattr(metadata, "load_jobs", {}).items()}
    return loads | dict.fromkeys(getattr(metadata, "store_jobs", {}))


def _cache(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec(layer_names=["layer.0"], kv_cache_spec=spec)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC")
