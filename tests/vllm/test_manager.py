"""The scheduler's half over a fake client: answers, deadlines, leases, loads and stores of requests."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.lora.request import LoRARequest
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvoffd_client
from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_client.vllm import hint_sender, prompt_queue
from kvoffd_client.vllm import hints as hints_module
from kvoffd_client.vllm.adapter_contents import ANSWER_PATIENCE_S, ASK_AGAIN_S
from kvoffd_client.vllm.adapters import UNREADABLE
from kvoffd_client.vllm.chunk_groups import NO_LEASE, ChunkGroup
from kvoffd_client.vllm.connector_metadata import FailedJob, WorkerNews
from kvoffd_client.vllm.do_no_harm import MIN_LOAD_SAMPLES
from kvoffd_client.vllm.engine_namespace import MemoryState, Unconnected
from kvoffd_client.vllm.hints import HintsOption
from kvoffd_client.vllm.metrics import (
    CONNECTED,
    DEFERRED_STORES,
    DEFINITIONS,
    FAILED_LOADS,
    FAILED_STORES,
    LATE_LOOKUPS,
    LOAD_RATE,
    LOOKUP_WAITS,
    LOOKUPS,
    PREFILL_RATE,
)
from kvoffd_client.vllm.next_lookup import MIN_RETRY_PAUSE_S
from kvoffd_client.vllm.waits import MAX_STOOD_STILL_S
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import COMING, MAX_GIVER, SHARED, GroupKeys, Outcome, PromptReport
from tests.vllm.manager_harness import CHUNK_TOKENS, HASHES, KEYS, ManagerHarness
from tests.vllm.vllm_fakes import FakeSchedulerClient, block_hash, key

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY
WINDOWS = ChunkGroup(7, 1, CHUNK_TOKENS)


@pytest.fixture
def harness() -> ManagerHarness:
    return ManagerHarness()


# --- lookups ---------------------------------------------------------------------------------------


def test_an_answer_is_awaited_no_longer_than_computing_takes(harness: ManagerHarness) -> None:
    context = harness.request()
    harness.prefill.tokens_per_second = 1000.0
    computed = harness.requests["r"].num_tokens - 64
    for waited_s, result in ((0.063, RETRY), (0.002, MISS), (1.0, MISS)):
        harness.clock.now += waited_s
        harness.scan(computed=computed)
        assert harness.results(context) == [result] * 3
    assert harness.counted()[LATE_LOOKUPS] == 1
    assert report_of(harness).outcome is Outcome.LATE, "operators see it among the misses"


@pytest.mark.parametrize("do_no_harm", [True, False])
def test_prompts_do_not_wait_for_a_daemon_whose_answers_are_all_late(do_no_harm: bool) -> None:
    """One late answer is no verdict on the next prompt, and longer prompts wait as before."""
    harness = ManagerHarness(do_no_harm=do_no_harm)
    harness.prefill.tokens_per_second = 1000.0

    def waits(name: str, tokens: int, after_s: float) -> bool:
        context = harness.request(name)
        harness.clock.now += after_s
        harness.scan(name, computed=harness.requests[name].num_tokens - tokens)
        return harness.results(context) == [RETRY] * 3

    for number in range(3):
        assert waits(f"in time {number}", 30, 0.02)
        assert waits(f"late {number}", 30, 0.04) is not do_no_harm
    for number in range(3):
        assert waits(f"short {number}", 30, 0.001) is not do_no_harm, "three were given up after 40 ms"
    assert waits("long", 80, 0.001)
    harness.client.answer(set(), index=6)
    harness.manager.on_request_finished(ReqContext("short 0"))
    assert waits("next", 30, 0.001), "the first short one's answer took 4 ms"


def test_a_failed_lookup_is_a_miss_and_not_repeated_at_once(harness: ManagerHarness) -> None:
    context = harness.request()
    harness.client.fail()
    assert not harness.scan()
    assert harness.results(context) == [MISS] * 3
    harness.clock.now += 1.1
    assert harness.scan()


def test_an_old_answer_with_misses_is_refreshed_under_its_lease(harness: ManagerHarness) -> None:
    context = harness.request(ready={block_hash(1)})
    harness.clock.now += 1.5
    assert harness.scan()
    assert harness.results(context) == [HIT, MISS, MISS], "vLLM passes a request that waits"
    assert harness.client.released == []
    harness.client.answer(HASHES)
    harness.scan()
    assert harness.results(context) == [HIT] * 3
    assert harness.client.released == [harness.client.asked[0][0].lease_id]
    harness.clock.now += 100
    assert not harness.scan(), "a complete one is not refreshed"
    harness.client.asked[-1][0].stale_at = harness.clock.now + 0.5
    assert harness.scan(), "before its lease ends"
    assert harness.results(context) == [HIT] * 3


def test_the_answer_of_another_client_is_old(harness: ManagerHarness) -> None:
    """As after a change of the weights: it is about another namespace. That both know of no stores says nothing."""
    context = harness.request(ready=set())
    assert harness.results(context) == [MISS] * 3
    harness.client = FakeSchedulerClient(harness.clock)
    harness.manager.namespace.client = cast(SchedulerClient, harness.client)
    assert harness.scan()
    assert harness.results(context) == [RETRY] * 3


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from(harness: ManagerHarness) -> None:
    context = harness.request(ready=HASHES)
    harness.client.asked[0][0].stale_at = 0.0
    assert harness.scan()
    assert harness.results(context) == [RETRY] * 3


@pytest.mark.parametrize("ends", ["its lease ends", "it grows old"])
def test_an_answer_that_was_asked_for_early_is_awaited_once_it_is_needed(harness: ManagerHarness, ends: str) -> None:
    """The one before was good when the lookup was sent."""
    context = harness.request(ready={block_hash(1)})
    harness.clock.now += 1.5
    assert harness.scan()
    assert harness.results(context) == [HIT, MISS, MISS], "the next answer is not needed yet"
    if ends == "its lease ends":
        harness.client.asked[0][0].stale_at = 0.0
    else:
        harness.client.stored.add([block_hash(2)])
    assert not harness.scan()
    assert harness.results(context) == [RETRY] * 3
    harness.client.answer(HASHES)
    harness.scan()
    assert harness.results(context) == [HIT] * 3


@pytest.mark.parametrize("is_reset", [False, True])
def test_the_lookup_after_a_change_of_the_weights_is_awaited_as_long_as_a_first_one(is_reset: bool) -> None:
    """A lookup's deadline is 0.1 s; the time before the change was none of the daemon's."""
    harness = ManagerHarness(do_no_harm=False)
    context = harness.request()
    harness.scan()
    harness.clock.now += 0.09
    harness.manager.namespace.leave(engine_cache_kept=not is_reset)
    if is_reset:
        harness.manager.reset_cache()
    harness.report("other weights")
    harness.scan()
    harness.clock.now += 0.05
    harness.scan()
    assert harness.results(context) == [RETRY] * 3
    harness.clock.now += 0.06
    harness.scan()
    assert harness.results(context) == [MISS] * 3


def test_the_lease_of_an_answer_that_has_grown_stale_is_ended(harness: ManagerHarness) -> None:
    harness.request(ready=HASHES)
    future = harness.client.asked[0][0]
    future.stale_at = 0.0
    assert harness.scan()
    assert harness.client.released == [future.lease_id], "the daemon holds it for a while longer"


def test_nothing_of_an_earlier_scan_is_loaded_once_a_worker_has_a_problem(harness: ManagerHarness) -> None:
    harness.request(ready=HASHES)
    state = harness.manager.requests["r"]
    harness.manager.waits.record_scan(state, 0, 3 * CHUNK_TOKENS)
    assert harness.manager.waits.found_before(state, 0) is not None
    harness.report("weights", problem="its memory cannot be shared")
    assert harness.prepare("r", 0)
    assert harness.manager.waits.found_before(state, 0) is None


def test_a_prompt_that_was_aborted_is_not_looked_up(harness: ManagerHarness) -> None:
    """vLLM tells of it after the next step begins."""
    harness.request("renewed", ready=set())
    for name in ("renewed", "first"):
        if name not in harness.requests:
            harness.new(name)
            harness.manager.lookups.queue.add(name, 0)
        harness.end(name, 0)
    asked = len(harness.client.asked)
    harness.clock.now += 100.0
    harness.manager.lookups.begin_step()
    assert len(harness.client.asked) == asked


def test_a_request_without_a_load_releases_its_leases_and_still_stores(harness: ManagerHarness) -> None:
    context = harness.request(ready={block_hash(1)})
    harness.clock.now += 2
    assert harness.scan()
    harness.manager.scheduled(harness.requests["r"], 0)
    assert sorted(harness.client.released) == [ticket.lease_id for ticket, _ in harness.client.asked]
    assert harness.offer(context) is None, "what is stored may have gone since"
    harness.client.answer({block_hash(2)})
    assert harness.offer(context) == [KEYS[0], KEYS[2]]


# --- tiers -----------------------------------------------------------------------------------------


class DiskHarness(ManagerHarness):
    """One request of 3,000 tokens, with blocks that come up from disk; 1,000 tokens are computed in a second."""

    def __init__(self, *, do_no_harm: bool = True, disk_wait_s: float = 120.0, rate: float = 1000.0) -> None:
        super().__init__(do_no_harm=do_no_harm, disk_wait_s=disk_wait_s)
        self.prefill.tokens_per_second = rate
        self.context = self.request()

    def ask(self, coming: int, wait_s: float = 0.0, asking: int = 0) -> list[LookupResult]:
        """The last ``coming`` blocks come from disk, or perhaps from a store that was asked; the others are ready."""
        self.scan()
        if not self.client.asked[-1][0].done:
            names = [block_hash(number) for number in range(1, 4)]
            ready, comes = set(names[: 3 - coming]), names[3 - coming :]
            tiers = {"shared": comes, "asking": asking} if asking else {"coming": comes}
            self.client.answer(ready, wait_s=wait_s, **tiers)  # type: ignore[arg-type]
            self.scan()
        return self.results(self.context)


def test_blocks_from_disk_are_waited_for_and_count_as_disk_hits() -> None:
    harness = DiskHarness()
    assert harness.ask(coming=2) == [HIT, PENDING, PENDING]
    assert not harness.manager.has_pending_work(), "a pause would wait for it, and the request for the pause's end"
    harness.clock.now += 0.001
    harness.manager.begin_step([1])
    harness.ask(coming=1)
    assert harness.client.again == [False], "not in a hurry"
    harness.clock.now += 0.005
    assert harness.ask(coming=1) == [HIT, HIT, PENDING]
    assert harness.client.again == [False, True]
    harness.clock.now += 0.005
    assert harness.ask(coming=0) == [HIT] * 3
    assert len(harness.client.released) == 2, "each new lease pins what the one before did"
    harness.manager.scheduled(harness.requests["r"], 3 * CHUNK_TOKENS)
    sources = [harness.manager.get_load_source(item, harness.context) for item in KEYS]
    assert sources == [CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.DISK]


def test_an_idle_engine_rests_while_blocks_come_up() -> None:
    """It would make empty steps as fast as it can, and take the CPU from the daemon."""
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=1.0)
    for tokens, rests in (([], True), ([1], False)):
        harness.manager.begin_step(tokens)
        before = harness.clock.now
        for _ in range(10):
            harness.scan()
        assert (harness.clock.now - before > 0.001) is rests
        assert harness.clock.now - before < 0.01, "new requests wait for the end of the step"


def test_an_idle_engine_does_not_rest_before_it_comes_to_a_new_prompt() -> None:
    """vLLM comes to the one that waits for the disk first."""
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=1.0)
    for comes, rests in ((True, False), (False, True)):
        harness.manager.begin_step([])
        if comes:
            harness.new("new")
        before = harness.clock.now
        harness.scan()
        assert (harness.clock.now > before) is rests


def test_the_rest_of_an_idle_engine_says_nothing_of_the_daemon() -> None:
    """It ends with an answer or after a moment. If none comes, no wait has timed out, and the next prompt may wait."""
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=1.0)
    harness.clock.now += 0.2
    harness.manager.begin_step([])
    assert harness.scan(), "what has come up by now is asked"
    harness.counted()
    harness.manager.begin_step([])
    harness.scan()
    assert harness.manager.get_stats() is None
    harness.request("new")
    harness.manager.begin_step([])
    harness.scan("new")
    assert harness.counted()[LOOKUP_WAITS] == 1


def test_the_next_answer_is_waited_for_as_long_as_the_blocks(harness: ManagerHarness) -> None:
    """A late answer says nothing of the blocks: seconds of computing hang on them."""
    harness = DiskHarness()
    assert harness.ask(coming=2, wait_s=1.5)[1] is PENDING
    harness.clock.now += 0.06
    assert harness.scan()
    for waited_s, result in ((1.5, PENDING), (0.5, MISS)):  # computing two blocks takes 2 s
        harness.clock.now += waited_s
        harness.scan()
        assert harness.results(harness.context) == [HIT, result, result]
    harness.client.answer(HASHES)
    harness.scan()
    assert harness.results(harness.context) == [HIT] * 3, "it came before the request ran"


@pytest.mark.parametrize(("wait_s", "waits"), [(0.0, True), (1.9, True), (2.1, False)])
def test_blocks_are_waited_for_that_are_up_sooner_than_computed(wait_s: float, waits: bool) -> None:
    harness = DiskHarness()
    assert harness.ask(coming=2, wait_s=wait_s) == [HIT, PENDING, PENDING], "what is expected at first says little"
    harness.clock.now += 0.09
    assert harness.ask(coming=2, wait_s=wait_s) == [HIT, *[PENDING if waits else MISS] * 2]


def test_before_anything_is_measured_an_engines_report_tells_the_rate() -> None:
    """It was restarted since. Without any report a rate is assumed."""
    for reported, waits in ((1000.0, True), (0.0, False)):
        harness = DiskHarness(rate=0.0)
        harness.client.reported_prefill_rate = reported
        harness.ask(coming=2, wait_s=1.0)
        harness.clock.now += 0.1
        assert harness.ask(coming=2, wait_s=1.0)[1] is (PENDING if waits else MISS)


def test_loading_counts_too() -> None:
    harness = DiskHarness()
    for _ in range(MIN_LOAD_SAMPLES):
        harness.manager.harm.record_load(1000, 0.5)
    for wait_s, found in ((0.9, PENDING), (1.1, PENDING), (1.1, MISS)):  # a second to load, and two to compute
        harness.clock.now += 0.09
        assert harness.ask(coming=2, wait_s=wait_s)[1] is found


@pytest.mark.parametrize("loads", [[(1000, 9.0)], [(64, 0.5)] * 9], ids=["one", "short"])
def test_loads_that_were_few_or_short_say_little_about_a_long_one(loads: list[tuple[int, float]]) -> None:
    """One that was slow, as after a restart, had all long prompts computed for two minutes."""
    harness = DiskHarness()
    for tokens, seconds in loads:
        harness.manager.harm.record_load(tokens, seconds)
    for _ in range(5):
        assert harness.ask(coming=2, wait_s=0.5)[1] is PENDING
        harness.clock.now += 0.09


def test_the_waiting_is_judged_anew_at_each_answer_and_ends_for_good() -> None:
    """What is up by then is loaded."""
    harness = DiskHarness()
    for coming, wait_s, found in (
        (3, 2.5, [PENDING] * 3),
        (2, 1.5, [HIT, PENDING, PENDING]),
        (1, 1.1, [HIT, HIT, PENDING]),  # a disk that stands still for a moment
        (1, 0.9, [HIT, HIT, PENDING]),
        (1, 1.2, [HIT, HIT, PENDING]),
        (1, 1.2, [HIT, HIT, MISS]),
    ):
        assert harness.ask(coming, wait_s) == found
        harness.clock.now += 0.09
    assert harness.ask(1, 0.1) == [HIT, HIT, MISS]
    report = report_of(harness, 2 * CHUNK_TOKENS)
    assert (report.covered_keys, report.reason) == ([2], "tier_late"), "what comes up now is late"


def test_a_preempted_request_waits_for_a_tier_anew() -> None:
    harness = DiskHarness()
    assert harness.ask(coming=1, wait_s=0.5) == [HIT, HIT, PENDING]
    harness.clock.now += 3.1
    assert harness.ask(coming=1, wait_s=0.5) == [HIT, HIT, MISS]
    schedule(harness, 2 * CHUNK_TOKENS)
    harness.manager.complete_load(KEYS, harness.context)
    harness.clock.now += 2.0
    harness.manager.begin_step([1])
    assert harness.ask(coming=1, wait_s=0.5) == [HIT, HIT, PENDING]


def test_what_hangs_costs_as_long_as_computing_takes() -> None:
    """Whatever the daemon expects."""
    harness = DiskHarness()
    began = harness.clock.now
    while PENDING in harness.ask(coming=3, wait_s=0.1):
        harness.clock.now += 0.06
    assert harness.clock.now - began == pytest.approx(3.0, abs=0.1)


def test_a_step_that_computes_another_prompt_does_not_end_the_wait() -> None:
    """It took longer than computing this one does; what came up meanwhile the next answer tells."""
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=0.5)
    harness.clock.now += 2.1
    assert harness.scan()
    assert harness.results(harness.context) == [HIT, PENDING, PENDING]
    harness.client.answer(HASHES)
    harness.scan()
    assert harness.results(harness.context) == [HIT] * 3


def test_where_every_step_is_long_the_wait_ends_all_the_same() -> None:
    """As where one prompt runs at a time: at each look an answer has come, and the next lookup is due."""
    harness = DiskHarness()
    began, looks = harness.clock.now, 0
    harness.ask(coming=2, wait_s=9.0)
    while MISS not in harness.results(harness.context):
        harness.clock.now += 2.1  # a step
        looks += 1
        harness.scan()
        for index, (future, _) in enumerate(harness.client.asked):
            if not future.done:
                harness.client.answer({block_hash(1)}, index, coming=[block_hash(2), block_hash(3)], wait_s=9.0)
    assert looks <= 3, harness.clock.now - began


def test_prompts_that_came_before_would_be_computed_before() -> None:
    """Eight at once wait for a disk that is twice as fast as computing: none of them is computed sooner."""
    harness = DiskHarness()
    contexts = [harness.context, *[harness.request(f"r{number}") for number in range(7)]]
    for number, context in enumerate(contexts):
        harness.scan(context.req_id)
        harness.client.answer(set(), number, [block_hash(one) for one in (1, 2, 3)], wait_s=1.5 * (number + 1))
        harness.scan(context.req_id)
        assert harness.results(context) == [PENDING] * 3


@pytest.mark.parametrize(("rate", "waits_s"), [(1000.0, 0.25), (100_000.0, 0.02)])
def test_a_store_that_does_not_say_what_it_has_is_waited_for_briefly(rate: float, waits_s: float) -> None:
    """A small part of what computing takes: of a new prompt it mostly has nothing."""
    harness = DiskHarness(rate=rate)
    assert harness.ask(coming=3, asking=3) == [PENDING] * 3
    began = harness.clock.now
    while PENDING in harness.ask(coming=3, asking=3):
        harness.clock.now += 0.005
    assert harness.clock.now - began == pytest.approx(waits_s, abs=0.011)


def test_prompts_that_a_store_was_asked_for_are_looked_up_again_in_their_order() -> None:
    """What a store has is promoted in the order of lookups: the first prompt must not come behind the others."""
    harness = DiskHarness()
    harness.request("s")
    harness.client.answer(set(), 1, shared=[block_hash(1)], asking=1, wait_s=0.02)
    harness.scan("s")
    harness.clock.now += 0.006
    harness.client.answer(set(), 0, shared=[block_hash(1)], asking=1, wait_s=0.02)
    harness.scan()
    for after_s, sent in ((0.006, False), (0.006, True)):
        harness.clock.now += after_s
        harness.manager.begin_step([1])
        assert [harness.scan(name) for name in ("r", "s")] == [sent, sent], "the second's answer is older"


@pytest.mark.parametrize("answers", [{"wait_s": 0.5}, {"wait_s": 2.5}, {"asking": 2}, None])
def test_an_idle_engine_does_not_count_the_time_in_which_it_stood_still(answers: dict[str, Any] | None) -> None:
    """The machine gave nobody a CPU: what it waits for comes right afterwards, or does not."""
    harness = DiskHarness()
    harness.manager.begin_step([])

    def waits() -> bool:
        """Of nothing but the lookup, if there are no answers."""
        found = harness.ask(coming=2, **answers) if answers else (harness.scan(), harness.results(harness.context))[1]
        return MISS not in found

    assert waits()
    harness.clock.now += 4.0
    assert waits()
    began = harness.clock.now
    while waits():
        harness.clock.now += 0.01
    assert harness.clock.now - began < 2.1, "as long as computing takes at most"


def test_the_time_before_a_request_is_no_standstill_of_its(harness: ManagerHarness) -> None:
    harness.manager.begin_step([])
    harness.clock.now += 60.0
    context = harness.request()
    harness.clock.now += 4.0
    harness.scan()
    assert harness.results(context) == [RETRY] * 3


def test_an_idle_engine_whose_steps_are_long_does_not_wait_for_ever() -> None:
    """As where other ranks of data parallelism compute."""
    harness = DiskHarness()
    harness.manager.begin_step([])
    began = harness.clock.now
    while MISS not in harness.ask(coming=2, wait_s=0.5):
        harness.clock.now += 1.0
    assert harness.clock.now - began < 2.0 + MAX_STOOD_STILL_S + 2.0


def test_a_prompt_that_waits_for_a_tier_is_one_that_waits() -> None:
    """The time until the next prompt comes is not that one's alone."""
    harness = DiskHarness()
    harness.ask(coming=1, wait_s=2.0)
    harness.manager.lookups.queue.parked.wake_all()
    assert harness.manager.lookups.queue.has_waiting


