"""The scheduler's half over a fake client."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvoffd_client
from kvoffd_client.vllm.connector_metadata import NO_LEASE, ChunkGroup, FailedJob, WorkerReport
from kvoffd_client.vllm.metrics import (
    CONNECTED,
    DEFERRED_STORES,
    DEFINITIONS,
    FAILED_LOADS,
    LATE_LOOKUPS,
    LOAD_RATE,
    LOOKUPS,
    PREFILL_RATE,
)
from kvoffd_proto.errors import ErrorCode
from tests.vllm.manager_harness import HASHES, KEYS, ManagerHarness
from tests.vllm.vllm_fakes import block_hash, key


def test_blocks_that_come_up_from_disk_put_the_request_off_and_count_as_hits_of_the_disk() -> None:
    harness = ManagerHarness()
    context = harness.request()
    harness.client.answer({block_hash(1)}, coming={block_hash(2), block_hash(3)})
    harness.scan()
    assert harness.results(context) == [LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.HIT_PENDING]
    assert not harness.manager.has_pending_work(), "a pause would wait for it, and the request for the pause's end"
    harness.clock.now += 0.1
    harness.scan()
    harness.client.answer(HASHES)
    harness.scan()
    assert harness.results(context) == [LookupResult.HIT] * 3
    sources = [harness.manager.get_load_source(item, context) for item in KEYS]
    assert sources == [CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.DISK]


def test_a_late_answer_is_a_miss_and_counted_once() -> None:
    harness = ManagerHarness()
    context = harness.request()
    harness.clock.now += 1
    for _ in range(2):
        harness.scan()
        assert harness.results(context) == [LookupResult.MISS] * 3
    stats = harness.manager.get_stats()
    assert stats.reduce()[LATE_LOOKUPS] == 1
    harness.manager.on_request_finished(context)
    assert harness.client.unused == ["late"], "operators see it among the misses"


def test_a_load_carries_keys_and_lease_and_gives_the_lease_back_when_done() -> None:
    harness = ManagerHarness()
    context = harness.request(ready=HASHES)
    lease_id = harness.client.asked[0][0].lease_id
    spec = harness.manager.prepare_load(KEYS[1:], context)
    assert spec.groups == (block_hash(2) + block_hash(3),)
    assert spec.lease_id == lease_id
    harness.manager.on_request_finished(context)
    assert harness.client.released == []  # the load still runs
    harness.manager.complete_load(KEYS[1:], context)
    harness.manager.complete_load(KEYS[1:], context)
    assert harness.client.released == [lease_id]


def test_a_request_that_runs_or_ends_without_a_load_gives_its_lease_back() -> None:
    harness = ManagerHarness()
    harness.request("runs", ready=HASHES)
    harness.manager.scheduled(harness.requests["runs"], 0)
    for _ in range(2):
        harness.manager.step_begins(())
    ends = harness.request("ends", ready=HASHES)
    harness.manager.on_request_finished(ends)
    assert harness.client.released == [ticket.lease_id for ticket, _ in harness.client.asked]


def test_a_failed_load_bars_the_request_and_forgets_unusable_blocks_in_the_daemon() -> None:
    unusable = {ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM}
    for code in (*ErrorCode, None):
        harness = ManagerHarness()
        context = harness.request(ready=HASHES)
        harness.manager.prepare_load(KEYS, context)
        harness.manager._job_failed(FailedJob(code, ((0, block_hash(2)),), "r"))
        harness.scan()
        assert harness.results(context) == [LookupResult.MISS] * 3
        forgotten = [(item.group, item.keys) for item in harness.client.invalidated]
        assert forgotten == ([(0, block_hash(2))] if code in unusable else []), code
        assert harness.manager.get_stats().reduce()[FAILED_LOADS] == 1


def test_a_load_without_an_answer_fails_in_the_worker_and_not_in_vllms_scheduler() -> None:
    harness = ManagerHarness()
    for context in (harness.new(), ReqContext("unknown")):
        spec = harness.manager.prepare_load(KEYS, context)
        assert (spec.lease_id, spec.request_id) == (NO_LEASE, context.req_id)


def test_the_end_of_a_steps_output_ends_the_step() -> None:
    """vLLM asks for events once for each step's output, and for nothing else."""
    harness = ManagerHarness()
    for _ in range(2):  # the first is taken for one in which the engine compiles
        harness.manager.step_begins([1024])
        harness.clock.now += 0.5
        harness.manager.take_events()
    assert harness.prefill.tokens_per_second == 2048


