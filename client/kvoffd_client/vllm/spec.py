"""Creates the manager and the worker of one engine, as vLLM's OffloadingSpec."""

from __future__ import annotations

from importlib.metadata import version
from socket import gethostname
from time import monotonic
from typing import TYPE_CHECKING, Any

import vllm
import zmq
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvoffd_client.memory import Registration
from kvoffd_client.namespace import LABEL_IN_NAME, NamespaceSpec
from kvoffd_client.ordered_sender import OrderedSender
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.vllm.chunk_groups import ChunkGroup
from kvoffd_client.vllm.config import parse_options
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.kv_memory import NotShareable, RecordedEvent, SharedKvMemory, registration_of
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.manager import KvoffdManager
from kvoffd_client.vllm.metrics import DEFINITIONS
from kvoffd_client.vllm.worker import KvoffdWorker
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.build import with_commit

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

SOFTWARE = f"kvoffd {with_commit(version('kvoffd'))}, vllm {vllm.__version__}, on {gethostname()}"[:128]
NO_RESOURCES = (OSError, RuntimeError, zmq.ZMQError)
"""Errors of a client that gets no descriptor or thread."""
ENGINE_ID_SHOWN = 8
"""Characters of an engine's id in the names of its sessions, to distinguish engines of one model."""


class KvoffdSpec(OffloadingSpec):
    """vLLM's OffloadingSpec for the daemon.

    Attributes, of which KvoffdConnector sets namespace and directory in workers:
        namespace: derived from the worker's configuration.
        directory: where the scheduler half looks for the daemon; empty before it says so.
        memory: memory of its KV cache on CPU.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return dict(DEFINITIONS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options, _ = parse_options(config.extra_config)
        # The connector makes KV events itself: vLLM need not keep the blocks' tokens for them.
        self.kv_events_config = OffloadingKVEventsConfig(False, False)
        # If all ranks have the same bytes, only rank 0 stores, and all ranks load its shard.
        self.replicated_layout = config.replicated_layout
        self.namespace: NamespaceSpec | None = None
        self.directory = ""
        self.memory = SharedKvMemory()

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's half, which connects in the background."""
        config, options = self.config, self.options
        hashes = [tokens * self.blocks_per_chunk // self.tokens_per_hash for tokens in self.tokens_per_block]
        groups = tuple(
            ChunkGroup(group.group_id, count, count * self.tokens_per_hash, self.blocks_per_chunk)
            for group, count in zip(config.groups, hashes, strict=True)
        )

        def connect(namespace: NamespaceSpec) -> SchedulerClient | None:
            try:
                return SchedulerClient(
                    options.socket_directory,
                    namespace,
                    name=self._name(namespace, "scheduler"),
                    software=SOFTWARE,
                    subscribe_events=config.enable_kv_cache_events,
                    record_stored=True,
                    options=options.client_options,
                )
            except NO_RESOURCES as error:
                logger.error("kvoffd: the engine runs without the daemon. %s", _without_resources(error))
                return None

        return KvoffdManager(
            EngineNamespace(config.parallel.world_size, connect, monotonic),
            groups,
            monotonic,
            options,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this worker's half, which registers in the background once it knows its namespace."""
        if self.namespace is None:
            raise RuntimeError('KvoffdSpec needs its own connector: use "kv_connector": "KvoffdConnector".')
        if not all(kv_caches.group_data_refs):
            raise ValueError(
                "kvoffd cannot serve this engine: this pipeline stage has no layers of one of the KV cache groups, so "
                "it would have no part of its blocks. Use fewer stages, divide the layers otherwise "
                "(VLLM_PP_LAYER_PARTITION), or start it without --kv-transfer-config."
            )
        on_gpu = any(cache.tensor.device.type == "cuda" for cache in kv_caches.tensors)
        if not on_gpu:
            try:
                self._registration(kv_caches)
            except NotShareable as reason:
                raise ValueError(f"kvoffd cannot serve this engine: {reason}") from reason
        return KvoffdWorker(
            lambda namespace: self._connect_worker(kv_caches, namespace),
            blocks_per_chunk=self.blocks_per_chunk,
            key_bytes=self.namespace.key_bytes,
            fence_timeout_s=self.options.store_fence_timeout_s,
            keep_leases=self.replicated_layout,
            hears_of_credit=not self.replicated_layout or self.config.parallel.rank == 0,
            sender=OrderedSender(RecordedEvent) if on_gpu else None,
        )

    def _connect_worker(self, kv_caches: CanonicalKVCaches, namespace: NamespaceSpec) -> WorkerClient:
        """Return a client that registers the memory. Raises NotShareable, also for NO_RESOURCES."""
        name = self._name(namespace, f"worker {self.config.parallel.rank}")
        registration = self._registration(kv_caches)
        directory = self.directory or self.options.socket_directory
        try:
            return WorkerClient(directory, namespace, registration, name=name, software=SOFTWARE)
        except NO_RESOURCES as error:
            raise NotShareable(_without_resources(error)) from error

    def _registration(self, kv_caches: CanonicalKVCaches) -> Registration:
        shard = 0 if self.replicated_layout else self.config.parallel.rank
        return registration_of(kv_caches, self.memory.memories, shard, self.blocks_per_chunk)

    def _name(self, namespace: NamespaceSpec, role: str) -> str:
        # Each replica of a dense model sees itself as the only one; only its index and engine id differ.
        engine_id, index = str(self.config.engine_id), self.config.parallel.data_parallel_index
        replica = f" replica {index}" if engine_id.endswith(f"_dp{index}") else ""
        return f"vllm:{engine_id[:ENGINE_ID_SHOWN]} {namespace.label[:LABEL_IN_NAME]}{replica} {role}"


def _without_resources(error: Exception) -> str:
    return (
        f"The engine cannot connect to the daemon ({error}) until vLLM resets its cache or restarts. Raise its limits "
        "of open files and threads (ulimit -n and -u, pids.max)."
    )


def register_spec(transfer_config: KVTransferConfig) -> None:
    """Register our spec with vLLM, so that users need not configure it."""
    name = KvoffdSpec.__name__
    try:
        OffloadingSpecFactory.register_spec(name, __name__, name)
    except ValueError:
        pass  # already registered
    transfer_config.kv_connector_extra_config["spec_name"] = name
