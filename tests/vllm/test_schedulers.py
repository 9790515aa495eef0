"""What vLLM's own schedulers make of requests and steps that they would misread without the connector."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from kvoffd_client import NamespaceSpec
from kvoffd_client.vllm.compat import HAS_DEFECTS_OF_0_32
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.kit.clock import Clock
from tests.kit.models import make_draft
from tests.vllm.scheduler_harness import SchedulerHarness
from tests.vllm.vllm_config import HEADS, cache_config, full_attention, make_config, recurrent_state
from tests.vllm.vllm_fakes import FakeSchedulerClient, block_hash

BLOCK_TOKENS = 32
BLOCKS = 30
PROMPT_TOKENS = 100
STEPS = 9


@pytest.fixture
def client() -> Any:
    """The daemon, which has nothing unless a test answers."""
    return FakeSchedulerClient(Clock())


@pytest.fixture
def connector(model: Path, tmp_path: Path, client: Any) -> Iterator[KvoffdConnector]:
    """A scheduler's connector that stores whatever is offered and looks nothing up."""
    config = make_config(model, {"directory": str(tmp_path)})
    built = KvoffdConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    built._manager.lookups.enabled = False
    namespace = built._manager.namespace
    namespace.client, namespace.current = client, NamespaceSpec.named("model")
    yield built
    built.shutdown()


def new_request(connector: KvoffdConnector, blocks: list[int], params: dict[str, Any] | None = None) -> Any:
    """A request of 100 tokens that has these blocks, and of which nothing was computed."""
    request = Request("r", list(range(PROMPT_TOKENS)), SamplingParams(max_tokens=4), None)
    request.kv_transfer_params = params
    request.block_hashes = [block_hash(number) for number in range(PROMPT_TOKENS // BLOCK_TOKENS)]
    connector.on_new_request(request)
    for group in connector.connector_scheduler._req_status["r"].group_states:
        group.block_ids.extend(blocks)
    return request


def stored_blocks(connector: KvoffdConnector, request: Any, status: RequestStatus) -> list[int]:
    """The blocks that are stored when the request ends so."""
    request.status = status
    connector.request_finished_all_groups(request, ([],))
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"r"}
    jobs = connector.build_connector_meta(output).store_jobs
    return [int(block) for job in jobs.values() for block in job.src_spec.block_ids]


@pytest.mark.parametrize(
    ("computed", "status", "stored"),
    [
        pytest.param(PROMPT_TOKENS, RequestStatus.FINISHED_LENGTH_CAPPED, [5, 6, 7], id="whole"),
        pytest.param(PROMPT_TOKENS, RequestStatus.FINISHED_ERROR, [5, 6, 7], id="error-after-the-prompt"),
        pytest.param(50, RequestStatus.FINISHED_ERROR, [5], id="error-inside-the-prompt"),
        pytest.param(50, RequestStatus.FINISHED_ABORTED, [5], id="aborted"),
        # As with asynchronous scheduling, when the last token comes after the request has lost its blocks.
        pytest.param(0, RequestStatus.FINISHED_LENGTH_CAPPED, [], id="preempted"),
    ],
)
def test_of_a_request_that_ends_no_block_is_stored_that_it_has_not_computed(
    connector: KvoffdConnector, computed: int, status: RequestStatus, stored: list[int]
) -> None:
    request = new_request(connector, [5, 6, 7, 8])
    request.num_computed_tokens = computed
    assert stored_blocks(connector, request, status) == stored


def test_a_store_ends_before_another_connector_loads_into_its_blocks(connector: KvoffdConnector) -> None:
    request = new_request(connector, [5, 6, 7, 8])
    request.num_computed_tokens = PROMPT_TOKENS
    assert stored_blocks(connector, request, RequestStatus.FINISHED_LENGTH_CAPPED) == [5, 6, 7]
    # As MultiConnector tells of a request that its other child loads: it is in no step before its load has ended.
    other = Request("other", [1], SamplingParams(max_tokens=4), None)
    connector.on_new_request(other)
    blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in (9, 6)],))
    connector.update_state_after_alloc(other, blocks, 0)
    (store,) = connector.connector_scheduler._jobs
    assert connector.build_connector_meta(SchedulerOutput.make_empty()).jobs_to_flush == {store}


