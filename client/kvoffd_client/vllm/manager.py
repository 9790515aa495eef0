"""The scheduler's half of the connector: answers vLLM's questions about blocks from the daemon's answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.adapters import ANSWER_PATIENCE_S, AdapterContents
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
from kvoffd_client.vllm.hints import RequestHint, read_hints
from kvoffd_client.vllm.keyed_lookup import NOTHING_AWAITED, RESULTS, KeyedLookup, result_of
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prompt_queue import MAX_AHEAD, Parked, PromptQueue
from kvoffd_client.vllm.prompt_report import PromptRecord, failed
from kvoffd_client.vllm.waits import MIN_COMPUTED_S, MIN_RETRY_PAUSE_S, AnswerWait, EngineClock, TierWait
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import MAX_REPORTED, PENDING, SHARED, GroupKeys, HintAction

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

# Errors after which the blocks are unusable. After other errors they are still valid.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})
LONG_AGO = float("-inf")
REFRESH_S, REFRESH_KEYS = 1.0, 1000
"""An answer with misses is refreshed at this age, for each REFRESH_KEYS keys; a complete one this long before
``stale_at``. After a failed lookup none is sent for this long."""
CHECKED_AHEAD = 16
"""Prompts at the head of the queue whose answers are checked, and renewed if they are old, at the end of a step."""
LOAD_PAUSE_S = 0.05
"""Longest time for which a request that waits for another one's load is not scanned."""
ASSUMED_RATE, ASSUMED_CPU_RATE = 10_000.0, 500.0
"""Assumed prefill rates in tokens per second, on a GPU and on a CPU, while the rate is unknown. Estimates for a large
GPU and for few cores."""
REPORT_EVERY_S = 10.0


