"""Builds the manager and the worker of one engine, as vLLM's OffloadingSpec."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvoffd_client.cuda.order import OrderedSender
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES
from kvoffd_client.vllm.connector_options import ConnectorOptions
from kvoffd_client.vllm.connector_stats import DEFINITIONS
from kvoffd_client.vllm.factors import collect_factors, label_of, shard_bytes_of
from kvoffd_client.vllm.fingerprint import namespace_of
from kvoffd_client.vllm.kv_event_translator import KvEventTranslator
from kvoffd_client.vllm.kv_memory import NotShareable, RecordedEvent, SharedKvMemory, registration_of
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.lookup_allowance import LookupAllowance
from kvoffd_client.vllm.namespace_client import EngineNamespace, NamespaceClient
from kvoffd_client.vllm.offloading_manager import KvoffdManager, StoreThreshold, StoreWindow
from kvoffd_client.vllm.offloading_worker import KvoffdWorker
from kvoffd_client.vllm.prefill_rate import LEAST_STEP_TOKENS, PrefillRate, largest_chunk_of
from kvoffd_client.vllm.request_lookups import LookupSettings
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.handles import LayerSpec

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import KVCacheConfig, KVTransferConfig, VllmConfig


@dataclass
class EngineSetup:
    """What the connector knows and vLLM's spec interface has no place for.

    Attributes:
        namespace: what a worker derived from its configuration; None in the scheduler, which is told by the workers.
        group_ids: vLLM's ids of the offloaded groups, by index on the wire.
        shard_bytes: about the bytes of one worker's shard of a block, per group on the wire.
        loads: kv_role is kv_consumer or kv_both.
        stores: kv_role is kv_producer or kv_both.
        memory: where a worker's KV cache is allocated.
        layers: what the pages of a worker's layers are, per group on the wire; empty until vLLM has allocated them.
        engine_id: vLLM's, the same in the scheduler and in all workers of an engine.
        most_running: steps that vLLM begins at most before the first of them ends.
        largest_chunk: tokens of a prompt that the engine computes in a step at most.
    """

    options: ConnectorOptions
    namespace: NamespaceSpec | None
    group_ids: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    loads: bool = True
    stores: bool = True
    memory: SharedKvMemory = field(default_factory=SharedKvMemory)
    layers: tuple[tuple[LayerSpec, ...], ...] = ()
    engine_id: str = ""
    most_running: int = 1
    largest_chunk: int = LEAST_STEP_TOKENS


def setup_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions, role: KVConnectorRole
) -> EngineSetup:
    """Return what an engine's configuration says of it."""
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    group_ids = tuple(group.group_id for group in offloading.groups)
    namespace = None
    if role == KVConnectorRole.WORKER:
        namespace = namespace_of(collect_factors(vllm_config, kv_cache_config, options), label_of(vllm_config))
    transfer = vllm_config.kv_transfer_config
    return EngineSetup(
        options,
        namespace,
        group_ids,
        shard_bytes_of(kv_cache_config, group_ids, offloading.cache.blocks_per_chunk),
        transfer.is_kv_consumer,
        transfer.is_kv_producer,
        engine_id=str(transfer.engine_id),
        most_running=vllm_config.max_concurrent_batches,
        largest_chunk=largest_chunk_of(vllm_config.scheduler_config),
    )


ENGINE_ID_SHOWN = 8
"""Characters of an engine's id in the names of its sessions: engines of one model are told apart by them."""
SETUP: ContextVar[EngineSetup] = ContextVar("kvoffd_engine_setup")
"""Set by the connector while vLLM builds the spec."""


CONFIG_INFO = ("directory", "store_threshold", "disk_wait", "lookup_deadline_ms")
"""Options that vLLM 0.33 publishes as labels of vllm:kv_offload_config_info."""


