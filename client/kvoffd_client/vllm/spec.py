"""Builds the manager and the worker from one engine's facts."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffd_client.cuda.order import OrderedSender
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.shared_memory import Registration
from kvoffd_client.vllm.events import EventFold
from kvoffd_client.vllm.gpu import record_event
from kvoffd_client.vllm.handshake import LateClient
from kvoffd_client.vllm.manager import KvoffdManager, ManagerParts
from kvoffd_client.vllm.memory import SharedKvMemory
from kvoffd_client.vllm.options import ConnectorOptions
from kvoffd_client.vllm.request_lookups import GROUP_ID_BYTES, Setting
from kvoffd_client.vllm.stats import DEFINITIONS
from kvoffd_client.vllm.stores import StoreWindow
from kvoffd_client.vllm.worker import Client, KvoffdWorker, connect_worker
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.handles import LayerSpec


@dataclass
class EngineSetup:
    """What the connector knows and vLLM's spec interface has no place for.

    Attributes:
        options: the user's.
        namespace: what a worker derived; None in the scheduler, which is told by the workers.
        group_ids: vLLM's ids of the offloaded groups, by index on the wire.
        shard_bytes: about the bytes of one worker's shard of a block, per group on the wire.
        memory: where a worker's KV cache is allocated.
        layers: what the pages of a worker's layers are, per group on the wire; empty until vLLM has allocated them.
    """

    options: ConnectorOptions
    namespace: NamespaceSpec | None
    group_ids: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    memory: SharedKvMemory = field(default_factory=SharedKvMemory)
    layers: tuple[tuple[LayerSpec, ...], ...] = ()


SETUP: ContextVar[EngineSetup] = ContextVar("kvoffd_engine_setup")
"""Set by the connector while vLLM builds the spec."""


class KvoffdSpec(OffloadingSpec):
    """vLLM's OffloadingSpec for the daemon. Only KvoffdConnector can build it.

    Raises:
        RuntimeError: built by another connector.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Every metric the manager may emit."""
        return dict(DEFINITIONS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        setup = SETUP.get(None)
        if setup is None:
            raise RuntimeError('KvoffdSpec needs its own connector: use "kv_connector": "KvoffdConnector".')
        self.setup = setup
        self._manager: KvoffdManager | None = None
        self._worker: KvoffdWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's half, connecting in the background."""
        if self._manager is None:
            self._manager = KvoffdManager(self._parts())
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """This worker's half, registering in the background."""
        if self._worker is None:
            setup, namespace = self.setup, self.setup.namespace
            assert namespace is not None, "a worker has one"
            rank = self.config.parallel.rank

            def connect() -> Client | None:
                return connect_worker(
                    kv_caches, setup.memory.memories, rank, self.blocks_per_chunk, self._worker_client, setup.layers
                )

            on_gpu = any(cache.tensor.device.type == "cuda" for cache in kv_caches.tensors)
            self._worker = KvoffdWorker(
                connect(),
                blocks_per_chunk=self.blocks_per_chunk,
                key_bytes=namespace.key_bytes,
                fence_timeout_s=setup.options.store_fence_timeout_s,
                sender=OrderedSender(record_event) if on_gpu else None,
                reconnect=connect,
            )
        return self._worker

    def _parts(self) -> ManagerParts:
        setup = self.setup
        options = setup.options
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

        client = LateClient(connect)
        return ManagerParts(
            client=client,
            setting=Setting(
                asker=client,
                positions={suffix: index for index, suffix in enumerate(suffixes)},
                deadline_s=options.lookup_deadline_ms / 1000,
                refresh_s=options.lookup_refresh_ms / 1000,
                clock=time.monotonic,
                wait_rule=options.wait_rule,
            ),
            window=StoreWindow(dict(zip(suffixes, setup.shard_bytes, strict=True))),
            fold=EventFold(setup.group_ids) if publishes else None,
        )

    def _worker_client(self, registration: Registration) -> WorkerClient:
        namespace = self.setup.namespace
        assert namespace is not None, "a worker has one"
        return WorkerClient(
            self.setup.options.socket_directory,
            namespace,
            registration,
            name=self._name(namespace, f"worker {registration.rank}"),
            software=_software(),
        )

    def _name(self, namespace: NamespaceSpec, role: str) -> str:
        replica = self.config.parallel.data_parallel_index if self.config.parallel.data_parallel_size > 1 else None
        middle = "" if replica is None else f" replica {replica}"
        return f"vllm:{namespace.label[:90]}{middle} {role}"


def _software() -> str:
    try:
        own = version("kvoffd")
    except PackageNotFoundError:
        own = "unknown"
    return f"kvoffd {own}, vllm {vllm.__version__}"[:128]
