# ruff: noqa: E402 - a vLLM that does not fit must be refused before anything of its insides is imported
"""KvoffdConnector: vLLM's OffloadingConnector with a daemon behind it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import Gauge

from kvoffd_client.vllm.compat import check_version, require_vllm, untested

require_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.request import RequestStatus

from kvoffd_client.vllm.block_origins import ToldBlocks, is_told, tell_origins
from kvoffd_client.vllm.connector_metadata import (
    FailedJob,
    KvoffdConnectorMetadata,
    KvoffdWorkerMetadata,
    MemoryReport,
)
from kvoffd_client.vllm.connector_options import choose_load_failure_policy, parse_options
from kvoffd_client.vllm.early_fence import fence_early
from kvoffd_client.vllm.engine_requirements import check_engine, check_groups, check_siblings, machine_id, parents_of
from kvoffd_client.vllm.kv_memory import describe_layers
from kvoffd_client.vllm.live_weights import LiveWeights, has_experts_elsewhere
from kvoffd_client.vllm.log import StoreRefusalFilter, logger
from kvoffd_client.vllm.lookup_timing import tell_of_received_requests
from kvoffd_client.vllm.lora_adapters import LoraAdapters
from kvoffd_client.vllm.offloading_manager import KvoffdManager
from kvoffd_client.vllm.offloading_spec import SETUP, KvoffdSpec, name_spec, setup_of
from kvoffd_client.vllm.offloading_worker import KvoffdTransferResult, KvoffdWorker
from kvoffd_client.vllm.step_view import (
    LoadedRequests,
    loadable_tokens,
    note_allocated,
    note_shared_prefix,
    shown,
    without_holes,
)

if TYPE_CHECKING:
    from kvoffd_client.vllm import vllm_types as v

OUTPUT_PAUSE_S = 0.00005
"""Pause in the first step that computes nothing: the thread that sends the last tokens waits for the GIL, and with it
the user; nobody waits for such a step."""
STORE_LOGGER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


class KvoffdConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker half, where a failed transfer is reported and is no assertion error.

    ``failed_recving`` are the requests whose load failed since the last report.
    """

    def __init__(self, spec: KvoffdSpec, vllm_config: v.VllmConfig, kv_cache_config: v.KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._kvoffd_spec = spec
        self._connector_worker_meta = KvoffdWorkerMetadata()
        self.failed_recving: set[str] = set()
        self._last_report: tuple[int | None, bool] = (None, True)
        self._weights: LiveWeights | None = None
        self._digest: str | None = None
        self._generation = 0
        self._last_memory: MemoryReport | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; names the weights, and has the registration describe the layers' pages."""
        self._weights = LiveWeights.of_caller(experts_elsewhere=has_experts_elsewhere(self.vllm_config))
        self._digest = self._weights.digest() if self._weights is not None else None
        fence_early(self._weights and self._weights.runner, self.handle_preemptions)
        setup = self._kvoffd_spec.setup
        groups = [self.kv_cache_config.kv_cache_groups[group_id].layer_names for group_id in setup.group_ids]
        setup.layers = describe_layers(kv_caches, groups, self.kv_cache_config.num_blocks)
        super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KvoffdConnectorMetadata) -> None:
        """As vLLM's, which calls it first in every step; names the weights and joins the namespace when told to."""
        worker, weights = self._kvoffd_worker, self._weights
        if weights is not None and weights.changed:
            # Stores that wait to be sent may hold blocks of these weights or of those, so they must fail.
            worker.leave()
        if isinstance(kv_connector_metadata, KvoffdConnectorMetadata):
            generation, namespace = kv_connector_metadata.generation, kv_connector_metadata.namespace
            if generation is not None and generation > self._generation:
                self._generation = generation
                self._digest = weights.digest() if weights is not None else None
            if namespace is not None and generation == self._generation and not self._changed:
                worker.join(namespace)
        super().handle_preemptions(kv_connector_metadata)

    def start_kv_transfers(self, metadata: KvoffdConnectorMetadata) -> None:
        """As vLLM's; all jobs of the step go out in one message."""
        super().start_kv_transfers(metadata)
        self._kvoffd_worker.flush()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return requests whose stores (always none) and loads ended, the failed ones among them."""
        received: set[str] = set()
        for result in self._kvoffd_worker.get_finished():
            assert isinstance(result, KvoffdTransferResult)
            meta = self._connector_worker_meta
            request_id = self._load_jobs.pop(result.job_id, None)
            if result.transfer_time is not None and result.transfer_size is not None:
                direction = meta.transfer_stats.store if request_id is None else meta.transfer_stats.load
                direction.record(result.transfer_size, result.transfer_time)
            meta.mark_completed(result.job_id)
            if request_id is not None and result.success and result.transfer_time is not None:
                meta.load_seconds[result.job_id] = result.transfer_time
            if result.failed is not None:
                meta.failed_jobs[result.job_id] = result.failed
            if request_id is not None:
                received.add(request_id)
                if not result.success:
                    self.failed_recving.add(request_id)
        return set(), received

    def build_connector_worker_meta(self) -> KvoffdWorkerMetadata | None:
        """Return this worker's report to the scheduler half; None when there is nothing new."""
        worker = self._kvoffd_worker
        setup = self._kvoffd_spec.setup
        report = (worker.credit_bytes, worker.usable)
        assert setup.namespace is not None, "a worker has one"
        memory = MemoryReport(
            setup.namespace, self._digest, self._generation, machine_id(), self._changed, worker.registered
        )
        told = memory == self._last_memory
        waited_s, worker.waited_s = worker.waited_s, 0.0
        if not self._connector_worker_meta.completed_jobs and report == self._last_report and told and not waited_s:
            return None
        meta, self._connector_worker_meta = self._connector_worker_meta, KvoffdWorkerMetadata()
        meta.credit_bytes, meta.usable = self._last_report = report
        meta.waited_s = waited_s
        if not told:
            meta.memory = {self._kvoffd_spec.config.parallel.rank: memory}
            self._last_memory = memory
        return meta

    @property
    def _changed(self) -> bool:
        return self._weights is not None and self._weights.changed

    def shutdown(self) -> None:
        super().shutdown()
        self._connector_worker_meta = KvoffdWorkerMetadata()

    @property
    def _kvoffd_worker(self) -> KvoffdWorker:
        assert isinstance(self.worker, KvoffdWorker)
        return self.worker


