"""Who is served by vLLM's own scheduler, and when, where its requests wait for the daemon or for KV cache blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec, SlidingWindowSpec

from kvoffd_client.vllm.engine_namespace import Search
from kvoffd_client.vllm.load_admission import LONGEST_DELAY_S
from kvoffd_client.vllm.log import logger
from tests.kit.amount import TIMES
from tests.kit.lines import lines_of
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import HEADS, full_attention, kv_cache_configs, make_config, recurrent_state
from tests.vllm.vllm_fakes import split

BLOCK_TOKENS = 32
BLOCKS = 40
FULL = KVCacheGroupSpec(["full"], full_attention())
WINDOW = KVCacheGroupSpec(["window"], SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=64, **HEADS))
STATE = KVCacheGroupSpec(["state"], recurrent_state())
RING = KVCacheGroupSpec(["ring"], CircularBufferSpec(block_size=BLOCK_TOKENS, **HEADS))

LINES_OF_ONE_THAT_WAITS = 50
"""Lines of ours for a prompt that waits for other prompts' loads, in each step: about five microseconds."""

Make = Callable[..., SchedulerHarness]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes vLLM's scheduler of so many blocks, for these groups, with arguments of the engine."""
    made: list[SchedulerHarness] = []

    def build(*groups: KVCacheGroupSpec, blocks: int = BLOCKS, **arguments: Any) -> SchedulerHarness:
        config = make_config(model, {"directory": str(tmp_path)}, **{"max_model_len": 4096, **arguments})
        made.append(SchedulerHarness(config, blocks, *(groups or (FULL,))))
        return made[-1]

    yield build
    for one in made:
        one.close()


def prompt(seed: int, blocks: int) -> list[int]:
    return Random(seed).choices(range(1000), k=blocks * BLOCK_TOKENS + 1)


def have(engine: SchedulerHarness, *requests: Any) -> None:
    """Let the daemon have all whole blocks of these requests."""
    engine.there |= {bytes(one) for request in requests for one in request.block_hashes}


def scans_of(engine: SchedulerHarness) -> list[str]:
    """The requests that vLLM scans from now on."""
    scanned: list[str] = []
    scheduler = engine.connector.connector_scheduler
    scan = scheduler._lookup
    scheduler._lookup = lambda status, *rest: scanned.append(status.req.request_id) or scan(status, *rest)
    return scanned


def lines_of_asking(engine: SchedulerHarness) -> list[int]:
    """The lines of each call in which vLLM asks for a request from now on, in order."""
    counts, ask = list[int](), engine.connector.get_num_new_matched_tokens

    def counted(*arguments: Any) -> Any:
        results: list[Any] = []
        counts.append(lines_of(lambda: results.append(ask(*arguments))))
        return results[0]

    engine.connector.get_num_new_matched_tokens = counted
    return counts


def passed(engine: SchedulerHarness, name: str, behind: list[Any]) -> list[str]:
    """Return which of these computed before a request."""
    before = set(engine.ran[: engine.ran.index(name)])
    return [one.request_id for one in behind if one.request_id in before]


def test_a_prompt_at_the_head_of_the_queue_is_not_passed_while_it_is_asked_for_again(make: Make) -> None:
    engine = make()
    running = [engine.add(f"before-{seed}", prompt(seed, 11), max_tokens=50 * seed) for seed in (1, 2, 3)]
    for _ in range(3):
        engine.step()
    head = engine.add("head", prompt(10, 25))
    behind = [engine.add(f"behind-{seed}", prompt(seed, 9), max_tokens=140) for seed in range(20, 40)]
    engine.end([head], 300)
    assert passed(engine, "head", behind) == []
    assert all(one.is_finished() for one in running)