def test_an_engine_that_has_all_of_a_prompt_loads_no_last_block(connector: KvoffdConnector, client: Any) -> None:
    connector._manager.lookups.enabled = True
    request = new_request(connector, [])
    request._all_token_ids = request._all_token_ids[:96]
    assert connector.get_num_new_matched_tokens(request, 64) == (0, False), "it waits for no answer"
    assert connector.get_num_new_matched_tokens(request, 32) == (None, False)
    client.answer(set(request.block_hashes))
    connector.build_connector_meta(SchedulerOutput.make_empty())
    assert connector.get_num_new_matched_tokens(request, 32) == (64, True)
    assert connector.get_num_new_matched_tokens(request, 64) == (0, False), "it computes a token anyway"


def test_an_engine_with_eagle_that_has_all_it_uses_loads_no_block_that_it_dropped(model: Path, tmp_path: Path) -> None:
    drafting = {
        "method": "eagle",
        "model": str(make_draft(tmp_path / "draft", eagle=True)),
        "num_speculative_tokens": 3,
    }
    engine = SchedulerHarness(make_config(model, {"directory": str(tmp_path)}, speculative_config=drafting), BLOCKS)

    def computed(name: str) -> int:
        request = engine.add(name, list(range(PROMPT_TOKENS)))
        tokens = sum(engine.step().num_scheduled_tokens.get(name, 0) for _ in range(STEPS))
        assert request.is_finished()
        engine.there |= {bytes(one) for one in request.block_hashes}
        return tokens

    assert [computed("first"), computed("own")] == [PROMPT_TOKENS, PROMPT_TOKENS - 64]
    assert engine.loaded == []
    assert engine.scheduler.reset_prefix_cache()
    assert computed("loaded") == PROMPT_TOKENS - 96
    assert engine.loaded == ["loaded"]
    engine.close()


def test_a_request_preempted_by_a_reset_may_be_loaded_next(connector: KvoffdConnector, client: Any) -> None:
    connector._manager.lookups.enabled = True
    request = new_request(connector, [])
    client.answer(set(request.block_hashes))
    assert connector.get_num_new_matched_tokens(request, 0) == (96, True)
    blocks = [KVCacheBlock(block_id) for block_id in (5, 6, 7)]
    connector.update_state_after_alloc(request, KVCacheBlocks((blocks,)), 96)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {"r", "other"}
    meta = connector.build_connector_meta(output)
    assert (len(meta.load_jobs), meta.jobs_to_flush) == (1, set())
    assert output.preempted_req_ids == {"r", "other"}


@pytest.mark.parametrize(("limit", "stored"), [(None, [5]), (16, [5]), (15, []), (0, [])])
def test_a_state_inside_a_block_beyond_what_may_be_stored_ends_no_engine(
    connector: KvoffdConnector, limit: int | None, stored: list[int]
) -> None:
    new_request(connector, [5, 6, 7, 8], {} if limit is None else {"max_offload_tokens": limit})
    scheduler = connector.connector_scheduler
    scheduler.config = scheduler.config._replace(supports_partial_tail=True, tokens_per_hash=16)
    scheduler._partial_tail_block_size = BLOCK_TOKENS
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(set(), lambda _: ([],), {"r": [(0, 9, 16)]})
    jobs = connector.build_connector_meta(output).store_jobs
    assert [int(block) for job in jobs.values() for block in job.src_spec.block_ids] == stored