def test_a_daemon_that_is_gone_is_not_waited_for() -> None:
    for do_no_harm in (True, False):
        harness = DiskHarness(do_no_harm=do_no_harm)
        harness.ask(coming=2)
        harness.clock.now += 0.06
        assert harness.scan()
        harness.client.fail()
        harness.scan()
        assert harness.results(harness.context) == [HIT, MISS, MISS]


def test_a_wait_for_a_tier_ends_with_the_answer_that_told_of_it() -> None:
    """After a reconnect the next daemon's answer is awaited as any other, and not as long as the tier."""
    harness = DiskHarness(do_no_harm=False)
    assert harness.ask(coming=1, wait_s=60.0) == [HIT, HIT, PENDING]
    harness.client.asked[-1][0].stale_at = 0.0
    for passed_s, waits in ((30.0, True), (0.05, True), (0.1, False)):
        harness.clock.now += passed_s
        harness.scan()
        assert harness.waits["r"] is waits


@pytest.mark.parametrize("do_no_harm", [True, False])
def test_the_option_bounds_the_wait(do_no_harm: bool) -> None:
    harness = DiskHarness(do_no_harm=do_no_harm, disk_wait_s=1.0)
    assert harness.ask(coming=2)[1] is PENDING
    harness.clock.now += 1.1
    assert harness.ask(coming=1) == [HIT, HIT, MISS]