class KvoffdSpec(OffloadingSpec):
    """vLLM's OffloadingSpec for the daemon. Only KvoffdConnector can build it; elsewhere it raises RuntimeError."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return dict(DEFINITIONS)

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return CONFIG_INFO

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        setup = SETUP.get(None)
        if setup is None:
            raise RuntimeError('KvoffdSpec needs its own connector: use "kv_connector": "KvoffdConnector".')
        self.setup = setup
        # All ranks have the same bytes: vLLM has rank 0 alone store, and all ranks load its shard.
        self.replicated_layout = config.replicated_layout
        self._manager: KvoffdManager | None = None
        self._worker: KvoffdWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's half, which connects in the background."""
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this worker's half, which registers in the background once it is told its namespace."""
        if self._worker is None:
            namespace = self.setup.namespace
            assert namespace is not None, "a worker has one"
            on_gpu = any(cache.tensor.device.type == "cuda" for cache in kv_caches.tensors)
            self._worker = KvoffdWorker(
                lambda namespace: self.connect_worker(kv_caches, namespace),
                blocks_per_chunk=self.blocks_per_chunk,
                key_bytes=namespace.key_bytes,
                fence_timeout_s=self.setup.options.store_fence_timeout_s,
                keep_leases=self.replicated_layout,
                sender=OrderedSender(RecordedEvent) if on_gpu else None,
            )
        return self._worker

    def connect_worker(self, kv_caches: CanonicalKVCaches, namespace: NamespaceSpec) -> WorkerClient | None:
        """Return a client with the memory registered, or None, with one warning, when it cannot be shared."""
        setup, rank = self.setup, self.config.parallel.rank
        shard = 0 if self.replicated_layout else rank
        try:
            registration = registration_of(kv_caches, setup.memory.memories, shard, self.blocks_per_chunk, setup.layers)
        except NotShareable as reason:
            logger.warning("kvoffd: worker %d stores and loads nothing. %s", rank, reason)
            return None
        return WorkerClient(
            setup.options.socket_directory,
            namespace,
            registration,
            name=self._name(namespace, f"worker {rank}"),
            software=_software(),
        )

    def _make_manager(self) -> KvoffdManager:
        setup, options = self.setup, self.setup.options
        publishes = self.kv_events_config.enable_kv_cache_events
        suffixes = [group_id.to_bytes(GROUP_ID_BYTES, "big") for group_id in setup.group_ids]

        def connect(namespace: NamespaceSpec) -> SchedulerClient:
            return SchedulerClient(
                options.socket_directory,
                namespace,
                name=self._name(namespace, "scheduler"),
                software=_software(),
                subscribe_events=publishes,
                options=options.client_options,
            )

        client = NamespaceClient(connect)
        tokens = [tokens * self.blocks_per_chunk for tokens in self.tokens_per_block]
        prefill = PrefillRate(
            dict(zip(suffixes, tokens, strict=True)), time.monotonic, setup.most_running, setup.largest_chunk
        )
        deadline_s = options.lookup_deadline_ms / 1000
        return KvoffdManager(
            LookupSettings(
                client=client,
                positions={suffix: index for index, suffix in enumerate(suffixes)},
                deadline_s=deadline_s,
                refresh_s=options.lookup_refresh_ms / 1000,
                clock=time.monotonic,
                prefill=prefill,
                allowance=LookupAllowance(prefill, deadline_s, time.monotonic, active=options.do_no_harm),
                disk_wait=options.disk_wait,
                disk_wait_s=options.disk_wait_ms / 1000,
            ),
            StoreWindow(dict(zip(suffixes, setup.shard_bytes, strict=True))),
            KvEventTranslator(setup.group_ids) if publishes else None,
            EngineNamespace(self.config.parallel.world_size, client, time.monotonic),
            loads=setup.loads,
            stores=setup.stores,
            store_threshold=StoreThreshold(options.store_threshold, options.max_tracker_size),
            do_no_harm=options.do_no_harm,
            config_info={name: getattr(options, name) for name in CONFIG_INFO}
            | {"directory": options.socket_directory},
        )

    def _name(self, namespace: NamespaceSpec, role: str) -> str:
        # vLLM tells each replica of a dense model that it is the only one, but for its index and the engine's id.
        index = self.config.parallel.data_parallel_index
        replica = f" replica {index}" if self.setup.engine_id.endswith(f"_dp{index}") else ""
        return f"vllm:{self.setup.engine_id[:ENGINE_ID_SHOWN]} {namespace.label[:80]}{replica} {role}"


def name_spec(transfer_config: KVTransferConfig) -> None:
    """Have vLLM find our spec, so that users need not name it."""
    name = KvoffdSpec.__name__
    if name not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(name, __name__, name)
    transfer_config.kv_connector_extra_config["spec_name"] = name


def _software() -> str:
    try:
        own = version("kvoffd")
    except PackageNotFoundError:
        own = "unknown"
    return f"kvoffd {own}, vllm {vllm.__version__}"[:128]