def test_a_session_s_next_part_stores_its_own_blocks(connector: KvoffdConnector) -> None:
    request = new_request(connector, [5, 6, 7, 8])
    connector.connector_scheduler._req_status["r"].group_states[0].next_stored_chunk_idx = 3
    request.num_computed_tokens = PROMPT_TOKENS
    request.append_output_token_ids(list(range(92)))
    request.num_prompt_tokens = 192
    request.block_hashes += [block_hash(number) for number in range(3, 6)]
    output = SchedulerOutput.make_empty()
    next_part = NewRequestData.from_request(request, ([5, 6, 7, 8, 9, 10],))
    output.scheduled_new_reqs, output.num_scheduled_tokens = [next_part], {"r": 92}
    assert connector.build_connector_meta(output).store_jobs == {}, "not before its first token"
    request.num_computed_tokens += 92
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"r": 1}
    jobs = connector.build_connector_meta(output).store_jobs
    assert [int(block) for job in jobs.values() for block in job.src_spec.block_ids] == [8, 9, 10]


@pytest.mark.parametrize("is_forgotten_by_vllm", [True, *([False] if HAS_DEFECTS_OF_0_32 else [])])
def test_a_request_that_resumes_under_the_second_runner_has_its_new_blocks_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forgotten_by_vllm: bool
) -> None:
    """vLLM's own scheduler makes a new request of it there, and the offloading scheduler would store its old blocks.

    0.32 forgets them only where it asks whether the request can be loaded; ``forget_streamed_blocks`` does in any case.
    """
    config = make_config(model, {"directory": str(tmp_path)})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine = SchedulerHarness(config, 10)
    half = engine.connector.connector_scheduler
    known, ask = half._req_status, half.get_num_new_matched_tokens

    def ask_and_keep(request: Request, *given: Any, **named: Any) -> Any:
        (group,) = known[request.request_id].group_states
        kept = list(group.block_ids)
        found = ask(request, *given, **named)
        group.block_ids[:] = kept
        return found

    if not is_forgotten_by_vllm:
        half.get_num_new_matched_tokens = ask_and_keep
    resumed = list[bool]()

    def work(output: SchedulerOutput, meta: Any) -> set[int]:
        for name in output.num_scheduled_tokens:
            assert known[name].group_states[0].block_ids == engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
        resumed.extend(engine.scheduler.requests[one.req_id].num_preemptions > 0 for one in output.scheduled_new_reqs)
        return set(meta.store_jobs)

    monkeypatch.setattr(engine, "work", work)
    engine.end([engine.add(str(seed), [seed] * PROMPT_TOKENS, max_tokens=100) for seed in (1, 2)], 500)
    assert any(resumed)
    engine.close()


def test_a_cache_is_reset_twice_without_a_step_between(connector: KvoffdConnector) -> None:
    request = new_request(connector, [5, 6, 7, 8])
    request.num_computed_tokens = PROMPT_TOKENS
    stored_blocks(connector, request, RequestStatus.FINISHED_LENGTH_CAPPED)
    (store,) = connector.connector_scheduler._jobs
    assert connector.reset_cache()
    assert connector.reset_cache()
    assert connector.build_connector_meta(SchedulerOutput.make_empty()).jobs_to_flush == {store}


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        *itertools.product(["full", "window", "chunks"], [3, 40, 100]),
        # With more vLLM itself may find no blocks for such a prompt when it comes a second time.
        *itertools.product(["state", "states"], [0, 3]),
    ],
)
def test_each_prompt_that_fits_is_computed_though_drafts_need_blocks_beside_a_load(
    kind: str, drafts: int, model: Path, tmp_path: Path
) -> None:
    """An engine that runs nothing else, with a daemon that has all prompts whole."""
    state = recurrent_state(num_speculative_blocks=drafts)
    more = {
        "full": [],
        "window": [SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=100, **HEADS)],
        "chunks": [ChunkedLocalAttentionSpec(block_size=BLOCK_TOKENS, attention_chunk_size=128, **HEADS)],
        "state": [state],
        "states": [state] * 2,
    }
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate([full_attention(), *more[kind]])]
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4}
    arguments: dict[str, Any] = {"speculative_config": speculation if drafts else None, "max_model_len": 1024}
    if "state" in kind:
        arguments["mamba_cache_mode"] = "align"
    config = make_config(model, {"directory": str(tmp_path)}, **arguments)
    blocks = BLOCKS + (len(groups) - 1) * (drafts + 1 if "state" in kind else 0)
    engine = SchedulerHarness(config, blocks, *groups)

    def is_computed(name: str, prompt: list[int], *, there: bool) -> bool:
        request = engine.add(name, prompt)
        engine.there = set(request.block_hashes) if there else set()
        for _ in range(STEPS):
            if not request.is_finished():
                engine.step()
        computed = request.is_finished()
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engine.step()
        assert engine.scheduler.reset_prefix_cache()
        return bool(computed)

    for tokens in range(BLOCK_TOKENS - 1, BLOCKS * BLOCK_TOKENS, 11):
        prompt = Random(tokens).choices(range(1000), k=tokens)
        alone = is_computed(f"{tokens} alone", prompt, there=False)
        assert is_computed(f"{tokens} there", prompt, there=True) or not alone, tokens
    assert len(engine.loaded) > 11
    engine.close()