DISK, STORE = {"medium": "STORAGE", "locality": "LOCAL"}, {"medium": "STORAGE", "locality": "REMOTE"}


@pytest.mark.parametrize(
    ("tiers", "waits"),
    [
        (None, [PENDING, PENDING]),
        ([{"medium": "STORAGE"}], [PENDING, PENDING]),
        ([DISK], [PENDING, MISS]),
        ([STORE], [MISS, PENDING]),
        ([], [MISS, MISS]),
    ],
)
def test_a_request_waits_for_the_tiers_that_it_names(
    harness: ManagerHarness, tiers: object, waits: list[LookupResult]
) -> None:
    params = {} if tiers is None else {"kv_load_tiers": tiers}
    context = _create_req_context(cast(Any, SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None)))
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.scan()
    harness.client.answer({block_hash(1)}, coming=[block_hash(2)], shared=[block_hash(3)])
    harness.scan()
    assert harness.results(context) == [HIT, *waits]


def test_what_comes_from_excluded_tiers_is_asked_for_again_as_rarely_as_what_is_missing(
    harness: ManagerHarness,
) -> None:
    """It was looked up every few milliseconds while the request waited for others' loads."""
    harness.new()
    harness.manager.requests["r"].tiers = frozenset()
    harness.scan()
    harness.client.answer({block_hash(1)}, coming=[block_hash(2), block_hash(3)])
    for _ in range(100):
        harness.scan()
        harness.clock.now += 0.003
    assert len(harness.client.asked) == 1


@pytest.mark.parametrize(
    ("tiers", "wait_s", "asking"),
    [(COMING - {SHARED}, 2.0, 0), (frozenset({SHARED}), 0.1, 2)],
    ids=["a disk", "a store that is asked"],
)
def test_only_what_comes_from_allowed_tiers_is_worth_a_wait(tiers: frozenset[int], wait_s: float, asking: int) -> None:
    """One block comes from a disk and takes longer than computing it, or two that a store mostly does not have."""
    harness = ManagerHarness()
    harness.prefill.tokens_per_second = 1000.0
    context = harness.new()
    harness.manager.requests["r"].tiers = tiers
    for waits in (True, False):
        harness.scan()
        harness.client.answer(
            set(), coming={block_hash(1)}, shared={block_hash(2), block_hash(3)}, wait_s=wait_s, asking=asking
        )
        harness.scan()
        assert (PENDING in harness.results(context)) is waits
        harness.clock.now += 0.3