def test_stores_leave_out_what_the_daemon_has_and_what_is_on_its_way() -> None:
    harness = ManagerHarness()
    first = harness.request("first", ready={block_hash(1)})
    output = harness.manager.prepare_store(KEYS, first)
    assert output.keys_to_store == KEYS[1:]
    assert output.store_spec.groups == (block_hash(2) + block_hash(3),)
    second = harness.request("second", ready={block_hash(1)})
    assert harness.manager.prepare_store(KEYS, second).keys_to_store == []
    harness.manager.complete_store(set(KEYS[1:]), first)
    assert harness.manager.prepare_store(KEYS, second).keys_to_store == KEYS[1:]


def test_beyond_the_credit_a_store_is_put_off_and_counted() -> None:
    harness = ManagerHarness()
    context = harness.request(ready=set())
    harness.manager.workers_report(WorkerReport(credit_bytes=1500))
    assert harness.manager.prepare_store(KEYS[:2], context).keys_to_store == KEYS[:2]
    assert harness.manager.prepare_store(KEYS[2:], context) is None
    assert harness.manager.get_stats().reduce()[DEFERRED_STORES] == 1
    harness.manager.complete_store(set(KEYS[:2]), context)
    assert harness.manager.prepare_store(KEYS[2:], context).keys_to_store == KEYS[2:]


def test_store_credit_counts_what_each_group_has() -> None:
    """A hybrid model's windows are smaller than its full attention."""
    harness = ManagerHarness((ChunkGroup(0, 1, 1000), ChunkGroup(7, 1, 1000)))
    harness.manager.begin_engine(shard_bytes=[1000, 10], most_running=1, largest_chunk=256)
    context = harness.request(ready=set())
    windows = [key(number, group_id=7) for number in (1, 2)]
    for one in windows:
        context.set_offload_key_position(one, 1000)
    harness.manager.workers_report(WorkerReport(credit_bytes=30))
    assert harness.manager.prepare_store(windows, context).keys_to_store == windows
    assert harness.manager.prepare_store(KEYS[:1], context).keys_to_store == KEYS[:1]
    assert harness.manager.prepare_store(KEYS[1:], context) is None
    harness.manager.complete_store(KEYS[:1], context)
    assert harness.manager.prepare_store(KEYS[1:], context).keys_to_store == KEYS[1:]


def test_a_request_that_has_ended_may_pass_the_credit_to_twice_of_it() -> None:
    """vLLM does not offer the end of its prompt again; beyond that the daemon refuses stores."""
    for credit, stored in ((1000, KEYS[2:]), (500, None)):
        harness = ManagerHarness()
        context = harness.request(ready=set())
        harness.manager.workers_report(WorkerReport(credit_bytes=credit))
        assert harness.manager.prepare_store(KEYS[:1], context).keys_to_store == KEYS[:1]
        assert harness.manager.prepare_store(KEYS[2:], context) is None
        request = harness.requests["r"]
        request.is_finished, request.num_computed_tokens = (lambda: True), request.num_tokens
        output = harness.manager.prepare_store(KEYS[2:], context)
        assert (output and output.keys_to_store) == stored