def test_a_failed_load_whose_request_cannot_be_scheduled_holds_up_no_hits(make: Make) -> None:
    engine = make(scheduling_policy="priority")
    engine.held = {"slow", "failed"}
    slow, failed = engine.add("slow", prompt(1, 4)), engine.add("failed", prompt(2, 15), priority=5)
    have(engine, slow, failed)
    for _ in range(3):
        engine.step()
    assert set(engine.loading) == {"slow", "failed"}
    other = engine.add("other", prompt(3, 25), max_tokens=400)
    engine.failing, engine.held = {"failed"}, {"slow"}
    for _ in range(5):
        engine.step()
    assert (other.num_computed_tokens > 0, failed.num_computed_tokens) == (True, 0)
    hits = [engine.add(f"hit-{seed}", prompt(seed, 3)) for seed in range(10, 20)]
    have(engine, *hits)
    engine.end(hits, 250)
    assert not other.is_finished()
    engine.held = set()
    engine.end([other, failed, slow], 500)


def test_a_load_that_does_not_fit_yet_is_not_passed_by_smaller_ones(make: Make) -> None:
    engine = make(FULL, WINDOW, blocks=101)
    small = [engine.add(f"small-{seed}", prompt(seed, 6)) for seed in range(30)]
    have(engine, *small)
    engine.held = {one.request_id for one in small}
    for _ in range(3):
        engine.step()
    large = engine.add("large", prompt(100, 60))
    more = [engine.add(f"more-{seed}", prompt(seed, 6)) for seed in range(101, 130)]
    have(engine, large, *more)
    for one in [*small, *more]:
        engine.held = {one.request_id for one in [*small, *more]} - set(engine.ran) - {one.request_id}
        for _ in range(3):
            engine.step()
    assert "large" in engine.loaded
    assert passed(engine, "large", more) == []


@pytest.mark.parametrize(
    ("groups", "arguments"),
    [
        pytest.param((FULL, WINDOW, RING), {}, id="ring"),
        pytest.param((FULL,), {"drafts": 3}, id="drafts"),
    ],
)
def test_a_lone_prompt_that_fits_is_loaded(make: Make, groups: Any, arguments: dict[str, Any]) -> None:
    drafts = arguments.get("drafts")
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4} if drafts else None
    engine = make(*groups, blocks=101, speculative_config=speculation)
    for seed, blocks in enumerate((60, 74, 80, 90, 94)):
        request = engine.add(f"lone-{blocks}", prompt(seed, blocks))
        have(engine, request)
        engine.end([request], 20)
        assert engine.loaded[-1:] == [request.request_id]


