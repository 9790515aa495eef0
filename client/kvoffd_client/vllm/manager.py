"""The scheduler's half: answers vLLM's questions about blocks from what the daemon told. Never waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.vllm import stats
from kvoffd_client.vllm.events import EventFold
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.request_lookups import Key, LookupClient, PendingLookup, RequestLookups, Setting, Verdict
from kvoffd_client.vllm.reset import Reset
from kvoffd_client.vllm.specs import NO_LEASE, FailedJob, KeyedSpec
from kvoffd_client.vllm.stores import StoreWindow
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys

# Errors that say something about the blocks. After any other one they are as good as before.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})


class Client(LookupClient, Protocol):
    """The part of LateClient that the manager uses."""

    @property
    def credit_bytes(self) -> int: ...

    def invalidate(self, groups: Sequence[GroupKeys]) -> None: ...

    def reset(self, timeout_s: float = 2.0) -> bool: ...

    def take_events(self) -> list[KvEvent]: ...

    def join(self, namespace: NamespaceSpec) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ManagerParts:
    """What a manager is made of.

    Attributes:
        client: connection to the daemon.
        setting: what inquiries share; its asker is the client.
        window: stores under way.
        fold: translates KV events; None when the engine publishes none.
    """

    client: Client
    setting: Setting
    window: StoreWindow
    fold: EventFold | None


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. Where the daemon is away or slow, every answer is a miss."""

    def __init__(self, parts: ManagerParts) -> None:
        self._client = parts.client
        self._setting = parts.setting
        self._positions = parts.setting.positions
        self._window = parts.window
        self._fold = parts.fold
        self._inquiries: dict[str, RequestLookups] = {}
        self._loading: dict[str, PendingLookup] = {}
        self._deferred: set[str] = set()
        self._counters = stats.Counters()
        self._reset = Reset(parts.client.reset)
        self._usable = True
        self._credit_reported = False

    # --- what the connector calls beyond vLLM's interface ---

    def join(self, namespace: NamespaceSpec) -> None:
        """The workers told their namespace: connect to it."""
        self._client.join(namespace)

    def begin(self, request_id: str, groups: Sequence[Sequence[Key]]) -> None:
        """Ask for a request's keys (per group on the wire, root first) unless a good answer is there or on its way."""
        self._deferred.discard(request_id)
        inquiry = self._inquiries.get(request_id)
        if inquiry is not None and self._trusted and inquiry.begin(groups):
            self._counters.count(stats.LOOKUPS)
        if inquiry is not None and inquiry.wait.over and not inquiry.wait_noted:
            inquiry.wait_noted = True
            self._counters.count(stats.DISK_WAITS_ENDED)

    def runs_without_load(self, request_id: str) -> None:
        """The request was scheduled and needs none of its pinned blocks."""
        self._deferred.discard(request_id)
        if inquiry := self._inquiries.get(request_id):
            inquiry.let_go()

    def load_failed(self, request_id: str, keys: Collection[Key], failed: FailedJob) -> None:
        """A load of ``keys`` failed: its request is recomputed, and blocks that proved unusable leave the daemon."""
        self._counters.count(stats.FAILED_LOADS)
        if inquiry := self._inquiries.get(request_id):
            inquiry.bar()
        if failed.error in BLOCKS_UNUSABLE:
            named = failed.keys or enumerate(KeyedSpec.of(keys, self._positions).groups)
            self._client.invalidate([GroupKeys(group, hashes) for group, hashes in named if hashes])
        logger.warning(
            "kvoffd: a load of %d blocks failed; request %s is recomputed. %s", len(keys), request_id, _why(failed)
        )

    def store_failed(self, failed: FailedJob) -> None:
        """A store left blocks out. Nothing is known about those here, so there is nothing to forget."""
        self._counters.count(stats.FAILED_STORES)
        logger.debug("kvoffd: a store failed. %s", _why(failed))

    def workers_report(self, credit_bytes: int | None, usable: bool) -> None:
        """News from the workers: how much each may have outstanding, and whether their memory can be shared at all."""
        if credit_bytes is not None:
            self._window.credit_bytes = credit_bytes
            self._credit_reported = True
        if not usable and self._usable:
            self._usable = False
            logger.warning(
                "kvoffd: the workers' KV memory cannot be shared with the daemon; the engine runs without it."
            )

    def begin_reset(self, reports_due: int) -> None:
        """Prepare for reset_cache(): ``reports_due`` worker reports of running jobs are still to come."""
        self._reset.begin(reports_due)

    def reset_report(self, count: int) -> None:
        """``count`` reports came of jobs that ran at the last reset."""
        self._reset.report(count)

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._inquiries[req_context.req_id] = RequestLookups(self._setting)
        return RequestOffloadingContext()

    def lookup(self, key: Key, req_context: ReqContext) -> LookupResult:
        inquiry = self._inquiries.get(req_context.req_id)
        if inquiry is None or not self._trusted:
            return LookupResult.MISS
        verdict = inquiry.verdict(key)
        if verdict is Verdict.HIT:
            return LookupResult.HIT
        if verdict is Verdict.COMING:
            self._deferred.add(req_context.req_id)
            # Not RETRY, after which vLLM would look for an earlier window although this one will be there.
            return LookupResult.HIT_PENDING
        if verdict is Verdict.LATER:
            self._deferred.add(req_context.req_id)
            return LookupResult.RETRY
        if verdict is Verdict.TOO_LATE and inquiry.note_late():
            self._counters.count(stats.LATE_LOOKUPS)
        return LookupResult.MISS

    def get_load_source(self, key: Key, req_context: ReqContext) -> CacheHitSource:
        inquiry = self._inquiries.get(req_context.req_id)
        from_disk = inquiry is not None and key in inquiry.from_disk
        return CacheHitSource.DISK if from_disk else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Key], req_context: ReqContext) -> KeyedSpec:
        inquiry = self._inquiries.get(req_context.req_id)
        answer = inquiry.take() if inquiry is not None else None
        if answer is not None:
            self._loading[req_context.req_id] = answer
        lease_id = answer.ticket.lease_id if answer is not None else NO_LEASE
        return KeyedSpec.of(keys, self._positions, lease_id)

    def complete_load(self, keys: Collection[Key], req_context: ReqContext) -> None:
        self._setting.release(self._loading.pop(req_context.req_id, None))

    def prepare_store(self, keys: Collection[Key], req_context: ReqContext) -> PrepareStoreOutput | None:
        inquiry = self._inquiries.get(req_context.req_id)
        wanted: list[Key] = []
        if self._trusted and self._client.connected:
            wanted = [
                key for key in keys if key not in self._window and not (inquiry is not None and inquiry.is_stored(key))
            ]
        if wanted:
            if not self._credit_reported:
                self._window.credit_bytes = self._client.credit_bytes
            if not self._window.open:
                self._counters.count(stats.DEFERRED_STORES)
                return None
            self._window.begin(wanted)
        return PrepareStoreOutput(
            keys_to_store=wanted, store_spec=KeyedSpec.of(wanted, self._positions), evicted_keys=[]
        )

    def complete_store(self, keys: Collection[Key], req_context: ReqContext, success: bool = True) -> None:
        self._window.end(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._deferred.discard(req_context.req_id)
        if inquiry := self._inquiries.pop(req_context.req_id, None):
            inquiry.let_go()

    def has_pending_work(self) -> bool:
        return bool(self._deferred) or self._reset.flushing

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._fold.translate(self._client.take_events()) if self._fold is not None else ()

    def reset_cache(self) -> None:
        for inquiry in self._inquiries.values():
            inquiry.let_go()
            inquiry.seen = None
        for question in self._loading.values():
            self._setting.release(question)
        self._loading.clear()
        self._deferred.clear()
        self._window.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self._client.connected)

    def shutdown(self) -> None:
        self._reset.close()
        self._client.close()

    @property
    def _trusted(self) -> bool:
        """Whether what the daemon holds may be used."""
        return self._usable and not self._reset.due


def _why(failed: FailedJob) -> str:
    return failed.error.sentence if failed.error is not None else "The daemon gave no reason."
