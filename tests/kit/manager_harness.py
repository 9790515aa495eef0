"""vLLM's OffloadingManager of ours over a fake client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm.connector_metadata import MemoryReport
from kvoffd_client.vllm.kv_event_translator import KvEventTranslator
from kvoffd_client.vllm.lookup_allowance import LookupAllowance
from kvoffd_client.vllm.namespace_client import EngineNamespace, NamespaceClient
from kvoffd_client.vllm.offloading_manager import KvoffdManager, StoreWindow
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_client.vllm.request_lookups import LookupSettings

from .clock import Clock
from .vllm_fakes import FakeSchedulerClient, block_hash, key

KEYS = [key(1), key(2), key(3)]
HASHES = {block_hash(1), block_hash(2), block_hash(3)}
SHARD_BYTES = 1000


class ManagerHarness:
    """A manager of one group and its fake client."""

    def __init__(self, **roles: Any) -> None:
        self.clock = Clock()
        self.client = FakeSchedulerClient(self.clock)
        suffix = (0).to_bytes(4, "big")
        client = cast(NamespaceClient, self.client)
        self.prefill = PrefillRate({suffix: 1000}, self.clock)
        self.allowance = LookupAllowance(self.prefill, 0.1, self.clock)
        self.manager = KvoffdManager(
            LookupSettings(client, {suffix: 0}, 0.1, 1.0, self.clock, self.prefill, self.allowance),
            StoreWindow({suffix: SHARD_BYTES}),
            KvEventTranslator((0,)),
            EngineNamespace(1, client, self.clock),
            **roles,
        )
        self.report("weights")

    def report(self, weights: str) -> None:
        """The worker reports these weights, and that its memory is registered."""
        namespace = self.manager.namespace
        report = MemoryReport(NamespaceSpec.named("model"), weights, namespace.generation)
        namespace.report({0: report})
        assert namespace.current is not None
        namespace.news()
        namespace.report({0: replace(report, registered=namespace.current.fingerprint)})

    def request(self, name: str = "r", ready: set[bytes] | None = None) -> ReqContext:
        """A new request, its lookup answered when ``ready`` is given."""
        context = ReqContext(name)
        self.manager.on_new_request(context)
        self.manager.begin_lookup(name, [KEYS])
        if ready is not None:
            self.client.answer(ready)
            self.manager.begin_lookup(name, [KEYS])
        return context

    def results(self, context: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(item, context) for item in KEYS]
