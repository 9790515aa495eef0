"""What is known of one request: answers, deadlines, refreshes, leases."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvoffd_client.vllm.connector_metadata import ChunkGroup, FailedJob
from tests.vllm.manager_harness import CHUNK_TOKENS, HASHES, KEYS, ManagerHarness
from tests.vllm.vllm_fakes import block_hash, key

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY


class Harness(ManagerHarness):
    """One request that is looked up."""

    def __init__(self, do_no_harm: bool = True, disk_wait_s: float = 1.0) -> None:
        super().__init__(do_no_harm=do_no_harm, disk_wait_s=disk_wait_s)
        self.context = self.request()

    def statuses(self, *numbers: int) -> list[LookupResult]:
        return self.results(self.context, [key(number) for number in numbers])

    def answered(self, ready: set[bytes]) -> Harness:
        self.client.answer(ready)
        self.scan()
        return self


def test_one_lookup_asks_for_all_groups_with_positions_as_groups_on_the_wire() -> None:
    harness = ManagerHarness((ChunkGroup(0, 1, CHUNK_TOKENS), ChunkGroup(7, 3, 3000)))
    context = harness.request()
    [(_, message)] = harness.client.asked
    hashes = block_hash(1) + block_hash(2) + block_hash(3)
    assert [(group.group, group.keys) for group in message] == [(0, hashes), (1, block_hash(3))]
    harness.client.answer({block_hash(3)})
    harness.scan()
    assert harness.results(context, [key(2), key(3), key(3, group_id=7)]) == [MISS, HIT, HIT]


def test_an_answer_is_awaited_no_longer_than_computing_takes() -> None:
    harness = Harness()
    harness.prefill.tokens_per_second = 1000.0
    computed = harness.requests["r"].num_tokens - 64
    harness.clock.now += 0.063
    harness.scan(computed=computed)
    assert harness.statuses(1) == [RETRY]
    harness.clock.now += 0.002
    harness.scan(computed=computed)
    assert harness.statuses(1) == [MISS]


@pytest.mark.parametrize("do_no_harm", [True, False])
def test_prompts_that_are_computed_faster_than_the_daemon_answers_do_not_wait(do_no_harm: bool) -> None:
    """Longer ones do, and so do all where it answers faster again: also what nobody waited for is timed."""
    harness = ManagerHarness(do_no_harm=do_no_harm)
    harness.prefill.tokens_per_second = 1000.0

    def waits(name: str, tokens: int, after_s: float) -> bool:
        context = harness.request(name)
        harness.clock.now += after_s
        harness.scan(name, computed=harness.requests[name].num_tokens - tokens)
        return harness.results(context) == [RETRY] * 3

    assert waits("first", 30, 0.02)
    assert waits("late", 30, 0.04) is not do_no_harm
    assert waits("short", 30, 0.001) is not do_no_harm, "the late one was given up after 40 ms"
    assert waits("long", 80, 0.001)
    harness.client.answer(set(), index=2)
    harness.manager.on_request_finished(ReqContext("short"))
    assert waits("next", 30, 0.001), "the short one's answer took 2 ms"


def test_a_failed_lookup_is_a_miss_and_not_repeated_at_once() -> None:
    harness = Harness()
    harness.client.fail()
    assert not harness.scan()
    assert harness.statuses(1) == [MISS]
    harness.clock.now += 1.1
    assert harness.scan()


def test_an_answer_with_misses_is_refreshed_when_it_is_old_and_the_lease_is_kept_until_then() -> None:
    harness = Harness().answered({block_hash(1)})
    harness.clock.now += 1.5
    assert harness.scan()
    assert harness.statuses(1, 2) == [HIT, RETRY]
    assert harness.client.released == []
    harness.answered(HASHES)
    assert harness.statuses(1, 2, 3) == [HIT] * 3
    assert harness.client.released == [harness.client.asked[0][0].lease_id]
    harness.clock.now += 100
    assert not harness.scan(), "a complete one is not refreshed"


def test_a_lease_that_died_is_looked_up_again_and_not_loaded_from() -> None:
    harness = Harness().answered(HASHES)
    harness.client.asked[0][0].alive = False
    assert harness.scan()
    assert harness.statuses(1) == [RETRY]


def test_after_a_failed_load_a_request_is_never_looked_up_again_and_all_of_it_stored() -> None:
    harness = Harness().answered(HASHES)
    harness.manager._job_failed(FailedJob(None, request_id="r"))
    harness.clock.now += 100
    assert not harness.scan()
    assert harness.statuses(1, 2) == [MISS] * 2
    stored = harness.manager.prepare_store(KEYS, harness.context)
    assert stored is not None
    assert stored.keys_to_store == KEYS


def test_releasing_ends_the_answer_and_the_lookup_on_its_way_whose_answer_still_tells_what_is_stored() -> None:
    harness = Harness().answered({block_hash(1)})
    harness.clock.now += 2
    assert harness.scan()
    harness.manager.scheduled(harness.requests["r"], 0)
    for _ in range(2):
        harness.manager.step_begins(())
    assert sorted(harness.client.released) == [ticket.lease_id for ticket, _ in harness.client.asked]
    assert harness.manager.prepare_store(KEYS, harness.context) is None, "what is stored may have gone since"
    harness.client.answer({block_hash(2)})
    stored = harness.manager.prepare_store(KEYS, harness.context)
    assert stored is not None
    assert stored.keys_to_store == [KEYS[0], KEYS[2]]


class DiskHarness(Harness):
    """With blocks that come up from disk."""

    def ask(self, coming: int, wait_s: float = 0.0) -> None:
        """The last ``coming`` blocks come from disk, the others are ready."""
        self.scan()
        if not self.client.asked[-1][0].done:
            names = [block_hash(number) for number in range(1, 4)]
            self.client.answer(set(names[: 3 - coming]), coming=names[3 - coming :], wait_s=wait_s)
            self.scan()


def test_blocks_on_their_way_from_disk_are_waited_for_and_asked_for_again() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(1, 2, 3) == [HIT, PENDING, PENDING]
    assert harness.client.again == [False]
    harness.clock.now += 0.001
    harness.ask(coming=1)
    assert len(harness.client.asked) == 1, "not in a hurry"
    harness.clock.now += 0.005
    harness.ask(coming=1)
    assert harness.client.again == [False, True]
    assert harness.statuses(1, 2, 3) == [HIT, HIT, PENDING]
    harness.clock.now += 0.005
    harness.ask(coming=0)
    assert harness.statuses(1, 2, 3) == [HIT] * 3
    assert len(harness.client.released) == 2, "each new lease pins what the one before did"


def test_while_blocks_come_from_disk_the_next_answer_has_the_whole_deadline() -> None:
    """Keys that the answer before lacked are asked for again with the others; seconds of computing hang on these."""
    harness = DiskHarness()
    harness.prefill.tokens_per_second = 100_000.0
    harness.client.answer({block_hash(1)}, coming=[block_hash(2)])
    harness.scan()
    assert harness.statuses(1, 2, 3) == [HIT, PENDING, MISS]
    harness.clock.now += 0.005
    assert harness.scan()
    harness.clock.now += 0.09
    harness.prefill.tokens_per_second = 0.0
    harness.manager._requests["r"].disk_wait_until = harness.clock.now + 0.905
    harness.scan()
    assert harness.statuses(1, 2, 3) == [HIT, PENDING, RETRY]
    harness.clock.now += 0.021
    harness.scan()
    assert harness.statuses(3) == [MISS]


@pytest.mark.parametrize(("tokens_per_second", "waits"), [(0.0, True), (6250.0, True), (62500.0, False)])
def test_the_limit_is_no_more_than_computing_takes(tokens_per_second: float, waits: bool) -> None:
    harness = DiskHarness()
    harness.prefill.tokens_per_second = tokens_per_second
    harness.ask(coming=2, wait_s=0.1)  # 2,000 tokens
    assert harness.statuses(2) == [PENDING if waits else MISS]
    harness.clock.now += 0.35
    harness.ask(coming=1)
    assert harness.statuses(3) == [MISS if tokens_per_second else PENDING]


def test_the_limit_ends_the_waiting_for_good() -> None:
    harness = DiskHarness()
    harness.ask(coming=2)
    assert harness.statuses(2) == [PENDING]
    harness.clock.now += 0.6
    harness.ask(coming=1)
    assert harness.statuses(2, 3) == [HIT, PENDING]
    harness.clock.now += 0.6
    harness.scan()
    assert harness.statuses(2, 3) == [HIT, MISS]
    harness.clock.now += 2.0
    harness.ask(coming=1)
    assert harness.statuses(3) == [MISS]
    harness.manager.on_request_finished(harness.context)
    assert harness.client.unused[-1] == "coming", "what comes up now is late"


def test_wait_does_not_wait_for_a_daemon_that_does_not_answer() -> None:
    harness = DiskHarness(do_no_harm=False, disk_wait_s=100.0)
    harness.ask(coming=2)
    harness.clock.now += 0.06
    assert harness.scan()
    harness.clock.now += 0.05
    harness.scan()
    assert harness.statuses(1, 2) == [HIT, PENDING]
    harness.clock.now += 0.06
    harness.scan()
    assert harness.statuses(1, 2) == [HIT, MISS]
    harness.client.fail()
    harness.scan()
    assert harness.statuses(1, 2) == [HIT, MISS]