def test_a_prompt_whose_answer_has_come_is_not_timed_by_all_before_it(
    harness: ManagerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That sums up all unfinished requests, in each step."""
    harness.new()
    harness.scan()
    assert harness.waits["r"]
    timed = list[str]()

    def seconds(request_id: str, tokens: int) -> float:
        timed.append(request_id)
        return 1.0

    monkeypatch.setattr(harness.manager.times, "seconds", seconds)
    harness.client.answer(HASHES)
    harness.scan()
    assert not harness.waits["r"]
    assert not timed


def test_a_slow_tier_that_is_excluded_does_not_delay_the_next_lookup(harness: ManagerHarness) -> None:
    harness.new()
    harness.manager.requests["r"].tiers = COMING - {SHARED}
    harness.scan()
    harness.client.answer(set(), coming={block_hash(1)}, shared={block_hash(2)}, wait_s=10.0)
    harness.scan()
    harness.clock.now += 2 * MIN_RETRY_PAUSE_S
    assert harness.scan()


def test_what_others_bring_up_from_an_excluded_tier_is_found_in_the_pool(harness: ManagerHarness) -> None:
    for name, comes in (
        ("disk", {"coming": HASHES}),
        ("store", {"shared": HASHES}),
        ("asked", {"shared": HASHES, "asking": 3}),
    ):
        context = harness.new(name)
        harness.manager.requests[name].tiers = frozenset()
        harness.scan(name)
        harness.client.answer(set(), **comes)  # type: ignore[arg-type]
        harness.scan(name)
        harness.clock.now += 1.1
        assert harness.scan(name)
        harness.client.answer(HASHES)
        harness.scan(name)
        report = report_of(harness, 3 * CHUNK_TOKENS, name=name)
        assert (report.found_pool, report.found_disk, report.found_shared) == (3, 0, 0)
        assert {harness.manager.get_load_source(one, context) for one in KEYS} == {CacheHitSource.HOST}


# --- hints -----------------------------------------------------------------------------------------


def envelope(*actions: object, **fields: object) -> dict[str, object]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions), **fields}


def action(kind: object, payload: object, version: object = "1.0") -> dict[str, object]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


LONG = "1" * (4 << 20)
RETAIN = action("kv.retain", {"priority": 80, "ttl_s": 30})


def hinted(harness: ManagerHarness, hints: object, *, of_engine: bool = False) -> int:
    """A request with these hints, from its start to its end. Returns how many of them were not known."""
    before = harness.manager._counters["vllm:kvoffd_unknown_hints"]
    given = (None, msgspec.convert(hints, KvHintsEnvelope)) if of_engine else ({"kv_hints": hints}, None)
    context = ReqContext("r", *given)
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.look_up()
    harness.manager.scheduled(harness.requests["r"], 0)
    harness.manager.begin_step([1])
    harness.requests["r"].block_hashes.append(block_hash(4))
    harness.manager.on_request_finished(context)
    return harness.manager._counters["vllm:kvoffd_unknown_hints"] - before


def test_hints_of_requests_that_never_ran_end_with_them(harness: ManagerHarness) -> None:
    """A user who cancels many prompts in the queue would stop vLLM's scheduler for a second."""
    context = ReqContext("r", {"kv_hints": envelope(RETAIN)})
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.look_up()
    assert len(harness.client.hints) == 1
    harness.manager.on_request_finished(context)
    assert len(harness.client.hints) == 1


def test_hints_beyond_the_budget_are_dropped_and_counted(harness: ManagerHarness) -> None:
    keys = hint_sender.KEYS_AT_ONCE // 4
    for at in range(6):
        context = ReqContext(f"r{at}", {"kv_hints": envelope(RETAIN)})
        harness.manager.on_new_request(context)
        harness.begin(context, keys)
        harness.look_up(f"r{at}")
    assert len(harness.client.hints) == 4
    assert harness.manager._counters["vllm:kvoffd_unknown_hints"] == 2
    harness.clock.now += keys / hint_sender.KEYS_PER_SECOND
    context = ReqContext("later", {"kv_hints": envelope(RETAIN)})
    harness.manager.on_new_request(context)
    harness.begin(context, keys)
    harness.look_up("later")
    assert len(harness.client.hints) == 5


def test_hints_that_do_not_reach_the_daemon_are_counted(harness: ManagerHarness) -> None:
    """The queue to it is full, or the namespace is unknown. If it stands still it takes them later."""
    harness.client.is_full = True
    assert hinted(harness, envelope(RETAIN)) == 2, "at the request's start and at its end"
    (report,) = harness.client.reported
    assert report.hints == "kv.retain lost, as it could not be sent"
    harness.client.is_full = False
    context = ReqContext("later", {"kv_hints": envelope(RETAIN, action("kv.prefetch", {}))})
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.look_up("later")
    harness.manager.scheduled(harness.requests["later"], 0)
    harness.manager.begin_step([1])
    other = ReqContext("other", {"kv_hints": envelope(RETAIN)})
    harness.manager.on_new_request(other)
    harness.begin(other)
    harness.manager.scheduled(harness.requests["other"], 0)
    harness.manager.begin_step([1])
    harness.client.ready = False
    harness.manager.on_request_finished(context)
    assert [kind.value for kind, *_ in harness.client.hints] == ["retain", "prefetch", "retain"]
    assert harness.manager._counters["vllm:kvoffd_unknown_hints"] == 2
    harness.manager.namespace.leave(engine_cache_kept=False)
    harness.manager.on_request_finished(other)
    assert harness.manager._counters["vllm:kvoffd_unknown_hints"] == 3


def test_the_host_of_a_peer_is_no_longer_than_the_wire_allows(harness: ManagerHarness) -> None:
    """A capital I with a dot is two characters once it is small."""
    fetch = action("kv.fetch", {"source_control_endpoint": "tcp://" + "İ" * 200 + ":1"})
    assert hinted(harness, envelope(fetch)) == 1
    assert set(harness.client.peers) == {""}


@pytest.mark.parametrize("of_engine", [False, True])
def test_hints_are_passed_on_with_what_was_generated(harness: ManagerHarness, of_engine: bool) -> None:
    """``kv.retain`` twice, so that its time begins at the end; the other two where they belong."""
    skips = action("kv.release", {"start": CHUNK_TOKENS + 1}, "1")
    hints = envelope(RETAIN, skips, action("kv.prefetch", {}))
    assert hinted(harness, hints, of_engine=of_engine) == 0
    sent = [(kind.value, len(keys[0].keys) // 32, *rest) for kind, keys, *rest in harness.client.hints]
    assert sent == [("retain", 3, 80, 30.0), ("prefetch", 3, 0, 0.0), ("retain", 4, 80, 30.0), ("release", 2, 0, 0.0)]


@pytest.mark.parametrize(
    ("option", "actions", "said"),
    [
        ("all", [RETAIN, action("kv.release", {})], "kv.retain of 3 keys; kv.release at its end"),
        ("all", [action("kv.retain", {"ttl_s": "5"})], "ignored: 'kv.retain': its ttl_s: expected `float`, got `str`"),
        ("all", [action("kv.pin", {}), RETAIN], "kv.retain of 3 keys; ignored: 'kv.pin': kvoffd does not know it"),
        ("all", [action("\ud800" * 64, {})] * 2, "ignored: 2, the first of them '\\ud800\\ud800"),
        ("all", [action("kv.retain", {"ttl_s": 5, "start": 10**6})], "kv.retain of no whole block"),
        ("all", [action("kv.fetch", {"source_control_endpoint": "tcp://node-b:1"})], "kv.fetch from node-b"),
        ("off", [RETAIN], 'ignored: the engine has the option "hints": "off"'),
        ("all", [], ""),
    ],
)
def test_a_request_s_report_says_what_became_of_its_hints(
    option: HintsOption, actions: list[object], said: str
) -> None:
    harness = ManagerHarness(hints=option)
    hinted(harness, envelope(*actions))
    (report,) = harness.client.reported
    assert (report.hints == said) if "the first of them" not in said else report.hints.startswith(said)
    msgspec.json.encode(report.hints)
    assert len(report.hints) <= 256


def test_a_report_that_cannot_be_sent_ends_no_step(harness: ManagerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PromptReport] = []

    def refuse(report: PromptReport) -> None:
        asked.append(report)
        raise ValueError("own_tokens: expected `int` >= 0")

    monkeypatch.setattr(harness.client, "report_prompt", refuse)
    hinted(harness, envelope(RETAIN))
    assert len(asked) == 1


def test_hints_of_prompts_shorter_than_a_chunk_are_not_sent(harness: ManagerHarness) -> None:
    context = ReqContext("r", {"kv_hints": envelope(RETAIN, action("kv.prefetch", {}))})
    harness.manager.on_new_request(context)
    harness.begin(context, hashes=0)
    for _ in range(2):
        harness.scan()
    harness.manager.on_request_finished(context)
    assert harness.client.hints == []


@pytest.mark.parametrize(
    "hints",
    [
        7,
        "retain",
        {"actions": "many"},
        envelope(RETAIN, protocol_version="9.0"),
        envelope(RETAIN, protocol_version=None),
        envelope(action("kv.pin", {})),
        envelope(action(["kv.retain"], {})),
        envelope(action("kv.retain", {"ttl_s": 5}, "2.0")),
        envelope(action("kv.retain", None)),
        envelope(action("kv.retain", {})),
        envelope(action("kv.retain", {"ttl_s": 0})),
        envelope(action("kv.retain", {"ttl_s": float("nan")})),
        envelope(action("kv.retain", {"ttl_s": "long"})),
        envelope(action("kv.retain", {"ttl_s": 5, "priority": 101})),
        envelope(action("kv.release", {"start": -1})),
        envelope("kv.release"),
        envelope(action("kv.retain", {"ttl_s": 5, "priority": 10**400})),
        envelope(action("kv.retain", {"ttl_s": 10**400})),
        envelope(action("kv.release", {"owner": "\ud800"})),
        envelope(action("kv.release", {"owner": "a" * 129})),
        envelope(action("kv.release", [])),
    ],
)
def test_a_hint_that_cannot_be_read_is_counted_and_fails_nothing(harness: ManagerHarness, hints: object) -> None:
    assert hinted(harness, hints) == 1
    assert harness.client.hints == []


def test_an_unknown_hint_does_not_hide_others_and_is_said_once(
    harness: ManagerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvoffd_client.vllm.hints._logged", set())
    monkeypatch.setattr("kvoffd_client.vllm.hints.logger.warning", lambda text, *args: said.append(text % args))
    for _ in range(3):
        assert hinted(harness, envelope(action("kv.pin", {}), RETAIN)) == 1
    assert len(harness.client.hints) == 2 * 3
    why = "is ignored: kvoffd does not know it. Later ones are only counted."
    assert said == [f"kvoffd: a request's hint ('kv.pin') {why}"]
    assert hinted(harness, envelope(*[RETAIN] * 20)) == 4, "more than sixteen"
    for number in range(100):
        hinted(harness, envelope(action(f"kv.{number}", {})))
    assert len(said) == 16


@pytest.mark.parametrize(
    "hints",
    [
        envelope(RETAIN, protocol_version=LONG),
        envelope(action("kv.retain", {"ttl_s": 30}, LONG)),
        envelope(action(LONG, {})),
        envelope(action("kv.release", {"start": LONG})),
        envelope(action("kv.release", {"owner": LONG})),
        envelope(action("kv.fetch", {"source_control_endpoint": LONG})),
    ],
)
def test_what_is_too_long_is_not_worked_on(hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen actions with strings of 4 MB each stopped vLLM's scheduler for a second."""
    said = set[str]()
    monkeypatch.setattr("kvoffd_client.vllm.hints._logged", said)
    context = ReqContext("r", {"kv_hints": {**hints, "actions": hints["actions"] * 16}})
    assert hints_module.read_hints(context).unknown in (1, 16)
    tracemalloc.start()
    hints_module.read_hints(context)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20, "it was copied"
    tracemalloc.stop()
    assert max(map(len, said)) <= hints_module.MAX_TEXT


def test_only_known_fields_of_a_hint_are_read() -> None:
    """The others may be of any number and size; also those of vLLM's own envelope."""
    many = {str(number): LONG for number in range(100_000)}
    given = {**RETAIN, **many, "payload": {"ttl_s": 30, **many}}
    for hints in ({**envelope(given), **many}, msgspec.convert(envelope(given), KvHintsEnvelope)):
        context = ReqContext("r", {"kv_hints": hints, "remote_kv_source": {**many, **SOURCE}})
        tracemalloc.start()
        found = hints_module.read_hints(context)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "it was copied"
        tracemalloc.stop()
        assert ([(one.action, one.ttl_s) for one in found.known], found.peer) == ([("retain", 30)], "10.0.0.7")


def test_of_each_kind_the_last_hint_counts(harness: ManagerHarness) -> None:
    actions = [action("kv.retain", {"ttl_s": number + 1, "priority": number}) for number in range(8)]
    assert hinted(harness, envelope(*actions, *[action("kv.release", {})] * 8)) == 0
    sent = [(kind.value, *rest) for kind, _, *rest in harness.client.hints]
    assert sent == [("retain", 7, 8.0), ("retain", 7, 8.0), ("release", 0, 0.0)]


@pytest.mark.parametrize("start", [0, 100 * CHUNK_TOKENS])
def test_of_a_long_prompt_as_many_keys_are_named_as_the_daemon_takes_in_a_few_milliseconds(start: int) -> None:
    harness, hashes = ManagerHarness((ChunkGroup(0, 1, CHUNK_TOKENS), ChunkGroup(1, 3, 3 * CHUNK_TOKENS))), HASHES
    context = ReqContext("r", {"kv_hints": envelope(action("kv.retain", {"ttl_s": 30, "start": start}))})
    harness.manager.on_new_request(context)
    harness.begin(context)
    hashes = [block_hash(number) for number in range(32768)]
    harness.requests["r"].block_hashes[:] = hashes
    harness.look_up()
    ((_, (full, thirds), *_),) = harness.client.hints
    named = [one.keys[at : at + 32] for one in (full, thirds) for at in range(0, len(one.keys), 32)]
    assert hint_sender.MAX_KEYS - 3 < len(named) <= hint_sender.MAX_KEYS
    first = start // CHUNK_TOKENS
    assert named[: len(full.keys) // 32] == hashes[first : first + len(full.keys) // 32]
    assert thirds.keys[:32] == hashes[-(-first // 3) * 3 + 2]


@pytest.mark.parametrize(("option", "kinds"), [("off", ""), ("no_release", "retain prefetch retain")])
def test_an_engine_obeys_the_hints_that_its_option_names(option: HintsOption, kinds: str) -> None:
    harness = ManagerHarness(hints=option)
    given = envelope(RETAIN, action("kv.release", {}), action("kv.prefetch", {}))
    assert hinted(harness, given) == (option == "no_release")
    assert " ".join(kind for kind, *_ in harness.client.hints) == kinds


def test_lookups_and_hints_name_the_same_giver_and_one_of_the_owner_if_there_is_one(harness: ManagerHarness) -> None:
    givers = []
    for owner in ("", "", "a", "a", "b"):
        hinted(harness, envelope(action("kv.release", {"owner": owner})))
        (giver,) = {*harness.client.givers}
        harness.client.givers.clear()
        givers.append(giver)
    assert givers[2] == givers[3]
    assert len({*givers}) == 4
    assert 0 < min(givers) < max(givers) <= MAX_GIVER


def test_of_a_list_of_tiers_the_first_entries_count(harness: ManagerHarness) -> None:
    tiers = [{"medium": "CPU", "locality": "LOCAL"}] * 100 + [{"medium": "STORAGE", "locality": "LOCAL"}]
    request = SimpleNamespace(request_id="r", kv_transfer_params={"kv_load_tiers": tiers}, kv_hints=None)
    assert not hints_module.allowed_tiers(_create_req_context(cast(Any, request)))


SOURCE = {"kv_request_id": "1", "remote_host": "10.0.0.7", "remote_port": 5710}
"""As llm-d's router sends it."""


def fetch(endpoint: object, version: object = "1.0") -> dict[str, object]:
    """As Dynamo's router sends it."""
    return envelope(action("kv.fetch", {"source_control_endpoint": endpoint, "block_hashes": [1, 2]}, version))


@pytest.mark.parametrize(
    ("params", "peer", "unknown"),
    [
        ({"remote_kv_source": SOURCE}, "10.0.0.7", 0),
        ({"remote_kv_source": {**SOURCE, "remote_host": 7}}, "", 1),
        ({"remote_kv_source": {**SOURCE, "remote_host": "a" * 254}}, "", 1),
        ({"remote_kv_source": "10.0.0.7"}, "", 1),
        ({"kv_hints": fetch("tcp://node-b:25000")}, "node-b", 0),
        ({"kv_hints": fetch("tcp://[fd00::1]:25000")}, "fd00::1", 0),
        ({"kv_hints": fetch("tcp://[fd00:")}, "", 1),
        ({"kv_hints": fetch(5)}, "", 1),
        ({"kv_hints": fetch("tcp://node-b:1", "2.0")}, "", 1),
        ({"remote_kv_source": {**SOURCE, "remote_host": "\ud800"}}, "", 1),  # JSON can have it, and UTF-8 cannot
        ({"kv_hints": fetch("tcp://\ud800:1")}, "", 1),
        ({"remote_kv_source": SOURCE, "kv_hints": envelope(RETAIN)}, "10.0.0.7", 0),
        ("remote_kv_source", "", 0),
    ],
)
def test_a_lookup_names_the_peer_that_a_request_names(
    harness: ManagerHarness, params: object, peer: str, unknown: int
) -> None:
    context = ReqContext("r", cast(Any, params))
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.look_up()
    assert set(harness.client.peers) == {peer}
    assert harness.manager._counters["vllm:kvoffd_unknown_hints"] == unknown


@pytest.mark.parametrize("params", [{"remote_kv_source": SOURCE}, {"kv_hints": fetch("tcp://node-b:25000")}])
def test_with_hints_off_no_request_names_a_peer(params: dict[str, Any]) -> None:
    found = hints_module.read_hints(ReqContext("r", params), "off")
    assert (found.peer, found.problem) == ("", 'the engine has the option "hints": "off"')
    assert not hints_module.read_hints(ReqContext("r", {}), "off").problem


# --- loads -----------------------------------------------------------------------------------------


def test_a_load_carries_keys_and_lease_and_gives_the_lease_back_when_done(harness: ManagerHarness) -> None:
    context = harness.request(ready=HASHES)
    lease_id = harness.client.asked[0][0].lease_id
    harness.manager.scheduled(harness.requests["r"], 2 * CHUNK_TOKENS)
    spec = harness.manager.prepare_load(KEYS[1:], context)
    assert spec.groups == (block_hash(2) + block_hash(3),)
    assert (spec.lease_id, spec.load_tokens) == (lease_id, 2 * CHUNK_TOKENS)
    assert "r" in harness.manager.lookups.loading
    harness.manager.on_request_finished(context)
    assert harness.client.released == []  # the load still runs
    for _ in range(2):
        harness.manager.complete_load(KEYS[1:], context)
    assert harness.client.released == [lease_id]


def test_a_load_without_an_answer_fails_in_the_worker_and_not_in_vllms_scheduler(harness: ManagerHarness) -> None:
    for context in (harness.new(), ReqContext("unknown")):
        spec = harness.manager.prepare_load(KEYS, context)
        assert (spec.lease_id, spec.request_id) == (NO_LEASE, context.req_id)


def test_after_a_failed_load_a_request_is_computed_and_stored() -> None:
    unusable = {ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM}
    for code in (*ErrorCode, None):
        harness = ManagerHarness()
        context = harness.request(ready=HASHES)
        harness.manager.prepare_load(KEYS, context)
        failed = FailedJob(1, code, [GroupKeys(0, block_hash(2))], "r")
        harness.manager.handle_news(WorkerNews(failed_jobs=[failed]))
        harness.clock.now += 100
        assert not harness.scan(), "it is never looked up again"
        assert harness.results(context) == [MISS] * 3
        forgotten = harness.client.invalidated
        assert forgotten == ([GroupKeys(0, block_hash(2))] if code in unusable else []), code
        assert harness.counted()[FAILED_LOADS] == 1
        assert harness.offer(context) == KEYS


# --- stores ----------------------------------------------------------------------------------------


def test_stores_leave_out_what_the_daemon_has_and_what_is_on_its_way(harness: ManagerHarness) -> None:
    first, second, third = (harness.request(name, ready={block_hash(1)}) for name in ("first", "second", "third"))
    output = harness.manager.prepare_store(KEYS, first)
    assert output is not None
    assert output.keys_to_store == KEYS[1:]
    spec = cast(Any, output.store_spec)
    assert (spec.groups, spec.before) == ((block_hash(2) + block_hash(3),), {0: block_hash(1)})
    assert harness.offer(second) == []
    harness.manager.complete_store(set(KEYS[1:]), first)
    assert harness.offer(third) == KEYS[1:]
    harness = ManagerHarness()
    whole = harness.manager.prepare_store(KEYS[:1], harness.request(ready=set()))
    assert whole is not None
    assert (whole.keys_to_store, cast(Any, whole.store_spec).before) == (KEYS[:1], {}), "it begins the prompt"


def test_a_failure_of_before_a_reset_is_no_failure_of_the_next_store(harness: ManagerHarness) -> None:
    context = harness.request(ready=set())
    assert harness.offer(context) == KEYS
    harness.manager.stores.record_unstored([GroupKeys(0, b"".join(map(block_hash, (1, 2, 3))))])
    harness.manager.reset_cache()
    assert harness.offer(context) == KEYS
    harness.manager.complete_store(KEYS, context)
    assert harness.client.stored.count == len(KEYS)


def test_failures_are_kept_as_long_as_their_store(harness: ManagerHarness) -> None:
    """Those of an adapter's keys too, which are none of vLLM's."""
    context = harness.request(ready=set())
    assert harness.offer(context) == KEYS
    harness.manager.stores.record_unstored([GroupKeys(0, bytes([number]) * 32) for number in range(100, 200)])
    harness.manager.complete_store(KEYS, context)
    assert not harness.manager.stores._unstored


def test_a_block_that_the_policy_rejected_outdates_no_answer_and_is_offered_again(harness: ManagerHarness) -> None:
    """Prompts that wait for it would be looked up again in vain."""
    context, waiting = (harness.request(name, ready=set()) for name in ("stores", "waits"))
    assert harness.offer(context) == KEYS
    rejected = [GroupKeys(0, block_hash(1) + block_hash(2))]
    for news in (WorkerNews(rejected=rejected), WorkerNews()):  # one rank after the other
        harness.manager.handle_news(news)
    harness.manager.complete_store(KEYS, context)
    harness.clock.now += 0.01
    assert not harness.scan("waits"), "it could use none of what was stored"
    assert harness.offer(waiting) == KEYS
    harness.manager.complete_store(KEYS, waiting)
    assert {block_hash(1), block_hash(2)} <= {*harness.client.stored.since(0)}


def test_beyond_the_credit_a_store_is_put_off_and_counted(harness: ManagerHarness) -> None:
    context = harness.request(ready=set())
    harness.grant(1500)
    assert harness.offer(context, KEYS[:2]) == KEYS[:2]
    assert harness.offer(context, KEYS[2:]) is None
    assert harness.counted()[DEFERRED_STORES] == 1
    harness.manager.complete_store(set(KEYS[:2]), context)
    assert harness.offer(context, KEYS[2:]) == KEYS[2:]
    # vLLM does not offer the end of a prompt again: it may pass the credit to twice of it, beyond which stores fail.
    for name, credit, stored in (("little", 500, None), ("enough", 1000, KEYS[1:2])):
        harness.manager.complete_store(KEYS, context)
        context = harness.request(name, ready=set())
        harness.grant(credit)
        assert harness.offer(context, KEYS[:1]) == KEYS[:1]
        assert harness.offer(context, KEYS[1:2]) is None
        harness.end(name, 3001)
        assert harness.offer(context, KEYS[1:2]) == stored
    counted = harness.counted()
    assert (counted[DEFERRED_STORES], counted[FAILED_STORES]) == (2, 1)


def test_store_credit_counts_what_each_group_has() -> None:
    """A hybrid model's windows are smaller than its full attention."""
    harness = ManagerHarness((ChunkGroup(0, 1, CHUNK_TOKENS), WINDOWS))
    harness.begin_engine(shard_bytes=[1000, 10])
    context = harness.request(ready=set())
    windows = [key(number, group_id=WINDOWS.group_id) for number in (1, 2)]
    for one in windows:
        context.set_offload_key_position(one, CHUNK_TOKENS)
    harness.grant(30)
    assert harness.offer(context, windows) == windows
    assert harness.offer(context, KEYS[:1]) == KEYS[:1]
    assert harness.offer(context, KEYS[1:]) is None
    harness.manager.complete_store(KEYS[:1], context)
    assert harness.offer(context, KEYS[1:]) == KEYS[1:]


def test_a_store_waits_for_an_answer_but_not_for_a_late_one_nor_where_its_request_ends(harness: ManagerHarness) -> None:
    context, ends = harness.request(), harness.request("ends")
    harness.manager.scheduled(harness.requests["r"], 0)
    assert harness.offer(context) is None, "vLLM offers it again in the next step"
    harness.end("ends", 2500)
    assert harness.offer(ends) == KEYS[:2], "no more than it has computed"
    harness.manager.complete_store(KEYS, ends)
    harness.clock.now += 0.11
    assert harness.offer(context) == KEYS


# --- tails: positions inside a chunk at which prompts of models with recurrent layers end ------------

TAILS = [key(number) for number in (13, 12, 11)]
"""In the order in which vLLM asks for them: the longest first."""
UNIT = CHUNK_TOKENS // 4


def tails_of(harness: ManagerHarness, chunks: set[bytes]) -> ReqContext:
    """A request whose first two chunks are looked up; its third chunk may have tails."""
    harness.begin_engine(tail_tokens=UNIT)
    context = harness.new(hashes=2)
    request = harness.requests["r"]
    request.num_tokens = request.num_prompt_tokens = 3 * CHUNK_TOKENS
    for place, tail in enumerate(TAILS):
        context.set_offload_key_position(tail, 3 * CHUNK_TOKENS - (place + 1) * UNIT)
    harness.look_up()
    harness.client.answer(chunks)
    harness.scan()
    return context


def test_tails_are_looked_up_with_the_chunks_once_vllm_asks_for_them(harness: ManagerHarness) -> None:
    context, (request, manager) = tails_of(harness, {*HASHES}), (harness.requests["r"], harness.manager)
    assert not manager.requests["r"].scan.tails.wanted
    assert harness.results(context, [*KEYS[:2], *TAILS]) == [HIT, HIT, RETRY, RETRY, RETRY]
    assert not manager.waits.look_up_tails(manager.requests["r"], 0), "it waits"
    (group,) = harness.client.asked[1][1]
    assert group.keys == b"".join(map(block_hash, (1, 2, 11, 12, 13)))
    assert (harness.client.again, manager.requests["r"].scan.tails.is_awaited) == ([False, True], True)
    harness.client.answer({*HASHES, block_hash(12)})
    harness.scan()
    assert not manager.requests["r"].scan.tails.is_awaited
    assert harness.results(context, [*KEYS[:2], *TAILS]) == [HIT, HIT, MISS, HIT, MISS]
    assert not manager.requests["r"].scan.tails.wanted, "it knows them"
    assert harness.client.released == [harness.client.asked[0][0].lease_id]
    manager.scheduled(request, 2 * CHUNK_TOKENS + 2 * UNIT)
    spec = manager.prepare_load([*KEYS[:2], TAILS[1]], context)
    manager.begin_step([1])
    assert (spec.lease_id, spec.load_tokens) == (harness.client.asked[1][0].lease_id, 2 * CHUNK_TOKENS + 2 * UNIT)
    ((used, (loaded,)), counts) = harness.client.asked[2], harness.client.again[2]
    assert (loaded.keys, counts, used.lease_id in harness.client.released) == (block_hash(12), False, True)
    manager.complete_load(KEYS, context)
    (report,) = harness.client.reported
    assert (report.keys, report.found_pool, report.covered_keys, report.missing_key) == (2, 2, [2], b"")


def test_a_tail_in_the_pool_counts_as_from_there_though_the_chunk_before_it_came_from_a_disk(
    harness: ManagerHarness,
) -> None:
    context, manager = tails_of(harness, {*HASHES}), harness.manager
    manager.requests["r"].scheduling.promoted.chunks[0] = bytes([min(COMING)]) * len(KEYS)
    sources = [manager.get_load_source(key, context) for key in (KEYS[1], *TAILS)]
    assert sources == [CacheHitSource.DISK, *[CacheHitSource.HOST] * len(TAILS)]


def test_a_tail_on_a_disk_is_waited_for_like_a_chunk(harness: ManagerHarness) -> None:
    context, manager = tails_of(harness, {*HASHES}), harness.manager
    harness.results(context, TAILS)
    manager.waits.look_up_tails(manager.requests["r"], 0)
    harness.client.answer({*HASHES}, coming=[block_hash(13)], wait_s=0.01)
    harness.scan()
    assert harness.results(context, TAILS) == [PENDING, MISS, MISS]
    assert manager.requests["r"].scan.tails.is_awaited
    harness.clock.now += 0.01
    assert harness.scan()
    harness.client.answer({*HASHES, block_hash(13)})
    harness.scan()
    assert harness.results(context, TAILS) == [HIT, MISS, MISS]
    assert not manager.requests["r"].scan.tails.is_awaited
    manager.scheduled(harness.requests["r"], UNIT)
    assert manager.get_load_source(TAILS[0], context) is CacheHitSource.DISK
    schedule(harness)
    (report,) = harness.client.reported
    assert (report.keys, report.found_pool, report.found_disk) == (2, 2, 0)


def test_a_chunk_behind_those_looked_up_is_stored_though_a_tail_was_ready(harness: ManagerHarness) -> None:
    """It is complete once the prompt is computed."""
    context, manager = tails_of(harness, {*HASHES}), harness.manager
    harness.results(context, TAILS)
    manager.waits.look_up_tails(manager.requests["r"], 0)
    harness.client.answer({*HASHES, *map(block_hash, (11, 12, 13))})
    harness.scan()
    context.set_offload_key_position(KEYS[2], 3 * CHUNK_TOKENS)
    assert harness.offer(context, [*KEYS, *TAILS]) == [KEYS[2]]


def test_a_prompt_computes_its_tail_if_the_answer_is_late_or_fails(harness: ManagerHarness) -> None:
    context, manager = tails_of(harness, {*HASHES}), harness.manager
    harness.results(context, TAILS)
    manager.waits.look_up_tails(manager.requests["r"], 0)
    harness.clock.now += 1
    harness.scan()
    assert (manager.requests["r"].scan.tails.is_awaited, harness.results(context, TAILS)) == (False, [MISS] * 3)
    harness.client.fail()
    harness.scan()
    assert harness.results(context, [*KEYS[:2], *TAILS]) == [HIT, HIT, MISS, MISS, MISS]
    assert not manager.requests["r"].scan.tails.wanted


# --- when nothing is looked up, or stored ----------------------------------------------------------


def test_workers_whose_memory_cannot_be_shared_turn_the_manager_off_until_it_can(harness: ManagerHarness) -> None:
    context = harness.request(ready=HASHES)
    harness.report("weights", problem="No GPU.")
    harness.scan()
    assert harness.results(context) == [MISS] * 3
    assert harness.offer(context) == []
    harness.report("weights")
    harness.scan()
    assert harness.results(context) == [HIT] * 3


def test_why_a_worker_is_refused_is_told_until_it_is_not(harness: ManagerHarness) -> None:
    for problem in ("No GPU.", "", ""):
        harness.report("weights", problem=problem)
        harness.clock.now += 100.0
        harness.manager.begin_step([])
    assert harness.client.problems == ["worker 0: No GPU.", ""]


def test_a_producer_only_stores_and_a_consumer_only_loads() -> None:
    producer, consumer = ManagerHarness(), ManagerHarness()
    producer.manager.lookups.enabled = consumer.manager.stores.enabled = False
    context = producer.request()
    assert producer.client.asked == []
    assert producer.results(context) == [MISS] * 3
    assert producer.offer(context) == KEYS
    context = consumer.request(ready=HASHES)
    assert consumer.results(context) == [HIT] * 3
    assert consumer.offer(context, [key(9)]) == []


def lora_request(number: int, name: str = "adapter", path: str = "path") -> LoRARequest:
    return LoRARequest(name, number, path)


def test_requests_of_an_unknown_adapter_use_nothing(harness: ManagerHarness) -> None:
    """They do not wait for ever, nor where nobody will answer."""
    for name, contents in (("unseen", None), ("unreadable", {1: ("", UNREADABLE)}), ("silent", {})):
        harness.report("weights", adapters=contents)
        context = harness.new(name)
        harness.requests[name].lora_request = lora_request(1, name)
        for passed_s in (0.0, ANSWER_PATIENCE_S):  # a step may have taken that long: they are asked once more
            harness.clock.now += passed_s
            assert harness.manager.adapters.await_content(harness.manager.requests[name]) == (name == "silent")
        harness.clock.now += ASK_AGAIN_S
        assert not harness.manager.adapters.await_content(harness.manager.requests[name])
        assert not harness.scan(name)
        assert harness.offer(context) == []
    # vLLM's own cache has blocks of who knows what under that name.
    harness.report("weights", adapters={1: ("path", b"one")})
    context = harness.new("later")
    harness.requests["later"].lora_request = lora_request(1, "silent")
    assert not harness.manager.adapters.await_content(harness.manager.requests["later"])
    assert harness.offer(context) == []


def report_adapter(harness: ManagerHarness, path: str, content: bytes) -> None:
    """The worker has another adapter under number 1, at the next step too."""
    namespace = harness.manager.namespace
    memory = MemoryState(NamespaceSpec.named("model"), "weights", namespace.generation)
    for changed in (True, False):
        one = replace(memory, adapters={1: (path, content)}, changed=changed, generation=namespace.generation)
        harness.manager.handle_news(WorkerNews(memory={0: one}))


def test_what_runs_while_its_adapter_is_another_one_spoils_vllms_own_cache(harness: ManagerHarness) -> None:
    """A user loads other files in place, and later the first ones again, while a request runs."""

    def stored(name: str) -> list[bytes] | None:
        context = harness.new(name)
        harness.requests[name].lora_request = lora_request(1)
        harness.look_up(name)
        harness.client.answer(set())
        harness.requests[name].num_computed_tokens = 96
        taken = harness.offer(context)
        harness.manager.complete_store(KEYS, context)
        return taken

    for content in (b"one", b"one"):
        report_adapter(harness, "path", content)
        assert stored("runs") == KEYS
    for content in (b"other", b"one"):
        report_adapter(harness, "path", content)
    assert stored("again") == []
    harness.manager.adapters.engine_cache_reset()
    assert stored("after a reset") == KEYS


def test_what_waits_while_its_adapter_is_loaded_in_place_of_another_is_not_spoiled(harness: ManagerHarness) -> None:
    report_adapter(harness, "path", b"one")
    context = harness.new("waits")
    harness.requests["waits"].lora_request = lora_request(1, path="moved")
    assert harness.manager.adapters.await_content(harness.manager.requests["waits"])
    report_adapter(harness, "moved", b"other")
    assert not harness.manager.adapters.await_content(harness.manager.requests["waits"])
    harness.look_up("waits")
    harness.client.answer(set())
    assert harness.offer(context) == KEYS


def test_requests_of_an_adapter_of_old_weights_use_nothing(harness: ManagerHarness) -> None:
    harness.report("weights", adapters={1: ("path", b"one")})
    before, plain, after = (harness.new(name) for name in ("before", "plain", "after"))
    harness.requests["before"].lora_request = lora_request(1)
    harness.look_up("before")
    harness.manager.namespace.leave(engine_cache_kept=True)
    harness.report("weights", adapters={1: ("path", b"one")})
    harness.requests["after"].lora_request = lora_request(1)
    harness.look_up("after")
    harness.client.answer(set())
    for context, stored in ((before, []), (plain, KEYS), (after, KEYS)):
        assert harness.offer(context) == stored
        harness.manager.complete_store(KEYS, context)


def test_requests_end_where_the_engine_has_lost_its_client(harness: ManagerHarness) -> None:
    """As if there are no threads for another one after a change of the weights."""
    contexts = [harness.request(name, ready=HASHES) for name in ("loads", "waits")] + [harness.request("asks")]
    harness.manager.prepare_load(KEYS, contexts[0])
    harness.manager.namespace.client = cast(SchedulerClient, Unconnected())
    harness.clock.now += 1.0
    harness.manager.begin_step([1])
    harness.manager.handle_news(WorkerNews(failed_jobs=[FailedJob(1, ErrorCode.CHECKSUM, [], "loads")]))
    for context in contexts:
        harness.scan(context.req_id)
        assert harness.results(context) == [MISS] * 3
        harness.manager.complete_load(KEYS, context)
        harness.manager.on_request_finished(context)
    assert harness.offer(harness.request("new")) == []
    harness.manager.reset_cache()
    assert harness.counted()[CONNECTED] == 0
    harness.manager.shutdown()


# --- why a request hit or missed -------------------------------------------------------------------


def schedule(harness: ManagerHarness, tokens: int = 0, name: str = "r") -> None:
    """vLLM's step schedules a request, to load so many tokens."""
    request = harness.requests[name]
    if not request.num_computed_tokens:
        request.num_computed_tokens = harness.manager.requests[name].scan.own_tokens + tokens
    harness.manager.scheduled(harness.requests[name], tokens)
    if tokens:
        harness.manager.prepare_load(KEYS, ReqContext(name))
    harness.manager.begin_step([1])


def report_of(harness: ManagerHarness, tokens: int = 0, name: str = "r") -> PromptReport:
    """What is reported of a request that is scheduled now."""
    before = len(harness.client.reported)
    schedule(harness, tokens, name)
    if tokens:
        harness.manager.complete_load(KEYS, ReqContext(name))
    (report,) = harness.client.reported[before:]
    assert report.request == name
    return report


def test_outcomes_and_what_was_found_are_reported() -> None:
    def found(report: PromptReport) -> tuple[object, ...]:
        return report.outcome, report.keys, report.found_pool, report.found_disk, report.found_shared

    harness = ManagerHarness(disk_wait_s=0.0)
    harness.request("gap", {block_hash(2)})
    report = report_of(harness, name="gap")
    assert found(report) == (Outcome.MISSED, 3, 1, 0, 0)
    assert (report.missing_key, report.after_gap) == (block_hash(1), 1), "the first one, whatever is behind it"

    harness.request("late")
    harness.client.answer({block_hash(1)}, coming={block_hash(2)}, shared={block_hash(3)})
    harness.scan("late")
    report = report_of(harness, CHUNK_TOKENS, "late")
    assert found(report) == (Outcome.LOADED, 3, 1, 1, 1)
    assert (report.missing_key, report.reason) == (block_hash(2), "tier_late")

    harness.new("short", hashes=0)
    report = report_of(harness, name="short")
    assert (*found(report), report.tokens) == (Outcome.TOO_SHORT, 0, 0, 0, 0, 1)

    harness.request("held")
    harness.prepare("held", 3 * CHUNK_TOKENS, engine_has_all=True)
    assert found(report_of(harness, name="held"))[:2] == (Outcome.NOT_NEEDED, 0), (
        "nobody waits for its answer: it is not late"
    )

    harness.new("disabled")
    harness.manager.requests["disabled"].disabled = True
    assert report_of(harness, name="disabled").outcome is Outcome.UNUSED
    harness.client.ready = False
    harness.request("away")
    assert report_of(harness, name="away").outcome is Outcome.UNUSED


@pytest.mark.parametrize("tokens", [CHUNK_TOKENS, 0], ids=["loaded", "computed"])
def test_what_is_reported_is_what_the_engine_decided_by(harness: ManagerHarness, tokens: int) -> None:
    """Its answer was a second old, so that the next one is on its way when the prompt is scheduled."""
    harness.request(ready={block_hash(1)} if tokens else {block_hash(2)})
    harness.clock.now += 1.5
    assert harness.scan()
    report = report_of(harness, tokens)
    assert (report.outcome, report.keys, report.found_pool) == (Outcome.LOADED if tokens else Outcome.MISSED, 3, 1)
    assert (report.missing_key, report.missing_number) == ((block_hash(2), 2) if tokens else (block_hash(1), 1))


def test_a_prompt_whose_answer_came_before_it_ran_is_not_late(harness: ManagerHarness) -> None:
    """It had been given up, and the prompt found no place in the meantime."""
    context = harness.request()
    harness.clock.now += 0.2
    harness.scan()
    assert harness.results(context) == [MISS] * 3
    harness.client.answer(set())
    harness.scan()
    report = report_of(harness)
    assert (report.outcome, report.keys, report.missing_key) == (Outcome.MISSED, 3, block_hash(1))


def test_what_a_store_is_asked_for_is_found_once_it_says_so() -> None:
    def found(report: PromptReport) -> tuple[int, ...]:
        return report.found_pool, report.found_disk, report.found_shared, report.asked_shared, report.unanswered

    harness = ManagerHarness(disk_wait_s=0.0)

    def missed(name: str, first: dict[str, Any], *then: dict[str, Any]) -> PromptReport:
        harness.request(name)
        for number, answer in enumerate((first, *then)):
            if number:
                harness.clock.now += 1.1
                assert harness.scan(name)
            harness.client.answer(**{"ready": set(), **answer})
            harness.scan(name)
        return report_of(harness, name=name)

    asking: dict[str, Any] = {"shared": HASHES, "asking": 3}
    report = missed("none", asking, {})
    assert (*found(report), report.reason) == (0, 0, 0, 3, 0, ""), "the daemon says why the first one is missing"
    assert report.coming_keys == [0]
    report = missed("silent", asking)
    assert (*found(report), report.reason, report.coming_keys) == (0, 0, 0, 3, 3, "unanswered", [3])
    report = missed("some", asking, {"shared": {block_hash(1)}})
    assert (*found(report), report.reason, report.coming_keys) == (0, 0, 1, 3, 0, "tier_late", [1])
    report = missed("came", asking, {"ready": {block_hash(1)}})
    assert (*found(report), report.missing_key) == (0, 0, 1, 3, 0, block_hash(2))
    report = missed("stored", asking, {}, {"ready": {block_hash(1)}})
    assert (*found(report), report.missing_key) == (1, 0, 0, 3, 0, block_hash(2)), "another engine stored it since"
    source = harness.manager.get_load_source(KEYS[0], harness.contexts["stored"])
    assert source is CacheHitSource.HOST
    report = missed("disk", {"coming": {block_hash(1)}, "shared": {block_hash(2), block_hash(3)}, "asking": 2})
    assert (*found(report), report.reason) == (0, 1, 0, 2, 2, "tier_late")


def test_what_limits_the_sharing_of_a_request_is_reported(harness: ManagerHarness) -> None:
    harness.request("plain", set())
    assert report_of(harness, name="plain").marks == []
    context = harness.request("salt", set())
    request = harness.requests[context.req_id]
    request.cache_salt, request.mm_features, request.prompt_embeds = "tenant", [object()], object()
    assert report_of(harness, name="salt").marks == ["cache_salt", "multimodal", "embeddings"]
    for name, barred in (("disk", {"coming": HASHES}), ("store", {"shared": HASHES}), ("asked", {"shared": HASHES})):
        harness.request(name)
        harness.manager.requests[name].tiers = frozenset()
        harness.client.answer(set(), asking=3 * (name == "asked"), **barred)
        harness.scan(name)
        report = report_of(harness, name=name)
        assert (report.reason, report.marks) == ("excluded", ["kv_load_tiers"])


def test_what_came_from_a_disk_before_a_preemption_is_found_in_the_pool_afterwards() -> None:
    harness = DiskHarness()
    harness.ask(coming=2, wait_s=0.5)
    harness.clock.now += 0.5
    harness.ask(coming=0)
    first = report_of(harness, 3 * CHUNK_TOKENS)
    assert (first.found_pool, first.found_disk) == (1, 2)
    assert harness.manager.get_load_source(KEYS[2], harness.context) is CacheHitSource.DISK
    harness.clock.now += 2.0
    harness.manager.begin_step([1])
    harness.ask(coming=0)
    second = report_of(harness, 3 * CHUNK_TOKENS)
    assert (second.again, second.found_pool, second.found_disk) == (True, 3, 0)
    assert harness.manager.get_load_source(KEYS[2], harness.context) is CacheHitSource.HOST


def test_a_prompt_that_was_late_uses_the_answer_that_it_has(harness: ManagerHarness) -> None:
    """It was looked up ahead in the end, and waits for space in the KV cache."""
    context = harness.request(ready=HASHES)
    harness.manager.requests["r"].wait.lookup.waits_no_more = True
    harness.client.asked[-1][0].stale_at = harness.clock.now + 0.5
    assert harness.scan(), "its lease is renewed"
    assert harness.results(context) == [HIT] * 3


def test_a_prompt_that_gave_up_its_lookup_waits_no_more(
    harness: ManagerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as can be are looked up, and vLLM comes to it again: it has no place yet."""
    monkeypatch.setattr(prompt_queue, "MAX_LOOKED_UP", 0)
    harness.new()
    harness.manager.lookups.queue.add("r", 0)
    harness.scan()
    assert harness.waits["r"]
    for _ in range(3):
        harness.clock.now += 10.0
        harness.scan()
        assert not harness.waits["r"]
        harness.scan()
        assert not harness.waits["r"]
        assert not harness.manager.waits.pass_over("r", 0)
    assert report_of(harness).outcome == Outcome.LATE


def test_a_load_that_fails_is_no_load(harness: ManagerHarness) -> None:
    context = harness.request(ready=HASHES)
    schedule(harness, 3000)
    assert not harness.client.reported, "it is known at the load's end whether it was computed"
    harness.manager.handle_news(WorkerNews(failed_jobs=[FailedJob(1, None, request_id="r")]))
    harness.manager.complete_load(KEYS, context)
    (report,) = harness.client.reported
    assert (report.outcome, report.loaded_tokens, report.covered_keys) == (Outcome.FAILED, 0, [0])
    assert report.lease_id == harness.client.asked[0][0].lease_id
    schedule(harness)
    assert len(harness.client.reported) == 1


@pytest.mark.parametrize("in_one_step", [False, True])
def test_a_job_that_fails_in_several_workers_is_counted_once_and_all_its_keys_are_lost(
    harness: ManagerHarness, in_one_step: bool
) -> None:
    context = harness.request("stores", ready=set())
    assert harness.offer(context) == KEYS
    harness.request(ready=HASHES)
    schedule(harness, 3000)
    news = []
    for number in (1, 2):
        keys = [GroupKeys(0, block_hash(number))]
        failed = [FailedJob(1, ErrorCode.CHECKSUM, keys, "r"), FailedJob(2, ErrorCode.NO_SPACE, keys)]
        news.append(WorkerNews(failed_jobs=failed))
    for one in [news[0].aggregate(news[1])] if in_one_step else news:
        harness.manager.handle_news(one)
    harness.manager.complete_store(KEYS, context)
    assert harness.client.stored.since(0) == [block_hash(3)]
    counted = harness.counted()
    assert (counted[FAILED_LOADS], counted[FAILED_STORES]) == (1, 1)
    assert harness.client.invalidated == [GroupKeys(0, block_hash(number)) for number in (1, 2)]


def test_many_jobs_that_fail_in_one_worker_after_the_other_are_counted_once(harness: ManagerHarness) -> None:
    """As those of an engine whose daemon ends."""
    failed = [FailedJob(number, ErrorCode.SESSION_ENDED, [GroupKeys(0, block_hash(1))]) for number in range(4096)]
    for _ in range(2):
        harness.manager.handle_news(WorkerNews(failed_jobs=failed))
    assert harness.counted()[FAILED_STORES] == len(failed)


def test_what_a_preempted_request_looks_up_again_is_counted_again(harness: ManagerHarness) -> None:
    harness.request(ready=set())
    assert report_of(harness).lease_id == harness.client.asked[0][0].lease_id
    harness.clock.now += 2
    assert harness.scan()
    assert harness.client.again == [False, False]
    harness.client.answer(HASHES)
    harness.scan()
    report = report_of(harness, 3 * CHUNK_TOKENS)
    assert (report.outcome, report.lease_id) == (Outcome.LOADED, harness.client.asked[1][0].lease_id)
    assert [one.again for one in harness.client.reported] == [False, True], "its tokens are counted once"
    assert report.load_lease_id == harness.client.asked[1][0].lease_id


def test_why_a_preempted_request_computes_is_decided_anew(harness: ManagerHarness) -> None:
    harness.request(ready={block_hash(1)})
    harness.manager.requests["r"].wait.skipped = True
    assert report_of(harness).outcome is Outcome.SKIPPED
    harness.clock.now += 2
    assert harness.scan()
    harness.client.answer(set())
    harness.scan()
    assert report_of(harness).outcome is Outcome.MISSED


@pytest.mark.parametrize("ends", [False, True])
def test_a_load_of_before_a_reset_is_reported(harness: ManagerHarness, ends: bool) -> None:
    """vLLM does not report its end; whether it failed is known by the time the request runs again or ends."""
    context = harness.request(ready=HASHES)
    schedule(harness, 3 * CHUNK_TOKENS)
    harness.manager.reset_cache()
    assert not harness.client.reported
    harness.look_up()
    harness.client.answer(set())
    if ends:
        harness.manager.on_request_finished(context)
    else:
        schedule(harness)
    report, *later = harness.client.reported
    assert (report.outcome, report.loaded_tokens) == (Outcome.LOADED, 3 * CHUNK_TOKENS)
    assert all(each.again for each in later)


def test_a_lookup_is_counted_once_in_each_session(harness: ManagerHarness) -> None:
    """Also if its answer is late, but not if it was never sent; another daemon does not know it."""
    harness.client.ready = False
    harness.request()
    harness.client.ready = True
    for session, again in ((1, False), (1, True), (2, False)):
        harness.client.session_id = session
        harness.clock.now += 1.1
        assert harness.scan()
        assert harness.client.again[-1] is again
        harness.client.fail()
        harness.scan()
    assert report_of(harness).lease_id == harness.client.asked[-1][0].lease_id


def test_what_another_connector_loads_is_not_needed(harness: ManagerHarness) -> None:
    harness.request(ready=set())
    harness.requests["r"].num_computed_tokens = 3 * CHUNK_TOKENS  # what vLLM counts as computed when it schedules it
    report = report_of(harness)
    assert (report.outcome, report.own_keys, report.covered_keys) == (Outcome.NOT_NEEDED, [3], [3])
    assert (report.own_tokens, report.other_tokens) == (0, 3 * CHUNK_TOKENS)


def test_a_block_that_another_connector_loads_is_not_its_own_though_a_chunk_has_more() -> None:
    harness = ManagerHarness((ChunkGroup(0, 8, CHUNK_TOKENS, blocks_per_chunk=8),))
    harness.new()
    harness.scan()
    harness.requests["r"].num_computed_tokens = CHUNK_TOKENS // 8
    report = report_of(harness)
    assert (report.own_tokens, report.other_tokens) == (0, CHUNK_TOKENS // 8)


def test_the_end_of_a_prompt_in_vllms_own_cache_is_its_own(harness: ManagerHarness) -> None:
    """It tells connectors of whole blocks only."""
    harness.request("r", ready=set())
    harness.scan("r", computed=CHUNK_TOKENS)
    harness.requests["r"].num_computed_tokens = CHUNK_TOKENS + 7
    report = report_of(harness)
    assert (report.own_tokens, report.other_tokens, report.own_keys) == (CHUNK_TOKENS + 7, 0, [1])


def test_what_vllms_own_cache_has_is_reported_as_not_needed(harness: ManagerHarness) -> None:
    def counted(report: PromptReport) -> tuple[object, ...]:
        return report.outcome, report.own_tokens, report.own_keys, report.covered_keys, report.missing_key

    harness.request("a", {block_hash(3)})
    harness.scan("a", computed=CHUNK_TOKENS)
    assert counted(report := report_of(harness, name="a")) == (
        Outcome.MISSED,
        CHUNK_TOKENS,
        [1],
        [1],
        block_hash(2),
    )
    assert (report.missing_number, report.lease_id) == (2, harness.client.asked[-1][0].lease_id)

    harness.request("b", {block_hash(2)})
    harness.scan("b", computed=CHUNK_TOKENS)
    report = report_of(harness, CHUNK_TOKENS, "b")
    assert counted(report) == (Outcome.LOADED, CHUNK_TOKENS, [1], [2], block_hash(3))

    harness.request("c", set())
    harness.prepare("c", 2 * CHUNK_TOKENS, engine_has_all=True)
    report = report_of(harness, name="c")
    assert counted(report) == (Outcome.NOT_NEEDED, 2 * CHUNK_TOKENS, [2], [3], b""), "the last token is computed anyway"

    harness.request("d", set())
    harness.manager.on_request_finished(ReqContext("d"))
    assert counted(harness.client.reported[-1]) == (Outcome.DROPPED, 0, [3], [3], b"")
    harness.manager.reset_cache()
    harness.request("e", set())
    harness.manager.reset_cache()
    harness.scan("e")
    assert harness.client.again[-1], "a prompt is counted once, whatever is reset"


# --- what is measured ------------------------------------------------------------------------------


def test_the_end_of_a_steps_output_ends_the_step(harness: ManagerHarness) -> None:
    """vLLM asks for events once for each step's output, and for nothing else."""
    for _ in range(2):  # the first is taken for one in which the engine compiles
        harness.manager.begin_step([1024])
        harness.clock.now += 0.5
        harness.manager.step_ended()
    assert harness.prefill.tokens_per_second == 2048


def test_every_metric_is_declared_and_on_the_page(harness: ManagerHarness) -> None:
    harness.request(ready=HASHES)
    first = harness.counted()
    assert first == {LOOKUPS: 1, CONNECTED: 1, PREFILL_RATE: 0.0, LOAD_RATE: 0.0}
    assert set(first) <= set(DEFINITIONS)
    assert harness.manager.get_stats() is None
    harness.client.ready = False
    assert harness.counted() == {CONNECTED: 0, PREFILL_RATE: 0.0, LOAD_RATE: 0.0}
    page = Path(kvoffd_client.__file__).parents[1] / "README.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `vllm:")]
    assert lines == [f"| `{name}` | {metric.documentation} |" for name, metric in DEFINITIONS.items()]
