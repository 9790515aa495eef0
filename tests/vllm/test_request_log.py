"""What the connector reports of each request: why it hit or missed."""

from __future__ import annotations

from kvoffd_client.vllm.connector_metadata import FailedJob
from kvoffd_proto.messages import Outcome, RequestReport
from tests.vllm.manager_harness import CHUNK_TOKENS, HASHES, ManagerHarness
from tests.vllm.vllm_fakes import block_hash


def told(harness: ManagerHarness, tokens: int = 0, name: str = "r") -> RequestReport:
    """What is reported of a request that is scheduled now, and a step later."""
    before = len(harness.client.noted)
    harness.manager.scheduled(harness.requests[name], tokens)
    harness.manager.step_begins([1000], new_requests=True)
    assert len(harness.client.noted) == before, "not before a first token"
    harness.manager.step_begins([1])
    (report,) = harness.client.noted[before:]
    assert report.request == name
    return report


def found(report: RequestReport) -> tuple[int, int, int, int]:
    return report.keys, report.found_pool, report.found_disk, report.found_shared


def test_a_miss_names_its_first_key_whatever_is_behind_it() -> None:
    harness = ManagerHarness()
    harness.request(ready={block_hash(2)})
    report = told(harness)
    assert (report.outcome, found(report), report.missing_key) == (Outcome.MISSED, (3, 1, 0, 0), block_hash(1))


def test_a_prompt_that_is_shorter_than_a_block_says_so() -> None:
    harness = ManagerHarness()
    harness.new(hashes=0)
    report = told(harness)
    assert (report.outcome, found(report), report.tokens) == (Outcome.SHORT, (0, 0, 0, 0), 1)


def test_what_a_tier_does_not_bring_in_time_is_late() -> None:
    harness = ManagerHarness(disk_wait_s=0.0)
    harness.request()
    harness.client.answer({block_hash(1)}, coming={block_hash(2)}, shared={block_hash(3)})
    harness.scan()
    report = told(harness, CHUNK_TOKENS)
    assert found(report) == (3, 1, 1, 1)
    assert (report.missing_key, report.reason) == (block_hash(2), "tier_late")


def test_an_answer_that_nobody_waits_for_since_the_engine_has_all_is_not_late() -> None:
    harness = ManagerHarness()
    harness.request()
    harness.manager.prepare_scan(harness.requests["r"], 3 * CHUNK_TOKENS, has_all=True)
    report = told(harness)
    assert (report.outcome, report.keys) == (Outcome.HELD, 0)


def test_a_request_that_may_not_be_looked_up_is_unused() -> None:
    harness = ManagerHarness()
    harness.new()
    harness.manager._requests["r"].disabled = True
    assert told(harness).outcome is Outcome.UNUSED
    harness.client.ready = False
    harness.request("away")
    assert told(harness, name="away").outcome is Outcome.UNUSED


def test_a_load_that_fails_is_told_of_too_and_a_preemption_is_not() -> None:
    harness = ManagerHarness()
    harness.request(ready=HASHES)
    assert told(harness, 3000).outcome is Outcome.LOADED
    harness.manager._job_failed(FailedJob(None, request_id="r"))
    harness.manager.step_begins([1])
    assert [one.outcome for one in harness.client.noted] == [Outcome.LOADED, Outcome.FAILED]
    harness.manager.scheduled(harness.requests["r"], 0)
    harness.manager.step_begins([1])
    assert len(harness.client.noted) == 2


def test_last_request_of_an_engine_that_makes_no_more_steps_is_told_of() -> None:
    harness = ManagerHarness()
    context = harness.request(ready={block_hash(1)})
    harness.manager.scheduled(harness.requests["r"], CHUNK_TOKENS)
    harness.manager.on_request_finished(context)
    assert [(one.request, one.tokens, one.found_pool) for one in harness.client.noted] == [("r", 3001, 1)]