class KvoffdConnector(OffloadingConnector):
    """Offloads KV blocks to the kvoffd daemon of this machine. A daemon that is away, slow or dying is a cache miss.

    vLLM's KVConnectorFactory makes it. Raises ValueError when an option in kv_connector_extra_config is wrong, or the
    engine uses what kvoffd cannot follow.
    """

    connector_scheduler: Any
    connector_worker: Any

    def __init__(self, vllm_config: v.VllmConfig, role: KVConnectorRole, kv_cache_config: v.KVCacheConfig) -> None:
        check_engine(vllm_config)
        check_groups(kv_cache_config)
        parents = parents_of(self)
        check_siblings(parents)
        transfer_config = vllm_config.kv_transfer_config
        options, unknown = parse_options(transfer_config.kv_connector_extra_config)
        check_version(strict=options.strict_version)
        if role == KVConnectorRole.SCHEDULER:
            if unknown:
                logger.warning(
                    "kvoffd: kv_connector_extra_config has keys that nobody reads: %s.", ", ".join(sorted(unknown))
                )
            if sentence := untested():
                logger.warning("kvoffd: %s", sentence)
        name_spec(transfer_config)
        self._setup = setup_of(vllm_config, kv_cache_config, options, role)
        token = SETUP.set(self._setup)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            SETUP.reset(token)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = KvoffdConnectorWorker(self.connector_worker.spec, vllm_config, kv_cache_config)
        else:
            choose_load_failure_policy([transfer_config, *(config for _, config in parents)], options)
            requests = self.connector_scheduler._req_status
            self._manager.storable = lambda request_id, keys: without_holes(requests.get(request_id), keys)
            StoreRefusalFilter.install(STORE_LOGGER)
            from vllm.v1.engine.core import EngineCore  # workers need none of it

            if not tell_of_received_requests(EngineCore, self.on_request_received.__name__):
                logger.info("kvoffd: this vLLM tells of requests late; prompts wait a moment longer for the daemon.")
        self._adapters = LoraAdapters(vllm_config.lora_config)
        self._told = ToldBlocks()
        self._loaded = LoadedRequests(vllm_config)
        self._computed = False  # in the last step

    # --- worker ---

    def start_load_kv(self, forward_context: v.ForwardContext, **kwargs: object) -> None:
        """As vLLM's; notes the step's stores, which the next step begins, as vLLM does in wait_for_save().

        With speculative decoding the first model runner calls that in the last pipeline stage alone.
        """
        super().start_load_kv(forward_context, **kwargs)
        self._worker_half.prepare_store_kv(self._connector_metadata)

    def wait_for_save(self) -> None:
        """Do nothing: see start_load_kv()."""

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """On CPU: have the KV cache allocated in memory that can be shared. On GPUs vLLM's own allocation stays."""
        return self._setup.memory if current_platform.is_cpu() else None

    def unregister_kv_caches(self) -> None:
        """0.33, before sleep: no transfer runs any more. The daemon lets go of the memory before this returns."""
        if isinstance(worker := self._worker_half.worker, KvoffdWorker):
            worker.sleep()

    def restore_kv_caches(self) -> None:
        """0.33, after sleep: the same addresses, other memory."""
        if isinstance(worker := self._worker_half.worker, KvoffdWorker):
            worker.wake()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As get_finished(), with the requests whose load failed."""
        worker = self._worker_half
        sent, received = worker.get_finished(finished_req_ids)
        failed, worker.failed_recving = worker.failed_recving, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    # --- scheduler ---

    def on_request_received(self, request: v.Request) -> None:
        """Look all keys of the request up now, so that the answer is there when it is scheduled.

        Called in the thread that receives requests, usually while a step runs.
        """
        # An adapter's content is read when the request is scheduled; a later part of a session is no new request.
        if request.lora_request is not None or request.resumable or request.skip_reading_prefix_cache:
            return
        # vLLM warns of transfer parameters that it cannot read; on_new_request() has it read them.
        hashed: Any = SimpleNamespace(block_hashes=request.block_hashes, kv_transfer_params=None)
        context = ReqContext(request.request_id)
        status = RequestOffloadState(self.connector_scheduler.config, hashed, context, RequestOffloadingContext())
        status.update_offload_keys()
        self._manager.begin_early_lookup(request.request_id, _keys_of(status))

    def on_new_request(self, request: v.Request) -> None:
        """Look all keys of the request up, where that was not done when it was received."""
        super().on_new_request(request)
        if (adapter := request.lora_request) is not None:
            self._manager.begin_adapter(request.request_id, self._adapters.content_of(adapter), adapter.lora_int_id)
        if is_told(request):
            self._manager.tell_tokens(request.request_id, self._told)
        if request.pooling_params is not None and request.skip_reading_prefix_cache:
            logger.info_once(  # type: ignore[attr-defined]
                "kvoffd: the pooling task %s needs all tokens of a prompt to be computed, so nothing of it is loaded, "
                "and nothing is stored.",
                request.pooling_params.task,
            )
            self._manager.leave_out(request.request_id)
        if not self._manager.is_looked_up(request.request_id):
            self._begin_lookup(request)

    def get_num_new_matched_tokens(self, request: v.Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, over an answer that is checked for age and completeness first."""
        self._manager.namespace.ask()
        self._begin_lookup(request, request.num_tokens - num_computed_tokens)
        self._manager.await_answer(request.request_id, self._others_that_could_run(request))
        tokens, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens and self._manager.is_tail_unanswered(request.request_id):
            # vLLM would load the whole blocks and compute the rest.
            self._begin_lookup(request)
            return None, False
        if tokens is not None:
            ready = functools.partial(self._manager.ready_blocks, request.request_id)
            note_shared_prefix(self.connector_scheduler, request, ready, num_computed_tokens + tokens)
            if tokens and not self._manager.load_pays(request.request_id, tokens):
                tokens, loads = 0, False
            if (cache := self._kv_cache_manager) is not None:
                room = self._loaded.leave_room(cache, request, num_computed_tokens, num_computed_tokens + tokens)
                if not room:
                    return (None if room is None else 0), False
        return tokens, loads

    def _max_loadable_tokens(self, request: v.Request, num_computed_tokens: int) -> int | None:
        """As vLLM's, and no further than what can be loaded while the blocks of a step's drafts stay free."""
        bound = super()._max_loadable_tokens(request, num_computed_tokens)
        cache, config = self._kv_cache_manager, self._vllm_config
        if cache is None or not config.num_speculative_tokens:
            return bound
        chunk_tokens = math.lcm(*(group.tokens_per_chunk for group in self.connector_scheduler.config.kv_group_configs))
        room = max(0, loadable_tokens(cache, config, request, chunk_tokens) - num_computed_tokens)
        return room if bound is None else min(bound, room)

    def update_state_after_alloc(self, request: v.Request, blocks: v.KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's; a request that is scheduled without a load gives its pinned blocks back."""
        note_allocated(self.connector_scheduler, request, blocks)
        self._loaded.note(request, loads=num_external_tokens > 0)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens == 0:
            self._manager.scheduled_without_load(request.request_id)

    def build_connector_meta(self, scheduler_output: v.SchedulerOutput) -> KvoffdConnectorMetadata:
        """As vLLM's, with what the workers must be told about the namespace."""
        namespace = self._manager.namespace
        self._manager.step_begins(scheduler_output.num_scheduled_tokens.values())
        if computes := scheduler_output.total_num_scheduled_tokens > 0:
            namespace.ask()  # the weights that compute these tokens must be named
        elif self._computed:
            time.sleep(OUTPUT_PAUSE_S)
        self._computed = computes
        client = self._manager.client
        self._told.begin_step(client.capabilities, client.epoch, namespace.current)
        scheduler = self.connector_scheduler
        meta = super().build_connector_meta(shown(scheduler_output, scheduler._req_status))
        if meta.store_jobs or meta.load_jobs:
            jobs = meta.store_jobs.values(), meta.load_jobs.values()
            per_chunk = scheduler.config.blocks_per_chunk
            tell_origins(*jobs, scheduler._req_status, per_chunk, client.capabilities, self._told)
        generation, joined = namespace.news()
        if generation is None:
            return meta
        return KvoffdConnectorMetadata(**vars(meta), generation=generation, namespace=joined)

    def update_connector_output(self, connector_output: v.KVConnectorOutput) -> None:
        """Take the workers' reports: failures first, so that nothing that failed is used again."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvoffdWorkerMetadata):
            self._manager.workers_report(meta.credit_bytes, meta.usable, meta.waited_s)
            for job_id, seconds in meta.load_seconds.items():
                if (job := self.connector_scheduler._jobs.get(job_id)) is not None:  # else from before a reset
                    self._manager.load_ended(job.keys, seconds)
            for job_id, failed in meta.failed_jobs.items():
                self._job_failed(job_id, failed)
            self._manager.namespace.report(meta.memory)
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[v.KVCacheEvent]:
        """As vLLM's, which asks for each step whose output has come, in their order, and nowhere else."""
        self._manager.step_ended()
        self._manager.forget_untold(self.connector_scheduler._events_tracker._pending_event_metadata)
        return super().take_events()

    def reset_cache(self) -> bool | None:
        """Use nothing of the daemon until the workers have named the weights in their memory anew.

        vLLM resets when an engine is paused or put to sleep, and before or after its weights were changed. Nothing is
        dropped in the daemon: blocks of unchanged weights are found again, and other engines keep theirs.
        """
        cache = self._kv_cache_manager
        kept = cache is None or cache.usage > 0
        self._manager.namespace.leave(engine_cache_kept=kept)
        if not kept:
            self._adapters.engine_cache_reset()
        # Jobs of a reset that no step has followed are waited for in the next one; vLLM asserts that there are none.
        scheduler = self.connector_scheduler
        waited_for, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        done = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= waited_for
        return done

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """As vLLM's, which asks for CUDA graphs before it loads the model: wrong options are refused here already."""
        options, _ = parse_options(extra_config)
        check_version(strict=options.strict_version)
        return super().requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: v.VllmConfig) -> str | None:
        """As vLLM's, which asks before it builds anything: what cannot be served is refused here already."""
        check_engine(vllm_config)
        return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: v.KVTransferConfig) -> bool:
        """Asked by 0.33, which tells us before sleep unmaps the memory that the daemon copies from and to."""
        return True

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: v.VllmConfig, metric_types: Mapping[type, Any], *args: object
    ) -> v.KVConnectorPromMetrics:
        """As vLLM's, which looks for the spec by name in a process where no connector was built.

        Each API server gets the statistics of other steps, so the latest value of a gauge counts; 0.32 shows them all.
        """
        name_spec(vllm_config.kv_transfer_config)
        gauge = functools.partial(metric_types[Gauge], multiprocess_mode="mostrecent")
        return super().build_prom_metrics(vllm_config, {**metric_types, Gauge: gauge}, *args)

    def _begin_lookup(self, request: v.Request, missing_tokens: int | None = None) -> None:
        status = self.connector_scheduler._req_status.get(request.request_id)
        if status is None or status.transfer_jobs or request.skip_reading_prefix_cache:
            return
        status.update_offload_keys()
        self._manager.begin_lookup(request.request_id, _keys_of(status), missing_tokens)

    def _others_that_could_run(self, request: v.Request) -> Iterator[str]:
        """Yield the ids of all other requests that vLLM has, less those that have ended or wait for their load."""
        for request_id, status in self.connector_scheduler._req_status.items():
            other = status.req
            if other is request or other.is_finished() or other.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            yield request_id

    def _job_failed(self, job_id: int, failed: FailedJob) -> None:
        job = self.connector_scheduler._jobs.get(job_id)
        if job is None:  # from before a reset
            return
        if job.is_store:
            self._manager.store_failed(failed)
        else:
            self._manager.load_failed(job.req_id, job.keys, failed)
            for group in self.connector_scheduler._req_status[job.req_id].group_states:
                group.next_stored_chunk_idx = 0  # what is recomputed is stored, unless the daemon has it

    @property
    def _manager(self) -> KvoffdManager:
        manager = self.connector_scheduler.manager
        assert isinstance(manager, KvoffdManager)
        return manager

    @property
    def _worker_half(self) -> KvoffdConnectorWorker:
        assert isinstance(self.connector_worker, KvoffdConnectorWorker)
        return self.connector_worker


def _keys_of(status: RequestOffloadState) -> Sequence[Sequence[bytes]]:
    return [state.offload_keys for state in status.group_states]
