"""The scheduler's half of the connector: answers vLLM's questions about blocks from the daemon's answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, cast

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

from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient
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
from kvoffd_client.vllm.hints import HintsOption, RequestHint, allows_storage, hinted_hashes, read_hints
from kvoffd_client.vllm.log import logger
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    ABSENT,
    COMING,
    MAX_REPORTED,
    PENDING,
    READY,
    SHARED,
    WRITING,
    GroupKeys,
    HintAction,
    Outcome,
    PromptReport,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

# Errors after which the blocks are unusable. After other errors they are still valid.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})
_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
_NOT_THERE = bytes([ABSENT, WRITING])
LONG_AGO = float("-inf")
REFRESH_S = 1.0
"""An answer with misses is refreshed at this age, a complete one this long before ``stale_at``. After a failed lookup
none is sent for this long."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S, RETRY_SHARE = 0.002, 0.05, 0.02
"""Shortest and longest pause between lookups of blocks being promoted. A request that has waited for long pauses for up
to RETRY_SHARE of that time: reading 8,192 states takes the scheduler milliseconds."""
LOOKUP_WAIT_S = 0.001
"""Time that the scheduler waits for answers in one step, for all its new requests together."""
IDLE_WAIT_S = 0.005
"""The same if no request ran in the previous step: without an answer an idle engine would run an empty step, after
which vLLM sleeps for a millisecond."""
ASSUMED_RATE, ASSUMED_CPU_RATE = 10_000.0, 500.0
"""Assumed prefill rates in tokens per second, on a GPU and on a CPU, while the rate is unknown. Estimates for a large
GPU and for few cores."""
MIN_COMPUTED_S = 0.02
"""Least time assumed for computing a prompt."""
LATE_REPLIES = 3
"""Consecutive answers that took longer than a prompt may wait, after which the next prompts do not wait."""
ANSWER_SHARE = 0.1
"""A prompt waits for an answer for this share of its compute time, if that is more than the deadline: on a busy machine
answers are late. A daemon that hangs costs this a few times, see LATE_REPLIES."""
DOUBT_SHARE = 0.03
"""A request waits for a tier for this share of its longest wait although that seems not worth it: the first estimates
of a tier's speed may be far off."""
ASK_SHARE, MAX_ASK_S = 0.1, 0.25
"""The same for a shared store that has not said what it has: the share, and the most seconds."""
WAIT_PAUSE_S = 0.1
"""Time without waits after one that got no answer. So a daemon that hangs costs 1 % of an engine's time, 5 % of an idle
one's, until it counts as not connected."""
STANDSTILL_S, MAX_STOOD_STILL_S = 0.05, 5.0
"""Longest normal time between two calls of _note_time() in an idle engine. If it is longer, probably neither engine nor
daemon had a CPU; the excess does not count as waited, up to MAX_STOOD_STILL_S per request."""
REPORT_EVERY_S = 10.0