def test_a_prompt_that_is_computed_for_want_of_kv_cache_has_an_outcome_and_a_line_in_the_log(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning_once", lines.append)
    speculation = {"method": "ngram", "num_speculative_tokens": 100, "prompt_lookup_max": 4}
    engine = make(FULL, speculative_config=speculation, blocks=41)
    request = engine.add("large", prompt(1, 38))
    have(engine, request)
    engine.end([request], 20)
    assert [(one.outcome, one.loaded_tokens) for one in engine.client.reported] == [("no_space", 0)]
    assert "the KV cache has no space for them" in lines[0]


@pytest.mark.parametrize("for_space", [True, False])
def test_prompts_that_wait_for_loads_are_not_scanned_in_each_step(make: Make, for_space: bool) -> None:
    """For blocks that are free then, or for their own beginning, which is being loaded for another one."""
    engine = make(FULL, WINDOW, blocks=301 if for_space else 601, max_model_len=8192)
    engine.held = {"first"}
    shared = prompt(0, 200)
    first = engine.add("first", shared)
    have(engine, first)
    for _ in range(3):
        engine.step()
    prompts = [prompt(seed, 250) if for_space else shared + prompt(seed, 3) for seed in range(1, 21)]
    waiting = [engine.add(f"waits-{seed}", tokens) for seed, tokens in enumerate(prompts, 1)]
    have(engine, *waiting)
    for _ in range(8):  # a few are scanned in each
        engine.step()
    scanned = scans_of(engine)
    engine.step()
    assert not scanned
    engine.held = set()
    engine.end([first, *waiting[:2]], 20)
    assert engine.loaded[0] == "first"
    assert {"waits-1", "waits-2"} <= {*engine.loaded}


@pytest.mark.parametrize(
    ("groups", "blocks", "prompt_blocks", "there", "scanned_each", "scanned_all"),
    [
        pytest.param((FULL, WINDOW), 301, 240, range(240), 1, 1, id="space"),
        pytest.param((FULL, WINDOW), 301, 6, range(3), 2, 20, id="space, maybe nothing to load"),
        pytest.param((FULL,), 6000, 240, range(20), 0, 0, id="earlier"),
        pytest.param((FULL, WINDOW), 6000, 240, [0, *range(2, 240)], 1, 20, id="earlier, maybe enough to load"),
    ],
)
def test_of_many_new_prompts_behind_a_load_few_are_scanned_in_a_step(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    groups: Any,
    blocks: int,
    prompt_blocks: int,
    there: Collection[int],
    scanned_each: int,
    scanned_all: int,
) -> None:
    """They would wait all the same: for space, as the load before them, or until it ends, as they take several steps.
    A scan of a prompt of 32,000 tokens takes two milliseconds. It is made where it may find that one need not wait."""
    monkeypatch.setattr("kvoffd_client.vllm.prompt_waits.SCANNED_HASHES", 1)
    engine = make(*groups, blocks=blocks, max_model_len=8192)
    engine.held = {"first"}
    first = engine.add("first", prompt(0, 200))
    have(engine, first)
    for _ in range(3):
        engine.step()
    waiting = [engine.add("waits-1", prompt(1, 240))]
    waiting += [engine.add(f"waits-{seed}", prompt(seed, prompt_blocks)) for seed in range(2, 21)]
    engine.there |= {bytes(each.block_hashes[at]) for each in waiting for at in there}
    if blocks < 6000:
        have(engine, waiting[0])
    scanned, counts = scans_of(engine), list[int]()
    for _ in range(30):
        before = len(scanned)
        engine.step()
        engine.clock.now -= 0.01  # a load is not waited for for long
        counts.append(len(scanned) - before)
    assert max(counts) == scanned_each, "the one whose load waits, and one more"
    assert len({*scanned}) == scanned_all, "each in its turn"
    engine.held = set()
    engine.end([first, *waiting], 1000)
    assert engine.loaded == ["first", *(one.request_id for one in waiting)]


def _with_a_load_that_waits(make: Make) -> tuple[SchedulerHarness, Any]:
    """An engine with a prompt whose load waits for space, which another load has, and that prompt."""
    engine = make(FULL, WINDOW, blocks=301, max_model_len=8192)
    engine.held = {"first"}
    first, waits = engine.add("first", prompt(0, 200)), engine.add("waits", prompt(1, 240))
    have(engine, first, waits)
    for _ in range(3):
        engine.step()
    return engine, waits


@pytest.mark.parametrize("tokens", [20 * BLOCK_TOKENS + 1, 32 * BLOCK_TOKENS])
def test_a_prompt_whose_load_is_too_slow_computes_though_a_load_before_it_waits_for_space(
    make: Make, tokens: int
) -> None:
    """Also where the daemon has more of it than is loaded: the last token is computed anyway."""
    engine, waits = _with_a_load_that_waits(make)
    slow = engine.add("slow", prompt(2, 32)[:tokens])
    have(engine, slow)
    for _ in range(3):
        engine.step()
    assert not engine.ran, "it waits behind the other load"
    loaded_tokens = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.manager.harm.loads_paused_until[loaded_tokens.bit_length()] = engine.clock.now + 100
    engine.end([slow], 5)
    assert engine.loaded == []
    assert not waits.num_computed_tokens


@pytest.mark.parametrize("parameters", [None, {"max_load_tokens": 4096}], ids=["not scanned", "scanned"])
def test_a_prompt_whose_lease_is_over_computes_what_is_gone_though_a_load_before_it_waits_for_space(
    make: Make, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, int] | None
) -> None:
    """It is asked again: its old answer says nothing of what can be loaded."""
    monkeypatch.setattr("kvoffd_client.vllm.request_lookups.CHECKED_AHEAD", 0)  # as behind many others
    engine, waits = _with_a_load_that_waits(make)
    gone = engine.add("gone", prompt(2, 32), parameters=parameters)
    have(engine, gone)
    scanned = scans_of(engine)
    for _ in range(3):
        engine.step()
    assert not engine.ran, "it waits behind the other load"
    assert ("gone" in scanned) == (parameters is not None)
    engine.there -= {bytes(one) for one in gone.block_hashes}
    engine.client.asked[-1][0].stale_at = engine.clock.now
    engine.end([gone], 5)
    assert engine.loaded == []
    assert not waits.num_computed_tokens


