"""Waits of the prompts that are not scheduled: when vLLM comes to one, it is scanned now or passed over."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvoffd_client.scheduler_client import LookupFuture
from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.compute_times import ComputeTimes
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.do_no_harm import DoNoHarm
from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_reports import LateTimes
from kvoffd_client.vllm.keyed_lookup import NOTHING_AWAITED, KeyedLookup
from kvoffd_client.vllm.next_wait import NO_WAIT, AwaitedEvent, NextWait, WaitFacts, next_wait
from kvoffd_client.vllm.parked_prompts import Parked
from kvoffd_client.vllm.request_lookups import RequestLookups
from kvoffd_client.vllm.request_state import FoundTokens, RequestState, ScanBasis
from kvoffd_client.vllm.scans import PreparedScan
from kvoffd_client.vllm.waits import LONG_AGO, MIN_COMPUTED_S, AnswerWait, EngineClock
from kvoffd_proto.messages import SHARED

SCANNED_HASHES = 1024
"""Block hashes of the prompts that one step scans for the first time although they wait behind another load; at least
one prompt. vLLM makes a key of each hash, in about a microsecond."""


class PromptWaits:
    """The waits of the prompts that are not scheduled, of which ``PromptMatcher`` asks in each step.

    A prompt waits for what next_wait.py says, by a table of facts that are gathered here.

    Args:
        lookups: the prompts' lookups, which this sends and takes.
        engine_clock: time by which prompts wait.
        answer_wait: how long they wait for answers.
        counters: the engine's counters, which this adds to.
        late_times: times at which lookups were given up, which this adds to.
        options: the connector's options. Registered workers should have reported within a lookup's deadline.
    """

    def __init__(
        self,
        lookups: RequestLookups,
        engine: EngineFacts,
        options: ConnectorOptions,
        harm: DoNoHarm,
        times: ComputeTimes,
        engine_clock: EngineClock,
        answer_wait: AnswerWait,
        counters: metrics.Counters,
        late_times: LateTimes,
        sleep: Callable[[float], None],
    ) -> None:
        self._lookups, self._namespace, self._counters = lookups, lookups.namespace, counters
        self._queue, self._parked = lookups.queue, lookups.queue.parked
        self._engine, self._harm, self._times = engine, harm, times
        self._engine_clock, self._answer_wait, self._sleep = engine_clock, answer_wait, sleep
        self._deadline_s, self._disk_wait_s = options.lookup_deadline_s, options.disk_wait_s
        self._do_no_harm, self._late_times = options.do_no_harm, late_times
        self._hashes_left = SCANNED_HASHES
        """Block hashes of prompts behind another load that this step may still scan."""
        self._must_wake = True
        """Whether parked prompts were not woken in this step yet: vLLM has come to none."""
        self._pause_is_left = True
        """Whether an idle engine has not paused in this step, and no prompt has come since the step before."""

    def begin_step(self, *, is_idle: bool) -> None:
        """Begin a step, in which no request runs if it ``is_idle``."""
        self._engine_clock.begin_step(is_idle=is_idle)
        self._answer_wait.begin_step(is_idle=is_idle)
        self._must_wake = self._pause_is_left = True
        self._hashes_left = SCANNED_HASHES
        self._queue.begin_step()
        self._times.begin_step()

    def skip_pause(self) -> None:
        """Have an idle engine not pause in the next step, because a prompt has arrived: vLLM comes to those that are
        parked before it."""
        self._pause_is_left = False

    # --- parked prompts ----------------------------------------------------------------------------

    def pass_over(self, request_id: str, own_tokens: int) -> bool:
        """Return whether vLLM passes over a request, because it is parked. The first call of a step wakes what is due;
        an idle engine pauses here once in a step, unless the next step wakes some in any case."""
        if self._must_wake:
            self._must_wake = False
            if self._parked:
                self._wake()
        if not self._parked.is_parked(request_id, own_tokens):
            return False
        may_pause = self._engine_clock.is_idle and self._pause_is_left and self._engine.may_pause
        if not may_pause or self._queue.next_step_wakes:
            return True
        self._pause()
        return self._parked.is_parked(request_id, own_tokens)

    def _wake(self) -> None:
        """Wake the parked requests whose time, answer or turn has come."""
        if self._namespace.serves and self._namespace.registered:
            self._namespace.client.poll()
            self._queue.wake_for_lookups()
            self._parked.wake(self._engine_clock.read())
        else:
            self._parked.wake_all()

    def _pause(self) -> None:
        """Pause an idle engine until an answer comes, or for a moment: it runs empty steps while all prompts wait.

        That none comes says nothing of the daemon: no prompt's wait has timed out.
        """
        self._pause_is_left, answer_wait = False, self._answer_wait
        if (future := self._parked.first_awaited) is None:
            self._sleep(answer_wait.take_pause())
        elif answer_wait.may_wait(self._engine_clock.read()):
            self._wait(future, must_come=False)
        self._parked.wake(self._engine_clock.read())

    def _wait(self, future: LookupFuture, *, must_come: bool) -> None:
        """Wait for an answer for the rest of this step's time for waits. Only one that ``must_come`` is counted, and
        can time out."""
        began, answer_wait = self._engine_clock.read(), self._answer_wait
        has_come = future.wait(answer_wait.left_s)
        timed_out = answer_wait.record_wait(began, self._engine_clock.read(), answered=has_come or not must_come)
        if must_come:
            self._counters[metrics.LOOKUP_WAITS] += 1
        if timed_out:
            self._counters[metrics.LOOKUP_WAITS_TIMED_OUT] += 1

    def _park(self, state: RequestState, own_tokens: int, wait: NextWait) -> None:
        """Pass over a request until what it waits for comes, or its time."""
        request, event = state.request, wait.event
        in_turns = event in (AwaitedEvent.TIER, AwaitedEvent.STORE)
        if in_turns:
            self._queue.wait_for_tier(request.request_id)
        is_for_load = event is AwaitedEvent.LOAD  # which a newer answer would not end
        parked = Parked(
            own_tokens,
            wait.until,
            state.in_flight.future if state.in_flight is not None and not is_for_load else None,
            in_turns=in_turns,
            priority=request.priority,
            ask_order=state.number if event is AwaitedEvent.STORE else None,
            ask_at=state.wait.tier.ask_at,
            for_load=is_for_load,
        )
        self._parked.park(request.request_id, parked)

    # --- a prompt's scan ---------------------------------------------------------------------------

    def prepare_scan(self, state: RequestState, own_tokens: int, *, engine_has_all: bool, may_have_tail: bool) -> bool:
        """Prepare the results of vLLM's scan of a request, which must see a single answer.

        Return False if the request waits: then it is parked if that is for an answer, and vLLM must not scan it now.

        Args:
            own_tokens: tokens in vLLM's own cache, in whole blocks.
            engine_has_all: those are all that vLLM can use: nothing can be loaded but a tail.
            may_have_tail: the prompt may have a tail that is not in vLLM's own cache.
        """
        lookups, namespace, wait = self._lookups, self._namespace, state.wait
        scan = state.scan = PreparedScan(own_tokens, engine_has_all, lookups.may_load(state))
        needs_none = engine_has_all and not may_have_tail
        if needs_none or not scan.may_load or namespace.problem:
            if state.last is None and scan.may_load:
                lookups.look_up(state)  # the daemon counts its keys, and the policy learns that they are in use
        elif not (namespace.registered and namespace.client.ready):
            if self._wait_for_workers(state):
                return False
        elif not self._renew_answer(state, own_tokens):
            return False
        else:
            # A lookup that is still in flight is late, or would only replace an answer that is good enough.
            is_in_flight = state.in_flight is not None
            awaited = state.tiers if wait.tier.is_awaited else NOTHING_AWAITED
            scan.is_late = (is_in_flight or wait.lookup.waits_no_more) and lookups.lacks_answer(state)
            may_ask_tails = may_have_tail and not is_in_flight and not lookups.has_failed(state)
            scan.show(state.answer, awaited, may_ask_tails=may_ask_tails)
        wait.lookup.since = None
        return True

    def look_up_tails(self, state: RequestState, own_tokens: int) -> bool:
        """Look up the tails that vLLM wanted in its scan, with the chunks, and prepare a second scan. Returns as
        ``prepare_scan``."""
        shortest_first = reversed(state.scan.tails.wanted)  # in the order of the prompt, as chunks
        state.tails = self._lookups.groups.hashes_of(shortest_first)
        self._lookups.look_up(state)
        has_all = state.scan.engine_has_all
        may_scan = self.prepare_scan(state, own_tokens, engine_has_all=has_all, may_have_tail=True)
        state.scan.tails.may_ask = False  # the second scan takes what is known
        return may_scan

    def _renew_answer(self, state: RequestState, own_tokens: int) -> bool:
        """Take the answer that has come; if it is time to look up again, do so, and take the next answer if that comes
        in a moment. Return False if the request waits for it, or for its turn to be looked up: then it is parked."""
        wait = state.wait
        if self._lookups.take_answer(state) or state.answer is None:
            # A new answer is judged here too: below the next lookup may be in flight, while which no wait for a tier
            # ends, and where steps are long that would be so each time. An older answer is judged below only: the next
            # one may show that all has come.
            self._judge_tier_wait(state)
        # One that has an answer, and has waited as long as it may for a newer one, is not looked up again.
        is_due, since = self._lookups.is_due(state), wait.lookup.since
        if is_due and state.answer is not None and since is not None:
            allowed_s = self._allowed_s(state, state.request.num_tokens - own_tokens)  # only now: it sums up requests
            is_due = self._lookups.is_due(state, may_wait=self._engine_clock.read() < since + allowed_s)
        if is_due and not self._look_up_in_turn(state, own_tokens):
            return False
        if (lookup := state.in_flight) is not None:
            if not lookup.future.done:
                self._wait_for_answer(state, lookup)
            if not lookup.future.done:
                self._give_up_if_late(state, lookup, own_tokens)
            self._lookups.take_answer(state)
        self._judge_tier_wait(state)  # by that answer; or the lookup was given up, or the connection lost
        if (lookup := state.in_flight) is None or lookup.given_up:
            return True
        awaits_tails = state.scan.tails.is_awaited = lookup.asks_tails_beyond(state.answer)
        facts = self._facts(state, answer_comes=True, needs_answer=awaits_tails or self._lookups.lacks_answer(state))
        if (following := next_wait(facts)) is NO_WAIT:
            return True
        wait.lookup.begin(lookup.sent_at_engine)
        self._park(state, own_tokens, following)
        return False

    def found_before(self, state: RequestState, own_tokens: int) -> FoundTokens | None:
        """Return the result of a request's last scan, if another one would find the same; else None.

        Before ``prepare_scan``, that is by what is known: an answer that has come since is not taken yet.
        """
        found = state.wait.found
        if found is None or state.answer is None or not state.answer.usable:
            return None
        if found.basis != self._basis(state, own_tokens):
            return None
        return found

    def loadable(self, state: RequestState, own_tokens: int) -> tuple[int, int] | None:
        """Return the fewest and the most tokens that a request's scan could find by the answer that has come. None if
        nobody can say before ``prepare_scan``: no answer has come, or its lease is over, so that it is asked again, or
        blocks come up from tiers, which the next answer will show."""
        lookup = state.in_flight
        answer = lookup if lookup is not None and lookup.future.done else state.answer
        if answer is None or answer.future.failed or not answer.usable:
            return None
        self._lookups.read_answer(answer)
        if answer.may_wait and not state.wait.tier.has_ended:
            return None
        return max(0, answer.least_tokens - own_tokens), max(0, answer.most_tokens - own_tokens)

    def take_scan(self, state: RequestState) -> bool:
        """Return whether a request behind another load may be scanned in this step, and count that."""
        if may_scan := self._hashes_left > 0:
            self._hashes_left -= len(state.request.block_hashes)
        return may_scan

    def record_scan(self, state: RequestState, own_tokens: int, tokens: int | None) -> None:
        """Record the result of a scan: ``tokens`` that can be loaded; None if the request waits for promotions, or for
        another request's load of the same blocks. Then it is not scanned again before that ends."""
        if self._parked.is_parked(state.request.request_id, own_tokens):
            return  # for the answer about its tails
        if tokens is not None:
            state.wait.found = FoundTokens(tokens, self._basis(state, own_tokens))
        elif (following := next_wait(self._facts(state, scan_deferred=True))) is not NO_WAIT:
            self._park(state, own_tokens, following)

    def _basis(self, state: RequestState, own_tokens: int) -> ScanBasis:
        """Return what a scan would depend on now: on no answer if the last ``prepare_scan`` showed none, because the
        engine has all of the prompt or nothing of it may be loaded."""
        answer = state.answer if state.scan.answer is not None else None
        return ScanBasis(answer, own_tokens, state.wait.tier.is_awaited, self._lookups.load_changes)

    # --- waits -------------------------------------------------------------------------------------

    def _facts(
        self,
        state: RequestState,
        *,
        answer_comes: bool = False,
        needs_answer: bool = False,
        scan_deferred: bool = False,
    ) -> WaitFacts:
        """Return what ``next_wait`` decides by; it was judged just now whether the request waits for a tier."""
        tier, answer = state.wait.tier, state.answer
        return WaitFacts(
            self._engine_clock.read(),
            answer_comes=answer_comes,
            needs_answer=needs_answer,
            awaits_tier=tier.is_awaited and answer is not None,
            asks_store=answer is not None and bool(answer.future.asking),
            scan_deferred=scan_deferred,
            was_preempted=scan_deferred and state.request.num_preemptions > 0,
            late_at=state.wait.lookup.late_at,
            ask_at=tier.ask_at,
            judge_at=tier.judge_at,
        )

    def _allowed_s(self, state: RequestState, tokens: int) -> float:
        """Return how long a request may wait for an answer about ``tokens`` of it."""
        return self._answer_wait.allowed_s(self._times.seconds(state.request.request_id, tokens))

    def _wait_for_workers(self, state: RequestState) -> bool:
        """Return whether a request waits for the workers to report their memory, or its registration."""
        namespace, client = self._namespace, self._namespace.client
        if client.unreachable:
            return False
        if namespace.current is None:
            return namespace.awaits_reports()
        if namespace.awaits_registration(self._deadline_s):
            return True
        if not client.ready:
            return False
        # The workers have registered, or will not. The last report of an idle engine may be old: have it run steps for
        # a new one, no longer than the shortest prompt computes. An engine that computes runs them anyway.
        now = self._engine_clock.read()
        since = state.wait.lookup.begin(now)
        return self._engine_clock.is_idle and now - since < MIN_COMPUTED_S

    def _look_up_in_turn(self, state: RequestState, own_tokens: int) -> bool:
        """Look a request up, or park it if many others were looked up in this step. Return whether it continues.

        One that was parked for as long as it may wait for an answer is looked up all the same. If the queue is full it
        continues without, and waits for no answer any more.
        """
        request_id, keys = state.request.request_id, self._lookups.keys_of(state)
        if keys and not self._queue.take_lookup(request_id, keys):
            wait, now = state.wait.lookup, self._engine_clock.read()
            until = wait.begin(now) + self._allowed_s(state, state.request.num_tokens)
            if now < until and not wait.waits_no_more:
                self._parked.park(request_id, Parked(own_tokens, until, lookup_keys=keys))
                return False
            if self._queue.is_full:
                wait.waits_no_more = True
                return True
        self._lookups.look_up(state)
        return True

    def _wait_for_answer(self, state: RequestState, lookup: KeyedLookup) -> None:
        """Wait a moment for the answer to a request's lookup, or only read it if it has arrived."""
        answer_wait = self._answer_wait
        is_needed = self._lookups.lacks_answer(state) or lookup.asks_tails_beyond(state.answer)
        must_come = is_needed and not lookup.given_up
        # An idle engine waits too for an answer that only shows which blocks have come up.
        shows_promoted = state.wait.tier.is_awaited and self._engine_clock.is_idle and answer_wait.left_s > 0
        if shows_promoted or (must_come and answer_wait.may_wait(self._engine_clock.read())):
            self._wait(lookup.future, must_come=must_come)
        else:
            self._namespace.client.poll()

    def _give_up_if_late(self, state: RequestState, lookup: KeyedLookup, own_tokens: int) -> None:
        """Set when the answer to a request's lookup is late; if that is now, wait for it no longer."""
        answer_wait, wait = self._answer_wait, state.wait
        tokens = state.request.num_tokens - own_tokens
        if state.answer is not None and lookup.asks_tails_beyond(state.answer):
            tokens = min(tokens, self._lookups.groups[0].tokens_per_chunk)  # a tail saves no more
        allowed_s = self._allowed_s(state, tokens)
        earliest = wait.tier.until if wait.tier.is_awaited else LONG_AGO  # until then promoted blocks may come
        wait.lookup.set_late_at(lookup.sent_at_engine, allowed_s, earliest=earliest)
        now = self._engine_clock.read()
        if now >= wait.lookup.late_at and not lookup.given_up:
            lookup.given_up = wait.tier.has_ended = True
            if allowed_s:  # else it was not waited for, as the last ones were late: that says nothing new
                answer_wait.record_reply(now - lookup.sent_at_engine)
            self._counters[metrics.LATE_LOOKUPS] += 1
            self._late_times.add(self._lookups.clock())

    def _judge_tier_wait(self, state: RequestState) -> None:
        """Begin, continue or end a request's wait for promotions. It waits while promoting and loading are expected to
        be faster than computing it after the earlier prompts. Else it loads the blocks that are ready."""
        tier_wait, answer, client = state.wait.tier, state.answer, self._namespace.client
        was_awaited, tier_wait.is_awaited = tier_wait.is_awaited, False
        if answer is None or not answer.may_wait or tier_wait.has_ended:
            return
        if self._lookups.has_failed(state) or not client.ready:
            return  # the daemon does not report promotions
        now, future, tokens = self._engine_clock.read(), answer.future, answer.awaitable_tokens
        computed_s, loaded_s = inf, 0.0
        if self._do_no_harm:
            computed_s = self._times.seconds(state.request.request_id, tokens)
            loaded_s = self._harm.load_s(tokens)
        # The daemon's estimate is of all tiers: that of an excluded one may make the wait seem longer than it is.
        expected_s = max(0.0, future.answered_at + future.wait_s - self._lookups.clock())
        asks_store = bool(future.asking) and not answer.comes_from(answer.tiers - {SHARED})
        if asks_store:
            expected_s = inf  # a store mostly has no blocks of a new prompt
        is_worth_it = expected_s + loaded_s <= computed_s
        next_answer_comes = was_awaited and state.in_flight is not None and not state.in_flight.given_up
        tier_wait.judge(
            now,
            longest_s=min(self._disk_wait_s, computed_s),
            is_worth_it=is_worth_it,
            is_estimated=bool(future.wait_s),
            asks_store=asks_store,
            next_answer_comes=next_answer_comes,
        )