def test_while_the_daemon_is_down_nothing_is_offered_and_vllm_goes_on() -> None:
    harness = ManagerHarness()
    harness.client.ready = False
    context = harness.request("first")
    harness.scan("first")
    assert harness.results(context) == [LookupResult.RETRY] * 3, "it has just begun to connect"
    harness.manager.on_request_finished(context)
    harness.clock.now += 0.2
    context = harness.request()
    harness.scan()
    assert harness.manager.prepare_store(KEYS, context).keys_to_store == []
    assert harness.results(context) == [LookupResult.MISS] * 3
    assert not harness.manager.has_pending_work()


def test_workers_whose_memory_cannot_be_shared_turn_the_manager_off_until_it_can() -> None:
    harness = ManagerHarness()
    context = harness.request(ready=HASHES)
    harness.report("weights", usable=False)
    harness.scan()
    assert harness.results(context) == [LookupResult.MISS] * 3
    assert stored(harness, context) == []
    harness.report("weights")
    harness.scan()
    assert harness.results(context) == [LookupResult.HIT] * 3


def test_after_a_reset_nothing_is_believed_or_stored_until_the_weights_are_named() -> None:
    harness = ManagerHarness()
    context = harness.request(ready={block_hash(1)})
    lease_id = harness.client.asked[0][0].lease_id
    harness.manager.namespace.leave(engine_cache_kept=False)
    harness.manager.reset_cache()
    assert harness.client.released == [lease_id]
    assert not harness.manager.has_pending_work(), "nobody wants anything yet"
    harness.scan()
    assert harness.results(context) == [LookupResult.MISS] * 3
    harness.manager.namespace.ask()
    harness.scan()
    assert harness.results(context) == [LookupResult.RETRY] * 3
    assert harness.manager.prepare_store(KEYS, context) is None, "vLLM offers it again"
    assert harness.manager.has_pending_work()
    harness.report("weights")
    stored = harness.manager.prepare_store(KEYS, context)
    assert stored is not None
    assert stored.keys_to_store == KEYS
    harness.scan()
    harness.client.answer({block_hash(1)})
    harness.scan()
    assert harness.results(context)[0] is LookupResult.HIT


def test_blocks_that_other_weights_may_have_computed_are_not_stored() -> None:
    harness = ManagerHarness()
    context = harness.request(ready=set())
    harness.manager.namespace.leave(engine_cache_kept=True)
    harness.report("other weights")
    stored = harness.manager.prepare_store(KEYS, context)
    assert stored is not None
    assert stored.keys_to_store == []


def test_a_producer_only_stores_and_a_consumer_only_loads() -> None:
    producer = ManagerHarness()
    producer.manager.loads = False
    context = producer.request()
    assert producer.client.asked == []
    assert producer.results(context) == [LookupResult.MISS] * 3
    stored = producer.manager.prepare_store(KEYS, context)
    assert stored is not None
    assert stored.keys_to_store == KEYS
    consumer = ManagerHarness()
    consumer.manager.stores = False
    context = consumer.request(ready=HASHES)
    assert consumer.results(context) == [LookupResult.HIT] * 3
    stored = consumer.manager.prepare_store([key(9)], context)
    assert stored is not None
    assert stored.keys_to_store == []


def test_every_metric_is_declared_and_the_gauge_follows_the_connection() -> None:
    harness = ManagerHarness()
    harness.request(ready=HASHES)
    first = harness.manager.get_stats().reduce()
    assert first == {LOOKUPS: 1, CONNECTED: 1, PREFILL_RATE: 0.0, LOAD_RATE: 0.0}
    assert set(first) <= set(DEFINITIONS)
    assert harness.manager.get_stats() is None
    harness.client.ready = False
    assert harness.manager.get_stats().reduce() == {CONNECTED: 0, PREFILL_RATE: 0.0, LOAD_RATE: 0.0}


def test_what_an_answer_that_is_about_to_come_may_have_is_not_stored_yet() -> None:
    harness = ManagerHarness()
    context = harness.request()
    harness.manager.scheduled(harness.requests["r"], 0)
    assert harness.manager.prepare_store(KEYS, context) is None, "vLLM offers it again in the next step"
    harness.client.answer({block_hash(1)})
    assert list(store(harness, context)) == KEYS[1:]


