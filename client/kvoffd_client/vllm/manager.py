"""The scheduler's half of the connector: answers vLLM's questions about blocks from the daemon's answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import TYPE_CHECKING

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
from kvoffd_client.vllm.adapter_contents import AdapterContents
from kvoffd_client.vllm.chunk_groups import ChunkGroup, ChunkGroups, KeyedSpec
from kvoffd_client.vllm.compute_times import ComputeTimes
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.connector_metadata import FailedJob, LoadTime, WorkerNews
from kvoffd_client.vllm.do_no_harm import DoNoHarm
from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.engine_reports import EngineReports
from kvoffd_client.vllm.hints import allowed_tiers, notes_of, read_hints
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_client.vllm.prompt_outcomes import PromptOutcomes
from kvoffd_client.vllm.prompt_waits import PromptWaits
from kvoffd_client.vllm.request_lookups import RequestLookups
from kvoffd_client.vllm.request_state import PromptWait, RequestState, Scheduling
from kvoffd_client.vllm.request_stores import RequestStores
from kvoffd_client.vllm.waits import AnswerWait, EngineClock
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import SHARED

if TYPE_CHECKING:
    from vllm.v1.request import Request

BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})
"""Errors after which the blocks are unusable. After other errors they are still valid."""
FAILED_REMEMBERED = 16_384
"""Failed jobs that are remembered: they may fail in further workers a few steps later, thousands if a daemon ends."""


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. If the daemon is absent or slow, every answer is a miss.

    It passes vLLM's calls on to the parts that own what they concern.

    Args:
        clock: clock such as time.monotonic().
        options: the connector's options.

    Attributes:
        namespace: the engine's namespace and connection. The connector calls leave() before reset_cache().
        groups: the offloaded groups, by index on the wire.
        requests: states of unfinished requests by id.
        adapters: contents of LoRA adapters.
        lookups: lookups, answers and leases of requests.
        waits: what requests wait for.
        stores: stores of blocks, within the credit.
        outcomes: reports of prompts.
        prefill: how fast the engine computes prompts.
        harm: which loads and stores cost more than they save.
        times: when prompts would be computed.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        groups: Sequence[ChunkGroup],
        clock: Callable[[], float],
        options: ConnectorOptions,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.namespace, self.groups, self.clock = namespace, ChunkGroups(groups), clock
        self._options, self._sleep = options, sleep
        self._numbers = count()
        self._failed_jobs: dict[int, None] = {}
        """Ids of jobs that have failed in some worker, oldest first."""
        self._load_times: dict[str, LoadTime] = {}
        """Times of loads that have not ended in all workers, by request: of the slowest worker so far."""
        self._counters = metrics.Counters()
        self._reports = EngineReports(namespace, clock, self._counters)
        self._engine_clock = EngineClock(clock)
        self.adapters = AdapterContents(namespace, clock)
        namespace.on_leave = self._on_leave

    # --- for the connector, beyond vLLM's interface ---

    def begin_engine(self, engine: EngineFacts) -> None:
        """Make the parts, before the first request: vLLM makes the manager without the engine's configuration."""
        namespace, groups, clock, counters = self.namespace, self.groups, self.clock, self._counters
        engine_clock, options = self._engine_clock, self._options
        answer_wait = AnswerWait(options.lookup_deadline_s, do_no_harm=options.do_no_harm)
        self.prefill = PrefillRate(clock, engine.most_running, engine.prompt_step_tokens)
        self.harm = DoNoHarm(clock, self.prefill, active=options.do_no_harm)
        self.lookups = RequestLookups(
            namespace, self.adapters, groups, engine, clock, engine_clock, answer_wait, counters
        )
        self.requests, loading = self.lookups.requests, self.lookups.loading
        self.times = ComputeTimes(engine, self.prefill, namespace, self.requests, loading)
        self.waits = PromptWaits(
            self.lookups,
            engine,
            options,
            self.harm,
            self.times,
            engine_clock,
            answer_wait,
            counters,
            self._reports.late_times,
            self._sleep,
        )
        self.stores = RequestStores(
            namespace, groups, engine, options, self.harm, clock, counters, read_answer=self.lookups.read_answer
        )
        self.outcomes = PromptOutcomes(namespace, groups, loading)

    def begin_step(self, request_tokens: Collection[int]) -> None:
        """Record the start of a step with these numbers of tokens per request, look up the next prompts of the queue;
        regularly report to the daemon.

        vLLM has scheduled this step by now. What ``waits`` and the queue allow "in a step" they allow from here on,
        while vLLM schedules the next one.
        """
        self.outcomes.decide()
        self.prefill.begin_step(request_tokens)
        self.waits.begin_step(is_idle=not request_tokens)
        self.lookups.begin_step()
        # Counts are kept until the daemon answers: lookups are late when it does not.
        if self.clock() >= self._reports.due_at and self.namespace.client.ready:
            self._reports.send(self.prefill.tokens_per_second)

    def step_ended(self) -> None:
        """Record that the workers have ended a step with output."""
        self.namespace.step_ended()
        self.prefill.step_ended()

    def skip_slow_load(self, state: RequestState, tokens: int) -> bool:
        """Return whether a request computes tokens because loading them is slower, and record that for its report."""
        if not self.harm.skips_load(tokens):
            return False
        self._counters[metrics.SLOW_LOADS] += not state.wait.skipped  # once for each scheduling
        state.wait.skipped = True
        return True

    def refuse_load(self, state: RequestState) -> None:
        """Record that a request is computed although it could be loaded, because the KV cache had no space."""
        state.wait.refused = True
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: a prompt is computed although its blocks were found, because the KV cache has no space for them "
            "besides other loads and draft blocks. 'kvoffd-cli clients --requests' shows such prompts as no_space. "
            "More KV cache memory in the engine, or fewer draft tokens, would help."
        )

    def _on_leave(self) -> None:
        """Have all requests be looked up again: if the next namespace is another one, this client is closed, and their
        lookups fail. The time until that namespace is known is no wait for an answer, which would soon be late."""
        self.lookups.queue.parked.wake_all()
        for state in self.requests.values():
            self.lookups.end_leases(state)
            state.wait.lookup.since = None
            self.adapters.weights_changed(state)

    def scheduled(self, request: Request, loaded_tokens: int) -> None:
        """Record that a request is about to be scheduled with ``loaded_tokens``; if these are 0, unpin its blocks."""
        state, events = self.requests[request.request_id], self.stores.events
        ended, earlier = state.wait, state.scheduling
        self.outcomes.scheduled(state, ended, earlier)  # decided in begin_step(), when vLLM knows what it computes
        state.wait, state.scheduling = PromptWait(), Scheduling(loaded_tokens, ended.promoted)
        self.lookups.queue.remove(request.request_id)
        if events is not None and (answer := state.answer) is not None and answer.usable:
            # Its blocks were found, so routers may know them, also those that another engine has stored.
            for index in events.groups:
                keys = self.groups[index].keys(request.block_hashes)
                events.publish_found(request, index, keys, answer.leading_ready(index))
        if not loaded_tokens:
            self.lookups.end_leases(state)

    def handle_news(self, news: WorkerNews) -> None:
        """Handle the workers' news, before vLLM handles the ended jobs."""
        if news.waited_s:
            self.harm.record_store_wait(news.waited_s)
        for request_id, load in news.load_times.items():
            if request_id in self.lookups.loading:  # else it began before a reset, and vLLM does not handle its end
                self._load_times[request_id] = load.slower(self._load_times.get(request_id))
        for job in news.failed_jobs:
            self._job_failed(job, is_first=job.job_id not in self._failed_jobs)
            self._failed_jobs[job.job_id] = None
        while len(self._failed_jobs) > FAILED_REMEMBERED:
            del self._failed_jobs[next(iter(self._failed_jobs))]
        self.stores.record_unstored(news.rejected)
        if news.memory:
            generation = self.namespace.generation
            current = {rank: memory for rank, memory in news.memory.items() if memory.generation == generation}
            self.namespace.update(current)
            if (credit_bytes := self.namespace.credit_bytes) is not None:
                self.stores.credit_bytes = credit_bytes
            self.adapters.update(current, self.requests.values())

    def _job_failed(self, job: FailedJob, *, is_first: bool) -> None:
        """Handle a store with missing blocks, or a failed load, whose request is recomputed. ``is_first``: it has not
        failed in another worker before."""
        reason = job.error.sentence if job.error is not None else "The daemon gave no reason."
        if job.request_id is None:
            logger.debug("kvoffd: a store failed. %s", reason)
            self._counters[metrics.FAILED_STORES] += is_first
            self.stores.record_unstored(job.keys)
            return
        # Each worker reports the keys of its own shards, so those of the later ones are invalidated too.
        if job.error in BLOCKS_UNUSABLE:
            self.namespace.client.invalidate(job.keys)
        if not is_first:
            return
        if state := self.requests.get(job.request_id):
            self.lookups.load_failed(state)
            self.outcomes.load_failed(state)
        self._counters[metrics.FAILED_LOADS] += 1
        logger.warning("kvoffd: a load failed; request %s is recomputed. %s", job.request_id, reason)

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._engine_clock.begin_wait(is_first=not self.lookups.queue.has_waiting)
        self.waits.skip_pause()
        hints = read_hints(req_context, self._options.hints)
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which requests cannot exclude.
        state = RequestState(
            next(self._numbers), hints=hints, hint_notes=notes_of(hints), tiers=allowed_tiers(req_context)
        )
        self._counters[metrics.IGNORED_HINTS] += hints.unknown
        self.requests[req_context.req_id] = state
        # Loaded blocks are offered for stores too: they are stored if the load failed, otherwise skipped.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self.requests[req_context.req_id].scan.result(key, self.groups.place_in_prompt(key, req_context))

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        if (state := self.requests.get(req_context.req_id)) is None:
            return CacheHitSource.HOST
        tier = state.scheduling.promoted.tier_of(key, self.groups.place_in_prompt(key, req_context))
        if tier == SHARED:
            return CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's name of a remote store
        return CacheHitSource.DISK if tier else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeyedSpec:
        state = self.requests.get(req_context.req_id)
        adapter = state.adapter.content if state is not None else b""
        spec = self.groups.spec_of(keys, adapter)
        spec.request_id = req_context.req_id
        if state is None or (answer := self.lookups.begin_load(state)) is None:
            return spec  # the request has ended or lost its answer: without a lease the load fails in the workers
        spec.lease_id, spec.load_tokens = answer.future.lease_id, state.scheduling.loaded_tokens
        if adapter:
            self.adapters.want(state.request.lora_request)
        if tails := [key for key in keys if key in state.scan.tails.results]:
            # Only repeated lookups ask for tails, and the daemon does not show those to its policy.
            self.namespace.client.show_used(self.groups.spec_of(tails, adapter).keys, giver=state.hints.giver)
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.lookups.end_load(req_context.req_id)
        if (load := self._load_times.pop(req_context.req_id, None)) is not None:
            self.harm.record_load(*load)
        if state := self.requests.get(req_context.req_id):
            self.outcomes.load_ended(state)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """As vLLM's. None if it is too early, after which vLLM offers the keys of a request that runs again.

        Once the namespace is known, never None for the states of recurrent layers, which vLLM offers only once: blocks
        without them are not hits.
        """
        return self.stores.prepare(self.requests.get(req_context.req_id), keys, req_context)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.stores.ended(keys, success=success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if (state := self.requests.pop(req_context.req_id, None)) is None:
            return
        self.lookups.queue.remove(req_context.req_id)
        self.outcomes.request_ended(state)
        if state.was_reported:  # it was scheduled; others have stored nothing
            self.lookups.hint_sender.send_end_hints(state)
        self.lookups.end_leases(state)
        if state.last is not None:
            self.lookups.read_answer(state.last)  # it may have come unread: how long it took counts all the same

    def has_pending_work(self) -> bool:
        # Not for requests that wait for an answer: vLLM runs steps for them anyway, but none while paused, and it
        # finishes pausing only when there is none.
        return self.namespace.needs_steps

    def reset_cache(self) -> None:
        self._load_times.clear()
        self.lookups.reset()
        self.stores.reset()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self.namespace.client.ready, lambda: self.harm.rates)

    def shutdown(self) -> None:
        self.namespace.client.close()
