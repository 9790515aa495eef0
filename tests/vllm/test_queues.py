"""What vLLM's own scheduler finds in the daemon where prompts queue: all that is there when a prompt is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm.chunk_groups import GROUP_ID_BYTES
from kvoffd_client.vllm.connector_metadata import FailedJob, WorkerNews
from kvoffd_client.vllm.engine_namespace import Search
from kvoffd_client.vllm.next_lookup import MAX_RETRY_PAUSE_S
from kvoffd_client.vllm.parked_prompts import JUDGED_AT_ONCE
from kvoffd_client.vllm.prompt_queue import ASKED_AT_ONCE, MAX_AHEAD
from kvoffd_client.vllm.request_lookups import CHECKED_AHEAD
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, Outcome
from tests.kit.amount import TIMES
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import HEADS, full_attention, make_config
from tests.vllm.vllm_fakes import KEY_BYTES, split

BLOCK_TOKENS = 32
DOCUMENT_BLOCKS = 20
FULL = KVCacheGroupSpec(["full"], full_attention())
WINDOW = KVCacheGroupSpec(["window"], SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=64, **HEADS))

Make = Callable[..., SchedulerHarness]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes vLLM's scheduler with a KV cache of 2.5 documents, for these groups, with arguments of the engine, and
    options of the connector."""
    made: list[SchedulerHarness] = []

    def build(*groups: KVCacheGroupSpec, blocks: int = DOCUMENT_BLOCKS * 5 // 2, **arguments: Any) -> SchedulerHarness:
        options = {"directory": str(tmp_path), **arguments.pop("options", {})}
        config = make_config(model, options, **{"max_model_len": 1024, **arguments})
        made.append(SchedulerHarness(config, blocks, *(groups or (FULL,))))
        made[-1].keeps_stored = True
        return made[-1]

    yield build
    for one in made:
        one.close()


def document(seed: int, blocks: int = DOCUMENT_BLOCKS) -> list[int]:
    return Random(seed).choices(range(1000), k=blocks * BLOCK_TOKENS + 1)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prompt_finds_what_was_stored_while_it_queued(make: Make, groups: Any, policy: str) -> None:
    engine = make(*groups, max_num_seqs=1, scheduling_policy=policy)
    requests = [engine.add(f"{turn}-{seed}", document(seed)) for turn in "ab" for seed in range(8)]
    engine.end(requests, 200)
    assert [engine.cached[f"b-{seed}"] for seed in range(8)] == [DOCUMENT_BLOCKS * BLOCK_TOKENS] * 8
    assert len(engine.loaded) >= 6, "vLLM's own cache has two"


def test_a_prompt_finds_what_another_engine_stored_while_it_queued(make: Make) -> None:
    engine = make(max_num_seqs=1)
    first, second = (engine.add(name, document(seed), max_tokens=5) for seed, name in enumerate(("first", "second")))
    engine.step()
    engine.there |= {bytes(one) for one in second.block_hashes}
    engine.client.stored.add(list(second.block_hashes))  # as the daemon's events say
    engine.end([first, second], 30)
    assert engine.loaded == ["second"]


def test_a_prompt_behind_many_finds_in_its_turn_what_was_stored_while_an_earlier_one_was_loaded(make: Make) -> None:
    """It is not asked for again before, though it waits for that load: vLLM comes to many such prompts in each step."""
    engine = make(max_num_batched_tokens=1024, max_model_len=8192, blocks=2000)
    engine.keeps_stored, engine.held = False, {"first"}
    first = engine.add("first", document(0, 200))
    engine.there |= {bytes(one) for one in first.block_hashes}
    for _ in range(3):
        engine.step()
    waiting = [engine.add(f"{seed}", document(seed, 40)) for seed in range(1, CHECKED_AHEAD + 5)]
    for _ in range(5):
        engine.step()
    last, asked = waiting[-1], len(engine.client.asked)
    assert asked == 1 + len(waiting), "all were answered, and have nothing"
    engine.there |= {bytes(one) for one in last.block_hashes}
    engine.client.stored.add(list(last.block_hashes))  # by another engine
    for _ in range(5):
        engine.step()
    assert len(engine.client.asked) == asked
    engine.held = set()
    engine.end([first, *waiting], 100)
    assert engine.loaded == ["first", last.request_id]


def test_a_prompt_whose_lookup_failed_when_it_came_is_looked_up_again(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.answers = False
    first = engine.add("first", document(1), max_tokens=200)
    engine.step()
    engine.answers = True
    engine.answer()
    engine.step()
    engine.answers = False
    second = engine.add("second", document(2))
    engine.there |= {bytes(one) for one in second.block_hashes}
    engine.client.fail()
    engine.answers = True
    engine.end([first, second], 220)
    assert engine.loaded == ["second"]
    assert engine.client.reported[-1].outcome is Outcome.LOADED


def test_a_prompt_that_queued_longer_than_its_lease_lives_is_looked_up_again(make: Make) -> None:
    engine = make(max_num_seqs=1)
    first = engine.add("first", document(1), max_tokens=5)
    engine.step()
    second = engine.add("second", document(2))
    engine.there |= {bytes(one) for one in second.block_hashes}
    engine.answer()
    for future, _ in engine.client.asked:
        future.stale_at = min(future.stale_at, engine.clock.now + 300)
    engine.clock.now += 400
    engine.end([first, second], 30)
    assert engine.loaded == ["second"]


@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.parametrize("most_running", [1, 4, 256])
def test_a_batch_loads_all_that_no_earlier_prompt_left_in_the_cache(make: Make, order: str, most_running: int) -> None:
    """Each document but its first prompt is a hit, of vLLM's own cache or of the daemon."""
    engine = make(max_num_seqs=most_running, blocks=DOCUMENT_BLOCKS * 5, max_num_batched_tokens=2048)
    documents = [seed for seed in range(20) for _ in range(5)]
    if order == "random":
        Random(1).shuffle(documents)
    shared = DOCUMENT_BLOCKS * BLOCK_TOKENS
    requests = [
        engine.add(f"{at}", document(seed)[:shared] + document(1000 + at, 1)) for at, seed in enumerate(documents)
    ]
    engine.end(requests, 2000)
    hits = sum(cached >= shared for cached in engine.cached.values())
    # Prompts of one document that begin in the same step, before its blocks are anywhere, compute it each.
    together = 20 * min(3, most_running - 1)
    assert hits >= len(requests) - 20 - together


def test_prompts_are_counted_though_vllm_s_own_cache_had_them_before_their_turn(make: Make) -> None:
    engine = make(max_num_seqs=1, max_num_batched_tokens=1024, blocks=200)
    requests = [engine.add(f"{at}", document(1)) for at in range(30)]
    assert len(engine.client.asked) < len(requests)
    engine.end(requests, 100)
    assert engine.client.again.count(False) == len(requests)
    counted = [one.lease_id for one in engine.client.reported]
    assert len({*counted}) == len(requests)


def test_a_long_queue_holds_few_leases(make: Make) -> None:
    engine = make(max_num_seqs=1, max_num_batched_tokens=1024)
    requests = [engine.add(f"{at}", document(at % 7, 3)) for at in range(2000)]
    assert len(engine.client.asked) <= MAX_AHEAD
    for request in requests[:7]:
        engine.there |= {bytes(one) for one in request.block_hashes}
    for _ in range(50):
        engine.step()
        leases = {future.lease_id for future, _ in engine.client.asked if future.leased} - {*engine.client.released}
        assert len(leases) <= MAX_AHEAD
    assert len(engine.client.asked) <= MAX_AHEAD + 2 * len(engine.ran)


def test_of_many_prompts_that_wait_for_a_disk_few_are_looked_at_in_a_step(make: Make) -> None:
    engine = make(max_num_seqs=256, options={"do_no_harm": False})
    engine.answers = False
    waiting = [engine.add(f"{at}", document(at, 2)) for at in range(300)]
    for _ in range(300):
        engine.answer_coming(wait_s=60.0)
        engine.step()
    assert not engine.ran
    asked = len(engine.client.asked)
    assert asked > len(waiting), "all were asked for"
    for _ in range(20):
        engine.clock.now += MAX_RETRY_PAUSE_S
        engine.step()
        assert len(engine.client.asked) - asked <= JUDGED_AT_ONCE
        asked = len(engine.client.asked)
        engine.answer_coming(wait_s=60.0)
    engine.answers = True
    engine.there = {bytes(one) for request in waiting for one in request.block_hashes}
    engine.end(waiting, 3000)
    assert len(engine.loaded) == len(waiting)


def test_of_many_long_prompts_few_are_looked_up_in_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that vLLM comes to behind the window, after which no more keys are to be looked up; all are in the end."""
    monkeypatch.setattr("kvoffd_client.vllm.prompt_queue.ASKED_KEYS", 2 * DOCUMENT_BLOCKS + 1)
    engine = make(max_num_seqs=128, max_num_batched_tokens=128)
    engine.answers = False
    requests = [engine.add(f"{at}", document(at)) for at in range(30)]
    counts = []
    for _ in range(20):
        before = len(engine.client.asked)
        engine.step()
        engine.clock.now -= 0.01  # none waits for too long
        counts.append(len(engine.client.asked) - before)
    assert max(counts) == 3
    assert len(engine.client.asked) == len(requests)
    engine.answers = True
    engine.end(requests, 1000)


def test_an_idle_engine_does_not_rest_while_prompts_wait_for_their_turn(make: Make) -> None:
    """Of those whose answers come together few are looked at in a step, and of many new ones few are looked up."""
    count, rests = 3 * JUDGED_AT_ONCE, list[int]()
    engine = make(max_num_seqs=256, options={"do_no_harm": False})
    parked = engine.manager.lookups.queue.parked
    engine.manager.waits._pause = lambda: rests.append(len(parked._due_since) + len(parked.for_lookups))
    engine.answers = False
    for at in range(count):
        engine.add(f"{at}", document(at, 2))
    for _ in range(2 * count):
        engine.clock.now += MAX_RETRY_PAUSE_S
        engine.answer_coming(wait_s=60.0)
        engine.step()
    for at in range(2 * ASKED_AT_ONCE):
        engine.add(f"new-{at}", document(count + at, 2))
    for _ in range(4):
        engine.step()
    assert len(rests) > 0
    assert set(rests) == {0}


def test_an_urgent_prompt_that_waits_for_a_disk_has_its_turn_before_others(make: Make) -> None:
    """Many less urgent ones wait for the disk too, each of which is looked at again whenever that may have changed."""
    engine = make(max_num_seqs=256, scheduling_policy="priority", options={"do_no_harm": False})
    engine.answers = False
    waiting = [engine.add(f"low-{at}", document(at, 2), priority=5) for at in range(300)]
    for _ in range(300):
        engine.answer_coming(wait_s=60.0)
        engine.step()
    urgent = engine.add("urgent", document(1000, 2), priority=0)
    its, ready_after = {bytes(one) for one in urgent.block_hashes}, 20
    for steps in range(200):
        if steps > ready_after:
            for index in engine.unanswered:
                if its.issuperset(split(engine.client.asked[index][1][0].keys)):
                    engine.client.answer(its, index)
        engine.answer_coming(wait_s=60.0)
        engine.clock.now += MAX_RETRY_PAUSE_S
        engine.step()
        if engine.loaded:
            break
    assert engine.loaded == ["urgent"]
    assert steps < ready_after + 10
    assert not any(one.num_computed_tokens for one in waiting)


def test_a_prompt_that_waits_for_a_disk_has_its_turn_beside_many_urgent_ones(make: Make) -> None:
    """Its blocks are there, and vLLM would run it: the urgent ones only wait."""
    engine = make(max_num_seqs=256, scheduling_policy="priority", options={"do_no_harm": False})
    engine.answers = False
    urgent = [engine.add(f"high-{at}", document(at, 2)) for at in range(100)]
    low = engine.add("low", document(1000, 2), priority=5)
    for _ in range(100):
        engine.answer_coming(wait_s=60.0)
        engine.step()
    its = {bytes(one) for one in low.block_hashes}
    for _ in range(200):
        for index in engine.unanswered:
            if its.issuperset(split(engine.client.asked[index][1][0].keys)):
                engine.client.answer(its, index)
        engine.answer_coming(wait_s=60.0)
        engine.clock.now += MAX_RETRY_PAUSE_S
        engine.step()
    assert engine.loaded == ["low"]
    assert not any(one.num_computed_tokens for one in urgent)


def test_a_prompt_that_waits_for_space_is_scanned_once(make: Make) -> None:
    engine = make(max_num_seqs=8, max_model_len=4096, blocks=101)
    first = engine.add("first", document(1, 60), max_tokens=50)
    engine.step()
    long = engine.add("long", document(2, 90))
    engine.there |= {bytes(one) for one in long.block_hashes}
    scanned: list[str] = []
    scheduler = engine.connector.connector_scheduler
    scan = scheduler._lookup
    scheduler._lookup = lambda status, *rest: scanned.append(status.req.request_id) or scan(status, *rest)
    for _ in range(40):
        engine.step()
    assert scanned == ["long"]
    assert len(engine.client.asked) == 2, "all of it is there, and nothing else can be"
    engine.end([first, long], 60)
    assert engine.loaded == ["long"]


def test_a_prompt_before_a_full_window_is_looked_up_at_once(make: Make) -> None:
    """It came last and has the highest priority."""
    engine = make(max_num_seqs=1, scheduling_policy="priority", max_num_batched_tokens=1024, blocks=200)
    first, *_ = [engine.add(f"low-{at}", document(at), max_tokens=20, priority=5) for at in range(30)]
    for _ in range(3):
        engine.step()
    assert not engine.manager.lookups.queue.has_space
    asked = len(engine.client.asked)
    high = engine.add("high", document(999), priority=0)
    assert len(engine.client.asked) == asked + 1
    engine.there |= {bytes(one) for one in high.block_hashes}
    while not first.is_finished():
        engine.step()
    engine.step()
    assert engine.loaded == ["high"], "its load begins once there is a place for it"


def test_urgent_prompts_that_come_one_by_one_are_all_looked_up_at_once(make: Make) -> None:
    """While vLLM comes to no prompt that waits, because others run. What one step may look up is that step's."""
    engine = make(max_num_seqs=1, scheduling_policy="priority", max_num_batched_tokens=1024, blocks=200)
    for at in range(30):
        engine.add(f"low-{at}", document(at), max_tokens=100, priority=5)
    for _ in range(3):
        engine.step()
    assert not engine.manager.lookups.queue.has_space
    asked = len(engine.client.asked)
    for at in range(ASKED_AT_ONCE + 8):
        engine.add(f"high-{at}", document(100 + at), priority=0)
        engine.step()
    assert {run for run in engine.ran if run.startswith("high")} == set(), "the first one has no place yet"
    assert len(engine.client.asked) == asked + ASKED_AT_ONCE + 8


def test_prompts_behind_a_window_that_cannot_run_are_looked_up(make: Make) -> None:
    """Those in the window wait for space in the KV cache, in which others' loads are."""
    engine = make(FULL, WINDOW, max_num_seqs=64, max_num_batched_tokens=1024, blocks=120)
    engine.add("first", document(0), max_tokens=300)
    for _ in range(3):
        engine.step()
    long = [engine.add(f"long-{at}", document(1 + at)) for at in range(30)]
    short = [engine.add(f"short-{at}", document(100 + at, 6)) for at in range(3)]
    engine.there |= {bytes(one) for request in [*long, *short] for one in request.block_hashes}
    engine.held = {one.request_id for one in long}
    for _ in range(100):
        engine.step()
    engine.held = set()
    engine.end([*long, *short], 600)
    outcomes = {one.request: one.outcome for one in engine.client.reported}
    assert {outcomes[one.request_id] for one in short} == {Outcome.LOADED}


def test_prompts_shorter_than_a_chunk_take_no_turn_to_be_looked_up(make: Make) -> None:
    """There is nothing to look up, so none waits for it, and longer prompts behind them keep their turns."""
    options = {"blocks_per_chunk": 2}
    engine = make(max_num_seqs=128, max_num_batched_tokens=2048, blocks=400, options=options)
    engine.answers = False
    for at in range(16):
        engine.add(f"long-{at}", document(at))
    assert not engine.manager.lookups.queue.has_space
    short = {engine.add(f"short-{at}", document(100 + at, 1)).request_id for at in range(ASKED_AT_ONCE + 8)}
    last = engine.add("last", document(16))
    engine.step()
    assert {*engine.ran} == short
    assert engine.manager.requests[last.request_id].in_flight is not None


def test_a_request_that_gave_up_its_turn_once_waits_for_its_next_lookup(make: Make) -> None:
    engine = make(max_num_seqs=4, blocks=200)
    request = engine.add("r", document(1), max_tokens=200)
    engine.manager.requests["r"].wait.lookup.waits_no_more = True
    for _ in range(100):
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    engine.there |= {bytes(one) for one in request.block_hashes}
    for _ in range(5):
        engine.step()
    assert engine.loaded == ["r"]


def test_a_prompt_whose_next_block_is_stored_in_every_step_waits_no_longer_than_for_one_answer(make: Make) -> None:
    """Another engine computes the same prompt, and each answer comes a step late."""
    engine = make(blocks=200, max_model_len=4096)
    engine.add("running", document(9, 1), max_tokens=2000)
    for _ in range(3):
        engine.step()
    engine.answers = False
    engine.manager.prefill.tokens_per_second = 10_000.0
    request = engine.add("r", document(1, 100))
    began = engine.clock.now
    for key in map(bytes, request.block_hashes[:-1]):
        engine.answer()
        engine.there.add(key)
        engine.client.stored.add([key])
        if "r" in engine.step().num_scheduled_tokens or "r" in engine.loaded:
            break
    assert engine.clock.now - began == pytest.approx(0.2, abs=0.03), "lookup_deadline_ms"


def test_blocks_that_were_not_stored_outdate_no_answer(make: Make) -> None:
    engine = make()
    key, before = b"k" * KEY_BYTES, engine.client.stored.count
    failed = WorkerNews(failed_jobs=[FailedJob(1, ErrorCode.NO_SPACE, [GroupKeys(0, key)])])
    rejected = WorkerNews(rejected=[GroupKeys(0, key)])
    context, stored = ReqContext("r"), OffloadKey(key + bytes(GROUP_ID_BYTES))
    for count, news in ((0, failed), (0, rejected), (1, WorkerNews())):  # the last time it is stored
        engine.manager.stores._storing[stored] = 1
        engine.manager.handle_news(news)
        engine.manager.complete_store([stored], context)
        assert engine.client.stored.count - before == count


def test_without_a_daemon_nothing_of_a_request_stays(make: Make) -> None:
    engine = make(max_num_seqs=4, blocks=100)
    engine.client.ready, engine.client.unreachable = False, True
    for at in range(1200):
        engine.end([engine.add(f"{at}", document(at % 7, 1))], 20)
    assert len(engine.manager.lookups.queue._order) < 1100


@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_random_queues_come_to_their_end_and_find_what_is_there(make: Make, seed: int) -> None:
    """With aborts, failing loads, lookups that fail or come late, other engines' stores and resets."""
    rng = Random(seed)
    engine = make(*rng.choice([(FULL,), (FULL, WINDOW)]), max_num_seqs=rng.choice((1, 2, 8)), blocks=90)
    requests: list[Any] = []
    for step in range(400):
        if rng.random() < 0.3 and len(requests) < 80:
            tokens = document(rng.randrange(6), rng.randrange(1, 20))
            requests.append(engine.add(f"{len(requests)}", tokens, max_tokens=rng.randrange(1, 8)))
        if requests and rng.random() < 0.05:
            engine.abort(rng.choice(requests))
        if requests and rng.random() < 0.05:
            engine.failing.add(rng.choice(requests).request_id)
        if requests and rng.random() < 0.1:
            hashes = [bytes(one) for one in rng.choice(requests).block_hashes]
            engine.there |= {*hashes}
            engine.client.stored.add(hashes)
        if rng.random() < 0.05 and engine.unanswered:
            engine.client.fail(engine.unanswered[0])
        engine.answers = rng.random() < 0.8
        engine.clock.now += rng.choice((0.0, 0.0, 0.02, 0.5))
        engine.step()
        if step == 200:
            engine.client.stored.forget()
    engine.answers = True
    engine.end(requests, 3000)
    assert not engine.manager.requests
    assert not engine.manager.lookups.queue.has_waiting


class Troubled(SchedulerHarness):
    """An engine over a daemon with a disk and a store, which is restarted now and then, and which vLLM resets."""

    def trouble(self, rng: Random) -> None:
        """What may happen between two steps."""
        namespace = self.manager.namespace
        if rng.random() < 0.3:
            for index in self.unanswered:
                keys = [one for group in self.client.asked[index][1] for one in split(group.keys)]
                coming = [one for one in keys if one not in self.there and rng.random() < 0.7]
                tiers: Any = rng.choice(
                    ({"coming": coming}, {"shared": coming}, {"shared": coming, "asking": len(coming)})
                )
                self.client.answer(self.there, index, wait_s=rng.choice((0.0, 0.01, 0.5)), **tiers)
        if rng.random() < 0.02 and not (self.loading or self.scheduler.kv_holding_waiting):
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if rng.random() < 0.02:  # while requests run, and loads: vLLM's own cache keeps its blocks
            self.scheduler.reset_prefix_cache(reset_connector=True)
        if namespace.current is None and rng.random() < 0.7:
            self.find()
        if rng.random() < 0.03:
            self.restart()
            self.client.ready = rng.random() < 0.5
        elif rng.random() < 0.3:
            self.client.ready = True

    def restart(self) -> None:
        """The daemon is restarted: its leases have ended, and nothing that it was asked is answered."""
        for index in self.unanswered:
            self.client.fail(index)
        for future, _ in self.client.asked:
            future.stale_at = 0.0
        self.client.session_id += 1
        self.client.stored.forget()

    def find(self) -> None:
        """The workers report the weights of before."""
        namespace: Any = self.manager.namespace
        namespace.current, namespace._search = NamespaceSpec.named("model"), Search.FOUND
        self.register(registered=True)


@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_random_queues_with_tiers_restarts_and_resets_leave_nothing_behind(
    model: Path, tmp_path: Path, seed: int
) -> None:
    """Of two tenants, of which one may be more urgent, with aborts and loads that fail."""
    rng = Random(seed)
    policy = rng.choice(("fcfs", "priority"))
    arguments: Any = {"max_num_seqs": rng.choice((1, 8, 64)), "max_num_batched_tokens": rng.choice((128, 1024))}
    options = {"directory": str(tmp_path), "do_no_harm": rng.random() < 0.5}
    config = make_config(model, options, max_model_len=1024, scheduling_policy=policy, **arguments)
    engine = Troubled(config, rng.choice((60, 200)), *rng.choice([(FULL,), (FULL, WINDOW)]))
    engine.keeps_stored = True
    requests: list[Any] = []
    for _ in range(300):
        if rng.random() < 0.3 and len(requests) < 100:
            for _ in range(rng.choice((1, 1, 10))):
                tokens, urgency = document(rng.randrange(8), rng.randrange(1, 20)), rng.randrange(2)
                priority = urgency if policy == "priority" else 0
                requests.append(engine.add(f"{len(requests)}", tokens, rng.randrange(1, 8), priority=priority))
        if requests and rng.random() < 0.05:
            engine.abort(rng.choice(requests))
        if requests and rng.random() < 0.05:
            engine.failing.add(rng.choice(requests).request_id)
        engine.trouble(rng)
        engine.answers = rng.random() < 0.7
        engine.clock.now += rng.choice((0.0, 0.0, 0.02, 0.5, 2.0))
        engine.step()
    engine.answers = engine.client.ready = True
    engine.find()
    engine.end(requests, 3000)
    lookups = engine.manager.lookups
    assert not lookups.requests
    assert not lookups.loading
    assert not lookups.queue.has_waiting
    leased = {future.lease_id for future, _ in engine.client.asked if future.leased and future.stale_at}
    assert leased <= {*engine.client.released}
    firsts = [one.request for one in engine.client.reported if not one.again]
    assert len(firsts) == len({*firsts}), "its tokens are counted once"
    engine.close()
