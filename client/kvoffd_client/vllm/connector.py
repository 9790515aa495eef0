# ruff: noqa: E402 - an unsupported vLLM must be refused before its internals are imported
"""KvoffdConnector: vLLM's OffloadingConnector with a daemon behind it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import Gauge

from kvoffd_client.vllm.compat import (
    HAS_DEFECTS_OF_0_32,
    check_version,
    forget_streamed_blocks,
    notice_resets,
    patch_v2_runner_fence,
    record_new_blocks,
    record_scheduled_blocks,
    require_methods,
    require_vllm,
    skip_fence_for_readers,
    untested,
)

require_vllm()

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

from kvoffd_client.vllm.config import check_engine, check_groups, machine_id, parse_options
from kvoffd_client.vllm.connector_metadata import ConnectorMetadata, WorkerNews
from kvoffd_client.vllm.engine_facts import facts_of
from kvoffd_client.vllm.engine_namespace import MemoryState
from kvoffd_client.vllm.fingerprint import collect_factors, label_of, namespace_of
from kvoffd_client.vllm.host_block_events import HostBlockEvents
from kvoffd_client.vllm.log import is_no_refusal, logger
from kvoffd_client.vllm.manager import KvoffdManager
from kvoffd_client.vllm.prompt_matcher import PromptMatcher
from kvoffd_client.vllm.scans import replace_searches
from kvoffd_client.vllm.spec import KvoffdSpec, register_spec
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_client.vllm.worker_contents import WorkerContents

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

STORE_LOGGER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


class KvoffdConnector(OffloadingConnector):
    """Offloads KV blocks to the kvoffd daemon of this machine. An absent, slow or dying daemon is a cache miss.

    vLLM's KVConnectorFactory creates it, once in the scheduler's process and once in each worker. Raises ValueError if
    an option in kv_connector_extra_config is wrong, or kvoffd does not support the engine's configuration.
    """

    connector_scheduler: Any
    connector_worker: Any

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_engine(vllm_config)
        transfer_config = vllm_config.kv_transfer_config
        check_groups(kv_cache_config, transfer_config.kv_connector_extra_config)
        options, unknown = parse_options(transfer_config.kv_connector_extra_config)
        check_version(strict=options.strict_version)
        # vLLM's scheduler reads the policy later; its default fails a request whose load failed. With MultiConnector
        # it reads MultiConnector's.
        policy, transfer_config.kv_load_failure_policy = transfer_config.kv_load_failure_policy, "recompute"
        register_spec(transfer_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._begin_worker(vllm_config, kv_cache_config, options.salt)
            return
        if unknown:
            keys = ", ".join(sorted(unknown))
            logger.warning("kvoffd: kv_connector_extra_config has unknown keys: %s.", keys)
        if policy != "recompute":
            logger.info("kvoffd: kv_load_failure_policy was %r and is now 'recompute'.", policy)
        if sentence := untested():
            logger.warning("kvoffd: %s", sentence)
        logging.getLogger(STORE_LOGGER).addFilter(is_no_refusal)
        self._begin_scheduler(vllm_config, kv_cache_config)

    def _begin_worker(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, salt: str) -> None:
        factors = collect_factors(vllm_config, kv_cache_config, salt)
        self.connector_worker.spec.namespace = namespace_of(factors, label_of(vllm_config))
        self._contents = WorkerContents()
        self._last_memory: MemoryState | None = None
        """The last state of the memory that was sent."""

    def _begin_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._manager: KvoffdManager = self.connector_scheduler.manager
        # Tails are what vLLM calls partial tails, see tails.py.
        engine, self._shape = facts_of(
            vllm_config, kv_cache_config, stores_tails=self.connector_scheduler.config.supports_partial_tail
        )
        self._manager.begin_engine(engine)
        self._manager.lookups.enabled = vllm_config.kv_transfer_config.is_kv_consumer
        self._manager.stores.enabled = vllm_config.kv_transfer_config.is_kv_producer
        replace_searches(self.connector_scheduler, self._manager.groups, self._manager.requests)
        self._matcher = PromptMatcher(
            vllm_config,
            kv_cache_config,
            self._manager,
            self._shape,
            engine.tail_tokens,
            scan=super().get_num_new_matched_tokens,
            scan_part=self.connector_scheduler.get_num_new_matched_tokens,
        )
        if engine.publishes_events:
            self._manager.stores.events = HostBlockEvents(
                {index: self._manager.groups[index] for index in self._shape.full_attention},
                self._shape.full_attention,
                self._shape.blocks_per_chunk,
                get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo),
            )
        self._pool: BlockPool | None = None
        self._new_blocks, self._begun_blocks = set[int](), set[int]()
        """Ids of this step's newly allocated blocks, and of all attention blocks of requests that leave the queue.
        Those of the latter that are not new are hits of vLLM's own cache, which the step only reads."""
        self._reset_since_step = False
        """Whether vLLM has reset since the last step."""
        self._has_unsent_stores = False
        """Whether the last step's stores start in the next one."""

    # --- worker ---

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """Return a context that allocates the KV cache in shared memory on CPU; None on GPUs, for vLLM's allocation."""
        spec: KvoffdSpec = self.connector_worker.spec
        return spec.memory if current_platform.is_cpu() else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; first takes the digest of the weights, and has Model Runner V2 wait for stores in time."""
        config, cache = self._vllm_config, self._kv_cache_config
        self._contents.find_models(config)
        is_patched = patch_v2_runner_fence(self._contents.weights.runner, self._fence)
        specs = [spec for group in cache.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
        # V2 writes to blocks before it calls handle_preemptions() if it zeroes them or copies states.
        writes_early = cache.needs_kv_cache_zeroing or any(isinstance(spec, MambaSpec) for spec in specs)
        if config.use_v2_model_runner and writes_early and not is_patched:
            raise ValueError(
                "kvoffd cannot serve this engine: its model runner writes to blocks before their stores have ended, in "
                "a place unknown to this kvoffd. Start it without --kv-transfer-config."
            )
        super().register_kv_caches(kv_caches)

    def _fence(self, metadata: OffloadingConnectorMetadata) -> None:
        """Send the last step's stores and wait for those whose blocks this step writes to. Model Runner V2 calls this
        before it writes (``patch_v2_runner_fence``), and our handle_preemptions() later in the same step."""
        self._leave_if_changed()
        super().handle_preemptions(metadata)

    def _leave_if_changed(self) -> None:
        """Let unsent stores fail if weights or an adapter have changed: their blocks may be of the old or the new."""
        if self._contents.changed:
            self.connector_worker.worker.leave()

    def handle_preemptions(self, kv_connector_metadata: ConnectorMetadata) -> None:
        """As vLLM's; also takes a new digest and joins the namespace if asked to.

        Called before the forward pass; by Model Runner V1 before anything else.

        Starts the step's loads too. vLLM starts them after the model's forward pass, so that on a GPU they would wait
        for it. This pass does not use their blocks, and earlier kernels that did have been launched. All jobs are sent
        in one message.

        | call | hands to ``KvoffdWorker`` | they are sent |
        |---|---|---|
        | ``_fence()``, and vLLM's method below | the last step's stores | at once if it must wait, or with loads |
        | ``start_kv_transfers()`` below | the step's loads | by ``flush()`` below |
        | ``start_load_kv()``, in a step without tokens | the step's own stores | by ``get_finished()`` |
        """
        worker: KvoffdWorker = self.connector_worker.worker
        contents, generation = self._contents, kv_connector_metadata.generation
        # In this order: reading an adapter may show that its content has changed. Then no store may be sent, and only a
        # new digest lets the worker join again.
        contents.adapters.read_ahead(kv_connector_metadata.adapters)
        self._leave_if_changed()
        contents.renew_digest(generation)
        namespace = kv_connector_metadata.namespace
        if namespace is not None and contents.are_of(generation):
            self.connector_worker.spec.directory = kv_connector_metadata.directory
            worker.join(namespace)
        if kv_connector_metadata.daemon is not None:
            worker.compare_daemon(kv_connector_metadata.daemon)
        super().handle_preemptions(kv_connector_metadata)
        self.connector_worker.start_kv_transfers(kv_connector_metadata)
        worker.flush()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Prepare the step's stores. It starts no loads: handle_preemptions() has.

        The next step's handle_preemptions() starts the stores; in a step without tokens, its own get_finished() does.
        vLLM prepares them in wait_for_save(), which Model Runner V1 with speculative decoding calls only in the last
        pipeline stage.
        """
        metadata: ConnectorMetadata = self._get_connector_metadata()
        self.connector_worker.prepare_store_kv(metadata)
        if metadata.starts_stores:
            no_more_jobs = OffloadingConnectorMetadata({}, {})  # it also submits the stores that were prepared
            self.connector_worker.start_kv_transfers(no_more_jobs)

    def wait_for_save(self) -> None:
        """Do nothing; see start_load_kv()."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As vLLM's, and names requests whose load failed; these also count as received."""
        sent, received = self.get_finished(finished_req_ids)
        worker: KvoffdWorker = self.connector_worker.worker
        failed = worker.take_failed_requests()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """Return this worker's news for the scheduler half; None if there are none."""
        ended = super().build_connector_worker_meta()
        if self.connector_worker is None or not isinstance(worker := self.connector_worker.worker, KvoffdWorker):
            return None
        news, spec, contents = worker.take_news(), self.connector_worker.spec, self._contents
        if ended is not None:
            news.completed_jobs, news.transfer_stats = ended.completed_jobs, ended.transfer_stats
        memory = MemoryState(
            namespace=spec.namespace,
            weights=contents.digest,
            generation=contents.generation,
            machine=machine_id(),
            changed=contents.changed,
            registered=worker.registered,
            problem=worker.problem,
            adapters=contents.adapters.contents(),
            daemon=worker.daemon,
            credit_bytes=worker.credit_bytes,
        )
        if memory != self._last_memory:
            news.memory[spec.config.parallel.rank] = self._last_memory = memory
        return news if news != WorkerNews() else None

    def unregister_kv_caches(self) -> None:
        """Release the memory before sleep (0.33), when no transfer is running."""
        if isinstance(worker := self.connector_worker.worker, KvoffdWorker):
            worker.sleep()

    def restore_kv_caches(self) -> None:
        """Register the memory again after sleep (0.33): other memory at the same addresses."""
        if isinstance(worker := self.connector_worker.worker, KvoffdWorker):
            worker.wake()

    # --- scheduler ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        self._matcher.bind_pool(gpu_block_pool)
        record_new_blocks(gpu_block_pool, self._new_blocks)
        if (events := self._manager.stores.events) is not None:
            notice_resets(gpu_block_pool, events.handle_engine_reset)
        skip_fence_for_readers(self.connector_scheduler, lambda: self._begun_blocks - self._new_blocks)
        super().bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """As vLLM's; also looks up all keys of the request if few others are before it."""
        super().on_new_request(request)
        self._manager.lookups.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, whose scan sees one answer, read or renewed here.

        If the engine's own cache has as much of a prompt as it can use, nothing is loaded: the last token needs a step
        anyway, and the load of one more block would delay it.
        """
        tokens = self._matcher.match(request, num_computed_tokens)
        # A prefill instance computed the prompt, and its connector (NIXL, Mooncake) loads it and deletes the mark. Do
        # not defer: MultiConnector would also defer the load of another connector, which has the whole prompt.
        if tokens is None and (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return tokens, bool(tokens)  # always asynchronous, as a load that fails inside a step cannot be recomputed

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's; also releases the pinned blocks of a request that is scheduled without a load."""
        if HAS_DEFECTS_OF_0_32:
            ids = [block.block_id for group in blocks.blocks for block in group if not block.is_null]
            record_scheduled_blocks(self.connector_scheduler, ids)
        for group in self._shape.attention_ids:
            self._begun_blocks.update([block.block_id for block in blocks.blocks[group]])
        self._matcher.record_scheduled(request, num_external_tokens)
        self._manager.scheduled(request, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata:
        """As vLLM's, with news about the namespace for the workers."""
        namespace, scheduler = self._manager.namespace, self.connector_scheduler
        self._reset_since_step = False
        self._matcher.begin_step()
        self._manager.begin_step(scheduler_output.num_scheduled_tokens.values())
        if scheduler_output.total_num_scheduled_tokens > 0:
            namespace.want_digests()  # these tokens need a digest of the weights
        if HAS_DEFECTS_OF_0_32:
            forget_streamed_blocks(scheduler, [each.req_id for each in scheduler_output.scheduled_new_reqs])
        meta = super().build_connector_meta(self._as_vllm_reads_it(scheduler_output))
        starts_stores = bool(meta.store_jobs) and not scheduler_output.total_num_scheduled_tokens
        self._has_unsent_stores = bool(meta.store_jobs) and not starts_stores
        self._new_blocks.clear()
        self._begun_blocks.clear()
        generation, joined = namespace.take_message()
        return ConnectorMetadata(
            **vars(meta),
            generation=generation,
            namespace=joined,
            adapters=self._manager.adapters.take_wanted(),
            starts_stores=starts_stores,
            directory=namespace.directory if joined is not None else "",
            daemon=namespace.take_daemon(),
        )

    def _as_vllm_reads_it(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the scheduler's output, adapted for vLLM's offloading scheduler and its assertions.

        New requests get no tokens here. So vLLM offers their first blocks for a store a step later, and that does not
        delay the first token. Not where layers have windows: blocks that a window has left may be gone by then.

        A request that was preempted by a reset and is being loaded is removed from the preempted ones, for which only
        stores may be running. States of recurrent layers inside a block beyond ``max_offload_tokens`` are removed too:
        vLLM asserts that there are none.
        """
        changes: dict[str, Any] = {}
        if output.scheduled_new_reqs and not self._shape.has_windows_or_states:
            new = {each.req_id for each in output.scheduled_new_reqs}
            tokens = {each: count for each, count in output.num_scheduled_tokens.items() if each not in new}
            changes["num_scheduled_tokens"] = tokens
        if preempted := output.preempted_req_ids:
            changes["preempted_req_ids"] = preempted - self._manager.lookups.loading.keys()
        if (state := output.kv_connector_block_state) is not None and state.boundary_state_offloads:
            wanted = {}
            for request_id, offered in state.boundary_state_offloads.items():
                status = self.connector_scheduler._req_status.get(request_id)
                most = status.max_offload_tokens if status is not None else None
                # A state is offered by group, block, and the number of tokens at which it was taken.
                wanted[request_id] = [one for one in offered if most is None or one[2] <= most]
            changes["kv_connector_block_state"] = replace(state, boundary_state_offloads=wanted)
        return replace(output, **changes) if changes else output

    def has_pending_push_work(self) -> bool:
        """As vLLM's, but False for running stores unless KV events are published.

        vLLM would run empty steps until they end, a millisecond apart, and a new request would wait for the end of one.
        Their results are taken in the next step. True after a reset (0.33) until the workers have reported.
        """
        if not super().has_pending_push_work():
            return False
        if getattr(self.connector_scheduler, "_reset_fence", None):
            return True
        manager = self._manager
        must_step = bool(manager.lookups.loading) or manager.namespace.needs_steps
        return must_step or manager.stores.events is not None or self._has_unsent_stores

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; first handles the workers' news, so that failed blocks are not used again."""
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self._manager.handle_news(news)
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return events of the daemon's blocks for the engine's stream.

        vLLM calls this once for each step with output, in order.
        """
        self._manager.step_ended()
        events = self._manager.stores.events
        return events.take(self._manager.namespace) if events is not None else ()

    def reset_cache(self) -> bool | None:
        """Stop using the daemon until the workers have taken new digests of the weights.

        vLLM resets when an engine pauses or sleeps, and before or after changes of its weights. The daemon drops
        nothing: blocks of unchanged weights are found again, and other engines keep theirs.
        """
        # vLLM keeps its own cache, with blocks of the weights before, while requests use some of it.
        kept = self._pool is None or self._pool.get_usage() > 0
        self._manager.namespace.leave(engine_cache_kept=kept)
        if not kept:
            self._manager.adapters.engine_cache_reset()
        if self._reset_since_step:
            # vLLM asserts that no jobs are waiting to be flushed, but those of the last reset are, until the next step.
            self._manager.reset_cache()
            return True
        self._reset_since_step = True
        return super().reset_cache()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """As vLLM's, called before the model is loaded, to refuse wrong options early."""
        options, _ = parse_options(extra_config)
        check_version(strict=options.strict_version)
        return super().requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """As vLLM's, called before anything else, to refuse unsupported engines early."""
        check_engine(vllm_config)
        assert vllm_config.kv_transfer_config is not None
        options, _ = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if options.kv_layout == "block_outermost" and not current_platform.is_cpu():
            return "BLHNC"
        return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True (0.33): unregister_kv_caches() is called before sleep unmaps the memory."""
        return True

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Mapping[type, Any], *args: Any
    ) -> KVConnectorPromMetrics:
        """As vLLM's, but registers the spec, since no connector was created in this process.

        Each API server gets the statistics of only some of the steps, so the most recent value of a gauge counts.
        """
        register_spec(vllm_config.kv_transfer_config)
        gauge = functools.partial(metric_types[Gauge], multiprocess_mode="mostrecent")
        return super().build_prom_metrics(vllm_config, {**metric_types, Gauge: gauge}, *args)


require_methods(KvoffdConnector, KvoffdManager, KvoffdSpec, KvoffdWorker)
