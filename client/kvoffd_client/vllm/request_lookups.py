"""Lookups of the requests that vLLM has not scheduled: when to send, to renew and to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.adapters import ANSWER_PATIENCE_S, AdapterContents
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES, ChunkGroup, of_adapter
from kvoffd_client.vllm.do_no_harm import DoNoHarm
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.hints import HintBudget, hinted_hashes, name_of
from kvoffd_client.vllm.keyed_lookup import NOTHING_AWAITED, KeyedLookup, result_of
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.prompt_queue import MAX_AHEAD, Parked, PromptQueue
from kvoffd_client.vllm.request_state import RequestState, Scan
from kvoffd_client.vllm.waits import MIN_COMPUTED_S, MIN_RETRY_PAUSE_S, AnswerWait, EngineClock
from kvoffd_proto.messages import PENDING, READY, GroupKeys, HintAction
from kvoffd_proto.units import plural

if TYPE_CHECKING:
    from vllm.v1.request import Request

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


class RequestLookups:
    """The lookups of an engine's requests.

    A prompt waits in one of three ways until it is ``scheduled``:

    * behind: it is not looked up, because many others will run before it;
    * ahead: it is looked up, and waits for no tier;
    * for a tier, whose blocks come up.

    Any of them may be parked: vLLM came to it, and passes over it until an answer, its turn, a load or a time comes.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters, which this adds to.
        deadline_s, do_no_harm: see ``AnswerWait``.
        disk_wait_s: longest wait for promotions.

    Attributes:
        groups: the offloaded groups, by index on the wire.
        requests: states of unfinished requests by id.
        queue: the requests that are not scheduled.
        loading: by request, the lookup whose lease its load reads under, until vLLM has handled the load's end.
        loads: number of loads that have begun or ended.
        late_times: sum of the times at which lookups were late.
        enabled: whether requests may be loaded.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        adapters: AdapterContents,
        groups: Sequence[ChunkGroup],
        clock: Callable[[], float],
        counters: metrics.Counters,
        *,
        deadline_s: float,
        disk_wait_s: float,
        do_no_harm: bool,
        sleep: Callable[[float], None],
    ) -> None:
        self.namespace, self.adapters, self.groups = namespace, adapters, groups
        self.clock, self._sleep, self._counters = clock, sleep, counters
        self._deadline_s, self._disk_wait_s, self._do_no_harm = deadline_s, disk_wait_s, do_no_harm
        self._positions = {group.suffix: index for index, group in enumerate(groups)}
        self.requests: dict[str, RequestState] = {}
        self.loading: dict[str, KeyedLookup] = {}
        self.loads = 0
        self.late_times = 0.0
        self.enabled = True
        self.engine_clock = EngineClock(lambda: self.clock())
        self._answer_wait = AnswerWait(deadline_s, do_no_harm=do_no_harm)
        self._is_new_step, self._has_rested = True, False
        """Whether no prompt was asked for in this step yet, and whether an idle engine has paused in it."""
        self._hint_budget = HintBudget(lambda: self.clock())
        self._tokens_before: dict[str, int] = {}
        """Uncomputed tokens of earlier prompts by request, as far as they were needed in this step."""
        self._uncounted: Iterator[RequestState] | None = None
        self._tokens_counted = 0

    def begin_engine(
        self,
        harm: DoNoHarm,
        *,
        step_tokens: int,
        by_priority: bool,
        rests: bool,
        only_prefixes: bool,
        tail_tokens: int,
        assumed_rate: float,
    ) -> None:
        """Set properties of the engine; see ``KvoffdManager.begin_engine``."""
        self._harm, self._assumed_rate = harm, assumed_rate
        self._only_prefixes, self._tail_tokens, self._by_priority = only_prefixes, tail_tokens, by_priority
        self._rests = rests
        self.queue = PromptQueue(step_tokens, by_priority=by_priority)

    def begin_step(self, *, is_idle: bool) -> None:
        """Begin a step, in which no request runs if it ``is_idle``; look up the next prompts of the queue."""
        self.engine_clock.read()
        self.engine_clock.is_idle = is_idle
        self._answer_wait.begin_step(is_idle=is_idle)
        self._is_new_step, self._has_rested = True, False
        self._tokens_before, self._tokens_counted, self._uncounted = {}, 0, None
        self._look_up_ahead()
        self._renew_ahead()

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
        self.queue.add(request.request_id, request.num_prompt_tokens, request.priority)
        if self.queue.outranks(request.priority) and self.queue.take_turn(request.request_id):
            self.look_up(request)
        self._look_up_ahead()

    def _look_up_ahead(self) -> None:
        """Look up the first prompts of the queue that are not, as long as there is space in the window."""
        for _ in range(MAX_AHEAD) if self.namespace.serves else ():
            if not self.queue.has_space or (name := self.queue.take_next()) is None:
                break
            self.look_up(self.requests[name].request)

    def _renew_ahead(self) -> None:
        """Look up again the first prompts of the queue whose answers are old, so that the next step need not wait."""
        for name in self.queue.first_ahead(CHECKED_AHEAD) if self.namespace.serves else ():
            state = self.requests[name]
            self._take_answer(state)
            comes = state.answer is not None and state.answer.is_coming  # a scan asks for these again
            if state.pending is None and not comes and self._is_outdated(state):
                self.look_up(state.request)

    def look_up(self, request: Request) -> None:
        """Look up all complete chunks of a request, and its tails, if lookups are possible."""
        state, namespace = self.requests[request.request_id], self.namespace
        if not self.knows_adapter(state) or not namespace.serves:
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
        future = client.lookup(message, again, reported=True, peer=state.peer, giver=state.giver)
        if not again and future.lease_id:
            record.counted, record.counted_by = future, asked_by
        is_needed = state.answer is None or self._lacks_stored(state.answer)
        state.pending = state.last = KeyedLookup(
            future,
            self.groups,
            state.adapter,
            chunks,
            tails,
            sent_at=self.clock(),
            waits_since=self.engine_clock.read(),
            stored=client.stored,
            stored_before=stored_before,
            is_needed=is_needed,
            given_up=record.is_late,
        )
        self._counters[metrics.LOOKUPS] += 1
        self.queue.enter_window(request.request_id, request.num_prompt_tokens, request.priority, future)

    def look_up_tails(self, request: Request, computed_tokens: int) -> bool | None:
        """Look up the tails for which vLLM asked in its scan, and prepare another; None if it asked for none.

        Returns as ``prepare_scan``. vLLM asks for each position inside the chunk after the last one that is a hit, in
        all groups.
        """
        state = self.requests[request.request_id]
        if not (wanted := state.wanted_tails):
            return None
        state.tails, state.record.asks_tails = self._by_group(reversed(wanted)), True  # vLLM begins with the longest
        self.release(state.pending)
        state.pending = None
        self.look_up(request)
        may_scan = self.prepare_scan(request, computed_tokens, engine_has_all=state.record.engine_has_all)
        state.asks_tails = False  # the second scan takes what is known
        return may_scan

    def _by_group(self, keys: Iterable[OffloadKey]) -> dict[int, list[bytes]]:
        """Return the hashes of vLLM's keys by group on the wire, in their order."""
        hashes: dict[int, list[bytes]] = {}
        for key in keys:
            hashes.setdefault(self._positions[key[-GROUP_ID_BYTES:]], []).append(key[:-GROUP_ID_BYTES])
        return hashes

    def _send_first_hints(self, state: RequestState) -> None:
        """Send a request's hints for its start, once the daemon can be reached and the adapter is known."""
        if not state.hints_sent and self.knows_adapter(state) and self.namespace.serves:
            state.hints_sent = True
            self.send_hints(state, has_ended=False)

    def send_hints(self, state: RequestState, *, has_ended: bool) -> None:
        """Pass on a request's hints: ``kv.release`` at its end, ``kv.prefetch`` at its start, ``kv.retain`` at both, to
        include what was generated and to have its time begin at the end."""
        named, found = dict[int, list[GroupKeys]](), state.last.tail_states() if state.last is not None else {}
        tails = self._by_group(key for key, one in found.items() if one == READY)
        for hint in () if state.disabled else state.hints:
            if hint.action is not (HintAction.PREFETCH if has_ended else HintAction.RELEASE):
                if (start := hint.start) not in named:
                    hashes = hinted_hashes(self.groups, state.request, start, self._tail_tokens, tails)
                    named[start] = [_group_keys(index, one, state.adapter) for index, one in hashes.items()]
                notes = state.record.hints
                if not (groups := named[start]):
                    notes[name_of(hint)] = "of no whole block"
                    continue
                namespace = self.namespace.current
                assert namespace is not None
                keys = sum(len(one.keys) for one in groups) // namespace.key_bytes
                if not self._hint_budget.take(keys):
                    self._counters[metrics.UNKNOWN_HINTS] += 1
                    notes[name_of(hint)] = "dropped, as the engine had passed on too many"
                else:
                    notes[name_of(hint)] = f"of {keys} key{plural(keys)}"
                    self.namespace.client.hint(hint.action, groups, hint.priority, hint.ttl_s, giver=state.giver)

    def knows_adapter(self, state: RequestState) -> bool:
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
        if adapter is None or self.knows_adapter(state):
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
        return self.enabled and not barred

    # --- a request's turn --------------------------------------------------------------------------

    def is_waiting(self, request_id: str, computed_tokens: int) -> bool:
        """Return whether a request is parked. Once in a step, wake what is due first; an idle engine pauses here."""
        if self._is_new_step:
            self._is_new_step = False
            self._begin_scans()
        if not self.queue.is_parked(request_id, computed_tokens):
            return False
        if not self.engine_clock.is_idle or self._has_rested or not self._rests:
            return True
        self._rest()
        return self.queue.is_parked(request_id, computed_tokens)

    def _begin_scans(self) -> None:
        """Wake the parked requests whose time or answer has come."""
        self.queue.begin_step()
        if not self.queue.has_parked:
            return
        if self.namespace.serves and self.namespace.registered:
            self.namespace.client.poll()
            self.queue.wake(self.engine_clock.read())
        else:
            self.queue.wake_all()

    def _rest(self) -> None:
        """Pause an idle engine until an answer comes, or for a moment: it runs empty steps while all prompts wait."""
        self._has_rested, began, wait = True, self.engine_clock.read(), self._answer_wait
        if (future := self.queue.first_awaited) is None:
            self._sleep(max(0.0, min(wait.left_s, MIN_RETRY_PAUSE_S)))
            wait.left_s -= MIN_RETRY_PAUSE_S
        elif wait.may_wait(began):
            answered = future.wait(wait.left_s)
            self._counters[metrics.LOOKUP_WAITS] += 1
            timed_out = wait.record_wait(began, self.engine_clock.read(), answered=answered)
            self._counters[metrics.LOOKUP_WAITS_TIMED_OUT] += timed_out
        self.queue.wake(self.engine_clock.read())

    def _waits_since(self, state: RequestState) -> float:
        """Return the time since which a request waits for an answer, now if it did not."""
        if state.waits_since is None:
            state.waits_since = self.engine_clock.read()
        return state.waits_since

    def prepare_scan(
        self, request: Request, computed_tokens: int, *, engine_has_all: bool, engine_has_tail: bool = False
    ) -> bool:
        """Prepare the results of ``lookup`` for a request before vLLM's scan, which must see a single answer.

        Take an answer that has come, ask again if it may not be the best one any more, and wait a moment for the next.
        ``computed_tokens`` are in vLLM's own cache, in whole blocks; ``engine_has_all``: as many as it can use, so
        nothing is loaded but a tail, unless ``engine_has_tail``. False: the request waits, and vLLM must not scan now.
        """
        may_scan = self._prepare_scan(request, computed_tokens, engine_has_all, engine_has_tail)
        if may_scan:
            self.requests[request.request_id].waits_since = None
        return may_scan

    def _prepare_scan(
        self, request: Request, computed_tokens: int, engine_has_all: bool, engine_has_tail: bool
    ) -> bool:
        state, namespace = self.requests[request.request_id], self.namespace
        record = state.record
        record.own_tokens, record.engine_has_all, record.may_load = (
            computed_tokens,
            engine_has_all,
            self._may_load(state),
        )
        state.results, state.tail_results, state.wanted_tails = {}, {}, []
        state.asks_tails = state.awaits_tail = False
        may_have_tail = bool(self._tail_tokens) and not engine_has_tail
        has_tail = may_have_tail and computed_tokens + self._tail_tokens < request.num_prompt_tokens
        if (engine_has_all and not has_tail) or not record.may_load or namespace.problem:
            if state.last is None and record.may_load:
                self.look_up(request)  # the daemon counts its keys, and the policy learns that they are in use
            return True
        if not (namespace.registered and namespace.client.ready):
            return not self._awaits_reports(state)
        if self._take_answer(state) and state.answer is not None:
            # Before the next lookup: where steps are long, one would be on its way whenever vLLM comes here.
            state.awaits_tier = self._waits_for_tier(state, state.answer)
        if state.pending is None and self._is_outdated(state) and self._may_renew(state, computed_tokens):
            if not self.queue.take_turn(request.request_id) and self._awaits_turn(state, computed_tokens):
                return False
            if record.is_late:
                return True
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
                state.waits_since = pending.waits_since if state.waits_since is None else state.waits_since
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
            self.queue.wait_for_tier(name)
            if state.answer is not None and state.answer.future.asking:
                place, until = state.number, max(until, state.tier_wait.judge_at)
        parked = Parked(computed_tokens, until, future, state.awaits_tier, place, state.tier_wait.ask_at)
        self.queue.park(name, parked)

    def _awaits_turn(self, state: RequestState, computed_tokens: int) -> bool:
        """Park a request that may not be looked up now, because many others were in this step. Once that takes too long
        return False: it is looked up all the same, or given up if too many are."""
        computed_s = self._computed_s(state.request, state.request.num_tokens)
        now, until = self.engine_clock.read(), self._waits_since(state) + self._answer_wait.allowed_s(computed_s)
        if now < until:
            self.queue.park(state.request.request_id, Parked(computed_tokens, until, for_lookup=True))
            return True
        state.record.is_late = self.queue.is_full
        return False

    def _take_answer(self, state: RequestState) -> bool:
        """Replace a request's answer by the one that has come, unless that failed, or its lease is about to end.

        Returns whether it was replaced.
        """
        if (answer := state.answer) is not None and not answer.usable:
            state.answer = None
        if (answered := state.pending) is None or not answered.future.done:
            return False
        state.pending = None
        if answered.future.failed:
            self.release(answered)
            state.failed_at = answered.future.answered_at
            return False
        if answered.future.pinned and self.clock() >= answered.future.stale_at:
            self.release(answered)  # it came long ago, so it is asked again
            return False
        self.read(answered)
        # The new lease pins the same blocks, so nothing is unpinned in between.
        self.release(state.answer)
        state.answer = answered
        state.record.came_from_tiers(answered)
        now, age_s = self.engine_clock.read(), self.clock() - answered.future.answered_at
        state.tier_wait.answered(now - age_s, now, answered.future.wait_s)
        return True

    def read(self, lookup: KeyedLookup) -> None:
        """Read an answer once it has come, and record how long it took."""
        if lookup.future.done and not (lookup.is_read or lookup.future.failed):
            lookup.read()
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
        since = self._waits_since(state)
        return self.engine_clock.is_idle and self.engine_clock.read() - since < MIN_COMPUTED_S

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
            return self.engine_clock.read() >= state.tier_wait.ask_at
        return now - future.answered_at > REFRESH_S * max(1.0, answer.asked / REFRESH_KEYS)

    def _may_renew(self, state: RequestState, computed_tokens: int) -> bool:
        """Return whether a request may wait for one more answer. While others store what it lacks, each may be outdated
        when it comes; once the time for one is over, the last one counts."""
        if state.answer is None or state.waits_since is None:
            return True
        computed_s = self._computed_s(state.request, state.request.num_tokens - computed_tokens)
        return self.engine_clock.read() < state.waits_since + self._answer_wait.allowed_s(computed_s)

    def _lacks_stored(self, answer: KeyedLookup) -> bool:
        """Return whether something that an answer lacks was stored since."""
        return answer.grows_old(self.namespace.client.stored, only_prefixes=self._only_prefixes)

    def _wait_for_answer(self, state: RequestState, pending: KeyedLookup, computed_tokens: int) -> float:
        """Wait for the answer to a request's lookup, or give it up if it is late. Return the time when it is late."""
        future, wait, now = pending.future, self._answer_wait, self.engine_clock.read()
        of_tails = pending.asks_tails_beyond(state.answer)
        is_needed = (pending.is_needed or of_tails) and not pending.given_up
        if (is_needed and wait.may_wait(now)) or (state.awaits_tier and self.engine_clock.is_idle and wait.left_s > 0):
            self._counters[metrics.LOOKUP_WAITS] += is_needed
            answered = future.wait(wait.left_s) or not is_needed
            began, now = now, self.engine_clock.read()
            self._counters[metrics.LOOKUP_WAITS_TIMED_OUT] += wait.record_wait(began, now, answered=answered)
        else:
            self.namespace.client.poll()
        tokens = state.request.num_tokens - computed_tokens
        if of_tails and state.answer is not None:
            tokens = min(tokens, self.groups[0].tokens_per_chunk)
        allowed_s = wait.allowed_s(self._computed_s(state.request, tokens))
        # Lookups that follow one another while the request waits have the deadline of the first, but each has a moment:
        # vLLM may not have come here for a while.
        since = pending.waits_since if state.waits_since is None else min(state.waits_since, pending.waits_since)
        late_at = max(since + allowed_s, pending.waits_since + min(allowed_s, MIN_COMPUTED_S))
        if state.awaits_tier:  # promoted blocks may still come
            late_at = max(late_at, state.tier_wait.until)
        if now >= late_at and not future.done and not pending.given_up:
            pending.given_up = state.tier_wait.has_ended = True
            if allowed_s:
                wait.record_reply(now - pending.waits_since)
            self._counters[metrics.LATE_LOOKUPS] += 1
            self.late_times += self.clock()
        return late_at

    @property
    def expected_rate(self) -> float:
        """Expected prefill rate in tokens per second: measured, else last reported by an engine of this namespace, else
        assumed."""
        rate = self._harm.prefill.tokens_per_second
        return rate or self.namespace.client.reported_prefill_rate or self._assumed_rate

    def _computed_s(self, request: Request, tokens: int) -> float:
        """Return the seconds until ``tokens`` of a request would be computed, after those of earlier requests."""
        name = request.request_id
        if self._uncounted is None:
            self._uncounted = self._in_order()
        while (before := self._tokens_before.get(name)) is None:
            if (state := next(self._uncounted, None)) is None:
                before = 0
                break
            self._tokens_before[state.request.request_id] = self._tokens_counted
            if state.request.request_id not in self.loading:
                self._tokens_counted += max(0, state.request.num_prompt_tokens - state.request.num_computed_tokens)
        return max(MIN_COMPUTED_S, (before + tokens) / self.expected_rate)

    def _in_order(self) -> Iterator[RequestState]:
        """Return the requests in the order in which vLLM schedules them."""
        if not self._by_priority:
            return iter([*self.requests.values()])
        return iter(sorted(self.requests.values(), key=lambda state: (state.request.priority, state.number)))

    def _waits_for_tier(self, state: RequestState, answer: KeyedLookup) -> bool:
        """Return whether a request waits for promotions: while promoting and loading are expected to be faster than
        computing it after the earlier prompts. Else it loads the blocks that are ready.
        """
        wait, now, future = state.tier_wait, self.engine_clock.read(), answer.future
        if wait.has_ended or not any(map(answer.has, state.tiers)):
            return False
        if self.clock() - state.failed_at < REFRESH_S or not self.namespace.client.ready:
            return False  # the daemon does not report promotions
        computed_s, loaded_s, tokens = inf, 0.0, answer.coming_tokens
        if self._do_no_harm:
            computed_s, loaded_s = self._computed_s(state.request, tokens), self._harm.load_s(tokens)
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
        known = Scan(state.answer, computed_tokens, state.awaits_tier, self.loads)
        is_same = state.answer is not None and state.scan is not None and state.scan[0] == known
        return state.scan[1] if state.scan is not None and is_same else None

    def record_scan(self, request: Request, computed_tokens: int, tokens: int | None) -> None:
        """Record the result of a scan: ``tokens`` that can be loaded; None if the request waits for promotions, or for
        another request's load of the same blocks. Then it is not scanned again before that ends."""
        state = self.requests[request.request_id]
        if self.queue.is_parked(request.request_id, computed_tokens):
            return  # for the answer about its tails
        if tokens is not None:
            state.scan = Scan(state.answer, computed_tokens, state.awaits_tier, self.loads), tokens
        elif state.awaits_tier and state.answer is not None:
            self._park(state, computed_tokens, min(state.tier_wait.ask_at, state.tier_wait.judge_at))
        elif not request.num_preemptions:  # else its own stores may not have ended
            until = self.engine_clock.read() + LOAD_PAUSE_S
            self.queue.park(request.request_id, Parked(computed_tokens, until, for_load=True))

    def ready_tokens(self, request: Request, index: int) -> int:
        """Return the number of a request's leading tokens that the answer reports as ready in a group."""
        answer = self.requests[request.request_id].answer
        return answer.leading_ready(index) * self.groups[index].tokens_per_chunk if answer is not None else 0

    def end_leases(self, state: RequestState) -> None:
        """Release the leases of a request that runs without a load or has ended. Its last lookup stays known."""
        self.release(state.answer)
        self.release(state.pending)
        state.answer = state.pending = None

    def release(self, lookup: KeyedLookup | None) -> None:
        """End a lookup's lease, if it has one or may have one."""
        if lookup is not None and (lookup.future.leased or lookup.future.failed or not lookup.future.done):
            self.namespace.client.release(lookup.future.lease_id)


def _group_keys(index: int, hashes: Sequence[bytes], adapter: bytes) -> GroupKeys:
    """Return a group's keys for these hashes of a request with this adapter, if any."""
    return GroupKeys(index, b"".join(of_adapter(hashes, adapter) if adapter else hashes))
