"""Lookups of the requests that vLLM has not scheduled: when they are sent, renewed, taken and released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.adapter_contents import AdapterContents
from kvoffd_client.vllm.chunk_groups import ChunkGroups, wire_keys
from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.hint_sender import HintSender
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.next_lookup import FAILED_PAUSE_S, LookupFacts, next_lookup_s, retry_pause_s
from kvoffd_client.vllm.prompt_queue import MAX_AHEAD, PromptQueue
from kvoffd_client.vllm.request_state import RequestState
from kvoffd_client.vllm.waits import AnswerWait, EngineClock
from kvoffd_proto.messages import COMING, GroupKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

CHECKED_AHEAD = 16
"""Prompts at the head of the queue whose answers are checked, and renewed if they are old, when a step is made."""


class RequestLookups:
    """The lookups of an engine's requests. Which of them are looked up, and when, is up to the ``queue``.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters, which this adds to.
        answer_wait: learns how long answers take.

    Attributes:
        groups: the offloaded groups, by index on the wire.
        requests: states of unfinished requests by id.
        queue: the requests that are not scheduled.
        hint_sender: sends their hints.
        loading: by request, the lookup whose lease its load reads under, until vLLM has handled the load's end.
        load_changes: number of loads that have begun or ended.
        enabled: whether requests may be loaded.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        adapters: AdapterContents,
        groups: ChunkGroups,
        engine: EngineFacts,
        clock: Callable[[], float],
        engine_clock: EngineClock,
        answer_wait: AnswerWait,
        counters: metrics.Counters,
    ) -> None:
        self.namespace, self.groups, self.clock = namespace, groups, clock
        self._adapters, self._counters = adapters, counters
        self._engine_clock, self._answer_wait = engine_clock, answer_wait
        self.requests: dict[str, RequestState] = {}
        self.loading: dict[str, KeyedLookup] = {}
        self.load_changes = 0
        self.enabled = True
        self._only_prefixes = engine.only_prefixes
        self.queue = PromptQueue(engine.step_tokens, by_priority=engine.by_priority)
        self.hint_sender = HintSender(namespace, adapters, groups, clock, counters, engine.tail_tokens)

    # --- sending -----------------------------------------------------------------------------------

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
            self.hint_sender.send_start_hints(state)  # now, although its lookup may have to wait
        self.queue.add(request.request_id, request.priority)
        # vLLM will come to an urgent one before those that are looked up ahead, so it does not wait for a place among
        # them.
        if self.queue.outranks(request.priority) and self.queue.take_lookup(request.request_id, self.keys_of(state)):
            self.look_up(state)
        self._look_up_ahead()

    def begin_step(self) -> None:
        """Look up the next prompts of the queue, and again those whose answers are old: the next step need not wait."""
        self._look_up_ahead()
        self._renew_ahead()

    def _look_up_ahead(self) -> None:
        """Look up the first prompts of the queue that are not, as long as there is space in the window."""
        if not self.namespace.serves:
            return
        for _ in range(MAX_AHEAD):
            if not self.queue.has_space or (request_id := self.queue.take_next()) is None:
                break
            state = self.requests[request_id]
            if not state.request.is_finished():  # vLLM reports an aborted one later in the step
                self.look_up(state)

    def _renew_ahead(self) -> None:
        """Look up again the first prompts of the queue whose answers are old."""
        if not self.namespace.serves:
            return
        for request_id in self.queue.first_ahead(CHECKED_AHEAD):
            state = self.requests[request_id]
            if state.request.is_finished():
                continue
            self.take_answer(state)
            may_wait = state.answer is not None and state.answer.may_wait  # then the next scan decides
            if not may_wait and self.is_due(state):
                self.look_up(state)

    def look_up(self, state: RequestState) -> None:
        """Look up all complete chunks of a request, and its ``tails``, if lookups are possible.

        A daemon counts a prompt once, when it is reported, and no tails: there are many, of which one is a hit at most.
        So the lookup that it is to count asks for none. A request shorter than a chunk has only tails, and is not
        counted.
        """
        request, namespace = state.request, self.namespace
        if not self._adapters.identify(state) or not namespace.serves:
            return
        self.hint_sender.send_start_hints(state)
        if not self.may_load(state):
            return
        client, wait, adapter = namespace.client, state.wait, state.adapter.content
        sender = client, client.session_id
        is_counted = wait.counted_by == sender
        hashes = [group.hashes(request.block_hashes) for group in self.groups]
        tails: Mapping[int, Sequence[bytes]] = state.tails if is_counted or not any(hashes) else {}
        chunks = {index: found for index, found in enumerate(hashes) if found or index in tails}
        if not chunks:
            return
        message = [
            GroupKeys(index, b"".join(wire_keys([*found, *tails.get(index, ())], adapter)))
            for index, found in chunks.items()
        ]
        stored_count, again = client.stored.count, is_counted or bool(tails)  # the count as it was before the lookup
        future = client.lookup(message, again=again, reported=True, peer=state.hints.peer, giver=state.hints.giver)
        was_sent = future.lease_id != 0
        if was_sent and not again:
            wait.counted, wait.counted_by = future, sender
        state.in_flight = state.last = KeyedLookup(
            future,
            self.groups,
            adapter,
            chunks,
            tails,
            sent_at=self.clock(),
            sent_at_engine=self._engine_clock.read(),
            tiers=state.tiers,
            only_prefixes=self._only_prefixes,
            stored=client.stored,
            compared=stored_count,
            given_up=wait.lookup.waits_no_more,
        )
        self._counters[metrics.LOOKUPS] += 1
        self.queue.enter_window(request.request_id, request.num_prompt_tokens, request.priority, future)

    def keys_of(self, state: RequestState) -> int:
        """Return the number of keys of a request's complete chunks."""
        hashes = len(state.request.block_hashes)
        return sum(hashes // group.hashes_per_chunk for group in self.groups)

    def may_load(self, state: RequestState) -> bool:
        """Return whether blocks may be loaded for a request."""
        is_barred = state.disabled or state.load_failed or state.request.skip_reading_prefix_cache
        return self.enabled and not is_barred

    # --- answers -----------------------------------------------------------------------------------

    def take_answer(self, state: RequestState) -> bool:
        """Replace a request's answer by the one that has come, unless that failed, or its lease is about to end.

        Returns whether it was replaced.
        """
        if (answer := state.answer) is not None and not answer.usable:
            self.end_lease(answer)
            state.answer = None
        if (answered := state.in_flight) is None or not answered.future.done:
            return False
        state.in_flight = None
        if answered.future.failed:
            self.end_lease(answered)
            state.failed_at = answered.future.answered_at
            return False
        if not answered.usable:
            self.end_lease(answered)  # it came long ago, so it is asked again
            return False
        self.read_answer(answered)
        # The new lease pins the same blocks, so nothing is unpinned in between.
        self.end_lease(state.answer)
        state.answer = answered
        state.wait.promoted.record(answered)
        if answered.may_wait:
            now, tier = self._engine_clock.read(), state.wait.tier
            answered_at = now - (self.clock() - answered.future.answered_at)  # by the engine's clock
            waited_s = now - tier.began if tier.began is not None else 0.0
            # The daemon's estimate is of all tiers: one that the request excludes may be slower than those it allows.
            has_excluded = answered.comes_from(COMING - answered.tiers)
            tier.ask_at = answered_at + retry_pause_s(waited_s, 0.0 if has_excluded else answered.future.wait_s)
        return True

    def read_answer(self, lookup: KeyedLookup) -> None:
        """Read an answer once it has come, and record how long it took."""
        if lookup.future.done and not (lookup.is_read or lookup.future.failed):
            lookup.read()
            self._answer_wait.record_reply(lookup.future.answered_at - lookup.sent_at)

    def has_failed(self, state: RequestState) -> bool:
        """Return whether a request's last lookup failed a moment ago, so that no further one is sent yet."""
        return self.clock() - state.failed_at < FAILED_PAUSE_S

    def lacks_answer(self, state: RequestState) -> bool:
        """Return whether a request has no answer, or one that is known to be old: it should wait for the next one."""
        return state.answer is None or state.answer.is_old(self.namespace.client.stored)

    def is_due(self, state: RequestState, *, may_wait: bool = True) -> bool:
        """Return whether a request should be looked up now, by the table in next_lookup.py. ``may_wait``: it has time
        to wait for the answer."""
        answer, tier, now = state.answer, state.wait.tier, self.clock()
        is_in_flight, failed_s = state.in_flight is not None, now - state.failed_at
        if answer is None or is_in_flight:
            facts = LookupFacts(is_in_flight, failed_s, has_answer=answer is not None)
        else:
            future, keys, chunks = answer.future, self.keys_of(state), answer.asked_chunks
            facts = LookupFacts(
                is_in_flight,
                failed_s,
                may_wait=may_wait,
                is_outdated=keys > chunks or answer.is_old(self.namespace.client.stored),
                has_all=answer.all_ready and future.leased,
                awaits_tier=answer.may_wait and not tier.has_ended,
                until_stale_s=future.stale_at - now,
                until_ask_s=tier.ask_at - self._engine_clock.read() if answer.may_wait else 0.0,
                answered_s=now - future.answered_at,
                chunks=chunks,
            )
        return next_lookup_s(facts) <= 0.0

    # --- leases ------------------------------------------------------------------------------------

    def begin_load(self, state: RequestState) -> KeyedLookup | None:
        """Take a request's answer for its load, and end its other leases. None if it has no answer."""
        if (answer := state.answer) is None:
            return None
        state.answer = None
        self.end_leases(state)
        self.loading[state.request.request_id] = answer
        self.load_changes += 1
        return answer

    def end_load(self, request_id: str) -> None:
        """End the lease of a request's load, and wake the prompts that wait for a load's end."""
        self.queue.parked.load_ended()
        self.load_changes += 1
        self.end_lease(self.loading.pop(request_id, None))

    def load_failed(self, state: RequestState) -> None:
        """Look a request up no more, because its load failed: it is recomputed, and all its blocks are stored."""
        self.end_leases(state)
        state.load_failed, state.last = True, None

    def end_leases(self, state: RequestState) -> None:
        """Release the leases of a request that runs without a load or has ended. Its last lookup stays known."""
        self.end_lease(state.answer)
        self.end_lease(state.in_flight)
        state.answer = state.in_flight = None

    def end_lease(self, lookup: KeyedLookup | None) -> None:
        """End a lookup's lease, if it has one or may have one."""
        if lookup is not None and (lookup.future.leased or lookup.future.failed or not lookup.future.done):
            self.namespace.client.release(lookup.future.lease_id)

    def reset(self) -> None:
        """End all leases, those of running loads too, and forget all answers."""
        for state in self.requests.values():
            self.end_leases(state)
            state.last = None
        for lookup in self.loading.values():
            self.end_lease(lookup)
        self.loading.clear()
        self.queue.parked.wake_all()