@dataclass(slots=True, eq=False)
class KeyedLookup:
    """A lookup of one request.

    Attributes:
        chunks: hashes of the complete chunks looked up, by group on the wire.
        tails: hashes of the tails looked up with them, by group on the wire; see ``RequestState``.
        given_up: the request no longer waits for the answer, but uses it if it comes before the request runs.
        read: whether the answer was read.
        found: results by vLLM's keys: ready and coming ones, and all tails.
        coming: states of the keys that are being promoted.
        coming_tokens: number of their tokens, in the group with the most.
    """

    future: LookupFuture
    chunks: dict[int, Sequence[bytes]]
    tails: Mapping[int, Sequence[bytes]]
    sent_at: float
    given_up: bool = False
    read: bool = False
    found: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    coming: dict[OffloadKey, int] = field(default_factory=dict)
    coming_tokens: int = 0

    @property
    def asked(self) -> int:
        return sum(map(len, self.chunks.values()))

    @property
    def all_ready(self) -> bool:
        """Whether all chunks are ready, and no tail is being promoted."""
        return not self.coming and all(states.count(READY) == len(states) for states in self.states)

    @property
    def states(self) -> list[bytes]:
        """States of the chunks of each group; empty without an answer."""
        counts = map(len, self.chunks.values())
        return [states[:count] for states, count in zip(self.future.states, counts, strict=False)]

    def leading_ready(self, index: int) -> int:
        """Return the number of a group's chunks that are ready, before the first one that is not."""
        chunks = self.chunks.get(index, ())
        return min(self.future.leading_ready(list(self.chunks).index(index)), len(chunks)) if chunks else 0

    def asks_tails_beyond(self, answer: KeyedLookup | None) -> bool:
        """Return whether it asks for tails that ``answer`` lacks."""
        return bool(self.tails) and (answer is None or self.tails is not answer.tails)

    @property
    def usable(self) -> bool:
        """Whether the answer is still valid: its lease lives, or nothing was pinned."""
        return self.future.alive or self.future.pinned == 0


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request.

    Attributes:
        request: vLLM's request, from ``look_up`` on; its block hashes grow.
        answer: the current answer, whose lease pins the blocks that it reports as ready.
        pending: a lookup without an answer yet. The current answer stays until it is replaced.
        last: the lookup sent last, even if its lease was released; it shows which blocks need not be stored.
        to_count: the lookup whose keys the daemon counts when the outcome is reported; None once it is.
        counted_by: client and session that sent it: only that session's daemon counts it.
        own_tokens: leading tokens in vLLM's own cache, at the last scan.
        engine_has_all: those are all that vLLM can use.
        prefilled_elsewhere: another connector loads the prompt, which a prefill instance computed.
        report: the report of a prompt that is being loaded; sent when the load ends.
        found: the answer's results, during vLLM's scan.
        default_result: result for all other keys.
        tails: hashes of the tails to look up with the chunks, by group on the wire. A tail is the beginning of a chunk,
            which vLLM stores where a prompt of a model with recurrent layers ends.
        tail_keys: vLLM's keys of all tails looked up.
        wanted_tails: keys of tails for which vLLM asked in this scan, and that were not looked up.
        asks_tails: lookup() adds to these.
        awaits_tail: it waits for an answer about tails, or for a tail that is being promoted.
        loaded_tokens: tokens that it was scheduled to load.
        adapter: content of the request's LoRA adapter; empty if it has none, and while unknown.
        adapter_asked_at: time when the workers were first asked for it.
        disabled: the request must not be looked up or stored.
        load_failed: a load failed; the request is recomputed and not looked up again.
        from_tiers: keys that were, or were to be, promoted for this request, with their last state.
        tier_wait_began: time when the request began to wait for a promotion; None before.
        tier_wait_until: latest end of that wait; LONG_AGO once it has ended.
        doubted_since: time since which the wait for a tier seems not worth it; inf while it seems worth it.
        waits_for_tier: the request waits for promotions in its answer.
        stood_still_s: time in which the machine stood still while it waited.
        scan: the last scan: what it depended on (answer, computed tokens, waits_for_tier), its tokens or None, and
            the number of loads that had ended.
        skip_counted: it was counted as a load skipped for being slow.
        refused: its blocks were not loaded because the KV cache had no space.
        logged: its outcome was reported.
        failed_at: time of its last failed lookup; for a while none is sent, so that the request is not deferred for
            ever.
        waits_for_report_since: time of its first scan while the workers were not registered.
        hints: the client's hints.
        peer: host of the peer that has its blocks, as a hint says; empty for none.
        giver: number of the hints' owner, or of the request alone.
    """

    request: Request = cast(Any, None)  # noqa: RUF009
    answer: KeyedLookup | None = None
    pending: KeyedLookup | None = None
    last: KeyedLookup | None = None
    to_count: LookupFuture | None = None
    counted_by: tuple[SchedulerClient, int] | None = None
    own_tokens: int = 0
    engine_has_all: bool = False
    prefilled_elsewhere: bool = False
    report: PromptReport | None = None
    found: Mapping[OffloadKey, LookupResult] = field(default_factory=dict)
    default_result: LookupResult = _MISS
    tails: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    tail_keys: set[OffloadKey] = field(default_factory=set)
    wanted_tails: list[OffloadKey] = field(default_factory=list)
    asks_tails: bool = False
    awaits_tail: bool = False
    loaded_tokens: int = 0
    adapter: bytes = b""
    adapter_asked_at: float | None = None
    disabled: bool = False
    load_failed: bool = False
    from_tiers: dict[OffloadKey, int] = field(default_factory=dict)
    tier_wait_began: float | None = None
    tier_wait_until: float = inf
    doubted_since: float = inf
    waits_for_tier: bool = False
    stood_still_s: float = 0.0
    scan: tuple[tuple[KeyedLookup | None, int, bool], int | None, int] = ((None, 0, False), 0, 0)
    skip_counted: bool = False
    refused: bool = False
    logged: bool = False
    failed_at: float = LONG_AGO
    waits_for_report_since: float | None = None
    hints: Sequence[RequestHint] = ()
    peer: str = ""
    giver: int = 0


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. If the daemon is absent or slow, every answer is a miss.

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
        hints: HintsOption = "no_release",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hints = hints
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
        self._loading: dict[str, KeyedLookup] = {}
        self._ended_loads = 0
        self._counters = metrics.Counters()
        self._report_at = clock() + REPORT_EVERY_S
        self._reported = Counter[str]()
        """Counters at the last report to the daemon."""
        self._reported_problem = ""
        self.namespace = namespace
        self.adapters = AdapterContents(namespace)
        namespace.on_leave = self._disable_adapters
        self.loads = self.stores = True
        self._replies_s: deque[float] = deque(maxlen=LATE_REPLIES)
        """Durations of the last answers, or of the wait for those given up."""
        self._wait_left_s = IDLE_WAIT_S
        self._tokens_before: dict[str, int] | None = None
        """Uncomputed tokens of earlier prompts, by request; None until needed in this step."""
        self._no_wait_before = LONG_AGO
        self._is_idle = True
        """Whether no request ran in the previous step."""
        self._looked_at = LONG_AGO
        self._asks_again: bool | None = None
        """Whether requests that wait for a store's answer are looked up again in this step. The first of them decides
        for all, so that its blocks are promoted first. None before that."""

    # --- for the connector, beyond vLLM's interface ---

    def begin_engine(
        self,
        *,
        shard_bytes: Sequence[int],
        most_running: int,
        largest_chunk: int,
        state_groups: Collection[int] = (),
        tail_tokens: int = 0,
        assumed_rate: float = ASSUMED_RATE,
    ) -> None:
        """Set properties of the engine's configuration, before the first request.

        ``shard_bytes``: bytes of one worker's shard of a block, by group on the wire. ``state_groups``: groups of
        recurrent layers, whose states vLLM offers separately. ``tail_tokens``: tokens per hash if tails are stored,
        else 0. For the others see ``PrefillRate``.
        """
        self._tail_tokens = tail_tokens
        self._shard_bytes = dict(zip(self._positions, shard_bytes, strict=True))
        self._state_suffixes = {self.groups[index].suffix for index in state_groups}
        self._assumed_rate = assumed_rate
        prefill = PrefillRate(self.clock, most_running, largest_chunk)
        self.harm = DoNoHarm(self.clock, prefill, active=self._do_no_harm)

    def look_up(self, request: Request) -> None:
        """Look up all complete chunks of a request that vLLM has announced, and its tails, if lookups are possible."""
        state, namespace = self.requests[request.request_id], self.namespace
        state.request = request
        if request.skip_reading_prefix_cache and request.pooling_params is not None:
            logger.info_once(  # type: ignore[attr-defined]
                "kvoffd: the pooling task %s needs all tokens of a prompt to be computed, so nothing is loaded or "
                "stored for it.",
                request.pooling_params.task,
            )
            state.disabled = True
        if not self._knows_adapter(state) or not namespace.serves:
            return
        if state.last is None:
            self._send_hints(state, has_ended=False)
        if not self._may_load(state):
            return
        chunks, tails = dict[int, Sequence[bytes]](), state.tails
        for index, group in enumerate(self.groups):
            if (found := group.hashes(request.block_hashes)) or index in tails:
                chunks[index] = found
        if chunks:
            asked = {index: [*hashes, *tails.get(index, ())] for index, hashes in chunks.items()}
            message = [_group_keys(index, hashes, state.adapter) for index, hashes in asked.items()]
            asked_by = namespace.client, namespace.client.session_id
            # A daemon counts a prompt once, and no tails: there are many, of which one is a hit at most.
            again = bool(tails) or (state.to_count is not None and state.counted_by == asked_by)
            future = namespace.client.lookup(message, again, reported=True, peer=state.peer, giver=state.giver)
            if not again and future.lease_id:
                state.to_count, state.counted_by = future, asked_by
            state.pending = state.last = KeyedLookup(future, chunks, tails, self._note_time())
            self._counters[metrics.LOOKUPS] += 1

    def look_up_tails(self, request: Request, computed_tokens: int) -> bool:
        """Look up the tails for which vLLM asked in its scan; return whether there are any, so that it scans again.

        vLLM asks for each position inside the chunk after the last one that is a hit, in all groups.
        """
        state = self.requests[request.request_id]
        if not (wanted := state.wanted_tails):
            return False
        tails: dict[int, list[bytes]] = {}
        for key in reversed(wanted):  # vLLM begins with the longest
            tails.setdefault(self._positions[key[-GROUP_ID_BYTES:]], []).append(key[:-GROUP_ID_BYTES])
        state.tails = tails
        state.tail_keys.update(wanted)
        self._release(state.pending)
        state.pending = None
        self.look_up(request)
        self.prepare_scan(request, computed_tokens, engine_has_all=state.engine_has_all)
        state.asks_tails = False  # the second scan takes what is known
        return True

    def _send_hints(self, state: RequestState, *, has_ended: bool) -> None:
        """Pass on a request's hints: ``kv.release`` at its end, ``kv.prefetch`` at its start, ``kv.retain`` at both, to
        include what was generated and to have its time begin at the end."""
        last, named, tails = state.last, dict[int, list[GroupKeys]](), dict[int, list[bytes]]()
        if last is not None:
            for index, hashes in last.tails.items():
                suffix = self.groups[index].suffix
                tails[index] = [one for one in hashes if last.found.get(one + suffix) is _HIT]
        for hint in () if state.disabled else state.hints:
            if hint.action is not (HintAction.PREFETCH if has_ended else HintAction.RELEASE):
                if (start := hint.start) not in named:
                    found = hinted_hashes(self.groups, state.request, start, self._tail_tokens, tails)
                    named[start] = [_group_keys(index, hashes, state.adapter) for index, hashes in found.items()]
                if groups := named[start]:
                    self.namespace.client.hint(hint.action, groups, hint.priority, hint.ttl_s, giver=state.giver)

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

    def prepare_scan(self, request: Request, computed_tokens: int, *, engine_has_all: bool) -> None:
        """Prepare the results of ``lookup`` for a request before vLLM's scan, which must see a single answer.

        Read an answer that has come, or wait a moment for it; look up again if it is missing or outdated.
        ``computed_tokens`` are in vLLM's own cache, in whole blocks; ``engine_has_all``: as many as it can use, so
        nothing is loaded but a tail.
        """
        state, namespace = self.requests[request.request_id], self.namespace
        state.found, state.default_result = {}, _MISS
        state.own_tokens, state.engine_has_all = computed_tokens, engine_has_all
        state.wanted_tails, state.asks_tails, state.awaits_tail = [], False, False
        has_tail = bool(self._tail_tokens) and computed_tokens + self._tail_tokens < request.num_prompt_tokens
        if (engine_has_all and not has_tail) or not self._may_load(state) or namespace.problem:
            return
        if not (namespace.registered and namespace.client.ready):
            if self._awaits_reports(state):
                state.default_result = LookupResult.RETRY
            return
        if state.answer is not None and not state.answer.usable:
            state.answer = None
        if state.pending is None:
            is_outdated = self._is_outdated(state)
            if state.waits_for_tier and state.answer is not None and state.answer.future.asking:
                self._asks_again = is_outdated
            if is_outdated:
                self.look_up(request)
        if state.pending is None and state.waits_for_tier:
            self._rest()
        if state.pending is not None and not state.pending.future.done:
            tokens = request.num_tokens - computed_tokens
            if state.answer is not None and state.pending.asks_tails_beyond(state.answer):
                tokens = min(tokens, self.groups[0].tokens_per_chunk)
            self._wait_for_answer(state, state.pending, self._computed_s(request, tokens))
        if state.pending is not None and state.pending.future.done:
            self._take_answer(state, state.pending)
        if state.answer is not None:
            state.found = state.answer.found
            state.waits_for_tier = bool(state.answer.coming) and self._waits_for_tier(state, state.answer)
        pending = state.pending
        if pending is not None and not pending.given_up:
            state.awaits_tail = pending.asks_tails_beyond(state.answer)
            if state.answer is None or state.waits_for_tier or state.awaits_tail:
                state.default_result = LookupResult.RETRY
        may_ask = (pending is None or not pending.given_up) and self.clock() - state.failed_at >= REFRESH_S
        state.asks_tails = has_tail and may_ask and state.default_result is _MISS

    def _take_answer(self, state: RequestState, answered: KeyedLookup) -> None:
        """Replace a request's answer by the one that has come, unless that failed or is too old."""
        state.pending = None
        now = self.clock()
        if answered.future.failed or (answered.future.pinned and now >= answered.future.stale_at):
            self._release(answered)
            state.failed_at = now
            return
        self._read(answered)
        # The new lease pins the same blocks, so nothing is unpinned in between.
        self._release(state.answer)
        state.answer = answered
        state.from_tiers.update(answered.coming)

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
        return self._is_idle and self.clock() - state.waits_for_report_since < MIN_COMPUTED_S

    def _is_outdated(self, state: RequestState) -> bool:
        """Return whether a request without a pending lookup needs another."""
        answer, now = state.answer, self.clock()
        if now - state.failed_at < REFRESH_S:
            return False
        if answer is None:
            return True
        hashes = len(state.request.block_hashes)
        if sum(hashes // group.hashes_per_chunk for group in self.groups) > answer.asked:
            return True  # it has generated further chunks
        if answer.all_ready and answer.future.leased:
            return now > answer.future.stale_at - REFRESH_S
        if not state.waits_for_tier or state.tier_wait_began is None:
            return now - answer.future.answered_at > REFRESH_S
        if answer.future.asking and self._asks_again is not None:
            return self._asks_again
        # Half of the expected time; without an estimate, a quarter of the time waited so far.
        waited_s = now - state.tier_wait_began
        most_s = max(MAX_RETRY_PAUSE_S, RETRY_SHARE * waited_s)
        expected_s = answer.future.wait_s or waited_s / 2
        return now - answer.future.answered_at > min(most_s, max(MIN_RETRY_PAUSE_S, expected_s / 2))

    def _note_time(self) -> float:
        """Return the time; do not count as waited what an idle engine stood still since the last call."""
        before, self._looked_at = self._looked_at, self.clock()
        stood_still_s = self._looked_at - before - STANDSTILL_S
        for state in self.requests.values() if self._is_idle and stood_still_s > 0 else ():
            still_s = min(stood_still_s, MAX_STOOD_STILL_S - state.stood_still_s)
            state.stood_still_s += still_s
            state.tier_wait_until += still_s
            state.doubted_since += still_s
            if state.pending is not None:
                state.pending.sent_at += still_s
        return self._looked_at

    def _rest(self) -> None:
        """Pause an idle engine for a moment: it runs empty steps while a request waits for blocks."""
        if self._is_idle and self._wait_left_s > 0:
            self._sleep(min(self._wait_left_s, MIN_RETRY_PAUSE_S))
            self._wait_left_s -= MIN_RETRY_PAUSE_S

    def _wait_for_answer(self, state: RequestState, pending: KeyedLookup, computed_s: float) -> None:
        """Wait for the answer to a request's lookup, or give it up if it is late.

        ``computed_s``: time after which the request would be computed without a load.
        """
        future, now = pending.future, self._note_time()
        is_needed = state.answer is None or pending.asks_tails_beyond(state.answer)
        is_first = is_needed and not pending.given_up and now >= self._no_wait_before
        if self._wait_left_s > 0 and (is_first or (state.waits_for_tier and self._is_idle)):
            self._counters[metrics.LOOKUP_WAITS] += is_first
            answered = future.wait(self._wait_left_s)
            began, now = now, self._note_time()
            self._wait_left_s -= now - began
            if is_first and not answered:
                self._counters[metrics.LOOKUP_WAITS_TIMED_OUT] += 1
                self._no_wait_before = now + WAIT_PAUSE_S
        else:
            self.namespace.client.poll()
        if not future.done and not pending.given_up:
            until = pending.sent_at + self._allowed_s(computed_s)
            if state.waits_for_tier:  # promoted blocks may still come
                until = max(until, state.tier_wait_until)
            if now >= until:
                pending.given_up, state.tier_wait_until = True, LONG_AGO
                if until > pending.sent_at:
                    self._replies_s.append(now - pending.sent_at)
                self._counters[metrics.LATE_LOOKUPS] += 1

    @property
    def _expected_rate(self) -> float:
        """Expected prefill rate in tokens per second: measured, else last reported by an engine of this namespace, else
        assumed."""
        rate = self.harm.prefill.tokens_per_second
        return rate or self.namespace.client.reported_prefill_rate or self._assumed_rate

    def _computed_s(self, request: Request, tokens: int) -> float:
        """Return the seconds until ``tokens`` of a request would be computed, after those of earlier requests."""
        before = self._tokens_before_each().get(request.request_id, 0)
        return max(MIN_COMPUTED_S, (before + tokens) / self._expected_rate)

    def _allowed_s(self, computed_s: float) -> float:
        """Return the longest wait for an answer, from the sending of its lookup: the deadline, or ANSWER_SHARE of
        computing a long prompt, but no longer than computing takes; 0 if all of the daemon's last answers took longer.
        """
        if not self._do_no_harm:
            return self._deadline_s
        allowed_s = min(max(self._deadline_s, ANSWER_SHARE * computed_s), computed_s)
        late = len(self._replies_s) == LATE_REPLIES and min(self._replies_s) > allowed_s
        return 0.0 if late else allowed_s

    def _read(self, lookup: KeyedLookup) -> None:
        """Read an answer once it has come: its duration and its states."""
        future = lookup.future
        if lookup.read or not future.done or future.failed:
            return
        lookup.read = True
        self._replies_s.append(future.answered_at - lookup.sent_at)
        for (index, chunks), states in zip(lookup.chunks.items(), future.states, strict=False):
            suffix, leading = self.groups[index].suffix, lookup.leading_ready(index)
            lookup.found.update(dict.fromkeys([one + suffix for one in chunks[:leading]], _HIT))
            tails = lookup.tails.get(index, ())
            lookup.found.update(dict.fromkeys([one + suffix for one in tails], _MISS))
            if not states[leading:].strip(_NOT_THERE):
                continue  # keys without an entry in ``found`` are misses
            before = len(lookup.coming)
            for one, state in zip([*chunks[leading:], *tails], states[leading:], strict=True):
                if state == READY:
                    lookup.found[one + suffix] = _HIT
                elif state in COMING:
                    # Not RETRY, after which vLLM would look for an earlier window.
                    lookup.found[one + suffix], lookup.coming[one + suffix] = _PENDING, state
            coming_tails = sum(state in COMING for state in states[len(chunks) :])
            count = len(lookup.coming) - before - max(0, coming_tails - 1)  # of the tails one is loaded at most
            tokens = count * self.groups[index].tokens_per_chunk
            lookup.coming_tokens = max(lookup.coming_tokens, tokens)

    def _waits_for_tier(self, state: RequestState, answer: KeyedLookup) -> bool:
        """Return whether a request waits for promotions: while promoting and loading are expected to be faster than
        computing it after the earlier prompts.

        It continues to wait for DOUBT_SHARE of its longest wait after this was first not expected, or after the start
        if it never was, but never longer than computing takes. Then it loads the blocks that are ready.
        """
        now = self._note_time()
        if now - state.failed_at < REFRESH_S or not self.namespace.client.ready:
            return False  # the daemon does not report promotions
        computed_s, loaded_s = inf, 0.0
        if self._do_no_harm:
            computed_s = self._computed_s(state.request, answer.coming_tokens)
            loaded_s = self.harm.load_s(answer.coming_tokens)
        if state.tier_wait_began is None:
            state.tier_wait_began = state.doubted_since = now
            state.tier_wait_until = min(state.tier_wait_until, now + min(self._disk_wait_s, computed_s))
        expected_s = max(0.0, answer.future.answered_at + answer.future.wait_s - now)
        most_s = state.tier_wait_until - state.tier_wait_began
        doubt_s = max(MIN_COMPUTED_S, DOUBT_SHARE * most_s)
        if answer.future.asking and PENDING not in answer.coming.values():
            expected_s = inf  # a store mostly has no blocks of a new prompt
            doubt_s = max(doubt_s, min(MAX_ASK_S, ASK_SHARE * most_s))
        is_worth_it = expected_s + loaded_s <= computed_s
        if not is_worth_it:
            state.doubted_since = min(state.doubted_since, now)
        elif answer.future.wait_s:
            state.doubted_since = inf
        if state.waits_for_tier and state.pending is not None and not state.pending.given_up:
            return True  # the next answer shows what was promoted during a step
        if now >= state.tier_wait_until or (not is_worth_it and now - state.doubted_since >= doubt_s):
            state.tier_wait_until = LONG_AGO
        return state.tier_wait_until != LONG_AGO

    def _tokens_before_each(self) -> dict[str, int]:
        """Return for each request the tokens of earlier requests that are neither computed nor being loaded."""
        if self._tokens_before is None:
            self._tokens_before, before = {}, 0
            for request_id, state in self.requests.items():
                self._tokens_before[request_id] = before
                if request_id not in self._loading:
                    before += max(0, state.request.num_prompt_tokens - state.request.num_computed_tokens)
        return self._tokens_before

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Record the start of a step with these numbers of tokens per request; regularly report to the daemon."""
        now, self._is_idle = self._note_time(), not request_tokens
        self._wait_left_s = IDLE_WAIT_S if self._is_idle else LOOKUP_WAIT_S
        self._tokens_before = None
        self._asks_again = None
        self.harm.prefill.step_begins(request_tokens)
        # Counts are kept until the daemon answers: lookups are late when it does not.
        if now >= self._report_at and self.namespace.client.ready:
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
        state = self.requests[request_id]
        self._counters[metrics.SLOW_LOADS] += not state.skip_counted
        state.skip_counted = True
        return True

    def record_scan(self, request: Request, computed_tokens: int, tokens: int | None) -> None:
        """Record the result of a scan of a request with ``computed_tokens`` in vLLM's own cache.

        ``tokens`` is None if it is deferred. If it waits for promotions, or only for other requests' loads, it is not
        scanned again before its answer changes, or a load ends: a scan of 8,192 keys takes ten milliseconds.
        """
        state = self.requests[request.request_id]
        if tokens is not None or not (state.default_result is LookupResult.RETRY or request.num_preemptions):
            state.scan = (state.answer, computed_tokens, state.waits_for_tier), tokens, self._ended_loads

    def scanned(self, request: Request, computed_tokens: int) -> int | None:
        """Return the result of a request's last scan if another would give the same: its tokens, or None for deferred.

        0: scan again.
        """
        state = self.requests[request.request_id]
        seen, tokens, ended_loads = state.scan
        is_same = state.answer is not None and seen == (state.answer, computed_tokens, state.waits_for_tier)
        return tokens if is_same and (tokens is not None or ended_loads == self._ended_loads) else 0

    def refuse_load(self, request_id: str) -> None:
        """Record that a request is computed although it could be loaded, because the KV cache has no space."""
        self.requests[request_id].refused = True
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: a prompt is computed although its blocks were found, because the KV cache has no space for them "
            "besides other loads and draft blocks. 'kvoffd-cli clients --requests' shows such prompts as no_space. "
            "More KV cache memory in the engine, or fewer draft tokens, would help."
        )

    def ready_tokens(self, request: Request, index: int) -> int:
        """Return the number of a request's leading tokens that the answer reports as ready in a group."""
        answer = self.requests[request.request_id].answer
        return answer.leading_ready(index) * self.groups[index].tokens_per_chunk if answer is not None else 0

    def _disable_adapters(self) -> None:
        """Disable requests with adapters: these may have been replaced in place, and vLLM continues the requests."""
        for state in self.requests.values():
            if state.adapter:
                self._end_leases(state)
                state.disabled = True

    def scheduled(self, request: Request, loaded_tokens: int) -> None:
        """Record that a request is about to be scheduled with ``loaded_tokens``; if these are 0, unpin its blocks.

        Publish the blocks that its answer reports as ready, which another engine may have stored.
        """
        state = self.requests[request.request_id]
        state.loaded_tokens = loaded_tokens
        if self.events is not None and (answer := state.answer) is not None and answer.usable:
            for index in self.events.groups:
                keys = self.groups[index].keys(request.block_hashes)
                self.events.found(request, index, keys, answer.leading_ready(index))
        if state.to_count is not None or not state.logged:
            state.report = _report_of(state, self.groups, loaded_tokens)
            state.logged, state.to_count = True, None
            if not loaded_tokens:
                self._send_report(state)
        if not loaded_tokens:
            self._end_leases(state)

    def _job_failed(self, failed: FailedJob) -> None:
        """Handle a store with missing blocks, or a failed load, whose request is recomputed."""
        reason = failed.error.sentence if failed.error is not None else "The daemon gave no reason."
        if failed.request_id is None:  # a store, whose blocks are not remembered here
            self._counters[metrics.FAILED_STORES] += 1
            logger.debug("kvoffd: a store failed. %s", reason)
            return
        self._counters[metrics.FAILED_LOADS] += 1
        if state := self.requests.get(failed.request_id):
            self._end_leases(state)
            state.load_failed = True
            if (report := state.report) is not None:
                own = report.own_keys
                state.report = structs.replace(report, outcome=Outcome.FAILED, loaded_tokens=0, covered_keys=own)
            state.last = None
        if failed.error in BLOCKS_UNUSABLE:
            self.namespace.client.invalidate(failed.keys)
        logger.warning("kvoffd: a load failed; request %s is recomputed. %s", failed.request_id, reason)

    def workers_report(self, report: WorkerReport) -> None:
        """Handle the workers' report, before vLLM handles the ended jobs."""
        if report.waited_s:
            self.harm.record_wait(report.waited_s)
        if report.credit_bytes is not None:
            self._credit_bytes = report.credit_bytes
        for tokens, seconds in report.load_times.values():
            self.harm.record_load(tokens, seconds)
        for failed in report.failed_jobs.values():
            self._job_failed(failed)
        if report.memory:
            generation = self.namespace.generation
            current = {rank: one for rank, one in report.memory.items() if one.generation == generation}
            self.namespace.report(current)
            requests = [state.request for state in self.requests.values()]
            begun = [one.lora_request for one in requests if one.lora_request and one.num_computed_tokens]
            self.adapters.record_reports(current, begun)

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._note_time()  # the time until now is not the new request's
        state = RequestState()
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which requests cannot exclude.
        if not allows_storage(req_context):
            state.tier_wait_until = LONG_AGO
        state.hints, unknown, state.peer, state.giver = read_hints(req_context, self._hints)
        self._counters[metrics.UNKNOWN_HINTS] += unknown
        self.requests[req_context.req_id] = state
        # Loaded blocks are offered for stores too: they are stored if the load failed, otherwise skipped.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self.requests[req_context.req_id]
        result = state.found.get(key)
        if result is None:
            if not (state.asks_tails and self._is_tail(key, req_context)):
                return state.default_result
            state.wanted_tails.append(key)
            return LookupResult.RETRY  # so that vLLM asks for the others too
        if result is not _PENDING:
            return result
        if not state.waits_for_tier:
            return _MISS
        state.awaits_tail |= key in state.tail_keys
        return _PENDING

    def _is_tail(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether a key is of a position inside a chunk."""
        end = req_context.get_offload_key_position(key) or 0
        return end % self.groups[self._positions[key[-GROUP_ID_BYTES:]]].tokens_per_chunk != 0

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = self.requests.get(req_context.req_id)
        tier = state.from_tiers.get(key) if state is not None else None
        if tier == SHARED:
            return CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's name of a remote store
        return CacheHitSource.HOST if tier is None else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeyedSpec:
        state = self.requests.get(req_context.req_id)
        spec = self._spec_of(keys, state.adapter if state is not None else b"")
        spec.request_id = req_context.req_id
        if state is not None and (answer := state.answer) is not None:
            if state.adapter:
                self.adapters.will_load(state.request.lora_request)
            if tails := [key for key in keys if key in state.tail_keys]:
                # They were found by a repeat, which the policy does not see: show it what is used.
                client = self.namespace.client
                client.release(client.lookup(self._spec_of(tails, state.adapter).keys, reported=True).lease_id)
            state.answer = None  # the load takes its lease
            self._end_leases(state)
            self._loading[req_context.req_id] = answer
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
        self._ended_loads += 1
        self._release(self._loading.pop(req_context.req_id, None))
        if state := self.requests.get(req_context.req_id):
            self._send_report(state)

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
        if last and not last.read:
            self._read(last)  # it came after the request was scheduled
        found, computed = last.found if last else {}, request.num_computed_tokens if has_ended else inf
        ends: dict[OffloadKey, int] = {}
        for key in keys:
            end = req_context.get_offload_key_position(key) or 0
            if end <= computed and key not in self._storing and found.get(key) is not _HIT:
                ends[key] = end
        if not ends:
            _forget_offered(last, keys)
            return nothing
        if self.clock() < self.harm.stores_paused_until:
            self._counters[metrics.PAUSED_STORES] += 1
            return nothing
        # The last offer of a request may use twice the credit, which the daemon does not enforce.
        most_bytes = 2 * self._credit_bytes if has_ended else self._credit_bytes
        if may_wait and self._outstanding_bytes and self._outstanding_bytes >= most_bytes:
            self._counters[metrics.FAILED_STORES if has_ended else metrics.DEFERRED_STORES] += 1
            return None
        _forget_offered(last, keys)
        sizes = {key: self._shard_bytes[key[-GROUP_ID_BYTES:]] for key in ends}
        self._storing |= sizes
        self._outstanding_bytes += sum(sizes.values())
        spec = self._spec_of(ends, state.adapter)
        if self.events is not None and not any(self._is_tail(key, req_context) for key in ends):
            spec.origins = self.events.origins_of(request, ends)
        return PrepareStoreOutput(keys_to_store=list(ends), store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._outstanding_bytes -= sum([self._storing.pop(key, 0) for key in keys])

    def on_request_finished(self, req_context: ReqContext) -> None:
        if state := self.requests.pop(req_context.req_id, None):
            if state.to_count is not None:
                state.report = _report_of(state, self.groups, 0, dropped=True)
            self._send_report(state)
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
        self._ended_loads += 1
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

    def _send_report(self, state: RequestState) -> None:
        if state.report is not None:
            self.namespace.client.report_prompt(state.report)
            state.report = None

    def _release(self, lookup: KeyedLookup | None) -> None:
        """End a lookup's lease, if it has one or may have one."""
        if lookup is not None and (lookup.future.leased or lookup.future.failed or not lookup.future.done):
            self.namespace.client.release(lookup.future.lease_id)


def _forget_offered(lookup: KeyedLookup | None, keys: Collection[OffloadKey]) -> None:
    """Drop results for blocks that vLLM has offered: it offers each only once, and they use much memory."""
    if lookup is not None and any(key in lookup.found for key in keys):
        offered = set(keys)
        lookup.found = {key: state for key, state in lookup.found.items() if key not in offered}


def _group_keys(index: int, hashes: Sequence[bytes], adapter: bytes) -> GroupKeys:
    """Return a group's keys for these hashes of a request with this adapter, if any."""
    return GroupKeys(index, b"".join(of_adapter(hashes, adapter) if adapter else hashes))


def _report_of(
    state: RequestState, groups: Sequence[ChunkGroup], loaded_tokens: int, *, dropped: bool = False
) -> PromptReport:
    """Return the report of a request that is scheduled with ``loaded_tokens`` or, if ``dropped``, ended before that."""
    request, last, tails = state.request, state.last, state.tail_keys
    from_tiers = {key: tier for key, tier in state.from_tiers.items() if key not in tails}
    from_store = list(from_tiers.values()).count(SHARED)
    states = b"".join(last.states) if last is not None else b""
    promoted = sum(last.found.get(key) is _HIT for key in from_tiers) if last is not None else 0
    # Leading keys by group: of the whole prompt, in the engine's own cache, and those that need not be computed.
    whole = [request.num_tokens // one.tokens_per_chunk for one in groups]
    own = covered = [state.own_tokens // one.tokens_per_chunk for one in groups]
    if loaded_tokens:  # the last chunk may be loaded in part
        end = state.own_tokens + loaded_tokens
        if tails and not state.engine_has_all and end < request.num_tokens - 1:  # it ends with a tail, or with a chunk
            end -= end % groups[0].tokens_per_chunk
        covered = [min(count, -(-end // one.tokens_per_chunk)) for count, one in zip(whole, groups, strict=True)]
    elif dropped or state.prefilled_elsewhere:
        own = covered = whole
    elif state.engine_has_all:  # vLLM computes the last token in any case, and with it the block that ends there
        covered = whole
    group, missing, number, reason = _first_missing(state, covered)
    after_gap = 0
    if missing and last is not None:
        after_gap = sum(
            found.count(READY, covered[index]) for index, found in zip(last.chunks, last.states, strict=False)
        )
    if loaded_tokens:
        outcome = Outcome.LOADED
    elif dropped:
        outcome = Outcome.DROPPED
    elif not any(whole):
        outcome = Outcome.TOO_SHORT
    elif state.disabled or last is None or last.future.failed:
        outcome = Outcome.UNUSED
    elif state.prefilled_elsewhere or state.engine_has_all:
        outcome = Outcome.NOT_NEEDED
    elif last.given_up or not last.future.done:
        outcome = Outcome.LATE
    elif state.skip_counted:
        outcome = Outcome.SKIPPED
    elif state.refused:
        outcome = Outcome.NO_SPACE
    else:
        outcome = Outcome.MISSED
    return PromptReport(
        request=request.request_id[:128],
        decided_at=time.time(),
        tokens=request.num_prompt_tokens,
        keys=len(states),
        found_pool=states.count(READY) - promoted,
        found_disk=len(from_tiers) - from_store,
        found_shared=from_store,
        outcome=outcome,
        loaded_tokens=loaded_tokens,
        missing_group=group,
        missing_key=missing,
        reason=reason,
        missing_number=number,
        own_tokens=state.own_tokens,
        lease_id=state.to_count.lease_id if state.to_count is not None else 0,
        own_keys=own,
        covered_keys=covered,
        after_gap=after_gap,
    )


def _first_missing(state: RequestState, covered: Sequence[int]) -> tuple[int, bytes, int, str]:
    """Return the first key that was neither covered nor ready: group, key, its position among all keys looked up, from
    1, and the reason if it is known here."""
    last, before = state.last, 0
    for (index, chunks), states in zip(last.chunks.items(), last.states, strict=False) if last is not None else ():
        for at in range(covered[index], len(states)):
            if states[at] != READY:
                key = of_adapter([chunks[at]], state.adapter)[0] if state.adapter else chunks[at]
                reason = "" if states[at] == ABSENT else "partial" if states[at] == WRITING else "tier_late"
                return index, key, before + at + 1, reason
        before += len(states)
    return 0, b"", 0, ""