def test_a_router_that_forgot_the_daemons_blocks_at_a_reset_hears_of_them_again(model: Path, tmp_path: Path) -> None:
    """The reset comes between the last step that was scheduled and its end, as with several batches in flight."""
    config = make_config(model, {"directory": str(tmp_path)}, max_model_len=1024)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = SchedulerHarness(config, BLOCKS, KVCacheGroupSpec(["layer"], full_attention()))
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    prompt = Random(1).choices(range(1000), k=8 * BLOCK_TOKENS + 1)
    request = engine.add("computed", prompt)
    engine.end([request], 10)
    engine.there |= {bytes(one) for one in request.block_hashes}
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    published.clear()
    work = engine.work
    for name in ("found", "found again"):
        engine.end([engine.add(name, prompt)], 10)
        known = [event for event in published if isinstance(event, BlockStored) and event.medium == "CPU"]
        assert sum(len(event.block_hashes) for event in known) == 8, name
        engine.work = lambda *step: (engine.scheduler.reset_prefix_cache(), work(*step))[1]  # type: ignore[method-assign]
        engine.step()
        engine.work = work  # type: ignore[method-assign]
        assert any(isinstance(event, AllBlocksCleared) for event in published)
        published.clear()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_router_finds_the_daemons_blocks_by_the_engines_hashes(
    blocks_per_chunk: int, ranks: int, model: Path, tmp_path: Path
) -> None:
    """With decode context parallelism each rank has its tokens of a block, and the block those of all ranks."""
    block_tokens = ranks * BLOCK_TOKENS
    config = make_config(model, {"directory": str(tmp_path), "blocks_per_chunk": blocks_per_chunk}, max_model_len=1024)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.parallel_config.decode_context_parallel_size = config.parallel_config.world_size = ranks
    engine = SchedulerHarness(config, BLOCKS, KVCacheGroupSpec(["layer"], full_attention()), hash_tokens=block_tokens)
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    prompt = Random(1).choices(range(1000), k=8 * BLOCK_TOKENS + 1)
    for name in ("computed", "loaded"):
        request = engine.add(name, prompt)
        engine.end([request], 10)
        engine.there |= {bytes(one) for one in request.block_hashes}
        assert engine.scheduler.reset_prefix_cache()
        engine.step()
    stored = [event for event in published if isinstance(event, BlockStored)]
    found: dict[str, list[Any]] = {"GPU": [], "CPU": []}
    for event in stored:
        assert event.block_size == block_tokens
        found[event.medium] += event.block_hashes
    assert (engine.loaded, engine.cached) == (["loaded"], {"computed": 0, "loaded": 8 * BLOCK_TOKENS})
    assert found["CPU"] == found["GPU"][: 8 // ranks]
    engine.close()