@pytest.mark.parametrize("for_space", [True, False])
def test_a_prompt_that_waits_for_loads_costs_a_step_little_however_many_run(make: Make, for_space: bool) -> None:
    lines = {}
    for running, count in ((1, 20), (20, 20), (20, 100)):
        blocks = 300 + 24 * running if for_space else 6000
        engine = make(*(FULL, WINDOW) if for_space else (FULL,), blocks=blocks, max_model_len=8192)
        loads = [engine.add(f"load-{seed}", prompt(seed, 20)) for seed in range(running)]
        engine.held = {one.request_id for one in loads}
        have(engine, *loads)
        for _ in range(3):
            engine.step()
        assert len(engine.loading) == running
        waiting = [engine.add(f"waits-{seed}", prompt(100 + seed, 240)) for seed in range(count)]
        for one in waiting:
            engine.there |= {bytes(each) for each in one.block_hashes[: 240 if for_space else 20]}
        for _ in range(12):  # in which all are looked up
            engine.step()
        lines[running, count] = asked = lines_of_asking(engine)
        engine.step()
        assert len(asked) == count
    # The first calls do what a step does once: prompts are woken, a load is deferred, and all others are looked at.
    assert max(max(asked[2:]) for asked in lines.values()) <= LINES_OF_ONE_THAT_WAITS


def test_whether_an_answer_is_old_is_not_asked_key_by_key(make: Make) -> None:
    engine = make(FULL, WINDOW, blocks=301, max_model_len=8192)
    engine.manager.prefill.tokens_per_second = 100.0  # it waits for its answer
    engine.answers = False
    engine.add("r", prompt(1, 240))
    engine.client.answer(set())
    engine.step()
    stored, answer = engine.client.stored, engine.manager.requests["r"].answer
    assert answer is not None
    assert answer.asked_chunks == 480
    stored.add([b"another"])
    assert lines_of(lambda: answer.is_old(stored)) < 60
    assert not answer.is_old(stored)
    stored.add([bytes(answer.chunks[1][-1])])
    assert answer.is_old(stored)


def test_a_prompt_that_waits_for_a_disk_is_loaded_once_it_is_there_though_another_is_loading(make: Make) -> None:
    engine = make(FULL, blocks=6000, max_model_len=8192, max_num_batched_tokens=1024)
    engine.manager.prefill.tokens_per_second = 6400.0
    engine.answers, engine.held = False, {"first"}
    first, second = engine.add("first", prompt(0, 250)), engine.add("second", prompt(1, 240))
    ours, its = ({bytes(one) for one in each.block_hashes} for each in (first, second))
    began, comes_s, ready = engine.clock.now, 0.5, ours
    while "second" not in engine.loaded and engine.clock.now < began + LONGEST_DELAY_S:
        left_s = began + comes_s - engine.clock.now
        ready = ours if left_s > 0 else ours | its
        for index in engine.unanswered:
            asked = {key for keys in engine.client.asked[index][1] for key in split(keys.keys)}
            engine.client.answer(asked & ready, index, coming=[*asked - ready], wait_s=max(0.01, left_s))
        engine.step()
    assert engine.loaded == ["second"]
    assert engine.clock.now - began < comes_s + 0.1


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_a_prompt_that_waits_for_a_disk_is_scanned_when_an_answer_comes(make: Make, groups: Any) -> None:
    """A scan of 131,072 tokens in each step took others' steps ten milliseconds for as long as it waited."""
    engine = make(*groups, blocks=301, max_model_len=8192)
    engine.answers = False
    engine.manager.prefill.tokens_per_second = 100.0
    request = engine.add("waits", prompt(1, 200))
    hashes = {*request.block_hashes}
    engine.client.answer(set(), coming=hashes, wait_s=9.0)
    scanned = scans_of(engine)
    engine.step()
    assert scanned, "the answer that has come"
    scanned.clear()
    for _ in range(10):
        engine.step()
    assert not scanned
    assert len(engine.client.asked) == 2, "it was asked for again and is not answered yet"
    engine.there = hashes
    engine.answer()
    engine.end([request], 5)
    assert engine.loaded == ["waits"]


