"""The scheduler's half: answers vLLM's questions about blocks from what the daemon has answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, MutableMapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffd_client.vllm import connector_stats as stats
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES, FailedJob, KeyedSpec
from kvoffd_client.vllm.harm import Harm
from kvoffd_client.vllm.kv_event_translator import KvEventTranslator
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.lookup_timing import EarlyLookups, LookupWait
from kvoffd_client.vllm.namespace_client import EngineNamespace
from kvoffd_client.vllm.request_lookups import KeyStatus, LookupSettings, PendingLookup, RequestLookups
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys

# Errors that say something about the blocks. After any other one they are as good as before.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})


class StoreWindow:
    """Counts the bytes of stores that were offered to vLLM and that no worker has reported as ended.

    The credit is soft: one offer may pass it. An offer is all the new blocks of a request's step, and a part of it
    would be worth little (vLLM does not offer the rest again, and a prefix without its sliding windows is no hit); an
    offer larger than the whole credit would otherwise never be made. ``shard_bytes`` are those of one worker's shard of
    a block, by a key's last four bytes.
    """

    def __init__(self, shard_bytes: Mapping[bytes, int]) -> None:
        self._shard_bytes = shard_bytes
        self._in_flight: set[OffloadKey] = set()
        self.outstanding_bytes = 0
        self.credit_bytes = 0

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._in_flight

    @property
    def open(self) -> bool:
        """Whether another store may be offered now."""
        return self.outstanding_bytes == 0 or self.outstanding_bytes < self.credit_bytes

    def begin(self, keys: Collection[OffloadKey]) -> None:
        """Count keys, none of them in flight, that are offered now."""
        self._in_flight.update(keys)
        self.outstanding_bytes += self._bytes_of(keys)

    def end(self, keys: Collection[OffloadKey]) -> None:
        """Forget the keys of a store that ended, well or not. Keys that are not in flight (any more) are ignored."""
        ended = self._in_flight.intersection(keys)
        self._in_flight -= ended
        self.outstanding_bytes -= self._bytes_of(ended)

    def clear(self) -> None:
        """Forget all stores: vLLM does not tell how they end after a reset."""
        self._in_flight.clear()
        self.outstanding_bytes = 0

    def _bytes_of(self, keys: Collection[OffloadKey]) -> int:
        return sum(self._shard_bytes[key[-GROUP_ID_BYTES:]] for key in keys)


class StoreThreshold:
    """Counts in how many requests a block was computed, and lets it be stored from the ``least``-th on.

    As vLLM's ``store_threshold``: the counts are of this engine alone, and those of the latest ``size`` blocks.
    """

    def __init__(self, least: int, size: int) -> None:
        self._least = least
        self._size = size
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def take(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Count ``keys``; return those that are to be stored."""
        if self._least < 2:
            return list(keys)
        for key in keys:
            self._counts[key] = self._counts.pop(key, 0) + 1
        reached = [key for key in keys if self._counts[key] >= self._least]
        while len(self._counts) > self._size:
            self._counts.popitem(last=False)
        return reached


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. Where the daemon is away or slow, every answer is a miss.

    ``event_translator`` is None when the engine publishes no KV events. Without ``loads`` everything is a miss, without
    ``stores`` nothing is stored: vLLM's kv_role.

    Attributes:
        client: the connection to the daemon.
        namespace: which namespace the engine is in. It was left before reset_cache() is called.
        storable: returns those of a request's keys whose blocks are there.
    """

    def __init__(
        self,
        lookup_settings: LookupSettings,
        store_window: StoreWindow,
        event_translator: KvEventTranslator | None,
        namespace: EngineNamespace,
        *,
        loads: bool = True,
        stores: bool = True,
        store_threshold: StoreThreshold | None = None,
        do_no_harm: bool = True,
        config_info: Mapping[str, str | float] | None = None,
    ) -> None:
        self.client = lookup_settings.client
        self._lookup_settings = lookup_settings
        self._positions = lookup_settings.positions
        self._store_window = store_window
        self._event_translator = event_translator
        self._lookups: dict[str, RequestLookups] = {}
        self._early_lookups = EarlyLookups(lookup_settings)
        self._lookup_wait = LookupWait(lookup_settings.clock)
        self._loading: dict[str, PendingLookup] = {}
        self._counters = stats.Counters()
        self.namespace = namespace
        self.storable: Callable[[str, list[OffloadKey]], list[OffloadKey]] = lambda _, keys: keys
        namespace.on_leave = self._leave_adapters
        self._loads = loads
        self._stores = stores
        self._harm = Harm(lookup_settings.prefill, lookup_settings.clock, do_no_harm)
        self._store_threshold = store_threshold or StoreThreshold(0, 0)
        self._config_info = config_info or {}
        self._usable = True
        self._credit_reported = False
        self._on_hold = False  # one answer for all keys of a scan

    # --- what the connector calls beyond vLLM's interface ---

    def begin_lookup(
        self, request_id: str, groups: Sequence[Sequence[OffloadKey]], missing_tokens: int | None = None
    ) -> None:
        """Look up a request's keys (per group on the wire, root first) unless a good answer is there or on its way.

        ``missing_tokens``: see ``RequestLookups``; None where it is not known yet.
        """
        self._on_hold = self._namespace_soon
        lookups = self._lookups.get(request_id)
        if lookups is None:
            return
        lookups.groups = groups
        if missing_tokens is not None:
            lookups.missing_tokens = missing_tokens
        self._lookup_settings.allowance.settle()
        if self._loads and self._may_use_daemon and lookups.refresh(groups):
            self._counters.count(stats.LOOKUPS)
        if lookups.count_disk_wait():
            self._counters.count(stats.DISK_WAITS_ENDED)

    def begin_early_lookup(self, request_id: str, groups: Sequence[Sequence[OffloadKey]]) -> None:
        """Look up the keys of a request that is not new yet. The only method that may be called in any thread."""
        generation = self.namespace.generation  # first: the namespace may be left meanwhile
        if self._loads and self._may_use_daemon:
            self._early_lookups.ask(request_id, groups, generation)

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Note that the scheduler begins a step with so many tokens of each request; tell the daemon now and then."""
        self._harm.prefill.step_begins(request_tokens)
        # While the daemon does not answer, as when lookups are late, the counts wait for it.
        if self.client.ready and (figures := self._harm.news()) is not None:
            self.client.report(*figures)

    def step_ended(self) -> None:
        """Note that the output of the first of the steps that run has come."""
        self._harm.prefill.step_ended()

    def load_pays(self, request_id: str, tokens: int) -> bool:
        """Whether to load so many tokens of a request, and not to compute them."""
        if self._harm.load_pays(tokens):
            return True
        lookups = self._lookups.get(request_id)
        if lookups is None or not lookups.skip_counted:
            self._counters.count(stats.SLOW_LOADS)
            self._harm.skipped_loads += 1
        if lookups is not None:
            lookups.skip_counted = True
        return False

    def load_ended(self, keys: Collection[OffloadKey], seconds: float) -> None:
        """Note how long a load of these keys took, the slowest rank's."""
        self._harm.loads.note(self._harm.prefill.tokens_of(keys), seconds)

    def is_looked_up(self, request_id: str) -> bool:
        """Whether a lookup of the request is on its way, or its answer has come and nobody has looked at it."""
        lookups = self._lookups.get(request_id)
        return lookups is not None and lookups.pending is not None

    def is_tail_unanswered(self, request_id: str) -> bool:
        """Whether it is not known yet if a block of the request is stored up to some token inside it."""
        lookups = self._lookups.get(request_id)
        return lookups is not None and lookups.tail_unanswered

    def ready_blocks(self, request_id: str, index: int) -> int:
        """Return of how many blocks of a group, from a request's first one on, the answer says that they are there."""
        lookups = self._lookups.get(request_id)
        if lookups is None or lookups.answer is None or not all(lookups.groups):
            return 0
        return min(lookups.answer.ticket.leading_ready(index), len(lookups.groups[index]))

    def await_answer(self, request_id: str, others: Iterable[str]) -> None:
        """Wait a moment for a request's answer where none of ``others`` can run; see ``LookupWait``."""
        lookups = self._lookups.get(request_id)
        if lookups is None:
            return
        pause_s = self._lookup_wait.due(lookups, map(self._lookups.get, others))
        if pause_s == 0.0:
            return
        self._counters.count(stats.LOOKUP_WAITS)
        if not lookups.wait(pause_s):
            self._counters.count(stats.LOOKUP_WAITS_IN_VAIN)
            self._lookup_wait.in_vain()

    def begin_adapter(self, request_id: str, content: bytes | None, adapter_id: int) -> None:
        """Have a new request's keys hold the content of its LoRA adapter; None: it is not known, so use nothing.

        Where other requests have other content under the same id, nobody knows which of it vLLM computes them with.
        """
        if (lookups := self._lookups.get(request_id)) is None:
            return
        lookups.adapter, lookups.adapter_id, lookups.outside = content or b"", adapter_id, content is None
        same_id = [other for other in self._lookups.values() if other.adapter_id == adapter_id and other.adapter]
        if any(other.adapter != content for other in same_id):
            for other in same_id:
                other.leave()

    def _leave_adapters(self) -> None:
        """Adapters may have been replaced in place, and vLLM goes on with the requests that began with others."""
        for lookups in self._lookups.values():
            if lookups.adapter:
                lookups.leave()

    def tell_tokens(self, request_id: str, told: Container[OffloadKey]) -> None:
        """Store a new request's blocks once more where the daemon has them and they are not among ``told``."""
        if lookups := self._lookups.get(request_id):
            lookups.told = told

    def leave_out(self, request_id: str) -> None:
        """Look up and store nothing of a new request."""
        if lookups := self._lookups.get(request_id):
            lookups.leave()

    def scheduled_without_load(self, request_id: str) -> None:
        """Unpin the blocks of a request that was scheduled and needs none of them."""
        if lookups := self._lookups.get(request_id):
            lookups.release()

    def load_failed(self, request_id: str, keys: Collection[OffloadKey], failed: FailedJob) -> None:
        """Take note that a load of ``keys`` failed: its request is recomputed, unusable blocks leave the daemon."""
        self._counters.count(stats.FAILED_LOADS)
        if lookups := self._lookups.get(request_id):
            lookups.mark_load_failed()
        if failed.error in BLOCKS_UNUSABLE and (failed.keys or lookups is not None):
            adapter = lookups.adapter if lookups is not None else b""
            failed_keys = failed.keys or enumerate(KeyedSpec.of(keys, self._positions, adapter=adapter).groups)
            self.client.invalidate([GroupKeys(group, hashes) for group, hashes in failed_keys if hashes])
        logger.warning(
            "kvoffd: a load of %d blocks failed; request %s is recomputed. %s", len(keys), request_id, _reason(failed)
        )

    def forget_untold(self, described: MutableMapping[OffloadKey, object]) -> None:
        """See ``KvEventTranslator``."""
        if self._event_translator is not None:
            self._event_translator.forget_untold(described)

    def store_failed(self, failed: FailedJob) -> None:
        """Take note that a store left blocks out. Nothing is known of those here, so there is nothing to forget."""
        self._counters.count(stats.FAILED_STORES)
        logger.debug("kvoffd: a store failed. %s", _reason(failed))

    def workers_report(self, credit_bytes: int | None, usable: bool, waited_s: float = 0.0) -> None:
        """Take the workers' report: how much each may have outstanding, whether their memory can be shared, how long
        vLLM waited for stores."""
        self._harm.waited(waited_s)
        if credit_bytes is not None:
            self._store_window.credit_bytes = credit_bytes
            self._credit_reported = True
        if not usable and self._usable:
            self._usable = False
            logger.warning(
                "kvoffd: the workers' KV memory cannot be shared with the daemon; the engine runs without it."
            )

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which no request can leave out.
        disk = req_context.load_tier_filter.allows(Medium.STORAGE, Locality.LOCAL)
        lookups = self._early_lookups.take(req_context.req_id, self.namespace.generation)
        if lookups is None:
            lookups = RequestLookups(self._lookup_settings)
        else:
            self._counters.count(stats.LOOKUPS)
            self._counters.count(stats.EARLY_LOOKUPS)
        lookups.disk_wait_over = lookups.disk_wait_counted = not disk
        self._lookups[req_context.req_id] = lookups
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        lookups = self._lookups.get(req_context.req_id)
        if lookups is None or not self._loads:
            return LookupResult.MISS
        if self._on_hold:
            return LookupResult.RETRY
        if not self._may_use_daemon:
            return LookupResult.MISS
        status = lookups.status(key)
        if status is KeyStatus.HIT:
            return LookupResult.HIT
        if status is KeyStatus.PENDING:
            # Not RETRY, after which vLLM would look for an earlier window although this one will be there.
            return LookupResult.HIT_PENDING
        if status is KeyStatus.RETRY:
            return LookupResult.RETRY
        if status is KeyStatus.TIMED_OUT and lookups.count_timeout():
            self._counters.count(stats.LATE_LOOKUPS)
            self._harm.late_lookups += 1
        return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        lookups = self._lookups.get(req_context.req_id)
        if lookups is not None and key in lookups.from_elsewhere:
            return CacheHitSource.EXTERNAL_UNSPECIFIED  # what vLLM calls a remote store
        from_disk = lookups is not None and key in lookups.from_disk
        return CacheHitSource.DISK if from_disk else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeyedSpec:
        lookups = self._lookups.get(req_context.req_id)
        answer = lookups.take() if lookups is not None else None
        if lookups is None or answer is None:
            return KeyedSpec.of(keys, self._positions)
        self._loading[req_context.req_id] = answer
        return KeyedSpec.of(keys, self._positions, answer.ticket.lease_id, lookups.adapter)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._lookup_settings.release(self._loading.pop(req_context.req_id, None))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        lookups = self._lookups.get(req_context.req_id)
        wanted: list[OffloadKey] = []
        if lookups is not None and self._stores and not lookups.outside:
            if self.namespace.current is None and self.namespace.soon:
                return None  # vLLM offers it again
            if self._may_use_daemon and self.namespace.may_store and self.client.ready:
                window = self._store_window
                wanted = [key for key in keys if key not in window and not lookups.is_stored(key)]
                wanted = self.storable(req_context.req_id, wanted)
        if wanted and self._harm.leave_store_out():
            self._counters.count(stats.PAUSED_STORES)
            wanted = []
        if wanted:
            if not self._credit_reported:
                self._store_window.credit_bytes = self.client.credit_bytes
            if not self._store_window.open:
                self._counters.count(stats.DEFERRED_STORES)
                return None
            wanted = self._store_threshold.take(wanted)
            self._store_window.begin(wanted)
        adapter = lookups.adapter if lookups is not None else b""
        return PrepareStoreOutput(
            keys_to_store=wanted, store_spec=KeyedSpec.of(wanted, self._positions, adapter=adapter), evicted_keys=[]
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._store_window.end(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if lookups := self._lookups.pop(req_context.req_id, None):
            lookups.release()

    def has_pending_work(self) -> bool:
        # Not for requests that wait for an answer: vLLM makes steps for them, but none while it is paused, and a pause
        # ends only when nothing is pending.
        return self.namespace.needs_steps

    def take_events(self) -> Iterable[OffloadingEvent]:
        translator = self._event_translator
        return translator.translate(self.client.take_events()) if translator is not None else ()

    def reset_cache(self) -> None:
        for lookups in self._lookups.values():
            lookups.forget()
        self._early_lookups.forget_all()
        for lookup in self._loading.values():
            self._lookup_settings.release(lookup)
        self._loading.clear()
        self._store_window.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self.client.ready, lambda: self._harm.rates)

    def config_info(self) -> Sequence[Mapping[str, str | float]]:
        """Labels of vLLM's metric kv_offload_config_info (0.33; never asked for before)."""
        return [self._config_info]

    def shutdown(self) -> None:
        self.client.close()

    @property
    def _may_use_daemon(self) -> bool:
        """Whether the workers can share their memory, and it is known which blocks are of the weights in it."""
        return self._usable and self.namespace.current is not None

    @property
    def _namespace_soon(self) -> bool:
        """Whether a request should wait a moment: the namespace is about to be known, or the workers registered."""
        namespace = self.namespace
        if not self._usable or not namespace.soon:
            return False
        return namespace.current is None or namespace.waited_s < self._lookup_settings.deadline_s


def _reason(failed: FailedJob) -> str:
    return failed.error.sentence if failed.error is not None else "The daemon gave no reason."