class Scan(NamedTuple):
    """What the result of vLLM's scan of a request depends on.

    Attributes:
        loads_begun: number of all loads so far: vLLM scans again where another request loads the same blocks.
    """

    answer: KeyedLookup | None
    computed_tokens: int
    awaits_tier: bool
    loads_begun: int


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request.

    Attributes:
        number: number of requests before it.
        request: vLLM's request, from ``arrived`` on; its block hashes grow.
        record: what is reported of the prompt.
        answer: the current answer, whose lease pins the blocks that it reports as ready.
        pending: a lookup without an answer yet. The current answer stays until it is replaced.
        last: the lookup sent last, even if its lease was released; it shows which blocks need not be stored.
        awaits_tier: the request waits for promotions in its answer.
        tier_wait: that wait.
        tiers: states of blocks that it may wait for: PENDING for those on disks, SHARED for those of shared stores.
        waits_since: time of its first scan without an answer, by the engine's clock.
        tails: hashes of the tails to look up with the chunks, by group on the wire; see ``KeyedLookup``.
        results: during vLLM's scan, what it finds of each group's chunks, a byte each, see ``keyed_lookup``.
        tail_results: the same of the tails looked up, by vLLM's keys.
        wanted_tails: keys of tails for which vLLM asked in this scan, and that were not looked up.
        asks_tails: lookup() adds to these.
        awaits_tail: it waits for an answer about tails, or for a tail that is being promoted.
        loaded_tokens: tokens that it was scheduled to load.
        adapter: content of the request's LoRA adapter; empty if it has none, and while unknown.
        adapter_asked_at: time when the workers were first asked for it.
        disabled: the request must not be looked up or stored.
        load_failed: a load failed; the request is recomputed and not looked up again.
        scan: the last scan that found something or nothing; None before.
        found_tokens: the tokens that it found.
        failed_at: time of its last failed lookup; for a while none is sent, so that the request is not deferred for
            ever.
        waits_for_report_since: time of its first scan while the workers were not registered.
        hints: the client's hints; those for its start are sent once, ``hints_sent``.
        peer: host of the peer that has its blocks, as a hint says; empty for none.
    """

    number: int
    request: Request = cast(Any, None)  # noqa: RUF009
    record: PromptRecord = field(default_factory=PromptRecord)
    answer: KeyedLookup | None = None
    pending: KeyedLookup | None = None
    last: KeyedLookup | None = None
    awaits_tier: bool = False
    tier_wait: TierWait = field(default_factory=TierWait)
    tiers: frozenset[int] = frozenset((PENDING, SHARED))
    waits_since: float | None = None
    tails: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    results: Mapping[int, bytes] = field(default_factory=dict)
    tail_results: Mapping[OffloadKey, LookupResult] = field(default_factory=dict)
    wanted_tails: list[OffloadKey] = field(default_factory=list)
    asks_tails: bool = False
    awaits_tail: bool = False
    loaded_tokens: int = 0
    adapter: bytes = b""
    adapter_asked_at: float | None = None
    disabled: bool = False
    load_failed: bool = False
    scan: Scan | None = None
    found_tokens: int = 0
    failed_at: float = LONG_AGO
    waits_for_report_since: float | None = None
    hints: Sequence[RequestHint] = ()
    hints_sent: bool = False
    peer: str = ""


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. If the daemon is absent or slow, every answer is a miss.

    A prompt waits here in one of four ways, until ``scheduled``:

    * behind: it is not looked up, because many others will run before it;
    * ahead: it is looked up, and vLLM has not come to it, or there was no space for it;
    * parked: vLLM came to it, and it waits for an answer, a tier or another prompt's load;
    * none of these: vLLM came to it, and may schedule it in each step.

    Attributes:
        namespace: the engine's namespace and connection. The connector calls leave() before reset_cache().
        groups: the offloaded groups, by index on the wire.
        requests: states of unfinished requests by id.
        events: publisher of the daemon's blocks; None if the engine publishes no KV events.
        loads, stores: vLLM's kv_role. Without ``loads`` everything is a miss, without ``stores`` nothing is stored.
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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.groups = tuple(groups)
        self.clock, self._sleep = clock, sleep
        self._do_no_harm = do_no_harm
        self._deadline_s, self._disk_wait_s = deadline_s, disk_wait_s
        self._positions = {group.suffix: index for index, group in enumerate(groups)}
        self._shard_bytes: dict[bytes, int] = {}
        """Approximate bytes of one worker's shard of a block, by the group's suffix of a key."""
        self._credit_bytes = 0
        """Bytes of stores that may be outstanding, as the workers reported. An offer that exceeds it is taken whole:
        vLLM never offers a rest again, and blocks behind a gap are rarely hits."""
        self._storing: dict[OffloadKey, int] = {}
        """Keys of stores that no worker has reported as ended, with their bytes."""
        self._outstanding_bytes = 0
        self.events: HostBlockEvents | None = None
        self.requests: dict[str, RequestState] = {}
        self._numbers = count()
        self._loading: dict[str, KeyedLookup] = {}
        self._loads_begun = 0
        self._scheduled: list[tuple[RequestState, int]] = []
        """Requests that this step schedules, with the tokens that they load."""
        self._counters = metrics.Counters()
        self._report_at = clock() + REPORT_EVERY_S
        self._reported = Counter[str]()
        """Counters at the last report to the daemon."""
        self._reported_problem = ""
        self.namespace = namespace
        self.adapters = AdapterContents(namespace)
        namespace.on_leave = self._on_leave
        self.loads = self.stores = True
        self._engine_clock = EngineClock(lambda: self.clock())
        self._answer_wait = AnswerWait(deadline_s, do_no_harm=do_no_harm)
        self._is_new_step, self._has_rested = True, False
        """Whether no prompt was asked for in this step yet, and whether an idle engine has paused in it."""
        self._tokens_before: dict[str, int] = {}
        """Uncomputed tokens of earlier prompts, by request, as far as needed in this step; and the rest to be added."""
        self._uncounted: Iterator[RequestState] | None = None
        self._tokens_counted = 0

    # --- for the connector, beyond vLLM's interface ---

    def begin_engine(
        self,
        *,
        shard_bytes: Sequence[int],
        most_running: int,
        largest_chunk: int,
        step_tokens: int = 8192,
        by_priority: bool = False,
        state_groups: Collection[int] = (),
        only_prefixes: bool = True,
        tail_tokens: int = 0,
        assumed_rate: float = ASSUMED_RATE,
    ) -> None:
        """Set properties of the engine's configuration, before the first request.

        ``shard_bytes``: bytes of one worker's shard of a block, by group on the wire. ``state_groups``: groups of
        recurrent layers, whose states vLLM offers separately. ``only_prefixes``: all groups are of full attention.
        ``tail_tokens``: tokens per hash if tails are stored, else 0. For the others see ``PrefillRate`` and
        ``PromptQueue``.
        """
        self._tail_tokens = tail_tokens
        self._only_prefixes = only_prefixes
        self._shard_bytes = dict(zip(self._positions, shard_bytes, strict=True))
        self._state_suffixes = {self.groups[index].suffix for index in state_groups}
        self._assumed_rate = assumed_rate
        prefill = PrefillRate(self.clock, most_running, largest_chunk)
        self.harm = DoNoHarm(self.clock, prefill, active=self._do_no_harm)
        self._queue = PromptQueue(step_tokens, by_priority=by_priority)

    def arrived(self, request: Request) -> None:
        """Handle a request that vLLM has announced: look it up if few others are before it."""
        state = self.requests[request.request_id]
        state.request = request
        if request.skip_reading_prefix_cache and request.pooling_params is not None:
            logger.info_once(  # type: ignore[attr-defined]
                "kvoffd: the pooling task %s needs all tokens of a prompt to be computed, so nothing is loaded or "
                "stored for it.",
                request.pooling_params.task,
            )
            state.disabled = True
        if not state.disabled:
            self._send_first_hints(state)
        self._queue.add(request.request_id, request.num_prompt_tokens, request.priority)
        self._look_up_ahead()

    def _look_up_ahead(self) -> None:
        """Look up the first prompts of the queue that are not, as long as there is space in the window."""
        for _ in range(MAX_AHEAD) if self.namespace.serves else ():
            if not self._queue.has_space or (name := self._queue.take_next()) is None:
                break
            self.look_up(self.requests[name].request)

    def _renew_ahead(self) -> None:
        """Look up again the first prompts of the queue whose answers are old, so that the next step need not wait."""
        for name in self._queue.first_ahead(CHECKED_AHEAD) if self.namespace.serves else ():
            state = self.requests[name]
            self._take_answer(state)
            comes = state.answer is not None and state.answer.is_coming  # a scan asks for these again
            if state.pending is None and not comes and self._is_outdated(state):
                self.look_up(state.request)

    def look_up(self, request: Request) -> None:
        """Look up all complete chunks of a request, and its tails, if lookups are possible."""
        state, namespace = self.requests[request.request_id], self.namespace
        if not self._knows_adapter(state) or not namespace.serves:
            return
        self._send_first_hints(state)
        if not self._may_load(state):
            return
        chunks, tails = dict[int, Sequence[bytes]](), state.tails
        for index, group in enumerate(self.groups):
            if (found := group.hashes(request.block_hashes)) or index in tails:
                chunks[index] = found
        if not chunks:
            return
        asked = {index: [*hashes, *tails.get(index, ())] for index, hashes in chunks.items()}
        message = [_group_keys(index, hashes, state.adapter) for index, hashes in asked.items()]
        client, record, stored_before = namespace.client, state.record, namespace.client.stored.count
        asked_by = client, client.session_id
        # A daemon counts a prompt once, and no tails: there are many, of which one is a hit at most.
        again = bool(tails) or (record.counted is not None and record.counted_by == asked_by)
        future = client.lookup(message, again, reported=True, peer=state.peer)
        if not again and future.lease_id:
            record.counted, record.counted_by = future, asked_by
        is_needed = state.answer is None or self._lacks_stored(state.answer)
        state.pending = state.last = KeyedLookup(
            *(future, self.groups, state.adapter, chunks, tails, self.clock(), self._engine_clock.read()),
            *(client.stored, stored_before, is_needed, record.is_late),
        )
        self._counters[metrics.LOOKUPS] += 1
        self._queue.enter_window(request.request_id, request.num_prompt_tokens, future)

    def look_up_tails(self, request: Request, computed_tokens: int) -> bool | None:
        """Look up the tails for which vLLM asked in its scan, and prepare another; None if it asked for none.

        Returns as ``prepare_scan``. vLLM asks for each position inside the chunk after the last one that is a hit, in
        all groups.
        """
        state = self.requests[request.request_id]
        if not (wanted := state.wanted_tails):
            return None
        tails: dict[int, list[bytes]] = {}
        for key in reversed(wanted):  # vLLM begins with the longest
            tails.setdefault(self._positions[key[-GROUP_ID_BYTES:]], []).append(key[:-GROUP_ID_BYTES])
        state.tails, state.record.asks_tails = tails, True
        self._release(state.pending)
        state.pending = None
        self.look_up(request)
        may_scan = self.prepare_scan(request, computed_tokens, engine_has_all=state.record.engine_has_all)
        state.asks_tails = False  # the second scan takes what is known
        return may_scan

    def _send_first_hints(self, state: RequestState) -> None:
        """Send a request's hints for its start, once the daemon can be reached and the adapter is known."""
        if not state.hints_sent and self._knows_adapter(state) and self.namespace.serves:
            state.hints_sent = True
            self._send_hints(state, has_ended=False)

    def _send_hints(self, state: RequestState, *, has_ended: bool) -> None:
        """Pass on a request's hints: ``kv.release`` at its end, ``kv.prefetch`` at its start, ``kv.retain`` at both, to
        include what was generated and to have its time begin at the end."""
        for hint in () if state.disabled else state.hints:
            if hint.action is not (HintAction.PREFETCH if has_ended else HintAction.RELEASE):
                groups = [
                    _group_keys(index, hashes, state.adapter)
                    for index, group in enumerate(self.groups)
                    if (hashes := group.hashes(state.request.block_hashes)[-(-hint.start // group.tokens_per_chunk) :])
                ]
                if groups:
                    self.namespace.client.hint(hint.action, groups, hint.priority, hint.ttl_s)

    def _knows_adapter(self, state: RequestState) -> bool:
        """Return whether nothing about a request's adapter is pending; disable the request if it is unreadable."""
        adapter = state.request.lora_request
        if adapter is None or state.adapter or state.disabled:
            return True
        content = self.adapters.content_of(adapter)
        state.adapter, state.disabled = content or b"", content == b""
        return content is not None

    def awaits_adapter(self, request: Request) -> bool:
        """Ask the workers for a request's adapter if it is unknown; return whether the request still waits for it."""
        state, adapter, now = self.requests[request.request_id], request.lora_request, self.clock()
        if adapter is None or self._knows_adapter(state):
            return False
        if state.adapter_asked_at is None:
            state.adapter_asked_at = now
        if now - state.adapter_asked_at < ANSWER_PATIENCE_S and (
            self.namespace.current is not None or self.namespace.pending()
        ):
            self.adapters.ask(adapter)
            return True
        self.adapters.compute_unknown(adapter)
        state.disabled = True
        return False

    def _may_load(self, state: RequestState) -> bool:
        barred = state.disabled or state.load_failed or state.request.skip_reading_prefix_cache
        return self.loads and not barred

    # --- a request's turn --------------------------------------------------------------------------

    def is_waiting(self, request_id: str, computed_tokens: int) -> bool:
        """Return whether a request has nothing to look at in this step: vLLM asks for each one that waits."""
        if self._is_new_step:
            self._is_new_step = False
            self._begin_scans()
        if not self._queue.is_parked(request_id, computed_tokens):
            return False
        if self._engine_clock.is_idle and not self._has_rested:
            self._rest()
        return self._queue.is_parked(request_id, computed_tokens)

    def _begin_scans(self) -> None:
        """Wake the parked requests whose time or answer has come."""
        if not self._queue.has_parked:
            return
        if self.namespace.serves and self.namespace.registered:
            self.namespace.client.poll()
            self._queue.wake(self._engine_clock.read())
        else:
            self._queue.wake_all()

    def _rest(self) -> None:
        """Pause an idle engine until an answer comes, or for a moment: it runs empty steps while all prompts wait."""
        self._has_rested, began, wait = True, self._engine_clock.read(), self._answer_wait
        if (future := self._queue.first_awaited) is None:
            self._sleep(max(0.0, min(wait.left_s, MIN_RETRY_PAUSE_S)))
            wait.left_s -= MIN_RETRY_PAUSE_S
        elif wait.may_wait(began):
            answered = future.wait(wait.left_s)
            wait.record_wait(began, self._engine_clock.read(), answered=answered)
        self._queue.wake(self._engine_clock.read())

    def prepare_scan(self, request: Request, computed_tokens: int, *, engine_has_all: bool) -> bool:
        """Prepare the results of ``lookup`` for a request before vLLM's scan, which must see a single answer.

        Take an answer that has come, ask again if it may not be the best one any more, and wait a moment for the next.
        ``computed_tokens`` are in vLLM's own cache, in whole blocks; ``engine_has_all``: as many as it can use, so
        nothing is loaded but a tail. False: the request waits, and vLLM must not scan now.
        """
        state, namespace = self.requests[request.request_id], self.namespace
        record = state.record
        record.own_tokens, record.engine_has_all, record.may_load = (
            computed_tokens,
            engine_has_all,
            self._may_load(state),
        )
        state.results, state.tail_results, state.wanted_tails = {}, {}, []
        state.asks_tails = state.awaits_tail = False
        has_tail = bool(self._tail_tokens) and computed_tokens + self._tail_tokens < request.num_prompt_tokens
        if (engine_has_all and not has_tail) or not record.may_load or namespace.problem:
            return True
        if not (namespace.registered and namespace.client.ready):
            return not self._awaits_reports(state)
        self._take_answer(state)
        if state.pending is None and self._is_outdated(state):
            if self._queue.is_behind(request.request_id) and not self._queue.has_space:
                return self._await_turn(state, computed_tokens)
            self.look_up(request)
        late_at = 0.0
        if (pending := state.pending) is not None and not pending.future.done:
            late_at = self._wait_for_answer(state, pending, computed_tokens)
        self._take_answer(state)
        answer, pending = state.answer, state.pending
        state.awaits_tier = answer is not None and self._waits_for_tier(state, answer)
        if pending is not None and not pending.given_up:
            state.awaits_tail = pending.asks_tails_beyond(answer)
            if pending.is_needed or state.awaits_tier or state.awaits_tail:
                self._park(state, computed_tokens, late_at)
                return False
        if answer is not None:
            awaited = state.tiers if state.awaits_tier else NOTHING_AWAITED
            state.results = {index: answer.results(index, awaited) for index in answer.chunks}
            state.tail_results = {key: result_of(one, awaited) for key, one in answer.tail_states().items()}
        may_ask = pending is None and self.clock() - state.failed_at >= REFRESH_S
        state.asks_tails = has_tail and may_ask
        return True

    def _park(self, state: RequestState, computed_tokens: int, until: float) -> None:
        """Pass over a request until its pending answer comes, or this time."""
        future = state.pending.future if state.pending is not None else None
        name, place = state.request.request_id, None
        if state.awaits_tier:
            self._queue.leave_window(name)
            if state.answer is not None and state.answer.future.asking:
                place, until = state.number, max(until, state.tier_wait.judge_at)
        parked = Parked(computed_tokens, until, future, state.awaits_tier, place, state.tier_wait.ask_at)
        self._queue.park(name, parked)

    def _await_turn(self, state: RequestState, computed_tokens: int) -> bool:
        """Park a request that is not looked up, because many before it are; return True once that takes too long."""
        now = self._engine_clock.read()
        if state.waits_since is None:
            state.waits_since = now
        until = state.waits_since + self._answer_wait.allowed_s(
            self._computed_s(state.request, state.request.num_tokens)
        )
        if now < until:
            self._park(state, computed_tokens, until)
            return False
        self._counters[metrics.LATE_LOOKUPS] += not state.record.is_late
        state.record.is_late = True
        return True

    def _take_answer(self, state: RequestState) -> None:
        """Replace a request's answer by the one that has come, unless that failed, or a lease is about to end."""
        if (answer := state.answer) is not None and not answer.usable:
            state.answer = None
        if (answered := state.pending) is None or not answered.future.done:
            return
        state.pending = None
        if answered.future.failed:
            self._release(answered)
            state.failed_at = answered.future.answered_at
            return
        if answered.future.pinned and self.clock() >= answered.future.stale_at:
            self._release(answered)  # it came long ago, so it is asked again
            return
        self._read(answered)
        # The new lease pins the same blocks, so nothing is unpinned in between.
        self._release(state.answer)
        state.answer = answered
        state.record.came_from_tiers(answered)
        now, age_s = self._engine_clock.read(), self.clock() - answered.future.answered_at
        state.tier_wait.answered(now - age_s, now, answered.future.wait_s)

    def _read(self, lookup: KeyedLookup) -> None:
        """Record how long an answer took, once it has come."""
        if lookup.future.done and not (lookup.is_read or lookup.future.failed):
            lookup.is_read = True
            self._answer_wait.record_reply(lookup.future.answered_at - lookup.sent_at)

    def _awaits_reports(self, state: RequestState) -> bool:
        """Return whether a request waits a moment for the workers to report their memory or registration.

        An engine that computes gets the reports in its steps anyway; an idle one may have an old report. Without a
        daemon none would help.
        """
        namespace, client = self.namespace, self.namespace.client
        if client.unreachable:
            return False
        if namespace.current is None:
            return namespace.pending()
        if namespace.pending(self._deadline_s):
            return True
        if not client.ready:
            return False
        if state.waits_for_report_since is None:
            state.waits_for_report_since = self.clock()
        return self._engine_clock.is_idle and self.clock() - state.waits_for_report_since < MIN_COMPUTED_S

    def _is_outdated(self, state: RequestState) -> bool:
        """Return whether a request without a pending lookup needs another: it has no answer that may be the best."""
        answer, now = state.answer, self.clock()
        if now - state.failed_at < REFRESH_S:
            return False
        if answer is None or self._lacks_stored(answer):
            return True
        hashes, future = len(state.request.block_hashes), answer.future
        if sum(hashes // group.hashes_per_chunk for group in self.groups) > answer.asked:
            return True  # it has generated further chunks
        if answer.all_ready and future.leased:
            return now > future.stale_at - REFRESH_S
        if answer.is_coming and not state.tier_wait.has_ended:
            return self._engine_clock.read() >= state.tier_wait.ask_at
        return now - future.answered_at > REFRESH_S * max(1.0, answer.asked / REFRESH_KEYS)

    def _lacks_stored(self, answer: KeyedLookup) -> bool:
        """Return whether something that an answer lacks was stored since."""
        return answer.grows_old(self.namespace.client.stored, only_prefixes=self._only_prefixes)

    def _wait_for_answer(self, state: RequestState, pending: KeyedLookup, computed_tokens: int) -> float:
        """Wait for the answer to a request's lookup, or give it up if it is late. Return the time when it is late."""
        future, wait, now = pending.future, self._answer_wait, self._engine_clock.read()
        of_tails = pending.asks_tails_beyond(state.answer)
        is_needed = (pending.is_needed or of_tails) and not pending.given_up
        if (is_needed and wait.may_wait(now)) or (state.awaits_tier and self._engine_clock.is_idle and wait.left_s > 0):
            self._counters[metrics.LOOKUP_WAITS] += is_needed
            answered = future.wait(wait.left_s) or not is_needed
            began, now = now, self._engine_clock.read()
            self._counters[metrics.LOOKUP_WAITS_TIMED_OUT] += wait.record_wait(began, now, answered=answered)
        else:
            self.namespace.client.poll()
        tokens = state.request.num_tokens - computed_tokens
        if of_tails and state.answer is not None:
            tokens = min(tokens, self.groups[0].tokens_per_chunk)
        late_at = pending.waits_since + wait.allowed_s(self._computed_s(state.request, tokens))
        if state.awaits_tier:  # promoted blocks may still come
            late_at = max(late_at, state.tier_wait.until)
        if now >= late_at and not future.done and not pending.given_up:
            pending.given_up = state.tier_wait.has_ended = True
            if late_at > pending.waits_since:
                wait.record_reply(now - pending.waits_since)
            self._counters[metrics.LATE_LOOKUPS] += 1
        return late_at

    @property
    def _expected_rate(self) -> float:
        """Expected prefill rate in tokens per second: measured, else last reported by an engine of this namespace, else
        assumed."""
        rate = self.harm.prefill.tokens_per_second
        return rate or self.namespace.client.reported_prefill_rate or self._assumed_rate

    def _computed_s(self, request: Request, tokens: int) -> float:
        """Return the seconds until ``tokens`` of a request would be computed, after those of earlier requests."""
        if self._uncounted is None:
            self._uncounted = iter([*self.requests.values()])
        while (before := self._tokens_before.get(request.request_id)) is None:
            if (state := next(self._uncounted, None)) is None:
                before = 0
                break
            name = state.request.request_id
            self._tokens_before[name] = self._tokens_counted
            if name not in self._loading:
                self._tokens_counted += max(0, state.request.num_prompt_tokens - state.request.num_computed_tokens)
        return max(MIN_COMPUTED_S, (before + tokens) / self._expected_rate)

    def _waits_for_tier(self, state: RequestState, answer: KeyedLookup) -> bool:
        """Return whether a request waits for promotions: while promoting and loading are expected to be faster than
        computing it after the earlier prompts. Else it loads the blocks that are ready.
        """
        wait, now, future = state.tier_wait, self._engine_clock.read(), answer.future
        if wait.has_ended or not any(map(answer.has, state.tiers)):
            return False
        if self.clock() - state.failed_at < REFRESH_S or not self.namespace.client.ready:
            return False  # the daemon does not report promotions
        computed_s, loaded_s, tokens = inf, 0.0, answer.coming_tokens
        if self._do_no_harm:
            computed_s, loaded_s = self._computed_s(state.request, tokens), self.harm.load_s(tokens)
        wait.begin(now, min(self._disk_wait_s, computed_s))
        expected_s = max(0.0, future.answered_at + future.wait_s - self.clock())
        if asks_store := bool(future.asking) and not answer.has(PENDING):
            expected_s = inf  # a store mostly has no blocks of a new prompt
        is_worth_it = expected_s + loaded_s <= computed_s
        wait.doubt(now, is_worth_it=is_worth_it, is_estimated=bool(future.wait_s))
        if state.awaits_tier and state.pending is not None and not state.pending.given_up:
            return True  # the next answer shows what was promoted during a step
        wait.judge(now, is_worth_it=is_worth_it, asks_store=asks_store)
        return not wait.has_ended

    def scanned(self, request: Request, computed_tokens: int) -> int | None:
        """Return the tokens that the last scan of a request found, if another one would find the same; else None."""
        state = self.requests[request.request_id]
        known = Scan(state.answer, computed_tokens, state.awaits_tier, self._loads_begun)
        return state.found_tokens if state.answer is not None and state.scan == known else None

    def record_scan(self, request: Request, computed_tokens: int, tokens: int | None) -> None:
        """Record the result of a scan: ``tokens`` that can be loaded; None if the request waits for promotions, or for
        another request's load of the same blocks. Then it is not scanned again before that ends."""
        state = self.requests[request.request_id]
        if tokens is not None:
            state.scan = Scan(state.answer, computed_tokens, state.awaits_tier, self._loads_begun)
            state.found_tokens = tokens
        elif state.awaits_tier and state.answer is not None:
            self._park(state, computed_tokens, min(state.tier_wait.ask_at, state.tier_wait.judge_at))
        elif not request.num_preemptions:  # else its own stores may not have ended
            until = self._engine_clock.read() + LOAD_PAUSE_S
            self._queue.park(request.request_id, Parked(computed_tokens, until, for_load=True))

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Record the start of a step with these numbers of tokens per request, look up the next prompts of the queue;
        regularly report to the daemon."""
        self._decide_outcomes()
        self._engine_clock.read()
        self._engine_clock.is_idle = not request_tokens
        self._answer_wait.begin_step(is_idle=not request_tokens)
        self._is_new_step, self._has_rested = True, False
        self._tokens_before, self._tokens_counted, self._uncounted = {}, 0, None
        self.harm.prefill.step_begins(request_tokens)
        self._look_up_ahead()
        self._renew_ahead()
        # Counts are kept until the daemon answers: lookups are late when it does not.
        if (now := self.clock()) >= self._report_at and self.namespace.client.ready:
            self._report_at = now + REPORT_EVERY_S
            news = self._counters - self._reported
            self._reported = Counter(self._counters)
            counts = [min(news[name], MAX_REPORTED) for name in metrics.REPORTED]
            # Also report old values: the daemon may have been restarted.
            prefill_rate, problem = self.harm.prefill.tokens_per_second, self.namespace.problem
            if any((prefill_rate, *counts, problem, self._reported_problem)):
                self.namespace.client.report(prefill_rate, *counts, problem=problem)
                self._reported_problem = problem

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Record that a step has ended; return events of the daemon's blocks for the engine's stream."""
        self.harm.prefill.step_ended()
        return self.events.take(self.namespace) if self.events is not None else ()

    def is_loading(self, request_id: str) -> bool:
        """Return whether a request is being loaded, until vLLM has handled the end."""
        return request_id in self._loading

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed to finish a load or to determine the namespace."""
        return bool(self._loading) or self.has_pending_work()

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

    def ready_tokens(self, request: Request, index: int) -> int:
        """Return the number of a request's leading tokens that the answer reports as ready in a group."""
        answer = self.requests[request.request_id].answer
        return answer.leading_ready(index) * self.groups[index].tokens_per_chunk if answer is not None else 0

    def _on_leave(self) -> None:
        """Have all requests look at the namespace again, and disable those with adapters: these may have been replaced
        in place, and vLLM continues the requests."""
        self._queue.wake_all()
        for state in self.requests.values():
            if state.adapter:
                self._end_leases(state)
                state.disabled = True

    def scheduled(self, request: Request, loaded_tokens: int) -> None:
        """Record that a request is about to be scheduled with ``loaded_tokens``; if these are 0, unpin its blocks.

        Publish the blocks that its answer reports as ready, which another engine may have stored.
        """
        state = self.requests[request.request_id]
        state.loaded_tokens, state.scan = loaded_tokens, None
        self._queue.remove(request.request_id)
        if self.events is not None and (answer := state.answer) is not None and answer.usable:
            for index in self.events.groups:
                keys = self.groups[index].keys(request.block_hashes)
                self.events.found(request, index, keys, answer.leading_ready(index))
        self._scheduled.append((state, loaded_tokens))
        if not loaded_tokens:
            self._end_leases(state)

    def _decide_outcomes(self) -> None:
        """Decide the outcomes of the requests that this step schedules. vLLM knows now whether another connector loads
        one: more of it counts as computed than its own cache had, and the daemon."""
        scheduled, self._scheduled = self._scheduled, []
        for state, loaded_tokens in scheduled:
            record, request = state.record, state.request
            if record.is_decided and record.counted is None:
                continue
            elsewhere = request.num_computed_tokens - record.own_tokens - loaded_tokens
            record.of_load = record.decide(
                request,
                self.groups,
                state.last,
                state.adapter,
                loaded_tokens=loaded_tokens,
                elsewhere=elsewhere >= min(group.tokens_per_chunk for group in self.groups),
            )
            if request.request_id not in self._loading:
                self._send_report(record)

    def _job_failed(self, job: FailedJob) -> None:
        """Handle a store with missing blocks, or a failed load, whose request is recomputed."""
        reason = job.error.sentence if job.error is not None else "The daemon gave no reason."
        if job.request_id is None:  # a store, whose blocks are not remembered here
            self._counters[metrics.FAILED_STORES] += 1
            logger.debug("kvoffd: a store failed. %s", reason)
            return
        self._counters[metrics.FAILED_LOADS] += 1
        if state := self.requests.get(job.request_id):
            self._end_leases(state)
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
        self._engine_clock.read()  # the time until now is not the new request's
        if not self._queue.has_waiting:
            self._engine_clock.begin_waits()
        state = RequestState(next(self._numbers))
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which requests cannot exclude.
        allows = req_context.load_tier_filter.allows
        places = {PENDING: Locality.LOCAL, SHARED: Locality.REMOTE}
        state.tiers = frozenset(one for one, place in places.items() if allows(Medium.STORAGE, place))
        state.hints, unknown, state.peer = read_hints(req_context)
        self._counters[metrics.UNKNOWN_HINTS] += unknown
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
        end, tier = req_context.get_offload_key_position(key) or 0, 0
        if state is not None and not (tier := state.record.tails_from_tiers.get(key, 0)):
            tier = state.record.tier_of(index, end // self.groups[index].tokens_per_chunk - 1)
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
                client.release(client.lookup(self._spec_of(tails, state.adapter).keys, reported=True).lease_id)
            state.answer = None  # the load takes its lease
            self._end_leases(state)
            self._loading[req_context.req_id] = answer
            self._loads_begun += 1
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

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._queue.load_ended()
        self._release(self._loading.pop(req_context.req_id, None))
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
            self._read(last)  # it may have come after the request was scheduled
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
        has_tail = any(
            end % self.groups[self._positions[key[-GROUP_ID_BYTES:]]].tokens_per_chunk for key, end in ends.items()
        )
        if self.events is not None and not has_tail:  # routers get no events of tails
            spec.origins = self.events.origins_of(request, ends)
        return PrepareStoreOutput(keys_to_store=list(ends), store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._outstanding_bytes -= sum([self._storing.pop(key, 0) for key in keys])
        # The daemon's event may come later. With an adapter its keys are others, and only the event counts.
        self.namespace.client.add_stored([key[:-GROUP_ID_BYTES] for key in keys])

    def on_request_finished(self, req_context: ReqContext) -> None:
        if state := self.requests.pop(req_context.req_id, None):
            self._queue.remove(req_context.req_id)
            record, is_loading = state.record, req_context.req_id in self._loading
            if record.counted is not None or is_loading:
                lease_id = record.of_load.lease_id if record.of_load is not None else 0
                report = record.decide(state.request, self.groups, state.last, state.adapter, dropped=True)
                record.of_load = structs.replace(report, lease_id=report.lease_id or lease_id)
            self._send_report(record)
            if state.hints and state.request is not None and self._knows_adapter(state) and self.namespace.serves:
                self._send_hints(state, has_ended=True)
            self._end_leases(state)
            if state.last is not None:
                self._read(state.last)

    def has_pending_work(self) -> bool:
        # Not for requests that wait for an answer: vLLM runs steps for them anyway, but none while paused, and it
        # finishes pausing only when nothing is pending.
        return self.namespace.needs_steps

    def reset_cache(self) -> None:
        for state in self.requests.values():
            self._end_leases(state)
            state.last = None
        for lookup in self._loading.values():
            self._release(lookup)
        self._loading.clear()
        self._queue.wake_all()
        self._storing.clear()  # vLLM does not report their end
        self._outstanding_bytes = 0

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self.namespace.client.ready, lambda: self.harm.rates)

    def shutdown(self) -> None:
        self.namespace.client.close()

    def _end_leases(self, state: RequestState) -> None:
        """Release the leases of a request that runs without a load or has ended. Its last lookup stays known."""
        self._release(state.answer)
        self._release(state.pending)
        state.answer = state.pending = None

    def _send_report(self, record: PromptRecord) -> None:
        if record.of_load is not None:
            self.namespace.client.report_prompt(record.of_load)
            record.of_load = None

    def _release(self, lookup: KeyedLookup | None) -> None:
        """End a lookup's lease, if it has one or may have one."""
        if lookup is not None and (lookup.future.leased or lookup.future.failed or not lookup.future.done):
            self.namespace.client.release(lookup.future.lease_id)


def _group_keys(index: int, hashes: Sequence[bytes], adapter: bytes) -> GroupKeys:
    """Return a group's keys for these hashes of a request with this adapter, if any."""
    return GroupKeys(index, b"".join(of_adapter(hashes, adapter) if adapter else hashes))