@pytest.mark.parametrize("late", [True, False])
def test_states_are_stored_though_it_is_too_early_or_much_is_being_stored(make: Make, late: bool) -> None:
    """vLLM offers the state at a boundary once."""
    engine = make(FULL, STATE, blocks=101, mamba_cache_mode="align", max_num_batched_tokens=128)
    engine.answers = not late
    engine.manager.prefill.tokens_per_second = 1e6  # the answer is not waited for
    engine.manager.stores.outstanding_bytes = 0 if late else 1 << 40
    request = engine.add("r", prompt(1, 10), max_tokens=8)
    for _ in range(6):
        engine.step()
    states = [index for index, group in enumerate(engine.manager.groups) if group.group_id == 1]
    assert {key for index, key in engine.stored if index == states[0]} & {*request.block_hashes}


def test_nothing_is_loaded_by_workers_that_are_not_registered(make: Make) -> None:
    engine = make()
    requests = [engine.add(f"r{seed}", prompt(seed, 5)) for seed in range(4)]
    have(engine, *requests)
    engine.register(registered=False)
    engine.end(requests[:1], 60)
    assert engine.loaded == []
    engine.register(registered=True)
    again = engine.add("again", prompt(9, 5))
    have(engine, again)
    engine.end([again], 10)
    assert engine.loaded == ["again"]


def test_an_idle_engine_hears_that_its_workers_are_registered_again(make: Make) -> None:
    """It has made no steps since they were not."""
    engine = make()
    engine.register(registered=False)
    engine.step()
    request = engine.add("r", prompt(1, 5))
    have(engine, request)
    engine.step()
    engine.register(registered=True)
    engine.end([request], 10)
    assert engine.loaded == ["r"]


def test_an_idle_engine_does_not_wait_for_a_daemon_that_has_not_answered_yet(make: Make) -> None:
    engine = make()
    engine.register(registered=False)
    engine.client.ready = False
    engine.clock.now += 1.0
    engine.step()
    engine.add("r", prompt(1, 5))
    assert engine.step().num_scheduled_tokens


@pytest.mark.parametrize("found", [False, True])
def test_after_a_reset_a_prompt_does_not_wait_for_a_daemon_that_is_gone(make: Make, found: bool) -> None:
    """Neither until the namespace is known, nor once it was found."""
    engine = make()
    namespace, before = engine.manager.namespace, engine.manager.namespace.current
    engine.client.ready, engine.client.unreachable = False, True
    engine.step()
    engine.connector.reset_cache()
    if found:
        namespace.current, namespace._search, namespace._search_began = before, Search.FOUND, engine.clock()
        engine.register(registered=False)
    engine.add("r", prompt(1, 5))
    assert engine.step().num_scheduled_tokens


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("adapter", [None, LoRARequest("name", 1, "/adapter")])
def test_a_prompt_that_another_connector_loads_does_not_wait_for_the_daemon(
    adapter: LoRARequest | None, first: bool, fits: bool, model: Path, tmp_path: Path
) -> None:
    """Nor until the workers have read its adapter, nor once the KV cache has space for it."""
    children = [
        {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "KvoffdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"directory": str(tmp_path)},
        },
    ]
    config = make_config(model, {"connectors": children if first else children[::-1]}, max_model_len=4096)
    config.kv_transfer_config.kv_connector = "MultiConnector"
    engine = SchedulerHarness(config, BLOCKS, FULL)
    if not fits:
        large = engine.add("large", prompt(2, BLOCKS - 3), max_tokens=60)
        engine.step()
    engine.answers = False
    request = engine.add("r", prompt(1, 5), parameters={"do_remote_prefill": True}, lora_request=adapter)
    engine.step()
    if not fits:
        assert not request.num_computed_tokens
        engine.step()
        engine.abort(large)
        engine.step()
    assert request.num_computed_tokens
    engine.close()