def test_a_store_waits_for_no_late_answer_and_that_of_a_request_that_ends_for_none() -> None:
    harness = ManagerHarness()
    context = harness.request()
    ends = harness.request("ends")
    request = harness.requests["ends"]
    request.is_finished, request.num_computed_tokens = lambda: True, 2500
    assert list(store(harness, ends)) == KEYS[:2], "no more than it has computed"
    harness.manager.complete_store(KEYS, ends)
    harness.clock.now += 0.11
    assert list(store(harness, context)) == KEYS


def test_the_end_of_a_prompt_inside_a_chunk_is_neither_looked_up_nor_stored() -> None:
    harness = ManagerHarness()
    context = harness.request(ready=HASHES)
    tail = key(9)
    context.set_offload_key_position(tail, 2500)
    assert harness.results(context, [tail]) == [LookupResult.MISS]
    stored = harness.manager.prepare_store([tail], context)
    assert stored is not None
    assert list(stored.keys_to_store) == []


@pytest.mark.parametrize(("tiers", "waits"), [(None, True), ([{"medium": "STORAGE"}], True), ([], False)])
def test_a_request_that_wants_nothing_from_disk_does_not_wait_for_it(tiers: object, waits: bool) -> None:
    harness = ManagerHarness()
    params = {} if tiers is None else {"kv_load_tiers": tiers}
    context = _create_req_context(cast(Any, SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None)))
    harness.manager.on_new_request(context)
    harness.begin(context)
    harness.scan()
    harness.client.answer({block_hash(1)}, coming=[block_hash(2)])
    harness.scan()
    found = harness.results(context)
    assert found[0] is LookupResult.HIT
    assert found[1] is (LookupResult.HIT_PENDING if waits else LookupResult.MISS)


def store(harness: ManagerHarness, context: ReqContext) -> Collection[OffloadKey]:
    output = harness.manager.prepare_store(KEYS, context)
    assert output is not None
    return output.keys_to_store


def stored(harness: ManagerHarness, context: ReqContext) -> Collection[OffloadKey]:
    """What is stored of a request, by a store that has ended."""
    keys = store(harness, context)
    harness.manager.complete_store(keys, context)
    return keys


def test_requests_of_an_adapter_that_is_not_known_use_nothing_nor_do_others_with_its_id() -> None:
    """vLLM may compute them with either."""
    harness = ManagerHarness()
    first, second, other, plain = (harness.request(name, set()) for name in ("first", "second", "other", "plain"))
    harness.manager.begin_adapter("first", b"one", 1)
    harness.manager.begin_adapter("other", b"one", 2)
    assert stored(harness, first) == KEYS
    harness.manager.begin_adapter("second", None, 1)
    harness.scan("second")
    assert [stored(harness, context) for context in (first, second)] == [[], []]
    assert harness.results(second) == [LookupResult.MISS] * 3
    assert [stored(harness, context) for context in (other, plain)] == [KEYS, KEYS]


def test_requests_with_an_adapter_that_began_before_weights_changed_use_nothing_after_it() -> None:
    harness = ManagerHarness()
    before, plain = harness.request("before", set()), harness.request("plain", set())
    harness.manager.begin_adapter("before", b"one", 1)
    harness.manager.namespace.leave(engine_cache_kept=True)
    harness.report("weights")
    after = harness.request("after", set())
    harness.manager.begin_adapter("after", b"one", 1)
    assert [stored(harness, context) for context in (before, plain, after)] == [[], KEYS, KEYS]


def test_metrics_are_on_the_page_with_their_meaning() -> None:
    page = Path(kvoffd_client.__file__).parents[1] / "README.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `vllm:")]
    assert lines == [f"| `{name}` | {metric.documentation} |" for name, metric in DEFINITIONS.items()]
