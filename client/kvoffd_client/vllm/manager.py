"""The scheduler's half of the connector: answers vLLM's questions about blocks from the daemon's answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.adapters import AdapterContents
from kvoffd_client.vllm.block_tokens import HostBlockEvents
from kvoffd_client.vllm.connector_metadata import (
    GROUP_ID_BYTES,
    ChunkGroup,
    FailedJob,
    KeyedSpec,
    WorkerReport,
    of_adapter,
)
from kvoffd_client.vllm.do_no_harm import DoNoHarm, PrefillRate
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.hints import HintsOption, allowed_tiers, notes_of, read_hints
from kvoffd_client.vllm.keyed_lookup import RESULTS
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prompt_report import PromptRecord, failed
from kvoffd_client.vllm.request_lookups import ASSUMED_RATE, RequestLookups
from kvoffd_client.vllm.request_state import RequestState
from kvoffd_client.vllm.waits import LONG_AGO
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import MAX_REPORTED, SHARED, GroupKeys

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

# Errors after which the blocks are unusable. After other errors they are still valid.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})
REPORT_EVERY_S = 10.0


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. If the daemon is absent or slow, every answer is a miss.

    Attributes:
        namespace: the engine's namespace and connection. The connector calls leave() before reset_cache().
        groups: the offloaded groups, by index on the wire.
        requests: states of unfinished requests by id.
        events: publisher of the daemon's blocks; None if the engine publishes no KV events.
        lookups: the lookups of requests that wait.
        stores: whether blocks are stored, by vLLM's kv_role.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        groups: Sequence[ChunkGroup],
        clock: Callable[[], float],
        *,
        deadline_s: float,
        disk_wait_s: float = 120.0,
        do_no_harm: bool = True,
        hints: HintsOption = "no_release",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hints = hints
        self.groups = tuple(groups)
        self.clock, self._do_no_harm, self._deadline_s = clock, do_no_harm, deadline_s
        self._positions = {group.suffix: index for index, group in enumerate(groups)}
        self._shard_bytes: dict[bytes, int] = {}
        """Approximate bytes of one worker's shard of a block, by the group's suffix of a key."""
        self._credit_bytes = 0
        """Bytes of stores that may be outstanding, as the workers reported. An offer that exceeds it is taken whole:
        vLLM never offers a rest again, and blocks behind a gap are rarely hits."""
        self._storing: dict[OffloadKey, int] = {}
        """Keys of stores that no worker has reported as ended, with their bytes."""
        self._outstanding_bytes = 0
        self._not_stored: set[bytes] = set()
        """Hashes of failed stores, until vLLM handles their end."""
        self.events: HostBlockEvents | None = None
        self._numbers = count()
        self._scheduled: list[tuple[RequestState, int]] = []
        """Requests that this step schedules, with the tokens that they load."""
        self._counters = metrics.Counters()
        self._report_at, self._reported_late_times = clock() + REPORT_EVERY_S, 0.0
        self._reported = Counter[str]()
        """Counters at the last report to the daemon."""
        self._reported_problem = ""
        self.namespace = namespace
        self.adapters = AdapterContents(namespace)
        namespace.on_leave = self._on_leave
        self.stores = True
        self.lookups = RequestLookups(
            *(namespace, self.adapters, self.groups, lambda: self.clock(), self._counters),
            deadline_s=deadline_s,
            disk_wait_s=disk_wait_s,
            do_no_harm=do_no_harm,
            sleep=sleep,
        )
        self.requests = self.lookups.requests

    # --- for the connector, beyond vLLM's interface ---

    def begin_engine(
        self,
        *,
        shard_bytes: Sequence[int],
        most_running: int,
        largest_chunk: int,
        step_tokens: int = 8192,
        by_priority: bool = False,
        rests: bool = True,
        state_groups: Collection[int] = (),
        only_prefixes: bool = True,
        tail_tokens: int = 0,
        assumed_rate: float = ASSUMED_RATE,
    ) -> None:
        """Set properties of the engine's configuration, before the first request.

        ``shard_bytes``: bytes of one worker's shard of a block, by group on the wire. ``state_groups``: groups of
        recurrent layers, whose states vLLM offers separately. ``only_prefixes``: all groups are of full attention.
        ``rests``: an idle engine may pause in a step, because no other rank waits for it. ``tail_tokens``: tokens per
        hash if tails are stored, else 0. For the others see ``PrefillRate`` and ``PromptQueue``.
        """
        self._shard_bytes = dict(zip(self._positions, shard_bytes, strict=True))
        self._state_suffixes = {self.groups[index].suffix for index in state_groups}
        prefill = PrefillRate(self.clock, most_running, largest_chunk)
        self.harm = DoNoHarm(self.clock, prefill, active=self._do_no_harm)
        self.lookups.begin_engine(
            self.harm,
            step_tokens=step_tokens,
            by_priority=by_priority,
            rests=rests,
            only_prefixes=only_prefixes,
            tail_tokens=tail_tokens,
            assumed_rate=assumed_rate,
        )

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Record the start of a step with these numbers of tokens per request, look up the next prompts of the queue;
        regularly report to the daemon."""
        self._decide_outcomes()
        self.harm.prefill.step_begins(request_tokens)
        self.lookups.begin_step(is_idle=not request_tokens)
        # Counts are kept until the daemon answers: lookups are late when it does not.
        if (now := self.clock()) >= self._report_at and self.namespace.client.ready:
            self._report_at = now + REPORT_EVERY_S
            news = self._counters - self._reported
            self._reported = Counter(self._counters)
            counts = [min(news[name], MAX_REPORTED) for name in metrics.REPORTED]
            late_times, self._reported_late_times = self._reported_late_times, self.lookups.late_times
            late_at = (self._reported_late_times - late_times) / max(1, news[metrics.LATE_LOOKUPS])
            late_age_s = now - late_at if news[metrics.LATE_LOOKUPS] else 0.0
            # Also report old values: the daemon may have been restarted.
            prefill_rate, problem = self.harm.prefill.tokens_per_second, self.namespace.problem
            if any((prefill_rate, *counts, problem, self._reported_problem)):
                self.namespace.client.report(prefill_rate, *counts, problem=problem, late_age_s=late_age_s)
                self._reported_problem = problem

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Record that a step has ended; return events of the daemon's blocks for the engine's stream."""
        self.harm.prefill.step_ended()
        return self.events.take(self.namespace) if self.events is not None else ()

    def is_loading(self, request_id: str) -> bool:
        """Return whether a request is being loaded, until vLLM has handled the end."""
        return request_id in self.lookups.loading

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed to finish a load or to determine the namespace."""
        return bool(self.lookups.loading) or self.has_pending_work()

    def skips_load(self, request_id: str, tokens: int) -> bool:
        """Return whether a request computes tokens instead of loading them, which is slower. Counted once."""
        if self.clock() >= self.harm.loads_paused_until.get(tokens.bit_length(), LONG_AGO):
            return False
        record = self.requests[request_id].record
        self._counters[metrics.SLOW_LOADS] += not record.skipped
        record.skipped = True
        return True

    def refuse_load(self, request_id: str) -> None:
        """Record that a request is computed although it could be loaded, because the KV cache had no space."""
        self.requests[request_id].record.refused = True
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: a prompt is computed although its blocks were found, because the KV cache has no space for them "
            "besides other loads and draft blocks. 'kvoffd-cli clients --requests' shows such prompts as no_space. "
            "More KV cache memory in the engine, or fewer draft tokens, would help."
        )

    def _on_leave(self) -> None:
        """Have all requests look at the namespace again, and disable those with adapters: these may have been replaced
        in place, and vLLM continues the requests."""
        self.lookups.queue.wake_all()
        for state in self.requests.values():
            if state.adapter:
                self.lookups.end_leases(state)
                state.disabled = True

    def scheduled(self, request: Request, loaded_tokens: int) -> None:
        """Record that a request is about to be scheduled with ``loaded_tokens``; if these are 0, unpin its blocks.

        Publish the blocks that its answer reports as ready, which another engine may have stored.
        """
        state = self.requests[request.request_id]
        state.loaded_tokens, state.scan = loaded_tokens, None
        self.lookups.queue.remove(request.request_id)
        if self.events is not None and (answer := state.answer) is not None and answer.usable:
            for index in self.events.groups:
                keys = self.groups[index].keys(request.block_hashes)
                self.events.found(request, index, keys, answer.leading_ready(index))
        self._scheduled.append((state, loaded_tokens))
        if not loaded_tokens:
            self.lookups.end_leases(state)

    def _decide_outcomes(self) -> None:
        """Decide the outcomes of the requests that this step schedules."""
        scheduled, self._scheduled = self._scheduled, []
        for state, loaded_tokens in scheduled:
            record, request = state.record, state.request
            if not record.is_decided or record.counted is not None:
                loading = self.lookups.loading.get(request.request_id)
                record.of_load = record.decide(
                    request,
                    self.groups,
                    state.last,
                    state.adapter,
                    state.tiers,
                    loaded_tokens=loaded_tokens,
                    load_lease_id=loading.future.lease_id if loading is not None else 0,
                )
                if loading is None:
                    self._send_report(record)
            record.is_late = False  # a later lookup, after a pre-emption, has its own time

    def _job_failed(self, job: FailedJob) -> None:
        """Handle a store with missing blocks, or a failed load, whose request is recomputed."""
        reason = job.error.sentence if job.error is not None else "The daemon gave no reason."
        if job.request_id is None:  # a store, whose blocks are not remembered here
            self._counters[metrics.FAILED_STORES] += 1
            logger.debug("kvoffd: a store failed. %s", reason)
            if (namespace := self.namespace.current) is not None:
                self._not_stored.update(_hashes_of(job.keys, namespace.key_bytes))
            return
        self._counters[metrics.FAILED_LOADS] += 1
        if state := self.requests.get(job.request_id):
            self.lookups.end_leases(state)
            state.load_failed = True
            if (report := state.record.of_load) is not None:
                state.record.of_load = failed(report)
            state.last = None
        if job.error in BLOCKS_UNUSABLE:
            self.namespace.client.invalidate(job.keys)
        logger.warning("kvoffd: a load failed; request %s is recomputed. %s", job.request_id, reason)

    def workers_report(self, report: WorkerReport) -> None:
        """Handle the workers' report, before vLLM handles the ended jobs."""
        if report.waited_s:
            self.harm.record_wait(report.waited_s)
        if report.credit_bytes is not None:
            self._credit_bytes = report.credit_bytes
        for tokens, seconds in report.load_times.values():
            self.harm.record_load(tokens, seconds)
        for job in report.failed_jobs.values():
            self._job_failed(job)
        if report.memory:
            generation = self.namespace.generation
            current = {rank: one for rank, one in report.memory.items() if one.generation == generation}
            self.namespace.report(current)
            requests = [state.request for state in self.requests.values()]
            begun = [one.lora_request for one in requests if one.lora_request and one.num_computed_tokens]
            self.adapters.record_reports(current, begun)

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.lookups.engine_clock.read()  # the time until now is not the new request's
        if not self.lookups.queue.has_waiting:
            self.lookups.engine_clock.begin_waits()
        state = RequestState(next(self._numbers))
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which requests cannot exclude.
        state.tiers = allowed_tiers(req_context)
        found = read_hints(req_context, self._hints)
        state.hints, state.peer, state.giver = found.hints, found.peer, found.giver
        state.record.hints = notes_of(found)
        self._counters[metrics.UNKNOWN_HINTS] += found.unread
        self.requests[req_context.req_id] = state
        # Loaded blocks are offered for stores too: they are stored if the load failed, otherwise skipped.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state, index = self.requests[req_context.req_id], self._positions[key[-GROUP_ID_BYTES:]]
        place, rest = divmod(req_context.get_offload_key_position(key) or 0, self.groups[index].tokens_per_chunk)
        if not rest:
            results = state.results.get(index, b"")
            return RESULTS[results[place - 1]] if 0 < place <= len(results) else LookupResult.MISS
        result = state.tail_results.get(key)
        if result is None:
            if not state.asks_tails:
                return LookupResult.MISS
            state.wanted_tails.append(key)
            return LookupResult.RETRY  # so that vLLM asks for the others too
        state.awaits_tail |= result is LookupResult.HIT_PENDING
        return result

    def results_of(self, request_id: str, group_id: int) -> tuple[bytes, int]:
        """Return what a scan finds of a request's chunks in one of vLLM's groups, a byte each, and a chunk's tokens."""
        index = self._positions[group_id.to_bytes(GROUP_ID_BYTES, "big")]
        return self.requests[request_id].results.get(index, b""), self.groups[index].tokens_per_chunk

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state, index = self.requests.get(req_context.req_id), self._positions[key[-GROUP_ID_BYTES:]]
        place, rest = divmod(req_context.get_offload_key_position(key) or 0, self.groups[index].tokens_per_chunk)
        tier = 0
        if state is not None and rest:  # a tail, which may end in the first chunk
            tier = state.record.tails_from_tiers.get(key, 0)
        elif state is not None and place:
            tier = state.record.tier_of(index, place - 1)
        if tier == SHARED:
            return CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's name of a remote store
        return CacheHitSource.DISK if tier else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeyedSpec:
        state = self.requests.get(req_context.req_id)
        spec = self._spec_of(keys, state.adapter if state is not None else b"")
        spec.request_id = req_context.req_id
        if state is not None and (answer := state.answer) is not None:
            if state.adapter:
                self.adapters.will_load(state.request.lora_request)
            if tails := [key for key in keys if key in state.tail_results]:
                # They were found by a repeat, which the policy does not see: show it what is used.
                client = self.namespace.client
                client.release(
                    client.lookup(self._spec_of(tails, state.adapter).keys, reported=True, giver=state.giver).lease_id
                )
            state.answer = None  # the load takes its lease
            self.lookups.end_leases(state)
            self.lookups.loading[req_context.req_id] = answer
            self.lookups.loads += 1
            spec.lease_id = answer.future.lease_id
            spec.load_tokens = state.loaded_tokens
        return spec

    def _spec_of(self, keys: Iterable[OffloadKey], adapter: bytes) -> KeyedSpec:
        """Return vLLM's keys by group, in their order."""
        groups: list[list[bytes]] = [[] for _ in self.groups]
        for key in keys:
            groups[self._positions[key[-GROUP_ID_BYTES:]]].append(key[:-GROUP_ID_BYTES])
        if adapter:
            groups = [of_adapter(group, adapter) for group in groups]
        return KeyedSpec(tuple(map(b"".join, groups)))

    def _before(self, request: Request, ends: Mapping[OffloadKey, int], adapter: bytes) -> dict[int, bytes]:
        """Return the key before a request's first one, by group, if there is one. ``ends``: last token of each key."""
        before: dict[int, bytes] = {}
        for key, end in ends.items():
            index = self._positions[key[-GROUP_ID_BYTES:]]
            if index in before:
                continue
            group = self.groups[index]
            hashes = max(0, end - 1) // group.tokens_per_chunk * group.hashes_per_chunk
            before[index] = bytes(request.block_hashes[hashes - 1]) if hashes else b""
            if hashes and adapter:
                (before[index],) = of_adapter([before[index]], adapter)
        return {index: key for index, key in before.items() if key}

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.lookups.queue.load_ended()
        self.lookups.loads += 1
        self.lookups.release(self.lookups.loading.pop(req_context.req_id, None))
        if state := self.requests.get(req_context.req_id):
            self._send_report(state.record)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """As vLLM's. None if it is too early, after which vLLM offers the keys of a request that runs again.

        Once the namespace is known, never None for the states of recurrent layers, which vLLM offers only once: blocks
        without them are not hits.

        vLLM offers the whole prompt when a request ends, unless it was aborted. But a request that ended with an error
        may have computed only a part, and one preempted during its last token has lost its blocks.
        """
        state, namespace = self.requests.get(req_context.req_id), self.namespace
        nothing = PrepareStoreOutput(keys_to_store=[], store_spec=KeyedSpec(()), evicted_keys=[])
        if state is None or state.disabled or not self.stores:
            return nothing
        if state.request.lora_request is not None and not state.adapter:
            return nothing  # it was computed with an unknown adapter
        if namespace.current is None and namespace.pending():
            return None
        if namespace.engine_cache_stale or not namespace.serves:
            return nothing
        request, last = state.request, state.last
        has_ended = request.is_finished()
        states = self._state_suffixes
        may_wait = not states or states.isdisjoint([key[-GROUP_ID_BYTES:] for key in keys])
        if (
            last
            and not last.future.done
            and self.clock() - last.sent_at < self._deadline_s
            and may_wait
            and not has_ended
        ):
            return None  # blocks that the daemon has need not be stored
        if last:
            self.lookups.read(last)  # it may have come after the request was scheduled
        computed = request.num_computed_tokens if has_ended else inf
        ends: dict[OffloadKey, int] = {}
        for key in keys:
            end = req_context.get_offload_key_position(key) or 0
            if end > computed or key in self._storing:
                continue
            index = self._positions[key[-GROUP_ID_BYTES:]]
            if last is None or not last.is_ready(index, key[:-GROUP_ID_BYTES], end):
                ends[key] = end
        if not ends:
            return nothing
        if self.clock() < self.harm.stores_paused_until:
            self._counters[metrics.PAUSED_STORES] += 1
            return nothing
        # The last offer of a request may use twice the credit, which the daemon does not enforce.
        most_bytes = 2 * self._credit_bytes if has_ended else self._credit_bytes
        if may_wait and self._outstanding_bytes and self._outstanding_bytes >= most_bytes:
            self._counters[metrics.FAILED_STORES if has_ended else metrics.DEFERRED_STORES] += 1
            return None
        sizes = {key: self._shard_bytes[key[-GROUP_ID_BYTES:]] for key in ends}
        self._storing |= sizes
        self._outstanding_bytes += sum(sizes.values())
        spec = self._spec_of(ends, state.adapter)
        spec.before = self._before(request, ends, state.adapter)
        has_tail = any(
            end % self.groups[self._positions[key[-GROUP_ID_BYTES:]]].tokens_per_chunk for key, end in ends.items()
        )
        if self.events is not None and not has_tail:  # routers get no events of tails
            spec.origins = self.events.origins_of(request, ends)
        return PrepareStoreOutput(keys_to_store=list(ends), store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._outstanding_bytes -= sum([self._storing.pop(key, 0) for key in keys])
        # The daemon's event may come later. With an adapter its keys are others, and only the event counts.
        hashes = {key[:-GROUP_ID_BYTES] for key in keys}
        self.namespace.client.add_stored(hashes - self._not_stored if success else ())
        self._not_stored -= hashes

    def on_request_finished(self, req_context: ReqContext) -> None:
        if state := self.requests.pop(req_context.req_id, None):
            self.lookups.queue.remove(req_context.req_id)
            record, is_loading = state.record, req_context.req_id in self.lookups.loading
            was_scheduled = record.is_decided  # else it has stored nothing that its hints could name
            if record.counted is not None or is_loading:
                lease_id = record.of_load.lease_id if record.of_load is not None else 0
                report = record.decide(state.request, self.groups, state.last, state.adapter, state.tiers, dropped=True)
                record.of_load = structs.replace(report, lease_id=report.lease_id or lease_id)
            self._send_report(record)
            is_known = state.request is not None and self.lookups.knows_adapter(state)
            if state.hints and was_scheduled and is_known and self.namespace.serves:
                self.lookups.send_hints(state, has_ended=True)
            self.lookups.end_leases(state)
            if state.last is not None:
                self.lookups.read(state.last)

    def has_pending_work(self) -> bool:
        # Not for requests that wait for an answer: vLLM runs steps for them anyway, but none while paused, and it
        # finishes pausing only when nothing is pending.
        return self.namespace.needs_steps

    def reset_cache(self) -> None:
        for state in self.requests.values():
            self.lookups.end_leases(state)
            state.last = None
        for lookup in self.lookups.loading.values():
            self.lookups.release(lookup)
        self.lookups.loading.clear()
        self.lookups.queue.wake_all()
        self._storing.clear()  # vLLM does not report their end
        self._outstanding_bytes = 0

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self.namespace.client.ready, lambda: self.harm.rates)

    def shutdown(self) -> None:
        self.namespace.client.close()

    def _send_report(self, record: PromptRecord) -> None:
        if record.of_load is not None:
            self.namespace.client.report_prompt(record.of_load)
            record.of_load = None


def _hashes_of(groups: Sequence[GroupKeys], size: int) -> Iterator[bytes]:
    """Yield the block hashes of keys that are ``size`` bytes long."""
    for one in groups:
        yield from (one.keys[at : at + size] for at in range(0, len(one.keys), size))