def test_a_load_that_would_wait_for_one_that_failed_is_computed(make: Make) -> None:
    """vLLM keeps blocks free for the one that failed until it is scheduled, which may be never."""
    engine = make(blocks=44, scheduling_policy="priority")
    slow, failed = engine.add("slow", prompt(1, 4)), engine.add("failed", prompt(2, 15), priority=5)
    have(engine, slow, failed)
    engine.held = {"slow", "failed"}
    for _ in range(3):
        engine.step()
    other = engine.add("other", prompt(3, 25), max_tokens=400)
    engine.failing, engine.held = {"failed"}, {"slow"}
    for _ in range(5):
        engine.step()
    large = engine.add("large", prompt(4, 6))
    have(engine, large)
    engine.end([large], 150)
    assert not other.is_finished()
    assert [one.outcome for one in engine.client.reported if one.request == "large"] == ["no_space"]


def test_two_failed_loads_that_cannot_be_computed_at_once_are_computed(make: Make) -> None:
    """vLLM keeps the first, which has no blocks any more, before the second, which still has its."""
    engine = make(FULL, WINDOW, blocks=120)
    requests = [engine.add("first", prompt(1, 38)), engine.add("second", prompt(2, 41))]
    have(engine, *requests)
    engine.held = {"first", "second"}
    for _ in range(3):
        engine.step()
    assert set(engine.loading) == {"first", "second"}
    engine.failing, engine.held = {"first", "second"}, set()
    engine.end(requests, 50)


STEP_TOKENS = 128
LONG_BLOCKS = 125
"""Of a prompt that takes 32 steps."""


def steps_of_a_hit(engine: SchedulerHarness, hit: list[int], longs_behind: int) -> int:
    """Return the steps until a prompt of 40 blocks has its first token, behind one long prompt and before others."""
    engine.add("running", prompt(50, LONG_BLOCKS))
    engine.step()
    request = engine.add("hit", hit)
    for seed in range(longs_behind):
        engine.add(f"behind-{seed}", prompt(51 + seed, LONG_BLOCKS))
    for steps in range(1, 200):
        engine.step()
        if request.is_finished():
            return steps
    raise AssertionError("it was not served")


