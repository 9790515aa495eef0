"""How the scheduler half learns the engine's namespace.

Only the workers derive it. They hold the model, and loading it changes the configuration they see (vLLM turns
``kv_cache_dtype: auto`` into the checkpoint's there, some models rewrite their config); the scheduler's copy stays as
it was. vLLM carries one message from each worker to the scheduler after the KV caches were registered and before the
first request, so both halves speak of the same namespace by construction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.scheduler_session import LookupTicket
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys


@dataclass(frozen=True)
class KvoffdHandshake(KVConnectorHandshakeMetadata):
    """From one worker to the scheduler.

    Attributes:
        namespace: what the worker derived from its configuration.
    """

    namespace: NamespaceSpec


class NamespacesDiffer(Exception):
    """The workers of one engine derived different namespaces; the sentence names the facts they disagree on."""


def common_namespace(namespaces: Collection[NamespaceSpec]) -> NamespaceSpec:
    """Return the one namespace of all workers. Raises NamespacesDiffer."""
    first, *others = namespaces
    for other in others:
        if other.fingerprint != first.fingerprint:
            facts, different = json.loads(first.description), json.loads(other.description)
            names = [name for name in facts if facts[name] != different.get(name)]
            raise NamespacesDiffer(f"The workers of this engine disagree on {', '.join(names) or 'their facts'}.")
    return first


class LateClient:
    """A SchedulerClient that is made when the namespace is known. Before that it is not connected.

    Args:
        make: builds the client.
    """

    def __init__(self, make: Callable[[NamespaceSpec], SchedulerClient]) -> None:
        self._make = make
        self._namespace: NamespaceSpec | None = None
        self._client: SchedulerClient | None = None
        self._closed = False

    def join(self, namespace: NamespaceSpec) -> None:
        """Connect to this namespace, leaving another one. Saying it twice is harmless."""
        if self._closed or (self._namespace is not None and self._namespace.fingerprint == namespace.fingerprint):
            return
        if self._client is not None:
            self._client.close()
        self._namespace, self._client = namespace, self._make(namespace)

    @property
    def connected(self) -> bool:
        """The namespace is known and open, and the daemon answers."""
        return self._client is not None and self._client.ready

    @property
    def credit_bytes(self) -> int:
        """As SchedulerClient's."""
        return self._client.credit_bytes if self._client is not None else 0

    def lookup(self, groups: Sequence[GroupKeys], again: bool = False) -> LookupTicket:
        """As SchedulerClient's. Only after ``connected`` was True."""
        assert self._client is not None
        return self._client.lookup(groups, again)

    def release(self, lease_id: int) -> None:
        """As SchedulerClient's."""
        if self._client is not None:
            self._client.release(lease_id)

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        """As SchedulerClient's."""
        if self._client is not None:
            self._client.invalidate(groups)

    def reset(self, timeout_s: float = 2.0) -> bool:
        """As SchedulerClient's. Without a namespace there is nothing to drop."""
        return self._client.reset(timeout_s) if self._client is not None else True

    def take_events(self) -> list[KvEvent]:
        """As SchedulerClient's."""
        return self._client.take_events() if self._client is not None else []

    def close(self) -> None:
        """As SchedulerClient's. Repeatable."""
        self._closed = True
        if self._client is not None:
            self._client.close()