@pytest.mark.parametrize("longs_behind", [0, 1, 3])
@pytest.mark.parametrize("threshold", [0, STEP_TOKENS // 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_hit_is_not_passed_by_long_prompts_behind_it_while_it_is_loaded(
    make: Make, policy: str, threshold: int, longs_behind: int
) -> None:
    """It comes a step later than a hit of vLLM's own cache, and before it would have been computed."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": STEP_TOKENS, "long_prefill_token_threshold": threshold}
    took = {}
    for way in ("own", "loaded", "computed"):
        engine = make(blocks=1000, scheduling_policy=policy, **arguments)
        first = engine.add("first", prompt(1, 40))
        engine.end([first], 50)
        if way != "own":
            assert engine.scheduler.reset_prefix_cache()
        if way == "loaded":
            have(engine, first)
        took[way] = steps_of_a_hit(engine, prompt(1, 40), longs_behind)
        assert engine.loaded == (["hit"] if way == "loaded" else [])
    assert took["own"] < took["loaded"] <= took["own"] + 2 < took["computed"], took


@pytest.mark.parametrize(("rate", "turn_s"), [(100.0, LONGEST_DELAY_S), (40 * BLOCK_TOKENS / 0.3, 0.3)])
def test_a_long_prompt_waits_for_a_load_no_longer_than_computing_takes(make: Make, rate: float, turn_s: float) -> None:
    """Here it hangs. Rate: tokens a second."""
    engine = make(blocks=1000, max_num_batched_tokens=STEP_TOKENS)
    engine.held = {"hangs"}
    engine.manager.prefill.tokens_per_second = rate
    hangs = engine.add("hangs", prompt(1, 40))
    have(engine, hangs)
    engine.step()
    began, long = engine.clock.now, engine.add("long", prompt(2, LONG_BLOCKS))
    short = engine.add("short", prompt(3, 2))
    engine.end([short], 3)
    assert not long.num_computed_tokens
    for _ in range(200):
        if long.num_computed_tokens:
            break
        engine.step()
    assert engine.clock.now - began == pytest.approx(turn_s, abs=0.05)
    engine.held = set()
    engine.end([hangs, long], 100)


@pytest.mark.parametrize("seed", range(10 * TIMES))
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_two_requests_of_half_the_kv_cache_each_and_inverted_priorities_end(make: Make, groups: Any, seed: int) -> None:
    """The less urgent one came first. Either may be loading, hold its blocks, or need more than are free."""
    rng = Random(seed)
    blocks = 42 if groups == (FULL,) else 50
    engine = make(*groups, blocks=blocks, scheduling_policy="priority", max_num_batched_tokens=256)
    engine.keeps_stored = rng.random() < 0.5
    first = engine.add("first", prompt(1, rng.randrange(15, 24)), priority=9, max_tokens=rng.randrange(100, 500))
    if rng.random() < 0.7:
        have(engine, first)
    engine.held = {"first", "urgent"}
    for _ in range(rng.randrange(6)):
        engine.step()
    if rng.random() < 0.5:
        engine.held.discard("first")
    for _ in range(rng.randrange(30)):
        engine.step()
    urgent = engine.add("urgent", prompt(2, rng.randrange(15, 24)), max_tokens=rng.randrange(100, 500))
    have(engine, urgent)
    for _ in range(rng.randrange(30)):
        engine.step()
    engine.held.discard(rng.choice(["first", "urgent"]))
    for _ in range(rng.randrange(60)):
        engine.step()
    engine.held = set()
    engine.end([first, urgent], 1500)
    assert engine.loaded


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("spare", [-1, 0, 3])
def test_a_prompt_as_large_as_the_kv_cache_is_loaded_where_it_can_be_computed(
    model: Path, tmp_path: Path, spare: int, chunk: int
) -> None:
    """One that is larger vLLM never begins, with a daemon or without; and it starts no engine that allows it."""
    config = make_config(model, {"directory": str(tmp_path), "blocks_per_chunk": chunk}, max_model_len=1280)
    largest = prompt(1, 40)[:-2]
    engine = SchedulerHarness(config, 41 + spare, FULL)
    ended = {}
    for there in (False, True):
        request = engine.add(f"there-{there}", largest)
        if there:
            have(engine, request)
        for _ in range(20):
            if not request.is_finished():
                engine.step()
        ended[there] = request.is_finished()
        engine.abort(request)
        engine.step()
        assert engine.scheduler.reset_prefix_cache()
    engine.close()
    assert ended == dict.fromkeys([False, True], spare >= 0)
    assert engine.loaded == ["there-True"] * (spare >= 0)
    config.cache_config.num_gpu_blocks_override = 41 + spare
    refused = pytest.raises(ValueError, match="max seq len") if spare < 0 else nullcontext()
    with refused:
        kv_cache_configs(config, [{"layer": full_attention()}], [1 << 40])


def test_a_long_prompt_whose_beginning_is_loaded_does_not_pass_an_earlier_hit(make: Make) -> None:
    engine = make(blocks=1000, max_num_batched_tokens=STEP_TOKENS)
    engine.held = {"hit"}
    hit = engine.add("hit", prompt(1, 40))
    have(engine, hit)
    engine.step()
    long = engine.add("long", prompt(2, LONG_BLOCKS))
    engine.there |= {bytes(one) for one in long.block_hashes[:2]}
    for _ in range(5):
        engine.step()
    engine.held = set()
    engine.end([hit], 3)
    assert long.num_computed_tokens <= 2 * BLOCK_TOKENS + STEP_TOKENS
    engine.end([long], 40)
    assert engine.loaded == ["hit", "long"]
